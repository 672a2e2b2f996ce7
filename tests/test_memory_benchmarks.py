"""The scripts that measure memory: they run and print their tables, and chunks of members save what they promise."""

import sys
import time

import benchmark_evaluation_memory
import benchmark_training_memory
import memory_use
import numpy as np
import pytest


@pytest.mark.parametrize(
    ("script", "arguments", "rows"),
    [
        (benchmark_evaluation_memory, "--num_examples 6 --classes 5 --members 2 --batch_size 4", ["6"]),
        (
            benchmark_training_memory,
            "--members 3 --chunk_sizes 2 --batch_size 2 --tokens 4 --layers 1 --hidden_size 8 --heads 2 "
            "--intermediate_size 8",
            ["1 │              None", "3 │              None", "3 │                 2"],
        ),
    ],
)
def test_table(script, arguments, rows, monkeypatch, capsys):
    measured = []

    def in_this_process(file, values):
        command_line = [part for name, value in values.items() for part in (f"--{name}", str(value))]
        (parsed,) = script.HfArgumentParser(script.Arguments).parse_args_into_dataclasses(command_line)
        measured.append(script.measure(parsed))
        # In a process that has memory left over, so small a model takes no more of it.
        return {"growth": 2**20, "seconds": measured[-1].seconds}

    monkeypatch.setattr(script, "run_in_own_process", in_this_process)
    monkeypatch.setattr(sys, "argv", [script.__file__, *arguments.split()])
    script.main()
    table = capsys.readouterr().out
    assert len(measured) == len(rows)
    assert all(found.growth >= 0 and found.seconds > 0 for found in measured)
    assert all(row in table for row in rows)


def test_peak_is_that_of_memory_which_is_freed_again():
    before = memory_use.allocated_memory()
    with memory_use.peak_memory() as peak:
        array = np.ones(64 * memory_use.MEBIBYTE, dtype=np.uint8)
        size = array.nbytes
        time.sleep(0.05)
        del array
    assert 0.9 * size < peak[0] - before < 1.3 * size
    assert memory_use.allocated_memory() - before < 0.3 * size


@pytest.mark.slow
def test_a_step_of_one_member_at_a_time_takes_the_memory_of_one_member():
    arguments = benchmark_training_memory.Arguments()
    one_member = benchmark_training_memory.measure_in_own_process(arguments, 1, None)
    in_turn = benchmark_training_memory.measure_in_own_process(arguments, 4, 1)
    assert one_member.growth > 50 * memory_use.MEBIBYTE
    assert in_turn.growth < 1.15 * one_member.growth
