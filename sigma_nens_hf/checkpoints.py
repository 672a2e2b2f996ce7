"""Which checkpoint of a training can be gone on from."""

import json
import os

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


def last_complete_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """Return the last checkpoint in a folder that was written to its end, None where there is none.

    Trainer writes its state file last; a checkpoint without it was cut off.

    Args:
        output_dir: The trainer's output folder.
    """
    if not os.path.isdir(output_dir):
        return None
    steps = {}
    for name in os.listdir(output_dir):
        prefix, _, step = name.rpartition("-")
        folder = os.path.join(output_dir, name)
        state_file = os.path.join(folder, TRAINER_STATE_NAME)
        if prefix == PREFIX_CHECKPOINT_DIR and step.isdigit() and _is_whole(state_file):
            steps[int(step)] = folder
    return steps[max(steps)] if steps else None


def _is_whole(state_file: str) -> bool:
    try:
        with open(state_file, encoding="utf-8") as file:
            return "global_step" in json.load(file)
    except (OSError, ValueError, TypeError):
        return False
