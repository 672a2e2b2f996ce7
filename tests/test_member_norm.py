import copy

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional

from sigma_nens_hf import SigmaNormConfig, SigmaNormLayer
from sigma_nens_hf.forward_pass import ForwardPass, InForwardPass
from sigma_nens_hf.member_norm import FusedMemberNorm, member_norm, scale_after_norm
from sigma_nens_hf.norm_formulas import NormFormula

FORMULAS = {
    "layer norm": NormFormula(True, 1e-5),
    "RMS norm": NormFormula(False, 1e-6),
    "RMS norm without eps": NormFormula(False, None),
    "channels first": NormFormula(True, 1e-6, True),
    "RMS norm, channels first": NormFormula(False, 1e-6, True),
}
# Of a gradient's or output's largest value; the plain operations round to 16 bits once more, before they scale.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def loop(formula, rows, gain, bias):
    return torch.cat([formula(rows[m], gain[m], None if bias is None else bias[m]) for m in range(len(gain))])


def case(formula, members=3, with_bias=True, dtype=torch.float32, size=16):
    shape = (members, 2, size, 3, 4) if formula.channels_first else (members, 2, 5, size)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(shape, generator=generator) * 2 + 0.5
    rows[0, 0] *= 1e-2  # small enough for eps to count
    gain, bias = (torch.randn(members, size, generator=generator) for _ in range(2))
    inputs = [rows, gain, bias if with_bias else None]
    return [None if tensor is None else tensor.to(dtype).requires_grad_() for tensor in inputs]


