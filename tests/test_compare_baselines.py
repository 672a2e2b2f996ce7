import json

import baselines
import compare_baselines
import comparison_runs
import numpy as np
import pytest
import tiny
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from member_baselines import LowRankLinear, RankOneLinear, replace_linear_layers
from script_runs import rows

from sigma_nens_hf import ensemble_from_pretrained, member_subset


def sentences(num_examples, offset):
    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["negative", "positive"])})
    parts = list(rows(num_examples, offset))
    columns = {"sentence": [row["text"] for row in parts], "label": [int(row["mood"] == "positive") for row in parts]}
    return Dataset.from_dict(columns, features)


@pytest.fixture
def command_line(tmp_path, checkpoint_folder, monkeypatch):
    checkpoint = checkpoint_folder("bert", encoder_only=True)
    monkeypatch.setattr(
        comparison_runs, "sst2_like", lambda: DatasetDict(train=sentences(60, 0), test=sentences(21, 60))
    )
    shifts = DatasetDict(amazon=sentences(9, 100), tweets=sentences(7, 200))
    monkeypatch.setattr(compare_baselines, "sentiment_shifts", lambda: shifts)
    monkeypatch.setattr(comparison_runs, "has_fast_bf16", lambda: False)
    return [
        "--model_name_or_path", str(checkpoint), "--offline_assets", "--output_dir", str(tmp_path / "out"),
        "--num_members", "2", "--num_train_epochs", "1", "--seeds", "0", "1", "--dropout_passes", "3",
        "--max_train_samples", "40", "--full_seeds", "0",
    ]  # fmt: skip


def test_every_method_is_trained_reported_and_resumed(command_line, tmp_path, capsys):
    compare_baselines.main([*command_line, "--train_only"])
    folders = sorted(path.parent.name for path in (tmp_path / "out").glob("*/run.json"))
    assert folders == sorted(
        [f"norms-seed{seed}-{i}" for seed in (0, 1) for i in (0, 1)]
        + ["full-seed0-0", "full-seed0-1"]
        + [f"{kind}-seed{seed}-0" for kind in ("rank_one", "lora", "sigma") for seed in (0, 1)]
    )
    answers = np.load(tmp_path / "out" / "norms-seed1-0" / "logits.npz")
    assert answers["report/logits"].shape == (21, 1, 2)
    assert answers["report/dropout"].shape == (21, 3, 2)
    assert answers["calibration/labels"].shape == (8,)
    assert not np.array_equal(answers["report/dropout"][:, 0], answers["report/dropout"][:, 1])
    others = [np.load(tmp_path / "out" / name / "logits.npz") for name in folders]
    assert all(np.array_equal(other["tweets/labels"], answers["tweets/labels"]) for other in others)
    assert len({other["report/logits"].tobytes() for other in others}) == len(others)
    run = json.loads((tmp_path / "out" / "sigma-seed0-0" / "run.json").read_text())
    assert run["stored_bytes"] > 4 * run["trained_parameters"]

    (tmp_path / "out" / "lora-seed1-0" / "run.json").unlink()  # as a kill leaves it
    before = (tmp_path / "out" / "lora-seed1-0" / "logits.npz").read_bytes()
    capsys.readouterr()
    compare_baselines.main([*command_line, "--resamples", "20"])
    printed = capsys.readouterr().out
    assert printed.count("training ") == 1 + printed.count("| training |")
    again = np.load(tmp_path / "out" / "lora-seed1-0" / "logits.npz")
    (tmp_path / "before.npz").write_bytes(before)
    np.testing.assert_array_equal(again["report/logits"], np.load(tmp_path / "before.npz")["report/logits"])
    report = (tmp_path / "out" / "report.md").read_text()
    assert report in printed
    assert "**held-out sentences**, 21 examples" in report
    assert "**tweets**, 7 examples" in report
    assert "| deep ensemble, full fine-tunes | 1 |" in report
    assert "| sigma-N-Ens | 2 |" in report
    with pytest.raises(ValueError, match="other settings"):
        compare_baselines.main([*command_line, "--num_train_epochs", "2"])


