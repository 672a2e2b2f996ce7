"""The metrics as functions of a per-example table; `functional` has them for probabilities and labels."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .calibration_bins import Cuts, equal_mass_cuts, equal_width_cuts, mean_absolute_gap
from .example_table import ExampleTable


class RiskCoverage(NamedTuple):
    """Error rates when only the most confident predictions are accepted.

    Attributes:
        coverage: (K,), share of examples accepted, ascending up to 1: one for each of the K distinct confidences.
        risk: (K,), error rate among them.
    """

    coverage: np.ndarray
    risk: np.ndarray


def accuracy(table: ExampleTable) -> float:
    """Return the fraction of examples whose most probable class is right; of tied classes the first counts.

    Args:
        table: A labelled table.

    Raises:
        ValueError: The input is no set of probabilities with labels.
    """
    return float(table.correct.mean())


def negative_log_likelihood(table: ExampleTable) -> float:
    """Return the mean of -log p(label), in nats; infinite if a label was given probability 0.

    Args:
        table: A labelled table.

    Raises:
        ValueError: The input is no set of probabilities with labels.
    """
    table.check_labelled()
    with np.errstate(divide="ignore"):
        return float(-np.log(table.label_probability).mean())


def brier_score(table: ExampleTable) -> float:
    """Return the mean squared distance to the one-hot label, summed over classes: between 0 and 2.

    Source: G. W. Brier, "Verification of forecasts expressed in terms of probability", 1950 (the multi-class form).

    Args:
        table: A labelled table.

    Raises:
        ValueError: The input is no set of probabilities with labels.
    """
    table.check_labelled()
    return float(table.squared_error.mean())


def expected_calibration_error(table: ExampleTable, n_bins: int = 15) -> float:
    r"""Return the top-label expected calibration error over bins of equal width.

    $$\sum_b \frac{|B_b|}{N} \left|\operatorname{acc}(B_b) - \operatorname{conf}(B_b)\right|$$

    Bin b holds the confidences in (b / n_bins, (b + 1) / n_bins]; a confidence of 0 falls into the first bin, and a
    confidence of 1 into the last. Empty bins count nothing. The figure is biased upwards: a perfectly calibrated
    model shows `calibration_noise_floor` on average.

    Source: C. Guo et al., "On calibration of modern neural networks", 2017 (arXiv 1706.04599).

    Args:
        table: A labelled table.
        n_bins: Number of bins.

    Raises:
        ValueError: The input is no set of probabilities with labels, or `n_bins` is below 1.
    """
    return _top_label_gap(table, equal_width_cuts, n_bins)


def adaptive_calibration_error(table: ExampleTable, n_bins: int = 15) -> float:
    """Return the top-label calibration error over bins of equal mass.

    The same sum as in `expected_calibration_error`, but each bin holds exactly N / n_bins of the examples in order of
    confidence. A cut inside an example or a group of tied ones divides it: each side gets its fraction of every tied
    example, so row order does not matter. With more bins than examples of distinct confidence the figure is therefore
    at most the mean over distinct confidences of |accuracy - confidence|, weighted by their shares, and equals it when
    bins do not straddle them.

    Source of the bins: K. Nguyen, B. O'Connor, "Posterior calibration and exploratory analysis for natural language
    processing models", 2015 (arXiv 1508.05154). J. Nixon et al., "Measuring calibration in deep learning", 2019 (arXiv
    1904.01685) mean by this name a mean over classes too; here it is of the top label alone, comparable to the ECE.
    Dividing examples at the cuts is our choice.

    Args:
        table: A labelled table.
        n_bins: Number of bins.

    Raises:
        ValueError: The input is no set of probabilities with labels, or `n_bins` is below 1.
    """
    return _top_label_gap(table, equal_mass_cuts, n_bins)


def risk_coverage_curve(table: ExampleTable) -> RiskCoverage:
    """Return the error rate among accepted predictions against the share accepted.

    The predictions with a confidence of at least a threshold are accepted, for every threshold among the confidences:
    tied examples are accepted together, so row order does not matter.

    Source: Y. Geifman, R. El-Yaniv, "Selective classification for deep neural networks", 2017 (arXiv 1705.08500).

    Args:
        table: A labelled table.

    Raises:
        ValueError: The input is no set of probabilities with labels.
    """
    order = np.argsort(table.probability, kind="stable")[::-1]
    confidence = table.probability[order]
    last_of_ties = np.flatnonzero(np.append(confidence[1:] != confidence[:-1], True))
    accepted = last_of_ties + 1
    errors = np.cumsum(~table.correct[order])[last_of_ties]
    return RiskCoverage(accepted / len(table), errors / accepted)


def area_under_risk_coverage(table: ExampleTable) -> float:
    """Return the area under the risk-coverage curve: the mean of the risk over coverages; lower is better.

    The threshold goes through the confidences of all examples, and the risk at each threshold is the error rate among
    examples at least as confident. Without ties that is the mean over k = 1..N of the error rate among the k most
    confident; tied examples are accepted together and weigh as many as they are. If all are tied it is the error rate.

    Source: Y. Geifman, G. Uziel, R. El-Yaniv, "Bias-reduced uncertainty estimation for deep neural classifiers", 2019
    (arXiv 1805.08206).

    Args:
        table: A labelled table.

    Raises:
        ValueError: The input is no set of probabilities with labels.
    """
    coverage, risk = risk_coverage_curve(table)
    return float(np.diff(coverage, prepend=0) @ risk)


# By the names that reports use. All but accuracy are better when lower.
TABLE_METRICS: dict[str, Callable[[ExampleTable], float]] = {
    "accuracy": accuracy,
    "nll": negative_log_likelihood,
    "brier": brier_score,
    "ece": expected_calibration_error,
    "ace": adaptive_calibration_error,
    "aurc": area_under_risk_coverage,
}


def _top_label_gap(table: ExampleTable, cut: Callable[[np.ndarray, int], Cuts], n_bins: int) -> float:
    # A stable sort is quick on the presorted resamples of a bootstrap.
    order = np.argsort(table.probability, kind="stable")
    confidence = table.probability[order]
    return float(mean_absolute_gap(table.correct[order] - confidence, cut(confidence, n_bins)))
