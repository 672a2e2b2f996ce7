"""The examples of a text classification run: loaded, checked, divided into splits and tokenised."""

from dataclasses import dataclass, field
from pathlib import Path

from datasets import ClassLabel, DatasetDict, load_dataset
from transformers import PreTrainedTokenizerBase


@dataclass
class DataArguments:
    """Which examples are trained, calibrated and reported on."""

    dataset_name: str | None = field(
        default="stanfordnlp/sst2", metadata={"help": "Dataset id on the Hub; ignored with train_file."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the dataset."})
    train_file: str | None = field(default=None, metadata={"help": "csv, json or parquet file to train on."})
    report_file: str | None = field(default=None, metadata={"help": "csv, json or parquet file to report on."})
    report_split: str = field(default="validation", metadata={"help": "Split of the dataset to report on."})
    text_column: str = field(default="sentence", metadata={"help": "Column of the text."})
    second_text_column: str | None = field(default=None, metadata={"help": "Column of a second text, for pairs."})
    label_column: str = field(default="label", metadata={"help": "Column of the label."})
    max_seq_length: int = field(default=128, metadata={"help": "Longest input in tokens; the rest is cut off."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on this many examples at most."})
    calibration_fraction: float = field(
        default=0.1, metadata={"help": "Share of the training data carved off as the calibration split."}
    )
    compare_single: bool = field(
        default=True, metadata={"help": "Train and report a single model the same way, for comparison."}
    )


def load_splits(data_args: DataArguments) -> DatasetDict:
    """Load the training and the reported split from the Hub or from files.

    Returns:
        Splits "train" and "report" whose label column is a `ClassLabel`.

    Raises:
        ValueError: A split or a column is missing, or the reported split has no labels.
    """
    if data_args.train_file:
        if not data_args.report_file:
            raise ValueError("With train_file, report_file must be given as well.")
        files = {"train": data_args.train_file, "report": data_args.report_file}
        kinds = {Path(path).suffix.lstrip(".").replace("jsonl", "json") for path in files.values()}
        if len(kinds) != 1 or not kinds <= {"csv", "json", "parquet"}:
            raise ValueError(f"train_file and report_file must both be csv, json or parquet, got {files}.")
        splits = load_dataset(kinds.pop(), data_files=files)
    else:
        dataset = load_dataset(data_args.dataset_name, data_args.dataset_config_name)
        missing = {"train", data_args.report_split} - set(dataset)
        if missing:
            raise ValueError(f"{data_args.dataset_name} has no split {sorted(missing)}, only {list(dataset)}.")
        splits = DatasetDict({"train": dataset["train"], "report": dataset[data_args.report_split]})
    return check_splits(splits, data_args)


def check_splits(splits: DatasetDict, data_args: DataArguments) -> DatasetDict:
    """Check the columns of splits and turn their labels into a `ClassLabel` with the names of the training split.

    Raises:
        ValueError: A column is missing or a label is unknown.
    """
    label_column = data_args.label_column
    for name, split in splits.items():
        wanted = {data_args.text_column, data_args.second_text_column, label_column} - {None}
        missing = sorted(wanted - set(split.column_names))
        if missing:
            raise ValueError(f"The {name} split has no column {missing}, only {split.column_names}.")
    if not isinstance(splits["train"].features[label_column], ClassLabel):
        names = sorted({str(label) for label in splits["train"].unique(label_column)})
        unknown = {str(label) for label in splits["report"].unique(label_column)} - set(names)
        if unknown:
            raise ValueError(f"The reported split has labels that the training split has not: {sorted(unknown)}.")
        splits = splits.map(lambda row: {label_column: str(row[label_column])}, desc="Labels")
        splits = splits.cast_column(label_column, ClassLabel(names=names))
    if -1 in splits["report"].unique(label_column):
        raise ValueError(
            "The reported split holds labels of -1: it is unlabelled, as SST-2's test split is. Report on another one."
        )
    return splits


def carve(splits: DatasetDict, data_args: DataArguments, seed: int) -> DatasetDict:
    """Carve the calibration split from the training split, then cut both to the wanted number of examples."""
    fraction, most = data_args.calibration_fraction, data_args.max_train_samples
    parts = splits["train"].train_test_split(test_size=fraction, seed=seed, stratify_by_column=data_args.label_column)
    train, calibration = parts["train"], parts["test"]
    if most is not None and most < len(train):
        train = train.shuffle(seed=seed).select(range(most))
        calibration = calibration.shuffle(seed=seed).select(range(min(len(calibration), max(1, int(most * fraction)))))
    return DatasetDict({"train": train, "calibration": calibration, "report": splits["report"]})


def encode(splits: DatasetDict, tokenizer: PreTrainedTokenizerBase, data_args: DataArguments) -> DatasetDict:
    """Tokenise the splits; the label column becomes `labels`."""

    def tokenise(batch: dict) -> dict:
        second = batch[data_args.second_text_column] if data_args.second_text_column else None
        encoded = tokenizer(batch[data_args.text_column], second, truncation=True, max_length=data_args.max_seq_length)
        return {**encoded, "labels": batch[data_args.label_column]}

    columns = splits["train"].column_names
    return splits.map(tokenise, batched=True, remove_columns=columns, desc="Tokenising")
