import numpy as np
import pytest
import sklearn.metrics
import torch

from sigma_nens_hf.metrics import ood_metrics


def plain_fpr(id_scores, ood_scores):
    for threshold in sorted([*id_scores, *ood_scores], reverse=True):
        if np.mean(ood_scores >= threshold) >= 0.95:
            return np.mean(id_scores >= threshold)
    raise AssertionError("the lowest threshold accepts all")


@pytest.mark.parametrize("seed", range(200))
def test_agreement_with_plain_loops_and_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    id_scores, ood_scores = rng.normal(size=1 + seed % 30), rng.normal(seed % 3, size=1 + seed % 41)
    if seed % 2:
        id_scores, ood_scores = id_scores.round(), ood_scores.round()
    figures = ood_metrics(id_scores, ood_scores)
    above = [float(ood > other) + 0.5 * float(ood == other) for ood in ood_scores for other in id_scores]
    assert figures["auroc"] == pytest.approx(np.mean(above))
    assert figures["fpr_at_95_tpr"] == pytest.approx(plain_fpr(id_scores, ood_scores))
    positive = [0] * len(id_scores) + [1] * len(ood_scores)
    expected = sklearn.metrics.average_precision_score(positive, [*id_scores, *ood_scores])
    assert figures["aupr"] == pytest.approx(expected)


def test_closed_forms():
    assert ood_metrics([0.1, 0.2], [0.3, 0.4]) == {"auroc": 1, "aupr": 1, "fpr_at_95_tpr": 0}
    worst = ood_metrics([0.3, 0.4], [0.1, 0.2])
    # The lower of the two is found behind all four.
    assert worst == pytest.approx({"auroc": 0, "aupr": (1 / 3 + 2 / 4) / 2, "fpr_at_95_tpr": 1})
    # One score for all: chance.
    assert ood_metrics([1, 1, 1], torch.ones(1)) == {"auroc": 0.5, "aupr": 0.25, "fpr_at_95_tpr": 1}


def test_19_of_20_are_enough():
    ood_scores = np.arange(20) + 0.5
    # All but the lowest, .5, are above 1; the lowest would take the 1s as well.
    assert ood_metrics([0, 1, 1, 3], ood_scores)["fpr_at_95_tpr"] == 0.25


def test_thresholds_on_a_straight_piece_count():
    scores = [2] * 19 + [1]
    assert ood_metrics(scores, scores)["fpr_at_95_tpr"] == 0.95


@pytest.mark.parametrize(
    ("id_scores", "ood_scores", "message"),
    [
        ([], [1.0], "id_scores must be one score"),
        ([1.0], [], "ood_scores must be one score"),
        ([[1.0]], [1.0], "id_scores must be one score"),
        ([np.nan], [1.0], "id_scores hold NaN"),
        ([1.0], torch.tensor([torch.inf]), "ood_scores hold NaN or infinity"),
    ],
)
def test_bad_input_is_refused(id_scores, ood_scores, message):
    with pytest.raises(ValueError, match=message):
        ood_metrics(id_scores, ood_scores)
