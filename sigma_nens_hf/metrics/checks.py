"""What a set of probabilities with labels must be before any figure is made of it."""

from collections.abc import Sequence

import numpy as np
import torch

ArrayLike = np.ndarray | torch.Tensor | Sequence

# How far the probabilities of one example may be from a sum of 1: what fp16 logits leave after a softmax.
_SUM_TOLERANCE = 1e-3
_ROUNDING = 1e-9


def as_array(values: ArrayLike) -> np.ndarray:
    """Return values as an array, wherever and however precise a tensor they were."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        # numpy has no bf16
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)


def checked_probabilities(probabilities: ArrayLike, num_dims: int = 2) -> np.ndarray:
    """Return probabilities as an array of double precision.

    Args:
        probabilities: (N, C), or (N, M, C) of M members; N > 0.
        num_dims: 2 or 3.

    Raises:
        ValueError: They are none.
    """
    probabilities = as_array(probabilities).astype(np.float64)
    if probabilities.ndim != num_dims or not probabilities.size:
        expected = {2: "(N, C)", 3: "(N, M, C)"}[num_dims]
        raise ValueError(f"Expected probabilities {expected} with N > 0, got shape {probabilities.shape}.")
    if not np.isfinite(probabilities).all():
        raise ValueError("The probabilities hold NaN or infinity.")
    sums = probabilities.sum(-1, keepdims=True)
    off_by = np.abs(sums - 1)
    if probabilities.min() < 0 or off_by.max() > _SUM_TOLERANCE:
        raise ValueError(
            "These are no probabilities: they must be between 0 and 1 and sum to 1 over classes (some sums are off by "
            f"{off_by.max():.2g}). Are they logits, or a softmax in 16 bits?"
        )
    # What 16 bits left is spread over the classes: a probability above 1 would have a negative NLL.
    return np.where(off_by > _ROUNDING, probabilities / sums, probabilities)


def checked_confidences(confidences: ArrayLike) -> np.ndarray:
    """Return confidences as an array of double precision.

    Args:
        confidences: (N,), N > 0.

    Raises:
        ValueError: They are none.
    """
    confidences = as_array(confidences).astype(np.float64)
    if confidences.ndim != 1 or not len(confidences):
        raise ValueError(f"Expected confidences (N,) with N > 0, got shape {confidences.shape}.")
    # What NaN compares with is false.
    if not ((confidences >= 0) & (confidences <= 1 + _SUM_TOLERANCE)).all():
        raise ValueError("Confidences must be between 0 and 1, and not NaN.")
    return confidences


def checked_labels(labels: ArrayLike, num_examples: int, num_classes: int) -> np.ndarray:
    """Return labels as an array of class indices.

    Args:
        labels: (N,).
        num_examples: N.
        num_classes: Number of classes C.

    Raises:
        ValueError: They are no class indices, or not as many as there are examples.
    """
    labels = as_array(labels)
    if labels.shape != (num_examples,):
        raise ValueError(f"Expected labels ({num_examples},), one for each example, got shape {labels.shape}.")
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"Labels must be class indices, got values of type {labels.dtype}.")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(
            f"Labels must be from 0 to {num_classes - 1}, got {labels.min()} to {labels.max()}. A label of -1 marks an "
            "unlabelled split."
        )
    return labels.astype(np.int64)
