"""The arguments of a call of the ensemble: which hold examples, and at which place their rows are repeated."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .architectures import task_of_class
from .late_branching import Branch

# Arguments whose first dimension is never the batch, whatever their size.
_NOT_BATCHED = frozenset({"head_mask", "cache_position", "logits_to_keep"})
# With late branching these alone are repeated at the inputs: blocks do not see them.
_BESIDE_BLOCKS = frozenset({"labels", "num_items_in_batch"})
# Arguments of the ensemble that its base model does not have.
PREFIX_FEATURES, TAKE_PREFIX = "prefix_features", "take_prefix"


def branch_of(base_model: nn.Module, block: int | None, kwargs: dict[str, Any]) -> tuple[Branch | None, dict[str, Any]]:
    """Return where the rows of a call are repeated, and its arguments without those about the prefix.

    Args:
        base_model: The base model.
        block: Number of the block at which they are repeated otherwise; None: at the inputs.
        kwargs: The arguments by name.

    Raises:
        ValueError: A prefix is given or asked for where there is none.
    """
    kwargs = dict(kwargs)
    features, taken = kwargs.pop(PREFIX_FEATURES, None), kwargs.pop(TAKE_PREFIX, None)
    if (features is not None or taken is not None) and not has_prefix(base_model, block, kwargs):
        raise ValueError(
            "The ensemble has no prefix that could be computed apart: give it a branch_layer (decoders, ALBERT, "
            "ModernBERT with a mean as its pooling and models for multiple choice can have none), and ask for no "
            "hidden states or attentions."
        )
    if block is None or _asks_for_blocks(base_model, kwargs):
        return None, kwargs
    if features is not None and base_model.main_input_name == "pixel_values":
        # Only the size of the images counts, which goes with some models from block to block.
        kwargs["pixel_values"] = kwargs["pixel_values"][:1]
    return Branch(block, features, taken), kwargs


def has_prefix(base_model: nn.Module, block: int | None, kwargs: dict[str, Any]) -> bool:
    """Whether what runs before the branch can be computed apart from a call.

    Args:
        base_model: The base model.
        block: Number of the block at which rows are repeated; None: at the inputs.
        kwargs: The arguments of the call by name.
    """
    has_choices = task_of_class(type(base_model).__name__) == "multiple-choice"  # an example is more than one row
    return block is not None and not has_choices and not _asks_for_blocks(base_model, kwargs)


def _asks_for_blocks(base_model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether the caller wants something of every block, which is of all members then, from the first block on."""
    wanted = ((name, kwargs.get(name)) for name in ("output_hidden_states", "output_attentions"))
    return any(getattr(base_model.config, name, False) if value is None else value for name, value in wanted)


def batch_size_of(base_model: nn.Module, kwargs: dict[str, Any]) -> int:
    """Return the number of examples B in a call.

    Args:
        base_model: The base model.
        kwargs: The arguments by name.

    Raises:
        ValueError: No tensor is among them.
    """
    for name in (base_model.main_input_name, "inputs_embeds", *kwargs):
        value = kwargs.get(name)
        if isinstance(value, torch.Tensor) and value.dim():
            return value.shape[0]
    raise ValueError(f"No tensor among the arguments {sorted(kwargs)} tells the size of the batch.")


def repeat_arguments(
    kwargs: dict[str, Any], batch_size: int, num_members: int, branch: Branch | None
) -> dict[str, Any]:
    """Repeat the arguments that hold examples, once for every member.

    Args:
        kwargs: The arguments by name.
        batch_size: Number of examples B.
        num_members: Number of members that take part.
        branch: The block at which rows are repeated, so that here only what no block sees is; None: everything is.

    Returns:
        The arguments, (M * B, ...) for (B, ...), member-major.
    """
    return {
        name: _repeat(name, value, batch_size, num_members) if branch is None or name in _BESIDE_BLOCKS else value
        for name, value in kwargs.items()
    }


def _repeat(name: str, value: Any, batch_size: int, num_members: int) -> Any:
    if name == "num_items_in_batch" and value is not None:
        return value * num_members
    if isinstance(value, Mapping):  # masks by the kind of layer
        return {key: _repeat(key, item, batch_size, num_members) for key, item in value.items()}
    if not isinstance(value, torch.Tensor) or name in _NOT_BATCHED or (name == "position_ids" and value.dim() == 1):
        return value
    if not value.dim() or value.shape[0] != batch_size:
        return value
    return value.repeat(num_members, *[1] * (value.dim() - 1))
