"""The folder that an evaluation is written into: whole, or not at all."""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..metrics.example_table import ExampleTable
from ..plots import entropy_histogram, gates_plot, reliability_diagram, risk_coverage_plot, sharing_histogram
from .report import long_form

METRICS, EXAMPLES, OOD_EXAMPLES = "metrics.json", "examples.csv", "ood_examples.csv"
RELIABILITY = "reliability.png"
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
        ValueError: There is an evaluation already, or a file or folder where one of another kind is to be.
        OSError: The folder cannot be written.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"{output_dir} is no folder.")
    present = [output_dir / name for name in _FILES if (output_dir / name).exists()]
    if present and not overwrite:
        raise ValueError(f"{output_dir} holds an evaluation already. Choose another folder, or pass --overwrite.")
    for path in present:
        if path.is_dir():
            raise ValueError(f"{path} is a folder, but a file of that name is to be written.")
    if not is_main_process:
        yield output_dir
        return
    is_new = not output_dir.exists()
    output_dir.mkdir(parents=True, exist_ok=True)
    try:
        # Inside, since only within one file system do files move whole.
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=output_dir) as workplace:
            finished, replaced = Path(workplace, "finished"), Path(workplace, "replaced")
            finished.mkdir()
            replaced.mkdir()
            yield finished
            with ExitStack() as undo:
                for source, target in ((output_dir, replaced), (finished, output_dir)):
                    for name in _FILES:
                        if (source / name).exists():
                            os.replace(source / name, target / name)
                            undo.callback(os.replace, target / name, source / name)
                undo.pop_all()
    except BaseException:
        if is_new:
            output_dir.rmdir()
        raise


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
    (folder / METRICS).write_text(json.dumps(_finite(report), indent=2, allow_nan=False), encoding="utf-8")
    long_form(report).to_csv(folder / "metrics.csv", index=False)
    drawn_alike = {"n_simulations": report["resamples"], "seed": report["seed"]}
    reliability_diagram(table, report["n_bins"], **drawn_alike, path=folder / RELIABILITY)
    risk_coverage_plot(table, path=folder / "risk_coverage.png")
    gates_plot(model, path=folder / "gates.png")
    sharing_histogram(model, path=folder / "sharing.png")
    if ood_table is not None:
        entropy_histogram(table, ood_table, path=folder / "entropy.png")


def _finite(value: Any) -> Any:
    """Put null, which json has, in the place of infinite figures, which it has not."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
