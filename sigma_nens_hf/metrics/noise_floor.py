"""What a calibration error shows of a model that has none."""

from typing import NamedTuple

import numpy as np

from .calibration_bins import equal_mass_cuts, equal_width_cuts, mean_absolute_gap
from .checks import ArrayLike, checked_confidences
from .example_table import ExampleTable

# Outcomes drawn at a time: some 10 MB.
_CHUNK = 2**20


class NoiseFloor(NamedTuple):
    """Calibration error of a perfectly calibrated model.

    Attributes:
        mean: Its mean.
        percentile_95: What it exceeds at most once in 20 times.
    """

    mean: float
    percentile_95: float


def calibration_noise_floor(
    confidences: ArrayLike | ExampleTable,
    n_bins: int = 15,
    n_simulations: int = 1000,
    seed: int = 0,
    *,
    equal_mass: bool = False,
) -> NoiseFloor:
    """Return the calibration error that a perfectly calibrated model with these confidences would show.

    A calibration error sums the absolute values of noisy gaps, so with finitely many examples it is above zero for
    any model. Here each prediction is right with a probability of its confidence, independently, and the calibration
    error of the simulated outcomes is taken as that of a real model's would be. An error below `percentile_95` is no
    evidence of miscalibration. In one bin the mean is about sqrt(2 v / pi) / N with v the sum of p (1 - p).

    Source: J. Vaicenavicius et al., "Evaluating model calibration in classification", 2019 (arXiv 1902.06977), whose
    consistency resampling this is, with the confidences themselves held fixed.

    Args:
        confidences: (N,), probability of the predicted class; or a table, labelled or not.
        n_bins: Number of bins.
        n_simulations: Number of simulated sets of outcomes.
        seed: Seed of the outcomes.
        equal_mass: Whether the floor is that of `adaptive_calibration_error` and not that of
            `expected_calibration_error`.

    Raises:
        ValueError: The confidences are no probabilities (N,), or a number is below 1.
    """
    if isinstance(confidences, ExampleTable):
        confidences = confidences.probability
    confidences = np.sort(checked_confidences(confidences))
    if n_simulations < 1:
        raise ValueError(f"n_simulations must be at least 1, got {n_simulations}.")
    cuts = (equal_mass_cuts if equal_mass else equal_width_cuts)(confidences, n_bins)
    rng = np.random.default_rng(seed)
    at_a_time = max(1, _CHUNK // len(confidences))
    errors = []
    for start in range(0, n_simulations, at_a_time):
        shape = (min(at_a_time, n_simulations - start), len(confidences))
        right = rng.random(shape) < confidences
        errors.append(mean_absolute_gap(right - confidences, cuts))
    errors = np.concatenate(errors)
    return NoiseFloor(float(errors.mean()), float(np.quantile(errors, 0.95)))
