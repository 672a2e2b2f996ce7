"""The figures of an evaluation: as one report, in long form, and as a table to read."""

import platform
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas
from rich.markup import escape
from rich.table import Table
from torch import nn

from ..calibration import temperature_in_use
from ..members import active_config, base_model_of
from ..metrics import (
    TABLE_METRICS,
    ExampleTable,
    bootstrap_statistic,
    calibration_report,
    classwise_calibration_error,
    ood_metrics,
)
from ..metrics.out_of_distribution import area_under_roc
from .evaluate import DatasetEvaluation

_PACKAGES = ("sigma_nens_hf", "transformers", "peft", "torch", "datasets", "accelerate")
_ABOUT_INTERVALS = (
    "Intervals are 95%, basic bootstrap over rows. Those of calibration errors are for the figure without its upward "
    "bias, so it may lie above them."
)
_ABOUT_FLOOR = "a perfectly calibrated model with these confidences stays below it 95 times in 100."
_UNCERTAINTIES = ("predictive_entropy", "expected_entropy", "modulation_uncertainty", "disagreement")
# By their names in reports; a higher score means more out-of-distribution.
_OOD_SCORES: dict[str, Callable[[ExampleTable], np.ndarray]] = {
    "predictive_entropy": lambda table: table.predictive_entropy,
    "modulation_uncertainty": lambda table: table.modulation_uncertainty,
    "disagreement": lambda table: table.disagreement,
    "one_minus_probability": lambda table: 1 - table.probability,
}
METRIC_TITLES = {
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
        numbers of rows, members and classes; the `temperature` in use and the stored one; base model and versions; and
        what the figures are `about`.
    """
    table, config = evaluation.table, active_config(base_model_of(model))
    metrics = calibration_report(
        table, n_bins=settings["n_bins"], n_resamples=settings["resamples"], seed=settings["seed"]
    )
    if evaluation.classwise_calibration_error is not None:
        metrics["classwise_calibration_error"] = {"value": evaluation.classwise_calibration_error}
    of_ood = None
    if ood is not None:
        of_ood = {name: _ood_figures(score(table), score(ood.table), settings) for name, score in _OOD_SCORES.items()}
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
        "stored_temperature": config.calibration_temperature,
        "metrics": metrics,
        "members": {"accuracy": evaluation.member_accuracy.tolist(), "nll": evaluation.member_nll.tolist()},
        "uncertainty": {name: float(getattr(table, name).mean()) for name in _UNCERTAINTIES},
        "out_of_distribution": of_ood,
        "about": _about(),
        "versions": {"python": platform.python_version(), **{package: version(package) for package in _PACKAGES}},
    }


def _about() -> dict[str, str]:
    """Say what each figure is: the first lines of the metrics' own documentation."""
    metrics = TABLE_METRICS | {"classwise_calibration_error": classwise_calibration_error}
    return {
        **{name: metric.__doc__.splitlines()[0].removeprefix("Return ") for name, metric in metrics.items()},
        "better": "All of these are better when lower, but for accuracy.",
        "lower, upper": _ABOUT_INTERVALS,
        "noise_floor_95": _ABOUT_FLOOR,
        "uncertainty": "Means over rows, in nats, of the members as they are: the temperature acts on the pooled "
        "probabilities alone. disagreement: fraction of pairs of members that predict different classes.",
        "out_of_distribution": "The out-of-distribution rows are the positive class; a higher score means more so.",
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
        title=f"{report['num_rows']:,} rows of {escape(report['dataset'])}, {report['num_members']} members, "
        f"temperature {report['temperature']:.3g}{_unused_temperature(report)}",
        caption=f"{_ABOUT_INTERVALS} 95% floor: {_ABOUT_FLOOR}",
    )
    for name in ("", "value", "95% interval", "95% floor"):
        table.add_column(name, justify="right" if name else "left", no_wrap=bool(name))  # figures are never cut off
    for name, figures in report["metrics"].items():
        has_interval = "lower" in figures
        table.add_row(
            METRIC_TITLES[name],
            f"{figures['value']:.4f}",
            f"{figures['lower']:.4f} to {figures['upper']:.4f}" if has_interval else "",
            f"{figures['noise_floor_95']:.4f}" if "noise_floor_95" in figures else "",
        )
    for name, values in report["members"].items():
        table.add_row(f"members' {METRIC_TITLES[name]}, mean", f"{np.mean(values):.4f}")
        table.add_row("  lowest and highest", f"{min(values):.3f}, {max(values):.3f}")
    for name, value in report["uncertainty"].items():
        table.add_row(f"mean {name.replace('_', ' ')}", f"{value:.4f}")
    if report["num_words_cut_off"]:
        table.add_row("words cut off, without a row", f"{report['num_words_cut_off']:,}")
    for score, figures in (report["out_of_distribution"] or {}).items():
        interval = f"{figures['auroc_lower']:.4f} to {figures['auroc_upper']:.4f}"
        table.add_row(f"OOD AUROC by {score.replace('_', ' ')}", f"{figures['auroc']:.4f}", interval)
    return table


def _unused_temperature(report: dict[str, Any]) -> str:
    stored = report["stored_temperature"]
    is_unused = stored is not None and report["temperature"] != stored
    return f" (the adapter stores {stored:.3g}, used with --calibrated)" if is_unused else ""


def _ood_figures(id_scores: np.ndarray, ood_scores: np.ndarray, settings: dict[str, Any]) -> dict[str, float]:
    """Return `ood_metrics`, and the interval of the AUROC with the examples of both sets drawn again."""
    interval = bootstrap_statistic(
        area_under_roc,
        id_scores,
        ood_scores,
        n_resamples=settings["resamples"],
        seed=settings["seed"],
    )
    lower, upper = np.clip(interval[1:], 0, 1).tolist()
    return {**ood_metrics(id_scores, ood_scores), "auroc_lower": lower, "auroc_upper": upper}
