"""What a norm computes: only one whose formula is known can be given gates."""

import copy
import inspect
import re
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

_TOLERANCE = 1e-4


@dataclass(frozen=True)
class NormFormula:
    """How a norm computes x^, the normalised input that its weight multiplies.

    Attributes:
        subtracts_mean: Whether x^ has mean 0 and variance 1 (layer norm); otherwise its mean square is 1 (RMS norm).
        eps: Added to the variance or mean square.
        channels_first: Whether the features are dimension 1, as in convolutional backbones, and not the last.
    """

    subtracts_mean: bool
    eps: float | None
    channels_first: bool = False

    @classmethod
    def of(cls, norm: nn.Module) -> "NormFormula":
        """Find out what a norm computes.

        A plain `nn.LayerNorm` is known; every other class is tried out with random weights and inputs, since a name
        says little: T5LayerNorm is an RMS norm, and Gemma's multiplies by 1 + w.

        Args:
            norm: A norm of a base model, on any device, "meta" included.

        Raises:
            ValueError: Its formula is none of those known here; the message is the end of a sentence about it.
        """
        kind = type(norm).__name__
        if norm.weight.dim() != 1:
            raise ValueError(f"a {kind}, acts on more than one dimension")
        if "forward" in vars(norm) and not hasattr(norm, "_hf_hook"):  # accelerate's hooks change no values
            raise ValueError(f"a {kind}, has a forward of its own in place of its class's")
        eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
        if type(norm) is nn.LayerNorm:
            return cls(True, eps)
        if eps is None and not isinstance(norm, nn.RMSNorm):
            raise ValueError(f"a {kind}, does not tell its eps")
        parameters = list(inspect.signature(norm.forward).parameters.values())
        if sum(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters) != 1:
            raise ValueError(f"a {kind}, is fused with other operations: it takes more than its input")
        for channels_first in (False, True):
            for subtracts_mean in (True, False) if eps is not None else (False,):
                formula = cls(subtracts_mean, eps, channels_first)
                if formula._agrees_with(norm):
                    return formula
                if formula._agrees_with(norm, offset=1):
                    raise ValueError(f"a {kind}, multiplies by 1 + weight, a form whose gates are not supported")
        raise ValueError(f"a {kind}, computes neither a layer norm nor an RMS norm")

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Normalise, scale and shift.

        Args:
            x: (N, ..., D), or (N, D, ...) with `channels_first`.
            weight: (D,).
            bias: (D,), or None.
        """
        if self.channels_first:
            x = x.movedim(1, -1)
        if self.subtracts_mean:
            x = functional.layer_norm(x, weight.shape, weight, bias, self.eps)
        else:
            x = functional.rms_norm(x, weight.shape, weight, self.eps)
            x = x if bias is None else x + bias
        return x.movedim(-1, 1) if self.channels_first else x

    @torch.no_grad()
    def _agrees_with(self, norm: nn.Module, offset: float = 0) -> bool:
        generator = torch.Generator().manual_seed(0)
        twin = copy.deepcopy(norm).to_empty(device="cpu").float()
        for parameter in twin.parameters():
            parameter.uniform_(0.5, 1.5, generator=generator)
        size = twin.weight.shape[0]
        x = torch.randn((3, size, 2, 1) if self.channels_first else (3, 2, size), generator=generator)
        x[0] = x[0] * 1e-3 + 1e-3  # small enough for eps to count, and with a mean
        x[1] *= 100
        try:
            actual = type(twin).forward(twin, x.clone())
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False  # the layout of the dimensions is another one
        bias = getattr(twin, "bias", None)
        return torch.allclose(actual, self(x, twin.weight + offset, bias), rtol=_TOLERANCE, atol=_TOLERANCE)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a layer norm or RMS norm with a weight, by its class: names of modules say nothing.

    Args:
        module: A module of a base model.
    """
    by_class = isinstance(module, nn.LayerNorm) or re.search(r"(Layer|RMS)Norm$", type(module).__name__)
    return bool(by_class) and isinstance(getattr(module, "weight", None), torch.Tensor)
