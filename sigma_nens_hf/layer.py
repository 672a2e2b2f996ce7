"""The layer of the method: a normalisation whose gates and biases every member has of its own."""

import math
from abc import abstractmethod
from enum import Enum

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from .config import SigmaNormConfig
from .forward_pass import current_members, split_rows
from .member_norm import member_norm
from .norm_formulas import NormFormula


class NormRole(Enum):
    """Whose the parameters of a norm are: each member's, of one copy that is trained, or of one that is frozen."""

    MEMBERS = "members"
    SHARED = "shared"
    FROZEN = "frozen"


class MemberLayer(nn.Module, BaseTunerLayer):
    """A layer of the base model in which every member has parameters of its own.

    The parameters of an adapter are stacked, (M, ...) each, and always fp32: gates are tuned in steps that a 16-bit
    base's precision would swallow.
    """

    def __init__(self, base_layer: nn.Module):
        super().__init__()
        self.base_layer = base_layer
        self._disable_adapters = False
        self.merged_adapters = []
        for name in self.adapter_layer_names:
            setattr(self, name, nn.ParameterDict())

    @property
    def member_adapter(self) -> str | None:
        """Name of the active adapter, None where this layer behaves as its base layer."""
        if self.disable_adapters:
            return None
        parameters = getattr(self, self.adapter_layer_names[0])
        return next((name for name in self.active_adapters if name in parameters), None)

    def add_parameters(self, adapter_name: str, config: SigmaNormConfig, **stacked: torch.Tensor | None) -> None:
        """Give the layer the parameters of one adapter.

        Args:
            adapter_name: The adapter.
            config: Its config.
            **stacked: Start values (M, ...) by the name of their parameter dict; None for one that is not wanted.
        """
        for name, value in stacked.items():
            if value is not None:
                getattr(self, name)[adapter_name] = nn.Parameter(value.float())
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move the parameters, but leave them in fp32; peft's own version rounds them to the base's dtype."""
        device = device or self.base_layer.weight.device
        for name in self.adapter_layer_names:
            parameters = getattr(self, name)
            if adapter_name in parameters and parameters[adapter_name].device.type != "meta":
                parameters[adapter_name].data = parameters[adapter_name].data.to(device, torch.float32)

    @abstractmethod
    def set_members(self, adapter_name: str, members: tuple[int, ...]) -> None:
        """Write the mean of some members' parameters into the base layer; of one, that is its plain layer."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse peft's merge, which has no place for M members.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "An ensemble of members cannot be merged into one set of weights. Take one member out with "
            "`model.merge_and_unload(member=k)` or `extract_member(model, k)`."
        )


def select_members(stacked: torch.Tensor, members: tuple[int, ...]) -> torch.Tensor:
    """Return the rows of some members, without a copy where all take part in order.

    Args:
        stacked: (M, ...).
        members: Indices of the members wanted, in order.
    """
    if members == tuple(range(stacked.shape[0])):
        return stacked
    return stacked[list(members)]


