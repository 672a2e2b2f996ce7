#!/usr/bin/env python
"""Find the default recipe by measurement: train ensembles by many recipes, and compare them on a part of train.

    python scripts/search_recipe.py --dataset_name sst2_folder --output_dir out --results scripts/results/recipe.json
    python scripts/search_recipe.py --images --dataset_name cifar10_folder --output_dir out --recipes paper shallow

The reported splits of the dataset are not touched: what is compared on is carved from its training split, beside the
split that temperatures are fitted on. What is finished is kept, so recipes and seeds can be added; several processes
may work on one folder. Without a model the packaged MiniLM encoder or ViT is taken.
"""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from baseline_report import markdown
from comparison_runs import BATCH_SIZE, DEFAULTS
from datasets import Dataset
from demo_assets import minilm_folder
from hardware import has_fast_bf16
from rich.console import Console
from stages import parse_arguments

from sigma_nens_hf.config import SigmaNormConfig
from sigma_nens_hf.data.arguments import DataArguments
from sigma_nens_hf.data.images import ImageArguments
from sigma_nens_hf.data.splits import LABELS, carve, load_splits
from sigma_nens_hf.data.texts import TextArguments
from sigma_nens_hf.run_settings import write_json
from sigma_nens_hf.sweep.frontier import frontier_of, records_of
from sigma_nens_hf.sweep.points import Setting, sweep_points
from sigma_nens_hf.sweep.run import run_sweep
from sigma_nens_hf.sweep.training import SweepSettings

SELECTION_SAMPLES = 1_500
# What a recipe changes, by field of the config or of the training arguments. The paper's form has gates of full depth
# and no trained scale.
PAPER = {
    "gate_depth": 1.0, "train_scale": False, "diversity_weight": 0.015, "diversity_temperature": 0.1,
    "learning_rate": 2e-3,
}  # fmt: skip
BOUNDED = PAPER | {"gate_depth": 0.3, "train_scale": True, "diversity_weight": 0.5}
SHALLOW = BOUNDED | {"gate_depth": 0.15}
RECIPES: dict[str, dict[str, Any]] = {
    "paper": PAPER,
    "paper-lambda0": PAPER | {"diversity_weight": 0.0},
    "paper-lambda.05": PAPER | {"diversity_weight": 0.05},
    "paper-rate6e-3": PAPER | {"learning_rate": 6e-3},
    "scale": PAPER | {"train_scale": True},
    "bounded": BOUNDED,
    "bounded-fixed": BOUNDED | {"train_scale": False},
    "bounded-scale3e-3": BOUNDED | {"scale_learning_rate": 3e-3},
    "bounded-tau1": BOUNDED | {"diversity_temperature": 1.0},
    "bounded-rate6e-3": BOUNDED | {"learning_rate": 6e-3},
    "bounded-depth.2": BOUNDED | {"gate_depth": 0.2},
    "shallow": SHALLOW,
    "shallow-tau1": SHALLOW | {"diversity_temperature": 1.0},
    "shallow-lambda5": SHALLOW | {"diversity_weight": 5.0},
    "shallow-rate6e-3": SHALLOW | {"learning_rate": 6e-3},
    "shallow-rate6e-3-lambda.05": SHALLOW | {"learning_rate": 6e-3, "diversity_weight": 0.05},
    "shallow-rate1e-2": SHALLOW | {"learning_rate": 1e-2},
    "shallow-rate2e-2": SHALLOW | {"learning_rate": 2e-2},
    "shallow-rate6e-3-fixed": SHALLOW | {"learning_rate": 6e-3, "train_scale": False},
    "mild": SHALLOW | {"learning_rate": 1e-2, "diversity_weight": 0.15},
    "mild-depth.2": SHALLOW | {"learning_rate": 1e-2, "diversity_weight": 0.15, "gate_depth": 0.2},
    "mild-rate6e-3-depth.2": SHALLOW | {"learning_rate": 6e-3, "diversity_weight": 0.15, "gate_depth": 0.2},
    "shallow-rate1e-2-fixed": SHALLOW | {"learning_rate": 1e-2, "train_scale": False},
}
_SHOWN = {"accuracy": "accuracy", "nll": "NLL", "scaled_nll": "NLL at T", "ece": "ECE", "temperature": "T",
          "disagreement": "disagreement", "modulation_uncertainty": "modulation",
          "realized_sharing": "sharing"}  # fmt: skip


