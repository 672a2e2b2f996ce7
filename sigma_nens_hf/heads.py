"""Heads: what becomes of their projections, and the projection that every member has of its own."""

import copy
from contextlib import suppress
from dataclasses import dataclass

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from .architectures import Architecture, architecture_of, task_of_class
from .config import WHOLE_HEAD, SigmaNormConfig
from .forward_pass import current_members, split_rows
from .layer import MemberLayer, select_members


@dataclass(frozen=True)
class HeadPlan:
    """What becomes of a head's projections.

    Attributes:
        architecture: The model's architecture.
        member: Projections that every member has of its own.
        shared: Projections that are trained as one copy.
    """

    architecture: Architecture
    member: tuple[str, ...]
    shared: tuple[str, ...]


def plan_head(model: PreTrainedModel, config: SigmaNormConfig) -> HeadPlan:
    """Decide which projections of the head are member-owned and which are shared.

    Projections that are not replicated are trained as one shared copy. If the head came with the checkpoint
    (`head_init="copy"`), that holds for the last one only, and those before it stay as they came.

    Args:
        model: The base model.
        config: The adapter's config.

    Raises:
        ValueError: The architecture is not supported; its head has no outputs, or none by label though `num_labels` is
            given; `member_heads` names no projection of its head; a head is to be copied into one of another size; or
            another adapter on the model has the head in another form.
    """
    architecture, name = architecture_of(model), type(model).__name__
    if config.num_labels is not None and not has_output_per_label(model):
        raise ValueError(f"{name} scores any number of choices, and they have no names; leave num_labels out.")
    for output in architecture.outputs:
        if isinstance(model.get_submodule(output), nn.Identity):
            raise ValueError(f"The head of this {name} projects onto no classes; load the model with num_labels.")
    # ELECTRA's config can switch its projection off.
    projections = [p for p in architecture.projections if not isinstance(model.get_submodule(p), nn.Identity)]
    if config.member_heads is None:
        member = architecture.outputs
    elif config.member_heads == WHOLE_HEAD:
        member = tuple(projections)
    else:
        unknown = [wanted for wanted in config.member_heads if wanted not in projections]
        if unknown:
            raise ValueError(f"member_heads names {unknown}, but the projections of {name}'s head are {projections}.")
        member = tuple(projection for projection in projections if projection in config.member_heads)
    rest = tuple(projection for projection in projections if projection not in member)
    if config.head_init == "copy":
        # peft finds shared modules by the end of their name, so DistilBERT's pre_classifier goes with its classifier.
        outputs = tuple(output for output in architecture.outputs if output in rest)
        rest = tuple(projection for projection in rest if projection.endswith(outputs))
    plan = HeadPlan(architecture, member, rest)
    _check_copy(model, config, plan)
    _check_other_adapters(model, config, plan)
    return plan


def _check_copy(model: PreTrainedModel, config: SigmaNormConfig, plan: HeadPlan) -> None:
    """Refuse to copy a head into one of another size; a saved adapter brings its own weights and copies nothing."""
    if config.head_init != "copy" or config.is_resolved or not has_output_per_label(model):
        return
    for output in plan.architecture.outputs:
        head, wanted = model.get_submodule(output), config.num_labels or model.config.num_labels
        if isinstance(head, nn.Linear) and wanted != head.out_features:
            raise ValueError(
                f"A head with {head.out_features} outputs cannot be copied into one with {wanted}; use "
                "head_init='fresh'."
            )


def _check_other_adapters(model: PreTrainedModel, config: SigmaNormConfig, plan: HeadPlan) -> None:
    """Refuse a head that another adapter on the same model holds in another form."""
    modules = {name: model.get_submodule(name) for name in plan.architecture.projections}
    as_member = {name for name, module in modules.items() if isinstance(module, MemberLayer)}
    as_shared = {name for name, module in modules.items() if isinstance(module, AuxiliaryTrainingWrapper)}
    clash = sorted(as_member & set(plan.shared) | as_shared & set(plan.member))
    if clash:
        raise ValueError(
            f"Another adapter on this model has {clash} in another form (one shared copy here, one for each member "
            "there, or the reverse). Give both the same member_heads, or load them over models of their own."
        )


def has_output_per_label(model: PreTrainedModel) -> bool:
    """Whether a head has one output for every label; for multiple choice it has a single one, the score of a choice.

    Args:
        model: The base model, of a supported class.
    """
    return task_of_class(type(model).__name__) != "multiple-choice"


