"""Trains tiny ensembles with a frozen and a staged prefix, on two processes from a cache; run by a test."""

import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object
from test_cached_training import cached_trainer, text_dataset
from test_late_branching import late
from test_trainer import step_logs


def train(folder: Path, num_processes: int) -> dict:
    runs = {}
    for prefix in ("frozen", "staged"):
        model = late("bert", prefix=prefix)
        trainer = cached_trainer(
            model, folder / prefix, text_dataset(num_examples=24), per_device_train_batch_size=4 // num_processes,
            max_steps=3, max_grad_norm=1e9, prefix_cache=str(folder / prefix / "cache") if num_processes > 1 else None,
        )  # fmt: skip
        trainer.train()
        sums = gather_object([[p.detach().double().sum().item() for p in model.parameters()]])
        runs[prefix] = {"steps": step_logs(trainer), "agree": all(found == sums[0] for found in sums)}
    return runs


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    runs = train(folder, num_processes=2)
    if torch.distributed.get_rank() == 0:
        torch.save(runs, folder / "two.pt")


if __name__ == "__main__":
    main()
