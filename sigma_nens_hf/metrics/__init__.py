"""Quality and calibration of predicted probabilities."""

from typing import TYPE_CHECKING, Any

from .bootstrap import (
    BootstrapInterval,
    PairedDifference,
    bootstrap_interval,
    bootstrap_intervals,
    bootstrap_statistic,
    paired_bootstrap,
)
from .example_table import ExampleTable
from .functional import (
    accuracy,
    adaptive_calibration_error,
    area_under_risk_coverage,
    brier_score,
    classwise_calibration_error,
    expected_calibration_error,
    member_accuracy,
    member_negative_log_likelihood,
    negative_log_likelihood,
    pairwise_disagreement,
    risk_coverage_curve,
)
from .noise_floor import NoiseFloor, calibration_noise_floor
from .out_of_distribution import ood_metrics
from .report import calibration_report
from .table_metrics import TABLE_METRICS, RiskCoverage

if TYPE_CHECKING:
    from .evaluate_metrics import (
        AccuracyMetric,
        AdaptiveCalibrationErrorMetric,
        AreaUnderRiskCoverageMetric,
        BrierScoreMetric,
        ClasswiseCalibrationErrorMetric,
        ExpectedCalibrationErrorMetric,
        NegativeLogLikelihoodMetric,
    )

__all__ = [
    "TABLE_METRICS",
    "AccuracyMetric",
    "AdaptiveCalibrationErrorMetric",
    "AreaUnderRiskCoverageMetric",
    "BootstrapInterval",
    "BrierScoreMetric",
    "ClasswiseCalibrationErrorMetric",
    "ExampleTable",
    "ExpectedCalibrationErrorMetric",
    "NegativeLogLikelihoodMetric",
    "NoiseFloor",
    "PairedDifference",
    "RiskCoverage",
    "accuracy",
    "adaptive_calibration_error",
    "area_under_risk_coverage",
    "bootstrap_interval",
    "bootstrap_intervals",
    "bootstrap_statistic",
    "brier_score",
    "calibration_noise_floor",
    "calibration_report",
    "classwise_calibration_error",
    "expected_calibration_error",
    "member_accuracy",
    "member_negative_log_likelihood",
    "negative_log_likelihood",
    "ood_metrics",
    "paired_bootstrap",
    "pairwise_disagreement",
    "risk_coverage_curve",
]


def __getattr__(name: str) -> Any:
    # `evaluate` would add half a second to the import of the package, which trains without it.
    if name in __all__:
        from . import evaluate_metrics

        return getattr(evaluate_metrics, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
