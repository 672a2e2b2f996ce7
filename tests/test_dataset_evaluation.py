import json
import os
import subprocess
import sys
from pathlib import Path

import evaluate_tiny
import numpy as np
import pandas
import pytest
import tiny
import torch
from datasets import ClassLabel, Dataset, List
from evaluate_tiny import CASES, LABELS, dataset, ensemble, processor
from peft import get_peft_model

from sigma_nens_hf import SigmaNormConfig, predict
from sigma_nens_hf.calibration import use_calibration
from sigma_nens_hf.evaluation.batches import ClasswiseGaps
from sigma_nens_hf.evaluation.data import EvaluationData, load_split
from sigma_nens_hf.evaluation.evaluate import evaluate_dataset
from sigma_nens_hf.evaluation.labels import classes_of_labels
from sigma_nens_hf.metrics import TABLE_METRICS, ExampleTable, calibration_report
from sigma_nens_hf.metrics.functional import (
    classwise_calibration_error,
    member_accuracy,
    member_negative_log_likelihood,
)

NAMES = ["Good", "bad", "FAIR"]
CLASS_OF_NAME = [2, 0, 1]  # the model's order is another


def evaluate(architecture, data, **kwargs):
    model = ensemble(architecture)
    return evaluate_dataset(model, processor(architecture), EvaluationData.of(model, data), **kwargs)


@torch.no_grad()
def direct(architecture, data):
    """Members' logits (N, M, C) and classes (N,), one example at a time and none of the code under test."""
    model, encode = ensemble(architecture), processor(architecture)
    logits, classes = [], []
    for row in data:
        if architecture == "vit":
            logits += model(**encode(row["image"].convert("RGB"), return_tensors="pt")).member_logits
        elif architecture == "bert-token":
            encoded = encode([row["tokens"]], is_split_into_words=True, return_tensors="pt")
            of_tokens, word_ids = model(**encoded).member_logits[0], encoded.word_ids(0)
            for word, label in enumerate(row["ner_tags"]):
                if label != -100:
                    logits.append(of_tokens[:, word_ids.index(word)])
                    classes.append(CLASS_OF_NAME[label])
            continue
        else:
            columns = [row[name] for name in ("text", "text_pair") if name in row]
            logits += model(**encode(*columns, return_tensors="pt")).member_logits
        classes.append(CLASS_OF_NAME[row["label"]])
    return torch.stack(logits).double(), np.array(classes)


def pairs():
    data = dataset("bert", 31)
    return data.add_column("text_pair", data["text"][::-1])


@pytest.mark.parametrize(
    ("architecture", "data"),
    [
        ("bert", dataset("bert", 41)),
        ("bert", pairs()),
        ("bert-token", dataset("bert-token", 23)),
        ("vit", dataset("vit", 11)),
    ],
    ids=["texts", "pairs", "tokens", "images"],
)
def test_figures_are_those_of_a_direct_computation(architecture, data, tmp_path):
    evaluation = evaluate(architecture, data, batch_size=4, n_bins=7, examples_file=tmp_path / "rows.csv")
    logits, classes = direct(architecture, data)
    probabilities = logits.softmax(-1)
    table = evaluation.table
    assert np.array_equal(table.label, classes)
    assert table.label_probability == pytest.approx(probabilities.mean(1)[range(len(classes)), classes], rel=1e-4)
    assert table.member_votes is None
    expected = ExampleTable.of_members(logits, classes)
    for name in ("predictive_entropy", "expected_entropy", "modulation_uncertainty", "disagreement", "squared_error"):
        assert getattr(table, name) == pytest.approx(getattr(expected, name), rel=1e-3, abs=1e-5), name
    for name, metric in TABLE_METRICS.items():
        assert metric(table) == pytest.approx(metric(expected), rel=1e-4), name
    assert evaluation.member_accuracy == pytest.approx(member_accuracy(probabilities, classes))
    assert evaluation.member_nll == pytest.approx(member_negative_log_likelihood(probabilities, classes), rel=1e-4)
    assert evaluation.classwise_calibration_error == pytest.approx(
        classwise_calibration_error(probabilities.mean(1), classes, 7), rel=1e-3
    )
    rows = pandas.read_csv(tmp_path / "rows.csv")
    assert rows["label"].tolist() == [LABELS[label] for label in classes]
    for m in range(3):
        assert rows[f"vote_{m}"].tolist() == [LABELS[vote] for vote in logits[:, m].argmax(-1).tolist()]
    assert rows["probability"].tolist() == table.probability.tolist()


