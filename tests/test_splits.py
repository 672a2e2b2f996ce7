from itertools import islice

import datasets
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Value, load_dataset
from script_runs import NUM_REPORT, NUM_TRAIN, image_folder, text_arguments

from sigma_nens_hf.data import splits
from sigma_nens_hf.data.images import ImageArguments
from sigma_nens_hf.data.splits import LABELS, carve, check_splits, choose_column, load_splits, pieces
from sigma_nens_hf.data.texts import SECOND_TEXT, TEXT, TextArguments

SEED = 42


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    # datasets gives the threads that read several files five seconds to end.
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.01)


@pytest.fixture
def text_files(tmp_path):
    text_arguments(tmp_path, "no checkpoint")
    return {
        "train_file": str(tmp_path / "train.csv"),
        "report_file": str(tmp_path / "report.csv"),
        "label_column": "mood",
    }


@pytest.fixture
def parquet_shards(tmp_path):
    """As the Hub keeps a dataset: several files for a split. No two of its texts are alike."""
    for shard in range(4):
        rows = [{"sentence": f"number {i}", "label": i % 2} for i in range(100 * shard, 100 * shard + 100)]
        rows = Dataset.from_list(rows).cast_column("label", ClassLabel(names=["even", "odd"]))
        rows.to_parquet(tmp_path / f"train-0000{shard}-of-00004.parquet")
    rows.to_parquet(tmp_path / "validation-00000-of-00001.parquet")
    return {"dataset_name": str(tmp_path)}


def labelled(texts, labels, names=None):
    dataset = Dataset.from_dict({"sentence": texts, "label": labels})
    return dataset if names is None else dataset.cast_column("label", ClassLabel(names=names))


def test_calibration_split_is_carved_from_train_alone(text_files):
    data_args = TextArguments(**text_files, max_train_samples=20, max_report_samples=9)
    whole = load_splits(data_args)
    assert whole["train"].column_names == [TEXT, LABELS]
    assert whole["train"].features[LABELS].names == ["negative", "positive"]
    carved = carve(whole, data_args, SEED)
    assert {name: len(split) for name, split in carved.items()} == {"train": 20, "calibration": 2, "report": 9}
    assert carve(whole, data_args, SEED + 1)["report"][:] == carved["report"][:]
    carved = carve(whole, TextArguments(max_calibration_samples=3), SEED)
    assert {name: len(split) for name, split in carved.items()} == {
        "train": 54,
        "calibration": 3,
        "report": NUM_REPORT,
    }
    carved = carve(whole, TextArguments(), SEED)
    assert len(carved["train"]) + len(carved["calibration"]) == NUM_TRAIN
    assert sorted(carved["train"][TEXT][:] + carved["calibration"][TEXT][:]) == sorted(whole["train"][TEXT][:])
    assert carved["report"][TEXT][:] == whole["report"][TEXT][:]


@pytest.mark.parametrize("streaming", [False, True])
def test_several_splits_are_reported_as_one(streaming, parquet_shards):
    data_args = TextArguments(**parquet_shards, report_split="validation+train", streaming=streaming)
    report = [row[TEXT] for row in load_splits(data_args)["report"]]
    assert report == [f"number {i}" for i in [*range(300, 400), *range(400)]]
    with pytest.raises(ValueError, match=r"has no split \['nowhere'\]"):
        load_splits(TextArguments(**parquet_shards, report_split="validation+nowhere", streaming=streaming))


def test_one_example_of_each_class_is_carved_without_regard_to_classes():
    data = labelled([str(i) for i in range(20)], list(range(20)), [f"class {i}" for i in range(20)])
    data_args = TextArguments()
    carved = carve(check_splits({"train": data, "report": data}, data_args), data_args, SEED)
    assert (len(carved["train"]), len(carved["calibration"])) == (18, 2)


