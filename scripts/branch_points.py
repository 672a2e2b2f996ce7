#!/usr/bin/env python
"""Find out what late branching costs in quality: every branch point and every kind of prefix against full depth.

    python scripts/branch_points.py --offline_assets --output_dir out
    python scripts/branch_points.py --dataset_name sst2_folder --report_split validation+test --output_dir out

Trains an ensemble for each number of members, kind of prefix, branch point and seed, and prints a table of NLL,
accuracy and the members' disagreement on held-out sentences, beside the counted cost. What is finished is kept: started
again, also with more seeds, the script goes on where it was. Several processes may work on one folder if each is given
seeds of its own with `--train_only`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import transformers
from baseline_report import RUN_FILE, markdown, mean_of, read_answers
from baseline_report import Method as ReportedMethod
from baselines import ensemble
from comparison_runs import DEFAULTS, RunArguments, common_arguments, comparison_splits, train_and_ask
from datasets import Dataset
from rich.console import Console
from stages import parse_arguments
from transformers import AutoConfig, set_seed

from sigma_nens_hf import SigmaNEnsTrainer, SigmaNEnsTrainingArguments
from sigma_nens_hf.config import FROZEN, PREFIXES, SHARED, STAGED
from sigma_nens_hf.data.splits import LABELS
from sigma_nens_hf.data.texts import TextArguments
from sigma_nens_hf.metrics import TABLE_METRICS, paired_bootstrap
from sigma_nens_hf.run_settings import remember_settings

REPORT_FILE = "report.md"
HELD_OUT = "held-out sentences"


@dataclass
class BranchArguments(RunArguments):
    """What is compared."""

    members: list[int] = field(default_factory=lambda: [4, 8], metadata={"help": "Numbers of members M."})
    prefixes: list[str] = field(
        default_factory=lambda: list(PREFIXES), metadata={"help": f"What becomes of the prefix: {', '.join(PREFIXES)}."}
    )
    branch_layers: list[int] | None = field(default=None, metadata={"help": "Branch points; default: every block."})
    diversity_weight: float | None = field(default=None, metadata={"help": "Lambda; default: the trainer's."})


@dataclass(frozen=True)
class BranchPoint:
    """A place of the branch.

    Attributes:
        num_members: Number of members M.
        prefix: What becomes of the norms before it; None: there are none, members start at the inputs.
        layer: Number of the first block that carries members.
    """

    num_members: int
    prefix: str | None = None
    layer: int = 0

    @property
    def name(self) -> str:
        """Name of its folders, without the seed."""
        return f"M{self.num_members}-{'full' if self.prefix is None else f'{self.prefix}{self.layer}'}"

    def counted_costs(self, num_blocks: int) -> tuple[float, float, float]:
        """Return the counted work of a training step, of one with the prefix cached, and of inference.

        A step of one model is a forward and a backward through each of L blocks and costs 1, its inference L. Members
        in the last K blocks take (L - K) + 2 M K of 2 L, the first term away once the prefix is cached, and a backward
        through the prefix more where that is trained; inference takes (L - K) + M K of L.

        Args:
            num_blocks: Number of blocks L.
        """
        below, above = self.layer, self.num_members * (num_blocks - self.layer)
        prefix_passes = 2 if self.prefix == SHARED else 1
        cached_passes = prefix_passes if self.prefix == SHARED else 0
        training, cached = (
            (passes * below + 2 * above) / (2 * num_blocks) for passes in (prefix_passes, cached_passes)
        )
        return training, cached, (below + above) / num_blocks


def main(argv: list[str] | None = None) -> None:
    """Run with a command line; None: this process's."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    arguments, data_args = parse_arguments((BranchArguments, TextArguments), argv, DEFAULTS)
    unknown = set(arguments.prefixes) - set(PREFIXES)
    if unknown:
        raise ValueError(f"There is no prefix {sorted(unknown)}, only {list(PREFIXES)}.")
    output_dir = Path(arguments.output_dir)
    settings = arguments.settings(data_args, "diversity_weight")
    remember_settings(output_dir, settings, has_begun=any(output_dir.glob(f"*/{RUN_FILE}")))
    num_blocks = AutoConfig.from_pretrained(arguments.checkpoint).num_hidden_layers
    splits = comparison_splits(data_args, arguments.offline_assets)
    console = Console()
    for seed in arguments.seeds:
        for point in _branch_points(arguments, num_blocks):
            folder = output_dir / f"{point.name}-seed{seed}-0"
            if not (folder / RUN_FILE).exists():
                console.print(f"training {folder.name}")
                trainer = _make_trainer(point, 1_000 * seed, splits, data_args, arguments)
                train_and_ask(trainer, folder, splits, data_args)
    if not arguments.train_only:
        report = report_of(output_dir, list(_branch_points(arguments, num_blocks)), num_blocks, arguments)
        (output_dir / REPORT_FILE).write_text(report)
        print(report)


