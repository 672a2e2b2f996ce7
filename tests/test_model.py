import copy
import json

import pytest
import tiny
import torch
import transformers
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from sigma_nens_hf import SigmaNormConfig, extract_mean, extract_member
from sigma_nens_hf.norm_formulas import is_norm

LABELS = {0: "bad", 1: "fair", 2: "good"}


def adapter_of(model, folder):
    model.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    return config, load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("with_task_type", [False, True])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
@torch.no_grad()
def test_step_zero_equals_the_base_model(architecture, with_task_type):
    base = tiny.base_model(architecture)  # its norm weights are negative, zero and above 1
    weights = torch.cat([module.weight for module in base.modules() if is_norm(module)])
    assert (weights < 0).any()
    assert (weights == 0).any()
    assert (weights > 1).any()
    batch = tiny.inputs(architecture)
    expected = base(**batch)
    task_type = (tiny.task_type(architecture) or "SEQ_CLS") if with_task_type else None  # images take it too
    config = SigmaNormConfig(init_scaler_std=0.0, head_init="copy", init_scaler=-0.5, task_type=task_type)
    output = get_peft_model(base, config).eval()(**batch)
    for member in output.member_logits.unbind(1):
        assert tiny.relative_error(member, expected.logits) < 1e-5
    torch.testing.assert_close(output.logits, expected.logits.log_softmax(-1), rtol=1e-4, atol=1e-4)
    if "loss" in expected:
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("modules_to_save", [None, [], ["pooler"]])
@pytest.mark.parametrize("member_heads", [None, "all", []])
@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "llama", "bert-token", "llama-token"])
def test_task_type_makes_no_difference_to_the_adapter(architecture, member_heads, modules_to_save, tmp_path):
    if modules_to_save and architecture != "bert":  # the others have no pooler
        modules_to_save = _SOME_FROZEN_MODULE[architecture]
    adapters = []
    for task_type in (None, tiny.task_type(architecture)):
        model = tiny.ensemble(
            architecture,
            task_type=task_type,
            member_heads=member_heads,
            modules_to_save=copy.copy(modules_to_save),
        )
        adapters.append(adapter_of(model, tmp_path / str(task_type)))
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == sum(
            tensor.numel() for tensor in adapters[-1][1].values()
        )
    (config, tensors), (config_with, tensors_with) = adapters
    for other in (config, config_with):
        del other["task_type"], other["auto_mapping"]
    assert config == config_with
    assert tensors.keys() == tensors_with.keys()
    assert all(torch.equal(tensors[key], tensors_with[key]) for key in tensors)


_SOME_FROZEN_MODULE = {
    "roberta": ["encoder.layer.1.output.dense"],
    "distilbert": ["transformer.layer.1.ffn.lin1"],
    "llama": ["layers.1.mlp.up_proj"],
    "bert-token": ["encoder.layer.1.output.dense"],
    "llama-token": ["layers.1.mlp.up_proj"],
}


def test_config_makes_the_adapter_self_contained(tmp_path):
    model = tiny.ensemble("roberta", id2label=LABELS, task_type="SEQ_CLS")
    config, _ = adapter_of(model, tmp_path)
    assert config["id2label"] == {"0": "bad", "1": "fair", "2": "good"}
    assert config["num_labels"] == 3
    assert config["base_model_type"] == "roberta"
    assert config["num_adapted_norms"] == 5
    assert config["target_modules"] is None  # the wish, not the paths it led to
    assert config["modules_to_save"] == ["classifier.dense"]
    assert config["sigma_nens_hf_version"]
    assert config["transformers_version"]


