"""The command line: `sigma-nens evaluate`, `info`, `sweep`, `push` and `extract`.

`accelerate launch -m sigma_nens_hf.cli evaluate ...` and `python -m torch.distributed.run -m sigma_nens_hf.cli
evaluate ...` share the work of an evaluation among processes.
"""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from .adapter_info import adapter_infos, table_of_info
from .command_line import errors_as_messages, input_columns, quiet
from .evaluation.data import DEFAULT_SPLIT, EvaluationData, load_split
from .evaluation.evaluate import DatasetEvaluation, accelerator_of_launch, evaluate_dataset
from .evaluation.files import EXAMPLES, OOD_EXAMPLES, results_folder, write_report
from .evaluation.report import report_of, table_of
from .hub import load_ensemble
from .publishing.command import extract, push
from .sweep.command import sweep

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Evaluate sigma-N-Ens ensembles, show, share and take apart saved adapters, and trace what diversity trades.",
)
for command in (sweep, push, extract):
    app.command()(command)
# Settings of which no figure depends.
_NOT_OF_FIGURES = ("output_dir", "overwrite")


@app.command()
def evaluate(
    context: typer.Context,
    adapter: Annotated[str, typer.Argument(help="Adapter: a folder or a repository on the Hub.")],
    dataset: Annotated[str, typer.Option(help="Id on the Hub, a folder, or a csv, json, jsonl or parquet file.")],
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of the dataset.")] = None,
    split: Annotated[str | None, typer.Option(help=f"Its split; default: {DEFAULT_SPLIT}, of a file all.")] = None,
    text_column: Annotated[str | None, typer.Option(help="Column of the text or words; default: a usual one.")] = None,
    second_text_column: Annotated[str | None, typer.Option(help="Column of a second text, or of the choices.")] = None,
    image_column: Annotated[str | None, typer.Option(help="Column of the image; default: a usual one.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Column of the label; default: a usual one.")] = None,
    ood_dataset: Annotated[str | None, typer.Option(help="Data from another distribution; labels not needed.")] = None,
    ood_dataset_config: Annotated[str | None, typer.Option(help="As for the dataset.")] = None,
    ood_split: Annotated[str | None, typer.Option(help=f"Its split; default: {DEFAULT_SPLIT}, of a file all.")] = None,
    ood_text_column: Annotated[str | None, typer.Option(help="As for the dataset.")] = None,
    ood_second_text_column: Annotated[str | None, typer.Option(help="As for the dataset.")] = None,
    ood_image_column: Annotated[str | None, typer.Option(help="As for the dataset.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Base model, if not where the adapter says.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of an adapter on the Hub.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples in a forward pass of each process.")] = 32,
    max_examples: Annotated[int | None, typer.Option(min=1, help="Take this many, from all over the data.")] = None,
    calibrated: Annotated[bool, typer.Option("--calibrated", help="Use the adapter's stored temperature.")] = False,
    n_bins: Annotated[int, typer.Option(min=1, help="Bins of the calibration errors.")] = 15,
    resamples: Annotated[int, typer.Option(min=1, help="Draws for intervals and noise floors.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of these draws, and of --max-examples.")] = 0,
    output_dir: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("evaluation"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an evaluation that is there.")] = False,
) -> None:
    """Evaluate an ensemble on a dataset: quality, calibration, uncertainty and out-of-distribution detection."""
    accelerator = accelerator_of_launch()
    is_main = accelerator.is_main_process
    quiet(is_main)
    started = time.monotonic()
    with (
        errors_as_messages(is_main),
        results_folder(output_dir, overwrite, is_main) as folder,
        Progress(console=Console(stderr=True), disable=not is_main) as progress,
    ):
        columns = input_columns(image_column, text_column, second_text_column)
        ood_columns = input_columns(ood_image_column, ood_text_column, ood_second_text_column)
        # All at once: files that are fetched or prepared are locked, and an error is every process's own.
        model, processor = load_ensemble(adapter, base_model=base_model, calibrated=calibrated, revision=revision)
        model.to(accelerator.device)
        take = {"max_examples": max_examples, "seed": seed}
        rows = load_split(dataset, dataset_config, split)
        data = EvaluationData.of(model, rows, input_columns=columns, label_column=label_column, **take)
        ood_data = None
        if ood_dataset is not None:
            ood_rows = load_split(ood_dataset, ood_dataset_config, ood_split)
            ood_data = EvaluationData.of(model, ood_rows, input_columns=ood_columns, is_labelled=False, **take)

        def evaluated(examples: EvaluationData, name: str, file_name: str) -> DatasetEvaluation:
            bar = progress.add_task(escape(name), total=len(examples))
            return evaluate_dataset(
                model,
                processor,
                examples,
                batch_size=batch_size,
                n_bins=n_bins,
                accelerator=accelerator,
                examples_file=folder / file_name,
                on_progress=lambda num_done: progress.advance(bar, num_done),
            )

        evaluation = evaluated(data, dataset, EXAMPLES)
        ood = None if ood_data is None else evaluated(ood_data, f"{ood_dataset}, out of distribution", OOD_EXAMPLES)
        if is_main:
            settings = {name: value for name, value in context.params.items() if name not in _NOT_OF_FIGURES}
            settings |= {"processes": accelerator.num_processes, "seconds": time.monotonic() - started}
            report = report_of(model, evaluation, ood, settings)
            write_report(folder, report, model, evaluation.table, ood.table if ood else None)
    if is_main:
        Console().print(table_of(report))
        typer.echo(f"All of it is in {output_dir}.")
    accelerator.end_training()


@app.command()
def info(
    adapter: Annotated[str, typer.Argument(help="A folder with one or several adapters, or a repository on the Hub.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of adapters as json.")] = False,
    revision: Annotated[str | None, typer.Option(help="Revision of an adapter on the Hub.")] = None,
) -> None:
    """Show what a saved adapter is, without loading its base model."""
    with errors_as_messages(True):
        infos = adapter_infos(adapter, revision=revision)
    if as_json:
        typer.echo(json.dumps([found.to_dict() for found in infos], indent=2))
    else:
        Console().print(*map(table_of_info, infos), sep="\n")


if __name__ == "__main__":
    app()
