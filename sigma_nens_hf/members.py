"""The hooks that put members into the batch and take them out again, and the choice of members that take part.

Both ways into a PEFT model, `PeftModel.forward` and that of its task classes, end in a call of the base transformers
model, so two hooks on that model serve them all.
"""

import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .call_arguments import TAKE_PREFIX, batch_size_of, branch_of, repeat_arguments
from .forward_pass import CheckpointWithMembers, ForwardPass, replay_blocks_with_members, state
from .hooks import take_off_hooks
from .labels import SINGLE_LABEL, check_labels, settle_problem_type
from .late_branching import RepeatRows, install_branch_hooks
from .outputs import reduce_members

_model_numbers = itertools.count()


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
    indices = tuple(members) if isinstance(members, Iterable) else (members,)
    num_members = active_config(base_model).num_members
    possible = not any(isinstance(m, bool | str) for m in indices) and set(indices) <= set(range(num_members))
    if not indices or not possible or len(set(indices)) != len(indices):
        raise ValueError(
            f"members must be different indices from 0 to {num_members - 1}, at least one, got {members!r}."
        )
    before = state.subsets
    state.subsets = ((_expanding_hook(base_model).model_number, tuple(map(int, indices))), *before)
    try:
        yield
    finally:
        state.subsets = before


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
    return base_model.peft_config[_expanding_hook(base_model).active_adapter(base_model)]


def chosen_members(base_model: nn.Module) -> tuple[int, ...]:
    """Return the members that take part in the forward passes of a model in this thread; see `member_subset`.

    Args:
        base_model: The transformers model.

    Raises:
        ValueError: Not exactly one adapter is active.
    """
    chosen = dict(reversed(state.subsets)).get(_expanding_hook(base_model).model_number)
    return chosen or tuple(range(active_config(base_model).num_members))


def _expanding_hook(base_model: nn.Module) -> "ExpandMembers":
    return next(hook for hook in base_model._forward_pre_hooks.values() if isinstance(hook, ExpandMembers))


def branch_at(base_model: nn.Module, adapter_name: str, block: int | None) -> None:
    """Say at which block the rows of an adapter's members are repeated.

    Args:
        base_model: The transformers model, with its hooks.
        adapter_name: The adapter.
        block: Number of the block in forward order; None: rows are repeated at the inputs.
    """
    _expanding_hook(base_model).branch_blocks[adapter_name] = block


def active_branch(base_model: nn.Module) -> int | None:
    """Return the block at which the rows of the active adapter's members are repeated.

    Args:
        base_model: The transformers model.

    Returns:
        Its number in forward order; None where they are repeated at the inputs, or no member takes part.

    Raises:
        ValueError: Not exactly one adapter is active.
    """
    hook = _expanding_hook(base_model)
    if base_model.get_submodule(hook.layer_name).disable_adapters:
        return None
    return hook.branch_blocks[hook.active_adapter(base_model)]


def take_prefix(base_model: nn.Module, **inputs: Any) -> torch.Tensor:
    """Return what the blocks below the branch make of examples.

    Args:
        base_model: The transformers model.
        **inputs: Its inputs.

    Returns:
        What goes into the block at the branch, (B, ...).

    Raises:
        ValueError: The rows of members are repeated at the inputs, so there is no such prefix.
    """
    taken: list[torch.Tensor] = []
    inputs.pop("labels", None)
    base_model(**inputs, **{TAKE_PREFIX: taken})
    return taken[0]


