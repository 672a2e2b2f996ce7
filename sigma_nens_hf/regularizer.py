"""The diversity regulariser, and the sharing of features that it prefers and that a model shows."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from .layer import SigmaNormLayer

DIVERSITY_REDUCTIONS = ("mean", "sum")
# Fraction of a feature's largest gate above which a gate counts as owning the feature.
_OWNERSHIP = 0.5
# Where every temperature gives the same sharing (M of 2 or 3), the one that training starts from.
_START_TEMPERATURE = 0.1


def member_gates(model: nn.Module, layers: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Return the gates sigmoid(g) of the active adapter by norm, (M, D) each, fp32, with gradients.

    Copies that members share are none of them.

    Args:
        model: The ensemble.
        layers: Names or name suffixes of the norms wanted; None: all that carry members.

    Raises:
        ValueError: No norm carries members, or a name matches none.
    """
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, SigmaNormLayer)
        and module.member_adapter is not None
        and module.carries_members(module.member_adapter)
    }
    if not norms:
        raise ValueError("No norm of the model carries members of an active sigma-norm adapter.")
    if layers is not None:
        unmatched = [layer for layer in layers if not any(f".{name}".endswith(f".{layer}") for name in norms)]
        if unmatched or not layers:
            raise ValueError(f"These match no norm that carries members: {unmatched}. There are: {list(norms)}.")
        norms = {
            name: norm for name, norm in norms.items() if any(f".{name}".endswith(f".{layer}") for layer in layers)
        }
    return {name: norm.gates(norm.member_adapter) for name, norm in norms.items()}


def diversity_regularizer(
    model: nn.Module, tau: float, *, reduction: str = "mean", layers: Sequence[str] | None = None
) -> torch.Tensor:
    r"""Return the diversity regulariser of a model; smaller is more diverse.

    $$R = \sum_l \sum_i \sum_m \log \mathrm{softmax}_m\!\left(\sigma(g_{m,l,i}) / \tau\right)$$

    Always fp32, whatever autocast says: in 16 bits the sum overflows. Source: arXiv 2607.23860; dividing by the number
    of features is this package's choice and makes one weight mean the same on different backbones.

    Args:
        model: The ensemble.
        tau: Softmax temperature, positive.
        reduction: "mean" divides R by the number of (l, i), "sum" is R itself.
        layers: Names or name suffixes of the norms to sum over; None: all.

    Returns:
        A scalar with gradients to the scalers. It is 0 for M = 1.

    Raises:
        ValueError: tau is not finite and positive, the reduction is unknown, `layers` matches no norm, or scalers are
            not finite (not looked at on an accelerator, which would have to be waited for).
    """
    _check_temperature(tau)
    if reduction not in DIVERSITY_REDUCTIONS:
        raise ValueError(f"reduction must be one of {DIVERSITY_REDUCTIONS}, got {reduction!r}.")
    by_norm = member_gates(model, layers)
    gates = torch.cat(list(by_norm.values()), dim=1)
    if gates.device.type == "cpu":
        check_gates(by_norm)
    with torch.autocast(gates.device.type, enabled=False):
        total = (gates.float() / tau).log_softmax(0).sum()
    return total / gates.shape[1] if reduction == "mean" else total


def check_gates(gates: dict[str, torch.Tensor]) -> None:
    """Refuse gates of scalers that are not finite.

    Args:
        gates: Gates by norm, as from `member_gates`.

    Raises:
        ValueError: Some are not; the message names their norms.
    """
    damaged = [name for name, values in gates.items() if not torch.isfinite(values).all()]
    if damaged:
        raise ValueError(
            f"The scalers of {damaged[:3]} ({len(damaged)} norms) are not finite: the training has diverged or the "
            "adapter is damaged. Lower scaler_learning_rate or learning_rate, or train in fp32."
        )


def owners_of_features(gates: torch.Tensor) -> torch.Tensor:
    """Return how many members own each feature: those whose gate is above half of the feature's largest gate.

    Args:
        gates: (M, D).

    Returns:
        Whole numbers (D,).
    """
    return (gates > _OWNERSHIP * gates.amax(0)).sum(0)


