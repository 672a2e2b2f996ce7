"""Time and memory of contenders: steps in rounds that go through all of them, and peaks in processes of their own."""

import gc
import multiprocessing
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from benchmark_contenders import CACHED, KINDS, SEPARATE, Contender
from benchmark_shapes import Shape
from memory_use import allocated_memory, peak_memory
from transformers import set_seed

Times = dict[str, dict[str, list[float]]]


def time_rounds(contenders: dict[str, Contender], rounds: int, clock: Callable, has_inference: bool = True) -> Times:
    """Return the seconds of every contender's training step and inference in every round.

    Args:
        contenders: Contenders by name; each is warmed up first.
        rounds: Number of rounds. Every other one goes through the contenders backwards.
        clock: Tells the time.
        has_inference: Whether inference is timed at all. It never is of those whose prefix is cached, which is a matter
            of training alone.

    Returns:
        "training" and "inference", each with the seconds in every round by name.
    """
    seconds: Times = {"training": defaultdict(list), "inference": defaultdict(list)}
    for number in range(rounds + 1):
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            contender = contenders[name]
            does_infer = has_inference and not name.endswith(CACHED)
            for what in ("training", "inference")[: 1 + does_infer]:
                contender.switch(what == "training")
                started = clock()
                contender.train() if what == "training" else contender.infer()
                if number:
                    seconds[what][name].append(clock() - started)
    return seconds


def measure_memory(settings: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the peak memory of a training step by M and kind, in bytes over what was allocated before the step.

    Each has a process of its own, forked before anything has been computed.

    Args:
        settings: "shape", "members", "threads" and "bf16".
    """
    context, found = multiprocessing.get_context("fork"), {}
    for num_members in settings["members"]:
        kinds = [kind for kind in KINDS if kind != SEPARATE]
        found[str(num_members)] = {}
        for kind in kinds:
            with context.Pool(1) as pool:
                found[str(num_members)][kind] = pool.apply(_step_memory, (kind, num_members, settings))
    return found


def _step_memory(kind: str, num_members: int, settings: dict[str, Any]) -> int:
    torch.set_num_threads(settings["threads"])
    set_seed(0)
    shape = Shape(**settings["shape"])
    contender = Contender(kind, shape, shape.make_base(), num_members, is_bf16=settings["bf16"])
    contender.switch(True)
    contender.train(num_examples=1)  # what is allocated once, such as the optimizer's state, is no part of a step
    gc.collect()
    before = allocated_memory()
    with peak_memory() as peak:
        contender.train()
    return peak[0] - before
