"""From raw inputs to labels, probabilities and uncertainty."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .architectures import task_of_class
from .encoding import as_items, batches_of, encode, size_arguments
from .labels import SINGLE_LABEL
from .members import active_config, base_model_of, problem_type_of
from .outputs import MEMBER_LOGITS, ensemble_logits
from .uncertainty import UncertaintyDecomposition, decompose_uncertainty


@dataclass(frozen=True)
class Prediction:
    """The ensemble's prediction for one input.

    Attributes:
        label: The most probable class; for multiple choice, the choice.
        probability: Its probability, the mean over members; calibrated if the ensemble is.
        probabilities: Probability by class name.
        predictive_entropy: Entropy of the mean of the members' probabilities in nats, before any calibration.
        expected_entropy: Mean entropy of the members' own predictions in nats.
        modulation_uncertainty: What the members disagree about, in nats; the difference of the two.
        member_votes: The most probable class for every member.
    """

    label: str
    probability: float
    probabilities: dict[str, float]
    predictive_entropy: float
    expected_entropy: float
    modulation_uncertainty: float
    member_votes: list[str]


@dataclass(frozen=True)
class TokenPrediction(Prediction):
    """The ensemble's prediction for one token of a text.

    Attributes:
        token: The token as it stands in the text.
        start: Where it begins in the text, in characters.
        end: Where it ends.
    """

    token: str
    start: int
    end: int


@dataclass(frozen=True)
class MultiLabelPrediction:
    """The ensemble's prediction for one input that may have any number of labels.

    Attributes:
        labels: The labels whose probability, the mean over members, is above one half.
        probabilities: Probability by label; each is that of a yes against a no.
        predictive_entropy: Sum over labels of the entropies of these, in nats.
        expected_entropy: The same of the members' own predictions, mean over members.
        modulation_uncertainty: What the members disagree about, in nats; the difference of the two.
        member_votes: The labels above one half for every member.
    """

    labels: list[str]
    probabilities: dict[str, float]
    predictive_entropy: float
    expected_entropy: float
    modulation_uncertainty: float
    member_votes: list[list[str]]


@dataclass(frozen=True)
class RegressionPrediction:
    """The ensemble's prediction of one or several numbers for an input.

    Attributes:
        values: Value by the name of the output, the mean over members.
        standard_deviations: Standard deviation over members (of the population of M), by the same names.
        member_values: The values of every member.
    """

    values: dict[str, float]
    standard_deviations: dict[str, float]
    member_values: list[dict[str, float]]


AnyPrediction = Prediction | MultiLabelPrediction | RegressionPrediction | list[TokenPrediction]


@torch.no_grad()
def predict(model: nn.Module, processor: Any, inputs: Any, batch_size: int = 32) -> list[AnyPrediction]:
    """Predict labels with their probability and uncertainty.

    The model is put into evaluation mode for the call.

    Args:
        model: An ensemble.
        processor: Its tokenizer or image processor.
        inputs: One input or a list of them: texts, pairs of texts as tuples, for multiple choice tuples of a text and
            a list of choices, or images (PIL, arrays, paths). What of a text is longer than the model takes is cut off.
        batch_size: Number of inputs in a forward pass.

    Returns:
        One prediction for every input, in order: a `Prediction`, for multi-label models a `MultiLabelPrediction`, for
        regression a `RegressionPrediction`, for token classification a list with a `TokenPrediction` for every token
        but the special ones.

    Raises:
        ValueError: There is no processor, or it cannot tell where tokens are; the inputs are of no kind that the model
            takes, or have no token; the adapter is disabled; or `batch_size` is below 1.
    """
    base_model = base_model_of(model)
    task = task_of_class(type(base_model).__name__)
    if processor is None:
        raise ValueError("predict needs the model's tokenizer or image processor, got None.")
    if task == "token-classification" and not processor.is_fast:
        raise ValueError("Predictions for tokens need to know where they stand in the text; use a fast tokenizer.")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    items = as_items(task, inputs)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    temperature = active_config(base_model).temperature_in_use
    try:
        predictions: dict[int, AnyPrediction] = {}
        for indices in batches_of(items, batch_size):
            batch_items = [items[index] for index in indices]
            batch = encode(base_model, processor, task, batch_items).to(base_model.device)
            offsets, special = batch.pop("offset_mapping", None), batch.pop("special_tokens_mask", None)
            sizes = size_arguments(base_model, batch["pixel_values"]) if "pixel_values" in batch else {}
            output = model(**batch, **sizes, return_dict=True)
            if MEMBER_LOGITS not in output:
                raise ValueError("predict needs the members, but the model's adapter is disabled.")
            member_logits = output[MEMBER_LOGITS]
            if task == "token-classification":
                names = base_model.config.id2label
                found = _tokens(member_logits, names, temperature, batch_items, offsets, special)
            elif task == "multiple-choice":
                names = [dict(enumerate(choices)) for _, choices in batch_items]
                found = _single_label(member_logits, names, temperature)
            else:
                found = _of_examples(member_logits, base_model.config, temperature)
            predictions.update(zip(indices, found, strict=True))
        return [predictions[index] for index in range(len(items))]
    finally:
        for module, mode in modes.items():
            module.training = mode


def _of_examples(member_logits: torch.Tensor, config: Any, temperature: float) -> list[AnyPrediction]:
    """Turn member logits (B, M, C) of whole examples into predictions."""
    problem_type = problem_type_of(config)
    if problem_type == SINGLE_LABEL:
        return _single_label(member_logits, [config.id2label] * len(member_logits), temperature)
    names = [config.id2label[index] for index in range(member_logits.shape[-1])]
    if problem_type == "regression":
        return [_regression(row, names) for row in member_logits.double()]
    return _multi_label(member_logits, names)


def _single_label(member_logits: torch.Tensor, names: list[dict[int, str]], temperature: float) -> list[Prediction]:
    """Turn member logits (B, M, C) into predictions, with the names of the classes for each example."""
    rows = zip(
        ensemble_logits(member_logits, SINGLE_LABEL, temperature).exp().tolist(),
        member_logits.argmax(-1).tolist(),
        _parts(decompose_uncertainty(member_logits)),
        names,
        strict=True,
    )
    predictions = []
    for probabilities, votes, parts, classes in rows:
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        predictions.append(
            Prediction(
                label=classes[best],
                probability=probabilities[best],
                probabilities={classes[index]: value for index, value in enumerate(probabilities)},
                **parts,
                member_votes=[classes[vote] for vote in votes],
            )
        )
    return predictions


def _tokens(
    member_logits: torch.Tensor,
    names: dict[int, str],
    temperature: float,
    texts: list[str],
    offsets: torch.Tensor,
    special: torch.Tensor,
) -> list[list[TokenPrediction]]:
    """Turn member logits (B, M, L, C) into predictions for the tokens that are part of a text."""
    predictions = []
    for logits, text, places, is_special in zip(member_logits, texts, offsets.tolist(), special.bool(), strict=True):
        kept = (~is_special).nonzero().flatten().tolist()
        of_tokens = _single_label(logits[:, kept].transpose(0, 1), [names] * len(kept), temperature)
        predictions.append(
            [
                TokenPrediction(**vars(prediction), token=text[start:end], start=start, end=end)
                for prediction, (start, end) in zip(of_tokens, (places[index] for index in kept), strict=True)
            ]
        )
    return predictions


def _multi_label(member_logits: torch.Tensor, names: list[str]) -> list[MultiLabelPrediction]:
    """Turn member logits (B, M, C) into predictions; every label is a yes or no of its own."""
    probabilities = member_logits.float().sigmoid()
    yes_and_no = torch.stack([member_logits, torch.zeros_like(member_logits)], dim=-1)
    by_label = decompose_uncertainty(yes_and_no)
    rows = zip(
        probabilities.mean(1).tolist(),
        probabilities.tolist(),
        _parts(UncertaintyDecomposition(*(part.sum(-1) for part in by_label))),
        strict=True,
    )

    def above_half(values: list[float]) -> list[str]:
        return [name for name, value in zip(names, values, strict=True) if value > 0.5]

    return [
        MultiLabelPrediction(
            labels=above_half(mean),
            probabilities=dict(zip(names, mean, strict=True)),
            **parts,
            member_votes=[above_half(values) for values in by_member],
        )
        for mean, by_member, parts in rows
    ]


def _regression(member_values: torch.Tensor, names: list[str]) -> RegressionPrediction:
    """Turn member outputs (M, C) into a prediction."""

    def named(values: torch.Tensor) -> dict[str, float]:
        return dict(zip(names, values.tolist(), strict=True))

    return RegressionPrediction(
        values=named(member_values.mean(0)),
        standard_deviations=named(member_values.std(0, correction=0)),
        member_values=[named(values) for values in member_values],
    )


def _parts(decomposition: UncertaintyDecomposition) -> list[dict[str, float]]:
    """The parts of the uncertainty by name, for each example."""
    columns = [part.tolist() for part in decomposition]
    return [dict(zip(decomposition._fields, row, strict=True)) for row in zip(*columns, strict=True)]
