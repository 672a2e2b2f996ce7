"""Shared modules in full precision over a base in 16 bits, in which small steps of training would be lost."""

from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from torch.utils._pytree import tree_map_only

from .hooks import take_off_hooks


def train_in_full_precision(model: nn.Module, adapter_name: str) -> None:
    """Turn an adapter's trained copies of shared modules into fp32, each computing in fp32 between two casts.

    Args:
        model: The base model, with the adapter on it.
        adapter_name: The adapter.
    """
    for wrapper in model.modules():
        if not isinstance(wrapper, AuxiliaryTrainingWrapper) or adapter_name not in wrapper.modules_to_save:
            continue
        if _dtype_of(wrapper.original_module) in (torch.float16, torch.bfloat16):
            module = wrapper.modules_to_save[adapter_name].float()
            module.register_forward_pre_hook(CastInputs(), with_kwargs=True)
            module.register_forward_hook(CastOutputs(wrapper.original_module))


def restore_precision(model: nn.Module) -> None:
    """Give trained copies that have become part of a plain model its precision again.

    Args:
        model: The plain model.
    """
    for module in model.modules():
        for hook in module._forward_hooks.values():
            if isinstance(hook, CastOutputs):
                module.to(_dtype_of(hook.original))
        take_off_hooks(module, CastInputs, CastOutputs)


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    return next((parameter.dtype for parameter in module.parameters()), None)


class CastInputs:
    """Forward-pre-hook that brings a module's inputs to its own precision."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Cast the inputs."""
        return _cast((args, kwargs), _dtype_of(module))


class CastOutputs:
    """Forward-hook that brings a module's outputs to the precision of the model around it, whatever that is by then.

    Args:
        original: The module of the base model that the module stands for.
    """

    def __init__(self, original: nn.Module):
        self.original = original

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Cast the outputs."""
        return _cast(output, _dtype_of(self.original))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)
