"""The frontier of a sweep: quality and diversity by temperature, beside single models and deep ensembles."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import scipy.stats
import torch

from ..calibration import fit_temperature
from ..metrics.bootstrap import paired_bootstrap
from ..metrics.example_table import ExampleTable
from ..metrics.table_metrics import accuracy, expected_calibration_error, negative_log_likelihood
from ..outputs import pooled_log_probabilities
from ..plots.frontier import DEEP_ENSEMBLE, ENSEMBLE, SCALED_SINGLE, SINGLE_MODEL
from ..regularizer import expected_sharing
from .points import SINGLE, Setting, SweepPoint
from .training import CALIBRATION, LOGITS_FILE, REPORT, RUN_FILE


def _disagreement(table: ExampleTable) -> float:
    return float(table.disagreement.mean())


def _modulation_uncertainty(table: ExampleTable) -> float:
    return float(table.modulation_uncertainty.mean())


@dataclass(frozen=True)
class Answers:
    """What one model, or the models of a deep ensemble, answered.

    Attributes:
        table: The reported examples.
        scaled: The same after temperature scaling, fitted on the calibration split.
        temperature: The temperature.
        realized_sharing: Members that own a feature, mean over features; None where there are no gates.
    """

    table: ExampleTable
    scaled: ExampleTable
    temperature: float
    realized_sharing: float | None = None


# Figures of a seed, by their column.
_FIGURES: dict[str, Callable[[Answers], float | None]] = {
    "accuracy": lambda answers: accuracy(answers.table),
    "nll": lambda answers: negative_log_likelihood(answers.table),
    "scaled_nll": lambda answers: negative_log_likelihood(answers.scaled),
    "ece": lambda answers: expected_calibration_error(answers.table),
    "disagreement": lambda answers: _disagreement(answers.table),
    "modulation_uncertainty": lambda answers: _modulation_uncertainty(answers.table),
    "realized_sharing": lambda answers: answers.realized_sharing,
    "temperature": lambda answers: answers.temperature,
}
# What is to fall as tau rises.
_DIVERSITY = {"disagreement": _disagreement, "modulation_uncertainty": _modulation_uncertainty}


def read_answers(output_dir: Path, points: Sequence[SweepPoint], split: str = REPORT) -> Answers | None:
    """Read what models answered together; None where one of them is not finished.

    Args:
        output_dir: Folder of the sweep.
        points: One ensemble, or single models whose answers are pooled.
        split: Which examples.
    """
    folders = [output_dir / point.name for point in points]
    if not all((folder / RUN_FILE).exists() for folder in folders):
        return None
    files = [np.load(folder / LOGITS_FILE) for folder in folders]
    logits = {
        name: torch.as_tensor(np.concatenate([file[f"{name}/logits"] for file in files], axis=1))
        for name in (CALIBRATION, split)
    }
    labels = {name: files[0][f"{name}/labels"] for name in logits}
    temperature = fit_temperature(pooled_log_probabilities(logits[CALIBRATION]), labels[CALIBRATION]).temperature
    table, scaled = (
        ExampleTable.of_members(logits[split], labels[split], temperature=t, keep_votes=False)
        for t in (1.0, temperature)
    )
    run = json.loads((folders[0] / RUN_FILE).read_text())
    return Answers(table, scaled, temperature, run["realized_sharing"])


def frontier_of(
    output_dir: Path, settings: Sequence[Setting], seeds: Sequence[int], n_resamples: int = 1_000
) -> pandas.DataFrame:
    """Return the frontier: a row for every setting of which models are finished, and for what they compete with.

    Args:
        output_dir: Folder of the sweep.
        settings: The ensembles, by number of members, weight and ascending temperature.
        seeds: Seeds of interest.
        n_resamples: Bootstrap draws for the intervals of differences.

    Returns:
        Columns `model`, `members`, `tau`, `diversity_weight`, `seeds`, `expected_sharing`; for every figure its mean
        over seeds, and `_low` and `_high`, the ends of the 95% t-interval over seeds (missing with one seed). Of the
        ensembles also the differences `nll_minus_single`, `nll_minus_scaled_single` and `nll_minus_deep_ensemble`, and
        `disagreement_minus_lower_tau` and `modulation_uncertainty_minus_lower_tau`, to the row of the next lower
        temperature, each with the ends of its 95% bootstrap interval over examples and seeds.
    """
    singles = _by_seed(output_dir, seeds, SINGLE, 1)
    rows = []
    if singles:
        rows += [_row(SINGLE_MODEL, SINGLE, singles), _row(SCALED_SINGLE, SINGLE, _scaled(singles))]
    deep = {
        m: _by_seed(output_dir, seeds, SINGLE, m) for m in dict.fromkeys(setting.num_members for setting in settings)
    }
    rows += [_row(DEEP_ENSEMBLE, Setting(m), answers) for m, answers in deep.items() if answers]
    before: tuple[Setting, dict[int, Answers]] | None = None
    for setting in settings:
        answers = _by_seed(output_dir, seeds, setting, 1)
        if not answers:
            continue
        row = _row(ENSEMBLE, setting, answers)
        references = {"single": singles, "scaled_single": _scaled(singles), "deep_ensemble": deep[setting.num_members]}
        for name, reference in references.items():
            row |= _difference(f"nll_minus_{name}", answers, reference, negative_log_likelihood, n_resamples)
        if before is not None and _is_next(before[0], setting):
            for name, metric in _DIVERSITY.items():
                row |= _difference(f"{name}_minus_lower_tau", answers, before[1], metric, n_resamples)
        before = setting, answers
        rows.append(row)
    return pandas.DataFrame(rows)


def records_of(frontier: pandas.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frontier as plain data for json, without what a row does not have.

    Args:
        frontier: As from `frontier_of`.
    """
    return [row.dropna().to_dict() for _, row in frontier.astype(object).iterrows()]