def test_texts_get_what_predict_says(tmp_path):
    data, model = dataset("bert", 37), ensemble("bert")
    evaluate("bert", data, batch_size=5, examples_file=tmp_path / "rows.csv")
    for row, prediction in zip(
        pandas.read_csv(tmp_path / "rows.csv").to_dict("records"),
        predict(model, processor("bert"), list(data["text"]), batch_size=5),
        strict=True,
    ):
        assert row["prediction"] == prediction.label
        assert row["probability"] == pytest.approx(prediction.probability, rel=1e-5)
        assert row["modulation_uncertainty"] == pytest.approx(prediction.modulation_uncertainty, rel=1e-3, abs=1e-6)
        assert [row[f"vote_{m}"] for m in range(3)] == prediction.member_votes


def test_choices_get_what_predict_says():
    data, model = dataset("bert-choice", 13), ensemble("bert-choice")
    evaluation = evaluate("bert-choice", data, batch_size=5)
    assert evaluation.classwise_calibration_error is None
    items = list(zip(data["question"], data["choices"], strict=True))
    for n, prediction in enumerate(predict(model, processor("bert-choice"), items)):
        assert items[n][1][evaluation.table.prediction[n]] == prediction.label
        assert evaluation.table.probability[n] == pytest.approx(prediction.probability, rel=1e-5)
        assert evaluation.table.label[n] == data[n]["label"]


def test_temperature_in_use_acts_on_the_pooled_prediction():
    data = dataset("bert", 25)
    base = tiny.base_model("bert")
    model = get_peft_model(
        base, SigmaNormConfig(num_members=3, init_scaler_std=1.0, id2label=LABELS, calibration_temperature=2.5)
    )
    use_calibration(model)
    evaluation = evaluate_dataset(model, processor("bert"), EvaluationData.of(model, data), batch_size=5)
    encoded = processor("bert")(list(data["text"]), padding=True, return_tensors="pt")
    with torch.no_grad():
        probabilities = model(**encoded).logits.double().softmax(-1)
    classes = [CLASS_OF_NAME[label] for label in data["label"]]
    assert evaluation.table.label_probability == pytest.approx(probabilities[range(25), classes], rel=1e-4)
    assert evaluation.classwise_calibration_error == pytest.approx(
        classwise_calibration_error(probabilities, classes), rel=1e-3
    )


def test_words_behind_the_longest_input_are_counted(tmp_path):
    data = Dataset.from_dict({"tokens": [["good"] * 3, ["a"] * 40, [], ["film"]], "tags": [[0] * 3, [1] * 40, [], [2]]})
    evaluation = evaluate("bert-token", data, batch_size=2, examples_file=tmp_path / "rows.csv")
    assert evaluation.num_words_cut_off == 40 - 32
    rows = pandas.read_csv(tmp_path / "rows.csv")
    assert rows["example"].tolist() == [0] * 3 + [1] * 32 + [3]
    assert rows["word"].tolist() == [*range(3), *range(32), 0]


def test_without_labels_there_is_a_table_alone():
    model = ensemble("bert-token")
    data = EvaluationData.of(model, dataset("bert-token", 9).remove_columns("ner_tags"), is_labelled=False)
    evaluation = evaluate_dataset(model, processor("bert-token"), data)
    assert evaluation.table.label is None
    assert evaluation.member_nll is evaluation.classwise_calibration_error is None
    assert len(evaluation.table) == sum(map(len, dataset("bert-token", 9)["tokens"]))


def test_examples_are_drawn_from_all_over_the_data(tmp_path):
    model, data = ensemble("bert"), dataset("bert", 200)
    few = EvaluationData.of(model, data, max_examples=20, seed=3)
    evaluation = evaluate_dataset(model, processor("bert"), few, batch_size=7, examples_file=tmp_path / "rows.csv")
    rows = pandas.read_csv(tmp_path / "rows.csv")["example"]
    assert len(rows) == 20
    assert rows.is_monotonic_increasing
    assert rows.is_unique
    assert rows.max() > 150
    whole = evaluate("bert", data, batch_size=7)
    assert evaluation.table.probability == pytest.approx(whole.table.probability[rows], rel=1e-4)
    assert len(EvaluationData.of(model, data, max_examples=500)) == 200


