#!/usr/bin/env python
"""Print what an adapter stores for every supported architecture, in the shape of a well-known checkpoint.

    python scripts/adapter_sizes.py
    python scripts/adapter_sizes.py --members 8 --labels 1000 --member_heads shared

Nothing is downloaded or allocated: the models are built without data, from the shapes written here.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
import transformers
from peft import get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser

from sigma_nens_hf import SigmaNormConfig
from sigma_nens_hf.architectures import ARCHITECTURES, class_named

# What is stored, by what the name of its parameter holds; the first that fits.
_KINDS = {"sigma_norm_head": "member head", "sigma_norm_": "norms", "": "shared head"}
_SMALL_STAGES = {"depths": [3, 3, 9, 3], "hidden_sizes": [96, 192, 384, 768]}
_DEBERTA_V3 = {
    "vocab_size": 128_100, "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
    "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
# A checkpoint, the prefix of its classes, and where its shape differs from the defaults of its config.
SHAPES = {
    "bert-base-uncased": ("Bert", {}),
    "roberta-base": ("Roberta", {"vocab_size": 50_265}),
    "xlm-roberta-base": ("XLMRoberta", {"vocab_size": 250_002}),
    "camembert-base": ("Camembert", {"vocab_size": 32_005}),
    "distilbert-base-uncased": ("DistilBert", {}),
    "electra-base-discriminator": (
        "Electra",
        {"embedding_size": 768, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    ),
    "albert-base-v2": ("Albert", {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    "mpnet-base": ("MPNet", {}),
    "deberta-base": ("Deberta", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta-v3-base": (
        "DebertaV2",
        {**_DEBERTA_V3, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "intermediate_size": 3072},
    ),
    "ModernBERT-base": ("ModernBert", {}),
    "gpt2": ("GPT2", {"pad_token_id": 0}),
    "Llama-3.2-1B": (
        "Llama",
        {"hidden_size": 2048, "num_hidden_layers": 16, "num_key_value_heads": 8, "intermediate_size": 8192,
         "vocab_size": 128_256, "pad_token_id": 0},
    ),
    "Qwen2.5-0.5B": (
        "Qwen2",
        {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
         "intermediate_size": 4864, "pad_token_id": 0},
    ),
    "Qwen3-0.6B": (
        "Qwen3",
        {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128, "intermediate_size": 3072, "pad_token_id": 0},
    ),
    "vit-base-patch16-224": ("ViT", {}),
    "deit-base-distilled-patch16-224": ("DeiT", {}),
    "beit-base-patch16-224": ("Beit", {"use_relative_position_bias": True}),
    "dinov2-base": ("Dinov2", {}),
    "dinov2-with-registers-base": ("Dinov2WithRegisters", {}),
    "dinov3-vitb16": ("DINOv3ViT", {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}),
    "swin-tiny-patch4-window7-224": ("Swin", {}),
    "swinv2-tiny-patch4-window8-256": ("Swinv2", {"image_size": 256, "window_size": 8}),
    "convnext-tiny-224": ("ConvNext", _SMALL_STAGES),
    "convnextv2-tiny-22k-224": ("ConvNextV2", _SMALL_STAGES),
    "clip-vit-base-patch32": ("CLIP", {}),
    "siglip-base-patch16-224": ("Siglip", {}),
}  # fmt: skip


@dataclass
class Arguments:
    """What kind of adapter."""

    members: int = field(default=4, metadata={"help": "Number of members M."})
    labels: int = field(default=2, metadata={"help": "Number of classes."})
    member_heads: Literal["last", "all", "shared"] = field(
        default="last",
        metadata={"help": "What of the head every member has of its own: its last projection, all of it, or nothing."},
    )


def stored_bytes(model_class: type, shape: dict, arguments: Arguments) -> dict[str, int]:
    """Return the number of adapted norms, and the bytes that an adapter over a bare encoder stores, by kind.

    Args:
        model_class: Class of the base model.
        shape: Fields of its config.
        arguments: What kind of adapter.
    """
    with torch.device("meta"):
        model = model_class(model_class.config_class(**shape, num_labels=arguments.labels))
    member_heads = {"last": None, "all": "all", "shared": []}[arguments.member_heads]
    ensemble = get_peft_model(model, SigmaNormConfig(num_members=arguments.members, member_heads=member_heads))
    sizes = {"norms": 0, "member head": 0, "shared head": 0}
    for name, parameter in ensemble.named_parameters():
        if parameter.requires_grad:
            kind = next(kind for part, kind in _KINDS.items() if part in name)
            sizes[kind] += 4 * parameter.numel()
    return {"adapted norms": ensemble.peft_config["default"].num_adapted_norms, **sizes}


def main() -> None:
    """Print the table."""
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    transformers.logging.set_verbosity_error()
    table = Table(title=f"Stored by an adapter with {arguments.members} members and {arguments.labels} classes, in KiB")
    columns = ("shape of", "head's projections", "adapted norms", "norms", "member head", "shared head", "in all")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
    for checkpoint, (prefix, shape) in SHAPES.items():
        tasks = ("SequenceClassification", "ImageClassification", "ImageClassificationWithTeacher")
        for name in (f"{prefix}For{task}" for task in tasks):
            if name in ARCHITECTURES:
                norms, *sizes = stored_bytes(class_named(name), shape, arguments).values()
                projections = ", ".join(ARCHITECTURES[name].projections)
                cells = [f"{size / 1024:,.0f}" for size in (*sizes, sum(sizes))]
                table.add_row(checkpoint, projections, str(norms), *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
