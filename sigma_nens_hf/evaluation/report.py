"""The figures of an evaluation: as one report, in long form, and as a table to read."""

import platform
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas
from rich.table import Table
from torch import nn

from ..calibration import temperature_in_use
from ..members import active_config, base_model_of
from ..metrics.example_table import ExampleTable
from ..metrics.out_of_distribution import ood_metrics
from ..metrics.report import calibration_report
from .evaluate import DatasetEvaluation

_PACKAGES = ("sigma_nens_hf", "transformers", "peft", "torch", "datasets", "accelerate")
_UNCERTAINTIES = ("predictive_entropy", "expected_entropy", "modulation_uncertainty", "disagreement")
# By their names in reports; a higher score means more out-of-distribution.
_OOD_SCORES: dict[str, Callable[[ExampleTable], np.ndarray]] = {
    "predictive_entropy": lambda table: table.predictive_entropy,
    "modulation_uncertainty": lambda table: table.modulation_uncertainty,
    "disagreement": lambda table: table.disagreement,
    "one_minus_probability": lambda table: 1 - table.probability,
}
_TITLES = {
    "accuracy": "accuracy",
    "nll": "NLL (nats)",
    "brier": "Brier score",
    "ece": "expected calibration error (ECE)",
    "ace": "adaptive calibration error (ACE)",
    "aurc": "area under risk-coverage (AURC)",
    "classwise_calibration_error": "class-wise calibration error",
}


def report_of(
    model: nn.Module, evaluation: DatasetEvaluation, ood: DatasetEvaluation | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return all figures of an evaluation, and what they were made of.

    Args:
        model: The ensemble.
        evaluation: Of labelled examples.
        ood: Of examples from another distribution, None where there are none.
        settings: What is to be known of the evaluation, among which `n_bins`, `resamples` (the number of draws for the
            intervals and noise floors) and their `seed`.

    Returns:
        The settings and: `metrics` by name as from `calibration_report`; `members`, a list of M for each figure; the
        means of the `uncertainty`; `out_of_distribution` by score as from `ood_metrics`, None where there is none;
        numbers of rows, members and classes; the `temperature` in use; base model and versions.
    """
    table, config = evaluation.table, active_config(base_model_of(model))
    metrics = calibration_report(
        table, n_bins=settings["n_bins"], n_resamples=settings["resamples"], seed=settings["seed"]
    )
    if evaluation.classwise_calibration_error is not None:
        metrics["classwise_calibration_error"] = {"value": evaluation.classwise_calibration_error}
    of_ood = None
    if ood is not None:
        of_ood = {name: ood_metrics(score(table), score(ood.table)) for name, score in _OOD_SCORES.items()}
    return {
        **settings,
        "base_model": settings.get("base_model") or config.base_model_name_or_path,
        "base_model_revision": config.revision,
        "num_rows": len(table),
        "num_words_cut_off": evaluation.num_words_cut_off,
        "num_ood_rows": None if ood is None else len(ood.table),
        "num_members": config.num_members,
        "num_classes": config.num_labels,
        "temperature": temperature_in_use(model),
        "metrics": metrics,
        "members": {"accuracy": evaluation.member_accuracy.tolist(), "nll": evaluation.member_nll.tolist()},
        "uncertainty": {name: float(getattr(table, name).mean()) for name in _UNCERTAINTIES},
        "out_of_distribution": of_ood,
        "versions": {"python": platform.python_version(), **{package: version(package) for package in _PACKAGES}},
    }


def long_form(report: dict[str, Any]) -> pandas.DataFrame:
    """Return the figures of a report as rows of `group`, `name`, `figure` and `value`.

    Args:
        report: As from `report_of`.
    """
    rows = [
        ("ensemble", name, figure, value)
        for name, of_metric in report["metrics"].items()
        for figure, value in of_metric.items()
    ]
    rows += [("ensemble", name, "mean", value) for name, value in report["uncertainty"].items()]
    rows += [
        (f"member_{m}", name, "value", value)
        for name, values in report["members"].items()
        for m, value in enumerate(values)
    ]
    rows += [
        ("out_of_distribution", score, figure, value)
        for score, of_score in (report["out_of_distribution"] or {}).items()
        for figure, value in of_score.items()
    ]
    return pandas.DataFrame(rows, columns=["group", "name", "figure", "value"])


def table_of(report: dict[str, Any]) -> Table:
    """Return the figures of a report as a table to read.

    Args:
        report: As from `report_of`.
    """
    table = Table(
        title=f"{report['num_rows']:,} rows of {report['dataset']}, {report['num_members']} members, "
        f"temperature {report['temperature']:.3g}",
        caption="Intervals: 95 %, bootstrap over rows. Floor: what 95 % of perfectly calibrated models of these "
        "confidences would stay below.",
    )
    for name in ("", "value", "interval", "floor"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, figures in report["metrics"].items():
        has_interval = "lower" in figures
        table.add_row(
            _TITLES[name],
            f"{figures['value']:.4f}",
            f"{figures['lower']:.4f} to {figures['upper']:.4f}" if has_interval else "",
            f"{figures['noise_floor_95']:.4f}" if "noise_floor_95" in figures else "",
        )
    for name, values in report["members"].items():
        table.add_row(f"members' {_TITLES[name]}", f"{np.mean(values):.4f}", f"{min(values):.4f} to {max(values):.4f}")
    for name, value in report["uncertainty"].items():
        table.add_row(f"mean {name.replace('_', ' ')}", f"{value:.4f}")
    if report["num_words_cut_off"]:
        table.add_row("words cut off, without a row", f"{report['num_words_cut_off']:,}")
    for score, figures in (report["out_of_distribution"] or {}).items():
        table.add_row(f"OOD AUROC by {score.replace('_', ' ')}", f"{figures['auroc']:.4f}")
    return table
