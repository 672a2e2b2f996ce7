"""Random sets of probabilities with labels for the tests of the metrics."""

import numpy as np

from sigma_nens_hf.metrics import ExampleTable


def random_case(seed, least_classes=2):
    """Return probabilities (N, C) without ties and labels (N,); N, C and the sharpness vary with the seed."""
    rng = np.random.default_rng(seed)
    num_examples, num_classes = 3 + seed % 40, least_classes + seed % 5
    logits = rng.normal(size=(num_examples, num_classes)) * (1 + seed % 4)
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    return probabilities / probabilities.sum(1, keepdims=True), rng.integers(0, num_classes, num_examples)


def tied_case(seed):
    """The same with confidences on a grid, so that many are tied, and some 0 and 1."""
    rng = np.random.default_rng(seed)
    num_examples = 1 + seed % 23
    second = rng.integers(0, 6, num_examples) / 5
    return np.stack([1 - second, second], 1), rng.integers(0, 2, num_examples)


def binary_table(num_examples, error_rate=0.2, seed=0, hard=None):
    """Return a table of two classes, all of label 0, whose predictions are wrong at a rate, or where `hard` says so."""
    rng = np.random.default_rng(seed)
    wrong = rng.random(num_examples) < error_rate if hard is None else hard
    confidence = rng.uniform(0.55, 0.99, num_examples)
    right = np.where(wrong, 1 - confidence, confidence)
    return ExampleTable.of_probabilities(np.stack([right, 1 - right], 1), np.zeros(num_examples, dtype=int))
