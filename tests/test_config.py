import json

import pytest
from peft import PeftConfig

from sigma_nens_hf import SigmaNormConfig


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_members", 0, "num_members must be a whole number of at least 1, got 0"),
        ("num_members", 2.5, "num_members"),
        ("num_members", True, "num_members"),
        ("init_scaler", float("nan"), "init_scaler must be finite"),
        ("init_scaler_std", -0.1, "init_scaler_std"),
        ("init_scaler_std", float("inf"), "init_scaler_std"),
        ("gate_depth", 0.0, "gate_depth must be above 0 and at most 1, got 0.0"),
        ("gate_depth", 1.5, "gate_depth"),
        ("gate_depth", float("nan"), "gate_depth"),
        ("head_init", "random", "head_init must be one of"),
        ("member_heads", "none", "member_heads"),
        ("branch_layer", -1, "branch_layer"),
        ("branch_layer", True, "branch_layer must be the number of a block"),
        ("branch_layer", "1", "branch_layer must be the number of a block"),
        ("num_labels", 0, "num_labels"),
        ("num_labels", "3", "num_labels must be a whole number"),
        ("id2label", ["a", "b"], "id2label must be a dict"),
        ("problem_type", "multi_label", "problem_type must be one of"),
        ("id2label", {0: "a", 2: "b"}, "0 to C-1"),
        ("id2label", {0: "a", 1: "a"}, "the same name"),
        ("label2id", {"a": 0, "b": 0}, "the same index"),
        ("init_scaler", -90.0, "init_scaler must be finite and at most"),
        ("modules_to_save", "pooler", "must be a list of module names"),
        ("task_type", "CAUSAL_LM", "task_type must be one of .*'SEQ_CLS', 'TOKEN_CLS'"),
        ("calibration_temperature", 0.0, "calibration_temperature"),
    ],
)
def test_out_of_range_values_are_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        SigmaNormConfig(**{field: value})


def test_contradicting_labels_are_refused():
    with pytest.raises(ValueError, match="num_labels=3 does not fit the 2 names"):
        SigmaNormConfig(num_labels=3, id2label={0: "a", 1: "b"})
    with pytest.raises(ValueError, match="contradict each other"):
        SigmaNormConfig(id2label={0: "a", 1: "b"}, label2id={"a": 1, "b": 0})


def test_gates_of_a_single_model_are_its_scales_as_well():
    config = SigmaNormConfig(num_members=1, gate_depth=0.3, train_scale=True)
    assert (config.gate_depth, config.train_scale) == (1, False)


def test_labels_complete_each_other():
    config = SigmaNormConfig(label2id={"no": 0, "yes": 1})
    assert config.id2label == {0: "no", 1: "yes"}
    assert config.num_labels == 2


def test_round_trip_through_the_file(tmp_path):
    config = SigmaNormConfig(
        num_members=6,
        target_modules=["LayerNorm"],
        branch_layer=1,
        init_scaler=-1.0,
        member_heads=[],
        modules_to_save=["pooler"],
        id2label={0: "no", 1: "yes"},
        training_recipe={"diversity_temperature": 0.1},
        calibration_temperature=1.2,
    )
    config.save_pretrained(tmp_path)
    loaded = PeftConfig.from_pretrained(str(tmp_path))
    assert isinstance(loaded, SigmaNormConfig)
    assert loaded == config
    assert loaded.id2label == {0: "no", 1: "yes"}


@pytest.mark.parametrize("modules_to_save", [None, [], ["pooler"]])
def test_names_that_peft_adds_are_not_taken_for_the_users(modules_to_save):
    config = SigmaNormConfig(modules_to_save=modules_to_save)
    if config.modules_to_save is None:  # what peft's task models do
        config.modules_to_save = ["classifier", "score"]
    else:
        config.modules_to_save.extend(["classifier", "score"])
    assert config.shared_modules == (modules_to_save or [])


def test_shared_modules_are_exact_once_resolved(tmp_path):
    config = SigmaNormConfig(num_adapted_norms=5)
    config.resolve_shared_modules([])
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == []
    loaded = PeftConfig.from_pretrained(str(tmp_path))
    loaded.modules_to_save.extend(["classifier", "score"])
    assert loaded.shared_modules == []
    config.resolve_shared_modules(["classifier"])
    config.save_pretrained(tmp_path)
    assert PeftConfig.from_pretrained(str(tmp_path)).shared_modules == ["classifier"]