@torch.no_grad()
def feature_owners(model: nn.Module, layers: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """Return how many members own each feature, as of `owners_of_features`.

    Args:
        model: The ensemble.
        layers: Names or name suffixes of the norms to look at; None: all.

    Returns:
        Whole numbers by norm, (D,) each.

    Raises:
        ValueError: `layers` matches no norm.
    """
    return {name: owners_of_features(gates) for name, gates in member_gates(model, layers).items()}


def realized_sharing(
    model: nn.Module, *, per_layer: bool = False, layers: Sequence[str] | None = None
) -> float | dict[str, float]:
    """Return how many members own a feature on average; see `owners_of_features`.

    Args:
        model: The ensemble.
        per_layer: Return the mean over features of every norm instead of one over all.
        layers: Names or name suffixes of the norms to look at; None: all.

    Returns:
        The mean over all (l, i), between 1 and M, or such a mean by norm.

    Raises:
        ValueError: `layers` matches no norm.
    """
    owners = {name: counts.float() for name, counts in feature_owners(model, layers).items()}
    if per_layer:
        return {name: counts.mean().item() for name, counts in owners.items()}
    return torch.cat(list(owners.values())).mean().item()


def expected_sharing(tau: float, num_members: int) -> int:
    r"""Return k*, the number of members that own a feature in the global minimum of the regulariser.

    R is concave in the gates, so its minima lie on corners where k of the M gates are 1 and the others 0; per feature
    the corner's value is

    $$f(k) = k/\tau - M \log\!\left(k\,(e^{1/\tau} - 1) + M\right)$$

    and k* minimises it over 1..max(1, M // 2). Corners with other k are local minima: what training realises depends
    on its start and lies above k*. Sharing by all is never preferred by the regulariser, at no tau.

    Args:
        tau: Softmax temperature, positive.
        num_members: Number of members M, at least 2.

    Raises:
        ValueError: tau is not finite and positive, or M is below 2.
    """
    _check_temperature(tau)
    _check_num_members(num_members)
    return min(range(1, max(1, num_members // 2) + 1), key=lambda k: _corner_value(k, tau, num_members))


def temperature_for_sharing(members_per_feature: int, num_members: int) -> float:
    """Return a temperature well inside the interval in which `expected_sharing` is the given k.

    It is the geometric mean of the interval's ends; half the upper end for k = 1, whose interval begins at 0; twice
    the lower end for the last k, whose interval never ends; and .1, where training starts, where k = 1 is the only one
    (M of 2 or 3).

    Args:
        members_per_feature: Wanted number of owners k, 1 to max(1, M // 2).
        num_members: Number of members M, at least 2.

    Raises:
        ValueError: M is below 2, or no temperature makes the regulariser prefer k.
    """
    _check_num_members(num_members)
    k, most = members_per_feature, max(1, num_members // 2)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most:
        raise ValueError(
            f"members_per_feature must be a whole number from 1 to {most} for {num_members} members, got {k!r}: the "
            "regulariser prefers no other at any temperature."
        )
    lower = _sharing_step(k - 1, num_members) if k > 1 else None
    upper = _sharing_step(k, num_members) if k < most else None
    if lower and upper:
        return math.sqrt(lower * upper)
    if upper:
        return upper / 2
    return 2 * lower if lower else _START_TEMPERATURE


def _corner_value(k: int, tau: float, num_members: int) -> float:
    """f(k) of `expected_sharing`, in a form that does not overflow for small tau."""
    u = 1 / tau
    log_expm1 = u + math.log1p(-math.exp(-u))
    larger, smaller = sorted((math.log(k) + log_expm1, math.log(num_members)), reverse=True)
    return k * u - num_members * (larger + math.log1p(math.exp(smaller - larger)))


def _sharing_step(k: int, num_members: int) -> float:
    """The temperature at which k* steps from k to k + 1: the corners' values are equal there. By bisection."""
    low, high = 1e-3, 1e3 * num_members
    for _ in range(200):
        middle = math.sqrt(low * high)
        if _corner_value(k + 1, middle, num_members) < _corner_value(k, middle, num_members):
            high = middle
        else:
            low = middle
    return high


def _check_temperature(tau: float) -> None:
    if not (math.isfinite(tau) and tau > 0):
        raise ValueError(f"The diversity temperature must be finite and positive, got {tau}.")


def _check_num_members(num_members: int) -> None:
    if num_members < 2:
        raise ValueError(f"Sharing is defined for at least 2 members, got {num_members}.")
