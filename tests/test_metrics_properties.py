import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sigma_nens_hf.metrics import (
    TABLE_METRICS,
    ExampleTable,
    accuracy,
    adaptive_calibration_error,
    classwise_calibration_error,
    expected_calibration_error,
)

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
UPPER_ENDS = {"accuracy": 1, "nll": np.inf, "brier": 2, "ece": 1, "ace": 1, "aurc": 1, "classwise": 1}


@st.composite
def cases(draw):
    """Probabilities of small whole weights, so that ties and probabilities of 0 and 1 are frequent; labels."""
    num_examples, num_classes = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    rows = st.lists(st.integers(0, 4), min_size=num_classes, max_size=num_classes).filter(any)
    weights = np.array(draw(st.lists(rows, min_size=num_examples, max_size=num_examples)), dtype=float)
    labels = draw(st.lists(st.integers(0, num_classes - 1), min_size=num_examples, max_size=num_examples))
    return weights / weights.sum(1, keepdims=True), np.array(labels)


def all_metrics(probabilities, labels):
    table = ExampleTable.of_probabilities(probabilities, labels)
    figures = {name: metric(table) for name, metric in TABLE_METRICS.items()}
    return figures | {"classwise": classwise_calibration_error(probabilities, labels)}


@EXAMPLES
@given(cases())
def test_ranges(case):
    for name, figure in all_metrics(*case).items():
        assert -1e-12 <= figure <= UPPER_ENDS[name] + 1e-12


@EXAMPLES
@given(cases(), st.randoms(use_true_random=False))
def test_order_of_rows_does_not_matter(case, random):
    p, y = case
    rows = list(range(len(y)))
    random.shuffle(rows)
    assert all_metrics(p[rows], y[rows]) == pytest.approx(all_metrics(p, y), abs=1e-12)


@EXAMPLES
@given(cases(), st.randoms(use_true_random=False))
def test_order_of_classes_does_not_matter(case, random):
    p, y = case
    # Of tied classes the first is predicted.
    assume(((p == p.max(1, keepdims=True)).sum(1) == 1).all())
    classes = list(range(p.shape[1]))
    random.shuffle(classes)
    assert all_metrics(p[:, classes], np.argsort(classes)[y]) == pytest.approx(all_metrics(p, y), abs=1e-12)


@EXAMPLES
@given(cases(), st.integers(2, 4))
def test_repeating_all_examples_changes_nothing(case, times):
    p, y = case
    repeated = all_metrics(np.tile(p, (times, 1)), np.tile(y, times))
    assert repeated == pytest.approx(all_metrics(p, y), abs=1e-12)


@EXAMPLES
@given(cases(), st.integers(1, 40))
def test_calibration_errors_are_at_least_the_overall_gap(case, n_bins):
    p, y = case
    overall = abs(accuracy(p, y) - p.max(1).mean())
    for metric in (expected_calibration_error, adaptive_calibration_error):
        assert metric(p, y, n_bins) >= overall - 1e-12
        assert metric(p, y, 1) == pytest.approx(overall, abs=1e-12)
        # Halving the bins can only bring to light what cancelled.
        assert metric(p, y, 2 * n_bins) >= metric(p, y, n_bins) - 1e-9
