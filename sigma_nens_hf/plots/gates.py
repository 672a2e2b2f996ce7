"""Figures of what a model's members have learnt: their gates, and how they share the features."""

import math
import os
from collections.abc import Iterable

import numpy as np
import pandas
import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import nn

from ..regularizer import check_gates, feature_owners, member_gates
from .saving import save_figure
from .style import BLUE, GREY, SMALL, VERMILLION, house_style
from .tables import long_format

# An odd number, so that the gate .5 of an untrained member is the middle of a bin and not an edge.
_GATE_BINS = 15
_MOST_PANELS_A_ROW = 8
_ROW_HEIGHT = 0.15  # inches for a norm


@house_style()
@torch.no_grad()
def gates_plot(model: nn.Module, path: str | os.PathLike | None = None) -> Figure:
    """Show the gates sigmoid(g) of every member: a panel a member, in it a row a norm, in the model's own order.

    A row is the histogram of the norm's gates in shades; shades tell apart what quantiles hide: features that are
    owned (gates near 1) beside features that are not (near 0). A diamond marks the row's mean.

    Args:
        model: The ensemble.
        path: Where to save the figure, as .png, .pdf or .svg, with its numbers as .csv beside it; None: nowhere.

    Returns:
        The figure. Its numbers are `norm`, `member`, `gate_from`, `gate_to` (the bin, without its upper edge but for
        the last), `share` of the norm's features in the bin, and the `mean_gate` of norm and member.

    Raises:
        ValueError: No norm carries members, or gates are not finite.
    """
    gates = member_gates(model)
    check_gates(gates)
    gates = {name: values.cpu().numpy() for name, values in gates.items()}
    names = short_names(list(gates))
    edges = np.linspace(0, 1, _GATE_BINS + 1)
    # (norms, M, bins) and (norms, M)
    shares = np.array([[np.histogram(row, edges)[0] / row.size for row in rows] for rows in gates.values()])
    means = np.array([rows.mean(1, dtype=np.float64) for rows in gates.values()])
    num_norms, num_members = means.shape

    panel_rows = math.ceil(num_members / _MOST_PANELS_A_ROW)
    columns = math.ceil(num_members / panel_rows)
    width, height = columns * max(1.1, 4.4 / columns), panel_rows * (0.4 + num_norms * _ROW_HEIGHT)
    figure = Figure(figsize=(2 + width, 1.2 + height))
    panels = figure.subplots(panel_rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for member, axes in enumerate(panels[:num_members]):
        image = axes.pcolormesh(
            edges,
            np.arange(num_norms + 1) - 0.5,
            shares[:, member],
            # The root shows small shares beside bins that hold most.
            norm=PowerNorm(0.5, 0, shares.max()),
            cmap="Greys",
            rasterized=True,
        )
        axes.plot(means[:, member], np.arange(num_norms), "D", color=VERMILLION, markeredgecolor="white", markersize=4)
        axes.set_title(f"member {member}")
        axes.grid(False)
        axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
        _norm_axis(axes, names)
    for unused in panels[num_members:]:
        unused.remove()
    figure.supxlabel("gate sigmoid(g); ◆ mean of the norm", fontsize=9)
    figure.colorbar(
        image,
        ax=list(panels[:num_members]),
        label="share of the norm's features",
        location="top",
        anchor=(0, 0.5),
        shrink=2 / width,
        aspect=20,
        pad=0.1 / height,
        ticks=shares.max() * np.array([0, 0.25, 1]),
        format=PercentFormatter(1, decimals=0),
    )

    norm, member, gate_bin = np.indices(shares.shape).reshape(3, -1)
    numbers = pandas.DataFrame(
        {
            "norm": np.array(list(gates))[norm],
            "member": member,
            "gate_from": edges[gate_bin],
            "gate_to": edges[gate_bin + 1],
            "share": shares.reshape(-1),
            "mean_gate": means[norm, member],
        }
    )
    save_figure(figure, numbers, path)
    return figure


@house_style()
@torch.no_grad()
def sharing_histogram(model: nn.Module, path: str | os.PathLike | None = None) -> Figure:
    """Show how many members own a feature: the share of features by number of owners, and the mean by norm.

    Ownership is that of `realized_sharing`: a gate above half of the feature's largest one.

    Args:
        model: The ensemble.
        path: Where to save the figure, as .png, .pdf or .svg, with its numbers as .csv beside it; None: nowhere.

    Returns:
        The figure. Its numbers are `norm` ("all norms" first), `owners`, the number of `features` with so many owners,
        their `share` of the norm's features, and the norm's `realized_sharing`, the mean number of owners.

    Raises:
        ValueError: No norm carries members, or gates are not finite.
    """
    gates = member_gates(model)
    check_gates(gates)
    num_members = len(next(iter(gates.values())))
    by_norm = {name: counts.cpu().numpy() for name, counts in feature_owners(model).items()}
    everywhere = np.concatenate(list(by_norm.values()))
    # Nobody owns a feature whose gates have all underflowed to 0.
    owners = np.arange(min(1, everywhere.min()), num_members + 1)
    parts = {name: _owner_shares(counts, owners) for name, counts in {"all norms": everywhere, **by_norm}.items()}
    shares = parts["all norms"]["share"]

    lower_height = 0.7 + len(by_norm) * _ROW_HEIGHT
    figure = Figure(figsize=(5.5, 2.4 + lower_height))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, lower_height))
    bars = upper.bar(owners, shares, width=0.7, color=BLUE)
    upper.bar_label(bars, map(_percent, shares), fontsize=SMALL, padding=2)
    upper.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    upper.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    upper.margins(y=0.15)
    upper.grid(axis="x", visible=False)
    upper.set_ylabel("share of features")
    upper.tick_params(labelbottom=True)
    upper.set_title(f"Members that own a feature: {everywhere.mean():.2f} of {num_members} on average")

    lower.axvline(everywhere.mean(), color=GREY, linestyle="--", linewidth=1)
    lower.plot([counts.mean() for counts in by_norm.values()], np.arange(len(by_norm)), "D", color=VERMILLION)
    figure.supxlabel("members that own a feature; ◆ mean of the norm, dashed: of all norms", fontsize=9)
    lower.set_xticks(owners)
    lower.set_xlim(owners[0] - 0.5, num_members + 0.5)
    lower.set_ylim(-0.5, len(by_norm) - 0.5)
    _norm_axis(lower, short_names(list(by_norm)))

    save_figure(figure, long_format(parts, "norm"), path)
    return figure


