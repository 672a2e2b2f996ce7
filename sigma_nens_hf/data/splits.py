"""The splits of a run, of texts or images, in memory or streamed: loaded, checked, carved and read in pieces."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, Features, IterableDataset, concatenate_datasets, load_dataset

from .arguments import (
    CALIBRATION_SAMPLES,
    LABEL_COLUMNS,
    STREAMED_CALIBRATION_SAMPLES,
    DataArguments,
    Split,
)

LABELS = "labels"
# A reported split is evaluated in pieces of this size, so that neither a stream nor its logits have to fit in memory.
PIECE = 2_048


def load_splits(data_args: DataArguments) -> dict[str, Split]:
    """Load the training and the reported split from the Hub, a folder or files.

    Args:
        data_args: Which examples.

    Returns:
        Splits "train" and "report" as `check_splits` leaves them.

    Raises:
        ValueError: A split, a file or a column is missing, or the labels cannot be right.
    """
    if data_args.train_file:
        if not data_args.report_file:
            raise ValueError("With train_file, report_file must be given as well.")
        files = {"train": data_args.train_file, "report": data_args.report_file}
        kinds = {Path(path).suffix.lstrip(".").replace("jsonl", "json") for path in files.values()}
        if len(kinds) != 1 or not kinds <= {"csv", "json", "parquet"}:
            raise ValueError(f"train_file and report_file must both be csv, json or parquet, got {files}.")
        splits = load_dataset(kinds.pop(), data_files=files, streaming=data_args.streaming)
    else:
        dataset = load_dataset(data_args.dataset_name, data_args.dataset_config_name, streaming=data_args.streaming)
        reported = data_args.report_split.split("+")
        missing = {"train", *reported} - set(dataset)
        if missing:
            raise ValueError(
                f"{data_args.dataset_name} has no split {sorted(missing)}, only {list(dataset)}; the reported one is "
                "chosen with report_split."
            )
        splits = {"train": dataset["train"], "report": concatenate_datasets([dataset[name] for name in reported])}
    return check_splits(splits, data_args)


def check_splits(splits: dict[str, Split], data_args: DataArguments) -> dict[str, Split]:
    """Check splits and bring them into the form that everything else here expects.

    Args:
        splits: Splits "train" and "report".
        data_args: What their columns are.

    Returns:
        The splits with the inputs and `labels` as their only columns, the latter a `ClassLabel` with the names of the
        training split.

    Raises:
        ValueError: A column is missing, or a label is unknown or says that there is none.
    """
    if data_args.streaming:
        splits = {
            name: split.to_iterable_dataset() if isinstance(split, Dataset) else split for name, split in splits.items()
        }
    splits = {name: _with_columns(name, split, data_args) for name, split in splits.items()}
    names = _class_names(splits["train"], data_args)
    splits = {name: _with_classes(name, split, names, data_args) for name, split in splits.items()}
    report = splits["report"]
    # A stream is not read to its end for this: an unlabelled split has no label at all.
    if -1 in (report.unique(LABELS) if isinstance(report, Dataset) else [_first("report", report)[LABELS]]):
        raise ValueError(
            "The reported split holds labels of -1: it is unlabelled, as SST-2's test split is. Report on another one."
        )
    return splits


def carve(splits: dict[str, Split], data_args: DataArguments, seed: int) -> dict[str, Split]:
    """Carve the calibration split from the training split, then cut all to the wanted number of examples.

    Args:
        splits: Checked splits "train" and "report".
        data_args: How much of them.
        seed: Seed of the choice.

    Returns:
        Splits "train", "calibration" and "report". The calibration split is no stream; a training stream never ends.

    Raises:
        ValueError: A stream is too short to be divided, or `calibration_fraction` is no fraction.
    """
    if not 0 < data_args.calibration_fraction < 1:
        raise ValueError(f"calibration_fraction must be between 0 and 1, got {data_args.calibration_fraction}.")
    carve_train = _carve_stream if data_args.streaming else _carve_dataset
    train, calibration = carve_train(splits["train"], data_args, seed)
    report, most = splits["report"], data_args.max_report_samples
    if most is not None:
        # In memory, examples from all over the split: the same ones for every seed, so that figures can be compared.
        report = report.take(most) if data_args.streaming else report.shuffle(seed=0).take(most)
    return {"train": train, "calibration": calibration, "report": report}


def unseen_classes(splits: dict[str, Split]) -> list[str]:
    """Return the names of the classes of which there is no training example; of a stream that is not known.

    Args:
        splits: Carved splits.
    """
    train = splits["train"]
    if not isinstance(train, Dataset):
        return []
    seen = set(train.unique(LABELS))
    return [name for index, name in enumerate(train.features[LABELS].names) if index not in seen]


def pieces(split: Split) -> Iterator[Dataset]:
    """Read a split in pieces that have a length, so that processes share them evenly: no example is lost or doubled.

    Args:
        split: The split or stream.
    """
    if isinstance(split, Dataset):
        for start in range(0, len(split), PIECE):
            yield split.select(range(start, min(start + PIECE, len(split))))
    else:
        for batch in split.iter(batch_size=PIECE):
            yield Dataset.from_dict(batch, features=split.features)


def choose_column(what: str, given: str | None, candidates: tuple[str, ...], available: list[str]) -> str:
    """Return the column that was given, else the first of the usual ones.

    Args:
        what: What the column holds.
        given: Its name, None if it is to be found.
        candidates: Its usual names.
        available: The columns of the data.

    Raises:
        ValueError: None of the usual ones is there.
    """
    found = [given] if given else [name for name in candidates if name in available]
    if not found:
        raise ValueError(f"No column for the {what}: none of {candidates} is among {available}. Pass {what}_column.")
    return found[0]


def _with_columns(name: str, split: Split, data_args: DataArguments) -> Split:
    available = split.column_names or list(_first(name, split))
    columns = data_args.input_columns(available)
    columns[LABELS] = choose_column("label", data_args.label_column, LABEL_COLUMNS, available)
    missing = sorted(set(columns.values()) - set(available))
    if missing:
        raise ValueError(f"The {name} split has no column {missing}, only {available}.")
    split = split.select_columns(list(columns.values()))
    split = split.rename_columns({old: new for new, old in columns.items() if old != new})
    for column in columns.keys() - {LABELS}:
        # Streamed text files know no types; they get them together with those of the labels.
        if split.features is not None and split.features[column] != data_args.input_feature:
            split = split.cast_column(column, data_args.input_feature)
    return split


def _class_names(train: Split, data_args: DataArguments) -> list[str]:
    if _is_class_label(train):
        names = train.features[LABELS].names
        if data_args.class_names not in (None, names):
            raise ValueError(f"The data names its classes itself, {names}; leave class_names out.")
        return names
    if data_args.class_names:
        return data_args.class_names
    if data_args.streaming:
        raise ValueError(
            "The data has no class names, and a stream is not read to its end to find them: pass class_names."
        )
    labels = train.unique(LABELS)
    if None in labels:
        raise ValueError(f"The train split has {sum(label is None for label in train[LABELS])} rows without a label.")
    if any(isinstance(label, float) and not label.is_integer() for label in labels):
        raise ValueError(f"The labels are numbers such as {labels[0]}, but these scripts tell classes apart.")
    return sorted({str(label) for label in labels})


def _with_classes(name: str, split: Split, names: list[str], data_args: DataArguments) -> Split:
    if _is_class_label(split):
        if split.features[LABELS].names != names:
            raise ValueError(f"The {name} split has other classes than the training split, or in another order.")
        return split

    def index_of(label: Any) -> dict[str, int]:
        if str(label) not in names:
            raise ValueError(f"The {name} split has the label {label!r}, which is none of {names}.")
        return {LABELS: names.index(str(label))}

    inputs = [column for column in split.column_names or _first(name, split) if column != LABELS]
    features = Features(dict.fromkeys(inputs, data_args.input_feature) | {LABELS: ClassLabel(names=names)})
    return split.map(index_of, input_columns=LABELS, features=features)


def _is_class_label(split: Split) -> bool:
    return split.features is not None and isinstance(split.features[LABELS], ClassLabel)


def _carve_dataset(split: Dataset, data_args: DataArguments, seed: int) -> tuple[Dataset, Dataset]:
    fraction, most = data_args.calibration_fraction, data_args.max_train_samples
    counts = Counter(split[LABELS][:])
    # A class with a single image cannot be in both.
    can_stratify = min(counts.values()) > 1 and len(counts) <= min(fraction, 1 - fraction) * len(split)
    by_class = LABELS if can_stratify else None
    parts = split.train_test_split(test_size=fraction, seed=seed, stratify_by_column=by_class)
    train, calibration = parts["train"], parts["test"]
    limit = data_args.max_calibration_samples or CALIBRATION_SAMPLES
    if most is not None and most < len(train):
        train = train.shuffle(seed=seed).take(most)
        calibration = calibration.shuffle(seed=seed)
        limit = min(limit, max(1, int(most * fraction)))
    return train, calibration.take(limit)


def _carve_stream(split: IterableDataset, data_args: DataArguments, seed: int) -> tuple[IterableDataset, Dataset]:
    """Divide a stream by what its examples hold: their places differ between processes and between passes."""
    fraction, most = data_args.calibration_fraction, data_args.max_train_samples
    limit = data_args.max_calibration_samples or STREAMED_CALIBRATION_SAMPLES
    if most is not None:
        limit = min(limit, max(1, int(most * fraction)))
    salt = seed.to_bytes(8, "big")

    def is_calibration(row: dict) -> bool:
        digest = hashlib.blake2b(data_args.content(row), digest_size=4, salt=salt).digest()
        return int.from_bytes(digest, "big") < fraction * 2**32

    calibration = split.shuffle(seed=seed, buffer_size=data_args.shuffle_buffer_size).filter(is_calibration)
    rows = list(calibration.take(limit))
    if not rows:
        raise ValueError(f"No example of the stream falls into a calibration_fraction of {fraction}; raise it.")
    train = split.filter(lambda row: not is_calibration(row))
    _first("train", train)
    if most is not None:
        train = train.take(most)
    # Without an end there are no passes, whose bounds would not be found again when a run goes on after a kill.
    train = train.repeat(None).shuffle(seed=seed, buffer_size=data_args.shuffle_buffer_size)
    return train, Dataset.from_list(rows, features=split.features)


def _first(name: str, split: Split) -> dict[str, Any]:
    row = next(iter(split), None)
    if row is None:
        raise ValueError(f"The {name} split is empty.")
    return row