def _branch_points(arguments: BranchArguments, num_blocks: int) -> Iterator[BranchPoint]:
    """Yield every branch point; block 0 is one only for norms in front of it, which BERT-like models have."""
    layers = range(num_blocks) if arguments.branch_layers is None else arguments.branch_layers
    for num_members in arguments.members:
        yield BranchPoint(num_members)
        for prefix in arguments.prefixes:
            for layer in layers:
                yield BranchPoint(num_members, prefix, layer)


def _make_trainer(
    point: BranchPoint,
    seed: int,
    splits: dict[str, Dataset],
    data_args: TextArguments,
    arguments: BranchArguments,
) -> SigmaNEnsTrainer:
    """Make the trainer of a fresh ensemble; those of a seed start from the same random numbers."""
    set_seed(seed)
    config = {} if point.prefix is None else {"branch_layer": point.layer, "prefix": point.prefix}
    model, tokenizer = ensemble(
        arguments.checkpoint, splits["calibration"].features[LABELS].names, point.num_members, **config
    )
    training = common_arguments(arguments.output_dir, arguments.num_train_epochs, seed)
    if arguments.diversity_weight is not None:
        training["diversity_weight"] = arguments.diversity_weight
    if point.prefix in (FROZEN, STAGED):
        training |= {"prefix_cache": str(Path(arguments.output_dir) / "prefixes"), "prefix_dropout": False}
    return SigmaNEnsTrainer(
        model=model,
        args=SigmaNEnsTrainingArguments(**training),
        train_dataset=data_args.encode(splits["train"], tokenizer, is_training=True),
        processing_class=tokenizer,
    )


def report_of(folder: Path, points: list[BranchPoint], num_blocks: int, arguments: BranchArguments) -> str:
    """Return the tables in markdown, one for each number of members.

    Args:
        folder: Output folder.
        points: The branch points; those without a finished run are left out.
        num_blocks: Number of blocks L.
        arguments: Seeds and draws.
    """
    found = {}
    for point in points:
        training, _, inference = point.counted_costs(num_blocks)
        costs = {"training": {point.name: training}, "inference": {point.name: inference}}
        answers = read_answers(folder, ReportedMethod(point.name, point.name), arguments.seeds, 1, costs)
        if answers is not None:
            found[point] = answers
    parts = []
    for num_members in arguments.members:
        full = found.get(BranchPoint(num_members))
        rows = []
        for point, answers in found.items():
            if point.num_members != num_members:
                continue
            tables = answers.tables[HELD_OUT]
            training, cached, inference = point.counted_costs(num_blocks)
            row = {
                "prefix": point.prefix or "none: full depth",
                "first block of members": "-" if point.prefix is None else str(point.layer),
                "training": f"{training:.2f}",
                "cached": "-" if point.prefix in (None, SHARED) else f"{cached:.2f}",
                "inference": f"{inference:.2f}",
                "stored": f"{answers.stored_bytes / 1024:,.0f} KiB",
                "seeds": str(len(tables)),
            }
            row |= {
                title: mean_of([TABLE_METRICS[metric](table) for table in tables.values()])
                for title, metric in (("NLL", "nll"), ("accuracy", "accuracy"))
            }
            row["disagreement"] = mean_of([table.disagreement.mean() for table in tables.values()])
            row["NLL minus full depth"] = "-"
            if full is not None and point.prefix is not None:
                seeds = sorted(tables.keys() & full.tables[HELD_OUT].keys())
                pair = ([by_seed[seed] for seed in seeds] for by_seed in (tables, full.tables[HELD_OUT]))
                difference = paired_bootstrap(*pair, "nll", n_resamples=arguments.resamples)
                row["NLL minus full depth"] = (
                    f"{difference.difference:+.3f} [{difference.lower:+.3f}, {difference.upper:+.3f}]"
                )
            rows.append(row)
        if rows:
            parts += [f"**M = {num_members}**", markdown(rows)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
