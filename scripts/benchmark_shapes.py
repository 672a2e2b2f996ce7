"""Shapes of the random backbones that the benchmark runs, and of the batches that it gives them."""

from dataclasses import dataclass

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

NUM_CLASSES, PATCH_SIZE, VOCABULARY_SIZE = 10, 16, 30_522


@dataclass(frozen=True)
class Shape:
    """A backbone and a batch for it.

    Attributes:
        is_image: Whether it is a ViT and not a BERT.
        layers: Number of blocks L.
        hidden_size: Width D.
        heads: Attention heads of a block.
        intermediate_size: Width of a block's feed-forward layer.
        batch_size: Examples in a batch.
        length: Tokens of a text, or the side of a square image in pixels.
    """

    is_image: bool
    layers: int
    hidden_size: int
    heads: int
    intermediate_size: int
    batch_size: int
    length: int

    @property
    def tokens(self) -> int:
        """Tokens of one example; those of an image are its patches and the class token."""
        return (self.length // PATCH_SIZE) ** 2 + 1 if self.is_image else self.length

    @property
    def block_flops(self) -> int:
        """Floating-point operations of one block for one batch, forward; matrix products alone."""
        products = self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size + 2 * self.tokens)
        return 2 * self.batch_size * self.tokens * products

    def make_base(self) -> PreTrainedModel:
        """Return a classifier of random weights, without dropout."""
        config = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.heads,
            "intermediate_size": self.intermediate_size,
            "num_labels": NUM_CLASSES,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }
        if self.is_image:
            return ViTForImageClassification(ViTConfig(**config, image_size=self.length, patch_size=PATCH_SIZE))
        return BertForSequenceClassification(BertConfig(**config, vocab_size=VOCABULARY_SIZE))

    def make_batch(self) -> dict[str, torch.Tensor]:
        """Return random examples, with labels."""
        labels = torch.arange(self.batch_size) % NUM_CLASSES
        if self.is_image:
            return {"pixel_values": torch.randn(self.batch_size, 3, self.length, self.length), "labels": labels}
        ids = torch.randint(VOCABULARY_SIZE, (self.batch_size, self.length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


SHAPES = {
    "minilm": Shape(False, 6, 384, 12, 1536, batch_size=8, length=64),
    "vit": Shape(True, 12, 384, 6, 1536, batch_size=4, length=224),
}
# An accelerator is idle for most of the time with the batches above.
DEVICE_BATCHES = {"minilm": {"batch_size": 64, "length": 128}, "vit": {"batch_size": 32}}
