"""What the blocks below the branch make of a batch, computed apart from what members make of it."""

from typing import Any

import torch
from transformers import Trainer

from .blocks import trained_in_prefix
from .call_arguments import PREFIX_FEATURES, has_prefix
from .members import active_branch, base_model_of, take_prefix


def prefix_features(trainer: Trainer, batch: dict[str, Any]) -> torch.Tensor:
    """Return the features at the branch, (B, ...).

    Args:
        trainer: The trainer of an ensemble, in whose precision and mode they are computed.
        batch: The inputs of its model.
    """
    base_model = base_model_of(trainer.model)
    trainer.set_prefix_mode()
    # The trainer's own autocast is around the forward of the whole model.
    with trainer.accelerator.autocast(), trainer.compute_loss_context_manager():
        return take_prefix(base_model, **trainer._prepare_inputs(batch))


@torch.no_grad()
def with_prefix_features(trainer: Trainer, batch: dict[str, Any]) -> dict[str, Any]:
    """Put the features at the branch into a batch that is run once for every chunk of members, so that they are shared.

    Args:
        trainer: The trainer of an ensemble.
        batch: The inputs of its model.

    Returns:
        The batch with them; as it is where there are none, or where every chunk must go backward through them.
    """
    base_model = base_model_of(trainer.model)
    block = active_branch(base_model)
    # Parts of a model that is sharded cannot be called by themselves.
    if PREFIX_FEATURES in batch or trainer.is_fsdp_enabled or not has_prefix(base_model, block, batch):
        return batch
    if trainer.model.training and trained_in_prefix(base_model, block):
        return batch
    return {**batch, PREFIX_FEATURES: prefix_features(trainer, batch)}
