"""Figures of how far the predictions of one or several models can be trusted."""

import os
from collections.abc import Mapping

import numpy as np
import pandas
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from scipy.stats import binomtest

from ..metrics.calibration_bins import equal_width_cuts
from ..metrics.example_table import ExampleTable
from ..metrics.noise_floor import NoiseFloor, calibration_noise_floor
from ..metrics.table_metrics import area_under_risk_coverage, expected_calibration_error, risk_coverage_curve
from .saving import save_figure
from .style import GREY, SERIES_STYLES, house_style
from .tables import labelled_tables, long_format


@house_style()
def reliability_diagram(
    table: ExampleTable | Mapping[str, ExampleTable],
    n_bins: int = 15,
    path: str | os.PathLike | None = None,
    *,
    n_simulations: int = 1000,
    seed: int = 0,
) -> Figure:
    """Show accuracy against confidence, bin by bin with 95 % intervals, and how many examples the bins hold.

    The bins are those of `expected_calibration_error`. Its value is given beside what a perfectly calibrated model
    with the same confidences would show: `calibration_noise_floor`. Empty bins are left out, and confidences below
    all of the examples'. For a single model bars show the gap of accuracy and confidence.

    Source of the intervals: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    1927.

    Args:
        table: A labelled table; or up to 6 by the names of their models, to compare.
        n_bins: Number of bins.
        path: Where to save the figure, as .png, .pdf or .svg, with its numbers as .csv beside it; None: nowhere.
        n_simulations: Number of simulations of the noise floor.
        seed: Seed of these.

    Returns:
        The figure. Its numbers are, for every `model` and bin: the edges `bin_from` and `bin_to`, the number of
        `examples`, mean `confidence`, `accuracy` with its interval `accuracy_low` to `accuracy_high`, and the `gap`
        accuracy - confidence; and, the same for all bins of a model, `ece`, `noise_floor_mean`, `noise_floor_95`.

    Raises:
        TypeError: `table` is neither a table nor tables by name.
        ValueError: There is no table, or more than 6; one has no examples or no labels; a name begins with "_";
            `n_bins` is below 1; or `path` has another suffix.
    """
    bins = {
        name: _reliability_bins(of_model, n_bins, calibration_noise_floor(of_model, n_bins, n_simulations, seed))
        for name, of_model in labelled_tables(table).items()
    }
    first = min(of_model.index[0] for of_model in bins.values())
    edges = (np.arange(n_bins + 1) / n_bins)[first:]

    figure = Figure(figsize=(5.5, 5.2))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    upper.use_sticky_edges = False
    for style, (name, of_model) in zip(SERIES_STYLES, bins.items(), strict=False):
        summary = of_model.iloc[0]
        upper.errorbar(
            of_model["confidence"],
            of_model["accuracy"],
            # Where all are right or all wrong, rounding may put an end on the other side.
            [
                (of_model["accuracy"] - of_model["accuracy_low"]).clip(lower=0),
                (of_model["accuracy_high"] - of_model["accuracy"]).clip(lower=0),
            ],
            label=f"{name}: ECE {summary['ece']:.3f} (if calibrated: mean {summary['noise_floor_mean']:.3f}, "
            f"95% below {summary['noise_floor_95']:.3f})",
            elinewidth=0.8,
            capsize=2,
            **style._asdict(),
        )
        counts = of_model["examples"].reindex(range(first, n_bins), fill_value=0)
        lower.stairs(counts, edges, color=style.color, linestyle=style.linestyle, linewidth=1.4)
    if len(bins) == 1:
        upper.bar(
            of_model["confidence"],
            of_model["gap"],
            width=0.5 / n_bins,
            bottom=of_model["confidence"],
            label="gap",
            fill=False,
            hatch="//////",
            edgecolor=GREY,
            linewidth=0,
        )
    upper.plot(edges[[0, -1]], edges[[0, -1]], color=GREY, linewidth=1, label="perfect calibration")
    margin = 0.03 * (edges[-1] - edges[0])
    upper.set_xlim(edges[0] - margin, edges[-1] + margin)
    upper.set_ylabel("accuracy (with 95% interval)")
    lower.set_yscale("log")
    lower.set_ylim(bottom=0.7)
    lower.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    lower.yaxis.set_minor_formatter(NullFormatter())
    lower.set_ylabel("examples (log)")
    lower.set_xlabel("confidence")
    figure.legend(loc="outside upper left")
    save_figure(figure, long_format(bins, "model"), path)
    return figure


