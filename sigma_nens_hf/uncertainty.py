"""Predictive uncertainty of an ensemble and its two parts."""

from typing import NamedTuple

import torch


class UncertaintyDecomposition(NamedTuple):
    """Uncertainty per example, each (B, ...) in nats.

    Attributes:
        predictive_entropy: Entropy of the mean of the members' probabilities; the sum of the other two.
        expected_entropy: Mean of the members' entropies: what the members agree is uncertain.
        modulation_uncertainty: Mutual information of prediction and member: what they disagree about.
    """

    predictive_entropy: torch.Tensor
    expected_entropy: torch.Tensor
    modulation_uncertainty: torch.Tensor


def decompose_uncertainty(member_logits: torch.Tensor) -> UncertaintyDecomposition:
    r"""Split the predictive entropy of every example.

    $$H\!\left[\tfrac1M \sum_m p_m\right] = \tfrac1M \sum_m H[p_m] + I[y; m]$$

    The mutual information is called modulation uncertainty (the name is the paper's, arXiv 2607.23860): members over
    a shared backbone can only disagree about what their gates modulate, which makes it weaker than a deep ensemble's
    for inputs from another distribution.

    Args:
        member_logits: (B, M, ..., C), single-label logits.

    Returns:
        Three tensors (B, ...), fp32, or in double precision where the logits are.

    Raises:
        ValueError: `member_logits` has fewer than three dimensions.
    """
    if member_logits.dim() < 3:
        raise ValueError(f"member_logits must be (B, M, ..., C), got shape {tuple(member_logits.shape)}.")
    precise = member_logits if member_logits.dtype == torch.float64 else member_logits.float()
    probabilities = precise.softmax(-1)
    predictive = torch.special.entr(probabilities.mean(1)).sum(-1)
    expected = torch.special.entr(probabilities).sum(-1).mean(1)
    # Never negative by Jensen's inequality; rounding may say otherwise where members agree.
    return UncertaintyDecomposition(predictive, expected, (predictive - expected).clamp_min(0))


def member_disagreement(votes: torch.Tensor) -> torch.Tensor:
    """Return, per example, the fraction of pairs of members that predict different classes.

    Args:
        votes: (B, M, ...), the class that each member predicts.

    Returns:
        (B, ...), between 0 and 1; 0 for M = 1.
    """
    num_members = votes.shape[1]
    if num_members == 1:
        return torch.zeros_like(votes[:, 0], dtype=torch.float32)
    differing = (votes.unsqueeze(1) != votes.unsqueeze(2)).float().sum((1, 2))
    return differing / (num_members * (num_members - 1))
