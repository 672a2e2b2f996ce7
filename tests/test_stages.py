import json
from pathlib import Path

import pytest
import stages
from script_runs import NUM_REPORT, SCRIPTS, command_line, launch_two_processes, parquet_folder
from transformers import TrainerCallback

from sigma_nens_hf import SigmaNEnsTrainer, load_ensemble

# More than one pass over the data; the texts are few, and like ones go into the same split.
STREAMING = ["--streaming", "--max_steps", "12", "--calibration_fraction", "0.3"]


@pytest.fixture(params=list(SCRIPTS))
def kind(request):
    return request.param


@pytest.fixture
def main(kind):
    return SCRIPTS[kind].main


@pytest.fixture
def arguments(kind, checkpoint_folder, tmp_path):
    architecture = {"text": "bert", "image": "vit"}[kind]
    return command_line(kind, tmp_path, checkpoint_folder(architecture, encoder_only=True))


@pytest.mark.parametrize("kind", ["text"])
def test_finished_stages_are_not_repeated_and_other_settings_not_mixed_with_them(main, arguments, monkeypatch):
    first = main(arguments)
    monkeypatch.setattr(stages, "train_stage", None)
    assert main(arguments) == first
    assert main([*arguments, "--compare_single", "False"]) == first[1:]
    with pytest.raises(ValueError, match=r"other settings \(model.num_members: 3 then, 2 now\)"):
        main([*arguments, "--num_members", "2"])
    report = Path(arguments[arguments.index("--report_file") + 1])
    report.write_text(report.read_text().replace("good", "fine"))
    with pytest.raises(ValueError, match=r"other settings \(files\.report\.csv: "):
        main(arguments)


def test_streamed_run_trains_and_reports_every_example_once(main, arguments, tmp_path, monkeypatch):
    monkeypatch.setattr("sigma_nens_hf.data.splits.PIECE", 8)
    (ensemble,) = main([*arguments, *STREAMING, "--compare_single", "False"])
    assert ensemble.num_examples == NUM_REPORT
    state = json.loads((tmp_path / "out" / "ensemble" / "checkpoint-12" / "trainer_state.json").read_text())
    assert state["global_step"] == 12
    load_ensemble(tmp_path / "out" / "ensemble" / "adapter")


def test_members_of_late_blocks_are_trained_over_a_cached_prefix(main, kind, arguments, tmp_path):
    branch = ["--branch_layer", "1", "--prefix", "staged", "--prefix_dropout", "False"]
    cached = [*arguments, *branch, "--prefix_cache", str(tmp_path / "prefixes")]
    if kind == "image":
        with pytest.raises(ValueError, match="pixel_values of the same examples differs"):
            main([*cached, "--compare_single", "False"])
        cached += ["--augmentation", "none", "--output_dir", str(tmp_path / "plain")]
    folder = tmp_path / ("plain" if kind == "image" else "out")
    single, ensemble = main(cached)
    assert single.num_examples == ensemble.num_examples == NUM_REPORT
    assert len(list((tmp_path / "prefixes").glob("*/part-000000.safetensors"))) == 1
    model, _ = load_ensemble(folder / "ensemble" / "adapter")
    config = model.peft_config["default"]
    assert (config.branch_layer, config.prefix, config.prefix_is_tuned) == (1, "staged", True)
    assert load_ensemble(folder / "single" / "adapter")[0].peft_config["default"].branch_layer is None


def test_stream_without_a_number_of_steps_is_refused(main, arguments):
    with pytest.raises(ValueError, match="with streaming pass max_steps"):
        main([*arguments, "--streaming"])