def size_shared_heads(model: PreTrainedModel, plan: HeadPlan, adapter_name: str, num_labels: int | None) -> None:
    """Give an adapter's copies of shared last projections as many outputs as it has labels, freshly initialised.

    Args:
        model: The base model, with the adapter on it.
        plan: Its head plan.
        adapter_name: The adapter.
        num_labels: Its number of labels; None for multiple choice, whose head always has one output.
    """
    for output in plan.architecture.outputs:
        wrapper = model.get_submodule(output)
        if num_labels is None or not isinstance(wrapper, AuxiliaryTrainingWrapper):
            continue
        trained = wrapper.modules_to_save[adapter_name]
        if trained.out_features != num_labels:
            fresh = fresh_linear(model, output, wrapper.original_module, num_labels)
            wrapper.modules_to_save[adapter_name] = fresh.requires_grad_(trained.weight.requires_grad)


def fresh_linear(model: PreTrainedModel, name: str, like: nn.Linear, out_features: int) -> nn.Linear:
    """Return a projection initialised as its model initialises new ones.

    Args:
        model: The base model.
        name: Full name of the projection.
        like: The projection that it replaces: same inputs, same bias or none, same device and dtype.
        out_features: Its number of outputs.
    """
    weight = like.weight
    linear = nn.Linear(
        like.in_features, out_features, bias=like.bias is not None, device=weight.device, dtype=weight.dtype
    )
    model._init_weights(linear)
    # ModernBERT, CLIP and SigLIP scale their classifier by a rule of the whole model. A model with nothing else in it
    # shows that rule and keeps it from everything else.
    shell = copy.copy(model)
    shell._modules = {name: linear}
    with suppress(AttributeError):
        shell._init_weights(shell)
    return linear


class MemberHead(MemberLayer):
    """A linear projection of which every member has its own.

    Args:
        base_layer: The projection of the base model.
    """

    adapter_layer_names = ("sigma_norm_head_weight", "sigma_norm_head_bias")

    def update_layer(
        self, adapter_name: str, config: SigmaNormConfig, model: PreTrainedModel, name: str, out_features: int
    ) -> None:
        """Add the weights (M, C, D) and biases (M, C) of one adapter.

        Args:
            adapter_name: The adapter.
            config: Its config.
            model: The base model, whose initialiser draws fresh heads.
            name: Full name of the projection in it.
            out_features: Number of outputs C.
        """
        base = self.base_layer
        if config.head_init == "copy" and base.out_features == out_features:
            linears = [base] * config.num_members
        else:
            linears = [fresh_linear(model, name, base, out_features) for _ in range(config.num_members)]
        self.add_parameters(
            adapter_name,
            config,
            sigma_norm_head_weight=torch.stack([linear.weight.detach() for linear in linears]),
            sigma_norm_head_bias=(
                None if base.bias is None else torch.stack([linear.bias.detach() for linear in linears])
            ),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Project (M * B, ..., D) rows onto (M * B, ..., C), each by its member's head.

        Raises:
            RuntimeError: The layer is called outside a forward pass of its whole model.
        """
        adapter_name = self.member_adapter
        if adapter_name is None:
            return self.base_layer(features)
        members = current_members()
        weight = select_members(self.sigma_norm_head_weight[adapter_name], members).to(features.dtype)
        rows = split_rows(features, len(members)).flatten(1, -2)
        projected = rows @ weight.transpose(1, 2)
        if adapter_name in self.sigma_norm_head_bias:
            bias = select_members(self.sigma_norm_head_bias[adapter_name], members)
            projected = projected + bias[:, None].to(projected.dtype)
        return projected.reshape(*features.shape[:-1], -1)

    @torch.no_grad()
    def set_members(self, adapter_name: str, members: tuple[int, ...]) -> None:
        """Write the mean of some members into the base projection, which takes on the adapter's number of outputs."""
        weight = self.sigma_norm_head_weight[adapter_name][list(members)].mean(0)
        base = self.base_layer
        base.out_features = weight.shape[0]
        base.weight = nn.Parameter(weight.to(base.weight.dtype), requires_grad=False)
        if base.bias is not None:
            bias = self.sigma_norm_head_bias[adapter_name][list(members)].mean(0)
            base.bias = nn.Parameter(bias.to(base.bias.dtype), requires_grad=False)