def test_a_model_in_training_is_put_into_evaluation_mode():
    model, data = ensemble("bert"), dataset("bert", 12)
    expected = evaluate_dataset(model, processor("bert"), EvaluationData.of(model, data))
    found = evaluate_dataset(model.train(), processor("bert"), EvaluationData.of(model, data))
    assert np.array_equal(found.table.probability, expected.table.probability)


def test_classwise_sums_are_the_metric_in_any_order():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3_000, 11, generator=generator).double()
    probabilities, labels = logits.softmax(-1).numpy(), torch.randint(0, 11, (3_000,), generator=generator).numpy()
    probabilities[:5] = np.eye(11)[:5]  # at the edges of the bins
    sums = []
    for order in (np.arange(3_000), np.random.default_rng(0).permutation(3_000)):
        gaps = ClasswiseGaps(11, 15)
        for rows in np.array_split(order, 17):
            gaps.add(probabilities[rows], labels[rows])
        sums.append(gaps.sums)
    assert np.array_equal(*sums)
    assert ClasswiseGaps.error(sums[0], 3_000) == pytest.approx(
        classwise_calibration_error(probabilities, labels, 15), abs=1e-10
    )


# Several processes.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An adapter, and data for the command line, which is the same for all numbers of processes but for the output."""
    folder = tmp_path_factory.mktemp("saved")
    evaluate_tiny.save_adapter(folder)
    dataset("bert", 67).to_parquet(folder / "texts.parquet")
    dataset("bert", 31, seed=1).remove_columns("label").to_json(folder / "others.jsonl")
    return folder


def command_line(saved, output_dir):
    return [
        "evaluate", str(saved / "adapter"), "--dataset", str(saved / "texts.parquet"), "--ood-dataset",
        str(saved / "others.jsonl"), "--batch-size", "6", "--resamples", "20", "--output-dir", str(output_dir),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def by_number_of_processes(saved, tmp_path_factory):
    """Folders of results of 1, 2 and 3 processes; the last two run at the same time."""
    folders = {number: tmp_path_factory.mktemp(f"processes_{number}") for number in (1, 2, 3)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(tiny.__file__).parent)}
    running = {}
    for number in (2, 3):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number)]
        command += [evaluate_tiny.__file__, str(folders[number])]
        command += command_line(saved, folders[number] / "evaluation")
        running[number] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
    evaluate_tiny.run(folders[1], command_line(saved, folders[1] / "evaluation"))
    for process in running.values():
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        assert output.count("expected calibration error") == 1  # by the main process alone
    return folders


@pytest.mark.parametrize("number", [2, 3])
def test_processes_find_the_same_to_the_last_bit(number, by_number_of_processes):
    alone = json.loads((by_number_of_processes[1] / "figures-0.json").read_text())
    folder = by_number_of_processes[number]
    for process in range(number):
        together = json.loads((folder / f"figures-{process}.json").read_text())
        assert {case: together[case] for case in CASES} == {case: alone[case] for case in CASES}
    for case in CASES:
        assert (folder / f"{case}.csv").read_bytes() == (by_number_of_processes[1] / f"{case}.csv").read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_no_row_is_lost_or_doubled(case, by_number_of_processes):
    rows = pandas.read_csv(by_number_of_processes[3] / f"{case}.csv")
    architecture, size = CASES[case]
    data = dataset(architecture, size)
    if case == "token":
        tags = [(n, word) for n, of in enumerate(data["ner_tags"]) for word, tag in enumerate(of) if tag != -100]
        assert list(zip(rows["example"], rows["word"], strict=True)) == tags
    else:
        assert rows["example"].tolist() == list(range(size))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_error_of_one_process_ends_all(number, by_number_of_processes):
    for process in range(number):
        figures = json.loads((by_number_of_processes[number] / f"figures-{process}.json").read_text())
        assert "The image in row 7, without a path, cannot be read" in figures["failure"]


