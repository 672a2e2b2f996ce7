"""What the compared models cost, measured side by side in one process on the same examples."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from baselines import member_logits
from datasets import Dataset
from transformers import Trainer

ROUNDS = 5


def measure_costs(
    trainers: dict[str, Trainer], examples: Dataset, batch_size: int, dropout_passes: int
) -> dict[str, dict[str, float]]:
    """Return the cost of a training step and of inference of every model, as ratios to the first.

    Rounds go through all models in turn, so that what else happens on the machine meets all of them; the median over
    rounds counts.

    Args:
        trainers: Trainers of fresh models by kind; the first is what the others are compared with.
        examples: Encoded examples, a few batches.
        batch_size: Of training.
        dropout_passes: Passes of MC dropout, whose inference is measured of the first model as "dropout".

    Returns:
        "training" and "inference", each with a ratio by kind.
    """
    first = next(iter(trainers))
    seconds: dict[str, dict[str, list[float]]] = {"training": defaultdict(list), "inference": defaultdict(list)}
    rows = list(examples)
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    for trainer in trainers.values():
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = 1
    for _ in range(ROUNDS):
        for kind, trainer in trainers.items():
            seconds["training"][kind].append(_seconds(_train, trainer, batches))
            seconds["inference"][kind].append(_seconds(member_logits, trainer, examples))
        seconds["inference"]["dropout"].append(_seconds(member_logits, trainers[first], examples, dropout_passes))
    medians = {
        what: {kind: statistics.median(values) for kind, values in of_kinds.items()}
        for what, of_kinds in seconds.items()
    }
    return {
        what: {kind: value / of_kinds[first] for kind, value in of_kinds.items()} for what, of_kinds in medians.items()
    }


def _train(trainer: Trainer, batches: Sequence[list]) -> None:
    trainer.model.train()
    for batch in batches:
        trainer.training_step(trainer.model, trainer.data_collator(batch))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()


def _seconds(function: Callable, *args: object) -> float:
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start
