import inspect
import math
import pickle

import netcal.metrics
import numpy as np
import pytest
import sklearn.metrics
import torch
import torchmetrics.functional.classification as reference
from metric_cases import random_case, tied_case

from sigma_nens_hf.metrics import (
    TABLE_METRICS,
    ExampleTable,
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

CALIBRATION_ERRORS = [expected_calibration_error, adaptive_calibration_error, classwise_calibration_error]
OF_PROBABILITIES = [
    accuracy,
    area_under_risk_coverage,
    brier_score,
    negative_log_likelihood,
    risk_coverage_curve,
    *CALIBRATION_ERRORS,
]
SEEDS = range(200)
BINS = (1, 4, 15, 60)


def width_bin(confidence, n_bins):
    """The bin of one confidence, found by trying."""
    edges = [b / n_bins for b in range(n_bins + 1)]
    for b in range(n_bins):
        if edges[b] < confidence <= edges[b + 1]:
            return b
    return 0 if confidence <= 0 else n_bins - 1


def plain_width_error(confidences, outcomes, n_bins):
    gaps = [0.0] * n_bins
    for confidence, outcome in zip(confidences, outcomes, strict=True):
        gaps[width_bin(confidence, n_bins)] += outcome - confidence
    return sum(map(abs, gaps)) / len(confidences)


def plain_mass_error(confidences, outcomes, n_bins):
    """Every example is cut into n_bins pieces, N pieces fill a bin; a piece of tied examples is their mean."""
    pieces = []
    for confidence in sorted(confidences):
        tied = [outcome for other, outcome in zip(confidences, outcomes, strict=True) if other == confidence]
        pieces += [sum(tied) / len(tied) - confidence] * n_bins
    size = len(confidences)
    return sum(abs(sum(pieces[b * size : (b + 1) * size])) for b in range(n_bins)) / len(pieces)


def plain_area(confidences, outcomes):
    risks = []
    for threshold in confidences:
        accepted = [outcome for c, outcome in zip(confidences, outcomes, strict=True) if c >= threshold]
        risks.append(1 - sum(accepted) / len(accepted))
    return sum(risks) / len(risks)


@pytest.mark.parametrize("seed", SEEDS)
def test_agreement_with_scikit_learn(seed):
    p, y = random_case(seed)
    classes = range(p.shape[1])
    assert accuracy(p, y) == sklearn.metrics.accuracy_score(y, p.argmax(1))
    assert negative_log_likelihood(p, y) == pytest.approx(sklearn.metrics.log_loss(y, p, labels=classes))
    expected = sklearn.metrics.brier_score_loss(y, p, labels=classes, scale_by_half=False)
    assert brier_score(p, y) == pytest.approx(expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_agreement_with_torchmetrics(seed):
    p, y = map(torch.as_tensor, random_case(seed))
    num_classes = p.shape[1]
    expected = reference.multiclass_accuracy(p, y, num_classes, average="micro").item()
    assert accuracy(p, y) == pytest.approx(expected)
    for n_bins in BINS:
        expected = reference.multiclass_calibration_error(p.float(), y, num_classes, n_bins=n_bins).item()
        assert expected_calibration_error(p, y, n_bins) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_agreement_with_netcal(seed):
    # Of two classes netcal bins the probability of the second, not of the prediction.
    p, y = random_case(seed, least_classes=3)
    y[:3] = range(3)
    for n_bins in (1, 5, 15):
        expected = netcal.metrics.ECE(n_bins).measure(p, y)
        assert expected_calibration_error(p, y, n_bins) == pytest.approx(expected, abs=1e-12)
    # It puts whole examples into bins of equal mass, so it agrees where none is divided.
    for n_bins in (1, len(y)):
        expected = netcal.metrics.ECE(n_bins, equal_intervals=False).measure(p, y)
        assert adaptive_calibration_error(p, y, n_bins) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("case", [random_case, tied_case])
@pytest.mark.parametrize("seed", SEEDS)
def test_agreement_with_plain_loops(case, seed):
    p, y = case(seed)
    confidences, right = p.max(1).tolist(), (p.argmax(1) == y).astype(float).tolist()
    assert area_under_risk_coverage(p, y) == pytest.approx(plain_area(confidences, right))
    for n_bins in BINS:
        expected = plain_width_error(confidences, right, n_bins)
        assert expected_calibration_error(p, y, n_bins) == pytest.approx(expected, abs=1e-12)
        expected = plain_mass_error(confidences, right, n_bins)
        assert adaptive_calibration_error(p, y, n_bins) == pytest.approx(expected, abs=1e-12)
        of_classes = [plain_width_error(p[:, c], (y == c).astype(float), n_bins) for c in range(p.shape[1])]
        assert classwise_calibration_error(p, y, n_bins) == pytest.approx(np.mean(of_classes), abs=1e-12)


def test_confidence_of_one_shares_the_last_bin():
    p, y = np.array([[0.95, 0.05], [1.0, 0.0]]), np.array([0, 1])
    assert expected_calibration_error(p, y, 10) == pytest.approx(0.475)
    theirs = reference.multiclass_calibration_error(torch.tensor(p), torch.tensor(y), 2, n_bins=10).item()
    assert theirs == pytest.approx(0.525), "torchmetrics no longer gives confidence 1 a bin of its own"


def test_bins_are_closed_above():
    p, y = np.array([[0.6, 0.4], [0.5, 0.5], [0.7, 0.3]]), np.array([0, 0, 1])
    # .5 alone in its bin; .6 and .7 in (.5, .75]
    assert expected_calibration_error(p, y, 4) == pytest.approx((0.5 + abs(0.4 - 0.7)) / 3)


def test_closed_forms():
    p, y = np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([0, 0])
    assert accuracy(p, y) == 1
    for metric in (negative_log_likelihood, brier_score, area_under_risk_coverage, *CALIBRATION_ERRORS):
        assert metric(p, y) == 0
    assert negative_log_likelihood(p, np.array([0, 1])) == math.inf
    assert brier_score(p, np.array([1, 1])) == 2
    uniform = np.full((4, 4), 0.25)
    assert negative_log_likelihood(uniform, np.arange(4)) == pytest.approx(math.log(4))
    assert brier_score(uniform, np.arange(4)) == pytest.approx(0.75)
    assert accuracy(uniform, np.arange(4)) == 0.25
    assert area_under_risk_coverage(uniform, np.arange(4)) == 0.75
    for metric in CALIBRATION_ERRORS:
        assert metric(uniform, np.arange(4)) == pytest.approx(0)


@pytest.mark.parametrize("metric", CALIBRATION_ERRORS)
@pytest.mark.parametrize("n_bins", [1, 15, 1000])
def test_one_example_and_one_class(metric, n_bins):
    assert metric([[0.8, 0.2]], [1], n_bins) == pytest.approx(0.8)
    assert metric(np.ones((3, 1)), np.zeros(3, dtype=int), n_bins) == 0


def test_more_bins_of_equal_mass_than_examples():
    p, y = np.array([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2]]), np.array([0, 0, 1])
    for n_bins in (3, 6, 999):
        assert adaptive_calibration_error(p, y, n_bins) == pytest.approx((0.1 + 0.4 + 0.8) / 3)
    # Half of the middle example, .8 and wrong, is in either bin.
    assert adaptive_calibration_error(p, y, 2) == pytest.approx((abs(0.4 - 0.4) + abs(0.1 - 0.4)) / 3)


def test_risk_coverage_curve():
    p, y = np.array([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2], [0.2, 0.8]]), np.array([0, 1, 1, 1])
    coverage, risk = risk_coverage_curve(p, y)
    # .9 right; .8 twice, one of them wrong; .6 wrong
    np.testing.assert_allclose(coverage, [0.25, 0.75, 1])
    np.testing.assert_allclose(risk, [0, 1 / 3, 2 / 4])
    assert area_under_risk_coverage(p, y) == pytest.approx((0 + 1 / 3 + 1 / 3 + 1 / 2) / 4)


