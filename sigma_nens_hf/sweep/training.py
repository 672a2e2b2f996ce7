"""Training of one model of a sweep, and what it answers on the data that is held out."""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from transformers import PrinterCallback, set_seed

from ..checkpoints import last_complete_checkpoint
from ..config import SHARED, SigmaNormConfig
from ..data.arguments import DataArguments
from ..data.splits import LABELS
from ..hub import ensemble_from_pretrained
from ..regularizer import realized_sharing
from ..run_settings import write_json
from ..trainer import SigmaNEnsTrainer
from ..training_args import SigmaNEnsTrainingArguments
from .points import SINGLE, SweepPoint

RUN_FILE, LOGITS_FILE = "run.json", "logits.npz"
CALIBRATION, REPORT = "calibration", "report"
# Folders of a point, and of a sweep.
ADAPTER, CHECKPOINTS, PREFIX_CACHE = "adapter", "checkpoints", "prefixes"
# Fields of a config that say what members are; a single model has none of them.
_OF_MEMBERS = frozenset({"branch_layer", "prefix", "init_scaler_std"})


@dataclass(frozen=True)
class SweepSettings:
    """What all models of a sweep share.

    Attributes:
        model: Model id on the Hub or local folder.
        data: Which examples.
        revision: Revision of the model.
        config: Fields of `SigmaNormConfig`; a single model leaves out those that are about members.
        training: Fields of `SigmaNEnsTrainingArguments`.
    """

    model: str
    data: DataArguments
    revision: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)


def point_arguments(
    point: SweepPoint, settings: SweepSettings, output_dir: Path
) -> tuple[dict[str, Any], SigmaNEnsTrainingArguments]:
    """Return the fields of the config and the training arguments of one model.

    Args:
        point: Which model.
        settings: What it shares with the others.
        output_dir: Folder of the sweep.

    Raises:
        ValueError: A value is out of range.
    """
    is_single = point.setting == SINGLE
    config = {name: value for name, value in settings.config.items() if not (is_single and name in _OF_MEMBERS)}
    SigmaNormConfig(**config)
    training = dict(settings.training)
    if not is_single:
        training |= {"diversity_temperature": point.setting.tau, "diversity_weight": point.setting.diversity_weight}
        if config.get("branch_layer") is not None and config.get("prefix") != SHARED and not settings.data.is_augmented:
            training |= {"prefix_cache": str(output_dir / PREFIX_CACHE), "prefix_dropout": False}
    return config, SigmaNEnsTrainingArguments(
        **training,
        output_dir=str(output_dir / point.name / CHECKPOINTS),
        seed=point.training_seed,
        return_member_logits=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        save_total_limit=1,
    )


def train_point(point: SweepPoint, settings: SweepSettings, splits: Mapping[str, Dataset], output_dir: Path) -> None:
    """Train one model, store its adapter, and write down the members' logits on all that is not trained on.

    A training that was cut off goes on from its last checkpoint. With a frozen or staged prefix and data that is not
    augmented, the features of the prefix are kept in the sweep's folder for all points that have the same.

    Args:
        point: Which model.
        settings: What it shares with the others.
        splits: "train", and the splits that it is asked about, "calibration" and "report".
        output_dir: Folder of the sweep.
    """
    folder = output_dir / point.name
    config, args = point_arguments(point, settings, output_dir)
    set_seed(args.seed)
    model, processor = ensemble_from_pretrained(
        settings.model,
        settings.data.task,
        num_members=point.setting.num_members,
        id2label=dict(enumerate(splits[CALIBRATION].features[LABELS].names)),
        revision=settings.revision,
        **config,
    )
    processor = settings.data.adjust(model, processor)
    trainer = SigmaNEnsTrainer(
        model=model,
        args=args,
        train_dataset=settings.data.encode(splits["train"], processor, is_training=True),
        processing_class=processor,
        data_collator=settings.data.collator(model, processor),
    )
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder / CHECKPOINTS))
    seconds = time.perf_counter() - start
    trainer.args.train_sampling_strategy = "random"  # of which predictions are in the order of their examples
    answers = {}
    for name in (CALIBRATION, REPORT):
        encoded = _by_length(settings.data.encode(splits[name], processor, is_training=False))
        answers[f"{name}/logits"] = trainer.predict(encoded).predictions
        answers[f"{name}/labels"] = np.array(encoded[LABELS])
    trainer.calibrate(settings.data.encode(splits[CALIBRATION], processor, is_training=False))
    for part in (model, processor):
        part.save_pretrained(folder / ADAPTER)
    np.savez(folder / LOGITS_FILE, **answers)
    run = {
        "realized_sharing": None if point.setting == SINGLE else realized_sharing(model),
        "seconds": seconds,
        "stored_bytes": (folder / ADAPTER / SAFETENSORS_WEIGHTS_NAME).stat().st_size,
    }
    write_json(folder / RUN_FILE, run)  # where it is, the point is whole
    shutil.rmtree(folder / CHECKPOINTS)
    trainer.accelerator.free_memory()


def _by_length(encoded: Dataset) -> Dataset:
    """Put texts of like length together, or half of the tokens would be padding; the same order for every model."""
    if "input_ids" not in encoded.column_names:
        return encoded
    lengths = [len(tokens) for tokens in encoded["input_ids"]]
    return encoded.select(np.argsort(lengths, kind="stable"))
