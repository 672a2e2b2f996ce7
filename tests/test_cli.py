import json
import os
import re
import subprocess
import sys

import evaluate_tiny
import numpy as np
import pandas
import pytest
from evaluate_tiny import LABELS, dataset
from typer.testing import CliRunner

from sigma_nens_hf import cli, load_ensemble, predict
from sigma_nens_hf.cli import app
from sigma_nens_hf.evaluation import files
from sigma_nens_hf.metrics import ood_metrics

ALL_FILES = {
    "metrics.json", "metrics.csv", "examples.csv", "ood_examples.csv",
    *(f"{name}.{suffix}" for name in ("reliability", "risk_coverage", "gates", "sharing", "entropy")
      for suffix in ("png", "csv")),
}  # fmt: skip
WITHOUT_OOD = ALL_FILES - {"ood_examples.csv", "entropy.png", "entropy.csv"}


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def message(result):
    """What a failed command says, on one line."""
    assert result.exit_code == 1, result.output
    assert not isinstance(result.exception, ValueError | OSError)
    return re.sub(r"\s+", " ", result.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    evaluate_tiny.save_adapter(folder)
    dataset("bert", 45).to_csv(folder / "texts.csv")
    dataset("bert", 21, seed=1).remove_columns("label").to_json(folder / "others.jsonl")
    return folder


@pytest.fixture
def evaluate(folder, tmp_path):
    def evaluate(*arguments, adapter=folder / "adapter", data="texts.csv"):
        return run(
            "evaluate", adapter, "--dataset", folder / data, "--resamples", 20, "--batch-size", 7,
            "--output-dir", tmp_path / "out", *arguments,
        )  # fmt: skip

    return evaluate


def test_everything_is_written(evaluate, folder, tmp_path):
    result = evaluate("--ood-dataset", folder / "others.jsonl", "--n-bins", 5)
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == ALL_FILES
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    examples = pandas.read_csv(tmp_path / "out" / "examples.csv")
    others = pandas.read_csv(tmp_path / "out" / "ood_examples.csv")
    assert (len(examples), len(others)) == (45, 21)
    assert set(examples["prediction"]) <= set(LABELS.values())
    assert "label" not in others
    expected = {"num_rows": 45, "num_members": 3, "temperature": 1.0, "n_bins": 5, "split": None}
    assert {name: report[name] for name in expected} == expected
    assert report["seconds"] > 0
    assert report["versions"]["transformers"]
    right = examples["prediction"] == examples["label"]
    assert report["metrics"]["accuracy"]["value"] == pytest.approx(right.mean())
    assert report["metrics"]["ece"]["noise_floor_95"] > report["metrics"]["ece"]["noise_floor_mean"] > 0
    assert report["metrics"]["nll"]["value"] == pytest.approx(-np.log(examples["label_probability"]).mean())
    for score in ("predictive_entropy", "modulation_uncertainty", "disagreement"):
        figures = report["out_of_distribution"][score]
        lower, upper = figures.pop("auroc_lower"), figures.pop("auroc_upper")
        assert figures == ood_metrics(examples[score], others[score])
        assert 0 <= lower <= figures["auroc"] <= upper <= 1
    long = pandas.read_csv(tmp_path / "out" / "metrics.csv").set_index(["group", "name", "figure"])["value"]
    assert long["ensemble", "ece", "upper"] == report["metrics"]["ece"]["upper"]
    assert long["member_2", "nll", "value"] == report["members"]["nll"][2]
    assert long["out_of_distribution", "predictive_entropy", "auroc"] == pytest.approx(
        report["out_of_distribution"]["predictive_entropy"]["auroc"]
    )
    assert f"{report['metrics']['accuracy']['value']:.4f}" in result.stdout
    assert "AUROC" in result.stdout


def test_rows_are_the_predictions(evaluate, folder, tmp_path):
    assert evaluate("--max-examples", 13, "--seed", 2).exit_code == 0
    examples = pandas.read_csv(tmp_path / "out" / "examples.csv")
    texts = pandas.read_csv(folder / "texts.csv")["text"]
    predictions = predict(*load_ensemble(folder / "adapter"), [*texts[examples["example"]]])
    assert len(predictions) == 13
    for (_, row), prediction in zip(examples.iterrows(), predictions, strict=True):
        assert row["prediction"] == prediction.label
        assert row["probability"] == pytest.approx(prediction.probability, rel=1e-4)


def test_an_evaluation_is_not_replaced_unasked(evaluate, folder, tmp_path):
    assert evaluate("--ood-dataset", folder / "others.jsonl").exit_code == 0
    (tmp_path / "out" / "notes.txt").write_text("mine")
    before = (tmp_path / "out" / "metrics.json").read_bytes()
    assert "holds an evaluation already" in message(evaluate())
    assert (tmp_path / "out" / "metrics.json").read_bytes() == before
    assert evaluate("--overwrite").exit_code == 0
    # Nothing of the earlier one is left, and all that is not of an evaluation.
    assert {path.name for path in (tmp_path / "out").iterdir()} == WITHOUT_OOD | {"notes.txt"}


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("evaluate_dataset", KeyboardInterrupt),
        ("evaluate_dataset", ValueError("broken")),
        ("write_report", RuntimeError),
    ],
)
def test_what_is_cut_off_leaves_nothing(place, error, evaluate, tmp_path, monkeypatch):
    original = getattr(cli, place)

    def cut_off(*arguments, **kwargs):
        original(*arguments, **kwargs)
        raise error

    monkeypatch.setattr(cli, place, cut_off)
    assert evaluate().exit_code != 0
    assert not list(tmp_path.iterdir())