@house_style()
def risk_coverage_plot(
    tables: ExampleTable | Mapping[str, ExampleTable], path: str | os.PathLike | None = None
) -> Figure:
    """Show the error rate among the most confident predictions against the share of examples that they are.

    The area under a curve as drawn is its `area_under_risk_coverage` (AURC); lower is better.

    Args:
        tables: A labelled table; or up to 6 by the names of their models, to compare.
        path: Where to save the figure, as .png, .pdf or .svg, with its numbers as .csv beside it; None: nowhere.

    Returns:
        The figure. Its numbers are, for every `model` and distinct confidence, `coverage` and `risk`; and, the same
        for all rows of a model, the `aurc`.

    Raises:
        TypeError: `tables` is neither a table nor tables by name.
        ValueError: There is no table, or more than 6; one has no examples or no labels; a name begins with "_"; or
            `path` has another suffix.
    """
    curves = {
        name: pandas.DataFrame({**risk_coverage_curve(table)._asdict(), "aurc": area_under_risk_coverage(table)})
        for name, table in labelled_tables(tables).items()
    }
    figure = Figure(figsize=(4.8, 3.6))
    axes = figure.subplots()
    for position, (style, (name, curve)) in enumerate(zip(SERIES_STYLES, curves.items(), strict=False)):
        axes.plot(
            [0, *curve["coverage"]],
            [curve["risk"].iloc[0], *curve["risk"]],
            drawstyle="steps-pre",
            label=f"{name}: AURC {curve['aurc'].iloc[0]:.4f}",
            markevery=(0.05 + 0.03 * position, 0.2),
            clip_on=False,
            zorder=3,  # over the axis, where there is no risk
            **style._asdict(),
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("coverage: share of examples accepted, the most confident first")
    axes.set_ylabel("risk: error rate among them")
    figure.legend(loc="outside upper left")
    save_figure(figure, long_format(curves, "model"), path)
    return figure


def _reliability_bins(table: ExampleTable, n_bins: int, floor: NoiseFloor) -> pandas.DataFrame:
    """Return the numbers of `reliability_diagram` for one model, by bin."""
    order = np.argsort(table.probability, kind="stable")
    cuts = equal_width_cuts(table.probability[order], n_bins).below
    filled = np.flatnonzero(np.diff(cuts))
    starts, examples = cuts[filled], np.diff(cuts)[filled]
    right = np.add.reduceat(table.correct[order].astype(int), starts)
    intervals = [
        binomtest(k, n).proportion_ci(confidence_level=0.95, method="wilson")
        for k, n in zip(right.tolist(), examples.tolist(), strict=True)
    ]
    edges = np.arange(n_bins + 1) / n_bins
    bins = pandas.DataFrame(
        {
            "bin_from": edges[filled],
            "bin_to": edges[filled + 1],
            "examples": examples,
            "confidence": np.add.reduceat(table.probability[order], starts) / examples,
            "accuracy": right / examples,
            "accuracy_low": [interval.low for interval in intervals],
            "accuracy_high": [interval.high for interval in intervals],
        },
        index=filled,
    )
    return bins.assign(
        gap=bins["accuracy"] - bins["confidence"],
        ece=expected_calibration_error(table, n_bins),
        noise_floor_mean=floor.mean,
        noise_floor_95=floor.percentile_95,
    )
