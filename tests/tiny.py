"""Tiny random models of the supported architectures, and inputs for them.

The weights are drawn wide (`initializer_range` .5 or more): with the usual .02 all members compute nearly the same, and
no test could tell a right answer from a wrong one.
"""

import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from sigma_nens_hf import SigmaNormConfig
from sigma_nens_hf.architectures import class_named
from sigma_nens_hf.norm_formulas import is_norm

HIDDEN_SIZE = 32
IMAGE_SIZE = 16
VOCABULARY = 60
PADDING = 1
WORDS = ["good", "bad", "film", "dull", "fine", "a", "very"]
NUM_CHOICES = 3

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
_TEXT_SHAPE = {**_TEXT, **_SHAPE}
_IMAGE = {"image_size": IMAGE_SIZE, "patch_size": 4, "initializer_range": 0.6}
_IMAGE_SHAPE = {**_IMAGE, **_SHAPE}
_STAGES = {**_IMAGE, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
_CONVOLUTIONS = {**_IMAGE, "patch_size": 2, "hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2}
_DISTILBERT = {**_TEXT, "dim": HIDDEN_SIZE, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
_GPT2 = {
    "vocab_size": VOCABULARY, "pad_token_id": PADDING, "initializer_range": 0.6, "n_embd": HIDDEN_SIZE, "n_layer": 2,
    "n_head": 4, "n_positions": 40,
}  # fmt: skip
_DEBERTA = {**_TEXT_SHAPE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_DEBERTA_V3 = {  # as in microsoft/deberta-v3-base
    **_DEBERTA, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
# DeBERTa v2's own: a convolution beside the first block, with a norm of its own.
_DEBERTA_V2 = {**_DEBERTA_V3, "conv_kernel_size": 3, "conv_act": "gelu", "conv_groups": 1, "type_vocab_size": 2}
_DECODER = {**_TEXT_SHAPE, "num_key_value_heads": 2}  # grouped-query attention
_TOWERS = {"vision_config": _IMAGE_SHAPE, "text_config": {**_TEXT_SHAPE}}

# Name: the prefix of its classes, what its name in transformers ends in after "For", and its shape.
_FAMILIES = {
    "bert": ("Bert", ("sequence", "token", "choice"), _TEXT_SHAPE),
    "roberta": ("Roberta", ("sequence", "token", "choice"), _TEXT_SHAPE),
    "distilbert": ("DistilBert", ("sequence", "token", "choice"), _DISTILBERT),
    "electra": ("Electra", ("sequence", "token", "choice"), {**_TEXT_SHAPE, "embedding_size": 16}),
    "albert": ("Albert", ("sequence", "token", "choice"), {**_TEXT_SHAPE, "embedding_size": 16}),
    "mpnet": ("MPNet", ("sequence", "token", "choice"), _TEXT_SHAPE),
    "deberta": ("Deberta", ("sequence", "token"), _DEBERTA),
    "deberta_v2": ("DebertaV2", ("sequence",), _DEBERTA_V2),
    "deberta_v3": ("DebertaV2", ("sequence", "token", "choice"), _DEBERTA_V3),
    "modernbert": ("ModernBert", ("sequence", "token", "choice"), {**_TEXT_SHAPE, "initializer_cutoff_factor": 3.0}),
    "xlm_roberta": ("XLMRoberta", ("sequence", "token", "choice"), _TEXT_SHAPE),
    "camembert": ("Camembert", ("sequence", "token", "choice"), _TEXT_SHAPE),
    "gpt2": ("GPT2", ("sequence", "token"), _GPT2),
    "llama": ("Llama", ("sequence", "token"), _DECODER),
    "qwen2": ("Qwen2", ("sequence", "token"), _DECODER),
    "qwen3": ("Qwen3", ("sequence", "token"), {**_DECODER, "head_dim": 8}),
    "vit": ("ViT", ("image",), _IMAGE_SHAPE),
    "deit": ("DeiT", ("image", "teacher"), _IMAGE_SHAPE),
    "beit": ("Beit", ("image",), {**_IMAGE_SHAPE, "use_relative_position_bias": True}),
    "dinov2": ("Dinov2", ("image",), _IMAGE_SHAPE),
    "dinov2_registers": ("Dinov2WithRegisters", ("image",), _IMAGE_SHAPE),
    "dinov3": ("DINOv3ViT", ("image",), {**_IMAGE_SHAPE, "num_register_tokens": 2}),
    "swin": ("Swin", ("image",), _STAGES),
    "swinv2": ("Swinv2", ("image",), _STAGES),
    "convnext": ("ConvNext", ("image",), _CONVOLUTIONS),
    "convnextv2": ("ConvNextV2", ("image",), _CONVOLUTIONS),
    "clip": ("CLIP", ("image",), _TOWERS),
    "siglip": ("Siglip", ("image",), _TOWERS),
}
_CLASS_ENDS = {
    "sequence": "SequenceClassification",
    "token": "TokenClassification",
    "choice": "MultipleChoice",
    "image": "ImageClassification",
    "teacher": "ImageClassificationWithTeacher",
}
# Sequence and image classifiers go by their family's name, the others by that and their task.
_MODELS = {
    family if task in ("sequence", "image") else f"{family}-{task}": (
        class_named(f"{prefix}For{_CLASS_ENDS[task]}"),
        getattr(transformers, f"{prefix}Config"),
        shape,
    )
    for family, (prefix, tasks, shape) in _FAMILIES.items()
    for task in tasks
}
ARCHITECTURES = list(_MODELS)
IMAGE_ARCHITECTURES = [name for name in ARCHITECTURES if "Image" in _MODELS[name][0].__name__]
TOKEN_ARCHITECTURES = [name for name in ARCHITECTURES if name.endswith("-token")]
CHOICE_ARCHITECTURES = [name for name in ARCHITECTURES if name.endswith("-choice")]
TEXT_ARCHITECTURES = [name for name in ARCHITECTURES if name not in IMAGE_ARCHITECTURES]
SEQUENCE_ARCHITECTURES = [name for name in TEXT_ARCHITECTURES if "-" not in name]


def representatives(*fast: str) -> list:
    """All architectures, of which some stand for the rest in the fast tests."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]


def model_class(architecture: str) -> type:
    return _MODELS[architecture][0]


def task(architecture: str) -> str:
    if architecture in IMAGE_ARCHITECTURES:
        return "image-classification"
    return {"token": "token-classification", "choice": "multiple-choice"}.get(
        architecture.partition("-")[2], "text-classification"
    )


def without_dropout(architecture: str) -> dict:
    """Settings that switch every kind of dropout off, by the names that the architecture's config has for it."""
    defaults = vars(_MODELS[architecture][1]())
    names = [name for name, value in defaults.items() if "drop" in name and isinstance(value, float)]
    return dict.fromkeys([*names, "classifier_dropout"], 0.0)


def base_model(architecture: str, num_labels: int = 3, seed: int = 0, **config):
    model_class, config_class, shape = _MODELS[architecture]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**shape, "num_labels": num_labels, **config})).eval()
    for module in model.modules():
        # Norms of a new model are all ones; pretrained ones are not, and may be negative or zero.
        if is_norm(module):
            nn.init.uniform_(module.weight, -1.5, 1.5)
            module.weight.data[0] = 0
            if getattr(module, "bias", None) is not None:
                nn.init.normal_(module.bias, std=0.3)
        elif type(module).__name__.endswith("GRN"):  # of ConvNeXt v2; all zeros in a new model
            nn.init.normal_(module.weight)
    return model


def encoder_of(model):
    """The model as it is published before anyone has trained a classifier: without a head, or as a pair of towers."""
    if not hasattr(model, "vision_model"):
        return model.base_model
    towers = getattr(transformers, type(model).__name__.replace("ForImageClassification", "Model"))(model.config)
    towers.vision_model.load_state_dict(model.vision_model.state_dict())
    return towers


def inputs(
    architecture: str, batch_size: int = 5, num_labels: int = 3, seed: int = 1, with_labels: bool = True
) -> dict:
    generator = torch.Generator().manual_seed(seed)
    if architecture in IMAGE_ARCHITECTURES:
        batch = {"pixel_values": torch.randn(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)}
    else:
        is_choice = architecture in CHOICE_ARCHITECTURES
        num_rows = batch_size * NUM_CHOICES if is_choice else batch_size
        ids = torch.randint(5, VOCABULARY, (num_rows, 11), generator=generator)
        mask = torch.ones_like(ids)
        for row in range(num_rows):
            length = 4 + (5 * row + 2) % 8  # rows of different length, the rest is padding
            ids[row, length:] = PADDING
            mask[row, length:] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        if is_choice:
            batch = {name: tensor.unflatten(0, (batch_size, NUM_CHOICES)) for name, tensor in batch.items()}
    if with_labels and architecture != "deit-teacher":  # whose forward takes none
        shape = batch["input_ids"].shape if architecture in TOKEN_ARCHITECTURES else (batch_size,)
        batch["labels"] = torch.randint(0, num_labels, shape, generator=generator)
        if architecture in TOKEN_ARCHITECTURES:
            batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


def ensemble(architecture: str, num_labels: int = 3, seed: int = 0, base: dict | None = None, **config) -> PeftModel:
    return adapt(base_model(architecture, num_labels, seed, **(base or {})), seed, **config)


def adapt(model, seed: int = 0, **config) -> PeftModel:
    torch.manual_seed(seed + 100)
    settings = {"init_scaler_std": 1.0, **config}
    return get_peft_model(model, SigmaNormConfig(**settings)).eval()


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A word tokenizer whose vocabulary fits the tiny text models."""
    words = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]", *WORDS]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", model_max_length=32
    )


def labels_config(architecture: str, names: dict[int, str]) -> dict:
    """The labels for a `SigmaNormConfig`; choices have no names."""
    return {} if architecture in CHOICE_ARCHITECTURES else {"id2label": names}


def task_type(architecture: str) -> str | None:
    return {"text-classification": "SEQ_CLS", "token-classification": "TOKEN_CLS"}.get(task(architecture))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def make_trainable_parts_random(model: torch.nn.Module, seed: int = 7) -> None:
    """Give every trained parameter a value that no initialisation would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
