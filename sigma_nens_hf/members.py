"""Which members take part in a forward pass, and the hooks that put them into the batch and take them out again.

The rows of a batch of B examples are repeated M times, member-major: row m * B + b is example b as member m sees it.
Both ways into a PEFT model, `PeftModel.forward` and that of its task classes, end in a call of the base transformers
model, so two hooks on that model serve them all. Layers that hold members ask `current_members`, which raises outside
such a call: a batch must never be split over members by accident.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from .labels import check_labels
from .outputs import reduce_members

# Arguments whose first dimension is never the batch, whatever their size.
_NOT_BATCHED = frozenset({"head_mask", "cache_position", "logits_to_keep"})


@dataclass(frozen=True)
class ForwardPass:
    """One call of a base model, between its two hooks.

    Attributes:
        model: `id` of the base model.
        members: The members that take part, in the order of their rows; None where adapters are disabled.
        num_rows: Rows of the expanded batch, len(members) * B.
        return_dict: Whether the caller wants an output object; None leaves it to the model's config.
        outer: The call around this one, if any.
    """

    model: int
    members: tuple[int, ...] | None
    num_rows: int
    return_dict: bool | None
    outer: "ForwardPass | None"


# Thread-local rather than context variables: torch.compile traces and guards them without a graph break.
class _ThreadState(threading.local):
    forward_pass: ForwardPass | None = None
    subsets: tuple[tuple[int, tuple[int, ...]], ...] = ()


_state = _ThreadState()


def current_members() -> tuple[int, ...]:
    """Return the members of the forward pass that is under way in this thread.

    Raises:
        RuntimeError: No base model with a sigma-norm adapter is being called.
    """
    forward_pass = _state.forward_pass
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


@contextmanager
def member_subset(model: nn.Module, members: int | Sequence[int]) -> Iterator[None]:
    """Let only some members take part in the forward passes of a model, in this thread.

    Args:
        model: The ensemble.
        members: One index or several, each from 0 to M - 1; `member_logits` follows their order, and `logits` is
            formed from them by the same rule as from all.

    Raises:
        ValueError: No index, a repeated one, or one out of range; or the model is no ensemble.
    """
    base_model = base_model_of(model)
    indices = (members,) if isinstance(members, int) else tuple(members)
    num_members = active_config(base_model).num_members
    if not indices or len(set(indices)) != len(indices) or not all(0 <= m < num_members for m in indices):
        raise ValueError(
            f"members must be different indices from 0 to {num_members - 1}, at least one, got {members!r}."
        )
    before = _state.subsets
    _state.subsets = ((id(base_model), indices), *before)
    try:
        yield
    finally:
        _state.subsets = before


def base_model_of(model: nn.Module) -> nn.Module:
    """Return the transformers model that carries the hooks, inside whatever wraps it.

    Args:
        model: A `PeftModel`, its tuner, the transformers model, or one of them compiled or wrapped for
            distributed training.

    Raises:
        ValueError: There is no sigma-norm adapter in the model.
    """
    for module in model.modules():
        if any(isinstance(hook, ExpandMembers) for hook in module._forward_pre_hooks.values()):
            return module
    raise ValueError(f"{type(model).__name__} carries no sigma-norm adapter.")


def active_config(base_model: nn.Module) -> Any:
    """Return the `SigmaNormConfig` of the one active adapter.

    Raises:
        ValueError: Not exactly one adapter is active.
    """
    expand = next(hook for hook in base_model._forward_pre_hooks.values() if isinstance(hook, ExpandMembers))
    return base_model.peft_config[expand.active_adapter(base_model)]


def install_hooks(base_model: nn.Module, layer_name: str) -> None:
    """Put the expanding and the reducing hook on a base model, once.

    Args:
        base_model: The transformers model.
        layer_name: Name of a layer in it that holds members; it tells which adapter is active.
    """
    if not any(isinstance(hook, ExpandMembers) for hook in base_model._forward_pre_hooks.values()):
        base_model.register_forward_pre_hook(ExpandMembers(layer_name), with_kwargs=True)
        # Called after a failed forward as well, so that no stale pass is left behind.
        base_model.register_forward_hook(ReduceMembers(), with_kwargs=True, always_call=True)


def remove_hooks(base_model: nn.Module) -> None:
    """Take the hooks off a base model again, and what they left on its blocks."""
    for hooks in (base_model._forward_pre_hooks, base_model._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, ExpandMembers | ReduceMembers):
                del hooks[key]
                base_model._forward_pre_hooks_with_kwargs.pop(key, None)
                base_model._forward_hooks_with_kwargs.pop(key, None)
                base_model._forward_hooks_always_called.pop(key, None)
    for module in base_model.modules():
        function = module.__dict__.get("_gradient_checkpointing_func")
        if isinstance(function, _CheckpointWithMembers):
            module._gradient_checkpointing_func = function.checkpoint


class ExpandMembers:
    """Forward-pre-hook of the base model: repeats the batch, once for every member that takes part."""

    def __init__(self, layer_name: str):
        self.layer_name = layer_name

    def active_adapter(self, base_model: nn.Module) -> str:
        """Return the name of the active adapter.

        Raises:
            ValueError: Not exactly one adapter is active.
        """
        names = base_model.get_submodule(self.layer_name).active_adapters
        if len(names) != 1:
            raise ValueError(f"Exactly one sigma-norm adapter can be active at a time, got {list(names)}.")
        return names[0]

    def __call__(self, base_model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        kwargs = {**dict(zip(_parameter_names(type(base_model).forward), args, strict=False)), **kwargs}
        return_dict = kwargs.get("return_dict")
        if base_model.get_submodule(self.layer_name).disable_adapters:
            _state.forward_pass = ForwardPass(id(base_model), None, 0, return_dict, _state.forward_pass)
            return (), kwargs
        config = base_model.peft_config[self.active_adapter(base_model)]
        members = dict(reversed(_state.subsets)).get(id(base_model)) or tuple(range(config.num_members))
        if kwargs.get("labels") is not None:
            check_labels(kwargs["labels"], config.num_labels, base_model.config.problem_type)
        batch_size = _batch_size(base_model, kwargs)
        forward_pass = ForwardPass(
            id(base_model), members, len(members) * batch_size, return_dict, _state.forward_pass
        )
        expanded = {name: _repeat(name, value, batch_size, len(members)) for name, value in kwargs.items()}
        if base_model.training and torch.is_grad_enabled():
            _replay_blocks_with_members(base_model)
        _state.forward_pass = forward_pass
        return (), {**expanded, "return_dict": True}


class ReduceMembers:
    """Forward-hook of the base model: forms the ensemble's output from the members' rows."""

    def __call__(self, base_model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        forward_pass = _state.forward_pass
        if forward_pass is None or forward_pass.model != id(base_model):
            return None  # the forward failed before its members were in place
        _state.forward_pass = forward_pass.outer
        if output is None or forward_pass.members is None:
            return None
        reduced = reduce_members(
            output, len(forward_pass.members), forward_pass.num_rows, problem_type_of(base_model.config)
        )
        wants_object = forward_pass.return_dict
        if wants_object is None:
            wants_object = base_model.config.return_dict
        return reduced if wants_object else reduced.to_tuple()


def problem_type_of(config: Any) -> str:
    """Return the problem type of a model's config, as transformers would settle it for integer labels."""
    if config.problem_type is not None:
        return config.problem_type
    return "regression" if config.num_labels == 1 else "single_label_classification"


