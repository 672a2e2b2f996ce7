"""Heads: which projections each architecture's head has, and the projection that every member has of its own."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from .config import WHOLE_HEAD, SigmaNormConfig
from .forward_pass import current_members, split_rows
from .labels import LabelSet
from .layer import MemberLayer, select_members


@dataclass(frozen=True)
class HeadLayout:
    """The linear projections of an architecture's head.

    Attributes:
        last: Name of the projection onto the classes.
        before: Names of the projections in front of it, in forward order.
    """

    last: str
    before: tuple[str, ...] = ()

    @property
    def projections(self) -> tuple[str, ...]:
        """All projections in forward order."""
        return (*self.before, self.last)


# An architecture is supported if it stands here: its head is known and the tests cover it.
HEAD_LAYOUTS = {
    "BertForSequenceClassification": HeadLayout("classifier"),
    "RobertaForSequenceClassification": HeadLayout("classifier.out_proj", ("classifier.dense",)),
    "DistilBertForSequenceClassification": HeadLayout("classifier", ("pre_classifier",)),
    "ViTForImageClassification": HeadLayout("classifier"),
    "Dinov2ForImageClassification": HeadLayout("classifier"),
}


@dataclass(frozen=True)
class HeadPlan:
    """What becomes of a head's projections.

    Attributes:
        layout: The head's layout.
        member: Projections that every member has of its own.
        shared: Projections that are trained as one copy.
    """

    layout: HeadLayout
    member: tuple[str, ...]
    shared: tuple[str, ...]


def plan_head(model: PreTrainedModel, config: SigmaNormConfig) -> HeadPlan:
    """Decide which projections of the head are member-owned and which are shared.

    Projections that are not replicated are trained as one shared copy, unless the head came with the checkpoint
    (`head_init="copy"`): then they stay as they came.

    Args:
        model: The base model.
        config: The adapter's config.

    Raises:
        ValueError: The architecture is not supported, or `member_heads` names no projection of its head.
    """
    architecture = type(model).__name__
    layout = HEAD_LAYOUTS.get(architecture)
    if layout is None:
        raise ValueError(
            f"{architecture} is not supported; supported are {', '.join(HEAD_LAYOUTS)}. A bare encoder is loaded with "
            "a head through AutoModelForSequenceClassification or AutoModelForImageClassification, or by "
            "`ensemble_from_pretrained`."
        )
    if config.member_heads is None:
        member = (layout.last,)
    elif config.member_heads == WHOLE_HEAD:
        member = layout.projections
    else:
        unknown = [name for name in config.member_heads if name not in layout.projections]
        if unknown:
            raise ValueError(
                f"member_heads names {unknown}, but the projections of {architecture}'s head are "
                f"{list(layout.projections)}."
            )
        member = tuple(name for name in layout.projections if name in config.member_heads)
    rest = tuple(name for name in layout.projections if name not in member)
    return HeadPlan(layout, member, () if config.head_init == "copy" else rest)


def size_shared_head(model: PreTrainedModel, plan: HeadPlan, labels: LabelSet) -> None:
    """Give a shared last projection as many outputs as the adapter has labels, freshly initialised.

    Args:
        model: The base model.
        plan: Its head plan.
        labels: The adapter's labels.
    """
    head = model.get_submodule(plan.layout.last)
    if plan.layout.last in plan.member or not isinstance(head, nn.Linear):
        return
    if head.out_features != labels.num_labels:
        model.set_submodule(plan.layout.last, fresh_linear(model, head, labels.num_labels))


def fresh_linear(model: PreTrainedModel, like: nn.Linear, out_features: int) -> nn.Linear:
    """Return a projection initialised as its model initialises new ones.

    Args:
        model: The base model.
        like: The projection that it replaces: same inputs, same bias or none, same device and dtype.
        out_features: Its number of outputs.
    """
    weight = like.weight
    linear = nn.Linear(
        like.in_features, out_features, bias=like.bias is not None, device=weight.device, dtype=weight.dtype
    )
    model._init_weights(linear)
    return linear


class MemberHead(MemberLayer):
    """A linear projection of which every member has its own.

    Args:
        base_layer: The projection of the base model.
    """

    adapter_layer_names = ("sigma_norm_head_weight", "sigma_norm_head_bias")

    def update_layer(
        self, adapter_name: str, config: SigmaNormConfig, model: PreTrainedModel, out_features: int
    ) -> None:
        """Add the weights (M, C, D) and biases (M, C) of one adapter.

        Args:
            adapter_name: The adapter.
            config: Its config.
            model: The base model, whose initialiser draws fresh heads.
            out_features: Number of outputs C.

        Raises:
            ValueError: A head of another size is to be copied.
        """
        base = self.base_layer
        if config.head_init == "copy" and base.out_features == out_features:
            linears = [base] * config.num_members
        elif config.head_init == "copy" and not config.is_resolved:
            raise ValueError(
                f"A head with {base.out_features} outputs cannot be copied into one with {out_features}; use "
                "head_init='fresh'."
            )
        else:
            linears = [fresh_linear(model, base, out_features) for _ in range(config.num_members)]
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
    def set_member(self, adapter_name: str, member: int) -> None:
        """Write one member into the base projection, which takes on the adapter's number of outputs."""
        weight = self.sigma_norm_head_weight[adapter_name][member]
        base = self.base_layer
        base.out_features = weight.shape[0]
        base.weight = nn.Parameter(weight.to(base.weight.dtype, copy=True), requires_grad=False)
        if base.bias is not None:
            bias = self.sigma_norm_head_bias[adapter_name][member]
            base.bias = nn.Parameter(bias.to(base.bias.dtype, copy=True), requires_grad=False)
