"""What comparisons of models have in common: the splits, the training arguments, and a run from training to answers."""

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baseline_report import LOGITS_FILE, RUN_FILE
from baselines import member_logits, trained_parameters
from datasets import Dataset
from demo_assets import minilm_folder, sst2_like
from hardware import has_fast_bf16
from safetensors.torch import save
from transformers import Trainer

from sigma_nens_hf.data.splits import LABELS, carve, check_splits, load_splits
from sigma_nens_hf.data.texts import TextArguments
from sigma_nens_hf.run_settings import write_json

BATCH_SIZE = 32
DEFAULTS = {"max_train_samples": 3_000, "calibration_fraction": 0.2}


@dataclass
class RunArguments:
    """What every comparison is told."""

    output_dir: str = field(metadata={"help": "Folder for everything that is written."})
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "BERT-like checkpoint; default: the packaged MiniLM encoder."}
    )
    offline_assets: bool = field(
        default=False, metadata={"help": "Use packaged movie-review sentences instead of a dataset of the Hub."}
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "Seeds of initialisation and order."})
    num_train_epochs: float = field(default=3, metadata={"help": "Passes over the training sentences."})
    resamples: int = field(default=1_000, metadata={"help": "Bootstrap draws for the intervals of differences."})
    train_only: bool = field(default=False, metadata={"help": "Train what is missing; no table."})

    @property
    def checkpoint(self) -> str:
        """The checkpoint that all models start from."""
        return self.model_name_or_path or str(minilm_folder())

    def settings(self, data_args: TextArguments, *names: str) -> dict[str, dict[str, Any]]:
        """Return what two calls must share to work on one folder.

        Args:
            data_args: Which sentences.
            *names: Names of the arguments that count, beside those of every comparison.
        """
        names = ("offline_assets", "num_train_epochs", *names)
        settings = {name: getattr(self, name) for name in names}
        return {"comparison": settings | {"model": os.path.basename(self.checkpoint)}, "data": asdict(data_args)}


def comparison_splits(data_args: TextArguments, offline_assets: bool) -> dict[str, Dataset]:
    """Return "train", "calibration" and "report", the same for every seed of a model.

    Args:
        data_args: Which sentences.
        offline_assets: Whether to take the packaged ones instead.
    """
    if offline_assets:
        assets = sst2_like()
        splits = check_splits({"train": assets["train"], "report": assets["test"]}, data_args)
    else:
        splits = load_splits(data_args)
    return carve(splits, data_args, seed=0)


def common_arguments(output_dir: str, num_train_epochs: float, seed: int) -> dict[str, Any]:
    """Return the training arguments that all compared models share.

    Args:
        output_dir: Folder of the comparison.
        num_train_epochs: Passes over the training data.
        seed: Seed of initialisation and order.
    """
    return {
        "output_dir": str(Path(output_dir) / "unused"),
        "num_train_epochs": num_train_epochs,
        "per_device_train_batch_size": BATCH_SIZE,
        "per_device_eval_batch_size": 64,
        "train_sampling_strategy": "group_by_length",  # half of the tokens would be padding
        "seed": seed,
        "bf16": has_fast_bf16(),
        "use_cpu": not torch.cuda.is_available(),
        "remove_unused_columns": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1_000,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }


def train_and_ask(
    trainer: Trainer, folder: Path, splits: dict[str, Dataset], data_args: TextArguments, dropout_passes: int = 0
) -> None:
    """Train a model, and write down its members' logits on everything that is not trained on.

    Args:
        trainer: The trainer of a fresh model, with its training data.
        folder: Folder of the run.
        splits: As from `comparison_splits`, with others to be asked about.
        data_args: How the sentences are encoded.
        dropout_passes: Passes of MC dropout, none by default.
    """
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    answers = {}
    for name in splits.keys() - {"train"}:
        encoded = data_args.encode(splits[name], trainer.processing_class, is_training=False)
        encoded = encoded.map(lambda row: {"length": len(row["input_ids"])}).sort("length").remove_columns("length")
        answers[f"{name}/labels"] = np.array(encoded[LABELS])
        answers[f"{name}/logits"] = member_logits(trainer, encoded).numpy()
        if dropout_passes:
            answers[f"{name}/dropout"] = member_logits(trainer, encoded, dropout_passes).numpy()
    trained = trained_parameters(trainer.model)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / LOGITS_FILE, **answers)
    run = {
        "seconds": seconds,
        "trained_parameters": sum(parameter.numel() for parameter in trained.values()),
        "stored_bytes": len(save({name: parameter.contiguous() for name, parameter in trained.items()})),
    }
    write_json(folder / RUN_FILE, run)  # the last thing: where it is, the run is whole