def change(tensors, kind):
    key = next(key for key in tensors if "sigma_norm_scaler" in key)
    if kind == "missing":
        del tensors[key]
    elif kind == "unexpected":
        tensors[key.replace("scaler", "spare")] = tensors[key].clone()
    elif kind == "misshapen":
        tensors[key] = tensors[key][:3].clone()
    elif kind == "integers":
        tensors[key] = tensors[key].long()
    elif kind == "nan":
        tensors[key][0, 0] = float("nan")
    return key


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "missing: base_model.model.bert.embeddings.LayerNorm.sigma_norm_scaler"),
        ("unexpected", "unexpected: base_model.model.bert.embeddings.LayerNorm.sigma_norm_spare"),
        ("misshapen", r"has shape \(3, 32\), the model needs \(4, 32\)"),
        ("integers", "sigma_norm_scaler.default holds torch.int64"),
        ("nan", "sigma_norm_scaler.default holds numbers that are not finite"),
    ],
)
def test_file_that_does_not_fit_is_refused_by_key(kind, message, tmp_path):
    tiny.ensemble("bert").save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors, kind)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(tiny.base_model("bert"), tmp_path)


@pytest.mark.parametrize("architecture", ["vit", "deit", "beit"])
def test_adapter_under_the_module_names_of_transformers_4_loads(architecture, tmp_path):
    model = tiny.ensemble(architecture)
    tiny.make_trainable_parts_random(model)
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    stack = f"{architecture}.layers."
    old = {key.replace(stack, f"{architecture}.encoder.layer."): tensor for key, tensor in load_file(file).items()}
    assert sum(".encoder.layer.1.layernorm_before." in key for key in old) == 3
    save_file(old, file, metadata={"format": "pt"})
    batch = tiny.inputs(architecture)
    loaded = PeftModel.from_pretrained(tiny.base_model(architecture), tmp_path)
    assert torch.equal(loaded(**batch).member_logits, model(**batch).member_logits)
    loaded.save_pretrained(tmp_path)  # and is written under today's
    assert any(stack in key for key in load_file(file))


def test_adapter_that_could_not_be_loaded_is_not_saved(tmp_path):
    model = tiny.ensemble("bert")
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "sigma_norm_scaler" in n)[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"sigma_norm_scaler.* not finite"):
        model.save_pretrained(tmp_path)
    assert not (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda: tiny.base_model("roberta"), "base of type 'bert', this one is 'roberta'"),
        (lambda: tiny.base_model("bert", num_hidden_layers=3), "5 adapted norms, in this one .* there are 7"),
        (lambda: tiny.base_model("bert", hidden_size=64), "does not have the weights that the adapter was trained"),
    ],
)
def test_another_base_is_refused(base, message, tmp_path):
    tiny.ensemble("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(base(), tmp_path)


def test_auto_class_finds_the_base(tmp_path, checkpoint_folder):
    base = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint_folder("bert", num_labels=2))
    model = get_peft_model(base, SigmaNormConfig(task_type="SEQ_CLS", id2label=LABELS)).eval()
    model.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter")
    batch = tiny.inputs("bert")
    assert torch.equal(loaded(**batch).member_logits, model(**batch).member_logits)


@torch.no_grad()
def test_disabled_adapter_is_the_base_model():
    base = tiny.base_model("bert", num_labels=2)
    batch = tiny.inputs("bert", num_labels=2)
    expected = base(**batch)
    model = get_peft_model(base, SigmaNormConfig(id2label=LABELS)).eval()
    with model.disable_adapter():
        output = model(**batch)
        assert torch.equal(output.logits, expected.logits)
        assert torch.equal(output.loss, expected.loss)
        assert "member_logits" not in output
        assert model.config.num_labels == 2
        assert model.get_base_model().bert(batch["input_ids"]).last_hidden_state.shape[0] == 5
    assert model(**batch).member_logits.shape == (5, 4, 3)
    assert model.config.id2label == LABELS