def test_what_is_cut_off_leaves_the_earlier_evaluation(evaluate, tmp_path, monkeypatch):
    assert evaluate().exit_code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(files, "gates_plot", lambda *_, **__: 1 / 0)
    assert evaluate("--overwrite").exit_code == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_leftovers_of_a_killed_run_are_not_in_the_way(evaluate, tmp_path):
    killed = tmp_path / "out" / ".unfinished-abc" / "finished"
    killed.mkdir(parents=True)
    (killed / "ood_examples.csv").write_text("half a")
    assert evaluate().exit_code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*WITHOUT_OOD, ".unfinished-abc"}


def test_an_evaluation_that_cannot_be_moved_to_its_place_leaves_the_earlier_one(evaluate, tmp_path, monkeypatch):
    assert evaluate().exit_code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    replace, failed = os.replace, []

    def fail_once(source, target):
        if target == tmp_path / "out" / "metrics.csv" and not failed:
            failed.append(target)
            raise OSError("no space left")
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", fail_once)
    assert "no space left" in message(evaluate("--overwrite", "--n-bins", 3))
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_file_is_the_one_that_was_named(evaluate, folder):
    (folder / "texts1.csv").write_text((folder / "texts.csv").read_text().split("\n", 1)[0] + "\nother,0\n")
    (folder / "texts[1].csv").write_text((folder / "texts.csv").read_text())
    result = evaluate(data="texts[1].csv")
    assert result.exit_code == 0, result.output
    assert "45 rows of" in re.sub(r"\s+", " ", result.output)
    assert "a file, which has no split" in message(evaluate("--split", "test", "--overwrite"))


