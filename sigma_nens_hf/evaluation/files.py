"""The folder that an evaluation is written into: whole, or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..metrics.example_table import ExampleTable
from ..plots import entropy_histogram, gates_plot, reliability_diagram, risk_coverage_plot, sharing_histogram
from .report import long_form

METRICS, EXAMPLES, OOD_EXAMPLES = "metrics.json", "examples.csv", "ood_examples.csv"
_PICTURES = ("reliability", "risk_coverage", "gates", "sharing", "entropy")
# All that an evaluation may consist of; the metrics come last, so that they say that the others are there.
_FILES = (
    *(f"{picture}.{suffix}" for picture in _PICTURES for suffix in ("png", "csv")),
    EXAMPLES, OOD_EXAMPLES, "metrics.csv", METRICS,
)  # fmt: skip


@contextmanager
def results_folder(output_dir: Path, overwrite: bool, is_main_process: bool) -> Iterator[Path]:
    """Give a folder to write an evaluation into, whose files are moved to their place once all of them are there.

    Args:
        output_dir: Their place.
        overwrite: Whether they may take the place of an earlier evaluation's.
        is_main_process: Whether this process writes them; others only learn whether they may be written.

    Raises:
        ValueError: There is an evaluation already, or a file where the folder is to be.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"{output_dir} is no folder.")
    if not overwrite and any((output_dir / name).exists() for name in _FILES):
        raise ValueError(f"{output_dir} holds an evaluation already. Choose another folder, or pass --overwrite.")
    place = output_dir.resolve()
    unfinished = place.with_name(f"{place.name}.unfinished")
    if not is_main_process:
        yield unfinished
        return
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
        unfinished.mkdir(parents=True)
        yield unfinished
        output_dir.mkdir(exist_ok=True)
        for name in reversed(_FILES):
            (output_dir / name).unlink(missing_ok=True)
        for name in _FILES:
            if (unfinished / name).exists():
                os.replace(unfinished / name, output_dir / name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_report(
    folder: Path, report: dict[str, Any], model: nn.Module, table: ExampleTable, ood_table: ExampleTable | None
) -> None:
    """Write the report of an evaluation, and its pictures.

    Args:
        folder: A folder as from `results_folder`.
        report: As from `report_of`.
        model: The ensemble.
        table: The evaluated rows.
        ood_table: Those from another distribution, None where there are none.
    """
    (folder / METRICS).write_text(json.dumps(report, indent=2), encoding="utf-8")
    long_form(report).to_csv(folder / "metrics.csv", index=False)
    reliability_diagram(table, report["n_bins"], path=folder / "reliability.png")
    risk_coverage_plot(table, path=folder / "risk_coverage.png")
    gates_plot(model, path=folder / "gates.png")
    sharing_histogram(model, path=folder / "sharing.png")
    if ood_table is not None:
        entropy_histogram(table, ood_table, path=folder / "entropy.png")
