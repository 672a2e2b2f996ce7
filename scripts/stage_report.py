"""What a trained model showed: evaluated on the reported split, written down, and set beside others in a table."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data_arguments import DataArguments, Split
from rich.table import Table
from splits import pieces

from sigma_nens_hf import SigmaNEnsTrainer
from sigma_nens_hf.metrics import (
    accuracy,
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
    pairwise_disagreement,
)


@dataclass
class StageReport:
    """What one trained model showed on the reported split.

    Attributes:
        name: "single" or "ensemble".
        num_members: Number of members M.
        accuracy: Share of right predictions.
        nll: Negative log-likelihood in nats.
        calibration_nll: The same on the calibration split, to choose between settings by.
        ece: Expected calibration error, 15 bins.
        brier: Brier score.
        disagreement: Share of examples on which two members differ, mean over pairs.
        seconds: Training time of this process, evaluations included.
        resumed: Whether an earlier process had begun the training, so that `seconds` is only a part.
        adapter_bytes: Size of the stored adapter weights.
        num_examples: Number of reported examples.
    """

    name: str
    num_members: int
    accuracy: float
    nll: float
    calibration_nll: float
    ece: float
    brier: float
    disagreement: float
    seconds: float
    resumed: bool
    adapter_bytes: int
    num_examples: int


def evaluate_report(trainer: SigmaNEnsTrainer, report: Split, data_args: DataArguments) -> dict[str, Any]:
    """Evaluate a trained ensemble on the reported split.

    Args:
        trainer: Its trainer, which returns the members' logits.
        report: The reported split, as it was carved.
        data_args: How it is encoded.

    Returns:
        The fields of a `StageReport` that come from the reported split.
    """
    probabilities, votes, labels = [], [], []
    for piece in pieces(report):
        with trainer.args.main_process_first(desc="encoding"):
            encoded = data_args.encode(piece, trainer.processing_class, is_training=False)
        prediction = trainer.predict(encoded, metric_key_prefix="report")
        member_logits = torch.as_tensor(prediction.predictions)
        probabilities.append(member_logits.double().softmax(-1).mean(1))
        votes.append(member_logits.argmax(-1))
        labels.append(torch.as_tensor(prediction.label_ids))
    p, y, all_votes = torch.cat(probabilities), torch.cat(labels), torch.cat(votes)
    return {
        "num_members": all_votes.shape[1],
        "accuracy": accuracy(p, y),
        "nll": negative_log_likelihood(p, y),
        "ece": expected_calibration_error(p, y),
        "brier": brier_score(p, y),
        "disagreement": pairwise_disagreement(all_votes),
        "num_examples": len(y),
    }


def table_of(reports: list[StageReport], seed: int) -> Table:
    """Return the reports as a table, one column for every model.

    Args:
        reports: The reports.
        seed: The run's seed.
    """
    table = Table(
        title=f"{reports[0].num_examples:,} held-out examples, seed {seed}",
        caption="Lower is better but for accuracy. One seed is no evidence for a method.",
    )
    table.add_column("")
    for report in reports:
        table.add_column(f"{report.name} (M={report.num_members})", justify="right")
    rows = {
        "accuracy": lambda report: f"{report.accuracy:.4f}",
        "NLL (nats)": lambda report: f"{report.nll:.4f}",
        "NLL, calibration split": lambda report: f"{report.calibration_nll:.4f}",
        "ECE (15 bins)": lambda report: f"{report.ece:.4f}",
        "Brier score": lambda report: f"{report.brier:.4f}",
        "members disagree on": lambda report: f"{report.disagreement:.4f}" if report.num_members > 1 else "-",
        "training time": lambda report: f"{report.seconds:.0f} s{' (resumed)' if report.resumed else ''}",
        "stored adapter": lambda report: f"{report.adapter_bytes / 1024:,.0f} KiB",
    }
    for name, cell in rows.items():
        table.add_row(name, *map(cell, reports))
    return table


def write_json(path: Path, content: dict) -> None:
    """Write a json file that is there whole or not at all.

    Args:
        path: The file.
        content: What it is to hold.
    """
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=2, default=str))
    os.replace(unfinished, path)
