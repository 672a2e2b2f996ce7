#!/usr/bin/env python
"""Measure the memory that a training step takes, with members in chunks of several sizes, beside that of one member.

    python scripts/benchmark_training_memory.py
    python scripts/benchmark_training_memory.py --members 8 --chunk_sizes 4 2 1 --batch_size 32

The model is a BERT of random weights, by default in the shape of MiniLM (6 layers, 384 wide). Each row has a process of
its own, whose memory is looked at every few milliseconds (see `memory_use`) in the second of two steps: the growth over
what was allocated before the step, that is without the model and the optimizer's state. Nothing is downloaded.
"""

import json
import tempfile
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from datasets import Dataset
from memory_use import MEBIBYTE, Measurement, measuring, run_in_own_process
from peft import get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser

from sigma_nens_hf import SigmaNEnsTrainer, SigmaNEnsTrainingArguments, SigmaNormConfig

VOCABULARY_SIZE = 30_522


@dataclass
class Arguments:
    """Which sizes."""

    members: int = field(default=16, metadata={"help": "Number of members M."})
    chunk_sizes: list[int] = field(default_factory=lambda: [4, 1], metadata={"help": "Values of member_chunk_size."})
    batch_size: int = field(default=16, metadata={"help": "Examples in a batch."})
    tokens: int = field(default=64, metadata={"help": "Tokens in an example."})
    layers: int = field(default=6, metadata={"help": "Blocks of the model."})
    hidden_size: int = field(default=384, metadata={"help": "Width D of the model."})
    heads: int = field(default=12, metadata={"help": "Attention heads of a block."})
    intermediate_size: int = field(default=1536, metadata={"help": "Width of a block's feed-forward layer."})
    measure: bool = field(default=False, metadata={"help": "Measure one configuration, in this process."})
    chunk_size: int | None = field(default=None, metadata={"help": "Its member_chunk_size; default none."})


class MeasuredTrainer(SigmaNEnsTrainer):
    """A trainer that measures the last of its training steps, forward and backward.

    Attributes:
        measurement: What it took.
    """

    measurement: Measurement | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one batch and measure it."""
        with measuring() as self.measurement:
            return super().training_step(*args, **kwargs)


def measure(arguments: Arguments) -> Measurement:
    """Train for two steps in this process and return what the second took.

    Args:
        arguments: The configuration.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = BertConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        intermediate_size=arguments.intermediate_size,
    )
    model = get_peft_model(BertForSequenceClassification(config), SigmaNormConfig(num_members=arguments.members))
    num_examples = 2 * arguments.batch_size
    data = Dataset.from_dict(
        {
            "input_ids": torch.randint(VOCABULARY_SIZE, (num_examples, arguments.tokens)).tolist(),
            "attention_mask": torch.ones(num_examples, arguments.tokens, dtype=torch.long).tolist(),
            "labels": [example % 2 for example in range(num_examples)],
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = MeasuredTrainer(
            model=model,
            args=SigmaNEnsTrainingArguments(
                folder,
                per_device_train_batch_size=arguments.batch_size,
                member_chunk_size=arguments.chunk_size,
                max_steps=2,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=data,
        )
        trainer.train()
    return trainer.measurement


def measure_in_own_process(arguments: Arguments, members: int, chunk_size: int | None) -> Measurement:
    """Measure one configuration in a fresh process.

    Args:
        arguments: The shape of the model and of the batch.
        members: The number of members.
        chunk_size: Its `member_chunk_size`.
    """
    names = ("batch_size", "tokens", "layers", "hidden_size", "heads", "intermediate_size")
    values = {"measure": True, "members": members, **{name: getattr(arguments, name) for name in names}}
    if chunk_size is not None:
        values["chunk_size"] = chunk_size
    return Measurement(**run_in_own_process(__file__, values))


def main() -> None:
    """Measure all configurations and print the table."""
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    if arguments.measure:
        print(json.dumps(asdict(measure(arguments))))
        return
    table = Table(
        title=f"Memory of a training step: batches of {arguments.batch_size} x {arguments.tokens} tokens, "
        f"{arguments.layers} layers, {arguments.hidden_size} wide, fp32, one process",
        caption="Peak: the growth in the step, over the model and the optimizer's state. Ratios: to one member.",
    )
    for column in ("members", "member_chunk_size", "peak (MiB)", "ratio", "seconds", "ratio"):
        table.add_column(column, justify="right")
    configurations = [(1, None), *((arguments.members, size) for size in (None, *arguments.chunk_sizes))]
    one_member = None
    for members, chunk_size in configurations:
        found = measure_in_own_process(arguments, members, chunk_size)
        one_member = one_member or found
        table.add_row(
            str(members),
            str(chunk_size),
            f"{found.growth / MEBIBYTE:,.1f}",
            f"{found.growth / one_member.growth:.2f}",
            f"{found.seconds:.2f}",
            f"{found.seconds / one_member.seconds:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
