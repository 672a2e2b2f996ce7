"""What an adapter is going to change in a model, settled before anything is changed."""

import warnings
from dataclasses import dataclass

from transformers import PreTrainedModel

from .architectures import task_of_class
from .blocks import branch_block
from .config import STAGED, SigmaNormConfig
from .heads import HeadPlan, has_output_per_label, plan_head
from .integrity import base_fingerprint, check_base
from .labels import LabelSet
from .layer import NormRole
from .norms import find_norms, find_shared_norms
from .padding import padding_token
from .shared_modules import resolve_shared_modules


@dataclass(frozen=True)
class AdapterPlan:
    """What an adapter is going to change.

    Attributes:
        norms: Names of the norms that carry members.
        shared_norms: Names of the norms of which members share one trained copy.
        branch_block: Number of the block at which the rows of members are told apart, None: at the inputs.
        head: What becomes of the head's projections.
    """

    norms: frozenset[str]
    shared_norms: frozenset[str]
    branch_block: int | None
    head: HeadPlan

    def role_of(self, norm: str, config: SigmaNormConfig) -> NormRole:
        """Return whose an adapter's parameters of a norm are.

        Args:
            norm: Full name of the norm, one that the adapter changes.
            config: The adapter's config.
        """
        if norm in self.norms:
            return NormRole.MEMBERS
        return NormRole.FROZEN if config.prefix == STAGED and config.prefix_is_tuned else NormRole.SHARED


def plan_adapter(model: PreTrainedModel, config: SigmaNormConfig, base_labels: LabelSet) -> AdapterPlan:
    """Check a config against a model, and fix in it what it leaves open.

    Args:
        model: The base model, with or without sigma-norm adapters on it.
        config: The adapter's config, which is completed.
        base_labels: The labels that the model came with.

    Raises:
        ValueError: The config does not fit the model; the message names the cause.
    """
    model_type, model_class = model.config.model_type, type(model).__name__
    if config.base_model_type not in (None, model_type):
        raise ValueError(
            f"The adapter was made for a base of type {config.base_model_type!r}, this one is {model_type!r} "
            f"({model_class})."
        )
    if config.base_model_class not in (None, model_class):
        raise ValueError(f"The adapter was made for a {config.base_model_class}, this base is a {model_class}.")
    head = plan_head(model, config)
    norms, shared_norms = find_norms(model, config), find_shared_norms(model, config)
    num_adapted_norms = len(norms) + len(shared_norms)
    if config.num_adapted_norms not in (None, num_adapted_norms):
        raise ValueError(
            f"The adapter was made for a base with {config.num_adapted_norms} adapted norms, in this one "
            f"({model_class}) there are {num_adapted_norms}. Load it over its own base, "
            f"{config.base_model_name_or_path}, and make a new SigmaNormConfig for every other one."
        )
    shared = resolve_shared_modules(model, config, head, norms + shared_norms)
    labels = LabelSet.of_adapter(config, default=base_labels).for_task(task_of_class(model_class))
    if head.architecture.pools_last_token:
        config.pad_token_id = padding_token(model, config.pad_token_id)
    config.resolve_shared_modules(shared)
    fingerprint = base_fingerprint(model, [*shared, *head.architecture.projections])
    check_base(fingerprint, config.base_fingerprint, config.base_model_name_or_path)
    config.base_fingerprint = config.base_fingerprint or fingerprint
    config.problem_type = labels.problem_type
    if has_output_per_label(model):
        config.num_labels = labels.num_labels
        config.id2label, config.label2id = labels.id2label, labels.label2id
    return AdapterPlan(frozenset(norms), frozenset(shared_norms), _branch_block(model, config, norms), head)


def _branch_block(model: PreTrainedModel, config: SigmaNormConfig, norms: list[str]) -> int | None:
    """Return the block at which rows are repeated, and say so where a wish for a late one cannot be granted."""
    block = branch_block(model, norms)
    if config.branch_layer and block is None:
        warnings.warn(
            f"The rows of a {type(model).__name__} cannot be repeated at a block. Its members start at block "
            f"{config.branch_layer} all the same, but the blocks before it are computed once for every member.",
            stacklevel=2,
        )
    return block