@dataclass
class SearchArguments:
    """What is compared."""

    output_dir: str = field(metadata={"help": "Folder for the trained models."})
    images: bool = field(default=False, metadata={"help": "The data are images."})
    model_name_or_path: str | None = field(default=None, metadata={"help": "Default: a packaged encoder."})
    recipes: list[str] = field(
        default_factory=lambda: list(RECIPES), metadata={"help": f"Recipes to train: {', '.join(RECIPES)}."}
    )
    members: int = field(default=4, metadata={"help": "Number of members M."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "Seeds."})
    references: bool = field(
        default=False,
        metadata={"help": "Train single models at each recipe's rates as well, and their deep ensembles."},
    )
    num_train_epochs: float = field(default=3, metadata={"help": "Passes over the training data."})
    results: str | None = field(default=None, metadata={"help": "json file for the table."})


def main(argv: list[str] | None = None) -> None:
    """Run with a command line; None: this process's."""
    argv = sys.argv[1:] if argv is None else argv
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    data_class = ImageArguments if "--images" in argv else TextArguments
    arguments, data = parse_arguments((SearchArguments, data_class), argv, DEFAULTS)
    unknown = set(arguments.recipes) - set(RECIPES)
    if unknown:
        raise ValueError(f"There is no recipe {sorted(unknown)}, only {list(RECIPES)}.")
    splits, console = search_splits(data), Console(stderr=True)
    settings = {name: _settings_of(name, data, arguments) for name in arguments.recipes}
    for seed in arguments.seeds:
        for name, (setting, shared) in settings.items():
            console.print(f"{name}, seed {seed}")
            points = sweep_points([setting], [seed], arguments.references)
            run_sweep(points, shared, splits, Path(arguments.output_dir) / name)
    rows = [
        {"recipe": name, **RECIPES[name], **row}
        for name, (setting, _) in settings.items()
        for row in records_of(frontier_of(Path(arguments.output_dir) / name, [setting], arguments.seeds))
    ]
    if arguments.results:
        write_json(Path(arguments.results), {"command": ["scripts/search_recipe.py", *argv], "recipes": rows})
    if rows:
        print(markdown([_cells(row) for row in rows]))


def search_splits(data: DataArguments) -> dict[str, Dataset]:
    """Return "train", "calibration" and "report", the last two carved from the training split of the data.

    Args:
        data: Which examples.
    """
    train = load_splits(data)["train"]
    parts = train.train_test_split(test_size=SELECTION_SAMPLES, seed=1, stratify_by_column=LABELS)
    return carve({"train": parts["train"], "report": parts["test"]}, data, seed=0)


def _settings_of(name: str, data: DataArguments, arguments: SearchArguments) -> tuple[Setting, SweepSettings]:
    """Return what a recipe varies of a sweep, and what its models share."""
    recipe = dict(RECIPES[name])
    setting = Setting(arguments.members, recipe.pop("diversity_temperature"), recipe.pop("diversity_weight"))
    of_config = {field: value for field, value in recipe.items() if field in SigmaNormConfig.__dataclass_fields__}
    if arguments.images:
        from vit_asset import vit_folder  # needs packages that texts do not

        checkpoint, modules_to_save = vit_folder(), None
    else:
        checkpoint, modules_to_save = minilm_folder(), ["pooler"]
    training = {
        "num_train_epochs": arguments.num_train_epochs,
        "per_device_train_batch_size": BATCH_SIZE,
        "per_device_eval_batch_size": 2 * BATCH_SIZE,
        "train_sampling_strategy": "random" if arguments.images else "group_by_length",
        "bf16": has_fast_bf16(),
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1_000,
    }
    return setting, SweepSettings(
        arguments.model_name_or_path or str(checkpoint),
        data,
        config=of_config | {"modules_to_save": modules_to_save},
        training=training | {field: value for field, value in recipe.items() if field not in of_config},
    )


def _cells(row: dict[str, Any]) -> dict[str, str]:
    figures = {title: row.get(name, math.nan) for name, title in _SHOWN.items()}
    cells = {title: "-" if math.isnan(figure) else f"{figure:.4f}" for title, figure in figures.items()}
    return {"recipe": row["recipe"], "model": row["model"], "seeds": str(row["seeds"])} | cells


if __name__ == "__main__":
    main()
