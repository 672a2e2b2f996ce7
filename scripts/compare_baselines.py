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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import transformers
from baseline_costs import measure_costs
from baseline_report import DROPOUT_KIND, RUN_FILE, report_of
from baselines import KINDS
from comparison_runs import BATCH_SIZE, DEFAULTS, RunArguments, common_arguments, comparison_splits, train_and_ask
from datasets import Dataset
from demo_assets import sentiment_shifts
from rich.console import Console
from stages import parse_arguments
from transformers import Trainer, set_seed

from sigma_nens_hf.data.splits import LABELS, check_splits
from sigma_nens_hf.data.texts import TextArguments
from sigma_nens_hf.run_settings import remember_settings, write_json

COSTS_FILE, REPORT_FILE = "costs.json", "report.md"
COST_EXAMPLES = 128


@dataclass
class ComparisonArguments(RunArguments):
    """What is compared."""

    num_members: int = field(default=4, metadata={"help": "Number of members M, and of models in a deep ensemble."})
    full_seeds: list[int] | None = field(
        default=None, metadata={"help": "Seeds of the full fine-tunes, which take longest; default: all."}
    )
    kinds: list[str] = field(
        default_factory=lambda: list(KINDS), metadata={"help": f"Models that are trained: {', '.join(KINDS)}."}
    )
    dropout_passes: int = field(default=8, metadata={"help": "Passes of MC dropout."})
    max_shift_samples: int = field(default=1_000, metadata={"help": "Sentences of each shift."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "In place of the learning rate that a kind has of its own, to choose it."}
    )


def main(argv: list[str] | None = None) -> None:
    """Run with a command line; None: this process's."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    arguments, data_args = parse_arguments((ComparisonArguments, TextArguments), argv, DEFAULTS)
    unknown = set(arguments.kinds) - set(KINDS)
    if unknown:
        raise ValueError(f"There is no kind of model {sorted(unknown)}, only {list(KINDS)}.")
    output_dir = Path(arguments.output_dir)
    settings = arguments.settings(data_args, "num_members", "dropout_passes", "max_shift_samples", "learning_rate")
    remember_settings(output_dir, settings, has_begun=any(output_dir.glob(f"*/{RUN_FILE}")))
    splits = _splits(arguments, data_args)
    console = Console()
    for kind, seed, index in _wanted_runs(arguments):
        folder = output_dir / f"{kind}-seed{seed}-{index}"
        if not (folder / RUN_FILE).exists():
            console.print(f"training {folder.name}")
            # The models of one seed's deep ensemble must not be those of another's.
            trainer = _make_trainer(kind, 1_000 * seed + index, splits, data_args, arguments)
            dropout_passes = arguments.dropout_passes if (kind, index) == (DROPOUT_KIND, 0) else 0
            train_and_ask(trainer, folder, splits, data_args, dropout_passes)
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


def _splits(arguments: ComparisonArguments, data_args: TextArguments) -> dict[str, Dataset]:
    """Return "train", "calibration", "report" and one split a shift, the same for every seed of a model."""
    splits = comparison_splits(data_args, arguments.offline_assets)
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
    trainer = KINDS[kind].make(
        arguments.checkpoint,
        splits["calibration"].features[LABELS].names,
        arguments.num_members if KINDS[kind].has_members else 1,
        arguments.learning_rate or KINDS[kind].learning_rate,
        common_arguments(arguments.output_dir, arguments.num_train_epochs, seed),
    )
    trainer.train_dataset = data_args.encode(splits["train"], trainer.processing_class, is_training=True)
    return trainer


if __name__ == "__main__":
    main()
