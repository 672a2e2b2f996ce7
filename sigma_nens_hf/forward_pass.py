"""The forward pass that is under way: which members take part in it, and in which rows.

The rows of a batch of B examples are repeated M times, member-major: row m * B + b is example b as member m sees it.
Layers that hold members ask `current_members`, which raises outside a forward pass of their whole model: a batch must
never be split over members by accident.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ForwardPass:
    """One call of a base model, between its two hooks.

    Attributes:
        model: The number that tells the base model from others; see `ExpandMembers.model_number`.
        members: The members that take part, in the order of their rows; None where adapters are disabled.
        num_rows: Rows of the expanded batch, len(members) * B.
        return_dict: Whether the caller wants an output object; None leaves it to the model's config.
        outer: The call around this one, if any.
        branch: Where rows are repeated (a `late_branching.Branch`), None where that is at the inputs.
    """

    model: int
    members: tuple[int, ...] | None
    num_rows: int
    return_dict: bool | None
    outer: "ForwardPass | None"
    branch: Any = None


class _ThreadState(threading.local):
    """What is under way in one thread.

    Thread-local rather than a context variable, since torch.compile traces and guards it without a graph break; set in
    `__init__`, since it guards attributes of instances only.
    """

    def __init__(self):
        self.forward_pass: ForwardPass | None = None
        self.subsets: tuple[tuple[int, tuple[int, ...]], ...] = ()


state = _ThreadState()


def current_members() -> tuple[int, ...]:
    """Return the members of the forward pass that is under way in this thread.

    Raises:
        RuntimeError: No base model with a sigma-norm adapter is being called.
    """
    forward_pass = state.forward_pass
    if forward_pass is None or forward_pass.members is None:
        raise RuntimeError(
            "A layer that holds ensemble members was called outside a forward pass of its whole model, so its rows "
            "cannot be told apart by member. Call the model itself instead of one of its inner modules, or call the "
            "inner module with the adapter disabled (`with model.disable_adapter():`)."
        )
    return forward_pass.members


def split_rows(rows: torch.Tensor, num_members: int) -> torch.Tensor:
    """View (M * B, ...) rows as (M, B, ...).

    Args:
        rows: Expanded rows, member-major.
        num_members: The number of members in the rows.

    Raises:
        RuntimeError: The number of rows is no multiple of the number of members.
    """
    if rows.shape[0] % num_members:
        raise RuntimeError(
            f"{rows.shape[0]} rows cannot belong to {num_members} members. The model reshapes its batch in a way "
            "that members in the batch do not survive; exclude the layer with `exclude_modules`."
        )
    return rows.unflatten(0, (num_members, -1))


def replay_blocks_with_members(base_model: nn.Module) -> None:
    """Let blocks under activation checkpointing remember the forward pass that they belong to.

    Backward runs a block again after the forward pass has ended, maybe on another thread, maybe under another
    `member_subset`. The checkpointing function that transformers sets on a block is the one place that sees both runs.
    """
    for module in base_model.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = getattr(module, "_gradient_checkpointing_func", None)
            if function is not None and not isinstance(function, CheckpointWithMembers):
                module._gradient_checkpointing_func = CheckpointWithMembers(function, module)


class CheckpointWithMembers:
    """A checkpointing function whose second run sees the members of the first.

    Args:
        checkpoint: The checkpointing function of transformers.
        block: The module that it is for.
    """

    def __init__(self, checkpoint: Callable, block: nn.Module):
        self.checkpoint = checkpoint
        self.block = block

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Checkpoint a function of the block."""
        is_reentrant = getattr(self.checkpoint, "keywords", {}).get("use_reentrant", True)
        if is_reentrant and any(parameter.requires_grad for parameter in self.block.parameters()):
            args = _with_gradient(args)
        return self.checkpoint(InForwardPass(function, state.forward_pass), *args, **kwargs)


def _with_gradient(args: tuple) -> tuple:
    """Let the reentrant kind see that a block is trained; it looks at the block's inputs alone, which may be frozen."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
    if not tensors or any(tensor.requires_grad for tensor in tensors):
        return args
    return tuple(arg.detach().requires_grad_() if arg is tensors[0] else arg for arg in args)


class InForwardPass:
    """A function that is always run as part of one given forward pass."""

    def __init__(self, function: Callable, forward_pass: ForwardPass | None):
        self.function = function
        self.forward_pass = forward_pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        before = state.forward_pass
        state.forward_pass = self.forward_pass
        try:
            return self.function(*args, **kwargs)
        finally:
            state.forward_pass = before
