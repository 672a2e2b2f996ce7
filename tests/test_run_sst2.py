import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_sst2
import text_splits
import tiny
import torch
from datasets import ClassLabel, Dataset, DatasetDict
from transformers import TrainerCallback

from sigma_nens_hf import SigmaNEnsTrainer, SigmaNEnsTrainingArguments, load_ensemble, predict
from sigma_nens_hf.metrics import accuracy, negative_log_likelihood

WORDS = {"positive": ["good", "fine", "very good"], "negative": ["bad", "dull", "very dull"]}


def rows(num_examples, offset=0):
    for i in range(offset, offset + num_examples):
        label = "positive" if i % 2 else "negative"
        yield {"text": f"a {WORDS[label][i % 3]} film {'film ' * (i % 4)}", "mood": label}


@pytest.fixture
def csv_files(tmp_path):
    files = {}
    for name, (count, offset) in {"train": (60, 0), "report": (21, 60)}.items():
        files[name] = tmp_path / f"{name}.csv"
        Dataset.from_list(list(rows(count, offset))).to_csv(files[name])
    return files


@pytest.fixture
def arguments(csv_files, checkpoint_folder, tmp_path):
    """What a command line says, as a list: everything runs through the script's own parser."""
    return [
        "--model_name_or_path", str(checkpoint_folder("bert", encoder_only=True)),
        "--train_file", str(csv_files["train"]), "--report_file", str(csv_files["report"]),
        "--text_column", "text", "--label_column", "mood",
        "--output_dir", str(tmp_path / "out"), "--num_train_epochs", "2", "--per_device_train_batch_size", "6",
        "--num_members", "3", "--use_cpu", "True", "--disable_tqdm", "True", "--logging_steps", "5",
        "--save_steps", "4", "--modules_to_save", "pooler",
    ]  # fmt: skip


def parse(arguments):
    parser = run_sst2.HfArgumentParser((run_sst2.ModelArguments, text_splits.DataArguments, SigmaNEnsTrainingArguments))
    return parser.parse_args_into_dataclasses(arguments)


def test_files_to_reports_and_a_loadable_adapter(arguments, tmp_path, capsys):
    single, ensemble = run_sst2.run(*parse([*arguments, "--num_train_epochs", "20"]))
    assert (single.name, single.num_members, ensemble.name, ensemble.num_members) == (
        "single",
        1,
        "ensemble",
        3,
    )
    assert single.num_examples == ensemble.num_examples == 21
    assert ensemble.accuracy > 0.7  # the task is a matter of single words
    printed = capsys.readouterr().out
    for name in ("accuracy", "NLL", "ECE", "Brier", "training time", "stored adapter"):
        assert name in printed
    adapter = tmp_path / "out" / "ensemble" / "adapter"
    assert ensemble.adapter_bytes == (adapter / "adapter_model.safetensors").stat().st_size
    model, tokenizer = load_ensemble(adapter)
    report = list(rows(21, 60))
    predictions = predict(model, tokenizer, [row["text"] for row in report])
    names = {"negative": 0, "positive": 1}
    p = torch.tensor([[prediction.probabilities[name] for name in names] for prediction in predictions])
    labels = [names[row["mood"]] for row in report]
    assert ensemble.accuracy == pytest.approx(accuracy(p, labels))
    assert ensemble.nll == pytest.approx(negative_log_likelihood(p, labels), rel=1e-3)
    written = json.loads((tmp_path / "out" / "ensemble" / "report.json").read_text())
    assert written["nll"] == ensemble.nll


def test_finished_stages_are_not_repeated(arguments, monkeypatch):
    first = run_sst2.run(*parse(arguments))
    monkeypatch.setattr(run_sst2, "train_stage", None)
    assert run_sst2.run(*parse(arguments)) == first


class Killed(BaseException):
    pass