@pytest.mark.parametrize(
    "architecture", ["bert", "distilbert", "llama", "bert-token", "vit", "deit-teacher", "convnext"]
)
@torch.no_grad()
def test_several_adapters_with_different_members_and_labels(architecture, tmp_path):
    batch = tiny.inputs(architecture, with_labels=False)
    base = tiny.base_model(architecture, num_labels=2)
    plain = base(**batch).logits
    model = tiny.adapt(base, num_members=2)
    first = model(**batch).member_logits
    second_config = SigmaNormConfig(num_members=3, id2label=LABELS, branch_layer=1, init_scaler_std=1.0)
    model.add_adapter("second", second_config)
    assert torch.equal(model(**batch).member_logits, first)
    model.set_adapter("second")
    second = model(**batch).member_logits
    assert second.shape == (5, 3, *first.shape[2:-1], 3)
    assert model.config.id2label == LABELS
    alone = torch.stack([extract_member(model, k)(**batch).logits for k in range(3)], 1)
    assert tiny.relative_error(second, alone) < 1e-5
    with model.disable_adapter():
        assert torch.equal(model(**batch).logits, plain)
    assert torch.equal(model(**batch).member_logits, second)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny.base_model(architecture, num_labels=2), tmp_path)
    loaded.load_adapter(tmp_path / "second", "second")
    assert torch.equal(loaded(**batch).member_logits, first)
    loaded.set_adapter("second")
    assert torch.equal(loaded(**batch).member_logits, second)
    model.set_adapter("default")
    assert torch.equal(model(**batch).member_logits, first)
    status = model.get_model_status()
    assert status.available_adapters == ["default", "second"]
    assert status.active_adapters == ["default"]
    model.delete_adapter("second")
    assert torch.equal(model(**batch).member_logits, first)
    with pytest.raises(ValueError, match="second"):
        model.set_adapter("second")