def test_unknown_kinds_are_refused(command_line):
    with pytest.raises(ValueError, match="no kind of model"):
        compare_baselines.main([*command_line, "--kinds", "magic"])


@pytest.mark.parametrize("kind", ["norms", "full", "sigma"])
def test_models_are_asked_in_the_order_of_the_examples(kind, checkpoint_folder, tokenizer, tmp_path):
    common = {
        "output_dir": str(tmp_path), "train_sampling_strategy": "group_by_length", "per_device_eval_batch_size": 4,
        "use_cpu": True, "remove_unused_columns": False, "report_to": "none",
    }  # fmt: skip
    folder = str(checkpoint_folder("bert", encoder_only=True))
    trainer = baselines.KINDS[kind].make(folder, ["negative", "positive"], 2 if kind == "sigma" else 1, 1e-3, common)
    texts = ["good", "a very good film film", "bad", "very bad film", "dull", "fine film", "a film", "bad bad", "fine"]
    data = Dataset.from_dict({**tokenizer(texts), "labels": [0] * len(texts)})
    answers = baselines.member_logits(trainer, data)
    assert not trainer.model.training
    with torch.no_grad():
        for text, answer in zip(texts, answers, strict=True):
            output = trainer.model(**tokenizer(text, return_tensors="pt"))
            alone = output.logits[:, None] if kind == "full" else output.member_logits
            torch.testing.assert_close(answer, alone[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("layer_class", "pattern"),
    [(RankOneLinear, baselines.ALL_LINEAR), (LowRankLinear, baselines.QUERY_AND_VALUE)],
)
def test_member_layers_in_the_batch_are_those_of_members_alone(layer_class, pattern, checkpoint_folder):
    model, _ = ensemble_from_pretrained(
        checkpoint_folder("bert", encoder_only=True), "text-classification", num_members=3, num_labels=3,
        init_scaler_std=0,
    )  # fmt: skip
    batch = tiny.inputs("bert", with_labels=False)
    with torch.no_grad():
        before = model(**batch).member_logits
        parameters = replace_linear_layers(model, pattern, lambda layer: layer_class(layer, num_members=3))
        if layer_class is LowRankLinear:  # the product starts as 0
            torch.testing.assert_close(model(**batch).member_logits, before)
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter) * 0.3)
        together = model(**batch).member_logits
        assert tiny.relative_error(together, before) > 1e-2
        for member in range(3):
            with member_subset(model, member):
                assert tiny.relative_error(model(**batch).member_logits[:, 0], together[:, member]) < 1e-5
    model(**batch).member_logits.sum().backward()
    assert all(parameter.grad is not None for parameter in parameters)
    trained = set(baselines.trained_parameters(model))
    assert not any("sigma_norm_scaler" in name or "sigma_norm_bias" in name for name in trained)


@torch.no_grad()
def test_member_layers_by_their_formulas():
    base = torch.nn.Linear(4, 6)
    x = torch.randn(5, 4)
    rank_one, low_rank = RankOneLinear(base, num_members=2), LowRankLinear(base, num_members=2, rank=3, alpha=6)
    low_rank.up.normal_()
    rank_one.member_bias.normal_()
    for m in range(2):
        weight = base.weight * rank_one.output_factor[m][:, None] * rank_one.input_factor[m]
        torch.testing.assert_close(rank_one.of_member(x, m), x @ weight.T + rank_one.member_bias[m])
        weight = base.weight + 2 * low_rank.up[m] @ low_rank.down[m]
        torch.testing.assert_close(low_rank.of_member(x, m), x @ weight.T + base.bias)


def test_layers_that_are_not_there_are_refused(checkpoint_folder):
    model = tiny.ensemble("bert")
    with pytest.raises(ValueError, match="No linear layer"):
        replace_linear_layers(model, "nowhere", lambda layer: layer)