def _by_seed(output_dir: Path, seeds: Sequence[int], setting: Setting, num_models: int) -> dict[int, Answers]:
    """Return the answers of a setting for the seeds whose models are all finished."""
    found = {
        seed: read_answers(output_dir, [SweepPoint(setting, seed, index) for index in range(num_models)])
        for seed in seeds
    }
    return {seed: answers for seed, answers in found.items() if answers is not None}


def _scaled(by_seed: Mapping[int, Answers]) -> dict[int, Answers]:
    return {seed: Answers(answers.scaled, answers.scaled, 1.0) for seed, answers in by_seed.items()}


def _is_next(lower: Setting, setting: Setting) -> bool:
    return lower._replace(tau=setting.tau) == setting


def _row(model: str, setting: Setting, by_seed: Mapping[int, Answers]) -> dict[str, float | str | None]:
    num_members, tau, weight = setting
    row = {
        "model": model,
        "members": num_members,
        "tau": tau,
        "diversity_weight": weight,
        "seeds": len(by_seed),
        "expected_sharing": None if tau is None else expected_sharing(tau, num_members),
    }
    for name, figure in _FIGURES.items():
        values = [figure(answers) for answers in by_seed.values()]
        if None in values:
            continue
        row[name] = float(np.mean(values))
        if len(values) > 1:
            half = scipy.stats.t.ppf(0.975, len(values) - 1) * scipy.stats.sem(values)
            row |= {f"{name}_low": row[name] - half, f"{name}_high": row[name] + half}
    return row


def _difference(
    name: str,
    ours: Mapping[int, Answers],
    theirs: Mapping[int, Answers],
    metric: Callable[[ExampleTable], float],
    n_resamples: int,
) -> dict[str, float]:
    """Return the columns of a difference, over the seeds that both have; none where there is no such seed."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return {}
    tables = ([by_seed[seed].table for seed in seeds] for by_seed in (ours, theirs))
    found = paired_bootstrap(*tables, metric, n_resamples=n_resamples)
    return {name: found.difference, f"{name}_low": found.lower, f"{name}_high": found.upper}
