#!/usr/bin/env python
"""Measure what a norm with members costs, beside one plain norm on the same rows.

    OMP_NUM_THREADS=1 python scripts/benchmark_norm.py
    python scripts/benchmark_norm.py --device cuda --dtype bfloat16 --output norms.json

Each way of computing it is first checked against the loop, then timed in turn with the others, forward alone and with
the gradients of rows, gains and biases. Printed are the plain norm's milliseconds and the medians of the ratios to it.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser

from sigma_nens_hf.member_norm import member_norm, scale_after_norm
from sigma_nens_hf.norm_formulas import NormFormula

FORMULAS = {"layer": NormFormula(True, 1e-12), "rms": NormFormula(False, 1e-6)}
# Of the largest value; the plain operations round to the norm's precision once more, before they scale.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


@dataclass
class Arguments:
    """What to measure."""

    device: str = field(default="cpu", metadata={"help": "Device, as torch names it."})
    dtype: str = field(default="float32", metadata={"help": "Precision.", "choices": list(TOLERANCE)})
    kind: str = field(default="layer", metadata={"help": "Layer norm or RMS norm.", "choices": list(FORMULAS)})
    num_members: list[int] = field(default_factory=lambda: [1, 4, 8, 16], metadata={"help": "Numbers of members M."})
    batch_size: int = field(default=16, metadata={"help": "Examples B."})
    length: int = field(default=64, metadata={"help": "Tokens of an example."})
    hidden_size: int = field(default=384, metadata={"help": "Features D."})
    rounds: int = field(default=15, metadata={"help": "Rounds; in each every way is timed once."})
    compile: bool = field(default=False, metadata={"help": "Measure torch.compile too; on by itself off the CPU."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the figures."})


@dataclass
class Measurement:
    """What one number of members costs.

    Attributes:
        num_members: The number of members M.
        with_gradients: Whether backward is part of it.
        plain_ms: Median time of one plain norm over all rows.
        ratios: Median ratio to it, by the name of the way.
    """

    num_members: int
    with_gradients: bool
    plain_ms: float
    ratios: dict[str, float]


def plain(formula: NormFormula, rows: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Give all rows the gain and bias of the first member."""
    return formula(rows.flatten(0, 1), gain[0], None if bias is None else bias[0])


def loop(formula: NormFormula, rows: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute a norm a member and concatenate them."""
    biases = [None] * len(gain) if bias is None else bias.unbind()
    return torch.cat([formula(*member) for member in zip(rows.unbind(), gain.unbind(), biases, strict=True)])


def ways_of(arguments: Arguments) -> dict[str, Callable]:
    """Return the ways to compute the norm, by their names; "package" is the one that the package takes here."""
    ways = {"package": member_norm, "loop": loop, "affine": scale_after_norm}
    if arguments.compile or arguments.device != "cpu":
        ways["compiled"] = torch.compile(scale_after_norm, dynamic=False)
    return ways


def outcome(way: Callable, formula: NormFormula, inputs: list[torch.Tensor | None], weights: torch.Tensor | None):
    """Return a way's output, and its gradients where the output's gradient `weights` is given."""
    output = way(formula, *inputs)
    if weights is None:
        return [output]
    # The plain norm uses one member's gain and bias; the gradients of the others are zero for it.
    return [output, *torch.autograd.grad(output, [tensor for tensor in inputs if tensor is not None], weights)]


def check(way: Callable, name: str, arguments: Arguments, *case: object) -> None:
    """Compare a way with the loop in double precision: in 16 bits the loop's own gradients are several per cent off.

    Raises:
        RuntimeError: They differ.
    """
    formula, inputs, weights = case
    exact = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    expectation = outcome(loop, formula, exact, None if weights is None else weights.double())
    for actual, expected in zip(outcome(way, *case), expectation, strict=True):
        error = (actual - expected).abs().max() / expected.abs().max()
        if not error <= TOLERANCE[arguments.dtype]:
            raise RuntimeError(f"{name} differs from the loop by {error:.1e} of the largest value.")


def seconds(arguments: Arguments, way: Callable, *case: object) -> float:
    """Time one call."""
    synchronize = (lambda: None) if arguments.device == "cpu" else torch.accelerator.synchronize
    synchronize()
    started = time.perf_counter()
    outcome(way, *case)
    synchronize()
    return time.perf_counter() - started


def measure(arguments: Arguments, num_members: int, with_gradients: bool) -> Measurement:
    """Check all ways, then time them in turn."""
    torch.manual_seed(0)
    size = arguments.hidden_size
    shapes = [(num_members, arguments.batch_size, arguments.length, size), (num_members, size), (num_members, size)]
    options = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    inputs = [torch.randn(shape, **options).requires_grad_(with_gradients) for shape in shapes]
    formula = FORMULAS[arguments.kind]
    if arguments.kind == "rms":
        inputs[2] = None
    weights = torch.randn(shapes[0], **options).flatten(0, 1) if with_gradients else None
    ways = ways_of(arguments)
    for name, way in ways.items():
        if name == "loop":
            continue
        check(way, name, arguments, formula, inputs, weights)
    times = {name: [] for name in ("plain", *ways)}
    for _ in range(arguments.rounds):
        for name, way in {"plain": plain, **ways}.items():
            times[name].append(seconds(arguments, way, formula, inputs, weights))
    ratios = {name: statistics.median(a / b for a, b in zip(times[name], times["plain"], strict=True)) for name in ways}
    return Measurement(num_members, with_gradients, statistics.median(times["plain"]) * 1e3, ratios)


def main(command_line: list[str] | None = None) -> None:
    """Measure, print the table and write the file."""
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(command_line)
    found = [measure(arguments, num, gradients) for num in arguments.num_members for gradients in (False, True)]
    table = Table(
        title=f"{arguments.kind} norm with members, {arguments.batch_size} x {arguments.length} tokens a member, "
        f"{arguments.hidden_size} wide, {arguments.dtype}, {arguments.device}, {torch.get_num_threads()} thread(s)",
        caption="Medians of the ratios to one plain norm on the same rows.",
    )
    for column in ("members", "pass", "plain (ms)", *found[0].ratios):
        table.add_column(column, justify="right")
    for row in found:
        name = "forward + backward" if row.with_gradients else "forward"
        ratios = [f"{ratio:.2f}" for ratio in row.ratios.values()]
        table.add_row(str(row.num_members), name, f"{row.plain_ms:.2f}", *ratios)
    Console().print(table)
    if arguments.output is not None:
        figures = {"arguments": asdict(arguments), "threads": torch.get_num_threads(), "torch": torch.__version__}
        Path(arguments.output).write_text(
            json.dumps({**figures, "measurements": [asdict(row) for row in found]}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