def install_hooks(base_model: nn.Module, layer_name: str, blocks: Sequence[nn.Module]) -> None:
    """Put the expanding and the reducing hook on a base model, and those of late branching on its blocks, once.

    Args:
        base_model: The transformers model.
        layer_name: Name of a layer in it that holds members; it tells which adapter is active.
        blocks: The blocks of its backbone, in forward order.
    """
    install_branch_hooks(blocks)
    if not any(isinstance(hook, ExpandMembers) for hook in base_model._forward_pre_hooks.values()):
        parameters = list(inspect.signature(type(base_model).forward).parameters.values())[1:]  # without `self`
        names = tuple(p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
        base_model.register_forward_pre_hook(ExpandMembers(layer_name, names), with_kwargs=True)
        # Called after a failed forward as well, so that no stale pass is left behind.
        base_model.register_forward_hook(ReduceMembers(), with_kwargs=True, always_call=True)


def remove_hooks(base_model: nn.Module) -> None:
    """Take the hooks off a base model again, and what they left on its blocks."""
    for module in base_model.modules():
        take_off_hooks(module, ExpandMembers, ReduceMembers, RepeatRows)
        function = module.__dict__.get("_gradient_checkpointing_func")
        if isinstance(function, CheckpointWithMembers):
            module._gradient_checkpointing_func = function.checkpoint


class ExpandMembers:
    """Forward-pre-hook of the base model: repeats the batch, once for every member that takes part.

    Attributes:
        layer_name: Name of a layer that holds members.
        parameter_names: Parameters of the base model's forward that can be given by position.
        branch_blocks: By adapter, the number of the block at which rows are repeated; None: at the inputs.
        model_number: Tells the model from all others of the process, its copies included. `id` would do as well, but
            not in code that torch.compile has traced.
    """

    def __init__(
        self, layer_name: str, parameter_names: tuple[str, ...], branch_blocks: dict[str, int | None] | None = None
    ):
        self.layer_name = layer_name
        self.parameter_names = parameter_names
        self.branch_blocks = dict(branch_blocks or {})
        self.model_number = next(_model_numbers)

    def __reduce__(self) -> tuple:
        return ExpandMembers, (self.layer_name, self.parameter_names, self.branch_blocks)  # a copy is another model

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
        """Bind the arguments to their names, repeat those that hold examples, and open the forward pass."""
        kwargs = {**dict(zip(self.parameter_names, args, strict=False)), **kwargs}
        # peft's task classes pass empty arguments of text models on, over which models of images stumble.
        kwargs = {name: value for name, value in kwargs.items() if value is not None or name in self.parameter_names}
        return_dict = kwargs.get("return_dict")
        if state.forward_pass is not None and state.forward_pass.model == self.model_number:
            # A model does not call itself: an interrupt, which no hook is told of, has left an earlier pass open.
            state.forward_pass = state.forward_pass.outer
        if base_model.get_submodule(self.layer_name).disable_adapters:
            state.forward_pass = ForwardPass(self.model_number, None, 0, return_dict, state.forward_pass)
            return (), kwargs
        if kwargs.get("cache", kwargs.get("past_key_values")) is not None:
            raise ValueError("A cache of keys and values cannot be given: its rows are not those of the members.")
        adapter_name = self.active_adapter(base_model)
        config = base_model.peft_config[adapter_name]
        branch, kwargs = branch_of(base_model, self.branch_blocks[adapter_name], kwargs)
        members = chosen_members(base_model)
        if kwargs.get("labels") is not None:
            settle_problem_type(base_model.config, kwargs["labels"])
        check_labels(kwargs, config.num_labels, base_model.config.problem_type)
        has_features = branch is not None and branch.features is not None
        batch_size = len(branch.features) if has_features else batch_size_of(base_model, kwargs)
        is_single = branch is not None and branch.taken is not None
        num_rows = len(members) * (1 if is_single else batch_size)
        forward_pass = ForwardPass(self.model_number, members, num_rows, return_dict, state.forward_pass, branch)
        expanded = repeat_arguments(kwargs, batch_size, len(members), branch)
        if base_model.training and torch.is_grad_enabled():
            replay_blocks_with_members(base_model)
        state.forward_pass = forward_pass
        if getattr(base_model.config, "use_cache", False):
            expanded["use_cache"] = False  # a cache of all members' rows would serve nobody
        return (), {**expanded, "return_dict": True}


class ReduceMembers:
    """Forward-hook of the base model: forms the ensemble's output from the members' rows."""

    def __call__(self, base_model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Close the forward pass, after a failure too, and return the ensemble's output."""
        forward_pass = state.forward_pass
        if forward_pass is None or forward_pass.model != _expanding_hook(base_model).model_number:
            return None  # the forward failed before its members were in place
        state.forward_pass = forward_pass.outer
        if output is None or forward_pass.members is None:
            return None
        adapter = active_config(base_model)
        reduced = reduce_members(
            output,
            len(forward_pass.members),
            forward_pass.num_rows,
            problem_type_of(base_model.config),
            adapter.temperature_in_use,
        )
        if adapter.problem_type is None:
            # A first batch with labels has just settled it; an adapter must say so to be self-contained.
            adapter.problem_type = base_model.config.problem_type
        wants_object = forward_pass.return_dict
        if wants_object is None:
            wants_object = base_model.config.return_dict
        return reduced if wants_object else reduced.to_tuple()


def problem_type_of(config: Any) -> str:
    """Return the problem type of a model's config, as transformers would settle it for integer labels."""
    if config.problem_type is not None:
        return config.problem_type
    return "regression" if config.num_labels == 1 else SINGLE_LABEL
