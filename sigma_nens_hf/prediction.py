"""From raw inputs to labels, probabilities and uncertainty."""

import os
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.image_utils import is_valid_image, load_image

from .members import base_model_of, problem_type_of
from .outputs import MEMBER_LOGITS
from .uncertainty import decompose_uncertainty

# Tokenizers without a limit of their own report a number of this size or more.
_NO_LIMIT = 10**6


@dataclass(frozen=True)
class Prediction:
    """The ensemble's prediction for one input.

    Attributes:
        label: The most probable class.
        probability: Its probability, the mean over members.
        probabilities: Probability by class name.
        predictive_entropy: Entropy of `probabilities` in nats.
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


@torch.no_grad()
def predict(model: nn.Module, processor: Any, inputs: Any, batch_size: int = 32) -> list[Prediction]:
    """Predict labels with their probability and uncertainty.

    The model is put into evaluation mode for the call.

    Args:
        model: An ensemble for single-label classification.
        processor: Its tokenizer or image processor.
        inputs: One input or a list of them: texts, pairs of texts as tuples, or images (PIL, arrays, paths).
        batch_size: Number of inputs in a forward pass.

    Returns:
        One prediction for every input, in order.

    Raises:
        ValueError: The model is not for single-label classification, there is no processor, the inputs are of no kind
            that the model takes, the adapter is disabled, or `batch_size` is below 1.
    """
    base_model = base_model_of(model)
    config = base_model.config
    if problem_type_of(config) != "single_label_classification":
        raise ValueError(
            f"predict is for single-label classification, this model is for {problem_type_of(config)}; its outputs are "
            "`model(**inputs).logits`, and `member_logits` for the members."
        )
    if processor is None:
        raise ValueError("predict needs the model's tokenizer or image processor, got None.")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    items = _items(base_model, inputs)
    was_training = model.training
    model.eval()
    try:
        # Texts of like length side by side: in mixed batches about half of the tokens are padding.
        order = sorted(range(len(items)), key=lambda index: _length(items[index]))
        predictions: dict[int, Prediction] = {}
        for start in range(0, len(items), batch_size):
            indices = order[start : start + batch_size]
            batch = _encode(base_model, processor, [items[index] for index in indices]).to(base_model.device)
            output = model(**batch, return_dict=True)
            if MEMBER_LOGITS not in output:
                raise ValueError("predict needs the members, but the model's adapter is disabled.")
            member_logits = output[MEMBER_LOGITS]
            predictions.update(zip(indices, _predictions(member_logits, config.id2label), strict=True))
        return [predictions[index] for index in range(len(items))]
    finally:
        model.train(was_training)


def _items(base_model: nn.Module, inputs: Any) -> list:
    """Return the inputs as a list of items that the model can take.

    Raises:
        ValueError: They are not.
    """
    if _takes_images(base_model):
        is_batch = isinstance(inputs, np.ndarray | torch.Tensor) and inputs.ndim == 4
        is_single = isinstance(inputs, str | PathLike) or (is_valid_image(inputs) and not is_batch)
        return [inputs] if is_single else list(inputs)
    items = [None]
    if isinstance(inputs, str) or _is_pair(inputs):
        items = [inputs]
    elif isinstance(inputs, Iterable) and not isinstance(inputs, Mapping | Set):
        items = list(inputs)
    if not (all(isinstance(item, str) for item in items) or all(_is_pair(item) for item in items)):
        raise ValueError(
            "inputs must be a text, a pair of texts as a tuple, or a list of the one kind or the other, got "
            f"{type(inputs).__name__}: {str(inputs)[:80]}."
        )
    return items


def _as_image(item: Any) -> Any:
    """Load paths, and give PIL images the three channels that processors expect."""
    if isinstance(item, np.ndarray | torch.Tensor):
        return item
    return load_image(os.fspath(item) if isinstance(item, PathLike) else item)


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and all(isinstance(text, str) for text in item)


def _takes_images(base_model: nn.Module) -> bool:
    return base_model.main_input_name == "pixel_values"


def _length(item: Any) -> int:
    if isinstance(item, str):
        return len(item)
    return sum(map(len, item)) if isinstance(item, tuple) else 0


def _encode(base_model: nn.Module, processor: Any, items: list) -> Any:
    if _takes_images(base_model):
        return processor([_as_image(item) for item in items], return_tensors="pt")
    texts, pairs = (items, None) if isinstance(items[0], str) else map(list, zip(*items, strict=True))
    return processor(
        texts,
        pairs,
        padding=True,
        truncation=True,
        max_length=max_input_length(base_model, processor),
        return_tensors="pt",
    )


def max_input_length(base_model: nn.Module, tokenizer: Any) -> int | None:
    """Return the longest input in tokens that both a model and its tokenizer allow, None where neither has a limit.

    Args:
        base_model: The transformers model.
        tokenizer: Its tokenizer.
    """
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < _NO_LIMIT else []
    positions = getattr(base_model.config, "max_position_embeddings", None)
    if positions:
        # RoBERTa counts positions from behind its padding index.
        is_offset = base_model.config.model_type == "roberta"
        limits.append(positions - base_model.config.pad_token_id - 1 if is_offset else positions)
    return min(limits, default=None)


def _predictions(member_logits: torch.Tensor, names: dict[int, str]) -> list[Prediction]:
    """Turn member logits (B, M, C) into predictions."""
    member_probabilities = member_logits.float().softmax(-1)
    probabilities = member_probabilities.mean(1).tolist()
    votes = member_probabilities.argmax(-1).tolist()
    parts = torch.stack(decompose_uncertainty(member_logits), dim=1).tolist()
    predictions = []
    for row, (predictive, expected, modulation), row_votes in zip(probabilities, parts, votes, strict=True):
        best = max(range(len(row)), key=row.__getitem__)
        predictions.append(
            Prediction(
                label=names[best],
                probability=row[best],
                probabilities={names[index]: value for index, value in enumerate(row)},
                predictive_entropy=predictive,
                expected_entropy=expected,
                modulation_uncertainty=modulation,
                member_votes=[names[vote] for vote in row_votes],
            )
        )
    return predictions
