"""Sweeps on a tiny model: what is trained, that it goes on, and the figures checked against a second way."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pandas
import pytest
import scipy.stats
import tiny
import torch
from datasets import Dataset
from filelock import FileLock
from script_runs import NUM_REPORT, NUM_TRAIN, image_folder, rows
from typer.testing import CliRunner

from sigma_nens_hf import expected_sharing, load_ensemble, realized_sharing, temperature_for_sharing
from sigma_nens_hf.cli import app
from sigma_nens_hf.metrics import TABLE_METRICS, ExampleTable, paired_bootstrap
from sigma_nens_hf.sweep.points import SINGLE, Setting, SweepPoint, settings_of, sweep_points
from sigma_nens_hf.sweep.run import leave_launch


def run(*arguments):
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


pytestmark = pytest.mark.filterwarnings("ignore:The calibration split does not tell a temperature")
SMALL = ["--tau", ".1,1", "--members", "2", "--seeds", "0,1", "--diversity-weight", ".05"]
ENSEMBLES = [f"members2-tau{tau}-lambda0.05-seed{seed}" for tau in ("0.1", "1") for seed in (0, 1)]
SINGLES = [f"single-seed{seed}-{index}" for seed in (0, 1) for index in (0, 1)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint and its texts, and the finished sweep over them."""
    folder = tmp_path_factory.mktemp("sweep")
    for name, (count, offset) in {"train": (NUM_TRAIN, 0), "report": (NUM_REPORT, NUM_TRAIN)}.items():
        Dataset.from_list(list(rows(count, offset))).to_csv(folder / f"{name}.csv")
    tiny.encoder_of(tiny.base_model("bert")).save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    result = run(*options(folder, folder / "out"), *SMALL)
    assert result.exit_code == 0, result.output
    return folder


def options(source, output_dir):
    return [
        source / "model", "--train-file", source / "train.csv", "--report-file", source / "report.csv",
        "--label-column", "mood", "--modules-to-save", "pooler", "--epochs", 1, "--batch-size", 8,
        "--calibration-fraction", 0.3, "--resamples", 20, "--output-dir", output_dir,
    ]  # fmt: skip


@pytest.fixture
def texts(source, tmp_path):
    return options(source, tmp_path / "out")


@pytest.fixture
def swept(source, tmp_path):
    return shutil.copytree(source / "out", tmp_path / "out")


def test_a_sweep_is_trained_and_reported(source):
    out = source / "out"
    assert sorted(path.parent.name for path in out.glob("*/run.json")) == sorted(ENSEMBLES + SINGLES)
    assert not list(out.glob("*/checkpoints"))
    assert (out / "frontier.png").stat().st_size > 10_000
    frontier = pandas.read_csv(out / "frontier.csv")
    assert frontier["model"].tolist() == [
        "single model", "scaled single model", "deep ensemble", "sigma-N-Ens", "sigma-N-Ens",
    ]  # fmt: skip
    content = json.loads((out / "frontier.json").read_text())
    assert content["settings"]["training"]["num_train_epochs"] == 1
    assert [row["model"] for row in content["frontier"]] == frontier["model"].tolist()
    assert "tau" not in content["frontier"][0]


def test_a_sweep_goes_on_with_what_is_missing(texts, swept):
    cut_off, *finished = ENSEMBLES + SINGLES
    before = {name: (swept / name / "logits.npz").stat().st_mtime_ns for name in finished}
    first = np.load(swept / cut_off / "logits.npz")
    first = {key: first[key] for key in first}
    (swept / cut_off / "run.json").unlink()  # as a kill leaves it
    result = run(*texts, *SMALL, "--seeds", "0,1,2", "--tau", "1,.1")
    assert result.exit_code == 0, result.output
    assert {name: (swept / name / "logits.npz").stat().st_mtime_ns for name in finished} == before
    again = np.load(swept / cut_off / "logits.npz")
    assert all(np.array_equal(first[key], again[key]) for key in first)
    frontier = pandas.read_csv(swept / "frontier.csv")
    assert frontier["seeds"].tolist() == [3] * 5
    assert frontier["tau"].dropna().tolist() == [0.1, 1]
    other = run(*texts, *SMALL, "--max-seq-length", 5)
    assert other.exit_code == 1
    assert "data.max_seq_length: 128 then, 5 now" in " ".join(other.stderr.split())


