"""From raw inputs to what a model takes: texts, pairs, choices and images, in batches that fit together."""

import os
from collections.abc import Iterable, Iterator, Mapping, Set
from inspect import signature
from itertools import groupby
from os import PathLike
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import PreTrainedModel
from transformers.image_utils import is_valid_image, load_image

from .architectures import backbone_name

# Tokenizers without a limit of their own report a number of this size or more.
_NO_LIMIT = 10**6
# These count positions from behind their padding index.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet")


def as_items(task: str, inputs: Any) -> list:
    """Return one input or several as a list of items that a task can take.

    Args:
        task: Name of the task.
        inputs: A text, a pair of texts as a tuple, for multiple choice a tuple of a text and its list of choices, an
            image (PIL, array, path); or a list of them.

    Raises:
        ValueError: They are of another kind.
    """
    if task == "image-classification":
        is_batch = isinstance(inputs, np.ndarray | torch.Tensor) and inputs.ndim == 4
        items = [inputs]
        if isinstance(inputs, Iterable) and not isinstance(inputs, Mapping) and (is_batch or not _is_image(inputs)):
            items = list(inputs)
        if not all(map(_is_image, items)):
            raise ValueError(f"inputs must be an image (PIL, array or path) or a list of them, got {str(inputs)[:80]}.")
        return items
    kinds, wanted = {
        "text-classification": ((_is_text, _is_pair), "a text, a pair of texts as a tuple"),
        "token-classification": ((_is_text,), "a text"),
        "multiple-choice": ((_is_choice,), "a tuple of a text and a list of different choices"),
    }[task]
    items = [None]
    if any(is_kind(inputs) for is_kind in kinds):
        items = [inputs]
    elif isinstance(inputs, Iterable) and not isinstance(inputs, str | bytes | Mapping | Set):
        items = list(inputs)
    if not any(all(is_kind(item) for item in items) for is_kind in kinds):
        raise ValueError(
            f"inputs must be {wanted}, or a list of them, all of one kind, got {type(inputs).__name__}: "
            f"{str(inputs)[:80]}."
        )
    return items


def batches_of(items: list, batch_size: int) -> Iterator[list[int]]:
    """Yield the indices of items that go into one batch: of like length, and with equally many choices.

    Args:
        items: As from `as_items`.
        batch_size: Most items in a batch.
    """
    # Texts of like length side by side: in mixed batches about half of the tokens are padding.
    order = sorted(range(len(items)), key=lambda index: (_num_choices(items[index]), _length(items[index])))
    for _, group in groupby(order, key=lambda index: _num_choices(items[index])):
        indices = list(group)
        for start in range(0, len(indices), batch_size):
            yield indices[start : start + batch_size]


def encode(model: PreTrainedModel, processor: Any, task: str, items: list) -> Any:
    """Encode one batch of items.

    Args:
        model: The base model.
        processor: Its tokenizer or image processor.
        task: Name of the task.
        items: Items of one batch.

    Returns:
        The inputs of the model, as tensors; for token classification with `offset_mapping` and `special_tokens_mask`.

    Raises:
        ValueError: A text has no token.
    """
    if task == "image-classification":
        return processor([_as_image(item) for item in items], return_tensors="pt")
    texts, pairs, options = items, None, {}
    if task == "multiple-choice":
        texts = [text for text, choices in items for _ in choices]
        pairs = [choice for _, choices in items for choice in choices]
    elif task == "token-classification":
        options = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
    elif _is_pair(items[0]):
        texts, pairs = map(list, zip(*items, strict=True))
    encoded = processor(
        texts,
        pairs,
        padding=True,
        truncation=True,
        max_length=max_input_length(model, processor),
        return_tensors="pt",
        **options,
    )
    lengths = encoded["attention_mask"].sum(-1).tolist()
    if 0 in lengths:
        raise ValueError(f"The tokenizer makes no token of {texts[lengths.index(0)]!r}.")
    if task == "multiple-choice":
        encoded = type(encoded)({name: tensor.unflatten(0, (len(items), -1)) for name, tensor in encoded.items()})
    return encoded


def size_arguments(model: PreTrainedModel, pixel_values: torch.Tensor) -> dict[str, bool]:
    """Return what a model's forward has to be told to take images of another size than its checkpoint's.

    Args:
        model: The base model.
        pixel_values: (B, 3, H, W).

    Returns:
        `interpolate_pos_encoding` where the size differs and the model has such an argument, else nothing.
    """
    backbone = model.get_submodule(backbone_name(model))
    size = getattr(backbone.config, "image_size", None)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    if size is None or (height, width) == tuple(pixel_values.shape[-2:]):
        return {}
    can_interpolate = any(
        "interpolate_pos_encoding" in signature(type(m).forward).parameters for m in (model, backbone)
    )
    return {"interpolate_pos_encoding": True} if can_interpolate else {}


def max_input_length(model: PreTrainedModel, tokenizer: Any) -> int | None:
    """Return the longest input in tokens that both a model and its tokenizer allow, None where neither has a limit.

    Args:
        model: The base model.
        tokenizer: Its tokenizer.
    """
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < _NO_LIMIT else []
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions:
        is_offset = model.config.model_type in _OFFSET_POSITIONS
        limits.append(positions - model.config.pad_token_id - 1 if is_offset else positions)
    return min(limits, default=None)


def to_rgb(image: Image.Image) -> Image.Image:
    """Give an image the three channels of 8 bits that processors expect.

    Args:
        image: An image of any mode but those whose range of values is not known.

    Raises:
        ValueError: Its mode is 32-bit integers or floats.
    """
    if image.mode.startswith("I;16"):  # which PIL itself would cut off at 255
        image = Image.fromarray((np.asarray(image, dtype=np.uint16) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"An image of mode {image.mode!r} does not tell which values are black and white.")
    return image.convert("RGB")


def _is_image(item: Any) -> bool:
    return isinstance(item, str | PathLike) or is_valid_image(item)


def _as_image(item: Any) -> Any:
    """Load paths, and give images the channels that processors expect."""
    if isinstance(item, PathLike) or (isinstance(item, str) and os.path.exists(item)):
        with Image.open(item) as image:
            return to_rgb(ImageOps.exif_transpose(image))
    if isinstance(item, np.ndarray) and item.ndim == 2:
        item = Image.fromarray(item)
    if isinstance(item, Image.Image):
        return to_rgb(item)
    return item if isinstance(item, np.ndarray | torch.Tensor) else load_image(item)


def _is_text(item: Any) -> bool:
    return isinstance(item, str)


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and all(isinstance(text, str) for text in item)


def _is_choice(item: Any) -> bool:
    if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], list)):
        return False
    return bool(item[1]) and all(isinstance(text, str) for text in item[1]) and len(set(item[1])) == len(item[1])


def _num_choices(item: Any) -> int:
    return len(item[1]) if _is_choice(item) else 0


def _length(item: Any) -> int:
    if isinstance(item, str):
        return len(item)
    if _is_choice(item):
        return len(item[0]) + max(map(len, item[1]))
    return sum(map(len, item)) if _is_pair(item) else 0
