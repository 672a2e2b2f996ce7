#!/usr/bin/env python
"""Fine-tune a sigma-norm ensemble for image classification and report it beside a single model trained the same way.

Any ViT-family checkpoint and any image-classification dataset: an id on the Hub, a local folder of images, or parquet
files. Images are preprocessed as the checkpoint's own processor says.

    python scripts/run_imagenet_vit.py --streaming --max_steps 2000 --output_dir outputs/imagenet
    python scripts/run_imagenet_vit.py --dataset_name path/to/folder --member_heads shared --output_dir outputs/mine
    python scripts/run_imagenet_vit.py --offline_assets --output_dir outputs/fashion

What is done with them is said in stages.py, which run_sst2.py shares.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import DatasetDict
from hardware import has_fast_bf16
from stage_report import StageReport
from stages import ModelArguments, parse_arguments, run

from sigma_nens_hf import SigmaNEnsTrainingArguments
from sigma_nens_hf.data.images import ImageArguments


@dataclass
class ImageModelArguments(ModelArguments):
    """Which image checkpoint becomes which ensemble."""

    model_name_or_path: str = field(
        default="google/vit-base-patch16-224", metadata={"help": "Model id on the Hub or local folder."}
    )


ARGUMENTS = (ImageModelArguments, ImageArguments, SigmaNEnsTrainingArguments)


def offline_assets() -> tuple[dict[str, Any], DatasetDict]:
    """Return what takes the place of the defaults with `--offline_assets`, and the splits.

    Raises:
        RuntimeError: The ViT is not in the cache and could not be fetched.
    """
    # They need packages that nothing else does.
    from image_assets import demo_images
    from vit_asset import vit_folder

    name, splits = demo_images()
    defaults = {
        "model_name_or_path": str(vit_folder()),
        "dataset_name": name,
        # Mirrored clothes are clothes, mirrored digits are none.
        "augmentation": "flip" if name == "Fashion-MNIST" else "none",
        "max_train_samples": 1_500,
        "max_report_samples": 2_000,
        "num_train_epochs": 3,
        "bf16": has_fast_bf16(),
        "use_cpu": not torch.cuda.is_available(),
        "save_steps": 25,
        "save_total_limit": 2,
        "logging_steps": 25,
    }
    return defaults, splits


def main(argv: list[str] | None = None) -> list[StageReport]:
    """Run with a command line; None: this process's."""
    arguments, splits = parse_arguments(ARGUMENTS, argv), None
    if arguments[1].offline_assets:
        defaults, splits = offline_assets()
        arguments = parse_arguments(ARGUMENTS, argv, defaults)
    return run(*arguments, splits=splits)


if __name__ == "__main__":
    main()
