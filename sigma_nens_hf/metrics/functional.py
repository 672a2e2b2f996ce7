"""Metrics as plain functions of probabilities (N, C) and labels (N,), given as arrays, tensors or lists."""

import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from ..uncertainty import member_disagreement
from . import table_metrics
from .calibration_bins import equal_width_cuts, mean_absolute_gap
from .checks import ArrayLike, checked_labels, checked_probabilities
from .example_table import ExampleTable

_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")

_TABLE_ARGUMENT = "table: A labelled table."
_PLAIN_ARGUMENTS = "probabilities: (N, C).\n        labels: (N,), class indices."


def _of_probabilities(
    metric: Callable[Concatenate[ExampleTable, _Options], _Result],
) -> Callable[Concatenate[ArrayLike, ArrayLike, _Options], _Result]:
    """Return a metric of tables as one of probabilities and labels, its documentation and signature included."""

    def of_probabilities(
        probabilities: ArrayLike, labels: ArrayLike, *args: _Options.args, **kwargs: _Options.kwargs
    ) -> _Result:
        return metric(ExampleTable.of_probabilities(probabilities, labels), *args, **kwargs)

    own, of_table = inspect.signature(of_probabilities), inspect.signature(metric)
    parameters = [*list(own.parameters.values())[:2], *list(of_table.parameters.values())[1:]]
    of_probabilities.__signature__ = of_table.replace(parameters=parameters)
    of_probabilities.__name__ = of_probabilities.__qualname__ = metric.__name__
    of_probabilities.__doc__ = (metric.__doc__ or "").replace(_TABLE_ARGUMENT, _PLAIN_ARGUMENTS)
    return of_probabilities


accuracy = _of_probabilities(table_metrics.accuracy)
negative_log_likelihood = _of_probabilities(table_metrics.negative_log_likelihood)
brier_score = _of_probabilities(table_metrics.brier_score)
expected_calibration_error = _of_probabilities(table_metrics.expected_calibration_error)
adaptive_calibration_error = _of_probabilities(table_metrics.adaptive_calibration_error)
risk_coverage_curve = _of_probabilities(table_metrics.risk_coverage_curve)
area_under_risk_coverage = _of_probabilities(table_metrics.area_under_risk_coverage)


def classwise_calibration_error(probabilities: ArrayLike, labels: ArrayLike, n_bins: int = 15) -> float:
    r"""Return the mean over classes of the calibration error of the class's own probability.

    $$\frac{1}{C} \sum_c \sum_b \frac{|B_{b,c}|}{N} \left|\bar y_c(B_{b,c}) - \bar p_c(B_{b,c})\right|$$

    Bin b of class c holds the examples, of any label, whose probability of c is in (b / n_bins, (b + 1) / n_bins], 0
    in the first bin; its two means are the share of examples of class c and the mean probability of c. With many
    classes most probabilities are near 0, and so is this figure.

    Source: M. Kull et al., "Beyond temperature scaling", 2019 (arXiv 1910.12656); J. Nixon et al., "Measuring
    calibration in deep learning", 2019 (arXiv 1904.01685), who call it static calibration error.

    Args:
        probabilities: (N, C).
        labels: (N,), class indices.
        n_bins: Number of bins.

    Raises:
        ValueError: The input is no set of probabilities with labels, or `n_bins` is below 1.
    """
    probabilities = checked_probabilities(probabilities, num_dims=2)
    labels = checked_labels(labels, *probabilities.shape)
    errors = []
    for label, probability in enumerate(probabilities.T):
        order = np.argsort(probability)
        residuals = (labels == label)[order] - probability[order]
        errors.append(mean_absolute_gap(residuals, equal_width_cuts(probability[order], n_bins)))
    return float(np.mean(errors))


def pairwise_disagreement(member_votes: ArrayLike) -> float:
    """Return the fraction of examples on which two members predict different classes, mean over pairs of members.

    Args:
        member_votes: (N, M), the class that each member predicts. 0 is returned for M = 1.

    Raises:
        ValueError: The votes are not a non-empty (N, M) array.
    """
    votes = torch.as_tensor(member_votes)
    if votes.dim() != 2 or not votes.numel():
        raise ValueError(f"member_votes must be (N, M) and not empty, got shape {tuple(votes.shape)}.")
    if not torch.isfinite(votes).all():
        raise ValueError("member_votes hold NaN or infinity, which are no classes.")
    return member_disagreement(votes).mean().item()


def member_accuracy(member_probabilities: ArrayLike, labels: ArrayLike) -> np.ndarray:
    """Return the accuracy of every member on its own.

    Args:
        member_probabilities: (N, M, C).
        labels: (N,), class indices.

    Returns:
        (M,).

    Raises:
        ValueError: The input is no set of probabilities with labels.
    """
    return _by_member(accuracy, member_probabilities, labels)


def member_negative_log_likelihood(member_probabilities: ArrayLike, labels: ArrayLike) -> np.ndarray:
    """Return the negative log-likelihood of every member on its own, in nats.

    Args:
        member_probabilities: (N, M, C).
        labels: (N,), class indices.

    Returns:
        (M,).

    Raises:
        ValueError: The input is no set of probabilities with labels.
    """
    return _by_member(negative_log_likelihood, member_probabilities, labels)


def _by_member(
    metric: Callable[[ArrayLike, ArrayLike], float], member_probabilities: ArrayLike, labels: ArrayLike
) -> np.ndarray:
    member_probabilities = checked_probabilities(member_probabilities, num_dims=3)
    return np.array([metric(probabilities, labels) for probabilities in member_probabilities.swapaxes(0, 1)])
