"""Labelled raw inputs to evaluate on: a split is loaded, its columns are found, and its labels made class indices."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Image, List, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from PIL.Image import DecompressionBombError
from torch import nn

from ..architectures import task_of_class
from ..encoding import as_items, batches_of
from ..labels import IGNORED_LABEL, SINGLE_LABEL
from ..members import base_model_of, problem_type_of
from .columns import input_columns_of, label_column_of
from .labels import classes_of_labels

# Batches are made of texts of like length, in mixed ones about half of the tokens are padding; but only within windows
# of this size, so that rows can be put back into order without holding those of the whole split.
WINDOW = 1_024
DEFAULT_SPLIT = "validation"
_UNLABELLED = frozenset({None, -1})
_FILE_KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def load_split(name_or_path: str, config_name: str | None = None, split: str | None = None) -> Dataset:
    """Load a split.

    Args:
        name_or_path: Dataset id on the Hub, a local folder that `load_dataset` understands (one of images as well), or
            a csv, json, jsonl or parquet file.
        config_name: Configuration of the dataset.
        split: The split, of a file none; None: "validation", of a file all of it.

    Raises:
        ValueError: There is no such split, or the file is of another kind.
        OSError: There is no such dataset, or it cannot be read.
    """
    path = Path(name_or_path)
    kind = None if path.is_dir() else _FILE_KINDS.get(path.suffix.lower())
    if kind is None and path.is_file():
        raise ValueError(f"{name_or_path} is none of the files that can be read: {', '.join(_FILE_KINDS)}.")
    if kind is not None and not path.is_file():
        raise FileNotFoundError(f"There is no file {name_or_path}.")
    if kind is not None and split is not None:
        raise ValueError(f"{name_or_path} is a file, which has no split {split!r}; leave the split out.")
    try:
        if kind is not None:
            # Escaped: what looks like a pattern is a name here.
            return load_dataset(kind, data_files=glob.escape(name_or_path), split="train")
        return load_dataset(name_or_path, config_name, split=split or DEFAULT_SPLIT)
    except DatasetGenerationError as error:
        raise ValueError(f"{name_or_path} cannot be read: {error.__cause__ or error}") from error


@dataclass(frozen=True)
class EvaluationData:
    """Raw inputs, and their labels where these are known.

    Attributes:
        task: Name of the task.
        inputs: The inputs' columns alone, N rows.
        labels: The labels' column alone, N rows, as it stands in the data; None: not known.
        class_of_label: The model's class for every label that occurs.
        row_numbers: (N,), where each row stands in the split.
    """

    task: str
    inputs: Dataset
    labels: Dataset | None
    class_of_label: dict[Any, int]
    row_numbers: np.ndarray

    @classmethod
    def of(
        cls,
        model: nn.Module,
        dataset: Dataset,
        *,
        input_columns: Sequence[str] = (),
        label_column: str | None = None,
        is_labelled: bool = True,
        max_examples: int | None = None,
        seed: int = 0,
    ) -> "EvaluationData":
        """Find the inputs and labels of a dataset.

        Args:
            model: The ensemble that is to be evaluated.
            dataset: The examples. For multiple choice a column of lists of texts holds the choices; for tokens a
                column of lists holds the words, and one of as many labels each the labels, of which -100 says that a
                word does not count.
            input_columns: The column of the text, words or image, and of a second text or of the choices; none: the
                first usual ones that there are.
            label_column: The column of the labels; None: the first usual one that there is.
            is_labelled: Whether the labels are wanted.
            max_examples: Take this many examples at most, drawn from all over the dataset and left in its order.
            seed: Seed of that draw.

        Raises:
            ValueError: The model is of a kind that has no single right class, a column is missing, a row has no text,
                or the labels cannot be right.
        """
        base_model = base_model_of(model)
        task = task_of_class(type(base_model).__name__)
        if problem_type_of(base_model.config) != SINGLE_LABEL:
            raise ValueError(
                f"The model's problem_type is {problem_type_of(base_model.config)}: accuracy and calibration of a most "
                "probable class, which are evaluated here, are not defined for it."
            )
        if max_examples is not None and max_examples < 1:
            raise ValueError(f"max_examples must be at least 1, got {max_examples}.")
        if not isinstance(dataset, Dataset):
            raise ValueError(f"The data must be a datasets.Dataset, got {type(dataset).__name__}.")
        dataset = dataset.with_format(None)
        labels, class_of_label = None, {}
        if is_labelled:
            # Of all rows, so that what is wrong with the data does not depend on which of them are taken.
            labels = dataset.select_columns([label_column_of(task, label_column, dataset.column_names)])
            class_names = None if task == "multiple-choice" else base_model.config.id2label
            class_of_label = classes_of_labels(_occurring(labels, task), _label_names(labels), class_names)
        row_numbers = np.arange(len(dataset))
        if max_examples is not None and max_examples < len(dataset):
            row_numbers = np.random.default_rng(seed).choice(row_numbers, max_examples, replace=False)
            row_numbers.sort()
            dataset, labels = dataset.select(row_numbers), labels and labels.select(row_numbers)
        if not len(dataset):
            raise ValueError("The data has no example.")
        inputs = dataset.select_columns(input_columns_of(task, input_columns, dataset.column_names))
        if task == "image-classification":
            # Not decoded, so that a picture that cannot be can be named.
            inputs = inputs.cast_column(inputs.column_names[0], Image(decode=False))
        return cls(task, inputs, labels, class_of_label, row_numbers)

    def __len__(self) -> int:
        return len(self.inputs)

    def items(self, indices: Sequence[int]) -> list:
        """Return inputs as `encode` takes them; for tokens lists of words.

        Args:
            indices: Which rows.

        Raises:
            ValueError: A row holds no such input.
        """
        columns = list(self.inputs[indices].values())
        rows = self.row_numbers[indices]
        if self.task == "image-classification":
            return [_decoded(image, row) for image, row in zip(columns[0], rows, strict=True)]
        items = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        for item, row in zip(items, rows, strict=True):
            if item is None or (isinstance(item, tuple | list) and None in item):
                raise ValueError(
                    f"Row {row} of the data lacks one of {self.inputs.column_names}; an empty field of a csv file is "
                    "such a gap."
                )
        if self.task == "token-classification":
            if not all(isinstance(words, list) for words in items):
                raise ValueError(f"The column {self.inputs.column_names[0]} must hold a list of words a row.")
            as_items(self.task, [word for words in items for word in words])
            return items
        return as_items(self.task, items)

    def classes(self, indices: Sequence[int]) -> list:
        """Return the class of every row; for tokens a list of the classes of its words, with -100 for none.

        Args:
            indices: Which rows.
        """
        (labels,) = self.labels[indices].values()
        if self.task != "token-classification":
            return [self.class_of_label[label] for label in labels]
        return [[self.class_of_label.get(label, IGNORED_LABEL) for label in of_words or ()] for of_words in labels]

    def batches(self, batch_size: int) -> list[list[np.ndarray]]:
        """Return the rows of every batch, window by window: the same ones however many processes share the work.

        Args:
            batch_size: Most rows in a batch.

        Raises:
            ValueError: A row has no text, or `batch_size` is below 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        size = batch_size * -(-WINDOW // batch_size)
        starts = range(0, len(self), size)
        return [self._batches_within(np.arange(start, min(start + size, len(self))), batch_size) for start in starts]

    def _batches_within(self, window: np.ndarray, batch_size: int) -> list[np.ndarray]:
        if self.task == "image-classification":
            items = [None] * len(window)  # all of one size, so none has to be read for this
        elif self.task == "token-classification":
            items = [" ".join(words) for words in self.items(window)]
        else:
            items = self.items(window)
        return [window[indices] for indices in batches_of(items, batch_size)]


def _label_names(labels: Dataset) -> list[str] | None:
    (feature,) = labels.features.values()
    feature = feature.feature if isinstance(feature, List) else feature
    return feature.names if isinstance(feature, ClassLabel) else None


def _occurring(labels: Dataset, task: str) -> set:
    """Return the labels that occur; for tokens those that count."""
    ((name, feature),) = labels.features.items()
    is_of_tokens = task == "token-classification"
    if isinstance(feature, List) != is_of_tokens:
        raise ValueError(
            f"The column {name} holds {'one label' if is_of_tokens else 'a list of labels'} a row, but for {task} "
            f"{'every word has a label' if is_of_tokens else 'a row has a single one'}."
        )
    kind = feature.feature if is_of_tokens else feature
    if not isinstance(kind, ClassLabel | Value):
        raise ValueError(f"The column {name} holds {kind}, which are no labels.")
    values, without = set(), []
    for start, batch in zip(range(0, len(labels), WINDOW), labels.iter(WINDOW), strict=True):
        rows = (
            [labels_of_row or () for labels_of_row in batch[name]] if is_of_tokens else [[one] for one in batch[name]]
        )
        values.update(*rows)
        without += [start + number for number, row in enumerate(rows) if not _UNLABELLED.isdisjoint(row)]
    if without:
        advice = "Leave them out."
        if len(without) == len(labels):
            advice = "It is an unlabelled split, as many test splits are; evaluate on another one."
        raise ValueError(
            f"{len(without):,} of {len(labels):,} rows have no label or one of -1, the first is row {without[0]} "
            f"(counted from 0). {advice}"
        )
    return values - {IGNORED_LABEL} if is_of_tokens else values


def _decoded(image: dict[str, Any] | None, row: int) -> Any:
    if image is None:
        raise ValueError(f"Row {row} of the data has no image.")
    try:
        return Image().decode_example(image)
    except (OSError, ValueError, DecompressionBombError) as error:
        raise ValueError(
            f"The image in row {row}, {image['path'] or 'without a path'}, cannot be read: {error}"
        ) from error
