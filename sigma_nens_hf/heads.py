"""Heads: which projections each architecture's head has, and the projection that every member has of its own."""

from dataclasses import dataclass

import torch
from peft.utils import AuxiliaryTrainingWrapper
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

    Projections that are not replicated are trained as one shared copy. If the head came with the checkpoint
    (`head_init="copy"`), that holds for the last one only, and those before it stay as they came.

    Args:
        model: The base model.
        config: The adapter's config.

    Raises:
        ValueError: The architecture is not supported; `member_heads` names no projection of its head; a head is to be
            copied into one of another size; or another adapter on the model has the head in another form.
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
    if config.head_init == "copy":
        # peft finds shared modules by the end of their name, so DistilBERT's pre_classifier goes with its classifier.
        rest = tuple(name for name in rest if layout.last in rest and name.endswith(layout.last))
    plan = HeadPlan(layout, member, rest)
    _check_copy(model, config, plan)
    _check_other_adapters(model, config, plan)
    return plan


def _check_copy(model: PreTrainedModel, config: SigmaNormConfig, plan: HeadPlan) -> None:
    """Refuse to copy a head into one of another size; a saved adapter brings its own weights and copies nothing."""
    head = model.get_submodule(plan.layout.last)
    wanted, copies = config.num_labels, config.head_init == "copy" and not config.is_resolved
    if copies and isinstance(head, nn.Linear) and wanted not in (None, head.out_features):
        raise ValueError(
            f"A head with {head.out_features} outputs cannot be copied into one with {wanted}; use head_init='fresh'."
        )


def _check_other_adapters(model: PreTrainedModel, config: SigmaNormConfig, plan: HeadPlan) -> None:
    """Refuse a head that another adapter on the same model holds in another form."""
    modules = {name: model.get_submodule(name) for name in plan.layout.projections}
    as_member = {name for name, module in modules.items() if isinstance(module, MemberLayer)}
    as_shared = {name for name, module in modules.items() if isinstance(module, AuxiliaryTrainingWrapper)}
    clash = sorted(as_member & set(plan.shared) | as_shared & set(plan.member))
    if clash:
        raise ValueError(
            f"Another adapter on this model has {clash} in another form (one shared copy here, one for each member "
            "there, or the reverse). Give both the same member_heads, or load them over models of their own."
        )
    shared_head = modules[plan.layout.last]
    if isinstance(shared_head, AuxiliaryTrainingWrapper):
        outputs = shared_head.original_module.out_features
        if config.num_labels not in (None, outputs):
            raise ValueError(
                f"Another adapter on this model has a shared head with {outputs} outputs, this one needs "
                f"{config.num_labels}. Load them over models of their own."
            )


def size_shared_head(model: PreTrainedModel, plan: HeadPlan, labels: LabelSet) -> nn.Linear | None:
    """Give a shared last projection as many outputs as the adapter has labels, freshly initialised.

    Args:
        model: The base model.
        plan: Its head plan.
        labels: The adapter's labels.

    Returns:
        The projection that was replaced, None where the size was right.
    """
    head = model.get_submodule(plan.layout.last)
    is_shared = plan.layout.last not in plan.member and isinstance(head, nn.Linear)
    if not is_shared or head.out_features == labels.num_labels:
        return None
    model.set_submodule(plan.layout.last, fresh_linear(model, head, labels.num_labels))
    return head


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

        """
        base = self.base_layer
        if config.head_init == "copy" and base.out_features == out_features:
            linears = [base] * config.num_members
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
