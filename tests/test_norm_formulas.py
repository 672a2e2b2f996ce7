import pytest
import torch
from torch import nn
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from sigma_nens_hf.norm_formulas import NormFormula, is_norm

SIZE = 7


class ExtraArgument(nn.LayerNorm):
    def forward(self, x, residual):
        return super().forward(x + residual)


class OtherLayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.eps = 1e-6

    def forward(self, x):
        return self.weight * x / x.abs().amax(-1, keepdim=True)


NORMS = {
    "layer norm": (nn.LayerNorm(SIZE, eps=1e-3), NormFormula(True, 1e-3)),
    "without bias": (nn.LayerNorm(SIZE, bias=False), NormFormula(True, 1e-5)),
    "DeBERTa": (DebertaLayerNorm(SIZE, 1e-7), NormFormula(True, 1e-7)),
    "RMS norm": (nn.RMSNorm(SIZE, eps=1e-6), NormFormula(False, 1e-6)),
    "RMS norm without eps": (nn.RMSNorm(SIZE), NormFormula(False, None)),
    "Llama": (LlamaRMSNorm(SIZE, eps=1e-5), NormFormula(False, 1e-5)),
    "T5": (T5LayerNorm(SIZE, eps=1e-4), NormFormula(False, 1e-4)),
    "channels last": (ConvNextLayerNorm(SIZE), NormFormula(True, 1e-6)),
    "channels first": (ConvNextLayerNorm(SIZE, data_format="channels_first"), NormFormula(True, 1e-6, True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NORMS)
def test_formula_is_found_and_computes_what_the_norm_does(kind, dtype):
    norm, expected = NORMS[kind]
    norm = norm.to(dtype)
    random_state = torch.get_rng_state()
    formula = NormFormula.of(norm)
    assert torch.equal(torch.get_rng_state(), random_state)  # the trial disturbs nobody's random numbers
    assert formula == expected
    assert is_norm(norm)
    weight, bias = torch.randn(SIZE).to(dtype), torch.randn(SIZE).to(dtype)
    bias = bias if getattr(norm, "bias", None) is not None else None
    with torch.no_grad():
        norm.weight.copy_(weight)
        if bias is not None:
            norm.bias.copy_(bias)
    x = torch.randn((2, SIZE, 3, 4) if formula.channels_first else (2, 5, SIZE)).to(dtype) * 0.01
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(formula(x, weight, bias), norm(x), rtol=tolerance, atol=tolerance)


def test_norm_without_data_is_known_by_its_class():
    with torch.device("meta"):
        norm = LlamaRMSNorm(SIZE)
    assert NormFormula.of(norm) == NormFormula(False, 1e-6)


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (GemmaRMSNorm(SIZE), r"a GemmaRMSNorm, multiplies by 1 \+ weight"),
        (Zamba2RMSNormGated(SIZE, SIZE), "a Zamba2RMSNormGated, is fused with other operations"),
        (ExtraArgument(SIZE), "is fused with other operations: it takes more than its input"),
        (nn.LayerNorm((3, SIZE)), "acts on more than one dimension"),
        (OtherLayerNorm(), "computes neither a layer norm nor an RMS norm"),
    ],
)
def test_other_norms_are_refused_with_their_reason(norm, message):
    with pytest.raises(ValueError, match=message):
        NormFormula.of(norm)


def test_forward_put_on_a_single_norm_is_refused():
    norm = nn.LayerNorm(SIZE)
    norm.forward = lambda x: x * 2
    with pytest.raises(ValueError, match="a forward of its own in place of its class's"):
        NormFormula.of(norm)


class Clamped(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.clamp(-5, 5))


def test_norm_that_clamps_is_refused():
    with pytest.raises(ValueError, match="computes neither"):
        NormFormula.of(Clamped(SIZE))


def test_norm_that_hides_its_eps_is_refused():
    norm = OtherLayerNorm()
    del norm.eps
    with pytest.raises(ValueError, match="does not tell its eps"):
        NormFormula.of(norm)


@pytest.mark.parametrize(
    "module", [nn.BatchNorm1d(SIZE), nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE, elementwise_affine=False)]
)
def test_other_modules_are_no_norms(module):
    assert not is_norm(module)
