import math

import numpy as np
import pytest
import torch
import torchmetrics.functional.classification as reference

from sigma_nens_hf.metrics import (
    accuracy,
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
    pairwise_disagreement,
)

METRICS = [accuracy, brier_score, expected_calibration_error, negative_log_likelihood]


def random_case(seed):
    generator = torch.Generator().manual_seed(seed)
    num_examples, num_classes = 3 + seed % 40, 2 + seed % 5
    logits = torch.randn(num_examples, num_classes, generator=generator, dtype=torch.float64) * (1 + seed % 4)
    return logits.softmax(-1), torch.randint(0, num_classes, (num_examples,), generator=generator)


@pytest.mark.parametrize("seed", range(50))
def test_agreement_with_torchmetrics_and_brute_force(seed):
    p, y = random_case(seed)
    num_examples, num_classes = p.shape
    expected = reference.multiclass_accuracy(p, y, num_classes, average="micro").item()
    assert accuracy(p, y) == pytest.approx(expected)
    assert negative_log_likelihood(p, y) == pytest.approx(
        -sum(math.log(p[i, y[i]]) for i in range(num_examples)) / num_examples
    )
    squares = sum((p[i, c] - float(c == y[i])) ** 2 for i in range(num_examples) for c in range(num_classes))
    assert brier_score(p, y) == pytest.approx(squares.item() / num_examples)
    for n_bins in (1, 10, 15):
        expected = reference.multiclass_calibration_error(p.float(), y, num_classes, n_bins=n_bins).item()
        assert expected_calibration_error(p, y, n_bins) == pytest.approx(expected, abs=1e-5)


def test_confidence_of_one_shares_the_last_bin():
    p, y = np.array([[0.95, 0.05], [1.0, 0.0]]), np.array([0, 1])
    # torchmetrics 1.9 gives confidence 1 a bin of its own and so comes to .525
    assert expected_calibration_error(p, y, 10) == pytest.approx(0.475)


def test_closed_forms():
    p, y = np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([0, 0])
    assert [metric(p, y) for metric in METRICS] == [1.0, 0.0, 0.0, 0.0]
    assert negative_log_likelihood(p, np.array([0, 1])) == math.inf
    assert brier_score(p, np.array([1, 1])) == 2
    uniform = np.full((4, 4), 0.25)
    assert negative_log_likelihood(uniform, np.arange(4)) == pytest.approx(math.log(4))
    assert expected_calibration_error(uniform, np.arange(4)) == pytest.approx(0)
    assert expected_calibration_error(np.ones((3, 1)), np.zeros(3, dtype=int)) == 0


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        ([[0.5, np.nan]], [0], "NaN"),
        ([[2.0, -1.0]], [0], "no probabilities"),
        ([[3.0, 4.0]], [0], "no probabilities"),
        ([[0.5, 0.5]], [-1], "Labels must be from 0 to 1"),
        ([[0.5, 0.5]], [2], "Labels must be from 0 to 1"),
        ([[0.5, 0.5]], [0.0], "class indices"),
        ([[0.5, 0.5]], [0, 1], "N > 0"),
        (np.zeros((0, 2)), [], "N > 0"),
        ([0.5, 0.5], [0, 1], "N > 0"),
    ],
)
def test_bad_input_is_refused(metric, probabilities, labels, message):
    with pytest.raises(ValueError, match=message):
        metric(probabilities, labels)


def test_bins_must_be_there():
    with pytest.raises(ValueError, match="n_bins"):
        expected_calibration_error([[0.5, 0.5]], [0], n_bins=0)


def test_pairwise_disagreement():
    assert pairwise_disagreement([[0, 0, 1], [2, 2, 2]]) == pytest.approx(1 / 3)
    assert pairwise_disagreement(torch.zeros(3, 1)) == 0
    with pytest.raises(ValueError, match=r"\(N, M\)"):
        pairwise_disagreement([0, 1])
