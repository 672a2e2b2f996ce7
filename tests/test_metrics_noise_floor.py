import math

import numpy as np
import pytest
from metric_cases import random_case, tied_case

from sigma_nens_hf.metrics import (
    ExampleTable,
    adaptive_calibration_error,
    calibration_noise_floor,
    expected_calibration_error,
    noise_floor,
)


def test_size_on_872_sentences():
    # As of a classifier of SST-2 with an accuracy of about 94 %.
    rng = np.random.default_rng(0)
    confidences = np.concatenate([rng.uniform(0.9, 0.999, 837), rng.uniform(0.5, 0.9, 35)])
    floor = calibration_noise_floor(confidences)
    assert 0.013 < floor.mean < 0.015
    assert floor.mean < floor.percentile_95 < 2 * floor.mean


@pytest.mark.parametrize("equal_mass", [False, True])
@pytest.mark.parametrize(("confidence", "num_examples"), [(0.7, 2000), (0.9, 1000), (0.5, 5000)])
def test_one_bin_has_a_closed_form(equal_mass, confidence, num_examples):
    confidences = np.full(num_examples, confidence)
    floor = calibration_noise_floor(confidences, 1, n_simulations=4000, equal_mass=equal_mass)
    deviation = math.sqrt(confidence * (1 - confidence) / num_examples)
    assert floor.mean == pytest.approx(deviation * math.sqrt(2 / math.pi), rel=0.04)
    # 95 % of the absolute value of a normal variable are below 1.96 deviations.
    assert floor.percentile_95 == pytest.approx(1.96 * deviation, rel=0.06)


@pytest.mark.parametrize("case", [random_case, tied_case])
@pytest.mark.parametrize(
    ("metric", "equal_mass"), [(expected_calibration_error, False), (adaptive_calibration_error, True)]
)
def test_agreement_with_metrics_of_simulated_labels(case, metric, equal_mass):
    # Seeds of two classes, so that the confidences decide the predictions.
    confidences = np.sort(case(35)[0].max(1))
    probabilities = np.stack([confidences, 1 - confidences], 1)
    rng = np.random.default_rng(3)
    errors = [metric(probabilities, (rng.random(len(confidences)) >= confidences).astype(int), 7) for _ in range(200)]
    floor = calibration_noise_floor(confidences, 7, n_simulations=200, seed=3, equal_mass=equal_mass)
    assert floor.mean == pytest.approx(np.mean(errors))
    assert floor.percentile_95 == pytest.approx(np.quantile(errors, 0.95))


def test_memory_is_bounded_without_changing_the_figures(monkeypatch):
    confidences = random_case(30)[0].max(1)
    at_once = calibration_noise_floor(confidences, n_simulations=100)
    monkeypatch.setattr(noise_floor, "_CHUNK", 7 * len(confidences))
    assert calibration_noise_floor(confidences, n_simulations=100) == at_once
    monkeypatch.setattr(noise_floor, "_CHUNK", 1)
    assert calibration_noise_floor(confidences, n_simulations=100) == at_once


def test_certainty_has_no_noise_and_tables_are_taken():
    assert calibration_noise_floor([1.0, 1.0, 0.0]) == (0, 0)
    p, _ = random_case(30)
    table = ExampleTable.of_probabilities(p)
    assert calibration_noise_floor(table) == calibration_noise_floor(p.max(1).tolist())
    assert calibration_noise_floor(table) != calibration_noise_floor(table, seed=1)


@pytest.mark.parametrize(
    ("confidences", "options", "message"),
    [
        ([], {}, "N > 0"),
        ([[0.5, 0.5]], {}, r"confidences \(N,\)"),
        ([0.5, np.nan], {}, "not NaN"),
        ([0.5, 1.5], {}, "between 0 and 1"),
        ([-0.5], {}, "between 0 and 1"),
        ([0.5], {"n_bins": 0}, "n_bins must be a whole number"),
        ([0.5], {"n_simulations": 0}, "n_simulations must be at least 1"),
    ],
)
def test_bad_input_is_refused(confidences, options, message):
    with pytest.raises(ValueError, match=message):
        calibration_noise_floor(confidences, **options)
