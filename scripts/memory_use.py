"""The memory that this process has allocated, and measurements in processes of their own.

Not all memory that is resident is counted, which varies with what pages of the libraries happen to be in, but what a
process has allocated itself. Linux counts that apart.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEBIBYTE = 2**20


@dataclass
class Measurement:
    """What a piece of work took.

    Attributes:
        growth: Peak memory in it minus memory before it, in bytes.
        seconds: Time.
    """

    growth: int = 0
    seconds: float = 0.0


@contextmanager
def measuring() -> Iterator[Measurement]:
    """Measure what is done inside; the measurement is complete at its end."""
    found, before, started = Measurement(), allocated_memory(), time.perf_counter()
    with peak_memory() as peak:
        yield found
    found.growth, found.seconds = peak[0] - before, time.perf_counter() - started


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Watch the memory of this process; the list's one item is the peak so far in bytes."""
    peak, done = [allocated_memory()], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], allocated_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def allocated_memory() -> int:
    """Return the memory of this process in bytes, without what it has mapped of files."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["RssAnon"].split()[0])


def run_in_own_process(script: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a script in a fresh process and return the JSON object that it prints last.

    Args:
        script: The script's file.
        arguments: Values of its command line by name.

    Raises:
        subprocess.CalledProcessError: It has failed.
    """
    command = [
        sys.executable,
        script,
        *(part for name, value in arguments.items() for part in (f"--{name}", str(value))),
    ]
    # Else glibc keeps, by chance, up to some hundred MiB that were freed.
    thresholds = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "1000000")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **thresholds}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])
