import json

import numpy as np
import pytest
import search_recipe
from datasets import DatasetDict
from test_compare_baselines import sentences

from sigma_nens_hf import SigmaNEnsTrainingArguments, SigmaNormConfig


@pytest.fixture
def command_line(tmp_path, checkpoint_folder, monkeypatch):
    monkeypatch.setattr(search_recipe, "SELECTION_SAMPLES", 16)
    monkeypatch.setattr(search_recipe, "has_fast_bf16", lambda: False)
    monkeypatch.setattr(search_recipe, "minilm_folder", lambda: checkpoint_folder("bert", encoder_only=True))
    data = DatasetDict(train=sentences(90, 0), validation=sentences(9, 200))
    for name, split in data.items():
        split.to_parquet(tmp_path / "data" / f"{name}-00000-of-00001.parquet")
    return [
        "--dataset_name", str(tmp_path / "data"), "--output_dir", str(tmp_path / "out"), "--members", "2",
        "--seeds", "0", "--num_train_epochs", "1", "--max_train_samples", "40",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The calibration split does not tell a temperature")
def test_recipes_are_trained_and_compared_on_a_part_of_train(command_line, tmp_path, capsys):
    results = tmp_path / "results.json"
    names = ["paper", "shallow-rate6e-3"]
    search_recipe.main([*command_line, "--recipes", *names, "--references", "--results", str(results)])
    rows = json.loads(results.read_text())["recipes"]
    models = ["single model", "scaled single model", "deep ensemble", "sigma-N-Ens"]
    assert [(row["recipe"], row["model"]) for row in rows] == [(name, model) for name in names for model in models]
    table = capsys.readouterr().out.strip().splitlines()
    assert len(table) == 2 + len(rows)
    assert f"{rows[-1]['nll']:.4f}" in table[-1]
    out = tmp_path / "out"
    answers = [np.load(out / name / point / "logits.npz") for name in names for point in _points(name)]
    assert {len(file["report/labels"]) for file in answers} == {16}  # not the 9 of the reported split
    configs = [
        json.loads((out / name / _points(name)[0] / "adapter" / "adapter_config.json").read_text()) for name in names
    ]
    assert [(config["gate_depth"], config["train_scale"]) for config in configs] == [(1, False), (0.15, True)]
    assert [config["training_recipe"]["learning_rate"] for config in configs] == [2e-3, 6e-3]
    (single,) = [json.loads(p.read_text()) for p in out.glob("shallow*/single-seed0-0/adapter/adapter_config.json")]
    assert (single["gate_depth"], single["training_recipe"]["learning_rate"]) == (1, 6e-3)


def _points(name):
    recipe = search_recipe.RECIPES[name]
    return [
        f"members2-tau{recipe['diversity_temperature']:g}-lambda{recipe['diversity_weight']:g}-seed0",
        "single-seed0-1",
    ]


def test_unknown_recipes_are_refused(command_line):
    with pytest.raises(ValueError, match=r"no recipe \['magic'\]"):
        search_recipe.main([*command_line, "--recipes", "magic"])


@pytest.mark.parametrize("name", search_recipe.RECIPES)
def test_recipes_name_fields_that_there_are(name):
    fields = SigmaNormConfig.__dataclass_fields__ | SigmaNEnsTrainingArguments.__dataclass_fields__
    assert search_recipe.RECIPES[name].keys() <= fields.keys()