def test_killed_run_goes_on_from_its_last_checkpoint_to_the_same_end(arguments, tmp_path, monkeypatch):
    uninterrupted = run_sst2.run(*parse([*arguments, "--output_dir", str(tmp_path / "whole")]))

    class KillAtStep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if "ensemble" in args.output_dir and state.global_step == 14:
                raise Killed

    trained_steps = []

    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trained_steps.append((Path(args.output_dir).name, state.global_step))

    with monkeypatch.context() as patch:
        patch.setattr(run_sst2, "SigmaNEnsTrainer", _with_callback(KillAtStep()))
        with pytest.raises(Killed):
            run_sst2.run(*parse(arguments))
    with monkeypatch.context() as patch:
        patch.setattr(run_sst2, "SigmaNEnsTrainer", _with_callback(Count()))
        resumed = run_sst2.run(*parse(arguments))
    assert trained_steps[0] == ("ensemble", 13)
    assert resumed[1].resumed
    for name in ("accuracy", "nll", "ece", "brier", "disagreement"):
        assert getattr(resumed[1], name) == getattr(uninterrupted[1], name)


def _with_callback(callback):
    class Trainer(SigmaNEnsTrainer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs, callbacks=[callback])

    return Trainer


def test_folder_of_another_run_is_left_alone(arguments):
    run_sst2.run(*parse(arguments))
    with pytest.raises(ValueError, match=r"other settings \(model.num_members: 3 then, 2 now\)"):
        run_sst2.run(*parse([*arguments, "--num_members", "2"]))


def test_calibration_split_is_carved_from_train_alone(arguments):
    _, data_args, training_args = parse([*arguments, "--max_train_samples", "20"])
    splits = text_splits.load_splits(data_args)
    assert splits["train"].features["mood"].names == ["negative", "positive"]
    carved = text_splits.carve(splits, data_args, training_args.seed)
    assert {name: len(split) for name, split in carved.items()} == {
        "train": 20,
        "calibration": 2,
        "report": 21,
    }
    data_args.max_train_samples = None
    carved = text_splits.carve(splits, data_args, training_args.seed)
    assert len(carved["train"]) + len(carved["calibration"]) == 60
    assert sorted(carved["train"]["text"][:] + carved["calibration"]["text"][:]) == sorted(splits["train"]["text"][:])
    assert carved["report"]["text"][:] == splits["report"]["text"][:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--text_column", "nowhere"], r"train split has no column \['nowhere'\]"),
        (["--report_file", "other.json"], "both be csv, json or parquet"),
    ],
)
def test_wrong_files_are_named(arguments, changes, message):
    _, data_args, _ = parse([*arguments, *changes])
    with pytest.raises(ValueError, match=message):
        text_splits.load_splits(data_args)


def test_unlabelled_split_is_refused():
    features = {"sentence": ["a", "b"], "label": [-1, -1]}
    labelled = Dataset.from_dict({"sentence": ["a", "b"], "label": [0, 1]})
    label = ClassLabel(names=["negative", "positive"])
    splits = DatasetDict(
        {
            "train": labelled.cast_column("label", label),
            "report": Dataset.from_dict(features).cast_column("label", label),
        }
    )
    with pytest.raises(ValueError, match="labels of -1: it is unlabelled"):
        text_splits.check_splits(splits, text_splits.DataArguments())


def test_unknown_label_is_named():
    splits = DatasetDict(
        {
            "train": Dataset.from_dict({"sentence": ["a", "b"], "label": ["no", "yes"]}),
            "report": Dataset.from_dict({"sentence": ["a"], "label": ["maybe"]}),
        }
    )
    with pytest.raises(ValueError, match="maybe"):
        text_splits.check_splits(splits, text_splits.DataArguments())


@pytest.mark.slow
def test_two_processes_under_accelerate_launch(arguments, tmp_path):
    script = Path(run_sst2.__file__)
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", str(script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(tiny.__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out examples") == 1
    report = json.loads((tmp_path / "out" / "ensemble" / "report.json").read_text())
    assert report["num_examples"] == 21
    load_ensemble(tmp_path / "out" / "ensemble" / "adapter")
