#!/usr/bin/env python
"""Measure the memory that evaluating an ensemble takes, beside what holding the logits of all examples would take.

    python scripts/benchmark_evaluation_memory.py
    python scripts/benchmark_evaluation_memory.py --num_examples 2000 20000 200000

A tiny random model stands for a real one: only the sizes that the evaluation sees count. Each size has a process of its
own, whose memory is looked at every few milliseconds; see `memory_use`. Nothing is downloaded.
"""

import json
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from memory_use import MEBIBYTE, Measurement, measuring, run_in_own_process
from peft import get_peft_model
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, PreTrainedTokenizerFast

from sigma_nens_hf import SigmaNormConfig
from sigma_nens_hf.evaluation.data import EvaluationData
from sigma_nens_hf.evaluation.evaluate import evaluate_dataset

VOCABULARY = ["[PAD]", "[UNK]", *(f"w{n}" for n in range(98))]


@dataclass
class Arguments:
    """Which sizes."""

    num_examples: list[int] = field(default_factory=lambda: [2_000, 20_000], metadata={"help": "Numbers of examples."})
    classes: int = field(default=1_000, metadata={"help": "Number of classes C."})
    members: int = field(default=16, metadata={"help": "Number of members M."})
    batch_size: int = field(default=32, metadata={"help": "Examples in a batch."})
    measure: bool = field(default=False, metadata={"help": "Measure the one size given, in this process."})


def measure(arguments: Arguments) -> Measurement:
    """Evaluate one size in this process.

    Args:
        arguments: The sizes, with a single number of examples.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=16, num_labels=arguments.classes, initializer_range=0.6,
    )  # fmt: skip
    model = get_peft_model(BertForSequenceClassification(config), SigmaNormConfig(num_members=arguments.members))
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    generator = np.random.default_rng(0)
    (num_examples,) = arguments.num_examples
    texts = [" ".join(generator.choice(VOCABULARY[2:], 8)) for _ in range(num_examples)]
    data = Dataset.from_dict({"text": texts, "label": generator.integers(0, arguments.classes, num_examples)})
    with tempfile.TemporaryDirectory() as folder, measuring() as found:
        evaluate_dataset(
            model,
            tokenizer,
            EvaluationData.of(model, data),
            batch_size=arguments.batch_size,
            examples_file=Path(folder, "examples.csv"),
        )
    return found


def measure_in_own_process(arguments: Arguments, num_examples: int) -> Measurement:
    """Evaluate one size in a fresh process.

    Args:
        arguments: The sizes.
        num_examples: The number of examples.
    """
    sizes = {name: getattr(arguments, name) for name in ("classes", "members", "batch_size")}
    return Measurement(**run_in_own_process(__file__, {"measure": True, "num_examples": num_examples, **sizes}))


def main() -> None:
    """Measure all sizes and print the table."""
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    if arguments.measure:
        print(json.dumps(asdict(measure(arguments))))
        return
    table = Table(
        title=f"Memory of an evaluation: {arguments.classes:,} classes, {arguments.members} members, batches of "
        f"{arguments.batch_size}, one process",
        caption="All logits: examples x members x classes x 4 bytes, before anything is computed from them.",
    )
    for column in ("examples", "this evaluation (MiB)", "all logits (MiB)", "ratio", "seconds"):
        table.add_column(column, justify="right")
    for num_examples in arguments.num_examples:
        found = measure_in_own_process(arguments, num_examples)
        all_logits = 4 * num_examples * arguments.members * arguments.classes
        table.add_row(
            f"{num_examples:,}",
            f"{found.growth / MEBIBYTE:,.1f}",
            f"{all_logits / MEBIBYTE:,.1f}",
            f"{found.growth / all_logits:.3f}",
            f"{found.seconds:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