def test_stored_temperature_is_used(folder, tmp_path):
    assert "calibration_temperature" in message(
        run("evaluate", folder / "adapter", "--dataset", folder / "texts.csv", "--calibrated",
            "--output-dir", tmp_path / "out")
    )  # fmt: skip
    assert not list(tmp_path.iterdir())
    evaluate_tiny.save_adapter(tmp_path, calibration_temperature=3.0)
    reports = {}
    for name, arguments in {"plain": [], "calibrated": ["--calibrated"]}.items():
        result = run(
            "evaluate", tmp_path / "adapter", "--dataset", folder / "texts.csv", "--resamples", 5,
            "--output-dir", tmp_path / name, *arguments,
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        reports[name] = json.loads((tmp_path / name / "metrics.json").read_text())
    assert (reports["plain"]["temperature"], reports["calibrated"]["temperature"]) == (1.0, 3.0)
    assert reports["plain"]["members"] == reports["calibrated"]["members"]
    assert reports["plain"]["metrics"]["accuracy"] == reports["calibrated"]["metrics"]["accuracy"]
    assert reports["plain"]["metrics"]["nll"]["value"] > reports["calibrated"]["metrics"]["nll"]["value"]


def test_folders_of_images_are_evaluated(tmp_path):
    evaluate_tiny.save_adapter(tmp_path, "vit")
    for n, row in enumerate(dataset("vit", 12)):
        path = tmp_path / "images" / "validation" / ["Good", "bad", "FAIR"][row["label"]] / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        row["image"].save(path)
    arguments = ["evaluate", tmp_path / "adapter", "--dataset", tmp_path / "images", "--batch-size", 5]
    result = run(*arguments, "--resamples", 5, "--output-dir", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert pandas.read_csv(tmp_path / "out" / "examples.csv")["label"].value_counts().to_dict() == {
        LABELS[index]: count
        for index, count in pandas.Series(dataset("vit", 12)["label"]).map({0: 2, 1: 0, 2: 1}).value_counts().items()
    }
    (tmp_path / "images" / "validation" / "bad" / "broken.png").write_bytes(b"no image")
    assert "broken.png, cannot be read" in message(run(*arguments, "--output-dir", tmp_path / "again"))
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--label-column", "mood"], "The data has no column mood, only ['text', 'label']"),
        (["--text-column", "story"], "no column story"),
        (["--second-text-column", "text"], "that of the first must be given as well"),
        (["--image-column", "a", "--text-column", "text"], "either an image or a text"),
        (["--base-model", "/nowhere/at_all"], "base model /nowhere/at_all cannot be loaded"),
        (["--ood-dataset", "missing.csv"], "There is no file missing.csv"),
    ],
)
def test_what_the_user_can_mend_is_said_in_a_message(arguments, expected, evaluate, tmp_path):
    assert expected in message(evaluate(*arguments))
    assert not list(tmp_path.iterdir())


def test_data_that_does_not_fit_is_refused(evaluate, folder, tmp_path):
    texts = dataset("bert", 5)
    texts.remove_columns("label").to_csv(folder / "unlabelled.csv")
    assert "No column for the labels" in message(evaluate(data="unlabelled.csv"))
    texts.remove_columns("label").add_column("label", [-1] * 5).to_csv(folder / "hidden.csv")
    assert "unlabelled split" in message(evaluate(data="hidden.csv"))
    texts.remove_columns("label").add_column("label", ["good", "bad", "odd", "bad", "good"]).to_csv(folder / "odd.csv")
    assert "no classes 'odd'" in message(evaluate(data="odd.csv"))
    assert "It is a model, not an adapter" in message(evaluate(adapter=folder / "base"))
    (tmp_path / "out").write_text("a file")
    assert "is no folder" in message(evaluate())


def test_info_shows_an_adapter_and_its_figures(folder):
    assert run("evaluate", folder / "adapter", "--dataset", folder / "texts.csv", "--resamples", 5,
               "--output-dir", folder / "adapter" / "evaluation").exit_code == 0  # fmt: skip
    result = run("info", folder / "adapter")
    assert result.exit_code == 0, result.output
    for part in ("text-classification", "bad, fair, good", "accuracy 0.", "heads", "not fitted"):
        assert part in result.stdout
    (info,) = json.loads(run("info", folder / "adapter", "--json").stdout)
    report = json.loads((folder / "adapter" / "evaluation" / "metrics.json").read_text())
    assert info["metrics"] == report["metrics"]
    assert "It is a model, not an adapter" in message(run("info", folder / "base"))
    weights = folder / "adapter" / "adapter_config.json"
    config = json.loads(weights.read_text())
    weights.write_text(json.dumps({**config, "base_model_name_or_path": "models[/v2]"}))
    assert "models[/v2]" in run("info", folder / "adapter").stdout
    weights.write_text(json.dumps(config))


def test_a_process_of_its_own(folder):
    command = [os.path.join(os.path.dirname(sys.executable), "sigma-nens"), "info", str(folder / "adapter"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["num_members"] == 3