def test_unload_leaves_no_trace():
    base = tiny.base_model("bert", num_labels=2)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    batch = tiny.inputs("bert", num_labels=2)
    expected = base(**batch).logits
    config_before = base.config.to_dict()
    model = get_peft_model(base, SigmaNormConfig(id2label=LABELS, modules_to_save=["pooler"]))
    assert "member_logits" in model.config.keys_to_ignore_at_inference
    tiny.make_trainable_parts_random(model)
    plain = model.unload().eval()
    assert plain.config.to_dict() == config_before
    assert not plain._forward_pre_hooks
    assert not plain._forward_hooks
    assert type(plain(**batch)).__name__ == "SequenceClassifierOutput"
    assert not hasattr(plain, "peft_config")
    assert plain.state_dict().keys() == before.keys()
    assert all(torch.equal(plain.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(plain(**batch).logits, expected)


def test_unload_brings_a_resized_head_back():
    base = tiny.base_model("bert", num_labels=2)
    batch = tiny.inputs("bert", num_labels=2)
    expected = base(**batch).logits
    model = get_peft_model(base, SigmaNormConfig(id2label=LABELS, member_heads=[])).eval()
    assert model(**batch).logits.shape == (5, 3)
    assert torch.equal(model.unload()(**batch).logits, expected)


def test_member_is_taken_out_of_a_disabled_adapter_too():
    model = tiny.ensemble("bert")
    batch = tiny.inputs("bert")
    expected = model(**batch).member_logits[:, 1]
    with model.disable_adapter():
        member = extract_member(model, 1)
    assert tiny.relative_error(member(**batch).logits, expected) < 1e-5


def test_shared_module_inside_another_is_shared_with_it(tmp_path):
    model = tiny.ensemble("bert", modules_to_save=["pooler", "pooler.dense"])
    assert model.peft_config["default"].shared_modules == ["bert.pooler"]
    model.save_pretrained(tmp_path)
    PeftModel.from_pretrained(tiny.base_model("bert"), tmp_path)


@pytest.mark.parametrize(
    "config", [{}, {"branch_layer": 1, "prefix": "shared"}, {"train_scale": False, "gate_depth": 1}]
)
def test_mean_has_the_means_of_gains_biases_and_heads(config):
    model = tiny.ensemble("bert", num_members=3, init_scaler_std=1.0, **config)
    tiny.make_trainable_parts_random(model)
    members = [extract_member(model, k).state_dict() for k in range(3)]
    mean = extract_mean(model)
    assert members[0].keys() == mean.state_dict().keys()
    for name, tensor in mean.state_dict().items():
        torch.testing.assert_close(tensor, torch.stack([member[name].float() for member in members]).mean(0).to(tensor))
    logits, batch = mean(**tiny.inputs("bert")).logits, tiny.inputs("bert")
    assert logits.shape == model(**batch).logits.shape
    assert tiny.relative_error(logits, model(**batch).logits) > 1e-4  # it is no ensemble


def test_merge_must_name_a_member():
    model = tiny.ensemble("bert")
    with pytest.raises(ValueError, match="merge_and_unload\\(member=k\\) with k from 0 to 3"):
        model.merge_and_unload()
    with pytest.raises(ValueError, match="from 0 to 3, or 'mean', got 4"):
        model.merge_and_unload(member=4)
    with pytest.raises(ValueError, match="cannot be merged in place"):
        model.merge_adapter()
    single = tiny.ensemble("bert", num_members=1)
    batch = tiny.inputs("bert")
    expected = single(**batch).member_logits[:, 0]
    assert tiny.relative_error(single.merge_and_unload()(**batch).logits, expected) < 1e-5


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # they say the same
def test_mixing_and_stacking_with_another_method_is_refused():
    with pytest.raises(ValueError, match="not compatible with the `PeftMixedModel`"):
        get_peft_model(tiny.base_model("bert"), SigmaNormConfig(), mixed=True)
    ensemble = tiny.ensemble("bert")
    with pytest.raises(ValueError, match="must be a transformers model"):
        get_peft_model(ensemble, SigmaNormConfig())
    with pytest.raises(ValueError, match="peft type"):
        ensemble.add_adapter("lora", LoraConfig(target_modules=["query"]))
    model = get_peft_model(tiny.base_model("bert"), LoraConfig(target_modules=["query"])).base_model.model
    with pytest.raises(ValueError, match="layers of another PEFT method"):
        get_peft_model(model, SigmaNormConfig())


@pytest.mark.parametrize(
    ("modules_to_save", "message"),
    [(["no_such_module"], "no such module"), (["encoder.layer.1"], "every member has its own")],
)
def test_wrong_shared_modules_are_named(modules_to_save, message):
    with pytest.raises(ValueError, match=message):
        tiny.ensemble("bert", modules_to_save=modules_to_save)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_peft_reports(architecture, capsys):
    model = tiny.ensemble(architecture)
    model.print_trainable_parameters()
    assert "trainable params" in capsys.readouterr().out
    status = model.get_model_status()
    assert status.active_adapters == ["default"]
    assert status.enabled is True
    assert status.requires_grad == {"default": True}


@pytest.mark.parametrize(
    ("id2label", "label2id", "expected"),
    [
        ({0: "a", 1: "b", 2: "c"}, {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}, {0: "a", 1: "b", 2: "c"}),
        ({0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}, {"a": 0, "b": 1, "c": 2}, {0: "a", 1: "b", 2: "c"}),
        ({0: "a", 1: "a", 2: "c"}, {"a": 0, "c": 2}, {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}),
        ({1: "a", 2: "b", 3: "c"}, {"a": 1, "b": 2, "c": 3}, {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}),
        ({0: 1, 1: 2, 2: 3}, {1: 0, 2: 1, 3: 2}, {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}),
    ],
)
def test_base_whose_label_maps_contradict_each_other(id2label, label2id, expected, tmp_path):
    base = tiny.base_model("bert")
    base.config.id2label, base.config.label2id = dict(id2label), dict(label2id)
    model = tiny.adapt(base)
    assert model.config.id2label == expected
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny.base_model("bert"), tmp_path)
    assert loaded.config.id2label == expected
    model.unload()
    assert (base.config.id2label, base.config.label2id) == (id2label, label2id)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_resized_embeddings_come_with_the_adapter(tmp_path):
    """As peft does it: new rows are nowhere else."""
    tiny.base_model("bert").save_pretrained(tmp_path / "base")

    def base():
        model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base")
        model.resize_token_embeddings(66)
        return model

    model = tiny.adapt(base())
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    batch = {"input_ids": torch.tensor([[5, 61, 65, 6]])}
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_padding_token_of_the_adapter_goes_before_the_bases(architecture, tmp_path):
    base = tiny.base_model(architecture)
    base.config.pad_token_id = 2
    model = tiny.adapt(base)
    model.save_pretrained(tmp_path)
    other = tiny.base_model(architecture)
    loaded = PeftModel.from_pretrained(other, tmp_path)
    assert loaded.config.pad_token_id == 2
    batch = tiny.inputs(architecture, with_labels=False)
    batch["input_ids"][batch["attention_mask"] == 0] = 2
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    assert loaded.unload().config.pad_token_id == tiny.PADDING
    for nonsense in (99999, -7, "x"):
        with pytest.raises(ValueError, match="pad_token_id must be one of the 60 tokens"):
            tiny.ensemble(architecture, pad_token_id=nonsense)
    with pytest.raises(ValueError, match="names no padding token"):
        tiny.ensemble(architecture, base={"pad_token_id": None})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"modules_to_save": ["pooler.dense"]}, {"modules_to_save": ["pooler"]}),
        ({"modules_to_save": ["pooler"]}, {"modules_to_save": ["pooler.dense"]}),
        ({}, {"exclude_modules": r".*encoder\.layer\.0\..*", "modules_to_save": ["encoder.layer.0"]}),
        ({"exclude_modules": r".*encoder\.layer\.0\..*", "modules_to_save": ["encoder.layer.0"]}, {}),
    ],
)
def test_adapters_whose_modules_overlap_do_not_go_on_one_model(first, second, tmp_path):
    model = tiny.ensemble("bert", **first)
    batch = tiny.inputs("bert")
    expected = model(**batch).member_logits
    with pytest.raises(ValueError, match="which another adapter on this model has in another form"):
        model.add_adapter("second", SigmaNormConfig(**second))
    assert torch.equal(model(**batch).member_logits, expected)
    model.save_pretrained(tmp_path)


