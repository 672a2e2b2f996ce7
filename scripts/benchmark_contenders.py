"""The models whose costs are compared: over one random backbone of a given shape, each ready to be timed."""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from benchmark_shapes import Shape
from branch_points import BranchPoint
from member_baselines import LowRankLinear, replace_linear_layers
from peft import LNTuningConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from sigma_nens_hf import SigmaNEnsTrainingArguments, SigmaNormConfig, SigmaNormLayer, diversity_regularizer
from sigma_nens_hf.call_arguments import PREFIX_FEATURES
from sigma_nens_hf.config import FROZEN, SHARED
from sigma_nens_hf.labels import SINGLE_LABEL
from sigma_nens_hf.losses import task_loss
from sigma_nens_hf.members import base_model_of, take_prefix
from sigma_nens_hf.outputs import MEMBER_LOGITS
from sigma_nens_hf.training_args import DEFAULT_DIVERSITY_TEMPERATURE

SINGLE, SEPARATE, LORA, FULL, PLAIN_NORMS = "single", "separate", "lora", "full", "plain_norms"
HALF, THIRD, LAST, THIRD_SHARED = "half", "third", "last", "third_shared"
CACHED = "_cached"
QUERY_AND_VALUE = r"\.(query|value|q_proj|v_proj)$"


