"""The command `sigma-nens sweep`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import datasets
import pandas
import torch
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from ..command_line import errors_as_messages, input_columns, quiet
from ..config import FROZEN, SigmaNormConfig
from ..data.images import ImageArguments
from ..data.splits import carve, load_splits
from ..data.texts import TextArguments
from ..plots import frontier_plot
from ..run_settings import write_json
from ..training_args import SigmaNEnsTrainingArguments
from .frontier import frontier_of, records_of
from .points import SweepPoint, settings_of, sweep_points
from .run import leave_launch, run_sweep, settings_to_remember
from .training import SweepSettings, point_arguments

JSON_FILE, PICTURE = "frontier.json", "frontier.png"
_SHOWN = {
    "accuracy": "acc.", "nll": "NLL", "scaled_nll": "NLL T", "ece": "ECE", "disagreement": "disag.",
    "modulation_uncertainty": "modul.", "realized_sharing": "share",
}  # fmt: skip


def sweep(
    model: Annotated[str, typer.Argument(help="Model that all start from: an id on the Hub or a local folder.")],
    output_dir: Annotated[Path, typer.Option(help="Folder of the sweep; started again, it goes on there.")],
    tau: Annotated[str, typer.Option(help="Temperatures of the regulariser, such as .05,.1,.5.")] = "",
    members_per_feature: Annotated[
        str, typer.Option(help="Members that are to own a feature, beside or instead of --tau; default: 1 to M / 2.")
    ] = "",
    members: Annotated[str, typer.Option(help="Numbers of members M, such as 4,8.")] = "4",
    seeds: Annotated[str, typer.Option(help="Seeds.")] = "0,1,2",
    diversity_weight: Annotated[str, typer.Option(help="Weights lambda of the regulariser.")] = (
        f"{SigmaNEnsTrainingArguments.diversity_weight:g}"
    ),
    dataset: Annotated[str | None, typer.Option(help="Dataset id on the Hub or a local folder.")] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of the dataset.")] = None,
    train_file: Annotated[str | None, typer.Option(help="csv, json or parquet file to train on instead.")] = None,
    report_file: Annotated[str | None, typer.Option(help="The file to report on then.")] = None,
    report_split: Annotated[str, typer.Option(help="Split to report on; several are joined by a +.")] = "validation",
    text_column: Annotated[str | None, typer.Option(help="Column of the text; default: a usual one.")] = None,
    second_text_column: Annotated[str | None, typer.Option(help="Column of a second text.")] = None,
    image_column: Annotated[str | None, typer.Option(help="Column of the image, for images.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Column of the label; default: a usual one.")] = None,
    augmentation: Annotated[str, typer.Option(help="Of training images: none, flip or crop_flip.")] = "crop_flip",
    image_size: Annotated[int | None, typer.Option(min=1, help="Side of images, instead of the model's own.")] = None,
    max_seq_length: Annotated[int, typer.Option(min=1, help="Longest text in tokens.")] = 128,
    max_train_samples: Annotated[int | None, typer.Option(min=1, help="Train on this many examples at most.")] = None,
    max_report_samples: Annotated[int | None, typer.Option(min=1, help="Report on this many at most.")] = None,
    calibration_fraction: Annotated[float, typer.Option(help="Share of the training data to fit T on.")] = 0.1,
    epochs: Annotated[float, typer.Option(help="Passes over the training data.")] = 3.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples in a training step.")] = 32,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bf16, where the machine does so fast.")] = False,
    member_chunk_size: Annotated[int | None, typer.Option(min=1, help="Members run at a time.")] = None,
    branch_layer: Annotated[int | None, typer.Option(min=0, help="First block that carries members.")] = None,
    prefix: Annotated[str, typer.Option(help="Norms before it: frozen, shared or staged.")] = FROZEN,
    gate_depth: Annotated[
        float, typer.Option(help="Largest share of a feature that a gate takes away.")
    ] = SigmaNormConfig.gate_depth,
    train_scale: Annotated[bool, typer.Option(help="Train a scale that members share.")] = SigmaNormConfig.train_scale,
    modules_to_save: Annotated[str, typer.Option(help="Modules trained as one copy, such as pooler.")] = "",
    references: Annotated[bool, typer.Option(help="Train single models and deep ensembles to compare with.")] = True,
    revision: Annotated[str | None, typer.Option(help="Revision of a model on the Hub.")] = None,
    resamples: Annotated[int, typer.Option(min=1, help="Draws for the intervals of differences.")] = 1000,
) -> None:
    """Trace the accuracy-calibration frontier: train ensembles over temperatures, members and seeds, and compare them.

    Every model is trained by one process; of several that were launched together, or that work on the same folder,
    each takes the next one that is free. Needs text or image classification with single labels. In the end
    frontier.csv, frontier.json and frontier.png are in the folder.
    """
    leave_launch()
    quiet(True)
    with errors_as_messages(True):
        ensembles = settings_of(
            _numbers("--members", members, int),
            _numbers("--tau", tau, float),
            _numbers("--diversity-weight", diversity_weight, float),
            _numbers("--members-per-feature", members_per_feature, int),
        )
        all_seeds = _numbers("--seeds", seeds, int)
        points = sweep_points(ensembles, all_seeds, references)
        if dataset is None and train_file is None:
            raise ValueError("Name the data: --dataset, or --train-file and --report-file.")
        columns = input_columns(image_column, text_column, second_text_column)
        common = {
            "dataset_name": dataset,
            "dataset_config_name": dataset_config,
            "train_file": train_file,
            "report_file": report_file,
            "report_split": report_split,
            "label_column": label_column,
            "max_train_samples": max_train_samples,
            "max_report_samples": max_report_samples,
            "calibration_fraction": calibration_fraction,
        }
        if image_column:
            data = ImageArguments(**common, image_column=image_column, augmentation=augmentation, image_size=image_size)
        else:
            texts = dict(zip(("text_column", "second_text_column"), columns, strict=False))
            data = TextArguments(**common, **texts, max_seq_length=max_seq_length)
        of_members = {"gate_depth": gate_depth, "train_scale": train_scale}
        if branch_layer is not None:
            of_members |= {"branch_layer": branch_layer, "prefix": prefix}
        settings = SweepSettings(
            model,
            data,
            revision,
            config=of_members | {"modules_to_save": [name for name in modules_to_save.split(",") if name] or None},
            training={
                "num_train_epochs": epochs,
                "per_device_train_batch_size": batch_size,
                "per_device_eval_batch_size": 2 * batch_size,
                "train_sampling_strategy": "random" if image_column else "group_by_length",
                "bf16": bf16,
                # Transformers wants to be told before it computes in bf16 on a CPU.
                "use_cpu": not (torch.cuda.is_available() or torch.backends.mps.is_available()),
                "member_chunk_size": member_chunk_size,
                "save_strategy": "epoch",
                "disable_tqdm": True,
                "logging_steps": 1_000_000,
            },
        )
        for point in points:
            point_arguments(point, settings, output_dir)  # refuses what cannot be, before anything is loaded
        splits = carve(load_splits(data), data, seed=0)
        datasets.disable_progress_bars()  # of every model's encoding
        with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)) as progress:
            bar = progress.add_task("models", total=len(points))

            def show(point: SweepPoint) -> None:
                progress.advance(bar)
                progress.console.print(point.name)

            elsewhere = run_sweep(points, settings, splits, output_dir, show)
        frontier = frontier_of(output_dir, ensembles, all_seeds, resamples)
        if elsewhere:
            names = ", ".join(point.name for point in elsewhere)
            Console(stderr=True).print(f"Still trained by other processes, so not among the figures: {names}")
        if frontier.empty or frontier["tau"].isna().all():
            return
        content = {"settings": settings_to_remember(settings), "seeds": all_seeds, "frontier": records_of(frontier)}
        write_json(output_dir / JSON_FILE, content)
        frontier_plot(frontier, output_dir / PICTURE)
    Console().print(_table(frontier))
    typer.echo(f"All of it is in {output_dir}.")


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> list:
    """Read numbers between commas."""
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        name = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} takes {name} with commas between them, got {text!r}.") from None


def _table(frontier: pandas.DataFrame) -> Table:
    table = Table(
        caption="Means over seeds; intervals are in the files. NLL T: after temperature scaling. disag.: share of pairs"
        " of members that disagree. modul.: modulation uncertainty in nats. share: members that own a feature."
    )
    table.add_column("model", no_wrap=True)
    for title in _SHOWN.values():
        table.add_column(title, justify="right")
    for _, row in frontier.iterrows():
        name = f"{row['model']} of {row['members']}" if row["members"] > 1 else row["model"]
        if pandas.notna(row["tau"]):
            name = f"M={row['members']} τ={row['tau']:g} λ={row['diversity_weight']:g}"
        figures = [row.get(column) for column in _SHOWN]
        table.add_row(name, *("-" if pandas.isna(figure) else f"{figure:.3f}" for figure in figures))
    return table
