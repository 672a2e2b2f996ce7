import itertools
import math

import numpy as np
import pytest
import torch
from metric_cases import random_case

from sigma_nens_hf.metrics import ExampleTable


def entropy(probabilities):
    return -sum(float(p) * math.log(p) for p in probabilities if p > 0)


@pytest.fixture
def members():
    """Logits (N, M, C) and labels."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(9, 3, 4)) * 2, rng.integers(0, 4, 9)


@pytest.mark.parametrize("seed", range(20))
def test_columns_of_probabilities(seed):
    p, y = random_case(seed)
    table = ExampleTable.of_probabilities(p, y)
    assert len(table) == len(y)
    for i, (row, label) in enumerate(zip(p, y, strict=True)):
        assert table.prediction[i] == np.argmax(row)
        assert table.probability[i] == max(row)
        assert table.predictive_entropy[i] == pytest.approx(entropy(row))
        assert table.label_probability[i] == row[label]
        squares = [(q - float(c == label)) ** 2 for c, q in enumerate(row)]
        assert table.squared_error[i] == pytest.approx(sum(squares))
        assert table.correct[i] == (np.argmax(row) == label)
    np.testing.assert_array_equal(table.expected_entropy, table.predictive_entropy)
    assert not table.modulation_uncertainty.any()
    assert not table.disagreement.any()
    assert table.member_votes is None


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_columns_of_members(members, temperature):
    logits, labels = members
    table = ExampleTable.of_members(torch.as_tensor(logits), labels, temperature=temperature)
    of_members = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    pooled = of_members.mean(1)
    softened = pooled ** (1 / temperature)
    softened /= softened.sum(1, keepdims=True)
    single = ExampleTable.of_probabilities(softened, labels)
    for name in ("prediction", "probability", "label", "label_probability", "squared_error"):
        np.testing.assert_allclose(getattr(table, name), getattr(single, name))
    for i in range(len(labels)):
        parts = table.predictive_entropy[i], table.expected_entropy[i], table.modulation_uncertainty[i]
        expected = np.mean([entropy(row) for row in of_members[i]])
        assert parts == pytest.approx((entropy(pooled[i]), expected, entropy(pooled[i]) - expected), abs=1e-5)
        votes = logits[i].argmax(1)
        differing = [a != b for a, b in itertools.combinations(votes, 2)]
        assert table.disagreement[i] == pytest.approx(np.mean(differing))
        np.testing.assert_array_equal(table.member_votes[i], votes)
    assert ExampleTable.of_members(logits, keep_votes=False).member_votes is None


def test_parts_make_the_whole(members):
    table = ExampleTable.of_members(*members)
    parts = [ExampleTable.of_members(*(each[rows] for each in members)) for rows in (slice(4), slice(4, None))]
    for other in (ExampleTable.concatenate(parts), table.select(np.arange(9))):
        assert other.columns().keys() == table.columns().keys()
        for name, column in table.columns().items():
            np.testing.assert_allclose(other.columns()[name], column)
    np.testing.assert_array_equal(table.select([8, 0, 0]).label, members[1][[8, 0, 0]])


def test_data_frame(members):
    table = ExampleTable.of_members(*members)
    frame = table.to_pandas()
    assert frame.shape == (9, 12)
    np.testing.assert_array_equal(frame[["vote_0", "vote_1", "vote_2"]], table.member_votes)
    named = table.to_pandas(dict(enumerate("abcd")))
    assert list(named["label"]) == ["abcd"[label] for label in table.label]
    assert list(named["vote_1"]) == ["abcd"[vote] for vote in table.member_votes[:, 1]]
    np.testing.assert_array_equal(named["probability"], table.probability)
    unlabelled = ExampleTable.of_probabilities([[0.3, 0.7]]).to_pandas({0: "no", 1: "yes"})
    assert list(unlabelled["prediction"]) == ["yes"]
    assert "label" not in unlabelled


def test_bad_input_is_refused(members):
    logits, labels = members
    single = ExampleTable.of_probabilities([[0.5, 0.5]])
    for make, message in [
        (lambda: ExampleTable.of_members(logits[0]), r"\(N, M, C\)"),
        (lambda: ExampleTable.of_members(logits[:0]), "N > 0"),
        (lambda: ExampleTable.of_members(logits * np.inf), "NaN or infinity"),
        (lambda: ExampleTable.of_members(logits, labels - 4), "Labels must be from 0 to 3"),
        (lambda: ExampleTable.of_members(logits, labels, temperature=0), "temperature must be finite and positive"),
        (lambda: ExampleTable.of_members(logits, labels, temperature=math.nan), "temperature must be finite"),
        (lambda: ExampleTable.concatenate([]), "no tables"),
        (lambda: ExampleTable.concatenate([ExampleTable.of_members(logits), single]), "same columns"),
        (lambda: single.correct, "needs labels"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
