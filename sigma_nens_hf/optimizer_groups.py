"""Which trained parameters share a learning rate, and which are decayed."""

from typing import Any

from torch import nn

from .layer import MemberLayer
from .training_args import SigmaNEnsTrainingArguments

_MEMBER_KINDS = {"sigma_norm_scaler": "scalers", "sigma_norm_scale": "scales"}


def parameter_groups(model: nn.Module, args: SigmaNEnsTrainingArguments, decayed: set[str]) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: heads and member biases, scalers, scales, shared weights and biases.

    Every trained parameter is in exactly one. Scalers, scales, member biases and member heads are never decayed.

    Args:
        model: The ensemble.
        args: The training arguments, for the rates and the weight decay.
        decayed: Names of the parameters that transformers would decay; only shared ones among them are.

    Returns:
        Groups with `params`, `lr` and `weight_decay`. The first, whose rate is the one that is logged, is there even
        where it is empty; the others only where they hold something.
    """
    member_kinds = {
        id(parameter): _MEMBER_KINDS.get(name.split(".")[0], "members")
        for layer in model.modules()
        if isinstance(layer, MemberLayer)
        for name, parameter in layer.named_parameters()
    }
    kinds: dict[str, list[nn.Parameter]] = {
        kind: [] for kind in ("members", "scalers", "scales", "shared", "shared_biases")
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shared_kind = "shared" if name in decayed else "shared_biases"
            kinds[member_kinds.get(id(parameter), shared_kind)].append(parameter)
    rates = {
        "members": args.learning_rate,
        "scalers": args.scaler_learning_rate,
        "scales": args.scale_learning_rate,
    }
    return [
        {
            "params": parameters,
            "lr": rates.get(kind, args.modules_to_save_learning_rate),
            "weight_decay": args.weight_decay if kind == "shared" else 0.0,
        }
        for kind, parameters in kinds.items()
        if parameters or kind == "members"
    ]
