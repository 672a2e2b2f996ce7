"""The figure of how well an uncertainty tells examples from another distribution."""

import os

import numpy as np
import pandas
from matplotlib.figure import Figure

from ..metrics.example_table import ExampleTable
from ..metrics.out_of_distribution import ood_metrics
from .saving import save_figure
from .style import BLUE, ORANGE, house_style
from .tables import check_table, long_format

_MEASURES = ("predictive_entropy", "expected_entropy", "modulation_uncertainty")
_BINS = 30
# Nats; what differs by less differs by fp32 rounding alone.
_LEAST_RANGE = 1e-5


@house_style()
def entropy_histogram(
    in_distribution: ExampleTable,
    out_of_distribution: ExampleTable,
    measure: str = "predictive_entropy",
    path: str | os.PathLike | None = None,
) -> Figure:
    """Show how an uncertainty is distributed in and out of distribution, over the same bins, with the AUROC.

    Args:
        in_distribution: Table of examples such as the model was trained on; labels are not needed.
        out_of_distribution: Table of others.
        measure: "predictive_entropy", "expected_entropy" or "modulation_uncertainty".
        path: Where to save the figure, as .png, .pdf or .svg, with its numbers as .csv beside it; None: nowhere.

    Returns:
        The figure. Its numbers are, for both `distribution`s and every bin: its edges `nats_from` and `nats_to`, the
        number of `examples`, their `density` per nat; and, the same for all rows, the `auroc`.

    Raises:
        TypeError: One of the tables is none.
        ValueError: One has no examples, the measure is unknown, or `path` has another suffix.
    """
    if measure not in _MEASURES:
        raise ValueError(f"measure must be one of {_MEASURES}, got {measure!r}.")
    tables = {"in distribution": in_distribution, "out of distribution": out_of_distribution}
    for name, table in tables.items():
        check_table(table, f"The table of examples {name}")
    values = {name: getattr(table, measure) for name, table in tables.items()}
    auroc = ood_metrics(*values.values())["auroc"]
    edges = np.linspace(0, max(_LEAST_RANGE, *(column.max() for column in values.values())), _BINS + 1)
    parts = {}
    for name, column in values.items():
        examples = np.histogram(column, edges)[0]
        density = examples / (len(column) * np.diff(edges))
        parts[name] = pandas.DataFrame(
            {"nats_from": edges[:-1], "nats_to": edges[1:], "examples": examples, "density": density, "auroc": auroc}
        )

    figure = Figure(figsize=(4.8, 3.4))
    axes = figure.subplots()
    looks = (
        {"facecolor": BLUE + "55", "edgecolor": BLUE, "fill": True},
        {"color": ORANGE, "linestyle": "--", "hatch": "////"},
    )
    for look, (name, part) in zip(looks, parts.items(), strict=True):
        axes.stairs(part["density"], edges, label=f"{name} ({len(values[name])} examples)", linewidth=1.4, **look)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{measure.replace('_', ' ')} (nats)")
    axes.set_ylabel("density (per nat)")
    figure.legend(loc="outside upper left", title=f"AUROC {auroc:.3f}", alignment="left", title_fontsize=9)
    save_figure(figure, long_format(parts, "distribution"), path)
    return figure
