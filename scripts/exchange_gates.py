#!/usr/bin/env python
"""Find out whether what members have learnt apart is of any use: exchange their gates, and see what it costs.

    python scripts/exchange_gates.py --adapters outputs/sweep/members4-*/adapter --dataset_name path/to/sst2

Each ensemble is evaluated as it was trained; with the gates of each norm shuffled between its features, in an order of
its own for each member; and with the gates of one member in all. If members differed by noise alone, neither would cost
anything. Several adapters, of several seeds, are compared together: differences are paired over examples and adapters.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers
from baseline_report import markdown, mean_of
from torch import nn
from transformers import HfArgumentParser

from sigma_nens_hf import SigmaNormLayer, load_ensemble
from sigma_nens_hf.evaluation.data import EvaluationData, load_split
from sigma_nens_hf.evaluation.evaluate import evaluate_dataset
from sigma_nens_hf.metrics import TABLE_METRICS, ExampleTable, paired_bootstrap


@dataclass
class Arguments:
    """Which ensembles, and what they are asked."""

    adapters: list[str] = field(metadata={"help": "Folders of adapters, of one kind and several seeds."})
    dataset_name: str = field(metadata={"help": "Dataset id on the Hub, a folder, or a file."})
    split: str | None = field(default=None, metadata={"help": "Its split; default: validation, of a file all."})
    max_examples: int | None = field(default=None, metadata={"help": "Take this many, from all over the data."})
    batch_size: int = field(default=32, metadata={"help": "Examples in a forward pass."})
    resamples: int = field(default=1_000, metadata={"help": "Bootstrap draws for the intervals."})
    seed: int = field(default=0, metadata={"help": "Seed of the shuffles, and of max_examples."})


def shuffled(scalers: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the scalers of a norm, each member's in another order of features.

    Args:
        scalers: (M, D).
        generator: Draws the orders.
    """
    return torch.stack([row[torch.randperm(len(row), generator=generator)] for row in scalers])


def of_first_member(scalers: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the first member's scalers for all.

    Args:
        scalers: (M, D).
        generator: Not needed.
    """
    return scalers[:1].expand_as(scalers)


EXCHANGES: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "shuffled between features": shuffled,
    "one member's in all": of_first_member,
}


@torch.no_grad()
def exchange_gates(model: nn.Module, exchange: Callable[..., torch.Tensor], seed: int) -> None:
    """Put other scalers in the place of members' own, in every norm that carries members.

    Args:
        model: The ensemble.
        exchange: Makes a norm's new scalers (M, D) of the old ones.
        seed: Seed of what is drawn for that.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, SigmaNormLayer) and layer.carries_members(layer.member_adapter):
            scalers = layer.sigma_norm_scaler[layer.member_adapter]
            scalers.copy_(exchange(scalers.cpu().clone(), generator))


def main(argv: list[str] | None = None) -> None:
    """Run with a command line; None: this process's."""
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows, tables = load_split(arguments.dataset_name, split=arguments.split), {}
    for adapter in arguments.adapters:
        for name, exchange in (("as trained", None), *EXCHANGES.items()):
            model, processor = load_ensemble(adapter)
            if exchange is not None:
                exchange_gates(model, exchange, arguments.seed)
            data = EvaluationData.of(model, rows, max_examples=arguments.max_examples, seed=arguments.seed)
            evaluation = evaluate_dataset(model, processor, data, batch_size=arguments.batch_size)
            tables.setdefault(name, []).append(evaluation.table)
    print(markdown([_row(name, tables, arguments.resamples) for name in tables]))


def _row(name: str, tables: dict[str, list[ExampleTable]], resamples: int) -> dict[str, str]:
    cells = {"gates": name, "adapters": str(len(tables[name]))}
    for title, metric in (("NLL", "nll"), ("accuracy", "accuracy")):
        cells[title] = mean_of([TABLE_METRICS[metric](table) for table in tables[name]])
    cells["members disagree"] = mean_of([table.disagreement.mean() for table in tables[name]])
    found = paired_bootstrap(tables[name], tables["as trained"], "nll", n_resamples=resamples)
    cells["NLL minus as trained"] = f"{found.difference:+.3f} [{found.lower:+.3f}, {found.upper:+.3f}]"
    return cells


if __name__ == "__main__":
    main()
