"""Bins of confidences, as cuts through the sorted examples, and what each bin's confidences are off by."""

from typing import NamedTuple

import numpy as np


class Cuts(NamedTuple):
    """Where n_bins + 1 cuts fall among examples sorted by confidence; a bin lies between two of them.

    Cut j passes all examples before `below[j]`, and of those from `below[j]` to `above[j]`, which are tied, the
    fraction `fraction[j]`.

    Attributes:
        below: (n_bins + 1,), number of examples.
        above: (n_bins + 1,), number of examples.
        fraction: (n_bins + 1,), between 0 and 1.
    """

    below: np.ndarray
    above: np.ndarray
    fraction: np.ndarray


def equal_width_cuts(confidence: np.ndarray, n_bins: int) -> Cuts:
    """Cut into bins of equal width: bin b holds the confidences in (b / n_bins, (b + 1) / n_bins].

    Args:
        confidence: (N,), ascending. 0 falls into the first bin and 1 into the last.
        n_bins: Number of bins.

    Raises:
        ValueError: `n_bins` is no whole number above 0.
    """
    _check_bins(n_bins)
    inner = np.searchsorted(confidence, inner_edges(n_bins), side="right")
    positions = np.concatenate([[0], inner, [len(confidence)]])
    return Cuts(positions, positions, np.zeros(n_bins + 1))


def inner_edges(n_bins: int) -> np.ndarray:
    """Return b / n_bins for b = 1 to n_bins - 1: they alone decide, so that confidences of 0 and 1 have a bin.

    Args:
        n_bins: Number of bins.
    """
    return np.arange(1, n_bins) / n_bins  # which linspace does not come to, to the last bit


def equal_mass_cuts(confidence: np.ndarray, n_bins: int) -> Cuts:
    """Cut into bins of N / n_bins examples each, exactly.

    A cut that falls inside an example or a group of tied ones divides it: each side gets its fraction of every tied
    example. So the order of tied examples does not matter, nor does it when there are more bins than examples.

    Args:
        confidence: (N,), ascending, N > 0.
        n_bins: Number of bins.

    Raises:
        ValueError: `n_bins` is no whole number above 0.
    """
    _check_bins(n_bins)
    positions = np.linspace(0, len(confidence), n_bins + 1)
    divided = confidence[np.minimum(positions.astype(int), len(confidence) - 1)]
    below = np.searchsorted(confidence, divided, side="left")
    above = np.searchsorted(confidence, divided, side="right")
    return Cuts(below, above, (positions - below) / (above - below))


def mean_absolute_gap(residuals: np.ndarray, cuts: Cuts) -> np.ndarray:
    """Return the sum over bins of |sum of the bin's residuals| / N.

    With residuals of outcome - confidence this is |outcome - confidence| of the bins' means, weighted by the bins'
    shares of the examples.

    Args:
        residuals: (..., N), in the order of the confidences that were cut.
        cuts: The bins.

    Returns:
        (...).
    """
    total = np.zeros((*residuals.shape[:-1], residuals.shape[-1] + 1))
    np.cumsum(residuals, axis=-1, out=total[..., 1:])
    at_cuts = total[..., cuts.below] + cuts.fraction * (total[..., cuts.above] - total[..., cuts.below])
    return np.abs(np.diff(at_cuts)).sum(-1) / residuals.shape[-1]


def _check_bins(n_bins: int) -> None:
    if isinstance(n_bins, bool) or not isinstance(n_bins, int | np.integer) or n_bins < 1:
        raise ValueError(f"n_bins must be a whole number, at least 1, got {n_bins!r}.")
