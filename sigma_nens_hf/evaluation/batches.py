"""What one batch contributes to an evaluation: a few numbers for every row, after which its logits are let go."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..encoding import encode, max_input_length, size_arguments
from ..labels import IGNORED_LABEL
from ..members import base_model_of
from ..metrics.calibration_bins import inner_edges
from ..metrics.example_table import ExampleTable
from ..outputs import MEMBER_LOGITS, pooled_log_probabilities
from .data import EvaluationData


@dataclass(frozen=True)
class BatchRows:
    """The rows of one batch: its examples, or the labelled words in them.

    Attributes:
        examples: (R,), where each row's example stands in the split.
        words: (R,), where its word stands in the example; None: the rows are examples.
        table: R rows, with votes; None: the batch has no labelled word.
        member_nll: (M,), sum over rows of every member's -log p(label) in nats; None: not labelled, or no row.
        num_words_cut_off: Labelled words behind the longest input that the model takes, and those without a token.
    """

    examples: np.ndarray
    words: np.ndarray | None
    table: ExampleTable | None
    member_nll: np.ndarray | None
    num_words_cut_off: int


class ClasswiseGaps:
    """Running sums for the class-wise calibration error: C x n_bins numbers, however many examples there are.

    The sums are whole multiples of 2^-36, which add up exactly and so to the same in any order.

    Args:
        num_classes: Number of classes C.
        n_bins: Number of bins.
    """

    _UNIT = 2.0**-36

    def __init__(self, num_classes: int, n_bins: int):
        self.sums = np.zeros((num_classes, n_bins), dtype=np.int64)
        self.inner_edges = inner_edges(n_bins)

    def add(self, probabilities: np.ndarray, labels: np.ndarray) -> None:
        """Count rows in.

        Args:
            probabilities: (R, C).
            labels: (R,), class indices.
        """
        gaps = -probabilities
        gaps[np.arange(len(labels)), labels] += 1
        bins = np.digitize(probabilities, self.inner_edges, right=True)
        classes = np.broadcast_to(np.arange(probabilities.shape[1]), bins.shape)
        np.add.at(self.sums, (classes, bins), np.rint(gaps / self._UNIT).astype(np.int64))

    @classmethod
    def error(cls, sums: np.ndarray, num_rows: int) -> float:
        """Return the error as of `metrics.classwise_calibration_error`.

        Args:
            sums: (C, n_bins), those of all processes together.
            num_rows: Number of rows that were counted in.
        """
        return float((np.abs(sums).sum(1) * cls._UNIT / num_rows).mean())


class BatchEvaluator:
    """Evaluates batches of some data.

    Args:
        model: The ensemble.
        processor: Its tokenizer or image processor.
        data: The examples.
        temperature: Softmax temperature that its pooled prediction is calibrated with.
        n_bins: Number of bins of the class-wise calibration error.

    Attributes:
        gaps: Sums over the batches so far; None where there are no labels, or no classes common to all examples.

    Raises:
        ValueError: There is no processor, or it cannot tell which token belongs to which word.
    """

    def __init__(self, model: nn.Module, processor: Any, data: EvaluationData, temperature: float, n_bins: int):
        if processor is None:
            raise ValueError("The evaluation needs the model's tokenizer or image processor, got None.")
        if data.task == "token-classification" and not processor.is_fast:
            raise ValueError("Which token belongs to which word only a fast tokenizer can tell; use one.")
        self.model, self.processor, self.data, self.temperature = model, processor, data, temperature
        self.base_model = base_model_of(model)
        has_classes = data.labels is not None and data.task != "multiple-choice"
        self.gaps = ClasswiseGaps(self.base_model.config.num_labels, n_bins) if has_classes else None

    @torch.no_grad()
    def __call__(self, indices: np.ndarray) -> BatchRows:
        """Evaluate one batch.

        Args:
            indices: The rows of the data that go into it.

        Raises:
            ValueError: A row is no input, its label is none, or the logits are not finite.
        """
        items = self.data.items(indices)
        classes = None if self.data.labels is None else self.data.classes(indices)
        examples, words, num_cut_off = self.data.row_numbers[indices], None, 0
        if self.data.task == "token-classification":
            encoded = self._encode_words(items)
            of_batch, tokens, words = _first_tokens(encoded, len(items))
            if classes is not None:
                of_words, num_labelled = _classes_of_words(items, classes, examples, of_batch, words)
                kept = of_words != IGNORED_LABEL
                of_batch, tokens, words, classes = of_batch[kept], tokens[kept], words[kept], of_words[kept]
                num_cut_off = num_labelled - len(words)
            examples = examples[of_batch]
            if not len(words):
                return BatchRows(examples, words, None, None, num_cut_off)
            member_logits = self._member_logits(encoded)[of_batch, :, tokens]
        else:
            member_logits = self._member_logits(encode(self.base_model, self.processor, self.data.task, items))
        classes = None if classes is None else np.asarray(classes)
        table = ExampleTable.of_members(member_logits, classes, temperature=self.temperature)
        if classes is None:
            return BatchRows(examples, words, table, None, num_cut_off)
        if self.gaps is not None:
            probabilities = (pooled_log_probabilities(member_logits) / self.temperature).softmax(-1)
            self.gaps.add(probabilities.numpy(), classes)
        of_labels = member_logits.log_softmax(-1)[torch.arange(len(classes)), :, torch.as_tensor(classes)]
        return BatchRows(examples, words, table, -of_labels.sum(0).numpy(), num_cut_off)

    def _encode_words(self, items: list[list[str]]) -> Any:
        return self.processor(
            items,
            is_split_into_words=True,
            padding=True,
            truncation=True,
            max_length=max_input_length(self.base_model, self.processor),
            return_tensors="pt",
        )

    def _member_logits(self, encoded: Any) -> torch.Tensor:
        """Return the members' logits (B, M, ..., C) in double precision."""
        batch = encoded.to(self.base_model.device)
        sizes = size_arguments(self.base_model, batch["pixel_values"]) if "pixel_values" in batch else {}
        output = self.model(**batch, **sizes, return_dict=True)
        if MEMBER_LOGITS not in output:
            raise ValueError("The evaluation needs the members, but the model's adapter is disabled.")
        return output[MEMBER_LOGITS].cpu().double()


def _first_tokens(encoded: Any, num_examples: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the example, the place and the word of every token that is the first of its word, each (T,)."""
    found = []
    for example in range(num_examples):
        first: dict[int, int] = {}
        for token, word in enumerate(encoded.word_ids(example)):
            if word is not None:
                first.setdefault(word, token)
        found += [(example, token, word) for word, token in first.items()]
    return tuple(np.array(found, dtype=np.int64).reshape(-1, 3).T)


def _classes_of_words(
    items: list[list[str]], classes: list[list[int]], rows: np.ndarray, examples: np.ndarray, words: np.ndarray
) -> tuple[np.ndarray, int]:
    """Return the classes (T,) of some words, and how many words are labelled in all.

    Args:
        items: The words of every example.
        classes: Their classes.
        rows: (B,), where the examples stand in the split.
        examples: (T,), which example.
        words: (T,), which word of it.

    Raises:
        ValueError: An example does not have as many labels as words.
    """
    for item, of_item, row in zip(items, classes, rows, strict=True):
        if len(item) != len(of_item):
            raise ValueError(f"Row {row} of the data has {len(item)} words, but {len(of_item)} labels.")
    num_labelled = sum(label != IGNORED_LABEL for of_item in classes for label in of_item)
    of_words = [classes[example][word] for example, word in zip(examples, words, strict=True)]
    return np.array(of_words, dtype=np.int64), num_labelled
