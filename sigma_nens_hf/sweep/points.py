"""The points of a sweep: which models are trained."""

from collections.abc import Sequence
from typing import NamedTuple

from ..regularizer import expected_sharing, temperature_for_sharing


class Setting(NamedTuple):
    """What is varied in a sweep, but for seeds.

    Attributes:
        num_members: Number of members M; 1 for a single model.
        tau: Softmax temperature of the regulariser, None for a single model.
        diversity_weight: Its weight lambda, None for a single model.
    """

    num_members: int
    tau: float | None = None
    diversity_weight: float | None = None

    @property
    def name(self) -> str:
        """What the folders of its models are called, without the seed."""
        if self == SINGLE:
            return "single"
        return f"members{self.num_members}-tau{self.tau:g}-lambda{self.diversity_weight:g}"


SINGLE = Setting(1)


class SweepPoint(NamedTuple):
    """One model of a sweep.

    Attributes:
        setting: What it is.
        seed: Seed of the sweep.
        index: Which it is of the single models of that seed, of which a deep ensemble is made.
    """

    setting: Setting
    seed: int
    index: int = 0

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.setting.name}-seed{self.seed}" + (f"-{self.index}" if self.setting == SINGLE else "")

    @property
    def training_seed(self) -> int:
        """Seed of its initialisation and order of data; no two single models of a sweep share it."""
        return 1_000 * self.seed + self.index


def settings_of(
    members: Sequence[int],
    taus: Sequence[float],
    diversity_weights: Sequence[float],
    members_per_feature: Sequence[int] = (),
) -> list[Setting]:
    """Return every combination for which there is an ensemble.

    Args:
        members: Numbers of members M, at least 2 each.
        taus: Temperatures.
        diversity_weights: Weights lambda.
        members_per_feature: Members k that are to own a feature, beside or instead of temperatures. For each M those
            up to M // 2 count, which are all that the regulariser can prefer, and if neither is given all of these.

    Raises:
        ValueError: There are no members or weights, a number is out of range, or a number of members has no
            temperature.
    """
    settings = []
    if not members or not diversity_weights:
        raise ValueError("A sweep needs at least one number of members and one weight of the regulariser.")
    for num_members in members:
        if num_members < 2:
            raise ValueError(f"A sweep is over ensembles of at least 2 members, got {num_members}.")
        most = max(1, num_members // 2)
        wanted = members_per_feature if taus or members_per_feature else range(1, most + 1)
        shared = [temperature_for_sharing(k, num_members) for k in wanted if k <= most]
        of_members = dict.fromkeys([*taus, *(float(f"{tau:.4g}") for tau in shared)])
        if not of_members:
            raise ValueError(
                f"There is no temperature for {num_members} members: give one, or members per feature up to {most}."
            )
        for tau in of_members:
            expected_sharing(tau, num_members)  # refuses what is no temperature
        settings += [Setting(num_members, tau, weight) for weight in diversity_weights for tau in sorted(of_members)]
    return list(dict.fromkeys(settings))


def sweep_points(settings: Sequence[Setting], seeds: Sequence[int], has_references: bool = True) -> list[SweepPoint]:
    """Return the models to train: for every seed the single models of the largest deep ensemble, then the ensembles.

    Args:
        settings: As from `settings_of`.
        seeds: Seeds.
        has_references: Whether single models are trained to compare with.

    Raises:
        ValueError: There is no seed.
    """
    if not seeds:
        raise ValueError("A sweep needs at least one seed.")
    num_singles = max(setting.num_members for setting in settings) if has_references else 0
    points = []
    for seed in dict.fromkeys(seeds):
        points += [SweepPoint(SINGLE, seed, index) for index in range(num_singles)]
        points += [SweepPoint(setting, seed) for setting in settings]
    return points
