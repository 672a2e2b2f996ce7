import json

import pytest
import tiny
import torch
from evaluate_tiny import LABELS, save_adapter
from peft import LoraConfig, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file

from sigma_nens_hf import SigmaNormConfig, __version__, realized_sharing
from sigma_nens_hf.adapter_info import adapter_infos, table_of_info


@pytest.fixture
def saved(tmp_path):
    model = save_adapter(tmp_path, calibration_temperature=1.7, modules_to_save=["pooler"])
    return model, tmp_path / "adapter"


def change_config(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_weights(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_info_is_that_of_the_model(saved):
    model, folder = saved
    (info,) = adapter_infos(folder)
    assert info.name == "default"
    assert info.base_model == str(folder.parent / "base")
    assert (info.task, info.base_model_class) == ("text-classification", "BertForSequenceClassification")
    assert (info.num_members, info.num_adapted_norms) == (3, 5)
    assert (info.branch_layer, info.prefix) == (None, None)
    assert info.labels == list(LABELS.values())
    assert info.calibration_temperature == 1.7
    assert info.versions["sigma_nens_hf"] == __version__
    assert info.sharing == pytest.approx(realized_sharing(model))
    assert 1 < info.sharing < 3
    by_norm = realized_sharing(model, per_layer=True)
    assert info.sharing_by_norm == {
        name.removeprefix("base_model.model."): pytest.approx(value) for name, value in by_norm.items()
    }
    assert list(info.sharing_by_norm) == [name.removeprefix("base_model.model.") for name in by_norm]
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    kinds = {"scalers": "scaler", "biases": "sigma_norm_bias", "heads": "head", "shared modules": "pooler"}
    for part, kind in kinds.items():
        count = sum(number for name, number in trained.items() if kind in name)
        assert info.parts[part].parameters == count > 0
        assert info.parts[part].bytes == 4 * count
    assert sum(part.parameters for part in info.parts.values()) == sum(trained.values())


def test_trained_scales_are_a_part_of_their_own(tmp_path):
    tiny.ensemble("bert", train_scale=True).save_pretrained(tmp_path)
    (info,) = adapter_infos(tmp_path)
    assert info.parts["scales"].parameters == 5 * tiny.HIDDEN_SIZE
    assert info.parts["scalers"].parameters == 4 * info.parts["scales"].parameters


def test_layer_10_comes_after_layer_9(tmp_path):
    model = tiny.ensemble("bert", base={"num_hidden_layers": 11})
    model.save_pretrained(tmp_path)
    (info,) = adapter_infos(tmp_path)
    assert list(info.sharing_by_norm) == [
        name.removeprefix("base_model.model.") for name in realized_sharing(model, per_layer=True)
    ]


def test_no_model_is_built_or_read(saved, monkeypatch):
    _, folder = saved
    for file in (folder.parent / "base").iterdir():
        file.unlink()
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *_, **__: 1 / 0)
    assert adapter_infos(folder)[0].num_members == 3


@pytest.mark.parametrize("architecture", ["bert-choice", "vit", "modernbert", "deberta_v3"])
def test_other_models_have_infos_as_well(architecture, tmp_path):
    model = tiny.ensemble(architecture)
    model.save_pretrained(tmp_path)
    (info,) = adapter_infos(tmp_path)
    assert info.task == tiny.task(architecture)
    assert (info.labels is None) == (architecture == "bert-choice")
    assert info.sharing == pytest.approx(realized_sharing(model))


def test_named_adapters_are_listed(tmp_path):
    model = tiny.ensemble("bert")
    model.add_adapter("wide", SigmaNormConfig(num_members=6))
    model.save_pretrained(tmp_path)
    assert {info.name: info.num_members for info in adapter_infos(tmp_path)} == {"default": 4, "wide": 6}
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "adapter_model.safetensors").unlink()
    assert [info.name for info in adapter_infos(tmp_path)] == ["wide"]


def test_metrics_are_found_in_the_folder_and_beside_it(saved):
    _, folder = saved
    assert adapter_infos(folder)[0].metrics is None
    for place in (folder.parent, folder / "evaluation", folder):
        place.mkdir(exist_ok=True)
        metrics = {"nll": {"value": len(place.name)}}
        (place / "metrics.json").write_text(json.dumps({"metrics": metrics}))
        assert adapter_infos(folder)[0].metrics == metrics
    for foreign in ([], {"metrics": None}, {"metrics": {"accuracy": 0.9}}, {"accuracy": 0.9}):
        (folder / "metrics.json").write_text(json.dumps(foreign))
        assert adapter_infos(folder)[0].metrics == {"nll": {"value": len("evaluation")}}
    (folder / "metrics.json").write_text("{")
    with pytest.raises(ValueError, match=r"metrics\.json is damaged"):
        adapter_infos(folder)


def test_damaged_folders_are_named(saved, tmp_path):
    _, folder = saved
    weights = (folder / "adapter_model.safetensors").read_bytes()
    config = (folder / "adapter_config.json").read_text()

    def refused(message):
        with pytest.raises(ValueError, match=message):
            adapter_infos(folder)
        (folder / "adapter_model.safetensors").write_bytes(weights)
        (folder / "adapter_config.json").write_text(config)

    (folder / "adapter_model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused("is damaged or cut off")
    (folder / "adapter_model.safetensors").unlink()
    refused("Only safetensors files are opened")
    (folder / "adapter_config.json").write_text('{"peft_type": ')
    refused(r"adapter_config\.json in .* is damaged")
    (folder / "adapter_config.json").unlink()
    refused(r"adapter_config\.json")
    change_config(folder, base_model_class="system")
    refused("class system, which is not supported")
    change_config(folder, num_members=4)
    refused("is of 3 members, but its adapter_config.json says 4")
    change_config(folder, num_adapted_norms=7)
    refused("has gates for 5 norms, but its adapter_config.json says 7")
    change_weights(folder, lambda tensors: next(iter(tensors.values())).fill_(torch.nan))
    refused("not finite")
    change_weights(folder, lambda tensors: tensors.clear())
    refused("is of 0 members")


def test_what_is_no_ensemble_is_refused(tmp_path):
    get_peft_model(tiny.base_model("bert"), LoraConfig(target_modules=["query"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not a sigma-norm ensemble"):
        adapter_infos(tmp_path)
    with pytest.raises(ValueError, match="There is no folder"):
        adapter_infos("nobody/nothing")


def test_late_branching_is_shown(tmp_path):
    tiny.ensemble("bert", branch_layer=1, prefix="shared").save_pretrained(tmp_path)
    (info,) = adapter_infos(tmp_path)
    assert (info.branch_layer, info.prefix) == (1, "shared")
    console = Console(record=True, width=200)
    console.print(table_of_info(info))
    assert "block 1, over a shared prefix" in console.export_text()