def test_area_is_best_when_errors_are_the_least_confident():
    y = np.zeros(4, dtype=int)
    confidence = np.array([0.9, 0.8, 0.3, 0.4])
    # Errors have the confidences .7 and .6, behind .9 and .8
    best = area_under_risk_coverage(np.stack([confidence, 1 - confidence], 1), y)
    assert best == pytest.approx((0 + 0 + 1 / 3 + 2 / 4) / 4)


@pytest.mark.parametrize("name", TABLE_METRICS)
def test_metrics_of_tables_are_those_of_probabilities(name):
    by_name = dict(zip(TABLE_METRICS, [accuracy, negative_log_likelihood, brier_score], strict=False))
    by_name |= {"ece": expected_calibration_error, "ace": adaptive_calibration_error, "aurc": area_under_risk_coverage}
    p, y = random_case(7)
    assert TABLE_METRICS[name](ExampleTable.of_probabilities(p, y)) == by_name[name](p, y)
    with pytest.raises(ValueError, match="needs labels"):
        TABLE_METRICS[name](ExampleTable.of_probabilities(p))


@pytest.mark.parametrize("metric", OF_PROBABILITIES)
def test_arrays_tensors_and_lists_are_alike(metric):
    p, y = random_case(11)
    p = p.astype(np.float32)
    expected = metric(p, y)
    for convert in (torch.as_tensor, np.ndarray.tolist):
        np.testing.assert_equal(metric(convert(p), convert(y)), expected)
    assert np.isfinite(metric(torch.full((2, 2), 0.5, dtype=torch.bfloat16), y[:2] % 2)).all()