@pytest.mark.parametrize("number", [2, 3])
def test_command_line_writes_the_same_on_all_numbers_of_processes(number, by_number_of_processes):
    alone, together = (by_number_of_processes[n] / "evaluation" for n in (1, number))
    assert sorted(path.name for path in together.iterdir()) == sorted(path.name for path in alone.iterdir())
    for name in ("examples.csv", "ood_examples.csv", "metrics.csv", "gates.csv", "reliability.csv"):
        assert (together / name).read_bytes() == (alone / name).read_bytes(), name
    reports = [json.loads((folder / "metrics.json").read_text()) for folder in (alone, together)]
    for report in reports:
        del report["seconds"], report["processes"]
    assert reports[0] == reports[1]
    assert len(pandas.read_csv(together / "examples.csv")) == 67


def test_report_is_that_of_the_table(saved, by_number_of_processes):
    folder = by_number_of_processes[2] / "evaluation"
    report = json.loads((folder / "metrics.json").read_text())
    rows = pandas.read_csv(folder / "examples.csv")
    index = {name: number for number, name in LABELS.items()}
    columns = {name: rows[name].to_numpy() for name in rows if not name.startswith(("example", "vote"))}
    columns |= {name: rows[name].map(index).to_numpy() for name in ("prediction", "label")}
    assert calibration_report(ExampleTable(**columns), n_resamples=20) == {
        name: figures for name, figures in report["metrics"].items() if name != "classwise_calibration_error"
    }
    assert report["members"]["accuracy"] == [np.mean(rows[f"vote_{m}"] == rows["label"]) for m in range(3)]


# Labels.


@pytest.mark.parametrize(
    ("labels", "label_names", "class_names", "expected"),
    [
        ([0, 1], ["GOOD", "bad"], {0: "Bad", 1: "Good"}, {0: 1, 1: 0}),
        ([0], ["b", "a"], {0: "a", 1: "b", 2: "c"}, {0: 1, 1: 0}),
        ([0, 1], ["a", "A"], {0: "A", 1: "a"}, {0: 1, 1: 0}),  # names that differ in their case alone
        ([1, 0], None, {0: "bad", 1: "good"}, {0: 0, 1: 1}),
        ([1.0, 0.0], None, {0: "bad", 1: "good"}, {0: 0, 1: 1}),
        ([True, False], None, {0: "bad", 1: "good"}, {0: 0, 1: 1}),
        (["good", "BAD"], None, {0: "bad", 1: "good"}, {"good": 1, "BAD": 0}),
        ([0, 1], ["neg", "pos"], {0: "LABEL_0", 1: "LABEL_1"}, {0: 0, 1: 1}),
        ([0, 1], ["0", "1"], {0: "bad", 1: "good"}, {0: 0, 1: 1}),
        (["1", "LABEL_0"], None, {0: "LABEL_0", 1: "LABEL_1"}, {"1": 1, "LABEL_0": 0}),
        (["2", "0"], None, None, {"2": 2, "0": 0}),
        ([3, 0], None, None, {3: 3, 0: 0}),
        # What looks like an index is a name where the classes are called so.
        ([1, 2], None, {0: "1", 1: "2", 2: "3"}, {1: 0, 2: 1}),
        ([0, 1], ["0", "1"], {0: "1", 1: "0"}, {0: 1, 1: 0}),
        ([True, False], None, {0: "true", 1: "false"}, {True: 0, False: 1}),
    ],
)
def test_labels_become_classes(labels, label_names, class_names, expected):
    assert classes_of_labels(labels, label_names, class_names) == expected


@pytest.mark.parametrize(
    ("labels", "label_names", "class_names", "message"),
    [
        ([0, 1], ["a", "c"], {0: "a", 1: "b"}, r"no classes 'c', .* it has 'a', 'b'"),
        (["a", "c"], None, {0: "a", 1: "b"}, "no classes 'c'"),
        ([0, 2], None, {0: "a", 1: "b"}, "class 2, but the model's 2 classes"),
        ([0], ["x", "y", "z"], {0: "LABEL_0", 1: "LABEL_1"}, "class 2, but the model's 2 classes"),
        (["pos"], None, {0: "LABEL_0", 1: "LABEL_1"}, "'pos' is neither the name"),
        ([0.5], None, {0: "a", 1: "b"}, "0.5 is neither the name"),
        ([-2], None, None, "class -2"),
    ],
)
def test_labels_that_cannot_be_right_are_refused(labels, label_names, class_names, message):
    with pytest.raises(ValueError, match=message):
        classes_of_labels(labels, label_names, class_names)


# Refusals.