def test_stream_is_divided_into_splits_that_share_no_example(parquet_shards):
    data_args = TextArguments(**parquet_shards, streaming=True, max_report_samples=30, shuffle_buffer_size=20)
    carved = carve(load_splits(data_args), data_args, SEED)
    calibration = set(carved["calibration"][TEXT])
    assert carved["calibration"].features[LABELS].names == ["even", "odd"]
    assert 20 < len(calibration) < 60  # a tenth of 400
    train = carved["train"]
    trained = [row[TEXT] for row in islice(train, 1000)]
    assert len(set(trained)) == 400 - len(calibration)
    assert not calibration & set(trained)
    train.set_epoch(3)
    assert not calibration & {row[TEXT] for row in islice(train, 1000)}
    # As accelerate gives several processes their shares.
    shares = [{row[TEXT] for row in islice(train.shard(num_shards=2, index=index), 1000)} for index in range(2)]
    assert not shares[0] & shares[1]
    assert shares[0] | shares[1] == set(trained)
    assert [len(piece) for piece in pieces(carved["report"])] == [30]
    other_seed = carve(load_splits(data_args), data_args, SEED + 1)
    assert set(other_seed["calibration"][TEXT]) != calibration


def test_stream_is_cut_to_the_wanted_number_of_examples(parquet_shards):
    data_args = TextArguments(**parquet_shards, streaming=True, max_train_samples=50)
    carved = carve(load_splits(data_args), data_args, SEED)
    assert len(carved["calibration"]) == 5
    assert len({row[TEXT] for row in islice(carved["train"], 500)}) == 50


def test_stream_too_short_to_be_divided_is_refused(text_files):
    data_args = TextArguments(
        **text_files, streaming=True, class_names=["negative", "positive"], calibration_fraction=1e-6
    )
    with pytest.raises(ValueError, match="falls into a calibration_fraction"):
        carve(load_splits(data_args), data_args, SEED)


def test_pieces_hold_every_example_once(parquet_shards, monkeypatch):
    monkeypatch.setattr(splits, "PIECE", 32)
    for streaming in (False, True):
        report = load_splits(TextArguments(**parquet_shards, streaming=streaming))["report"]
        read = list(pieces(report))
        assert [len(piece) for piece in read] == [32, 32, 32, 4]
        assert [text for piece in read for text in piece[TEXT]] == [f"number {i}" for i in range(300, 400)]
        assert all(piece.features[LABELS].names == ["even", "odd"] for piece in read)


@pytest.mark.parametrize("streaming", [False, True])
def test_images_are_read_undecoded(tmp_path, streaming):
    data_args = ImageArguments(dataset_name=str(image_folder(tmp_path)), streaming=streaming)
    loaded = load_splits(data_args)
    assert loaded["train"].features[LABELS].names == ["blue", "green", "red"]
    row = next(iter(loaded["train"]))
    assert set(row["image"]) == {"bytes", "path"}
    assert data_args.content(row)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_column": "nowhere"}, r"train split has no column \['nowhere'\]"),
        ({"label_column": None}, r"No column for the label: none of .* is among \['text', 'mood'\]"),
        ({"report_file": "other.json"}, "both be csv, json or parquet"),
        ({"report_file": None}, "report_file must be given as well"),
        ({"class_names": ["negative", "neutral"]}, "has the label 'positive', which is none of"),
    ],
)
def test_what_cannot_be_is_named(text_files, streaming, changes, message):
    data_args = TextArguments(**{"class_names": ["negative", "positive"], **text_files, **changes}, streaming=streaming)
    with pytest.raises(ValueError, match=message):
        carve(load_splits(data_args), data_args, SEED)


def test_stream_without_class_names_is_refused(text_files):
    with pytest.raises(ValueError, match="pass class_names"):
        load_splits(TextArguments(**text_files, streaming=True))


@pytest.mark.parametrize("streaming", [False, True])
def test_unlabelled_split_is_refused(streaming):
    names = ["negative", "positive"]
    data = {"train": labelled(["a", "b"], [0, 1], names), "report": labelled(["a", "b"], [-1, -1], names)}
    with pytest.raises(ValueError, match="labels of -1: it is unlabelled"):
        check_splits(data, TextArguments(streaming=streaming))


