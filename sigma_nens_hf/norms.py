"""Which norms of a model carry members, and why the others do not."""

import re
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from .architectures import architecture_of, backbone_name
from .blocks import block_names, is_plain_or_sigma_norm
from .config import FROZEN, SigmaNormConfig
from .layer import SigmaNormLayer
from .norm_formulas import NormFormula


def find_norms(model: PreTrainedModel, config: SigmaNormConfig) -> list[str]:
    """Return the names of the norms that are to carry members, in forward order.

    Those before `branch_layer` are none of them.

    Norms are found by class: a module's name says nothing (DistilBERT has `sa_layer_norm`, ViT `layernorm_before`).
    Only the backbone is searched, since a norm inside the head belongs to the head.

    Args:
        model: The base model, with or without sigma-norm adapters on it.
        config: The adapter's config.

    Raises:
        ValueError: No norm is left; a target is no norm or lies outside the backbone; a norm is of a kind whose
            formula is not known here; a pattern matches nothing; `branch_layer` is beyond the last block.
    """
    names = _tunable_norms(model, config)
    if config.branch_layer is not None:
        names = _from_block_on(model, names, config.branch_layer)
    if not names:
        raise ValueError(f"No norm of {type(model).__name__} is left to carry members.")
    return names


def find_shared_norms(model: PreTrainedModel, config: SigmaNormConfig) -> list[str]:
    """Return the names of the norms before `branch_layer` that members share one trained copy of, in forward order.

    Args:
        model: The base model, with or without sigma-norm adapters on it.
        config: The adapter's config.

    Raises:
        ValueError: As for `find_norms`.
    """
    if config.prefix == FROZEN:
        return []
    members = set(find_norms(model, config))
    return [name for name in _tunable_norms(model, config) if name not in members]


def _tunable_norms(model: PreTrainedModel, config: SigmaNormConfig) -> list[str]:
    """Return the norms that the patterns of a config select, wherever the branch is."""
    backbone = backbone_name(model)
    candidates = {
        name: module
        for name, module in model.named_modules()
        if name.startswith(f"{backbone}.") and is_plain_or_sigma_norm(module) and not _is_inside_member_layer(name)
    }
    unfit = {
        name: reason
        for end, reason in architecture_of(model).without_members.items()
        for name in candidates
        if name.endswith(f".{end}")
    }
    if config.target_modules is None:
        names = [name for name in candidates if name not in unfit]
    else:
        every_name = [name for name, _ in model.named_modules() if name and not _is_inside_member_layer(name)]
        names = _matching("target_modules", config.target_modules, every_name)
    if config.exclude_modules:
        excluded = set(_matching("exclude_modules", config.exclude_modules, names))
        names = [name for name in names if name not in excluded]
    for name in names:
        if name not in candidates:
            kind = type(model.get_submodule(name)).__name__
            raise ValueError(
                f"target_modules matches {name!r}, a {kind}, but only norms of the backbone "
                f"({backbone}) can carry members. Its norms are: {_short_list(list(candidates))}."
            )
        if name in unfit:
            raise ValueError(f"target_modules matches {name!r}, which cannot carry members: {unfit[name]}.")
    for name in names:
        _check_formula(name, candidates[name])
    return names


def _is_inside_member_layer(name: str) -> bool:
    return ".base_layer" in name or ".sigma_norm_" in name


def _check_formula(name: str, module: nn.Module) -> None:
    if not isinstance(module, SigmaNormLayer):
        try:
            NormFormula.of(module)
        except ValueError as error:
            raise ValueError(f"{name}, {error}. Leave it out with `exclude_modules`.") from error


def selects(patterns: str | Sequence[str], name: str) -> bool:
    """Whether a field of the config selects a module, read as peft reads such fields.

    Args:
        patterns: A regular expression for the full name, or a list of names and suffixes.
        name: Full name of the module.
    """
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == pattern or name.endswith(f".{pattern}") for pattern in patterns)


def _matching(field: str, patterns: str | Sequence[str], names: list[str]) -> list[str]:
    """Return the names that a field of the config selects.

    Raises:
        ValueError: One of its patterns selects none.
    """
    each = [patterns] if isinstance(patterns, str) else [[pattern] for pattern in patterns]
    unmatched = [pattern for pattern in each if not any(selects(pattern, name) for name in names)]
    if unmatched:
        raise ValueError(
            f"{field} matches no module: {[p if isinstance(p, str) else p[0] for p in unmatched]}. There are, for "
            f"example: {_short_list(names)}."
        )
    return [name for name in names if selects(patterns, name)]


def _from_block_on(model: PreTrainedModel, names: list[str], branch_layer: int) -> list[str]:
    """Keep the norms of blocks from `branch_layer` on and those that come after all blocks."""
    blocks = block_names(model)
    if branch_layer >= len(blocks):
        raise ValueError(
            f"branch_layer={branch_layer} is beyond the last of the {len(blocks)} blocks of {type(model).__name__}, "
            f"which is {len(blocks) - 1}."
        )
    order = [name for name, _ in model.named_modules()]
    kept = set(order[order.index(blocks[branch_layer]) :])
    for end, block in architecture_of(model).within_blocks.items():
        if block < branch_layer:
            kept = {name for name in kept if f".{end}." not in f".{name}."}
    return [name for name in names if name in kept]


def _short_list(names: list[str], most: int = 6) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, ... ({len(names)} in all)"
