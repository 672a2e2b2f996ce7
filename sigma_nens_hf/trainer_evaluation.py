"""What the trainer adds to every evaluation: the ensemble's own metrics, and a look at the labels first."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import EvalPrediction
from transformers.trainer_utils import PredictionOutput

from .labels import IGNORED_LABEL, SINGLE_LABEL, check_labels
from .members import active_config, base_model_of, problem_type_of
from .metrics import accuracy, expected_calibration_error, negative_log_likelihood
from .outputs import ensemble_logits

# Logit of a choice that is none, at any temperature.
_NO_CHOICE = -1e4


def ensemble_metrics(
    user_metrics: Callable | None, model: nn.Module, has_member_logits: bool, prediction: EvalPrediction
) -> dict[str, float]:
    """Return the ensemble's NLL, accuracy and ECE beside what the user's function makes of the same logits."""
    problem_type = problem_type_of(model.config)
    logits = prediction.predictions
    if isinstance(logits, tuple):
        logits = logits[0]
    if has_member_logits and not isinstance(logits, list):
        temperature = active_config(base_model_of(model)).temperature_in_use
        logits = ensemble_logits(torch.as_tensor(members_first(logits)), problem_type, temperature).numpy()
        prediction = EvalPrediction(
            predictions=logits,
            label_ids=prediction.label_ids,
            inputs=prediction.inputs,
            losses=prediction.losses,
        )
    metrics = {}
    labels = prediction.label_ids
    # With `eval_do_concat_batches=False` there are lists of batches, for the user's function alone.
    if problem_type == SINGLE_LABEL and not isinstance(labels, list):
        labels = labels.reshape(-1)
        labelled = labels != IGNORED_LABEL
        if not labelled.any():
            return user_metrics(prediction) if user_metrics is not None else {}
        probabilities = torch.as_tensor(logits).double().softmax(-1).flatten(0, -2)[labelled]
        metrics = {
            "nll": negative_log_likelihood(probabilities, labels[labelled]),
            "accuracy": accuracy(probabilities, labels[labelled]),
            "ece": expected_calibration_error(probabilities, labels[labelled]),
        }
    return metrics | (user_metrics(prediction) if user_metrics is not None else {})


def labelled_logits(
    prediction: PredictionOutput, has_choices: bool, has_member_logits: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ensemble's logits (N, C) of all that has a single label, and the labels (N,).

    Args:
        prediction: The prediction of examples.
        has_choices: Whether the classes are choices, of which examples may have different numbers.
        has_member_logits: Whether the predictions are the members' logits (N, M, ..., C).

    Raises:
        ValueError: The examples have no labels.
    """
    if prediction.label_ids is None:
        raise ValueError("The calibration examples have no labels.")
    predictions, labels = prediction.predictions, torch.as_tensor(prediction.label_ids)
    logits = torch.as_tensor(predictions[0] if isinstance(predictions, tuple) else predictions)
    if has_choices:  # what examples have fewer of has been padded, and is no choice
        logits = logits.masked_fill(logits == IGNORED_LABEL, _NO_CHOICE)
    if has_member_logits:
        logits = ensemble_logits(logits, SINGLE_LABEL)
    labelled = labels != IGNORED_LABEL
    return logits[labelled], labels[labelled]


def members_first(predictions: Any) -> Any:
    """Bring gathered logits into the order of `member_logits`; the trainer gathers tokens and choices before members.

    Args:
        predictions: (N, L, M, C) or (N, C, M); or a list of such batches.
    """
    if isinstance(predictions, list):
        return [members_first(batch) for batch in predictions]
    return predictions.swapaxes(1, 2) if isinstance(predictions, np.ndarray) else predictions


@contextmanager
def temporarily(target: Any, **values: Any) -> Iterator[None]:
    """Give an object's attributes other values for a while.

    Args:
        target: The object.
        **values: The values by name.
    """
    before = {name: getattr(target, name) for name in values}
    vars(target).update(values)
    try:
        yield
    finally:
        vars(target).update(before)


class LabelCheckingCollator:
    """Refuses labels that name no class while the batch is still on the CPU."""

    def __init__(self, collator: Callable, base_model: nn.Module):
        self.collator = collator
        config = active_config(base_model)
        self.num_labels, self.problem_type = config.num_labels, base_model.config.problem_type

    def __call__(self, examples: list) -> Any:
        """Collate and check one batch.

        Raises:
            ValueError: A label names no class.
        """
        batch = self.collator(examples)
        check_labels(batch, self.num_labels, self.problem_type)
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "collator":
            raise AttributeError(name)
        return getattr(self.collator, name)
