"""The benchmark's variant for an accelerator: fast paths are checked against the plain one, then throughput is printed.

Sized for about five minutes on one GPU.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from baseline_report import markdown
from benchmark_contenders import CACHED, KINDS, SINGLE, THIRD, THIRD_SHARED, Contender, counted_costs
from benchmark_shapes import Shape
from transformers import PreTrainedModel, set_seed

from sigma_nens_hf.members import base_model_of, branch_at
from sigma_nens_hf.outputs import MEMBER_LOGITS

_TOLERANCE = 1e-3
_CHECKED = (THIRD, THIRD_SHARED, f"{THIRD}{CACHED}")
_MATRIX_SIZES = {"cpu": 512}
_MATRIX_SIZE = 8192


def measure_device(
    shapes: dict[str, Shape], members: list[int], device: str, is_bf16: bool, rounds: int
) -> dict[str, Any]:
    """Check the fast paths on a device, then measure and print the throughput of every contender there.

    Args:
        shapes: Shapes by name.
        members: Numbers of members M.
        device: The device.
        is_bf16: Whether to compute in bf16 (autocast); the check is in fp32.
        rounds: Rounds of measurement, over which the median is taken.

    Returns:
        "peak_flops" a second, "errors" by shape and kind, and "rows".

    Raises:
        RuntimeError: A fast path computes something else than the plain one.
    """
    bases = {}
    for name, shape in shapes.items():
        set_seed(0)
        bases[name] = shape.make_base()
    errors = {name: check_fast_paths(shape, bases[name], max(members), device) for name, shape in shapes.items()}
    for name, of_kinds in errors.items():
        largest = max(of_kinds.values())
        print(f"{name}: fast paths equal the plain path, forward and gradients; largest relative error {largest:.1e}")
    peak = peak_flops(device, torch.bfloat16 if is_bf16 else torch.float32)
    print(f"peak: {peak / 1e12:,.2f} Tflop/s, a matrix product in {'bf16' if is_bf16 else 'fp32'}\n")
    rows = []
    for name, shape in shapes.items():
        for num_members in members:
            for kind in KINDS:
                if kind != SINGLE or num_members == members[0]:
                    contender = Contender(kind, shape, bases[name], num_members, device, is_bf16)
                    rows.append(
                        {"shape": name, **_throughput(kind, shape, num_members, contender, peak, device, rounds)}
                    )
        print(markdown([_cells(row) for row in rows if row["shape"] == name]) + "\n", flush=True)
    return {"peak_flops": peak, "errors": errors, "rows": rows}


def check_fast_paths(shape: Shape, base: PreTrainedModel, num_members: int, device: str) -> dict[str, float]:
    """Compare late branching, and a cached prefix, with rows that are repeated at the inputs: logits and gradients.

    Args:
        shape: Shape of the backbone and the batch.
        base: The backbone.
        num_members: Number of members M.
        device: The device.

    Returns:
        The largest relative error by kind.

    Raises:
        RuntimeError: An error is larger than rounding explains.
    """
    errors = {}
    for kind in _CHECKED:
        contender = Contender(kind, shape, base, num_members, device)
        contender.switch(True)
        (model,) = contender.models
        fast = _logits_and_gradients(contender, {**contender.inputs, **contender.features})
        branch_at(base_model_of(model), "default", None)
        plain = _logits_and_gradients(contender, contender.inputs)
        errors[kind] = max(
            ((fast[name] - plain[name]).abs().max() / plain[name].abs().max().clamp_min(1e-12)).item() for name in plain
        )
        if fast.keys() != plain.keys() or not errors[kind] <= _TOLERANCE:
            raise RuntimeError(
                f"{KINDS[kind].title}, M={num_members}: the fast path differs from the plain one by {errors[kind]:.1e}."
            )
    return errors


def _logits_and_gradients(contender: Contender, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    (model,) = contender.models
    with torch.no_grad():
        found = {MEMBER_LOGITS: model(**inputs)[MEMBER_LOGITS]}
    contender.loss(model, inputs, contender.labels).backward()
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def peak_flops(device: str, dtype: torch.dtype, repetitions: int = 10) -> float:
    """Return the floating-point operations a second of a large matrix product.

    Args:
        device: The device.
        dtype: Precision.
        repetitions: The best of this many counts.
    """
    size = _MATRIX_SIZES.get(device, _MATRIX_SIZE)
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    seconds = [_seconds(lambda: matrix @ matrix, device) for _ in range(repetitions)]
    return 2 * size**3 / min(seconds[1:])


def _throughput(
    kind: str, shape: Shape, num_members: int, contender: Contender, peak: float, device: str, rounds: int
) -> dict[str, Any]:
    """Return what a contender gets done in a second, and which fraction of the device's peak its counted work is."""
    items = shape.batch_size * (1 if shape.is_image else shape.tokens)
    row: dict[str, Any] = {"kind": kind, "members": num_members, "unit": "images" if shape.is_image else "tokens"}
    # A step of one model is a forward and a backward through all blocks, of as much work each: weights are frozen.
    flops = {"training": 2 * shape.layers * shape.block_flops, "inference": shape.layers * shape.block_flops}
    counted = dict(zip(flops, counted_costs(kind, shape.layers, num_members), strict=True))
    functions = {"training": contender.train, "inference": contender.infer}
    if KINDS[kind].is_cached:
        functions.pop("inference")  # a cache serves training alone
    for what, function in functions.items():
        contender.switch(what == "training")
        seconds = statistics.median([_seconds(function, device) for _ in range(rounds + 2)][2:])
        row[f"{what}_per_second"] = items / seconds
        row[f"{what}_of_peak"] = counted[what] * flops[what] / seconds / peak
    return row


def _seconds(function: Callable[[], object], device: str) -> float:
    _wait(device)
    started = time.perf_counter()
    function()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _cells(row: dict[str, Any]) -> dict[str, str]:
    cells = {"": KINDS[row["kind"]].title, "M": str(1 if row["kind"] == SINGLE else row["members"])}
    for what, share in (("training", "of peak"), ("inference", "of peak ")):
        is_known = f"{what}_of_peak" in row
        cells[f"{what} ({row['unit']}/s)"] = f"{row[f'{what}_per_second']:,.0f}" if is_known else "-"
        cells[share] = f"{row[f'{what}_of_peak']:.1%}" if is_known else "-"
    return cells
