"""The first stage of a staged prefix: the norms are tuned as those of one model, then frozen for the members."""

import copy
import os
from typing import Any

import torch
from peft import PeftConfig
from transformers import EarlyStoppingCallback, Trainer, set_seed
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
    """Train one model, of which the first member stands for the suffix, and keep its prefix.

    Members then start as if it had not been: where they started from its suffix, they agreed far more. Its checkpoints
    are in the folder "prefix" of the output folder. Nothing is evaluated or pushed meanwhile. The second stage begins
    with the seed anew, so that it is the same when the first was resumed.

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
    args.eval_strategy, args.eval_on_start = IntervalStrategy.NO, False
    args.load_best_model_at_end = args.push_to_hub = False
    if args.save_strategy == SaveStrategy.BEST:
        args.save_strategy = SaveStrategy.NO
    if args.prefix_epochs is not None and hasattr(trainer.train_dataset, "__len__"):
        args.num_train_epochs, args.max_steps = args.prefix_epochs, -1
    checkpoint = first_stage_checkpoint(trainer) if resume else None
    starts = [(parameter, parameter.detach().clone()) for parameter in member_parameters(trainer.model)]
    callbacks = [one for one in trainer.callback_handler.callbacks if not isinstance(one, EarlyStoppingCallback)]
    try:
        with (
            temporarily(trainer, args=args),
            temporarily(trainer.callback_handler, callbacks=callbacks),
            member_subset(trainer.model, 0),
        ):
            Trainer.train(trainer, resume_from_checkpoint=checkpoint, **kwargs)
    finally:  # after an interrupt as well, so that the same trainer can go on
        trainer.optimizer, trainer.model_wrapped = None, trainer.model  # other parameters are trained from now on
        with torch.no_grad():
            for parameter, start in starts:
                parameter.copy_(start)
    set_seed(trainer.args.seed)
    freeze_prefix(trainer.model)


def take_tuned_prefix(trainer: Trainer, checkpoint: str | os.PathLike) -> None:
    """Take the tuned norms from a checkpoint of the second stage, which they do not change in any more.

    Args:
        trainer: The trainer of an ensemble.
        checkpoint: The checkpoint.

    Raises:
        ValueError: It is one of the first stage, or of a run with another prefix.
    """
    config = PeftConfig.from_pretrained(os.fspath(checkpoint))
    if config.prefix != STAGED:
        raise ValueError(
            f"{checkpoint} is of a run with prefix={config.prefix!r}, which cannot go on with prefix='staged'. Choose "
            "another output_dir."
        )
    if not config.prefix_is_tuned:
        raise ValueError(
            f"{checkpoint} is of the first stage of prefix='staged'. Go on from there with resume_from_checkpoint=True "
            "and the same output_dir."
        )
    trainer._load_from_checkpoint(checkpoint)
    freeze_prefix(trainer.model)


def member_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return what each member of the active adapter has for its own: scalers, biases and heads.

    Args:
        model: The ensemble.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, MemberLayer) and layer.member_adapter is not None]
    own = [
        layer
        for layer in layers
        if not isinstance(layer, SigmaNormLayer) or layer.carries_members(layer.member_adapter)
    ]
    stacks = [getattr(layer, kind) for layer in own for kind in layer.adapter_layer_names]
    name = layers[0].member_adapter
    return [stack[name] for stack in stacks if name in stack]


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
