"""The models that are compared: how each is made, trained and asked, over the same backbone, data and loop.

A method is one or several of these models: a deep ensemble is M of them, trained from seeds of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from member_baselines import LowRankLinear, MemberLinear, RankOneLinear, replace_linear_layers
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

from sigma_nens_hf import SigmaNEnsTrainer, SigmaNEnsTrainingArguments, SigmaNormLayer, ensemble_from_pretrained
from sigma_nens_hf.layer import NormRole
from sigma_nens_hf.optimizer_groups import parameter_groups
from sigma_nens_hf.outputs import MEMBER_LOGITS

# The linear layers of a BERT-like encoder's blocks, and those of them that LoRA usually adapts.
ALL_LINEAR, QUERY_AND_VALUE = r"encoder\.layer\.\d+\..*\.(query|key|value|dense)$", r"\.(query|value)$"


@dataclass(frozen=True)
class ModelKind:
    """A kind of model.

    Attributes:
        make: Makes the trainer of a fresh model from (checkpoint, class names, M, learning rate, common arguments).
        has_members: Whether one model holds M members; otherwise M models make an ensemble.
        learning_rate: Of what only this kind trains; chosen on the calibration split. None: that of the trainer.
    """

    make: Callable[..., Trainer]
    has_members: bool
    learning_rate: float | None


def ensemble(checkpoint: str, names: list[str], num_members: int, **config: Any) -> tuple[nn.Module, Any]:
    """Make a fresh ensemble of sentence classifiers.

    Args:
        checkpoint: The encoder.
        names: Names of the classes, in order.
        num_members: Number of members M.
        **config: Further fields of `SigmaNormConfig`.
    """
    return ensemble_from_pretrained(
        checkpoint,
        "text-classification",
        num_members=num_members,
        id2label=dict(enumerate(names)),
        modules_to_save=["pooler"],  # of which the packaged encoder brings none that was trained
        **config,
    )


def _sigma_norms(
    checkpoint: str, names: list[str], num_members: int, learning_rate: float | None, common: dict[str, Any]
) -> Trainer:
    """Sigma norms of M members; of 1, a single model with tuned norms."""
    model, tokenizer = ensemble(checkpoint, names, num_members)
    return SigmaNEnsTrainer(model=model, args=SigmaNEnsTrainingArguments(**common), processing_class=tokenizer)


def _member_linear(
    pattern: str,
    layer_class: type[MemberLinear],
    checkpoint: str,
    names: list[str],
    num_members: int,
    learning_rate: float,
    common: dict[str, Any],
) -> Trainer:
    """Members that differ in linear layers; heads, pooler and their learning rates are those of sigma norms."""
    model, tokenizer = ensemble(checkpoint, names, num_members, init_scaler_std=0)
    members = replace_linear_layers(model, pattern, partial(layer_class, num_members=num_members))
    args = SigmaNEnsTrainingArguments(diversity_weight=0, **common)
    known = {id(parameter) for parameter in members}
    groups = parameter_groups(model, args, decayed=set())
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in known]
    optimizer = torch.optim.AdamW([*groups, {"params": members, "lr": learning_rate}], weight_decay=0)
    return SigmaNEnsTrainer(model=model, args=args, processing_class=tokenizer, optimizers=(optimizer, None))


def _full(checkpoint: str, names: list[str], num_members: int, learning_rate: float, common: dict[str, Any]) -> Trainer:
    """One model of which every parameter is trained."""
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoint, id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)}
    )
    args = TrainingArguments(**{**common, "learning_rate": learning_rate, "warmup_steps": 0.1, "weight_decay": 0.01})
    return Trainer(model=model, args=args, processing_class=AutoTokenizer.from_pretrained(checkpoint))


KINDS = {
    "norms": ModelKind(_sigma_norms, has_members=False, learning_rate=None),
    "full": ModelKind(_full, has_members=False, learning_rate=5e-5),
    "rank_one": ModelKind(partial(_member_linear, ALL_LINEAR, RankOneLinear), has_members=True, learning_rate=2e-3),
    "lora": ModelKind(partial(_member_linear, QUERY_AND_VALUE, LowRankLinear), has_members=True, learning_rate=2e-3),
    "sigma": ModelKind(_sigma_norms, has_members=True, learning_rate=None),
}


def trained_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what of a model has been trained and has to be stored; norms of a staged prefix are frozen by now.

    Args:
        model: The model.
    """
    tuned_before = {
        id(parameter)
        for layer in model.modules()
        if isinstance(layer, SigmaNormLayer)
        for adapter_name, role in layer.role.items()
        if role is NormRole.FROZEN
        for kind in layer.adapter_layer_names
        if (parameter := getattr(layer, kind).get(adapter_name)) is not None
    }
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or id(parameter) in tuned_before
    }


@torch.no_grad()
def member_logits(trainer: Trainer, dataset: Dataset, dropout_passes: int = 0) -> torch.Tensor:
    """Ask a trained model, in the order of the dataset.

    Args:
        trainer: Its trainer.
        dataset: Encoded examples; sorted by length they take half of the time.
        dropout_passes: Pass every example this often, with dropout switched on (MC dropout: Y. Gal, Z. Ghahramani,
            arXiv 1506.02142). 0: once, without.

    Returns:
        (N, M, C) in fp32; the passes take the place of members, and a single model is one member.
    """
    trainer.model.train(dropout_passes > 0)
    batches = []
    # The trainer's own loader would follow the training's sampling, which puts like lengths together.
    for batch in DataLoader(dataset, trainer.args.eval_batch_size, collate_fn=trainer.data_collator):
        batch = batch.to(trainer.args.device)
        batch.pop("labels")
        passes = []
        for _ in range(max(dropout_passes, 1)):
            with trainer.accelerator.autocast():
                output = trainer.model(**batch)
            passes.append(output[MEMBER_LOGITS] if MEMBER_LOGITS in output else output.logits[:, None])
        batches.append(torch.cat(passes, 1).float().cpu())
    trainer.model.eval()
    return torch.cat(batches)