def short_names(names: list[str]) -> list[str]:
    """Drop the leading and trailing parts that all dotted names have in common; one part at least is left.

    Args:
        names: Names of modules, all different.
    """
    parts = [name.split(".") for name in names]
    room = min(map(len, parts)) - 1
    start = _common(parts, range(room))
    end = _common(parts, (-1 - i for i in range(room - start)))
    return [".".join(name[start : len(name) - end]) for name in parts]


def _common(parts: list[list[str]], indices: Iterable[int]) -> int:
    """Return at how many of the indices, up to the first difference, all names have the same part."""
    count = 0
    for index in indices:
        if len({name[index] for name in parts}) > 1:
            break
        count += 1
    return count


def _owner_shares(counts: np.ndarray, owners: np.ndarray) -> pandas.DataFrame:
    """Return the numbers of `sharing_histogram` for features of which `counts` (D,) holds the number of owners."""
    features = (counts == owners[:, None]).sum(1)
    return pandas.DataFrame(
        {"owners": owners, "features": features, "share": features / len(counts), "realized_sharing": counts.mean()}
    )


def _percent(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _norm_axis(axes: Axes, names: list[str]) -> None:
    """Label the rows with the names of norms, the first on top."""
    axes.set_yticks(np.arange(len(names)), names, fontsize=SMALL)
    axes.tick_params(axis="y", length=0)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
