"""The blocks of a backbone: which they are, at which one members branch off, and what runs before it."""

from bisect import bisect_right

from torch import nn
from transformers import PreTrainedModel

from .architectures import architecture_of, backbone_name, can_branch_late
from .layer import SigmaNormLayer
from .norm_formulas import is_norm


def is_plain_or_sigma_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, with or without sigma-norm adapters on it.

    Args:
        module: A module of a base model.
    """
    return isinstance(module, SigmaNormLayer) or is_norm(module)


def block_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the backbone's blocks in forward order, over all stages.

    Blocks are the modules of the innermost lists whose every module holds norms.

    Args:
        model: The base model.
    """
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and name.startswith(f"{backbone_name(model)}.")
        and all(any(is_plain_or_sigma_norm(inner) for inner in block.modules()) for block in module)
    ]
    innermost = [name for name in lists if not any(other.startswith(f"{name}.") for other in lists)]
    return [f"{name}.{index}" for name in innermost for index in range(len(model.get_submodule(name)))]


def branch_block(model: PreTrainedModel, norm_names: list[str]) -> int | None:
    """Return the number of the first block that carries member norms, in front of which rows can be repeated.

    Args:
        model: The base model.
        norm_names: Names of the norms that carry members.

    Returns:
        The number in forward order, over all stages; None where a norm before all blocks carries members, or where the
        architecture cannot repeat its rows at a block.
    """
    if not can_branch_late(model):
        return None
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    starts = [order[block] for block in block_names(model)]
    beside = _modules_beside_blocks(model)

    def block_of(norm: str) -> int:
        inside = [block for name, block in beside.items() if f"{norm}.".startswith(f"{name}.")]
        return inside[0] if inside else bisect_right(starts, order[norm]) - 1

    first = min(map(block_of, norm_names))
    # A module beside the list of blocks joins what goes into its block with what comes out of it.
    return None if first < 0 or first in beside.values() else first


def prefix_modules(model: PreTrainedModel, block: int) -> dict[str, nn.Module]:
    """Return the modules that run before a block, by name, without those that it lies in.

    Args:
        model: The base model.
        block: Number of the block in forward order.
    """
    modules = dict(model.named_modules())
    order, start = list(modules), block_names(model)[block]
    beside = tuple(f"{name}." for name, number in _modules_beside_blocks(model).items() if number < block)
    before = order[: order.index(start)]
    before += [name for name in order[order.index(start) :] if beside and f"{name}.".startswith(beside)]
    backbone = f"{backbone_name(model)}."
    return {name: modules[name] for name in before if name.startswith(backbone) and not start.startswith(f"{name}.")}


def trained_in_prefix(model: PreTrainedModel, block: int) -> list[str]:
    """Return the names of the parameters of what runs before a block that are trained.

    Args:
        model: The base model.
        block: Number of the block in forward order.
    """
    return [
        f"{name}.{parameter_name}"
        for name, module in prefix_modules(model, block).items()
        for parameter_name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    ]


def _modules_beside_blocks(model: PreTrainedModel) -> dict[str, int]:
    """Return the full names of modules listed behind the blocks that run as part of one, with its number."""
    return {
        name: block
        for end, block in architecture_of(model).within_blocks.items()
        for name, _ in model.named_modules()
        if f".{name}".endswith(f".{end}")
    }
