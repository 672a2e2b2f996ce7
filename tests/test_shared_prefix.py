"""Norms below the branch that members share one trained copy of."""

import copy

import pytest
import tiny
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_late_branching import late
from test_trainer import dataset, trained, trainer_for

from sigma_nens_hf import (
    SigmaNormConfig,
    SigmaNormLayer,
    diversity_regularizer,
    ensemble_from_pretrained,
    extract_member,
    load_ensemble,
    realized_sharing,
)
from sigma_nens_hf.adapter_info import adapter_infos
from sigma_nens_hf.layer import NormRole
from sigma_nens_hf.members import base_model_of
from sigma_nens_hf.regularizer import member_gates
from sigma_nens_hf.staged_training import freeze_prefix

KINDS = ["bert", "modernbert", "vit", "swin", "bert-choice", "llama"]


def shared_layers(model):
    return {
        name: layer
        for name, layer in base_model_of(model).named_modules()
        if isinstance(layer, SigmaNormLayer) and not layer.carries_members(layer.member_adapter)
    }


def trainable_copies(model):
    return {p.requires_grad for layer in shared_layers(model).values() for p in _copies(layer)}


def _copies(layer):
    return [getattr(layer, kind)[layer.member_adapter] for kind in layer.adapter_layer_names if getattr(layer, kind)]


@pytest.mark.filterwarnings("ignore:The rows of a Llama")
@pytest.mark.parametrize("prefix", ["shared", "staged"])
@pytest.mark.parametrize("architecture", KINDS)
@torch.no_grad()
def test_round_trip_is_bit_equal_and_members_taken_out_are_the_ensembles(architecture, prefix, checkpoint_folder):
    source = checkpoint_folder(architecture)
    model, _ = ensemble_from_pretrained(
        source, tiny.task(architecture), num_members=3, branch_layer=1, prefix=prefix, init_scaler_std=1.0
    )
    tiny.make_trainable_parts_random(model.eval())
    batch = tiny.inputs(architecture)
    expected = model(**batch)
    for k in (0, 2):
        plain = extract_member(model, k)(**batch).logits
        assert tiny.relative_error(plain, expected.member_logits[:, k]) < 1e-5
    model.save_pretrained(source.parent / "adapter")
    loaded, _ = load_ensemble(source.parent / "adapter")
    assert torch.equal(loaded(**batch).member_logits, expected.member_logits)
    assert shared_layers(loaded).keys() == shared_layers(model).keys()
    assert not trained(loaded)
    stored = load_file(source.parent / "adapter" / "adapter_model.safetensors")
    copies = [key for key, tensor in stored.items() if key.endswith("scaler") and len(tensor) == 1]
    assert len(copies) == len(shared_layers(model)) > 0
    (info,) = adapter_infos(source.parent / "adapter")
    assert info.num_adapted_norms == len(copies) + len(info.sharing_by_norm)
    assert not any(f".{norm}.sigma" in key for norm in info.sharing_by_norm for key in copies)
    assert info.sharing == pytest.approx(realized_sharing(model), rel=1e-5)


def test_shared_copies_start_as_the_pretrained_norms():
    model = late("bert", prefix="shared")
    base, batch = tiny.base_model("bert", **tiny.without_dropout("bert")), tiny.inputs("bert")
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states[1]
        expected = base(**batch, output_hidden_states=True).hidden_states[1]
    for member in range(4):
        assert tiny.relative_error(states[:, member], expected) < 1e-5


def test_shared_copies_are_no_members():
    shared, frozen = late("vit", prefix="shared"), late("vit")
    assert member_gates(shared).keys() == member_gates(frozen).keys()
    assert all(len(gates) == 4 for gates in member_gates(shared).values())
    with torch.no_grad():
        for layer in shared_layers(shared).values():
            layer.sigma_norm_scaler["default"].add_(5)
        for own, other in zip(member_gates(shared).values(), member_gates(frozen).values(), strict=True):
            own.copy_(other)
    assert diversity_regularizer(shared, 0.3).isfinite()
    assert shared_layers(shared).keys() == {"vit.layers.0.layernorm_before", "vit.layers.0.layernorm_after"}
    with pytest.raises(ValueError, match="match no norm that carries members"):
        member_gates(shared, ["vit.layers.0.layernorm_after"])
    diversity_regularizer(shared, 0.3).backward()
    assert all(layer.sigma_norm_scaler["default"].grad is None for layer in shared_layers(shared).values())