def test_figures_are_those_of_the_stored_answers_and_adapters(source):
    out = source / "out"
    frontier = pandas.read_csv(out / "frontier.csv")
    answers = {path.parent.name: np.load(path) for path in out.glob("*/logits.npz")}

    def tables(names):
        by_seed = []
        for seed in (0, 1):
            files = [answers[name.format(seed)] for name in names]
            logits = np.concatenate([file["report/logits"] for file in files], 1)
            by_seed.append(ExampleTable.of_members(logits, files[0]["report/labels"]))
        return by_seed

    ours, lower = (tables([f"members2-tau{tau}-lambda0.05-seed{{}}"]) for tau in ("1", "0.1"))
    deep, row = tables(["single-seed{}-0", "single-seed{}-1"]), frontier.iloc[-1]
    nll = [TABLE_METRICS["nll"](table) for table in ours]
    assert row["nll"] == pytest.approx(np.mean(nll))
    interval = scipy.stats.t.interval(0.95, 1, np.mean(nll), scipy.stats.sem(nll))
    assert row[["nll_low", "nll_high"]].tolist() == pytest.approx(interval)
    difference = paired_bootstrap(ours, deep, "nll", n_resamples=20)
    columns = ["nll_minus_deep_ensemble", "nll_minus_deep_ensemble_low", "nll_minus_deep_ensemble_high"]
    assert row[columns].tolist() == pytest.approx(list(difference))
    fall = np.mean([table.disagreement.mean() for table in ours]) - np.mean([t.disagreement.mean() for t in lower])
    assert row["disagreement_minus_lower_tau"] == pytest.approx(fall)
    assert pandas.isna(frontier.iloc[-2]["disagreement_minus_lower_tau"])
    assert row["expected_sharing"] == expected_sharing(1, 2)
    model, tokenizer = load_ensemble(out / "members2-tau1-lambda0.05-seed0" / "adapter")
    stored = json.loads((out / "members2-tau1-lambda0.05-seed0" / "run.json").read_text())
    assert stored["realized_sharing"] == pytest.approx(realized_sharing(model))
    texts_in_order = sorted(
        (row["text"] for row in rows(NUM_REPORT, NUM_TRAIN)), key=lambda t: len(tokenizer(t).input_ids)
    )
    with torch.no_grad():
        logits = model(**tokenizer(texts_in_order, padding=True, return_tensors="pt")).member_logits
    expected = answers["members2-tau1-lambda0.05-seed0"]["report/logits"]
    assert np.abs(logits.numpy() - expected).max() < 1e-4 * np.abs(expected).max()


def test_points_that_another_process_trains_are_left_to_it(texts, swept):
    folder = swept / "single-seed1-0"
    (folder / "run.json").unlink()
    with FileLock(folder / ".lock"):
        result = run(*texts, *SMALL)
    assert result.exit_code == 0, result.output
    assert "not among the figures: single-seed1-0" in " ".join(result.stderr.split())
    assert not (folder / "run.json").exists()
    frontier = pandas.read_csv(swept / "frontier.csv")
    assert frontier["seeds"].tolist() == [1, 1, 1, 2, 2]


@pytest.mark.slow
def test_a_cached_prefix_is_kept_once_for_all_temperatures(texts, tmp_path):
    options = ["--branch-layer", 1, "--gate-depth", 0.5, "--no-train-scale", "--no-references"]
    result = run(*texts, *SMALL, *options)
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "out" / ENSEMBLES[0] / "adapter" / "adapter_config.json").read_text())
    assert (config["branch_layer"], config["gate_depth"], config["train_scale"]) == (1, 0.5, False)
    assert len(list((tmp_path / "out" / "prefixes").iterdir())) == 1
    frontier = pandas.read_csv(tmp_path / "out" / "frontier.csv")
    assert frontier["model"].tolist() == ["sigma-N-Ens"] * 2
    assert "nll_minus_single" not in frontier