@lru_cache
def _parameter_names(forward: Callable) -> tuple[str, ...]:
    """Names of the parameters that can be given by position, without `self`."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _batch_size(base_model: nn.Module, kwargs: dict[str, Any]) -> int:
    for name in (base_model.main_input_name, "inputs_embeds", *kwargs):
        value = kwargs.get(name)
        if isinstance(value, torch.Tensor) and value.dim():
            return value.shape[0]
    raise ValueError(f"No tensor among the arguments {sorted(kwargs)} tells the size of the batch.")


def _repeat(name: str, value: Any, batch_size: int, num_members: int) -> Any:
    if name == "num_items_in_batch" and value is not None:
        return value * num_members
    if not isinstance(value, torch.Tensor) or name in _NOT_BATCHED:
        return value
    if not value.dim() or value.shape[0] != batch_size:
        return value
    return value.repeat(num_members, *[1] * (value.dim() - 1))


def _replay_blocks_with_members(base_model: nn.Module) -> None:
    """Let blocks under activation checkpointing remember the forward pass that they belong to.

    Backward runs a block again after the forward pass has ended, maybe on another thread, maybe under another
    `member_subset`. The checkpointing function that transformers sets on a block is the one place that sees both runs.
    """
    for module in base_model.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = getattr(module, "_gradient_checkpointing_func", None)
            if function is not None and not isinstance(function, _CheckpointWithMembers):
                module._gradient_checkpointing_func = _CheckpointWithMembers(function)


class _CheckpointWithMembers:
    """A checkpointing function whose second run sees the members of the first."""

    def __init__(self, checkpoint: Callable):
        self.checkpoint = checkpoint

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        return self.checkpoint(_InForwardPass(function, _state.forward_pass), *args, **kwargs)


class _InForwardPass:
    """A function that is always run as part of one given forward pass."""

    def __init__(self, function: Callable, forward_pass: ForwardPass | None):
        self.function = function
        self.forward_pass = forward_pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = _state.forward_pass
        _state.forward_pass = self.forward_pass
        try:
            return self.function(*args, **kwargs)
        finally:
            _state.forward_pass = before
