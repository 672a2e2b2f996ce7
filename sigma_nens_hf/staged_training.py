"""The first stage of a staged prefix: the norms are tuned as those of one model, then frozen for the members."""

import copy
import os
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from .checkpoints import last_complete_checkpoint
from .config import STAGED
from .layer import MemberLayer, NormRole, SigmaNormLayer
from .members import active_config, base_model_of, member_subset
from .trainer_evaluation import temporarily

STAGE_FOLDER = "prefix"


def has_first_stage(trainer: Trainer) -> bool:
    """Whether the prefix of a trainer's model is still to be tuned as that of one model.

    Args:
        trainer: The trainer of an ensemble.
    """
    config = active_config(base_model_of(trainer.model))
    return config.prefix == STAGED and not config.prefix_is_tuned


def first_stage_checkpoint(trainer: Trainer) -> str | None:
    """Return the last checkpoint of the first stage that was written to its end, None where there is none.

    Args:
        trainer: The trainer of an ensemble.
    """
    return last_complete_checkpoint(os.path.join(trainer.args.output_dir, STAGE_FOLDER))


def tune_prefix(trainer: Trainer, resume: bool, **kwargs: Any) -> None:
    """Train one model, of which the first member stands for the suffix, and start all members from it.

    Its checkpoints are in the folder "prefix" of the output folder. Nothing is evaluated meanwhile.

    Args:
        trainer: The trainer of an ensemble.
        resume: Whether to go on from the last checkpoint there, if there is one.
        **kwargs: As for `transformers.Trainer.train`.

    Raises:
        ValueError: The trainer was given an optimizer, which would serve one stage only.
    """
    if trainer.optimizer is not None:
        raise ValueError(
            "prefix='staged' trains twice, each time with an optimizer of its own; give the trainer "
            "`optimizer_cls_and_kwargs` or arguments instead of an optimizer."
        )
    args = copy.copy(trainer.args)
    args.output_dir = os.path.join(args.output_dir, STAGE_FOLDER)
    args.diversity_weight = 0.0
    args.eval_strategy, args.load_best_model_at_end = IntervalStrategy.NO, False
    if args.save_strategy == SaveStrategy.BEST:
        args.save_strategy = SaveStrategy.NO
    if args.prefix_epochs is not None:
        args.num_train_epochs, args.max_steps = args.prefix_epochs, -1
    checkpoint = first_stage_checkpoint(trainer) if resume else None
    with temporarily(trainer, args=args), member_subset(trainer.model, 0):
        Trainer.train(trainer, resume_from_checkpoint=checkpoint, **kwargs)
    trainer.optimizer = None
    start_members(trainer.model)
    freeze_prefix(trainer.model)


@torch.no_grad()
def start_members(model: torch.nn.Module) -> None:
    """Give all members the norms of the first one, with the start noise of each, and the heads of the first one.

    Args:
        model: The ensemble.
    """
    config = active_config(base_model_of(model))
    for layer in model.modules():
        if isinstance(layer, MemberLayer) and (name := layer.member_adapter) is not None:
            for kind in layer.adapter_layer_names:
                if name in getattr(layer, kind):
                    stacked = getattr(layer, kind)[name]
                    stacked.copy_(stacked[:1].expand_as(stacked))
            if isinstance(layer, SigmaNormLayer) and layer.carries_members(name):
                scaler = layer.sigma_norm_scaler[name]
                scaler.add_(torch.randn_like(scaler) * config.init_scaler_std)


def freeze_prefix(model: torch.nn.Module) -> None:
    """Train the shared copies of the active adapter no further.

    Args:
        model: The ensemble.
    """
    for layer in model.modules():
        name = layer.member_adapter if isinstance(layer, SigmaNormLayer) else None
        if name is not None and layer.role[name] is NormRole.SHARED:
            layer.freeze(name)
    active_config(base_model_of(model)).prefix_is_tuned = True
