#!/usr/bin/env python
"""Compare sigma-norm ensembles with what they compete with, on the same data, by the same loop and the same metrics.

    python scripts/compare_baselines.py --offline_assets --output_dir out
    python scripts/compare_baselines.py --dataset_name sst2_folder --report_split validation+test --output_dir out

A single model with tuned norms, MC dropout of the same, deep ensembles of M such models and of M full fine-tunes,
BatchEnsemble-style members, LoRA members and sigma-norm members; each with and without temperature scaling on a
calibration split carved from the training data. Reported on held-out sentences and on product reviews and tweets, over
several seeds. What is finished is kept: started again, also with more seeds, the script goes on where it was. Several
processes may work on one folder if each is given seeds of its own with `--train_only`.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from baseline_costs import measure_costs
from baseline_report import DROPOUT_KIND, LOGITS_FILE, RUN_FILE, report_of
from baselines import KINDS, member_logits, trained_parameters
from datasets import Dataset
from demo_assets import minilm_folder, sentiment_shifts, sst2_like
from hardware import has_fast_bf16
from rich.console import Console
from safetensors.torch import save
from splits import LABELS, carve, check_splits, load_splits
from stage_report import write_json
from stages import parse_arguments, remember_settings
from text_splits import TextArguments
from transformers import Trainer, set_seed

COSTS_FILE, REPORT_FILE = "costs.json", "report.md"
BATCH_SIZE, COST_EXAMPLES = 32, 128


@dataclass
class ComparisonArguments:
    """What is compared."""

    output_dir: str = field(metadata={"help": "Folder for everything that is written."})
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "BERT-like checkpoint; default: the packaged MiniLM encoder."}
    )
    offline_assets: bool = field(
        default=False, metadata={"help": "Use packaged movie-review sentences instead of a dataset of the Hub."}
    )
    num_members: int = field(default=4, metadata={"help": "Number of members M, and of models in a deep ensemble."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "Seeds of initialisation and order."})
    full_seeds: list[int] | None = field(
        default=None, metadata={"help": "Seeds of the full fine-tunes, which take longest; default: all."}
    )
    kinds: list[str] = field(
        default_factory=lambda: list(KINDS), metadata={"help": f"Models that are trained: {', '.join(KINDS)}."}
    )
    num_train_epochs: float = field(default=3, metadata={"help": "Passes over the training sentences."})
    dropout_passes: int = field(default=8, metadata={"help": "Passes of MC dropout."})
    max_shift_samples: int = field(default=1_000, metadata={"help": "Sentences of each shift."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "In place of the learning rate that a kind has of its own, to choose it."}
    )
    resamples: int = field(default=1_000, metadata={"help": "Bootstrap draws for the intervals of differences."})
    train_only: bool = field(default=False, metadata={"help": "Train what is missing; no costs, no table."})


DEFAULTS = {"max_train_samples": 3_000, "calibration_fraction": 0.2}


def main(argv: list[str] | None = None) -> None:
    """Run with a command line; None: this process's."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    arguments, data_args = parse_arguments((ComparisonArguments, TextArguments), argv, DEFAULTS)
    unknown = set(arguments.kinds) - set(KINDS)
    if unknown:
        raise ValueError(f"There is no kind of model {sorted(unknown)}, only {list(KINDS)}.")
    output_dir = Path(arguments.output_dir)
    remember_settings(output_dir, _settings(arguments, data_args), has_begun=any(output_dir.glob(f"*/{RUN_FILE}")))
    splits = _splits(arguments, data_args)
    console = Console()
    for kind, seed, index in _wanted_runs(arguments):
        folder = output_dir / f"{kind}-seed{seed}-{index}"
        if not (folder / RUN_FILE).exists():
            console.print(f"training {folder.name}")
            # The models of one seed's deep ensemble must not be those of another's.
            trainer = _make_trainer(kind, 1_000 * seed + index, splits, data_args, arguments)
            dropout_passes = arguments.dropout_passes if (kind, index) == (DROPOUT_KIND, 0) else 0
            _train_and_ask(trainer, folder, splits, data_args, dropout_passes)
    if arguments.train_only:
        return
    costs_file = output_dir / COSTS_FILE
    if not costs_file.exists():
        console.print("measuring costs")
        few = {"train": splits["train"].select(range(min(COST_EXAMPLES, len(splits["train"]))))}
        trainers = {kind: _make_trainer(kind, 0, splits | few, data_args, arguments) for kind in arguments.kinds}
        examples = next(iter(trainers.values())).train_dataset
        write_json(costs_file, measure_costs(trainers, examples, BATCH_SIZE, arguments.dropout_passes))
    costs = json.loads(costs_file.read_text())
    report = report_of(output_dir, arguments.seeds, arguments.num_members, costs, arguments.resamples)
    (output_dir / REPORT_FILE).write_text(report)
    print(report)


def _settings(arguments: ComparisonArguments, data_args: TextArguments) -> dict[str, Any]:
    names = [
        "offline_assets",
        "num_members",
        "num_train_epochs",
        "dropout_passes",
        "max_shift_samples",
        "learning_rate",
    ]
    settings = {name: getattr(arguments, name) for name in names}
    settings["model"] = os.path.basename(arguments.model_name_or_path or str(minilm_folder()))
    return {"comparison": settings, "data": asdict(data_args)}


def _splits(arguments: ComparisonArguments, data_args: TextArguments) -> dict[str, Dataset]:
    """Return "train", "calibration", "report" and one split a shift, the same for every seed of a model."""
    if arguments.offline_assets:
        assets = sst2_like()
        splits = check_splits({"train": assets["train"], "report": assets["test"]}, data_args)
    else:
        splits = load_splits(data_args)
    splits = carve(splits, data_args, seed=0)
    for name, shift in sentiment_shifts().items():
        few = shift.shuffle(seed=0).take(min(arguments.max_shift_samples, len(shift)))
        splits[name] = check_splits({"train": few, "report": few}, data_args)["report"]
    return splits


def _wanted_runs(arguments: ComparisonArguments) -> Iterator[tuple[str, int, int]]:
    """Yield kind, seed and index of every model; those of one seed side by side."""
    full_seeds = arguments.seeds if arguments.full_seeds is None else arguments.full_seeds
    for seed in arguments.seeds:
        for kind in arguments.kinds:
            if kind != "full" or seed in full_seeds:
                for index in range(1 if KINDS[kind].has_members else arguments.num_members):
                    yield kind, seed, index


def _make_trainer(
    kind: str, seed: int, splits: dict[str, Dataset], data_args: TextArguments, arguments: ComparisonArguments
) -> Trainer:
    """Make a fresh model of a kind, with the training data of all."""
    set_seed(seed)
    common = {
        "output_dir": str(Path(arguments.output_dir) / "unused"),
        "num_train_epochs": arguments.num_train_epochs,
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
    trainer = KINDS[kind].make(
        arguments.model_name_or_path or str(minilm_folder()),
        splits["calibration"].features[LABELS].names,
        arguments.num_members if KINDS[kind].has_members else 1,
        arguments.learning_rate or KINDS[kind].learning_rate,
        common,
    )
    trainer.train_dataset = data_args.encode(splits["train"], trainer.processing_class, is_training=True)
    return trainer


def _train_and_ask(
    trainer: Trainer, folder: Path, splits: dict[str, Dataset], data_args: TextArguments, dropout_passes: int
) -> None:
    """Train a model, and write down its members' logits on everything that is not trained on."""
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


if __name__ == "__main__":
    main()