def test_shared_copies_are_trained_at_the_rates_of_scalers_and_biases(tmp_path):
    model = late("bert", prefix="shared")
    trainer = trainer_for(model, tmp_path, dataset("bert"), weight_decay=0.3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    copies = {id(p) for layer in shared_layers(model).values() for p in _copies(layer)}
    found = set()
    for group in trainer.create_optimizer().param_groups:
        for parameter in group["params"]:
            if id(parameter) in copies:
                found.add(id(parameter))
                assert group["lr"] == (3e-2 if "scaler" in names[id(parameter)] else 6e-3)
                assert group["weight_decay"] == 0
    assert found == copies
    before = trained(model)
    trainer.optimizer = None
    trainer.train()
    after = trained(model)
    for name in shared_layers(model):
        for kind in ("scaler", "bias"):
            key = f"base_model.model.{name}.sigma_norm_{kind}.default"
            assert not torch.equal(before[key], after[key])
    assert model.peft_config["default"].prefix == "shared"
    assert not model.peft_config["default"].prefix_is_tuned


@pytest.mark.parametrize("prefix", ["shared", "staged"])
def test_single_member(prefix, tmp_path):
    model = late("bert", prefix=prefix, num_members=1)
    batch = tiny.inputs("bert")
    trainer_for(model, tmp_path / "out", dataset("bert"), max_steps=2).train()
    model.eval()
    expected = model(**batch).member_logits
    assert expected.shape == (5, 1, 3)
    model.save_pretrained(tmp_path / "adapter")
    base = tiny.base_model("bert", **tiny.without_dropout("bert"))
    assert torch.equal(PeftModel.from_pretrained(base, tmp_path / "adapter")(**batch).member_logits, expected)
    (info,) = adapter_infos(tmp_path / "adapter")
    assert info.sharing == 1
    assert tiny.relative_error(model.merge_and_unload()(**batch).logits, expected[:, 0]) < 1e-5


@pytest.mark.parametrize("prefix", ["shared", "staged"])
def test_prefix_without_a_branch_is_refused(prefix):
    with pytest.raises(
        ValueError, match=f"prefix='{prefix}' is about the norms before branch_layer, which is not given"
    ):
        SigmaNormConfig(prefix=prefix)
    with pytest.raises(ValueError, match="prefix must be one of"):
        SigmaNormConfig(prefix="tuned", branch_layer=1)


def test_tuned_prefix_stays_frozen_whatever_is_switched():
    model = late("bert", prefix="staged")
    assert trainable_copies(model) == {True}
    freeze_prefix(model)
    assert trainable_copies(model) == {False}
    members = set(trained(model))
    assert members
    for again in (
        lambda: model.set_adapter("default"),
        lambda: model.base_model.set_adapter("default"),
        model.enable_adapter_layers,
        lambda: model.disable_adapter().__enter__(),
        model.base_model.enable_adapter_layers,
        model.train,
    ):
        again()
        assert trainable_copies(model) == {False}
    assert set(trained(model)) == members
    other = copy.deepcopy(model)
    other.set_adapter("default")
    assert trainable_copies(other) == {False}


@pytest.mark.parametrize(
    ("prefix", "is_tuned", "expected"), [("shared", False, True), ("staged", False, True), ("staged", True, False)]
)
def test_copies_of_a_loaded_adapter_are_trainable_unless_they_are_tuned(prefix, is_tuned, expected, checkpoint_folder):
    source = checkpoint_folder("bert")
    model, _ = ensemble_from_pretrained(source, "text-classification", branch_layer=1, prefix=prefix)
    tiny.make_trainable_parts_random(model)
    if is_tuned:
        freeze_prefix(model)
    model.save_pretrained(source.parent / "adapter")
    loaded, _ = load_ensemble(source.parent / "adapter", is_trainable=True)
    assert loaded.peft_config["default"].prefix_is_tuned == is_tuned
    assert trainable_copies(loaded) == {expected}
    assert {layer.role["default"] for layer in shared_layers(loaded).values()} == {
        NormRole.FROZEN if is_tuned else NormRole.SHARED
    }
    assert set(trained(loaded)) == set(trained(model))
    loaded.set_adapter("default")
    assert trainable_copies(loaded) == {expected}
    frozen, _ = load_ensemble(source.parent / "adapter")
    assert trainable_copies(frozen) == {False}
    batch = tiny.inputs("bert")
    assert torch.equal(loaded.eval()(**batch).member_logits, frozen(**batch).member_logits)


@torch.no_grad()
def test_two_adapters_with_copies_of_their_own(tmp_path):
    model, batch = late("bert", prefix="shared"), tiny.inputs("bert")
    tiny.make_trainable_parts_random(model)
    first = model(**batch).member_logits
    model.add_adapter("other", SigmaNormConfig(branch_layer=1, prefix="staged", num_members=2, init_scaler_std=1.0))
    model.set_adapter("other")
    tiny.make_trainable_parts_random(model.eval(), seed=8)
    second = model(**batch).member_logits
    freeze_prefix(model)
    assert trainable_copies(model) == {False}
    model.set_adapter("default")
    assert trainable_copies(model) == {True}
    assert not model.peft_config["default"].prefix_is_tuned
    assert torch.equal(model(**batch).member_logits, first)
    model.save_pretrained(tmp_path)
    base = tiny.base_model("bert", **tiny.without_dropout("bert"))
    loaded = PeftModel.from_pretrained(base, tmp_path)
    loaded.load_adapter(tmp_path / "other", "other", is_trainable=True)
    assert torch.equal(loaded(**batch).member_logits, first)
    loaded.set_adapter("other")
    assert torch.equal(loaded(**batch).member_logits, second)
    assert trainable_copies(loaded) == {False}
    loaded.delete_adapter("default")
    assert torch.equal(loaded(**batch).member_logits, second)
    assert tiny.relative_error(extract_member(loaded, 1)(**batch).logits, second[:, 1]) < 1e-5


def test_adapter_of_another_branch_is_not_loaded(tmp_path):
    model = late("bert", prefix="shared", base={"num_hidden_layers": 3})
    model.save_pretrained(tmp_path)
    base = tiny.base_model("bert", num_hidden_layers=4)
    with pytest.raises(ValueError, match="was made for a base with 7 adapted norms"):
        PeftModel.from_pretrained(base, tmp_path)
