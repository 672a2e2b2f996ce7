"""Quality and calibration of predicted probabilities."""

from .functional import (
    accuracy,
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
    pairwise_disagreement,
)

__all__ = [
    "accuracy",
    "brier_score",
    "expected_calibration_error",
    "negative_log_likelihood",
    "pairwise_disagreement",
]