@dataclass(frozen=True)
class Kind:
    """A kind of contender.

    Attributes:
        title: What it is called in tables.
        share: The last 1 / `share` of the blocks carry members, one block for 0; None: all of the model does.
        prefix: What becomes of the norms before them.
        is_cached: Whether what runs before them is computed beforehand in training.
    """

    title: str
    share: int | None = None
    prefix: str = FROZEN
    is_cached: bool = False

    def branch_point(self, num_blocks: int, num_members: int) -> BranchPoint:
        """Return where members start, from which the counted costs follow."""
        if self.share is None:
            return BranchPoint(num_members)
        return BranchPoint(
            num_members, self.prefix, num_blocks - (max(1, num_blocks // self.share) if self.share else 1)
        )


_LATE = {HALF: Kind("last half", 2), THIRD: Kind("last third", 3), LAST: Kind("last block", 0)}
KINDS = {
    SINGLE: Kind("one LN-tuned model"),
    SEPARATE: Kind("M LN-tuned models in turn"),
    LORA: Kind("LoRA members (query, value)"),
    FULL: Kind("sigma-N-Ens, full depth"),
    **_LATE,
    THIRD_SHARED: Kind("last third, prefix shared", 3, SHARED),
    **{f"{name}{CACHED}": Kind(f"{kind.title}, cached", kind.share, FROZEN, True) for name, kind in _LATE.items()},
}


def counted_costs(kind: str, num_blocks: int, num_members: int) -> tuple[float, float]:
    """Return the counted work of a training step and of inference, that of one model being 1.

    Args:
        kind: Name of a kind.
        num_blocks: Number of blocks L.
        num_members: Number of members M.
    """
    point = KINDS[kind].branch_point(num_blocks, 1 if kind == SINGLE else num_members)
    training, cached, inference = point.counted_costs(num_blocks)
    return (cached if KINDS[kind].is_cached else training), inference


def make_model(kind: str, shape: Shape, base: PreTrainedModel, num_members: int) -> nn.Module:
    """Return a fresh model of a kind.

    peft's own batches of several LoRA adapters serve inference only, so LoRA members are made with the hooks of this
    package, as in `member_baselines`.

    Args:
        kind: Name of a kind, or `PLAIN_NORMS`: an ensemble at full depth whose members share plain trained norms.
        shape: Shape of the backbone.
        base: The backbone, which is copied.
        num_members: Number of members M.
    """
    base = copy.deepcopy(base)
    if kind in (SINGLE, SEPARATE):
        # peft has no task type for images, and wraps the head of texts by itself.
        own = {"modules_to_save": ["classifier"]} if shape.is_image else {"task_type": TaskType.SEQ_CLS}
        norms = ["layernorm_before", "layernorm_after", "layernorm"] if shape.is_image else ["LayerNorm"]
        return get_peft_model(base, LNTuningConfig(target_modules=norms, **own))
    if kind == LORA:
        model = get_peft_model(base, SigmaNormConfig(num_members=num_members, init_scaler_std=0.0))
        replace_linear_layers(model, QUERY_AND_VALUE, partial(LowRankLinear, num_members=num_members))
        return model
    if kind == PLAIN_NORMS:
        model = get_peft_model(base, SigmaNormConfig(num_members=num_members))
        for layer in model.modules():
            if isinstance(layer, SigmaNormLayer):
                layer.requires_grad_(False)
                layer.base_layer.requires_grad_(True)
                layer.forward = layer.base_layer.forward
        return model
    point = KINDS[kind].branch_point(shape.layers, num_members)
    late = {} if point.prefix is None else {"branch_layer": point.layer, "prefix": point.prefix}
    return get_peft_model(base, SigmaNormConfig(num_members=num_members, **late))


class Contender:
    """A kind of model with a batch, an optimizer, and what is timed.

    Args:
        kind: Name of a kind.
        shape: Shape of the backbone and the batch.
        base: The backbone.
        num_members: Number of members M.
        device: Where it runs.
        is_bf16: Whether it computes in bf16 (autocast) and not in fp32.
    """

    def __init__(
        self,
        kind: str,
        shape: Shape,
        base: PreTrainedModel,
        num_members: int,
        device: str = "cpu",
        is_bf16: bool = False,
    ):
        count = num_members if kind == SEPARATE else 1
        self.models = [make_model(kind, shape, base, num_members).to(device) for _ in range(count)]
        # R acts on the members' gates, which the others do not have.
        self.has_regularizer = kind not in (SINGLE, SEPARATE, LORA, PLAIN_NORMS) and num_members > 1
        self.autocast = partial(torch.autocast, device, torch.bfloat16, enabled=is_bf16)
        self.inputs = {name: tensor.to(device) for name, tensor in shape.make_batch().items()}
        self.labels = self.inputs.pop("labels")
        self.features: dict[str, torch.Tensor] = {}
        if kind in KINDS and KINDS[kind].is_cached:
            with torch.no_grad(), self.autocast():
                self.features = {PREFIX_FEATURES: take_prefix(base_model_of(self.models[0]), **self.inputs)}
        self.optimizers = [
            torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-4)
            for model in self.models
        ]

    def switch(self, is_training: bool) -> None:
        """Put the models into training or evaluation mode."""
        for model in self.models:
            model.train(is_training)

    def train(self, num_examples: int | None = None) -> None:
        """Run one training step: task loss and, as `SigmaNEnsTrainer` does, lambda times the regulariser.

        Args:
            num_examples: Take only the first of the batch.
        """
        inputs = {name: tensor[:num_examples] for name, tensor in {**self.inputs, **self.features}.items()}
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            self.loss(model, inputs, self.labels[:num_examples]).backward()
            optimizer.step()
            optimizer.zero_grad()

    def loss(self, model: nn.Module, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of a training step, a scalar."""
        with self.autocast():
            output = model(**inputs)
        logits = output[MEMBER_LOGITS].flatten(0, 1) if MEMBER_LOGITS in output else output.logits
        loss = task_loss(logits, labels.repeat_interleave(len(logits) // len(labels)), SINGLE_LABEL)
        if self.has_regularizer:
            regularizer = diversity_regularizer(base_model_of(model), DEFAULT_DIVERSITY_TEMPERATURE)
            loss = loss + SigmaNEnsTrainingArguments.diversity_weight * regularizer
        return loss

    @torch.no_grad()
    def infer(self) -> None:
        """Predict one batch."""
        for model in self.models:
            with self.autocast():
                model(**self.inputs)


def storage(
    kind: str, shape: Shape, base: PreTrainedModel, num_members: int, clock: Callable[[], float]
) -> tuple[int, float]:
    """Return the bytes of what is saved of a contender, and the seconds that loading it over its backbone takes.

    Args:
        kind: Name of a kind.
        shape: Shape of the backbone.
        base: The backbone.
        num_members: Number of members M.
        clock: Tells the time.
    """
    model = make_model(kind, shape, base, num_members)
    with tempfile.TemporaryDirectory() as folder:
        if kind == LORA:  # no method of peft's, which could save it
            trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
            save_file(trained, Path(folder, "members.safetensors"))
        else:
            model.save_pretrained(folder)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        del model
        seconds, count = 0.0, num_members if kind == SEPARATE else 1
        for _ in range(count):
            fresh = copy.deepcopy(base)
            started = clock()
            if kind == LORA:
                members = make_model(kind, shape, fresh, num_members)
                members.load_state_dict(load_file(Path(folder, "members.safetensors")), strict=False)
            else:
                PeftModel.from_pretrained(fresh, folder)
            seconds += clock() - started
    return count * size, seconds
