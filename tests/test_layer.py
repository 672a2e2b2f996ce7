import pytest
import torch
from torch import nn

from sigma_nens_hf import SigmaNormConfig, SigmaNormLayer
from sigma_nens_hf.forward_pass import ForwardPass, InForwardPass
from sigma_nens_hf.layer import NormRole

PAPER = {"gate_depth": 1.0, "train_scale": False}


def make_layer(weight, bias=True, **config):
    weight = torch.as_tensor(weight, dtype=torch.float32)
    norm = nn.LayerNorm(len(weight), eps=1e-6, bias=bias)
    norm.weight.data = weight.clone()
    if bias:
        nn.init.normal_(norm.bias)
    layer = SigmaNormLayer(norm)
    layer.update_layer("default", SigmaNormConfig(**config))
    return layer


def call(layer, rows, members):
    return InForwardPass(layer, ForwardPass(0, members, len(rows), True, None))(rows)


def reference(layer, rows, members):
    """The formula of the method, written out in double precision for one member at a time."""
    x = rows.double()
    normalised = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    init_gate = 1 / (1 + torch.exp(torch.tensor(-layer.init_scaler["default"], dtype=torch.float64)))
    scale = layer.base_layer.weight.double() / init_gate
    chunks = []
    for m, chunk in zip(members, normalised.chunk(len(members)), strict=True):
        gate = 1 / (1 + (-layer.sigma_norm_scaler["default"][m].double()).exp())
        gain = (1 - layer.gate_depth["default"]) * init_gate * scale + layer.gate_depth["default"] * gate * scale
        if "default" in layer.sigma_norm_scale:
            gain = gain * layer.sigma_norm_scale["default"][0].double()
        shifted = gain * chunk
        if "default" in layer.sigma_norm_bias:
            shifted = shifted + layer.sigma_norm_bias["default"][m].double()
        elif layer.base_layer.bias is not None:
            shifted = shifted + layer.base_layer.bias.double()
        chunks.append(shifted)
    return torch.cat(chunks)


