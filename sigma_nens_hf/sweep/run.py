"""A sweep over its points, by as many processes as work on its folder."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from datasets import Dataset
from filelock import FileLock, Timeout

from ..run_settings import remember_settings
from .points import SweepPoint
from .training import RUN_FILE, SweepSettings, train_point

# By which accelerate and torch tell a process that it is one of several that train one model.
_OF_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def leave_launch() -> None:
    """Let a process that was started with others, by `accelerate launch` for instance, train models of its own.

    Each gets a device of its own where there are as many.
    """
    num_devices = torch.cuda.device_count()  # counted without taking hold of them
    if "LOCAL_RANK" in os.environ and num_devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_devices)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(os.environ["LOCAL_RANK"]) % num_devices]
    for name in _OF_LAUNCH:
        os.environ.pop(name, None)


def run_sweep(
    points: Sequence[SweepPoint],
    settings: SweepSettings,
    splits: Mapping[str, Dataset],
    output_dir: Path,
    on_point: Callable[[SweepPoint], None] = lambda point: None,
) -> list[SweepPoint]:
    """Train every point that is neither finished nor being trained by another process.

    Points are locked, not listed: any number of processes may work on one folder, also on several machines that share
    it, and the lock of one that was killed is free again.

    Args:
        points: The points, in the order in which they are taken.
        settings: What they share.
        splits: As for `train_point`.
        output_dir: Folder of the sweep.
        on_point: Called with every point that is finished, whoever finished it.

    Returns:
        The points that other processes are still training.

    Raises:
        ValueError: The folder holds a sweep with other settings.
    """
    has_begun = any(output_dir.glob(f"*/{RUN_FILE}"))
    remember_settings(output_dir, settings_to_remember(settings), has_begun)
    elsewhere = []
    for point in points:
        folder = output_dir / point.name
        folder.mkdir(exist_ok=True)
        try:
            with FileLock(folder / ".lock", timeout=0):
                if not (folder / RUN_FILE).exists():
                    train_point(point, settings, splits, output_dir)
        except Timeout:
            elsewhere.append(point)
        else:
            on_point(point)
    return elsewhere


def settings_to_remember(settings: SweepSettings) -> dict[str, dict]:
    """Return what two calls must share to work on one folder, as plain data.

    Args:
        settings: What all points share.
    """
    data = settings.data
    files = [Path(file) for file in (data.train_file, data.report_file) if file]
    return {
        "model": {"model": os.path.basename(settings.model), "revision": settings.revision, **settings.config},
        "data": asdict(data),
        "files": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
        "training": settings.training,
    }
