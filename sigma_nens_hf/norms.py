"""Which norms of a model carry members, and why the others do not."""

import re
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from .config import SigmaNormConfig
from .layer import SigmaNormLayer


def find_norms(model: PreTrainedModel, config: SigmaNormConfig) -> list[str]:
    """Return the names of the norms that are to carry members, in forward order.

    Norms are found by class: a module's name says nothing (DistilBERT has `sa_layer_norm`, ViT `layernorm_before`).
    Only the backbone is searched, since a norm inside the head belongs to the head.

    Args:
        model: The base model, with or without sigma-norm adapters on it.
        config: The adapter's config.

    Raises:
        ValueError: No norm is left; a target is no norm or lies outside the backbone; a norm is of a kind whose
            formula is not known here; a pattern matches nothing; `branch_layer` is beyond the last block.
    """
    backbone = f"{model.base_model_prefix}."
    candidates = {
        name: module
        for name, module in model.named_modules()
        if name.startswith(backbone) and _is_norm(module) and not _is_inside_member_layer(name)
    }
    if config.target_modules is None:
        names = list(candidates)
    else:
        every_name = [name for name, _ in model.named_modules() if name and not _is_inside_member_layer(name)]
        names = _matching("target_modules", config.target_modules, every_name)
        for name in names:
            if name not in candidates:
                kind = type(model.get_submodule(name)).__name__
                raise ValueError(
                    f"target_modules matches {name!r}, a {kind}, but only norms of the backbone "
                    f"({model.base_model_prefix}) can carry members. Its norms are: {_short_list(list(candidates))}."
                )
    if config.exclude_modules:
        excluded = set(_matching("exclude_modules", config.exclude_modules, names))
        names = [name for name in names if name not in excluded]
    if config.branch_layer is not None:
        names = _from_block_on(model, names, config.branch_layer)
    if not names:
        raise ValueError(f"No norm of {type(model).__name__} is left to carry members.")
    for name in names:
        _check_formula(name, candidates[name])
    return names


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, SigmaNormLayer):
        return True
    by_class = isinstance(module, nn.LayerNorm) or re.search(r"(Layer|RMS)Norm$", type(module).__name__)
    return bool(by_class) and getattr(module, "weight", None) is not None


def _is_inside_member_layer(name: str) -> bool:
    return ".base_layer" in name or ".sigma_norm_" in name


def _check_formula(name: str, module: nn.Module) -> None:
    norm = module.base_layer if isinstance(module, SigmaNormLayer) else module
    if not isinstance(norm, nn.LayerNorm) or len(norm.normalized_shape) != 1:
        raise ValueError(
            f"{name} is a {type(norm).__name__}. Only layer norms over the last dimension are supported so far; "
            "leave it out with `exclude_modules`."
        )


def _matching(field: str, patterns: str | Sequence[str], names: list[str]) -> list[str]:
    """Return the names that a field of the config selects, read as peft reads such fields.

    Args:
        field: The field, for the error.
        patterns: A regular expression for the full name, or a list of names and suffixes.
        names: The names to choose from.

    Raises:
        ValueError: A pattern selects none.
    """
    if isinstance(patterns, str):
        found = [name for name in names if re.fullmatch(patterns, name)]
        unmatched = [] if found else [patterns]
    else:
        by_pattern = {p: [name for name in names if name == p or name.endswith(f".{p}")] for p in patterns}
        unmatched = [pattern for pattern, matches in by_pattern.items() if not matches]
        wanted = {name for matches in by_pattern.values() for name in matches}
        found = [name for name in names if name in wanted]
    if unmatched:
        raise ValueError(f"{field} matches no module: {unmatched}. There are, for example: {_short_list(names)}.")
    return found


def _from_block_on(model: PreTrainedModel, names: list[str], branch_layer: int) -> list[str]:
    """Keep the norms of blocks from `branch_layer` on and those that come after all blocks."""
    stacks = _block_lists(model)
    blocks = [f"{stack}.{i}." for stack, modules in stacks.items() for i in range(len(modules))]
    if branch_layer >= len(blocks):
        raise ValueError(
            f"branch_layer={branch_layer} is beyond the last of the {len(blocks)} blocks of {type(model).__name__}, "
            f"which is {len(blocks) - 1}."
        )
    order = [name for name, _ in model.named_modules()]
    first_kept = next(i for i, name in enumerate(order) if name.startswith(blocks[branch_layer]))
    kept = set(order[first_kept:])
    return [name for name in names if name in kept]


def _block_lists(model: PreTrainedModel) -> dict[str, nn.ModuleList]:
    """Return the outermost lists of transformer blocks in the backbone: those whose modules hold norms."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{outer}.") for outer in lists):
            continue
        if name.startswith(f"{model.base_model_prefix}.") and all(
            any(_is_norm(inner) for inner in block.modules()) for block in module
        ):
            lists[name] = module
    return lists


def _short_list(names: list[str], most: int = 6) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, ... ({len(names)} in all)"