@pytest.mark.parametrize("form", [{}, PAPER, {"gate_depth": 0.3, "train_scale": False}])
@pytest.mark.parametrize("init_scaler", [0.0, -2.0, 1.5])
@pytest.mark.parametrize("members", [(0, 1, 2), (2,), (1, 0)])
def test_formula(init_scaler, members, form):
    weights = [-1.5, 0.0, 2.5, 1.0, 0.3]
    layer = make_layer(weights, num_members=3, init_scaler=init_scaler, init_scaler_std=1.0, **form)
    nn.init.normal_(layer.sigma_norm_bias["default"])
    if "default" in layer.sigma_norm_scale:
        nn.init.normal_(layer.sigma_norm_scale["default"])
    rows = torch.randn(2 * len(members), 7, 5) * 3 + 1
    torch.testing.assert_close(
        call(layer, rows, members).double(), reference(layer, rows, members), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("form", [{}, PAPER])
@pytest.mark.parametrize("init_scaler", [0.0, -3.0, 4.0])
def test_every_member_starts_as_the_pretrained_norm(init_scaler, form):
    layer = make_layer([-1.5, 0.0, 2.5, 1.0, 0.3], init_scaler=init_scaler, init_scaler_std=0.0, **form)
    rows = torch.randn(8, 7, 5)
    torch.testing.assert_close(call(layer, rows, (0, 1, 2, 3)), layer.base_layer(rows), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("depth", [1.0, 0.3])
def test_gates_of_some_depth_take_no_more_than_that_from_the_pretrained_weight(depth):
    layer = make_layer([-1.5, 0.0, 2.5], init_scaler_std=0.0, gate_depth=depth)
    with torch.no_grad():
        layer.sigma_norm_scaler["default"][0] = 50
        layer.sigma_norm_scaler["default"][1] = -50
    gain, _ = layer.affine("default", (0, 1))
    torch.testing.assert_close(gain[0], (1 + depth) * layer.base_layer.weight)
    torch.testing.assert_close(gain[1], (1 - depth) * layer.base_layer.weight)


def test_a_trained_scale_is_one_for_all_members():
    layer = make_layer([1.0, 2.0, 0.5], num_members=3, init_scaler_std=1.0)
    assert layer.sigma_norm_scale["default"].shape == (1, 3)
    before, _ = layer.affine("default", (0, 1, 2))
    with torch.no_grad():
        layer.sigma_norm_scale["default"].copy_(torch.tensor([[2.0, 1.0, -1.0]]))
    after, _ = layer.affine("default", (0, 1, 2))
    torch.testing.assert_close(after, before * torch.tensor([2.0, 1.0, -1.0]))
    after.sum().backward()
    torch.testing.assert_close(layer.sigma_norm_scale["default"].grad, before.detach().sum(0, keepdim=True))


def test_the_paper_has_no_scale_beside_gates_of_full_depth():
    layer = make_layer([1.5, -0.5], num_members=3, init_scaler_std=1.0, init_scaler=0.7, **PAPER)
    assert "default" not in layer.sigma_norm_scale
    gates = layer.sigma_norm_scaler["default"].sigmoid()
    gain, _ = layer.affine("default", (0, 1, 2))
    torch.testing.assert_close(gain, gates * layer.base_layer.weight / torch.tensor(0.7).sigmoid())


def test_a_copy_that_members_share_has_gates_of_full_depth_and_no_scale_beside_them():
    layer = SigmaNormLayer(nn.LayerNorm(3))
    layer.update_layer("default", SigmaNormConfig(gate_depth=0.3, train_scale=True), NormRole.SHARED)
    assert layer.gate_depth["default"] == 1
    assert "default" not in layer.sigma_norm_scale


def test_without_member_bias_members_share_the_base_bias():
    layer = make_layer([1.0, 2.0, 0.5], num_members=2, member_bias=False, init_scaler_std=1.0)
    assert "default" not in layer.sigma_norm_bias
    rows = torch.randn(4, 3)
    torch.testing.assert_close(call(layer, rows, (0, 1)).double(), reference(layer, rows, (0, 1)), rtol=1e-5, atol=1e-5)


def test_norm_without_bias_gets_none():
    layer = make_layer([1.0, 2.0, 0.5], bias=False, num_members=2, init_scaler_std=1.0)
    assert "default" not in layer.sigma_norm_bias
    rows = torch.randn(4, 3)
    torch.testing.assert_close(call(layer, rows, (0, 1)).double(), reference(layer, rows, (0, 1)), rtol=1e-5, atol=1e-5)


def test_parameters_are_stacked_and_named_after_the_method():
    layer = make_layer([1.0, 2.0, 0.5], num_members=3)
    names = {name: tuple(p.shape) for name, p in layer.named_parameters() if "base_layer" not in name}
    members, shared = dict.fromkeys(["sigma_norm_scaler.default", "sigma_norm_bias.default"], (3, 3)), (1, 3)
    assert names == members | {"sigma_norm_scale.default": shared}
    # transformers renames such keys when it loads a checkpoint
    assert not any("gamma" in name or "beta" in name for name in names)


def test_scalers_of_a_half_precision_base_stay_fp32():
    norm = nn.LayerNorm(4).to(torch.bfloat16)
    layer = SigmaNormLayer(norm)
    layer.update_layer("default", SigmaNormConfig())
    layer._move_adapter_to_device_of_base_layer("default")
    assert {p.dtype for n, p in layer.named_parameters() if "base_layer" not in n} == {torch.float32}
    assert call(layer, torch.randn(4, 4, dtype=torch.bfloat16), (0, 1, 2, 3)).dtype == torch.bfloat16


def test_outside_a_forward_pass_it_raises():
    layer = make_layer([1.0, 2.0])
    with pytest.raises(RuntimeError, match="outside a forward pass"):
        layer(torch.randn(4, 2))


def test_rows_that_cannot_belong_to_the_members_raise():
    layer = make_layer([1.0, 2.0])
    with pytest.raises(RuntimeError, match="7 rows cannot belong to 4 members"):
        call(layer, torch.randn(7, 2), (0, 1, 2, 3))


def test_peft_merge_is_refused():
    with pytest.raises(ValueError, match="member=k"):
        make_layer([1.0, 2.0]).merge()
