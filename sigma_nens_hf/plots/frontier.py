"""The figure of a sweep: what the temperature trades."""

import os
from itertools import cycle

import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .saving import save_figure
from .style import GREY, SERIES_STYLES, SMALL, SeriesStyle, house_style

# What a model is called in the column `model` of a frontier.
ENSEMBLE, DEEP_ENSEMBLE = "sigma-N-Ens", "deep ensemble"
SINGLE_MODEL, SCALED_SINGLE = "single model", "scaled single model"

_MARKS = {SINGLE_MODEL: "x", SCALED_SINGLE: "+", DEEP_ENSEMBLE: "*"}
_LINES = {SCALED_SINGLE: ":", DEEP_ENSEMBLE: "--"}
_LEGEND = {
    SINGLE_MODEL: "single model",
    SCALED_SINGLE: "single model, temperature scaled",
    DEEP_ENSEMBLE: "deep ensemble of so many",
}
_PANELS = {
    "scaled_nll": "NLL after temperature scaling (nats)",
    "disagreement": "members disagree (share of pairs)",
    "realized_sharing": "members that own a feature",
}


@house_style()
def frontier_plot(frontier: pandas.DataFrame, path: str | os.PathLike | None = None) -> Figure:
    """Show a sweep: accuracy against calibration error, and by temperature the NLL, the disagreement and the sharing.

    There is a line for every number of members and weight of the regulariser, with 95% t-intervals over seeds where
    there are several. What they compete with is grey: the single model before and after temperature scaling as a
    cross and a plus, deep ensembles as stars with their number of models; as horizontal lines the scaled single model
    (dotted) and the deep ensembles (dashed). Steps are the sharing that the regulariser alone would prefer.

    Args:
        frontier: As from `frontier_of`.
        path: Where to save the figure, as .png, .pdf or .svg, with its numbers as .csv beside it; None: nowhere.

    Returns:
        The figure. Its numbers are the frontier itself.

    Raises:
        ValueError: There is no ensemble in the frontier, or `path` has another suffix.
    """
    ensembles = frontier[frontier["tau"].notna()]
    if ensembles.empty:
        raise ValueError("The frontier holds no ensemble yet.")
    references = frontier[frontier["tau"].isna()]
    figure = Figure(figsize=(8.5, 6.8))
    trade, *by_temperature = figure.subplots(2, 2).flatten()
    styles = cycle(SERIES_STYLES)
    for (num_members, weight), series in ensembles.groupby(["members", "diversity_weight"]):
        style, series = next(styles), series.sort_values("tau")
        label = f"{num_members} members, λ {weight:g}"
        _draw(trade, series, "ece", "accuracy", style, label)
        for _, row in series.iterrows():
            trade.annotate(
                f"{row['tau']:g}", (row["ece"], row["accuracy"]), fontsize=SMALL, color=style.color,
                xytext=(4, 4), textcoords="offset points",
            )  # fmt: skip
        for axes, figure_name in zip(by_temperature, _PANELS, strict=True):
            _draw(axes, series, "tau", figure_name, style)
        by_temperature[-1].step(
            series["tau"], series["expected_sharing"], where="mid", color=style.color, linewidth=0.8, alpha=0.6
        )
    _draw_references(trade, by_temperature[:2], references)
    trade.set_xlabel("ECE (15 bins); the numbers are temperatures τ")
    trade.set_ylabel("accuracy")
    for axes, title in zip(by_temperature, _PANELS.values(), strict=True):
        axes.set_xscale("log")
        axes.set_xlabel("temperature τ of the regulariser")
        axes.set_ylabel(title)
    figure.legend(loc="outside upper left", ncols=3)
    save_figure(figure, frontier, path)
    return figure


def _draw(axes: Axes, series: pandas.DataFrame, x: str, y: str, style: SeriesStyle, label: str | None = None) -> None:
    bars = {}
    for axis, name in (("xerr", x), ("yerr", y)):
        if f"{name}_low" in series:
            bars[axis] = [series[name] - series[f"{name}_low"], series[f"{name}_high"] - series[name]]
    axes.errorbar(series[x], series[y], **bars, label=label, elinewidth=0.6, capsize=2, **style._asdict())


def _draw_references(trade: Axes, by_temperature: list[Axes], references: pandas.DataFrame) -> None:
    """Draw what the ensembles compete with; a single model's members do not disagree."""
    for model, mark in _MARKS.items():
        rows = references[references["model"] == model]
        trade.plot(rows["ece"], rows["accuracy"], mark, color=GREY, markersize=8, label=_LEGEND[model])
        for _, row in rows.iterrows() if model != SINGLE_MODEL else ():
            label = "single" if model == SCALED_SINGLE else f"deep {row['members']}"
            if model == DEEP_ENSEMBLE:
                trade.annotate(
                    row["members"], (row["ece"], row["accuracy"]), fontsize=SMALL, color=GREY, xytext=(5, -8),
                    textcoords="offset points",
                )  # fmt: skip
            for axes, name in zip(by_temperature, _PANELS, strict=False):
                if model == DEEP_ENSEMBLE or name == "scaled_nll":
                    axes.axhline(row[name], color=GREY, linewidth=0.8, linestyle=_LINES[model])
                    axes.annotate(
                        label, (1, row[name]), xycoords=("axes fraction", "data"), fontsize=SMALL, color=GREY,
                        ha="right", va="bottom",
                    )  # fmt: skip
