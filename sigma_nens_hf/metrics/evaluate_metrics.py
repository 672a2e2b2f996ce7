"""The metrics as `evaluate.Metric` classes, to be made directly: `evaluate.load` would ask the Hub for a script."""

from collections.abc import Callable
from typing import Any, ClassVar

import datasets
import evaluate

from . import functional


class ProbabilityMetric(evaluate.Metric):
    """A metric of predictions (N, C), probabilities, and references (N,), class indices.

    A subclass names the plain function that it is: `class AccuracyMetric(ProbabilityMetric, function=accuracy)`.
    `compute` returns the figure under the function's name, and passes further arguments, such as `n_bins`, on to it.
    """

    function: ClassVar[Callable[..., float]]

    def __init_subclass__(cls, function: Callable[..., float], **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.function = staticmethod(function)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.function.__doc__ or "",
            citation="",
            inputs_description="\nPredictions are probabilities (N, C); references are class indices (N,).\n",
            features=datasets.Features(
                {
                    "predictions": datasets.Sequence(datasets.Value("float64")),
                    "references": datasets.Value("int64"),
                }
            ),
        )

    def _compute(self, predictions: list[list[float]], references: list[int], **options: Any) -> dict[str, float]:
        return {self.function.__name__: self.function(predictions, references, **options)}


class AccuracyMetric(ProbabilityMetric, function=functional.accuracy):
    """See `accuracy`."""


class NegativeLogLikelihoodMetric(ProbabilityMetric, function=functional.negative_log_likelihood):
    """See `negative_log_likelihood`."""


class BrierScoreMetric(ProbabilityMetric, function=functional.brier_score):
    """See `brier_score`."""


class ExpectedCalibrationErrorMetric(ProbabilityMetric, function=functional.expected_calibration_error):
    """See `expected_calibration_error`; takes `n_bins`."""


class AdaptiveCalibrationErrorMetric(ProbabilityMetric, function=functional.adaptive_calibration_error):
    """See `adaptive_calibration_error`; takes `n_bins`."""


class ClasswiseCalibrationErrorMetric(ProbabilityMetric, function=functional.classwise_calibration_error):
    """See `classwise_calibration_error`; takes `n_bins`."""


class AreaUnderRiskCoverageMetric(ProbabilityMetric, function=functional.area_under_risk_coverage):
    """See `area_under_risk_coverage`."""