@pytest.mark.parametrize(
    ("architecture", "rows", "arguments", "message"),
    [
        ("bert", {"text": ["a"]}, {}, r"No column for the labels: none of label, .* \['text'\]"),
        ("bert", {"words": ["a"], "label": [0]}, {}, r"No column for the inputs: .* sentence1 and sentence2"),
        ("bert", {"text": ["a"], "label": [0]}, {"label_column": "mood"}, "no column mood"),
        ("bert", {"text": ["a"], "label": [0]}, {"input_columns": ["text", "other"]}, "no column other"),
        ("bert", {"text": ["a", None], "label": [0, 1]}, {}, "Row 1 of the data lacks"),
        ("bert", {"text": [1, 2], "label": [0, 1]}, {}, "must be a text"),
        ("bert", {"text": ["a"], "label": [[0, 1]]}, {}, "a row has a single one"),
        ("bert", {"text": [], "label": []}, {}, "no example"),
        ("bert", {"text": ["a"], "label": [0]}, {"max_examples": 0}, "max_examples must be"),
        ("bert-token", {"tokens": [["a"]], "labels": [0]}, {}, "every word has a label"),
        ("bert-token", {"tokens": [["a"], ["a", "b"]], "tags": [[0], [0]]}, {}, "Row 1 .* 2 words, but 1 labels"),
        ("bert-token", {"tokens": [["a"]], "tags": [[-100]]}, {}, "no labelled word"),
        ("bert-choice", {"question": ["a"], "choices": [["b", "c"]], "label": [2]}, {}, "from 0 to 1, got 2"),
    ],
)
def test_data_that_cannot_be_evaluated_is_refused(architecture, rows, arguments, message):
    model = ensemble(architecture)
    with pytest.raises(ValueError, match=message):
        evaluate_dataset(model, processor(architecture), EvaluationData.of(model, Dataset.from_dict(rows), **arguments))


@pytest.mark.parametrize(
    ("arguments", "message"), [({"batch_size": 0}, "batch_size must be"), ({"n_bins": 0}, "n_bins must be")]
)
def test_numbers_below_1_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        evaluate("bert", dataset("bert", 3), **arguments)


@pytest.mark.parametrize("problem_type", ["multi_label_classification", "regression"])
def test_models_without_one_right_class_are_refused(problem_type):
    model = tiny.ensemble("bert", problem_type=problem_type)
    with pytest.raises(ValueError, match=f"problem_type is {problem_type}"):
        EvaluationData.of(model, dataset("bert", 3))


def test_what_the_model_lacks_is_named():
    model, data = ensemble("bert"), dataset("bert", 3)
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        evaluate_dataset(model, None, EvaluationData.of(model, data))
    with model.disable_adapter(), pytest.raises(ValueError, match="adapter is disabled"):
        evaluate_dataset(model, processor("bert"), EvaluationData.of(model, data))


def test_names_of_word_labels_are_matched():
    model = ensemble("bert-token")
    data = dataset("bert-token", 5).cast_column("ner_tags", List(ClassLabel(names=["O", "bad", "fair"])))
    with pytest.raises(ValueError, match="no classes 'O'"):
        EvaluationData.of(model, data)


def test_files_and_folders_are_loaded(tmp_path):
    data = dataset("bert", 5)
    data.to_csv(tmp_path / "a.csv")
    data.to_json(tmp_path / "a.jsonl")
    data.to_parquet(tmp_path / "a.parquet")
    for suffix in ("csv", "jsonl", "parquet"):
        assert load_split(str(tmp_path / f"a.{suffix}"))["text"] == data["text"]
    data.to_parquet(tmp_path / "folder" / "validation.parquet")
    data.select(range(2)).to_parquet(tmp_path / "folder" / "test.parquet")
    assert len(load_split(str(tmp_path / "folder"), split="test")) == 2
    with pytest.raises(ValueError, match='Unknown split "train"'):
        load_split(str(tmp_path / "folder"), split="train")
    with pytest.raises(FileNotFoundError, match=r"There is no file .*b\.csv"):
        load_split(str(tmp_path / "b.csv"))
    (tmp_path / "a.txt").write_text("good")
    with pytest.raises(ValueError, match="none of the files that can be read"):
        load_split(str(tmp_path / "a.txt"))
    (tmp_path / "damaged.json").write_text('{"text": ')
    with pytest.raises(ValueError, match=r"damaged\.json cannot be read"):
        load_split(str(tmp_path / "damaged.json"))
