"""Metrics as plain functions of probabilities (N, C) and labels (N,), given as arrays or tensors."""

from collections.abc import Sequence

import numpy as np
import torch

from ..uncertainty import member_disagreement

ArrayLike = np.ndarray | torch.Tensor | Sequence

# How far the probabilities of one example may be from a sum of 1: what fp16 logits leave after a softmax.
_SUM_TOLERANCE = 1e-3


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Return the fraction of examples whose most probable class is right; of tied classes the first counts.

    Args:
        probabilities: (N, C).
        labels: (N,), class indices.

    Raises:
        ValueError: The input is no set of probabilities with labels.
    """
    probabilities, labels = _checked(probabilities, labels)
    return float((probabilities.argmax(1) == labels).mean())


def negative_log_likelihood(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Return the mean of -log p(label), in nats; infinite if a label was given probability 0.

    Args:
        probabilities: (N, C).
        labels: (N,), class indices.

    Raises:
        ValueError: The input is no set of probabilities with labels.
    """
    probabilities, labels = _checked(probabilities, labels)
    with np.errstate(divide="ignore"):
        return float(-np.log(probabilities[np.arange(len(labels)), labels]).mean())


def brier_score(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Return the mean squared distance to the one-hot label, summed over classes: between 0 and 2.

    Source: G. W. Brier, "Verification of forecasts expressed in terms of probability", 1950 (the multi-class form).

    Args:
        probabilities: (N, C).
        labels: (N,), class indices.

    Raises:
        ValueError: The input is no set of probabilities with labels.
    """
    probabilities, labels = _checked(probabilities, labels)
    target = np.zeros_like(probabilities)
    target[np.arange(len(labels)), labels] = 1
    return float(((probabilities - target) ** 2).sum(1).mean())


def expected_calibration_error(probabilities: ArrayLike, labels: ArrayLike, n_bins: int = 15) -> float:
    """Return the top-label expected calibration error over bins of equal width.

    The sum over bins of |accuracy - mean confidence|, weighted by the bin's share of examples. Bin b holds the
    confidences in (b / n_bins, (b + 1) / n_bins]; a confidence of 0 falls into the first bin, and a confidence of 1
    into the last.

    Source: C. Guo et al., "On calibration of modern neural networks", 2017 (arXiv 1706.04599).

    Args:
        probabilities: (N, C).
        labels: (N,), class indices.
        n_bins: Number of bins.

    Raises:
        ValueError: The input is no set of probabilities with labels, or `n_bins` is below 1.
    """
    if n_bins < 1:
        raise ValueError(f"n_bins must be at least 1, got {n_bins}.")
    probabilities, labels = _checked(probabilities, labels)
    confidence = probabilities.max(1)
    correct = probabilities.argmax(1) == labels
    # The inner edges alone decide, so no rounding can push a confidence out of the first or last bin.
    bins = np.digitize(confidence, np.linspace(0, 1, n_bins + 1)[1:-1], right=True)
    gaps = np.bincount(bins, weights=correct - confidence, minlength=n_bins)
    return float(np.abs(gaps).sum() / len(labels))


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
    return member_disagreement(votes).mean().item()


def _as_array(values: ArrayLike) -> np.ndarray:
    return values.detach().float().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _checked(probabilities: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return both as arrays, probabilities in double precision and labels as integers, or raise."""
    probabilities = _as_array(probabilities).astype(np.float64)
    labels = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1] or not len(labels):
        raise ValueError(
            f"Expected probabilities (N, C) and labels (N,) with N > 0, got {probabilities.shape} and {labels.shape}."
        )
    if not np.isfinite(probabilities).all():
        raise ValueError("The probabilities hold NaN or infinity.")
    sums = probabilities.sum(1)
    if probabilities.min() < 0 or np.abs(sums - 1).max() > _SUM_TOLERANCE:
        raise ValueError(
            "These are no probabilities: they must be between 0 and 1 and sum to 1 over classes. Are they logits?"
        )
    num_classes = probabilities.shape[1]
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"Labels must be class indices, got values of type {labels.dtype}.")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(
            f"Labels must be from 0 to {num_classes - 1}, got {labels.min()} to {labels.max()}. A label of -1 marks an "
            "unlabelled split."
        )
    return probabilities, labels
