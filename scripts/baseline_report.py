"""The comparison as tables: every method over seeds with intervals, differences on the same examples, and costs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.stats
import torch

from sigma_nens_hf import fit_temperature
from sigma_nens_hf.metrics import TABLE_METRICS, ExampleTable, calibration_noise_floor, paired_bootstrap
from sigma_nens_hf.outputs import pooled_log_probabilities

RUN_FILE, LOGITS_FILE = "run.json", "logits.npz"


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        name: As it is printed.
        kind: Kind of the models that it asks.
        takes_all: Whether it pools the M models of a seed, or asks the first of them.
        answers: Which of a model's answers it takes, "logits" or those with "dropout".
    """

    name: str
    kind: str
    takes_all: bool = False
    answers: str = "logits"


# Of these models the first is also asked with dropout.
DROPOUT_KIND = "norms"
OURS = "sigma-N-Ens"
METHODS = (
    Method("single model, tuned norms", "norms"),
    Method("MC dropout of the same", DROPOUT_KIND, answers="dropout"),
    Method("deep ensemble, tuned norms", "norms", takes_all=True),
    Method("single model, full fine-tune", "full"),
    Method("deep ensemble, full fine-tunes", "full", takes_all=True),
    Method("rank-1 members (BatchEnsemble)", "rank_one"),
    Method("LoRA members", "lora"),
    Method(OURS, "sigma"),
)
CALIBRATION = "calibration"
_SPLIT_TITLES = {"report": "held-out sentences"}
_TITLES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "ace": "ACE", "brier": "Brier", "aurc": "AURC"}


@dataclass(frozen=True)
class Answers:
    """What a method answered.

    Attributes:
        name: The method's name.
        tables: By title of the split and by seed, the predictions as they came.
        scaled: The same after temperature scaling, fitted on the calibration split of the seed.
        temperatures: The temperature by seed.
        trained_parameters: Number of trained parameters.
        stored_bytes: Size of what has to be stored, over the checkpoint that all share.
        training: Time of a training step as a ratio to one model's.
        inference: Time of inference as a ratio to one model's.
    """

    name: str
    tables: dict[str, dict[int, ExampleTable]]
    scaled: dict[str, dict[int, ExampleTable]]
    temperatures: dict[int, float]
    trained_parameters: int
    stored_bytes: int
    training: float
    inference: float


def read_answers(
    folder: Path, method: Method, seeds: Sequence[int], num_members: int, costs: dict[str, dict[str, float]]
) -> Answers | None:
    """Read what a method answered, for the seeds whose models are all there; None where there is no such seed.

    Args:
        folder: Output folder of the comparison.
        method: The method.
        seeds: Seeds of interest.
        num_members: Number of models M in a deep ensemble.
        costs: As from `measure_costs`.
    """
    num_models = num_members if method.takes_all else 1
    tables: dict[str, dict[int, ExampleTable]] = {}
    scaled: dict[str, dict[int, ExampleTable]] = {}
    temperatures, run = {}, {}
    for seed in seeds:
        models = [folder / f"{method.kind}-seed{seed}-{index}" for index in range(num_models)]
        if not all((model / RUN_FILE).exists() for model in models):
            continue
        run = json.loads((models[0] / RUN_FILE).read_text())
        answers = [np.load(model / LOGITS_FILE) for model in models]
        splits = {name.partition("/")[0] for name in answers[0].files}
        logits = {
            split: np.concatenate([one[f"{split}/{method.answers}"] for one in answers], axis=1) for split in splits
        }
        labels = {split: answers[0][f"{split}/labels"] for split in splits}
        pooled = pooled_log_probabilities(torch.as_tensor(logits[CALIBRATION]))
        temperatures[seed] = fit_temperature(pooled, labels[CALIBRATION]).temperature
        for split in splits - {CALIBRATION}:
            for kept, temperature in ((tables, 1.0), (scaled, temperatures[seed])):
                table = ExampleTable.of_members(logits[split], labels[split], temperature=temperature)
                kept.setdefault(_SPLIT_TITLES.get(split, split), {})[seed] = table
    if not tables:
        return None
    return Answers(
        method.name,
        tables,
        scaled,
        temperatures,
        num_models * run["trained_parameters"],
        num_models * run["stored_bytes"],
        num_models * costs["training"][method.kind],
        num_models * costs["inference"]["dropout" if method.answers == "dropout" else method.kind],
    )


