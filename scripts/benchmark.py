#!/usr/bin/env python
"""Measure what an ensemble costs beside one model and beside M models: time, memory, storage, and the counted work.

    python scripts/benchmark.py --output benchmark.json
    python scripts/benchmark.py --shapes minilm --members 4 --rounds 3
    python scripts/benchmark.py --device cuda

All contenders do the same work side by side in one process, in rounds that go through all of them; medians over rounds
are divided by that of one norm-tuned model (peft's LN tuning), which costs 1. The models have random weights and no
dropout. Nothing is downloaded. Without --device it took 16 minutes on two cores. With --device, the fast paths are
checked there first, and throughput is printed (see `benchmark_device`).
"""

import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmark_contenders import CACHED, FULL, KINDS, PLAIN_NORMS, SINGLE, THIRD, Contender, counted_costs, storage
from benchmark_device import measure_device
from benchmark_measures import measure_memory, time_rounds
from benchmark_report import report_of, targets
from benchmark_shapes import DEVICE_BATCHES, SHAPES, Shape
from memory_use import run_in_own_process
from transformers import HfArgumentParser, set_seed

OVERHEAD_MEMBERS = 4
FEWEST_ROUNDS = 3


@dataclass
class Arguments:
    """What is measured, and how thoroughly."""

    shapes: list[str] = field(
        default_factory=lambda: list(SHAPES), metadata={"help": f"Backbones: {', '.join(SHAPES)}."}
    )
    members: list[int] = field(default_factory=lambda: [1, 4, 8, 16], metadata={"help": "Numbers of members M."})
    rounds: int = field(
        default=5, metadata={"help": f"Rounds for up to 4 members; fewer for more, at least {FEWEST_ROUNDS} of them."}
    )
    batch_size: int | None = field(default=None, metadata={"help": "Examples in a batch; default: by the shape."})
    threads: int = field(default=2, metadata={"help": "Threads that compute."})
    bf16: bool | None = field(
        default=None, metadata={"help": "Compute in bf16 (autocast); default: only where --device is not cpu."}
    )
    skip_growth: bool = field(default=False, metadata={"help": "Leave the table of growth out."})
    skip_memory: bool = field(default=False, metadata={"help": "Leave peak memory out, which Linux alone tells."})
    processor_time: bool = field(
        default=False,
        metadata={"help": "Count processor time instead of time, for a busy machine; only right with --threads 1."},
    )
    quick: bool = field(default=False, metadata={"help": "Tiny shapes and one round, to see whether all of it runs."})
    device: str | None = field(
        default=None, metadata={"help": "Run the variant for accelerators there, such as cuda; cpu to try it out."}
    )
    output: str | None = field(default=None, metadata={"help": "JSON file for all figures."})
    measure: str | None = field(
        default=None, metadata={"help": "Used by the script itself: what to measure the memory of, as JSON."}
    )

    @property
    def is_bf16(self) -> bool:
        """Whether bf16 is computed in."""
        return self.device not in (None, "cpu") if self.bf16 is None else self.bf16

    @property
    def clock(self) -> Callable[[], float]:
        """Tells the time."""
        return time.process_time if self.processor_time else time.perf_counter

    def rounds_of(self, num_members: int) -> int:
        """Return how many rounds there are with M members, whose steps take the longer the more they are."""
        return 1 if self.quick else max(min(self.rounds, FEWEST_ROUNDS), self.rounds * 4 // max(4, num_members))

    def shape_of(self, name: str) -> Shape:
        """Return a shape as these arguments want it."""
        shape = SHAPES[name]
        if self.device is not None:
            shape = replace(shape, **DEVICE_BATCHES[name])
        if self.quick:
            small = {"hidden_size": 32, "heads": 2, "intermediate_size": 48, "batch_size": 2}
            shape = replace(shape, **small, length=32 if shape.is_image else 8)
        return shape if self.batch_size is None else replace(shape, batch_size=self.batch_size)


def measure_kinds(name: str, num_members: int, memory: dict[str, int], arguments: Arguments) -> list[dict[str, Any]]:
    """Return a row of figures for every kind of contender with M members.

    Args:
        name: Name of the shape.
        num_members: Number of members M.
        memory: Peak memory by kind, in bytes; of kinds that are missing it is not known.
        arguments: How to measure.
    """
    shape, clock = arguments.shape_of(name), arguments.clock
    set_seed(0)
    base = shape.make_base()
    contenders = {kind: Contender(kind, shape, base, num_members, is_bf16=arguments.is_bf16) for kind in KINDS}
    times = time_rounds(contenders, arguments.rounds_of(num_members), clock)
    del contenders
    medians = {what: {k: statistics.median(v) for k, v in of_kinds.items()} for what, of_kinds in times.items()}
    stored = {}
    for kind in (kind for kind in KINDS if not kind.endswith(CACHED)):
        stored[kind] = storage(kind, shape, base, num_members, clock)
    rows = []
    for kind in KINDS:
        training, inference = counted_costs(kind, shape.layers, num_members)
        size, seconds = stored[kind.removesuffix(CACHED)]
        row = {
            "kind": kind, "members": 1 if kind == SINGLE else num_members, "rounds": len(times["training"][kind]),
            "counted_training": training, "training_seconds": medians["training"][kind],
            "training": medians["training"][kind] / medians["training"][SINGLE],
            "counted_inference": inference, "inference_seconds": medians["inference"].get(kind),
            "inference": None if KINDS[kind].is_cached else medians["inference"][kind] / medians["inference"][SINGLE],
            "stored_bytes": size, "load_seconds": seconds, "load": seconds / stored[SINGLE][1],
            "peak_bytes": memory.get(kind), "peak": memory[kind] / memory[SINGLE] if kind in memory else None,
        }  # fmt: skip
        rows.append(row)
    return rows


def measure_growth(arguments: Arguments) -> list[dict[str, Any]]:
    """Return what late branching at the last third costs as one dimension of the work grows, M = 4 elsewhere.

    Args:
        arguments: How to measure; the shape is that of the first of its shapes.
    """
    shape = arguments.shape_of(arguments.shapes[0])
    variants = [("depth", depth, replace(shape, layers=depth), 4) for depth in (3, 6, 12)]
    for width in (shape.hidden_size // 2, shape.hidden_size, 2 * shape.hidden_size):
        heads, wide = shape.heads * width // shape.hidden_size, shape.intermediate_size * width // shape.hidden_size
        variants.append(
            ("width", width, replace(shape, hidden_size=width, heads=heads, intermediate_size=wide), OVERHEAD_MEMBERS)
        )
    for batch_size in (max(1, shape.batch_size // 2), shape.batch_size, 2 * shape.batch_size):
        variants.append(("batch", batch_size, replace(shape, batch_size=batch_size), OVERHEAD_MEMBERS))
    variants += [("M", num_members, shape, num_members) for num_members in (1, 4, 8)]
    rows = []
    for dimension, value, variant, num_members in variants:
        set_seed(0)
        base = variant.make_base()
        contenders = {
            kind: Contender(kind, variant, base, num_members, is_bf16=arguments.is_bf16) for kind in (SINGLE, THIRD)
        }
        rounds = arguments.rounds_of(1)
        times = time_rounds(contenders, rounds, arguments.clock, has_inference=False)["training"]
        ratio = statistics.median(times[THIRD]) / statistics.median(times[SINGLE])
        counted = counted_costs(THIRD, variant.layers, num_members)[0]
        rows.append({"grows": dimension, "value": value, "counted": counted, "training": ratio})
    return rows


def measure_norm_overhead(name: str, arguments: Arguments) -> dict[str, float]:
    """Return the share of a training step, at full depth, that sigma norms take over plain norms on as many rows.

    What sigma norms bring with them, the regulariser and the optimizer's work on all members' gates, is part of it.

    Args:
        name: Name of the shape.
        arguments: How to measure.

    Returns:
        "median" of the differences in pairs of steps that follow each other, and "lower" and "upper" quartile.
    """
    shape = arguments.shape_of(name)
    set_seed(0)
    base = shape.make_base()
    contenders = {
        kind: Contender(kind, shape, base, OVERHEAD_MEMBERS, is_bf16=arguments.is_bf16) for kind in (FULL, PLAIN_NORMS)
    }
    rounds = 2 if arguments.quick else 2 * arguments.rounds
    times = time_rounds(contenders, rounds, arguments.clock, has_inference=False)["training"]
    shares = [1 - plain / full for plain, full in zip(times[PLAIN_NORMS], times[FULL], strict=True)]
    lower, median, upper = statistics.quantiles(shares, n=4, method="inclusive") if len(shares) > 1 else 3 * shares
    return {"median": median, "lower": lower, "upper": upper}


def measure(arguments: Arguments) -> dict[str, Any]:
    """Return all figures.

    Args:
        arguments: What and how to measure.
    """
    found: dict[str, Any] = {"settings": asdict(arguments), "shapes": {}, "norm_overhead": {}, "growth": []}
    for name in arguments.shapes:
        shape = arguments.shape_of(name)
        memory: dict[str, dict[str, int]] = {}
        if not arguments.skip_memory:
            settings = {"shape": asdict(shape), "members": arguments.members, "threads": arguments.threads}
            settings["bf16"] = arguments.is_bf16
            memory = run_in_own_process(__file__, {"measure": json.dumps(settings)})
        rows = [measure_kinds(name, m, memory.get(str(m), {}), arguments) for m in arguments.members]
        found["shapes"][name] = {"shape": asdict(shape), "rows": list(chain(*rows))}
        found["norm_overhead"][name] = measure_norm_overhead(name, arguments)
    if not arguments.skip_growth:
        found["growth"] = measure_growth(arguments)
    found["targets"] = targets(found)
    return found


def main(argv: list[str] | None = None) -> None:
    """Measure and print; None: with this process's command line."""
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")  # peft's, of norms that it takes for layers it does not know
    if arguments.measure is not None:
        print(json.dumps(measure_memory(json.loads(arguments.measure))))
        return
    unknown = set(arguments.shapes) - set(SHAPES)
    if unknown:
        raise ValueError(f"There is no shape {sorted(unknown)}, only {list(SHAPES)}.")
    torch.set_num_threads(arguments.threads)
    if arguments.device is None:
        found = measure(arguments)
        print(report_of(found))
    else:
        shapes = {name: arguments.shape_of(name) for name in arguments.shapes}
        rounds = arguments.rounds_of(1)
        found = measure_device(shapes, arguments.members, arguments.device, arguments.is_bf16, rounds)
    if arguments.output is not None:
        Path(arguments.output).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
