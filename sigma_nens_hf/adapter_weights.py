"""Whether the weights of an adapter file are those that a model needs."""

from collections.abc import Set

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from .registration import PARAMETER_PREFIX

_MOST_PROBLEMS_SHOWN = 10


def shapes_of_adapter(model: nn.Module, adapter_name: str) -> dict[str, torch.Size]:
    """Return the shapes of all weights that an adapter has in a model, by their keys there.

    Args:
        model: A model that carries the adapter, at any depth.
        adapter_name: The adapter.
    """
    return {
        key: tensor.shape
        for key, tensor in model.state_dict().items()
        if (f".{PARAMETER_PREFIX}" in key and key.endswith(f".{adapter_name}"))
        or f".modules_to_save.{adapter_name}." in key
    }


def shapes_of_embeddings(model: nn.Module, base_model: PreTrainedModel, keys: Set[str]) -> dict[str, torch.Size]:
    """Return the shapes of embeddings that a file holds beside the adapter, as peft adds them where they were resized.

    Args:
        model: The model that carries the adapter.
        base_model: The transformers model in it.
        keys: The keys of the file.
    """
    try:
        weight = base_model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        return {}  # a model of images has no embeddings of tokens, which transformers says in one way or the other
    parameters = model.state_dict(keep_vars=True)
    return {key: weight.shape for key in keys if parameters.get(key) is weight}


def under_current_names(
    weights: dict[str, torch.Tensor],
    shapes: dict[str, torch.Size],
    adapter_name: str,
    model: nn.Module,
    base_model: PreTrainedModel,
) -> dict[str, torch.Tensor]:
    """Rename weights that were written under the module names of an older transformers.

    transformers 5 renamed modules of ViT and others, and renames the keys of old checkpoints on loading by a table of
    its own. The same table serves here; keys that the model knows are left alone.

    Args:
        weights: The weights of an adapter, by the keys of its file.
        shapes: What the model needs, as from `shapes_of_adapter`.
        adapter_name: The adapter.
        model: The model that they are for.
        base_model: The transformers model in it.

    Raises:
        ValueError: A weight is there under both names.
    """
    wanted = {key.removesuffix(f".{adapter_name}") for key in shapes}  # a file does not name its adapter
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base_model)
    renamings = [rule for rule in get_model_conversion_mapping(base_model) if isinstance(rule, WeightRenaming)]
    renamed = {}
    for key, tensor in weights.items():
        if key not in wanted and key.startswith(prefix):
            current = prefix + apply_renamings(key.removeprefix(prefix), renamings)
            if current != key and current in weights:
                raise ValueError(f"The adapter holds {current} twice, under its name of today and as {key}.")
            key = current if current in wanted else key
        renamed[key] = tensor
    return renamed


def check_weights(weights: dict[str, torch.Tensor], shapes: dict[str, torch.Size], target: str) -> None:
    """Refuse weights that do not fit exactly.

    Args:
        weights: The weights of an adapter, by the model's keys.
        shapes: What the model needs, by the same keys.
        target: What the model is, for the error.

    Raises:
        ValueError: Keys are missing, unexpected, of another shape, or hold numbers that are no finite floats.
    """
    problems = [f"missing: {key}" for key in sorted(shapes.keys() - weights.keys())]
    problems += [f"unexpected: {key}" for key in sorted(weights.keys() - shapes.keys())]
    problems += [
        f"{key} has shape {tuple(weights[key].shape)}, the model needs {tuple(shape)}"
        for key, shape in shapes.items()
        if key in weights and weights[key].shape != shape
    ]
    problems += [f"{key} holds {weight.dtype}" for key, weight in weights.items() if not weight.is_floating_point()]
    if problems:
        rest = len(problems) - _MOST_PROBLEMS_SHOWN
        shown = problems[:_MOST_PROBLEMS_SHOWN] + ([f"... and {rest} more"] if rest > 0 else [])
        raise ValueError(
            f"The adapter does not fit {target}; is this its own base model, and are its file and its "
            "adapter_config.json of the same adapter?\n  " + "\n  ".join(shown)
        )
    for key, tensor in weights.items():
        check_finite(key, tensor)


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that holds NaN or infinity.

    Args:
        name: Its name, for the error.
        tensor: The tensor.

    Raises:
        ValueError: It does.
    """
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{name} holds numbers that are not finite; the adapter is damaged or its training diverged.")