def output_and_gradients(function, formula, inputs):
    output = function(formula, *inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    return [output, *torch.autograd.grad(output, wanted, weights)]


def assert_equals_loop(function, formula, inputs, tolerance=None):
    dtype = inputs[0].dtype
    exact = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    if formula.eps is None:  # functional.rms_norm takes that of the dtype it computes in
        formula_of_loop = NormFormula(False, torch.finfo(torch.promote_types(dtype, torch.float32)).eps)
    else:
        formula_of_loop = formula
    expected = output_and_gradients(loop, formula_of_loop, exact)
    for actual, want in zip(output_and_gradients(function, formula, inputs), expected, strict=True):
        assert actual.dtype == dtype
        assert actual.shape == want.shape
        assert (actual.double() - want).abs().max() <= (tolerance or TOLERANCE[dtype]) * want.abs().max()


def plain_operations(formula, rows, gain, bias):
    if not formula.channels_first:
        return scale_after_norm(formula, rows, gain, bias)
    return scale_after_norm(formula, rows.movedim(2, -1), gain, bias).movedim(-1, 1)


def compiled(formula, *inputs):
    torch.compiler.reset()
    return torch.compile(member_norm, backend="eager", fullgraph=True)(formula, *inputs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("function", [member_norm, plain_operations])
def test_output_and_gradients_are_those_of_a_loop(function, kind, members, with_bias, dtype):
    formula = FORMULAS[kind]
    assert_equals_loop(function, formula, case(formula, members, with_bias, dtype))


@pytest.mark.parametrize("kind", FORMULAS)
def test_compiled_one_is_the_same(kind):
    assert_equals_loop(compiled, FORMULAS[kind], case(FORMULAS[kind]))


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("kind", ["layer norm", "RMS norm"])
def test_gradients_in_16_bits_are_summed_over_many_rows_in_32(kind, members):
    formula = FORMULAS[kind]
    _, gain, bias = case(formula, members, dtype=torch.bfloat16)
    rows = torch.randn(members, 4, 500, 16).bfloat16().requires_grad_()
    assert_equals_loop(member_norm, formula, [rows, gain, bias], tolerance=6e-3)


def test_layer_norms_equal_those_of_torch_bit_by_bit():
    formula = FORMULAS["layer norm"]
    inputs = case(formula)
    for actual, expected in zip(
        output_and_gradients(member_norm, formula, inputs), output_and_gradients(loop, formula, inputs), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_need_not_be_contiguous(kind, dtype):
    formula = FORMULAS[kind]
    rows, gain, bias = case(formula, dtype=dtype)
    swapped = rows.detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_()
    assert not swapped.is_contiguous()
    assert_equals_loop(member_norm, formula, [swapped, gain, bias])


@pytest.mark.parametrize("kind", FORMULAS)
def test_gradient_of_the_output_need_not_be_contiguous(kind):
    formula = FORMULAS[kind]
    inputs = case(formula)

    def expanded(function):
        return torch.autograd.grad(function(formula, *inputs).sum(), inputs)

    for actual, expected in zip(expanded(member_norm), expanded(loop), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("needing", [(0,), (1,), (2,), (1, 2), (0, 2)])
@pytest.mark.parametrize("kind", FORMULAS)
def test_only_what_needs_a_gradient_gets_one(kind, needing):
    formula = FORMULAS[kind]
    inputs = [tensor.detach().requires_grad_(i in needing) for i, tensor in enumerate(case(formula))]
    assert_equals_loop(member_norm, formula, inputs)


def test_gradient_of_frozen_rows_is_not_computed(monkeypatch):
    masks = []
    original = torch.ops.aten.native_layer_norm_backward
    monkeypatch.setattr(
        torch.ops.aten, "native_layer_norm_backward", lambda *args: masks.append(args[-1]) or original(*args)
    )
    rows, gain, bias = case(FORMULAS["layer norm"])
    member_norm(FORMULAS["layer norm"], rows.detach(), gain, bias).sum().backward()
    assert [tuple(mask) for mask in masks] == [(False, True, True)] * 3


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("kind", FORMULAS)
def test_derivatives_in_double_precision(kind, with_bias):
    formula = FORMULAS[kind]
    rows, gain, bias = case(formula, 2, with_bias, torch.float64, size=3)
    rows = rows[:, :, :3, :2, :1] if formula.channels_first else rows[:, :, :2]
    inputs = [tensor.detach().requires_grad_() for tensor in (rows, gain, bias) if tensor is not None]

    def function(rows, gain, bias=None):
        return member_norm(formula, rows, gain, bias)

    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


def test_second_derivative_where_the_gain_depends_on_the_rows():
    formula = FORMULAS["layer norm"]
    rows, gain, bias = case(formula, dtype=torch.float64)

    def second(function):
        first = torch.autograd.grad(
            function(formula, rows, gain * rows.mean((1, 2)), bias).pow(3).sum(), rows, create_graph=True
        )
        return torch.autograd.grad(first[0].square().sum(), rows)[0]

    torch.testing.assert_close(second(member_norm), second(loop))


def test_torch_func_sees_through_it():
    formula = FORMULAS["layer norm"]
    rows, gain, bias = case(formula)
    per_example = torch.func.vmap(
        torch.func.grad(lambda row, gain: member_norm(formula, row, gain, bias).square().sum(), argnums=1),
        in_dims=(1, None),
    )(rows.unsqueeze(2), gain)
    total = torch.autograd.grad(loop(formula, rows, gain, bias).square().sum(), gain)[0]
    torch.testing.assert_close(per_example.sum(0), total, rtol=1e-4, atol=1e-4)


def test_second_derivative_in_16_bits():
    formula = FORMULAS["layer norm"]
    rows, gain, bias = case(formula, dtype=torch.bfloat16)
    first = torch.autograd.grad(member_norm(formula, rows, gain, bias).square().sum(), rows, create_graph=True)[0]
    assert torch.autograd.grad(first.square().sum(), rows)[0].isfinite().all()


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_traced_one_can_be_saved(tmp_path):
    formula = FORMULAS["layer norm"]
    inputs = case(formula)
    torch.jit.trace(lambda *args: member_norm(formula, *args), inputs).save(str(tmp_path / "norm.pt"))
    loaded = torch.jit.load(str(tmp_path / "norm.pt"))
    torch.testing.assert_close(loaded(*inputs), loop(formula, *inputs))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_one_has_the_same_gradients(use_reentrant):
    def checkpointed(formula, *inputs):
        return torch.utils.checkpoint.checkpoint(member_norm, formula, *inputs, use_reentrant=use_reentrant)

    formula = FORMULAS["RMS norm"]
    inputs = case(formula)
    gradients = []
    for function in (checkpointed, member_norm):
        function(formula, *inputs).square().sum().backward()
        gradients.append([tensor.grad for tensor in inputs])
        for tensor in inputs:
            tensor.grad = None
    for actual, expected in zip(*gradients, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", ["layer norm", "RMS norm"])
def test_autocast_keeps_the_rows_dtype_as_a_plain_norm_does(kind):
    formula = FORMULAS[kind]
    for dtype in (torch.float32, torch.bfloat16):
        inputs = case(formula, dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = member_norm(formula, *inputs)
            assert output.dtype == functional.layer_norm(inputs[0], inputs[0].shape[-1:]).dtype == dtype
        gradients = torch.autograd.grad(output.sum(), inputs)
        assert {gradient.dtype for gradient in gradients} == {dtype}


def test_one_member_is_a_plain_norm_without_a_copy():
    formula = FORMULAS["layer norm"]
    output = member_norm(formula, *case(formula, members=1))
    assert output.grad_fn.name() == "NativeLayerNormBackward0"


def test_several_members_on_a_cpu_take_the_fused_kernels():
    output = member_norm(FORMULAS["layer norm"], *case(FORMULAS["layer norm"]))
    assert FusedMemberNorm.__name__ in output.grad_fn.name()


def test_other_devices_take_plain_operations():
    formula = FORMULAS["layer norm"]
    output = member_norm(formula, *(tensor.detach().to("meta").requires_grad_() for tensor in case(formula)))
    assert FusedMemberNorm.__name__ not in output.grad_fn.name()
    assert output.shape == (6, 5, 16)


@pytest.mark.parametrize(
    ("kind", "gain"), [("layer norm", (2, 16)), ("layer norm", (3, 7)), ("channels first", (3, 4))]
)
def test_shapes_that_do_not_fit_raise(kind, gain):
    rows = case(FORMULAS[kind])[0]
    with pytest.raises(RuntimeError, match="do not fit"):
        member_norm(FORMULAS[kind], rows, torch.ones(gain), None)


def test_layer_uses_it_and_survives_copies():
    layer = SigmaNormLayer(nn.LayerNorm(16))
    layer.update_layer("default", SigmaNormConfig(num_members=3))
    rows = torch.randn(6, 5, 16)
    outputs = [
        InForwardPass(module, ForwardPass(0, (0, 1, 2), 6, True, None))(rows)
        for module in (layer, copy.deepcopy(layer))
    ]
    assert FusedMemberNorm.__name__ in outputs[0].grad_fn.name()
    assert torch.equal(*outputs)
