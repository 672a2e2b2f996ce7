"""An ensemble evaluated on a dataset: on any number of processes, in memory that grows with the examples alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from ..calibration import temperature_in_use
from ..members import base_model_of
from ..metrics.example_table import ExampleTable
from .batches import BatchEvaluator, BatchRows, ClasswiseGaps
from .data import EvaluationData


@dataclass(frozen=True)
class DatasetEvaluation:
    """What an ensemble showed on a dataset; the same on every process.

    Attributes:
        table: A row for every example, or for every labelled word, in the order of the dataset; without votes.
        member_accuracy: (M,), of every member on its own; None without labels, as are the next two.
        member_nll: (M,), its negative log-likelihood in nats.
        classwise_calibration_error: As of `metrics.classwise_calibration_error`; None for multiple choice as well,
            where examples have no classes in common.
        num_words_cut_off: Labelled words that have no row: they stand behind the longest input that the model takes,
            or the tokenizer makes no token of them.
    """

    table: ExampleTable
    member_accuracy: np.ndarray | None
    member_nll: np.ndarray | None
    classwise_calibration_error: float | None
    num_words_cut_off: int


def accelerator_of_launch() -> Accelerator:
    """Return the `Accelerator` of the processes that `accelerate` or `torchrun` started, or of this one alone."""
    # Without an accelerator's device, processes that torchrun started take part only if told that they run on CPUs.
    devices = getattr(torch, "accelerator", torch.cuda)
    return Accelerator(cpu=not devices.is_available())


def evaluate_dataset(
    model: nn.Module,
    processor: Any,
    data: EvaluationData,
    *,
    batch_size: int = 32,
    n_bins: int = 15,
    accelerator: Accelerator | None = None,
    examples_file: Path | None = None,
    on_progress: Callable[[int], None] = lambda num_examples: None,
) -> DatasetEvaluation:
    """Evaluate an ensemble on a dataset.

    Only the logits of one batch are held at a time, and of every row the few numbers of an `ExampleTable`; the votes,
    which are M numbers a row, go into the file. All processes must call this with the same arguments. The figures are
    the same to the last bit on any number of them, as long as each has the same number of threads.

    Args:
        model: The ensemble, on the device of this process; it is put into evaluation mode.
        processor: Its tokenizer or image processor.
        data: The examples, with labels or without.
        batch_size: Most examples in a forward pass.
        n_bins: Number of bins of the class-wise calibration error.
        accelerator: Tells the processes that share the work; None: those that `accelerate` or `torchrun` started.
        examples_file: A csv file for the table with the votes, written by the main process; None: no file.
        on_progress: Called on every process with the number of examples done since the last call.

    Raises:
        ValueError: The processor or an example is not what the model takes, on this process or another; or there is
            no labelled word.
        RuntimeError: Another process failed for another reason.
    """
    if n_bins < 1:
        raise ValueError(f"n_bins must be at least 1, got {n_bins}.")
    accelerator = accelerator or accelerator_of_launch()
    evaluate = BatchEvaluator(model, processor, data, temperature_in_use(model), n_bins)
    windows = data.batches(batch_size)
    model.eval()
    base_model = base_model_of(model)
    names = None if data.task == "multiple-choice" else base_model.config.id2label
    writer = _ExamplesWriter(examples_file if accelerator.is_main_process else None, names)
    tables, num_cut_off, totals = [], 0, 0
    for batches in _rounds(windows, accelerator.num_processes):
        done = _evaluated(batches, evaluate, accelerator)
        for rows in done:  # in the order of the batches: a sum in another order may differ in its last bit
            num_cut_off += rows.num_words_cut_off
            if rows.member_nll is not None:
                num_right = (rows.table.member_votes == rows.table.label[:, None]).sum(0)
                totals = totals + np.stack([num_right, rows.member_nll])
        if any(rows.table is not None for rows in done):
            tables.append(writer.write(done))
        on_progress(sum(map(len, batches)))
    if not tables:
        raise ValueError("The data has no labelled word.")
    table = ExampleTable.concatenate(tables)
    if data.labels is None:
        return DatasetEvaluation(table, None, None, None, num_cut_off)
    accuracy, nll = totals / len(table)
    error = None
    if evaluate.gaps is not None:
        error = ClasswiseGaps.error(sum(gather_object([evaluate.gaps.sums])), len(table))
    return DatasetEvaluation(table, accuracy, nll, error, num_cut_off)


def _rounds(windows: list[list[np.ndarray]], num_processes: int) -> Iterator[list[np.ndarray]]:
    """Yield the batches between two exchanges of results: whole windows, and enough that each process has one."""
    batches = []
    for window in windows:
        batches += window
        if len(batches) >= num_processes:
            yield batches
            batches = []
    if batches:
        yield batches


@dataclass(frozen=True)
class _Failure:
    process: int
    message: str
    is_of_input: bool


def _evaluated(batches: list[np.ndarray], evaluate: BatchEvaluator, accelerator: Accelerator) -> list[BatchRows]:
    """Evaluate batches on all processes, in turn, and return the results of all in the order of the batches.

    A process without a batch takes part in the exchange, and so does one that failed, so that none waits for ever.
    """
    mine, failure = [], None
    try:
        for number in range(accelerator.process_index, len(batches), accelerator.num_processes):
            mine.append((number, evaluate(batches[number])))
    except Exception as error:
        failure = error
        is_of_input = isinstance(error, ValueError | OSError)
        mine = [(-1, _Failure(accelerator.process_index, str(error), is_of_input))]
    done = gather_object(mine)
    if failure is not None:
        raise failure
    for _, failed in done:
        if isinstance(failed, _Failure):
            kind = ValueError if failed.is_of_input else RuntimeError
            raise kind(f"Process {failed.process} failed: {failed.message}")
    return [rows for _, rows in sorted(done, key=lambda numbered: numbered[0])]


class _ExamplesWriter:
    """Puts the rows of batches into the dataset's order, and writes them as a csv file.

    Args:
        path: The file; None: nothing is written.
        names: Class index to name; None: indices.
    """

    def __init__(self, path: Path | None, names: dict[int, str] | None):
        self.path, self.names = path, names
        self.is_first = True

    def write(self, batches: list[BatchRows]) -> ExampleTable:
        """Write the rows of some batches, which come before those of later calls, and return them without votes.

        Args:
            batches: The batches, of which at least one has a row.
        """
        examples = np.concatenate([rows.examples for rows in batches])
        order = np.argsort(examples, kind="stable")  # the words of an example stay in their order
        table = ExampleTable.concatenate([rows.table for rows in batches if rows.table is not None]).select(order)
        if self.path is not None:
            frame = table.to_pandas(self.names)
            frame.insert(0, "example", examples[order])
            if batches[0].words is not None:
                frame.insert(1, "word", np.concatenate([rows.words for rows in batches])[order])
            frame.to_csv(self.path, mode="w" if self.is_first else "a", header=self.is_first, index=False)
            self.is_first = False
        return replace(table, member_votes=None)