@pytest.mark.slow
def test_images(tmp_path, checkpoint_folder):
    result = run(
        checkpoint_folder("vit", encoder_only=True), "--dataset", image_folder(tmp_path / "images"),
        "--image-column", "image", "--members", 2, "--seeds", 0, "--epochs", 1, "--output-dir", tmp_path / "out",
        "--calibration-fraction", 0.3, "--resamples", 5,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    frontier = pandas.read_csv(tmp_path / "out" / "frontier.csv")
    assert frontier["tau"].dropna().tolist() == [temperature_for_sharing(1, 2)]
    assert "nll_low" not in frontier  # one seed has no interval


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--members", "1"], "at least 2 members, got 1"),
        (["--members", "two"], "--members takes whole numbers with commas between them, got 'two'"),
        (["--tau", "-1"], "temperature must be finite and positive"),
        (
            ["--members-per-feature", "3"],
            "There is no temperature for 4 members: give one, or members per feature up to 2",
        ),
        (["--gate-depth", "2"], "gate_depth must be above 0 and at most 1, got 2.0"),
        (["--seeds", ""], "needs at least one seed"),
        (["--diversity-weight", ""], "at least one number of members and one weight"),
        (["--diversity-weight", "-1"], "diversity_weight must be finite and not negative, got -1.0"),
        (["--image-column", "image"], "not both image and text"),
        (["--train-file", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_is_written(texts, arguments, message, tmp_path):
    result = run(*texts, "--text-column", "text", *arguments)
    assert result.exit_code == 1, result.output
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_data_must_be_named(tmp_path):
    result = run(tmp_path, "--output-dir", tmp_path / "out")
    assert result.exit_code == 1
    assert "Name the data: --dataset" in result.stderr


def test_points_in_order():
    settings = settings_of([4, 2], [0.5, 0.1], [0.01])
    assert settings == [Setting(4, 0.1, 0.01), Setting(4, 0.5, 0.01), Setting(2, 0.1, 0.01), Setting(2, 0.5, 0.01)]
    points = sweep_points(settings[2:], [3, 3, 5])
    assert points == [
        SweepPoint(SINGLE, 3, 0), SweepPoint(SINGLE, 3, 1), SweepPoint(settings[2], 3), SweepPoint(settings[3], 3),
        SweepPoint(SINGLE, 5, 0), SweepPoint(SINGLE, 5, 1), SweepPoint(settings[2], 5), SweepPoint(settings[3], 5),
    ]  # fmt: skip
    assert len({point.name for point in points}) == len(points)
    singles = [point.training_seed for point in points if point.setting == SINGLE]
    assert len(set(singles)) == len(singles)
    assert len(sweep_points(settings, [0], has_references=False)) == 4


@pytest.mark.parametrize("num_members", [4, 8, 16])
def test_without_a_temperature_there_is_one_for_every_sharing(num_members):
    taus = [setting.tau for setting in settings_of([num_members], [], [0.1])]
    assert [expected_sharing(tau, num_members) for tau in taus] == list(range(1, num_members // 2 + 1))


def test_members_per_feature_count_for_those_that_have_as_many():
    settings = settings_of([4, 8], [], [0.1], [2, 4])
    assert [(s.num_members, expected_sharing(s.tau, s.num_members)) for s in settings] == [(4, 2), (8, 2), (8, 4)]


def test_a_launched_process_trains_alone(monkeypatch):
    launch = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    leave_launch()
    assert not launch.keys() & os.environ.keys()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"


@pytest.mark.slow
def test_two_launched_processes_share_the_points(texts, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "sigma_nens_hf.cli", "sweep", *map(str, [*texts, *SMALL])]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out").glob("*/run.json"))) == 8
    assert pandas.read_csv(tmp_path / "out" / "frontier.csv")["seeds"].max() == 2