class SigmaNormLayer(MemberLayer):
    r"""A norm with sigmoid-scaled gains, one set of gates and biases per member.

    $$\mathrm{sigmaNorm}_m(x) = \sigma(g_m) \cdot s \cdot \hat x + b_m, \qquad s = w / \sigma(g_0)$$

    with x^ the input normalised to mean 0 and variance 1 (an RMS norm's to mean square 1), w the pretrained weight and
    g0 = `init_scaler`. At g_m = g0 and b_m = the pretrained bias a member is the pretrained norm, for a w of any sign
    and size.

    With a `gate_depth` a and, where `train_scale` says so, a factor r that all members share and that starts at 1,

    $$\mathrm{gain}_m = \left(1 - a + a\,\frac{\sigma(g_m)}{\sigma(g_0)}\right) r\, w$$

    which is the above at a = 1 and r = 1.

    Source: sigma-N-Ens (arXiv 2607.23860); its parents are sigma-BN (arXiv 2204.06404) and TS-sigma-BN
    (arXiv 2512.20420). The signed reconstruction scale s is this package's own: the paper's conversion is reported to
    ask for positive w. So are the depth of the gates and the trained factor.

    Args:
        base_layer: The pretrained norm, of a kind whose `NormFormula` is known.

    Raises:
        ValueError: It is not.
    """

    adapter_layer_names = ("sigma_norm_scaler", "sigma_norm_bias", "sigma_norm_scale")
    other_param_names = ("init_scaler", "gate_depth", "role")

    def __init__(self, base_layer: nn.Module):
        super().__init__(base_layer)
        self.formula = NormFormula.of(base_layer)
        self.init_scaler: dict[str, float] = {}
        self.gate_depth: dict[str, float] = {}
        self.role: dict[str, NormRole] = {}

    @property
    def base_bias(self) -> torch.Tensor | None:
        """The pretrained bias (D,), None where the norm has none."""
        return getattr(self.base_layer, "bias", None)

    def update_layer(self, adapter_name: str, config: SigmaNormConfig, role: NormRole = NormRole.MEMBERS) -> None:
        """Add the scalers and biases of one adapter, (M, D), or (1, D) for a copy that members share.

        Args:
            adapter_name: The adapter.
            config: Its config.
            role: Whose they are. A shared copy starts as the pretrained norm, without noise; its gate, which has full
                depth, is its scale as well.
        """
        is_shared = role is not NormRole.MEMBERS
        num_members, size = 1 if is_shared else config.num_members, self.base_layer.weight.shape[0]
        device = self.base_layer.weight.device
        noise = torch.zeros(1, size, device=device)
        if not is_shared:
            noise = torch.randn(num_members, size, device=device) * config.init_scaler_std
        bias = None
        if config.member_bias and self.base_bias is not None:
            bias = self.base_bias.detach().float().repeat(num_members, 1)
        scale = torch.ones(1, size, device=device) if config.train_scale and not is_shared else None
        self.init_scaler[adapter_name] = config.init_scaler
        self.gate_depth[adapter_name] = 1.0 if is_shared else config.gate_depth
        self.role[adapter_name] = role
        self.add_parameters(
            adapter_name,
            config,
            sigma_norm_scaler=config.init_scaler + noise,
            sigma_norm_bias=bias,
            sigma_norm_scale=scale,
        )

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Make adapters the active ones, and trainable but for copies that are frozen; see peft."""
        super().set_adapter(adapter_names, inference_mode=inference_mode)
        for adapter_name, role in self.role.items():
            if role is NormRole.FROZEN:
                self.freeze(adapter_name)

    def freeze(self, adapter_name: str) -> None:
        """Train the shared copy of an adapter no further.

        Args:
            adapter_name: The adapter.
        """
        self.role[adapter_name] = NormRole.FROZEN
        for name in self.adapter_layer_names:
            if adapter_name in getattr(self, name):
                getattr(self, name)[adapter_name].requires_grad_(False)

    def carries_members(self, adapter_name: str) -> bool:
        """Whether each member of an adapter has gates of its own here."""
        return self.role[adapter_name] is NormRole.MEMBERS

    def gates(self, adapter_name: str) -> torch.Tensor:
        """Return sigmoid(g), (M, D) or (1, D) for a shared copy, fp32, each in (0, 1)."""
        return self.sigma_norm_scaler[adapter_name].float().sigmoid()

    def affine(self, adapter_name: str, members: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gain and the bias of some members.

        Args:
            adapter_name: The adapter.
            members: The members wanted, K of them.

        Returns:
            The gain in fp32, (K, D) or (1, D) for a shared copy, and the bias: (K, D) where members have their own,
            (1, D) where they share the copy's or the base norm's, None where there is none.
        """
        if not self.carries_members(adapter_name):
            members = (0,)
        weight, depth = self.base_layer.weight.float(), self.gate_depth[adapter_name]
        if adapter_name in self.sigma_norm_scale:
            weight = weight * self.sigma_norm_scale[adapter_name]
        scale = weight * (depth * (1 + math.exp(-self.init_scaler[adapter_name])))  # depth * w / sigmoid(g0)
        gain = select_members(self.gates(adapter_name), members) * scale
        if depth < 1:
            gain = gain + (1 - depth) * weight
        if adapter_name in self.sigma_norm_bias:
            return gain, select_members(self.sigma_norm_bias[adapter_name], members)
        return gain, None if self.base_bias is None else self.base_bias[None]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the M * B rows, each with the gain and bias of its member, or all with those of a shared copy.

        Args:
            hidden_states: (M * B, ..., D), or (M * B, D, ...) where the norm's features come first; of a shared copy
                any number of rows.

        Raises:
            RuntimeError: The layer is called outside a forward pass of its whole model.
        """
        adapter_name = self.member_adapter
        if adapter_name is None:
            return self.base_layer(hidden_states)
        members = current_members()
        gain, bias = self.affine(adapter_name, members)
        gain = gain.to(hidden_states.dtype)
        if bias is not None:
            bias = bias.to(hidden_states.dtype).expand_as(gain)
        return member_norm(self.formula, split_rows(hidden_states, len(gain)), gain, bias)

    @torch.no_grad()
    def set_members(self, adapter_name: str, members: tuple[int, ...]) -> None:
        """Write the mean of some members' gains and biases into the base norm."""
        gain, bias = self.affine(adapter_name, members)
        self.base_layer.weight.copy_(gain.mean(0))
        if bias is not None:
            self.base_bias.copy_(bias.mean(0))
