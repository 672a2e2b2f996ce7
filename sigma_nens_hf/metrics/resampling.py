"""What a bootstrap is made of: drawn tables, the metrics of them, and the ends of an interval."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from . import table_metrics
from .example_table import ExampleTable

Metric = Callable[[ExampleTable], float]

_RANGES = {
    table_metrics.accuracy: (0, 1),
    table_metrics.negative_log_likelihood: (0, math.inf),
    table_metrics.brier_score: (0, 2),
    table_metrics.expected_calibration_error: (0, 1),
    table_metrics.adaptive_calibration_error: (0, 1),
    table_metrics.area_under_risk_coverage: (0, 1),
}


def bootstrap_ends(
    statistic: Callable[..., list[float]],
    sizes: Sequence[int],
    confidence_level: float,
    n_resamples: int,
    seed: int,
    method: str,
) -> np.ndarray:
    """Return the ends (K, 2) of the intervals of K figures, made of indices drawn with replacement.

    Args:
        statistic: Makes K figures of as many arrays of indices as there are sizes.
        sizes: Number of things that each array draws from, and draws.
        confidence_level: Between 0 and 1.
        n_resamples: Number of draws.
        seed: Seed of the draws.
        method: "basic" or "percentile".

    Raises:
        ValueError: An option is out of range, or a figure is not finite on a draw.
    """
    # It would add .3 s to the import of the package, which trains without it.
    import scipy.stats

    if method not in ("basic", "percentile"):
        raise ValueError(f"method must be 'basic' or 'percentile', got {method!r}.")
    if not 0 < confidence_level < 1:
        raise ValueError(f"confidence_level must be between 0 and 1, got {confidence_level}.")
    if n_resamples < 1:
        raise ValueError(f"n_resamples must be at least 1, got {n_resamples}.")

    def of_draw(*indices: np.ndarray, axis: int) -> np.ndarray:
        values = np.asarray(statistic(*map(np.ravel, indices)), dtype=np.float64)
        if not np.isfinite(values).all():
            raise ValueError("The metric is infinite or undefined on some draws of the examples: it has no interval.")
        return values if indices[0].ndim == 1 else values[:, None]

    # scipy refuses to draw from one thing; to draw it twice gives the same figures.
    data = [np.arange(max(size, 2)) % size for size in sizes]
    interval = scipy.stats.bootstrap(
        data,
        of_draw,
        n_resamples=n_resamples,
        batch=1,
        vectorized=True,
        confidence_level=confidence_level,
        method=method,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return np.stack(interval, axis=-1)


def confidence_order(table: ExampleTable) -> np.ndarray:
    """Return the indices (N,) that sort a table by confidence."""
    return np.argsort(table.probability, kind="stable")


def drawn_table(table: ExampleTable, order: np.ndarray, rows: np.ndarray) -> ExampleTable:
    """Return the drawn rows, sorted by confidence, so that no metric spends time on sorting."""
    return table.select(np.repeat(order, np.bincount(rows, minlength=len(order))[order]))


def without_unread_votes(table: ExampleTable, metrics: Sequence[Metric]) -> ExampleTable:
    """Leave out the votes, most of a table, where no metric reads them."""
    return replace(table, member_votes=None) if all(_known(metric) in _RANGES for metric in metrics) else table


def metric_function(metric: str | Metric) -> Metric:
    """Return the metric of a name in `TABLE_METRICS`, or the metric itself.

    Raises:
        ValueError: There is none of that name.
    """
    if isinstance(metric, str) and metric not in table_metrics.TABLE_METRICS:
        raise ValueError(f"There is no metric {metric!r}; there are {', '.join(table_metrics.TABLE_METRICS)}.")
    return table_metrics.TABLE_METRICS[metric] if isinstance(metric, str) else metric


def metric_range(metric: Metric) -> tuple[float, float]:
    """Return the least and the greatest figure that a metric can come to; infinite for metrics not from here."""
    return _RANGES.get(_known(metric), (-math.inf, math.inf))


def _known(metric: Metric) -> Metric:
    return metric.func if isinstance(metric, partial) else metric
