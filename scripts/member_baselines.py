"""Other ways to give every member of a batch parameters of its own: what sigma norms are compared with.

Both replace the linear layers of a backbone whose norms stay frozen. Members are put into the batch and taken out again
by the same hooks as for sigma norms, and have heads of their own in the same way.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from sigma_nens_hf import SigmaNormLayer
from sigma_nens_hf.forward_pass import current_members, split_rows


class MemberLinear(nn.Module, ABC):
    """A linear layer that every member computes in its own way.

    Args:
        base_layer: The pretrained layer, (in) to (out), which stays frozen.
    """

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute (K * B, ..., out) from the rows of K members, (K * B, ..., in)."""
        members = current_members()
        rows = split_rows(hidden_states, len(members))
        return torch.cat([self.of_member(rows[i], member) for i, member in enumerate(members)])

    @abstractmethod
    def of_member(self, hidden_states: torch.Tensor, member: int) -> torch.Tensor:
        """Compute (B, ..., out) for one member."""


class RankOneLinear(MemberLinear):
    r"""A member's weight is the pretrained one times a matrix of rank one.

    $$y = s_m \circ W (r_m \circ x) + b_m$$

    r and s start as 1 plus normal noise, b as the pretrained bias. Source: Y. Wen et al., "BatchEnsemble", 2020
    (arXiv 2002.06715), which trains W as well; here it is frozen, so that all methods share a backbone.

    Args:
        base_layer: The pretrained layer.
        num_members: Number of members M.
        noise: Standard deviation of the noise.
    """

    def __init__(self, base_layer: nn.Linear, num_members: int, noise: float = 0.1):
        super().__init__(base_layer)
        self.input_factor = nn.Parameter(1 + noise * torch.randn(num_members, base_layer.in_features))
        self.output_factor = nn.Parameter(1 + noise * torch.randn(num_members, base_layer.out_features))
        self.member_bias = nn.Parameter(base_layer.bias.detach().float().repeat(num_members, 1))

    def of_member(self, hidden_states: torch.Tensor, member: int) -> torch.Tensor:
        """Compute (B, ..., out) for one member."""
        # Under autocast the fp32 factors would else turn all activations into fp32.
        factor = self.input_factor[member].to(hidden_states.dtype)
        product = functional.linear(hidden_states * factor, self.base_layer.weight)
        return product * self.output_factor[member].to(product.dtype) + self.member_bias[member].to(product.dtype)


class LowRankLinear(MemberLinear):
    r"""A member adds a product of two thin matrices to the pretrained weight.

    $$y = W x + b + \tfrac{\alpha}{r} B_m A_m x$$

    A starts as peft's LoRA does (Kaiming uniform), B at 0. Source: E. Hu et al., "LoRA", 2021 (arXiv 2106.09685); as
    members of one batch in M. Halbheer et al., "LoRA-Ensemble", 2024 (arXiv 2405.14438).

    Args:
        base_layer: The pretrained layer.
        num_members: Number of members M.
        rank: Rank r.
        alpha: Scale.
    """

    def __init__(self, base_layer: nn.Linear, num_members: int, rank: int = 8, alpha: float = 16):
        super().__init__(base_layer)
        bound = base_layer.in_features**-0.5
        self.down = nn.Parameter(torch.empty(num_members, rank, base_layer.in_features).uniform_(-bound, bound))
        self.up = nn.Parameter(torch.zeros(num_members, base_layer.out_features, rank))
        self.scale = alpha / rank

    def of_member(self, hidden_states: torch.Tensor, member: int) -> torch.Tensor:
        """Compute (B, ..., out) for one member."""
        low = functional.linear(hidden_states, self.down[member])
        return self.base_layer(hidden_states) + self.scale * functional.linear(low, self.up[member])


def replace_linear_layers(
    model: nn.Module, pattern: str, make: Callable[[nn.Linear], MemberLinear]
) -> list[nn.Parameter]:
    """Turn a fresh sigma-norm ensemble into one whose members differ in linear layers instead of norms.

    Args:
        model: The ensemble, with `init_scaler_std=0`; its norms are frozen as the pretrained ones.
        pattern: Regular expression that is found in the names of the linear layers to be replaced.
        make: Makes the layer that takes a linear layer's place.

    Returns:
        The parameters of the new layers.

    Raises:
        ValueError: No linear layer has such a name.
    """
    for module in model.modules():
        if isinstance(module, SigmaNormLayer):
            module.requires_grad_(False)
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.search(pattern, name)
    }
    if not layers:
        raise ValueError(f"No linear layer of {type(model).__name__} has a name in which {pattern} is found.")
    parameters = []
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        new = make(layer)
        setattr(model.get_submodule(parent), child, new)
        parameters += [parameter for parameter in new.parameters() if parameter.requires_grad]
    return parameters
