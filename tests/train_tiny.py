"""Trains tiny ensembles for a few steps and writes down what was logged; run by tests in one process or several."""

import json
import sys
from pathlib import Path

import tiny
import torch
from test_trainer import dataset, step_logs, trainer_for

ARCHITECTURES = ["bert", "bert-token", "llama-token", "vit", "clip", "bert-choice"]
GLOBAL_BATCH = 8


def train(folder: Path, num_processes: int) -> dict:
    logs = {}
    for architecture in ARCHITECTURES:
        trainer = trainer_for(
            tiny.ensemble(architecture, base=tiny.without_dropout(architecture)),
            folder / architecture,
            dataset(architecture, 24),
            per_device_train_batch_size=GLOBAL_BATCH // num_processes // 2,
            gradient_accumulation_steps=2,
            per_device_eval_batch_size=5,  # does not divide 24
            max_steps=3,
            max_grad_norm=1e9,
        )
        trainer.train()
        logs[architecture] = {"steps": step_logs(trainer), "evaluation": trainer.evaluate()}
    return logs


def main() -> None:
    torch.set_num_threads(1)
    folder, num_processes = Path(sys.argv[1]), int(sys.argv[2])
    logs = train(folder, num_processes)
    if torch.distributed.get_rank() == 0:
        (folder / "logs.json").write_text(json.dumps(logs))


if __name__ == "__main__":
    main()
