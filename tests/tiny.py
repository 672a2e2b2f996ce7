"""Tiny random models of every supported architecture, and inputs for them.

The weights are drawn wide (`initializer_range` .5 or more): with the usual .02 all members compute nearly the same, and
no test could tell a right answer from a wrong one.
"""

import torch
from peft import PeftModel, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from sigma_nens_hf import SigmaNormConfig

HIDDEN_SIZE = 32
IMAGE_SIZE = 16
VOCABULARY = 60
PADDING = 1

_TEXT = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PADDING,
    "initializer_range": 0.6,
    "max_position_embeddings": 40,
}
_SHAPE = {
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_IMAGE = {"image_size": IMAGE_SIZE, "patch_size": 4, "initializer_range": 0.6}
_BUILDERS = {
    "bert": (BertForSequenceClassification, BertConfig, {**_TEXT, **_SHAPE}),
    "roberta": (RobertaForSequenceClassification, RobertaConfig, {**_TEXT, **_SHAPE}),
    "distilbert": (
        DistilBertForSequenceClassification,
        DistilBertConfig,
        {**_TEXT, "dim": HIDDEN_SIZE, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    ),
    "vit": (ViTForImageClassification, ViTConfig, {**_IMAGE, **_SHAPE}),
    "dinov2": (
        Dinov2ForImageClassification,
        Dinov2Config,
        {**_IMAGE, "hidden_size": HIDDEN_SIZE, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
}
ARCHITECTURES = list(_BUILDERS)
IMAGE_ARCHITECTURES = ["vit", "dinov2"]
TEXT_ARCHITECTURES = [name for name in ARCHITECTURES if name not in IMAGE_ARCHITECTURES]


def base_model(architecture: str, num_labels: int = 3, seed: int = 0, **config):
    model_class, config_class, settings = _BUILDERS[architecture]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**settings, "num_labels": num_labels, **config})).eval()
    for module in model.modules():
        # Norms of a new model are all ones; pretrained ones are not, and may be negative or zero.
        if isinstance(module, torch.nn.LayerNorm):
            torch.nn.init.uniform_(module.weight, -1.5, 1.5)
            module.weight.data[0] = 0
            torch.nn.init.normal_(module.bias, std=0.3)
    return model


def inputs(
    architecture: str, batch_size: int = 5, num_labels: int = 3, seed: int = 1, with_labels: bool = True
) -> dict:
    generator = torch.Generator().manual_seed(seed)
    if architecture in IMAGE_ARCHITECTURES:
        batch = {"pixel_values": torch.randn(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)}
    else:
        ids = torch.randint(5, VOCABULARY, (batch_size, 11), generator=generator)
        mask = torch.ones_like(ids)
        for row in range(batch_size):
            length = 4 + (5 * row + 2) % 8  # rows of different length, the rest is padding
            ids[row, length:] = PADDING
            mask[row, length:] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
    if with_labels:
        batch["labels"] = torch.randint(0, num_labels, (batch_size,), generator=generator)
    return batch


def ensemble(architecture: str, num_labels: int = 3, seed: int = 0, base: dict | None = None, **config) -> PeftModel:
    model = base_model(architecture, num_labels, seed, **(base or {}))
    torch.manual_seed(seed + 100)
    settings = {"init_scaler_std": 1.0, **config}
    return get_peft_model(model, SigmaNormConfig(**settings)).eval()


def task_type(architecture: str) -> str | None:
    return None if architecture in IMAGE_ARCHITECTURES else "SEQ_CLS"


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def make_trainable_parts_random(model: torch.nn.Module, seed: int = 7) -> None:
    """Give every trained parameter a value that no initialisation would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
