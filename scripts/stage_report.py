"""What a trained model showed: evaluated on the reported split, written down, and set beside others in a table."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from sigma_nens_hf import SigmaNEnsTrainer, TemperatureFit
from sigma_nens_hf.data.arguments import DataArguments, Split
from sigma_nens_hf.data.splits import pieces
from sigma_nens_hf.metrics import ExampleTable, calibration_report, paired_bootstrap

_ROWS = {
    "accuracy": "accuracy",
    "nll": "NLL (nats)",
    "ece": "ECE (15 bins)",
    "ace": "adaptive ECE",
    "brier": "Brier score",
    "aurc": "area risk-coverage",
}
_SCALED = ("nll", "ece")
RESAMPLES = 1_000  # draws for intervals and noise floors


@dataclass
class StageReport:
    """What one trained model showed on the reported split.

    Attributes:
        name: "single" or "ensemble".
        num_members: Number of members M.
        metrics: As from `calibration_report`, by metric.
        scaled_metrics: The same after temperature scaling, without what it does not change.
        temperature: The temperature, fitted on the calibration split.
        calibration_nll: NLL on the calibration split in nats, to choose between settings by.
        disagreement: Share of examples on which two members differ, mean over pairs.
        seconds: Training time of this process, evaluations included.
        resumed: Whether an earlier process had begun the training, so that `seconds` is only a part.
        adapter_bytes: Size of the stored adapter weights.
        num_examples: Number of reported examples.
    """

    name: str
    num_members: int
    metrics: dict[str, dict[str, float]]
    scaled_metrics: dict[str, dict[str, float]]
    temperature: float
    calibration_nll: float
    disagreement: float
    seconds: float
    resumed: bool
    adapter_bytes: int
    num_examples: int


def evaluate_report(
    trainer: SigmaNEnsTrainer, report: Split, data_args: DataArguments, fit: TemperatureFit
) -> tuple[dict[str, Any], ExampleTable]:
    """Evaluate a trained ensemble on the reported split.

    Args:
        trainer: Its trainer, which returns the members' logits.
        report: The reported split, as it was carved.
        data_args: How it is encoded.
        fit: The temperature, fitted on the calibration split.

    Returns:
        The fields of a `StageReport` that come from the reported split and the temperature, and the examples.
    """
    tables, scaled_tables = [], []
    for piece in pieces(report):
        with trainer.args.main_process_first(desc="encoding"):
            encoded = data_args.encode(piece, trainer.processing_class, is_training=False)
        prediction = trainer.predict(encoded, metric_key_prefix="report")
        logits, labels = prediction.predictions, prediction.label_ids
        tables.append(ExampleTable.of_members(logits, labels))
        scaled_tables.append(ExampleTable.of_members(logits, labels, temperature=fit.temperature))
    table = ExampleTable.concatenate(tables)
    scaled = calibration_report(ExampleTable.concatenate(scaled_tables), n_resamples=RESAMPLES)
    fields = {
        "num_members": table.member_votes.shape[1],
        "metrics": calibration_report(table, n_resamples=RESAMPLES),
        "scaled_metrics": {name: scaled[name] for name in _SCALED},
        "temperature": fit.temperature,
        "calibration_nll": fit.nll_before,
        "disagreement": float(table.disagreement.mean()),
        "num_examples": len(table),
    }
    return fields, table


def table_of(reports: list[StageReport], examples: list[ExampleTable], seed: int) -> Table:
    """Return the reports as a table, one column for every model and one for the difference of two.

    Args:
        reports: The reports, the last one that of the ensemble.
        examples: The examples that each is about, the same ones in the same order.
        seed: The run's seed.
    """
    table = Table(
        title=f"{reports[0].num_examples:,} held-out examples, seed {seed}",
        caption="Lower is better but for accuracy. In brackets: 95% bootstrap intervals over examples, for the "
        "difference over the same examples. One seed is no evidence for a method. The calibration split is to choose "
        "settings by.",
    )
    has_difference = len(reports) == 2
    for title in ("", *(f"{report.name} (M={report.num_members})" for report in reports)):
        table.add_column(title, justify="right" if title else "left")
    if has_difference:
        table.add_column("difference", justify="right")
    for metric, title in _ROWS.items():
        cells = [_with_interval(**report.metrics[metric]) for report in reports]
        if has_difference:
            difference = paired_bootstrap(examples[1], examples[0], metric, n_resamples=RESAMPLES)
            cells.append(_with_interval(*difference, sign="+"))
        table.add_row(title, *cells)
        if metric == "ece":
            table.add_row("  if calibrated", *(_noise_floor(**report.metrics[metric]) for report in reports))
    rows = {
        "temperature T": lambda report: f"{report.temperature:.3f}",
        "NLL at T": lambda report: _with_interval(**report.scaled_metrics["nll"]),
        "ECE at T": lambda report: _with_interval(**report.scaled_metrics["ece"]),
        "NLL, calibration split": lambda report: f"{report.calibration_nll:.4f}",
        "members disagree on": lambda report: f"{report.disagreement:.4f}" if report.num_members > 1 else "-",
        "training time": lambda report: f"{report.seconds:.0f} s{' (resumed)' if report.resumed else ''}",
        "stored adapter": lambda report: f"{report.adapter_bytes / 1024:,.0f} KiB",
    }
    for name, cell in rows.items():
        table.add_row(name, *map(cell, reports))
    return table


def save_examples(path: Path, table: ExampleTable) -> None:
    """Write a per-example table that is there whole or not at all.

    Args:
        path: The npz file.
        table: The table.
    """
    unfinished = path.with_suffix(".unfinished.npz")
    np.savez(unfinished, **table.columns())
    os.replace(unfinished, path)


def load_examples(path: Path) -> ExampleTable:
    """Read a per-example table.

    Args:
        path: The npz file.
    """
    return ExampleTable(**np.load(path))


def _with_interval(value: float, lower: float, upper: float, sign: str = "", **_: float) -> str:
    # In a narrow terminal the line breaks in front of the interval, not inside.
    return f"{value:{sign}.4f} [{lower:{sign}.3f},\N{NO-BREAK SPACE}{upper:{sign}.3f}]"


def _noise_floor(noise_floor_mean: float, noise_floor_95: float, **_: float) -> str:
    return f"{noise_floor_mean:.4f} (95%\N{NO-BREAK SPACE}below\N{NO-BREAK SPACE}{noise_floor_95:.3f})"
