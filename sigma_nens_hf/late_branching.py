"""Late branching: blocks below the first that carries members run once an example, not once a member.

The rows of the examples are repeated in front of that block instead of at the inputs. Every later block is given the
tensors beside its hidden states (masks, biases, position encodings) for the examples still, and has them repeated.

What the blocks below compute, the prefix, can also be taken out of a forward pass and put into later ones. Blocks
cannot be left out of a forward pass, but they can be given a single row, which costs next to nothing: with the prefix
put in, the blocks below see one row; with the prefix taken out, the blocks above do.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .forward_pass import state

# Arguments of blocks, beside the hidden states, whose first dimension is the batch, and the least number of dimensions
# that they have then: DINOv3's position encodings are (patches, D), for all images alike.
_BATCHED = {"attention_mask": 2, "position_bias": 4, "position_embeddings": 3, "position_ids": 2}


@dataclass(frozen=True)
class Branch:
    """Where the rows of a forward pass are repeated, and what becomes of its prefix.

    Attributes:
        block: Number of the block in front of which they are, in forward order.
        features: The output of the blocks below for every example, (B, ...), to be put in; None: they compute it.
        taken: List to which it is to be appended; None: it is not taken out.
    """

    block: int
    features: torch.Tensor | None = None
    taken: list[torch.Tensor] | None = None


class RepeatRows:
    """Forward-pre-hook of a block: brings what goes into it to the rows that it is to compute.

    Args:
        number: Number of the block in forward order.
        parameter_names: Names of the parameters of its forward.
    """

    def __init__(self, number: int, parameter_names: tuple[str, ...]):
        self.number = number
        self.parameter_names = parameter_names

    def __call__(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Repeat rows, or leave all but one out."""
        forward_pass = state.forward_pass
        branch = None if forward_pass is None else forward_pass.branch
        if branch is None or (self.number < branch.block and branch.features is None):
            return None
        num_members = len(forward_pass.members)
        name, *_ = self.parameter_names
        arguments = {**dict(zip(self.parameter_names, args, strict=False)), **kwargs}
        hidden_states = arguments.pop(name)
        is_single = branch.features is not None if self.number < branch.block else branch.taken is not None
        if self.number < branch.block:
            hidden_states = hidden_states[:1]
        elif self.number == branch.block:
            if branch.taken is not None:
                branch.taken.append(hidden_states)
                hidden_states = hidden_states[:1]
            elif branch.features is not None:
                hidden_states = branch.features.to(hidden_states.dtype)
            hidden_states = _repeat(hidden_states, num_members)
        if is_single:
            arguments = _map_batched(arguments, lambda tensor: tensor[:1])
        if self.number >= branch.block:
            num_rows = hidden_states.shape[0] // num_members

            def repeated(tensor: torch.Tensor) -> torch.Tensor:
                # A single row is broadcast, but for masks of tokens: flash attention counts their rows.
                is_wanted = tensor.shape[0] == num_rows and (num_rows > 1 or tensor.dim() == 2)
                return _repeat(tensor, num_members) if is_wanted else tensor

            arguments = _map_batched(arguments, repeated)
        return (hidden_states,), arguments


def _repeat(tensor: torch.Tensor, num_members: int) -> torch.Tensor:
    return tensor if num_members == 1 else tensor.repeat(num_members, *[1] * (tensor.dim() - 1))


def _map_batched(arguments: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Change the tensors among a block's arguments whose first dimension is the batch."""

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(changed(name, item) for item in value)
        return change(value) if isinstance(value, torch.Tensor) and value.dim() >= _BATCHED[name] else value

    return {name: changed(name, value) if name in _BATCHED else value for name, value in arguments.items()}


def install_branch_hooks(blocks: Sequence[nn.Module]) -> None:
    """Put the hook on the blocks of a model, once.

    Args:
        blocks: All of them, in forward order.
    """
    for number, block in enumerate(blocks):
        if not any(isinstance(hook, RepeatRows) for hook in block._forward_pre_hooks.values()):
            names = tuple(inspect.signature(type(block).forward).parameters)[1:]  # without `self`
            block.register_forward_pre_hook(RepeatRows(number, names), with_kwargs=True)
