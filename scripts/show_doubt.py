#!/usr/bin/env python
"""Load a saved ensemble and show of which sentences it is most and least in doubt.

python scripts/show_doubt.py outputs/quickstart/ensemble/adapter sentences.txt
"""

import argparse
from pathlib import Path

import transformers
from rich.console import Console
from rich.table import Table

from sigma_nens_hf import Prediction, load_ensemble, predict


def doubt_table(title: str, rows: list[tuple[str, Prediction]]) -> Table:
    """Return a table of sentences with their predictions."""
    table = Table(title=title, title_justify="left", expand=True, show_lines=True)
    table.add_column("sentence", ratio=1)
    for column in ("label", "probability", "modulation\nuncertainty", "votes"):
        table.add_column(column, justify="right")
    for sentence, prediction in rows:
        votes = prediction.member_votes.count(prediction.label)
        table.add_row(
            sentence,
            prediction.label,
            f"{prediction.probability:.3f}",
            f"{prediction.modulation_uncertainty:.4f}",
            f"{votes}/{len(prediction.member_votes)}",
        )
    return table


def main() -> None:
    """Load, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", help="folder or Hub repository of the adapter")
    parser.add_argument("sentences", type=Path, help="text file with one sentence on each line")
    parser.add_argument("--count", type=int, default=5, help="how many of each to show (default: 5)")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    sentences = [line for line in arguments.sentences.read_text(encoding="utf-8").splitlines() if line.strip()]
    model, tokenizer = load_ensemble(arguments.adapter)
    predictions = predict(model, tokenizer, sentences)
    ranked = sorted(zip(sentences, predictions, strict=True), key=lambda row: row[1].modulation_uncertainty)
    console = Console()
    console.print(doubt_table("Most doubtful: members disagree most", ranked[::-1][: arguments.count]))
    console.print(doubt_table("Least doubtful", ranked[: arguments.count]))


if __name__ == "__main__":
    main()