@pytest.mark.parametrize("metric", OF_PROBABILITIES)
def test_functions_are_documented_and_pickled_as_their_own(metric):
    assert "probabilities: (N, C).\n        labels: (N,)" in metric.__doc__
    assert list(inspect.signature(metric).parameters)[:2] == ["probabilities", "labels"]
    assert ("n_bins" in inspect.signature(metric).parameters) == (metric in CALIBRATION_ERRORS)
    assert pickle.loads(pickle.dumps(metric)) is metric


@pytest.mark.parametrize("metric", OF_PROBABILITIES)
@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        ([[0.5, np.nan]], [0], "NaN"),
        ([[2.0, -1.0]], [0], "no probabilities"),
        ([[3.0, 4.0]], [0], "no probabilities"),
        ([[0.5, 0.5]], [-1], "Labels must be from 0 to 1"),
        ([[0.5, 0.5]], [2], "Labels must be from 0 to 1"),
        ([[0.5, 0.5]], [0.0], "class indices"),
        ([[0.5, 0.5]], [0, 1], "one for each example"),
        (np.zeros((0, 2)), [], "N > 0"),
        ([0.5, 0.5], [0, 1], "N > 0"),
        ([[[0.5, 0.5]]], [0], "N > 0"),
    ],
)
def test_bad_input_is_refused(metric, probabilities, labels, message):
    with pytest.raises(ValueError, match=message):
        metric(probabilities, labels)


@pytest.mark.parametrize("metric", CALIBRATION_ERRORS)
@pytest.mark.parametrize("n_bins", [0, -1, 1.5, True, None])
def test_bins_must_be_counted(metric, n_bins):
    with pytest.raises(ValueError, match="n_bins must be a whole number"):
        metric([[0.5, 0.5]], [0], n_bins=n_bins)


def test_pairwise_disagreement():
    assert pairwise_disagreement([[0, 0, 1], [2, 2, 2]]) == pytest.approx(1 / 3)
    assert pairwise_disagreement(torch.zeros(3, 1)) == 0
    for votes in ([0, 1], np.zeros((0, 2))):
        with pytest.raises(ValueError, match=r"\(N, M\)"):
            pairwise_disagreement(votes)


def test_members_are_measured_one_by_one():
    members = np.stack([random_case(seed)[0] for seed in (0, 40, 80)], 1)
    labels = random_case(0)[1]
    np.testing.assert_allclose(member_accuracy(members, labels), [accuracy(members[:, m], labels) for m in range(3)])
    expected = [negative_log_likelihood(members[:, m], labels) for m in range(3)]
    np.testing.assert_allclose(member_negative_log_likelihood(torch.as_tensor(members), labels), expected)


@pytest.mark.parametrize("metric", [member_accuracy, member_negative_log_likelihood])
def test_members_must_be_probabilities_of_members(metric):
    for probabilities, labels, message in [
        ([[0.5, 0.5]], [0], r"\(N, M, C\)"),
        ([[[0.5, np.nan]]], [0], "NaN"),
        ([[[0.5, 0.5]]], [-1], "Labels must be from 0 to 1"),
        (np.zeros((1, 0, 2)), [0], r"\(N, M, C\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            metric(probabilities, labels)
