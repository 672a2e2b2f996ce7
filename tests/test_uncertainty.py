import math

import pytest
import torch

from sigma_nens_hf import decompose_uncertainty
from sigma_nens_hf.uncertainty import member_disagreement


def entropy(distribution):
    return -sum(p * math.log(p) for p in distribution if p > 0)


def test_parts_equal_the_sums_written_out():
    member_logits = torch.randn(6, 4, 5) * 3
    predictive, expected, modulation = decompose_uncertainty(member_logits)
    for b in range(6):
        members = member_logits[b].double().softmax(-1).tolist()
        mean = [sum(member[c] for member in members) / 4 for c in range(5)]
        assert predictive[b].item() == pytest.approx(entropy(mean), rel=1e-5)
        assert expected[b].item() == pytest.approx(sum(map(entropy, members)) / 4, rel=1e-5)
        # mutual information by its other definition: mean divergence of members from their mean
        divergence = sum(p * math.log(p / q) for member in members for p, q in zip(member, mean, strict=True)) / 4
        assert modulation[b].item() == pytest.approx(divergence, rel=1e-3, abs=1e-6)


def test_closed_forms():
    certain_but_opposed = torch.tensor([[[100.0, -100.0], [-100.0, 100.0]]])
    parts = decompose_uncertainty(certain_but_opposed)
    assert parts.predictive_entropy.item() == pytest.approx(math.log(2))
    assert parts.expected_entropy.item() == 0
    assert parts.modulation_uncertainty.item() == pytest.approx(math.log(2))
    agreeing = decompose_uncertainty(torch.zeros(3, 4, 7))
    torch.testing.assert_close(agreeing.predictive_entropy, torch.full((3,), math.log(7)))
    assert not agreeing.modulation_uncertainty.any()


def test_further_dimensions_are_kept():
    parts = decompose_uncertainty(torch.randn(2, 4, 9, 5))
    assert all(part.shape == (2, 9) for part in parts)


def test_logits_without_members_are_refused():
    with pytest.raises(ValueError, match=r"\(B, M, ..., C\)"):
        decompose_uncertainty(torch.randn(5, 3))


def test_disagreement_of_pairs():
    votes = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 1, 1]])
    torch.testing.assert_close(member_disagreement(votes), torch.tensor([0.0, 3 / 6, 1.0, 4 / 6]))
    assert not member_disagreement(votes[:, :1]).any()
