"""Batches of examples whose prefix is in a cache, and which texts they must be."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .call_arguments import PREFIX_FEATURES
from .labels import IGNORED_LABEL
from .prefix_cache import PrefixCache

PREFIX_INDEX = "prefix_index"
# Under this name the digest of every text is kept beside its features.
DIGEST = "digest"


class NumberedExamples(torch.utils.data.Dataset):
    """Examples with their index into a cache.

    Args:
        examples: The examples, dicts.
    """

    def __init__(self, examples: Sequence[dict[str, Any]]):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an example with its index."""
        return {**self.examples[index], PREFIX_INDEX: index}


class PrefixCollator:
    """Makes batches with the features of the prefix for examples with an index into a cache, and plain ones for others.

    Args:
        collator: The plain collator.
        main_input_name: Name of the model's main input.
    """

    def __init__(self, collator: Callable, main_input_name: str):
        self.collator = collator
        self.is_text = main_input_name != "pixel_values"
        self.cache: PrefixCache | None = None
        self.image_shape: tuple[int, ...] | None = None
        self.constants: dict[str, Any] = {}
        # torch.nn.DataParallel takes all tensors of a batch apart.
        self.repeats_image = False

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Make one batch.

        Returns:
            `prefix_features` (B, L, ...), padded as the inputs are, with what the model needs beside them: of texts all
            their inputs, of images one empty image, for its size.
        """
        if PREFIX_INDEX not in examples[0]:
            return self.collator(examples)
        rows = [self.cache[example[PREFIX_INDEX]] for example in examples]
        features = [row for row, _ in rows]
        if not self.is_text:
            kept = {name: torch.stack([extras[name] for _, extras in rows]) for name in rows[0][1]}
            image = torch.zeros(len(rows) if self.repeats_image else 1, *self.image_shape)
            return {PREFIX_FEATURES: torch.stack(features), "pixel_values": image, **kept, **self.constants}
        batch = self.collator([{k: v for k, v in example.items() if k != PREFIX_INDEX} for example in examples])
        for example, digest, (_, extras) in zip(examples, digests(batch), rows, strict=True):
            if digest != extras[DIGEST]:
                raise ValueError(
                    f"prefix_cache: the tokens of example {example[PREFIX_INDEX]} are not those of which features are "
                    f"kept in {self.cache.folder}. Where texts are processed differently every time, features cannot "
                    "be kept; otherwise delete that folder."
                )
        tokens = tokens_of(batch)
        labels = batch.get("labels")
        if labels is not None and labels.shape == tokens.shape and (labels[~tokens] != IGNORED_LABEL).any():
            raise ValueError(
                f"prefix_cache: padding has labels other than {IGNORED_LABEL}, but its features are not kept."
            )
        padded = features[0].new_zeros(*tokens.shape, *features[0].shape[1:])
        padded[tokens] = torch.cat(features)
        return {PREFIX_FEATURES: padded, **batch}


def tokens_of(batch: dict[str, Any]) -> torch.Tensor:
    """Return where a batch of texts has tokens and no padding, (B, L).

    Args:
        batch: The inputs of a model.
    """
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def digests(batch: dict[str, Any]) -> torch.Tensor:
    """Return a number for each text that tells its inputs from others, (B,), whatever it is padded to.

    Args:
        batch: The inputs of a model.
    """
    tokens = tokens_of(batch)
    inputs = [batch[name] for name in sorted(batch.keys() - {"labels"})]
    inputs = [value for value in inputs if isinstance(value, torch.Tensor) and value.shape == tokens.shape]
    # A mask may have holes; padding in front of the first token does not count.
    inputs.append(torch.arange(tokens.shape[1]) - tokens.int().argmax(1, keepdim=True))
    rows = ([value[row][mask].numpy().tobytes() for value in inputs] for row, mask in enumerate(tokens))
    found = [hashlib.blake2b(b"".join(parts), digest_size=8).digest() for parts in rows]
    return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in found])
