"""Bases in 16 bits: what is trained stays in fp32, in memory, in the file and through both ways of loading."""

import pytest
import tiny
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_trainer import dataset, trainer_for

from sigma_nens_hf import MemberHead, SigmaNormLayer, extract_member
from sigma_nens_hf.precision import CastOutputs

HALVES = [torch.bfloat16, torch.float16]
ARCHITECTURES = ["bert", "roberta", "deberta_v3", "modernbert", "llama", "vit", "swin", "convnext", "bert-token"]


def half_ensemble(architecture, dtype, **config):
    model = tiny.base_model(architecture, **tiny.without_dropout(architecture)).to(dtype)
    return tiny.adapt(model, **config)


def _in(dtype, tensor):
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_trained_parameters_survive_saving_bit_by_bit(architecture, dtype, low_cpu_mem_usage, tmp_path):
    model = half_ensemble(architecture, dtype, modules_to_save=["pooler"] if architecture == "bert" else None)
    tiny.make_trainable_parts_random(model)
    assert {p.dtype for p in trained(model).values()} == {torch.float32}
    model.save_pretrained(tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.float32}
    base = tiny.base_model(architecture).to(dtype)
    loaded = PeftModel.from_pretrained(base, tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    parameters = dict(loaded.named_parameters())
    for name, parameter in trained(model).items():
        assert parameters[name].dtype == torch.float32
        assert torch.equal(parameters[name], parameter), name
    pixels_or_ids = _in(dtype, next(iter(tiny.inputs(architecture).values())))
    with torch.no_grad():
        assert torch.equal(loaded(pixels_or_ids).member_logits, model(pixels_or_ids).member_logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_base_in_16_bits_still_trains(architecture, dtype, tmp_path):
    model = half_ensemble(architecture, dtype, init_scaler_std=0.1)
    before = {name: p.detach().clone() for name, p in trained(model).items()}
    rows = dataset(architecture)
    data = [{name: _in(dtype, row[name]) for name in row} for row in rows]
    trainer_for(model, tmp_path, data, max_steps=4, scaler_learning_rate=1e-4).train()
    moved = {name: p.detach() != before[name] for name, p in trained(model).items()}
    for name, where in moved.items():
        if dtype is torch.bfloat16:  # without a loss scaler some of fp16's gradients are rounded to zero on their way
            assert where.any(), name
        if "sigma_norm_scaler" in name:
            assert where.float().mean() > 0.9, name  # steps of 1e-4 around .1, which 16 bits swallow


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_plain_member_is_of_the_bases_precision_and_computes_the_same(architecture, dtype):
    model = half_ensemble(architecture, dtype)
    tiny.make_trainable_parts_random(model)
    batch = {name: _in(dtype, tensor) for name, tensor in tiny.inputs(architecture, with_labels=False).items()}
    expected = model(**batch).member_logits
    member = extract_member(model, 1)
    assert {p.dtype for p in member.parameters()} == {dtype}
    assert not any(isinstance(h, CastOutputs) for module in member.modules() for h in module._forward_hooks.values())
    assert not any(module._forward_pre_hooks for module in member.modules())
    tolerance = 0.1 if dtype is torch.bfloat16 else 0.02  # of some hundred roundings
    assert tiny.relative_error(member(**batch).logits.float(), expected[:, 1].float()) < tolerance
    assert model(**batch).logits.dtype == torch.float32


@pytest.mark.parametrize("architecture", ["bert", "vit", "llama"])
def test_autocast_leaves_parameters_and_logits_in_full_precision(architecture):
    model = tiny.ensemble(architecture, base=tiny.without_dropout(architecture))
    batch = tiny.inputs(architecture)
    expected = model(**batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**batch)
    assert output.logits.dtype == torch.float32
    assert tiny.relative_error(output.member_logits.float(), expected.member_logits) < 0.3
    output.loss.backward()
    for module in model.modules():
        if isinstance(module, SigmaNormLayer | MemberHead):
            for parameter in module.parameters():
                if parameter.requires_grad:
                    assert parameter.grad.dtype == torch.float32
                    assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("modules_to_save", [["pooler"], ["encoder.layer.0.intermediate"]])
def test_half_base_that_is_made_whole_again(modules_to_save):
    model = half_ensemble("bert", torch.bfloat16, modules_to_save=modules_to_save).float()
    batch = tiny.inputs("bert", with_labels=False)
    output = model(**batch).member_logits
    assert output.dtype == torch.float32
    assert tiny.relative_error(extract_member(model, 0)(**batch).logits, output[:, 0]) < 1e-5
