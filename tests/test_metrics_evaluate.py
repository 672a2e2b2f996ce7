import evaluate
import numpy as np
import pytest
from huggingface_hub import constants
from metric_cases import random_case

from sigma_nens_hf import metrics

FUNCTIONS = {
    metrics.AccuracyMetric: metrics.accuracy,
    metrics.AdaptiveCalibrationErrorMetric: metrics.adaptive_calibration_error,
    metrics.AreaUnderRiskCoverageMetric: metrics.area_under_risk_coverage,
    metrics.BrierScoreMetric: metrics.brier_score,
    metrics.ClasswiseCalibrationErrorMetric: metrics.classwise_calibration_error,
    metrics.ExpectedCalibrationErrorMetric: metrics.expected_calibration_error,
    metrics.NegativeLogLikelihoodMetric: metrics.negative_log_likelihood,
}


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """Work in an empty folder, which must be empty in the end, with the metrics' files elsewhere and the Hub away."""
    assert constants.HF_HUB_OFFLINE
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    yield str(tmp_path / "cache")
    assert not list(working.iterdir())


@pytest.mark.parametrize("metric_class", FUNCTIONS)
def test_agreement_with_the_functions(metric_class, in_folder):
    p, y = random_case(36)
    function = FUNCTIONS[metric_class]
    metric = metric_class(cache_dir=in_folder)
    assert metric.compute(predictions=p, references=y) == {function.__name__: function(p, y)}
    for start in range(0, len(y), 10):
        metric.add_batch(predictions=p[start : start + 10].tolist(), references=y[start : start + 10])
    assert metric.compute() == {function.__name__: function(p, y)}
    for row, label in zip(p, y, strict=True):
        metric.add(prediction=row, reference=label)
    assert metric.compute() == {function.__name__: function(p, y)}


@pytest.mark.parametrize("metric_class", [c for c in FUNCTIONS if "Calibration" in c.__name__])
def test_bins_are_passed_on(metric_class, in_folder):
    p, y = random_case(36)
    function = FUNCTIONS[metric_class]
    figures = metric_class(cache_dir=in_folder).compute(predictions=p, references=y, n_bins=3)
    assert figures == {function.__name__: function(p, y, 3)}
    assert figures != {function.__name__: function(p, y)}


def test_combine(in_folder):
    p, y = random_case(36)
    combined = evaluate.combine([metric_class(cache_dir=in_folder) for metric_class in FUNCTIONS])
    expected = {function.__name__: function(p, y) for function in FUNCTIONS.values()}
    assert combined.compute(predictions=p, references=y) == expected
    combined.add_batch(predictions=p[:5], references=y[:5])
    combined.add_batch(predictions=p[5:], references=y[5:])
    assert combined.compute() == expected


@pytest.mark.parametrize("metric_class", FUNCTIONS)
def test_bad_input_is_refused(metric_class, in_folder):
    for predictions, references, message in [
        ([[3.0, -1.0]], [0], "no probabilities"),
        ([[0.5, 0.5]], [-1], "Labels must be from 0 to 1"),
        ([[0.5, 0.5]], [0, 1], "Mismatch in the number"),
    ]:
        # One that failed keeps its file locked, and another would wait for it.
        metric = metric_class(cache_dir=in_folder, experiment_id=message)
        with pytest.raises(ValueError, match=message):
            metric.compute(predictions=predictions, references=references)


def test_precision_is_kept(in_folder):
    p = np.array([[1e-12, 1 - 1e-12]])
    figure = metrics.NegativeLogLikelihoodMetric(cache_dir=in_folder).compute(predictions=p, references=[0])
    assert figure["negative_log_likelihood"] == -np.log(1e-12)


def test_evaluate_is_imported_only_when_asked_for(run_python):
    code = """
    import sys
    import sigma_nens_hf.metrics as metrics
    heavy = ("evaluate", "sklearn", "scipy.stats", "matplotlib")
    print([name for name in heavy if name in sys.modules])
    print(metrics.BrierScoreMetric.__name__, "evaluate" in sys.modules)
    """
    assert run_python(code).splitlines() == ["[]", "BrierScoreMetric True"]


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        metrics.Nothing  # noqa: B018
