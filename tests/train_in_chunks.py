"""Trains a tiny ensemble of texts' tokens with members in chunks, on two processes; run by a test."""

import json
import sys
from pathlib import Path

import tiny
import torch
from test_trainer import dataset, step_logs, trainer_for


def train(folder: Path, num_processes: int, member_chunk_size: int | None) -> dict:
    trainer = trainer_for(
        tiny.ensemble("bert-token", base=tiny.without_dropout("bert-token")),
        folder,
        dataset("bert-token", 24),
        per_device_train_batch_size=4 // num_processes,
        gradient_accumulation_steps=2,
        max_steps=3,
        max_grad_norm=1e9,
        member_chunk_size=member_chunk_size,
    )
    trainer.train()
    return {"steps": step_logs(trainer), "evaluation": trainer.evaluate()}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    logs = train(folder, num_processes=2, member_chunk_size=3)
    if torch.distributed.get_rank() == 0:
        (folder / "logs.json").write_text(json.dumps(logs))


if __name__ == "__main__":
    main()