def report_of(
    folder: Path, seeds: Sequence[int], num_members: int, costs: dict[str, dict[str, float]], resamples: int
) -> str:
    """Return the comparison in markdown: a table for every split, the differences, and the costs.

    Args:
        folder: Output folder of the comparison.
        seeds: Seeds of interest.
        num_members: Number of models M in a deep ensemble.
        costs: As from `measure_costs`.
        resamples: Draws for the intervals of differences.

    Raises:
        ValueError: No method has all its models for any seed.
    """
    found = [read_answers(folder, method, seeds, num_members, costs) for method in METHODS]
    answers = [one for one in found if one is not None]
    if not answers:
        raise ValueError(f"{folder} holds no method with all its models for any of the seeds {list(seeds)}.")
    splits = sorted(answers[0].tables, key=lambda split: (split not in _SPLIT_TITLES.values(), split))
    parts = []
    for split in splits:
        num_examples = len(next(iter(answers[0].tables[split].values())))
        parts += [f"**{split}**, {num_examples:,} examples", markdown(_figures(answers, split))]
    if any(one.name == OURS for one in answers) and len(answers) > 1:
        parts += [
            f"NLL of {OURS} minus that of the others, paired: mean over seeds, 95% bootstrap interval over examples "
            "and seeds",
            markdown(_differences(answers, splits, resamples)),
        ]
    return "\n\n".join([*parts, "Costs; times as ratios to one model", markdown(_costs(answers))]) + "\n"


def _figures(answers: Sequence[Answers], split: str) -> list[dict[str, str]]:
    """A row for every method as it is, and one after temperature scaling: means over seeds with 95% t-intervals."""
    rows = []
    for one in answers:
        for name, by_split in ((one.name, one.tables), ("+ temperature scaling", one.scaled)):
            tables = list(by_split[split].values())
            row = {"method": name, "seeds": str(len(tables))}
            row |= {_TITLES[metric]: mean_of([TABLE_METRICS[metric](t) for t in tables]) for metric in _TITLES}
            row["ECE's noise floor"] = f"{np.mean([calibration_noise_floor(table).mean for table in tables]):.3f}"
            disagreement = mean_of([table.disagreement.mean() for table in tables])
            row["members disagree"] = disagreement if tables[0].member_votes.shape[1] > 1 else "-"
            rows.append(row)
    return rows


def _differences(answers: Sequence[Answers], splits: Sequence[str], resamples: int) -> list[dict[str, str]]:
    """Ours minus every other method, over the seeds that both have; as they are, and both after temperature scaling."""
    ours = next(one for one in answers if one.name == OURS)
    rows = []
    for one in answers:
        pairs = ((one.name, ours.tables, one.tables), ("both temperature scaled", ours.scaled, one.scaled))
        for name, own, theirs in pairs if one is not ours else ():
            row = {f"{OURS} minus": name}
            for split in splits:
                seeds = sorted(own[split].keys() & theirs[split].keys())
                tables = ([by_split[split][seed] for seed in seeds] for by_split in (own, theirs))
                found = paired_bootstrap(*tables, "nll", n_resamples=resamples)
                row[split] = f"{found.difference:+.3f} [{found.lower:+.3f}, {found.upper:+.3f}]"
            rows.append(row)
    return rows


def _costs(answers: Sequence[Answers]) -> list[dict[str, str]]:
    return [
        {
            "method": one.name,
            "trained parameters": f"{one.trained_parameters:,}",
            "stored": f"{one.stored_bytes / 1024:,.0f} KiB",
            "training": f"{one.training:.2f}",
            "inference": f"{one.inference:.2f}",
            "temperature": mean_of(list(one.temperatures.values()), 2),
        }
        for one in answers
    ]


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """Return rows of cells by column as a table in markdown.

    Args:
        rows: At least one row; all have the same columns.
    """
    lines = [list(rows[0]), ["---", *["--:"] * (len(rows[0]) - 1)], *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def mean_of(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean over seeds as text, with half of its 95% t-interval where there is more than one.

    Args:
        values: A value for every seed.
        digits: Decimal places.
    """
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * scipy.stats.sem(values)
    return f"{mean} ± {half:.{digits}f}"