def test_labels_that_training_has_not_are_named():
    data = DatasetDict({"train": labelled(["a", "b"], ["no", "yes"]), "report": labelled(["a"], ["maybe"])})
    with pytest.raises(ValueError, match="maybe"):
        check_splits(data, TextArguments())
    data = {"train": labelled(["a"], [0], ["no", "yes"]), "report": labelled(["a"], [0], ["yes", "no"])}
    with pytest.raises(ValueError, match="other classes than the training split, or in another order"):
        check_splits(data, TextArguments())


def test_pairs_of_texts_are_encoded_together(tokenizer):
    data_args = TextArguments(text_column="premise", second_text_column="claim")
    data = Dataset.from_dict({"premise": ["a good film"], "claim": ["very dull"], "label": ["no"]})
    checked = check_splits({"train": data, "report": data}, data_args)["train"]
    assert checked.features[SECOND_TEXT] == Value("string")
    encoded = data_args.encode(checked, tokenizer, is_training=True)
    assert encoded[0]["input_ids"] == tokenizer("a good film", "very dull")["input_ids"]
    assert encoded[0][LABELS] == 0
    assert data_args.content(checked[0]) == b"a good film\0very dull"


def test_usual_columns_are_found():
    assert choose_column("image", None, ("image", "img"), ["label", "img"]) == "img"
    assert choose_column("image", "photo", ("image", "img"), ["img"]) == "photo"


def test_calibration_of_a_stream_does_not_depend_on_the_number_of_files(parquet_shards, tmp_path):
    data_args = TextArguments(**parquet_shards, streaming=True)
    whole = load_dataset(str(tmp_path), split="train")
    as_one = check_splits({"train": whole, "report": whole}, data_args)
    expected = carve(load_splits(data_args), data_args, SEED)["calibration"][TEXT]
    assert sorted(carve(as_one, data_args, SEED)["calibration"][TEXT]) == sorted(expected)


def test_gaps_in_the_data_are_named():
    with pytest.raises(ValueError, match="train split has 1 rows without a label"):
        check_splits({"train": labelled(["a", "b"], ["x", None]), "report": labelled(["a"], ["x"])}, TextArguments())
    names = ["x", "y"]
    data = {"train": labelled(["a", None], [0, 1], names), "report": labelled(["a"], [0], names)}
    gap = check_splits(data, TextArguments())
    with pytest.raises(ValueError, match="rows without a text"):
        TextArguments().encode(gap["train"], lambda texts, second, **_: {"length": list(map(len, texts))}, True)


def test_numbers_are_no_classes():
    splits_of_numbers = {"train": labelled(["a", "b"], [0.5, 1.25]), "report": labelled(["a"], [0.5])}
    with pytest.raises(ValueError, match=r"labels are numbers such as 0\.5"):
        check_splits(splits_of_numbers, TextArguments())


def test_class_names_that_the_data_has_already_are_refused():
    splits_with_names = {"train": labelled(["a"], [0], ["x"]), "report": labelled(["a"], [0], ["x"])}
    check_splits(splits_with_names, TextArguments(class_names=["x"]))
    with pytest.raises(ValueError, match=r"names its classes itself, \['x'\]; leave class_names out"):
        check_splits(splits_with_names, TextArguments(class_names=["y"]))


def test_classes_that_are_never_trained_are_told():
    names = ["x", "y", "z"]
    data = {"train": labelled(["a", "b"], [0, 2], names), "report": labelled(["a"], [0], names)}
    assert splits.unseen_classes(check_splits(data, TextArguments())) == ["y"]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 2.0])
def test_what_is_no_fraction_is_named(fraction):
    data = {"train": labelled(["a"] * 10, [0, 1] * 5, ["x", "y"]), "report": labelled(["a"], [0], ["x", "y"])}
    data_args = TextArguments(calibration_fraction=fraction)
    with pytest.raises(ValueError, match="calibration_fraction must be between 0 and 1"):
        carve(check_splits(data, data_args), data_args, SEED)
