"""The commands `sigma-nens push` and `sigma-nens extract`."""

from pathlib import Path
from typing import Annotated

import typer

from ..command_line import errors_as_messages, quiet
from ..extraction import extract_to_folder
from ..model import MEAN
from .push import push_adapter


def push(
    adapter: Annotated[Path, typer.Argument(help="Folder of the adapter.")],
    repo: Annotated[str, typer.Argument(help="Repository on the Hub, made if it is not there: owner/name.")],
    base_model: Annotated[
        str | None, typer.Option(help="Repository of the base model, if trained over a copy.")
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option(help="Folder of `sigma-nens evaluate`; default: beside it.")
    ] = None,
    single_evaluation: Annotated[
        Path | None, typer.Option(help="That of a single model on the same examples, to compare with.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to, made if it is not there.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    commit_message: Annotated[str | None, typer.Option(help="Title of the commit.")] = None,
    license: Annotated[str | None, typer.Option(help="Licence; default: the base model's.")] = None,
    language: Annotated[list[str] | None, typer.Option(help="Language of the data, such as en; repeatable.")] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="Dataset on the Hub it was trained on; repeatable.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Further tag; repeatable.")] = None,
) -> None:
    """Push an adapter with its processor, its model card and its evaluation to the Hub."""
    quiet(True)
    found = {"license": license, "language": language, "datasets": dataset, "tags": tag}
    metadata = {name: value for name, value in found.items() if value}
    with errors_as_messages(True):
        commit = push_adapter(
            adapter,
            repo,
            base_model=base_model,
            evaluation=evaluation,
            single_evaluation=single_evaluation,
            private=private or None,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
            **metadata,
        )
    typer.echo(f"It is at {commit.pr_url or commit.commit_url}.")


def extract(
    adapter: Annotated[str, typer.Argument(help="Adapter: a folder or a repository on the Hub.")],
    output_dir: Annotated[Path, typer.Argument(help="Folder for the model, new or empty.")],
    member: Annotated[int | None, typer.Option(min=0, help="Index of the member to take out.")] = None,
    mean: Annotated[bool, typer.Option("--mean", help="Take the mean of the members' weights: no ensemble.")] = False,
    base_model: Annotated[str | None, typer.Option(help="Base model, if not where the adapter says.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of an adapter on the Hub.")] = None,
) -> None:
    """Take one plain transformers model out of an ensemble, with its processor and labels."""
    quiet(True)
    with errors_as_messages(True):
        if mean == (member is not None):
            raise ValueError("Say which model to take out: either --member K or --mean.")
        extract_to_folder(adapter, output_dir, MEAN if mean else member, base_model=base_model, revision=revision)
    what = "The mean of the members' weights, one model and no ensemble," if mean else f"Member {member}"
    typer.echo(f"{what} is in {output_dir}.")
