"""Confidence intervals of metrics, by drawing the examples again."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .checks import ArrayLike, as_array
from .example_table import ExampleTable
from .resampling import (
    Metric,
    bootstrap_ends,
    confidence_order,
    drawn_table,
    metric_function,
    metric_range,
    without_unread_votes,
)


class BootstrapInterval(NamedTuple):
    """A metric with its confidence interval.

    Attributes:
        value: The metric of the examples as they are.
        lower: Lower end of the interval.
        upper: Upper end of the interval.
    """

    value: float
    lower: float
    upper: float


class PairedDifference(NamedTuple):
    """A difference of two models in a metric, with its confidence interval.

    Attributes:
        difference: Metric of the one minus metric of the other, mean over seeds.
        lower: Lower end of the interval.
        upper: Upper end of the interval.
    """

    difference: float
    lower: float
    upper: float


def bootstrap_interval(
    table: ExampleTable,
    metric: str | Metric,
    confidence_level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    *,
    method: str = "basic",
) -> BootstrapInterval:
    """Return a metric with its bootstrap interval over examples.

    With t the metric and q(a) the a-quantile of the metrics of tables of N examples drawn with replacement, the basic
    interval of level 1 - 2a is [2 t - q(1 - a), 2 t - q(a)]. It is the default because it mends the bias of the
    estimate, where the percentile interval [q(a), q(1 - a)] doubles it. That matters for calibration errors, which
    are biased upwards: their interval is for the bias-corrected figure and may lie below the plain estimate. Near
    perfect calibration no bootstrap interval of them is exact; compare with `calibration_noise_floor`.

    The interval of a metric in `TABLE_METRICS`, also with other bins by `functools.partial`, is clipped to the
    metric's range. An infinite value has itself for an interval: what was seen once is possible, so the expectation is
    infinite too.

    Source: B. Efron, R. J. Tibshirani, "An introduction to the bootstrap", 1993. Computed by `scipy.stats.bootstrap`.

    Args:
        table: The examples.
        metric: A name in `TABLE_METRICS`, or a function of a table to which the order of rows does not matter.
        confidence_level: Between 0 and 1.
        n_resamples: Number of draws.
        seed: Seed of the draws.
        method: "basic" or "percentile".

    Raises:
        ValueError: There is no such metric or method, a number is out of range, or the metric is undefined on a draw.
    """
    return bootstrap_intervals(table, [metric], confidence_level, n_resamples, seed, method=method)[0]


def bootstrap_intervals(
    table: ExampleTable,
    metrics: Sequence[str | Metric],
    confidence_level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    *,
    method: str = "basic",
) -> list[BootstrapInterval]:
    """Return several metrics with their intervals, as `bootstrap_interval` would each, from the same draws.

    Args:
        table: The examples.
        metrics: As there.
        confidence_level: As there.
        n_resamples: As there.
        seed: As there.
        method: As there.

    Raises:
        ValueError: As there.
    """
    functions = [metric_function(metric) for metric in metrics]
    table = without_unread_votes(table, functions)
    values = np.array([function(table) for function in functions], dtype=np.float64)
    finite = np.flatnonzero(np.isfinite(values))
    order = confidence_order(table)

    def finite_values(rows: np.ndarray) -> list[float]:
        drawn = drawn_table(table, order, rows)
        return [functions[i](drawn) for i in finite]

    ends = np.stack([values, values], axis=1)
    if len(finite):
        ends[finite] = bootstrap_ends(finite_values, [len(table)], confidence_level, n_resamples, seed, method)
    return [
        BootstrapInterval(float(value), *np.clip(own_ends, *metric_range(function)).tolist())
        for value, own_ends, function in zip(values, ends, functions, strict=True)
    ]


def bootstrap_statistic(
    statistic: Callable[..., float],
    *samples: ArrayLike | tuple[ArrayLike, ...],
    confidence_level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    method: str = "basic",
) -> BootstrapInterval:
    """Return any figure of arrays with its bootstrap interval, where a table does not hold what it is made of.

    For instance `bootstrap_statistic(classwise_calibration_error, (probabilities, labels))`, or, with the examples of
    both sets drawn again, `bootstrap_statistic(lambda *scores: ood_metrics(*scores)["auroc"], id_scores, ood_scores)`.

    Args:
        statistic: Makes the figure of all arrays, in order; the order of rows must not matter to it.
        *samples: An array for each sample of examples, or a tuple of arrays whose rows belong together.
        confidence_level: As in `bootstrap_interval`; so are the rest.
        n_resamples: As there.
        seed: As there.
        method: As there.

    Raises:
        ValueError: A sample is empty, its arrays are not of one length, a number is out of range, or the figure is not
            finite.
    """
    groups = [tuple(map(as_array, sample if isinstance(sample, tuple) else (sample,))) for sample in samples]
    sizes = [len(group[0]) if group and group[0].ndim else 0 for group in groups]
    if not sizes or 0 in sizes or any(len(array) != len(group[0]) for group in groups for array in group):
        shapes = [[array.shape for array in group] for group in groups]
        raise ValueError(f"Each sample needs arrays of one length, with examples in them, got shapes {shapes}.")

    def of_rows(*rows: np.ndarray) -> list[float]:
        return [statistic(*(array[drawn] for group, drawn in zip(groups, rows, strict=True) for array in group))]

    ((lower, upper),) = bootstrap_ends(of_rows, sizes, confidence_level, n_resamples, seed, method)
    return BootstrapInterval(float(of_rows(*map(np.arange, sizes))[0]), float(lower), float(upper))


def paired_bootstrap(
    ours: ExampleTable | Sequence[ExampleTable],
    theirs: ExampleTable | Sequence[ExampleTable],
    metric: str | Metric,
    confidence_level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    *,
    method: str = "basic",
) -> PairedDifference:
    """Return the difference of two models in a metric with its bootstrap interval.

    The difference is the mean over seeds of metric(ours) - metric(theirs). A draw takes examples with replacement,
    the same for both models and all seeds, and independently as many pairs of seeds, with replacement, as there are:
    the interval is for other examples and other seeds. What both models find hard cancels, so it is much narrower than
    two intervals side by side. With S seeds the share of their spread in its width is too small by about
    sqrt(1 - 1/S), which is a lot for S below 5; with one seed it says nothing of other seeds.

    The interval is formed as in `bootstrap_interval`, and clipped to the possible differences. A difference with an
    infinite metric has itself for an interval, or NaN where both are infinite.

    Args:
        ours: The table of a model, or one for each of its seeds.
        theirs: As many tables of another, paired by seed; all tables are over the same examples in the same order.
        metric: A name in `TABLE_METRICS`, or a function of a table to which the order of rows does not matter.
        confidence_level: Between 0 and 1.
        n_resamples: Number of draws.
        seed: Seed of the draws.
        method: "basic" or "percentile".

    Raises:
        ValueError: There are no tables, not as many of both, or their labels differ; there is no such metric or method,
            a number is out of range, or the metric is undefined on a draw.
    """
    ours, theirs = ([tables] if isinstance(tables, ExampleTable) else list(tables) for tables in (ours, theirs))
    _check_paired(ours, theirs)
    function = metric_function(metric)
    ours, theirs = ([without_unread_votes(table, [function]) for table in tables] for tables in (ours, theirs))
    pairs = [((a, confidence_order(a)), (b, confidence_order(b))) for a, b in zip(ours, theirs, strict=True)]

    def mean_difference(rows: np.ndarray, seeds: np.ndarray) -> list[float]:
        differences = [function(drawn_table(*a, rows)) - function(drawn_table(*b, rows)) for a, b in pairs]
        return [np.mean(np.take(differences, seeds))]

    difference = sum(function(a) - function(b) for (a, _), (b, _) in pairs) / len(pairs)
    if not math.isfinite(difference):
        return PairedDifference(difference, difference, difference)
    sizes = [len(ours[0]), len(pairs)]
    ((lower, upper),) = bootstrap_ends(mean_difference, sizes, confidence_level, n_resamples, seed, method)
    lowest, highest = metric_range(function)
    return PairedDifference(difference, *np.clip([lower, upper], lowest - highest, highest - lowest).tolist())


def _check_paired(ours: list[ExampleTable], theirs: list[ExampleTable]) -> None:
    if not ours or len(ours) != len(theirs):
        raise ValueError(f"Tables are paired by seed, but there are {len(ours)} of ours and {len(theirs)} of theirs.")
    for table in ours + theirs:
        table.check_labelled()
        if not np.array_equal(table.label, ours[0].label):
            raise ValueError("The tables are not over the same examples in the same order: their labels differ.")