def test_refused_adapter_does_not_stay_with_random_members(tmp_path):
    model = tiny.ensemble("bert", num_members=2)
    tiny.ensemble("bert", num_members=3).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_members": 2}))
    batch = tiny.inputs("bert")
    expected = model(**batch).member_logits
    with pytest.raises(ValueError, match="is of 3 members"):
        model.load_adapter(tmp_path, "other")
    assert list(model.peft_config) == ["default"]
    assert torch.equal(model(**batch).member_logits, expected)


def test_adapter_of_another_class_is_refused(tmp_path):
    tiny.ensemble("bert-token").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="made for a BertForTokenClassification, this base is a BertForSequence"):
        PeftModel.from_pretrained(tiny.base_model("bert"), tmp_path)


def test_problem_type_of_another_head_is_not_inherited():
    model = tiny.ensemble("bert", num_labels=1, base={"problem_type": "regression"}, id2label=LABELS)
    assert model(**tiny.inputs("bert")).loss.isfinite()
    assert model.config.problem_type == "single_label_classification"
    with pytest.raises(ValueError, match="A single class cannot be told from others"):
        tiny.ensemble("bert", num_labels=1, problem_type="single_label_classification")


def test_batch_of_mixed_adapters_is_refused():
    model = tiny.ensemble("bert")
    with pytest.raises(ValueError, match="use set_adapter, not adapter_names"):
        model(**tiny.inputs("bert"), adapter_names=["default"] * 5)


@pytest.mark.filterwarnings("ignore:Adapter default was active")
def test_deleting_the_active_adapter_leaves_the_other_active():
    model = tiny.ensemble("bert")
    model.add_adapter("late", SigmaNormConfig(branch_layer=1, num_members=3))
    model.delete_adapter("default")
    assert model.active_adapters == ["late"]
    assert model(**tiny.inputs("bert")).member_logits.shape == (5, 3, 3)


@pytest.mark.parametrize("name", ["/tmp/x", "../x", "..", "a/b", "a\\b", ""])
def test_adapter_name_that_is_no_folder_name_is_refused(name, tmp_path):
    model = tiny.ensemble("bert")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="name becomes that of a folder"):
        model.load_adapter(tmp_path, name)
    with pytest.raises(ValueError, match="name becomes that of a folder"):
        get_peft_model(tiny.base_model("bert"), SigmaNormConfig(), adapter_name=name)
    assert list(model.peft_config) == ["default"]
    model(**tiny.inputs("bert"))