def test_failed_start_leaves_the_folder_free(main, arguments, tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        main([*arguments, "--label_column", "nowhere"])
    assert not (tmp_path / "out").exists()
    with pytest.raises(OSError, match="find them in the cached files"):
        main([*arguments, "--model_name_or_path", "no_such_model", "--head_init", "fresh"])
    assert len(main([*arguments, "--max_steps", "1"])) == 2


def test_heads_of_a_checkpoint_with_other_classes_are_fresh(main, kind, arguments, checkpoint_folder, capsys):
    names = {"text": ["positive", "negative"], "image": ["red", "green", "blue"]}[kind]
    labels = {"num_labels": len(names), "id2label": dict(enumerate(names))}
    folder = checkpoint_folder({"text": "bert", "image": "vit"}[kind], **labels)
    nothing_learned = ["--max_steps", "1", "--learning_rate", "0", "--scaler_learning_rate", "0"]
    arguments = [*arguments, "--model_name_or_path", str(folder), *nothing_learned, "--compare_single", "False"]
    (fresh,) = main([*arguments, "--init_scaler_std", "0"])
    assert "its head is not copied" in capsys.readouterr().out.replace("\n", " ")
    assert fresh.disagreement > 0
    output = arguments[arguments.index("--output_dir") + 1]
    (copied,) = main([*arguments, "--init_scaler_std", "0", "--head_init", "copy", "--output_dir", f"{output}-2"])
    assert copied.disagreement == 0


class Killed(BaseException):
    pass


class KillAtStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 6:
            raise Killed


class CountSteps(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


def trainer_with(callback):
    class Trainer(SigmaNEnsTrainer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs, callbacks=[callback])

    return Trainer


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("text", []),
        pytest.param("image", [*STREAMING, "--augmentation", "none"], marks=pytest.mark.slow),
    ],
)
def test_killed_run_goes_on_from_its_last_checkpoint_to_the_same_end(main, arguments, how, tmp_path, monkeypatch):
    arguments = [*arguments, *how, "--compare_single", "False"]
    (uninterrupted,) = main([*arguments, "--output_dir", str(tmp_path / "whole")])
    with monkeypatch.context() as patch:
        patch.setattr(stages, "SigmaNEnsTrainer", trainer_with(KillAtStep()))
        with pytest.raises(Killed):
            main(arguments)
    count = CountSteps()
    with monkeypatch.context() as patch:
        patch.setattr(stages, "SigmaNEnsTrainer", trainer_with(count))
        (resumed,) = main(arguments)
    assert count.steps[0] == 5
    assert resumed.resumed
    for name in ("metrics", "scaled_metrics", "temperature", "disagreement"):
        assert getattr(resumed, name) == getattr(uninterrupted, name)


def test_settings_come_from_a_json_file_as_well(kind, arguments, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"num_members": 2, "output_dir": "elsewhere", "head_init": "fresh"}))
    model_args, data_args, training_args = stages.parse_arguments(SCRIPTS[kind].ARGUMENTS, [str(path)], {"seed": 7})
    assert (model_args.num_members, model_args.head_init) == (2, "fresh")
    assert (training_args.output_dir, training_args.seed) == ("elsewhere", 7)
    assert data_args.task.startswith(kind)


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], STREAMING], ids=["in memory", "streamed"])
def test_two_processes_train_and_report_every_example_once(kind, arguments, how, tmp_path):
    printed = launch_two_processes(kind, [*arguments, *how])
    assert printed.count("held-out examples") == 1
    report = json.loads((tmp_path / "out" / "ensemble" / "report.json").read_text())
    assert report["num_examples"] == NUM_REPORT
    model, _ = load_ensemble(tmp_path / "out" / "ensemble" / "adapter")
    assert model.peft_config["default"].training_recipe["train_batch_size"] == 2 * 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text"])
def test_two_processes_with_files_of_their_own(kind, arguments, tmp_path):
    (tmp_path / "data").mkdir()
    data = parquet_folder(tmp_path / "data")
    without_files = [*arguments[:4], *arguments[8:]]
    launch_two_processes(kind, [*without_files, "--dataset_name", str(data), *STREAMING])
    report = json.loads((tmp_path / "out" / "ensemble" / "report.json").read_text())
    assert report["num_examples"] == NUM_REPORT
