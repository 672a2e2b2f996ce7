"""All metrics of a model at once, each with what it is worth."""

from functools import partial

from .bootstrap import bootstrap_intervals
from .example_table import ExampleTable
from .noise_floor import calibration_noise_floor
from .table_metrics import TABLE_METRICS


def calibration_report(
    table: ExampleTable, n_bins: int = 15, n_resamples: int = 1000, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Return every metric in `TABLE_METRICS` with its 95 % bootstrap interval, and calibration errors with their floor.

    Args:
        table: A labelled table.
        n_bins: Number of bins of the calibration errors.
        n_resamples: Number of draws of the intervals, and of simulations of the noise floors.
        seed: Seed of both.

    Returns:
        By metric: `value`, `lower` and `upper` as in `bootstrap_interval`, all infinite for the "nll" if a label was
        given probability 0, and for the "accuracy" Wilson's interval, which is right near 0 and 1 too; and for "ece"
        and "ace" `noise_floor_mean` and `noise_floor_95` as in `calibration_noise_floor`.

    Raises:
        ValueError: The table has no labels, or a number is below 1.
    """
    with_bins = {"ece": False, "ace": True}
    metrics = {
        name: partial(metric, n_bins=n_bins) if name in with_bins else metric for name, metric in TABLE_METRICS.items()
    }
    intervals = bootstrap_intervals(table, list(metrics.values()), n_resamples=n_resamples, seed=seed)
    report = {name: interval._asdict() for name, interval in zip(metrics, intervals, strict=True)}
    report["accuracy"] |= _wilson_interval(table)
    for name, equal_mass in with_bins.items():
        floor = calibration_noise_floor(table, n_bins, n_resamples, seed, equal_mass=equal_mass)
        report[name] |= {"noise_floor_mean": floor.mean, "noise_floor_95": floor.percentile_95}
    return report


def _wilson_interval(table: ExampleTable) -> dict[str, float]:
    """Return the interval of a proportion by E. B. Wilson, "Probable inference", 1927."""
    from scipy.stats import binomtest  # as in `bootstrap_ends`

    interval = binomtest(int(table.correct.sum()), len(table)).proportion_ci(0.95, method="wilson")
    return {"lower": float(interval.low), "upper": float(interval.high)}
