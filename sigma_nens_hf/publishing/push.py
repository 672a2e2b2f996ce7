"""Pushes an adapter to the Hub: what a stranger needs to use it, in one commit."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

from huggingface_hub import CommitInfo, HfApi, ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from peft import PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME

from ..adapter_files import read_adapter_config
from ..adapter_info import AdapterInfo, adapter_infos, evaluation_folder
from ..config import SigmaNormConfig
from ..evaluation.files import RELIABILITY
from ..tasks import load_processor
from .base import PublishedBase, check_base_is_public, published_base
from .card_evaluation import CardEvaluation, public_name, read_evaluation
from .model_card import MARKER, model_card

README = "README.md"
MESSAGE = "Upload a sigma-N-Ens adapter"
_NAME_RULES = "letters, digits, '-', '_' and '.' in 'owner/name', up to 96 of them"
# By these the cards are known that are no work of the user's: this package's and peft's.
_GENERATED = (MARKER, "# Model Card for Model ID")
# The client's errors and, whatever it is called in this release, those of the HTTP library under it; of a large file
# the client makes a RuntimeError of either.
_FAILURES = (HfHubHTTPError.__base__, OSError, RuntimeError)
# Tokens and names of classes may look like paths.
_FULL_OF_STRINGS = ("tokenizer.json", CONFIG_NAME)


def push_adapter(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    base_model: str | None = None,
    evaluation: str | os.PathLike | CardEvaluation | Literal[False] | None = None,
    single_evaluation: str | os.PathLike | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | bool | None = None,
    run_as_future: bool = False,
    **metadata: Any,
) -> CommitInfo | Future[CommitInfo]:
    """Push a saved adapter: its weights and config, the tokenizer or image processor, a model card and its picture.

    Nothing else leaves: no base weights, optimizer state or training arguments, and no path of this machine. A card
    that the user wrote, in the folder or on the Hub, is kept, with its metadata completed.

    Args:
        folder: The adapter.
        repo_id: The repository, made if it is not there.
        base_model: The base model's repository, if the adapter was trained over a local copy.
        evaluation: Folder of an evaluation by `sigma-nens evaluate`; None: one in the folder or beside it, if any;
            False: none.
        single_evaluation: That of a single model on the same examples, to compare with.
        commit_message: Title of the commit.
        commit_description: Text of the commit.
        private: Whether a new repository is private.
        revision: Branch to push to, made if it is not there.
        create_pr: Whether to open a pull request instead.
        token: Of the Hub.
        run_as_future: Whether to return at once, with everything checked, while the upload goes on.
        **metadata: Fields of `huggingface_hub.ModelCardData`, such as `license`, `language`, `datasets` and `tags`.

    Raises:
        ValueError: There is no adapter, or several; it is damaged; the repository's name is not valid; the base model
            is not on the Hub; or the evaluation is not the adapter's. Nothing was sent.
        OSError: The Hub refused or failed. Nothing half-made is there, and the push can be repeated.
    """
    info = _one_adapter(folder)
    config = read_adapter_config(os.fspath(folder), {})
    source = check_base_is_public(config, base_model)
    evaluation = evaluation_folder(folder) if evaluation is None else evaluation
    if not evaluation and single_evaluation is not None:
        raise ValueError(f"There is no evaluation of {folder} that the single model's could be compared with.")
    if evaluation and not isinstance(evaluation, CardEvaluation):
        evaluation = read_evaluation(evaluation, single_evaluation, info.num_members)
    if create_pr and revision is not None:
        raise ValueError("A pull request has a branch of its own; leave out either create_pr or revision.")
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(f"{repo_id!r} is no name for a repository: {_NAME_RULES}. {error}") from error
    api, target = HfApi(token=token), {"revision": revision, "create_pr": create_pr}
    workplace = tempfile.TemporaryDirectory()
    try:
        with _clear_failures(repo_id):
            repo_id = repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"
            base = published_base(config, source, token)
            _write_files(Path(workplace.name), folder, config, info, base, token)
            card = model_card(repo_id, info, config, base, evaluation or None, metadata)
            card = _with_own_text(card, folder, repo_id, revision, token)
            try:
                card.validate()
            except ValueError as error:
                raise ValueError(f"The metadata of the card, {README}, are not valid: {error}") from error
            card.save(Path(workplace.name, README))
            if evaluation and evaluation.reliability is not None:
                shutil.copyfile(evaluation.reliability, Path(workplace.name, RELIABILITY))
        about = {"commit_message": commit_message or MESSAGE, "commit_description": commit_description}
        upload = partial(_upload, api, workplace, repo_id, private, target | about)
        return api.run_as_future(upload) if run_as_future else upload()
    except BaseException:
        workplace.cleanup()
        raise


def push_model(model: PeftModel, repo_id: str, processor: Any = None, **kwargs: Any) -> CommitInfo | Future[CommitInfo]:
    """Push the active adapter of a model; see `push_adapter`.

    Args:
        model: The ensemble.
        repo_id: The repository.
        processor: Its tokenizer or image processor; None: the base model's.
        **kwargs: As for `push_adapter`.

    Raises:
        ValueError: As for `push_adapter`.
        OSError: As for `push_adapter`.
    """
    with tempfile.TemporaryDirectory() as folder:
        name = model.active_adapter
        model.save_pretrained(folder, selected_adapters=[name])
        adapter = Path(folder) if name == "default" else Path(folder, name)
        if processor is not None:
            processor.save_pretrained(adapter)
        return push_adapter(adapter, repo_id, **({"evaluation": False} | kwargs))


def _one_adapter(folder: str | os.PathLike) -> AdapterInfo:
    if not os.path.isdir(folder):
        raise ValueError(f"There is no folder {folder}.")
    infos = adapter_infos(folder)
    if not Path(folder, CONFIG_NAME).is_file():
        names = ", ".join(str(Path(folder, info.name)) for info in infos)
        raise ValueError(f"{folder} has its adapters in subfolders. Push one of them: {names}.")
    return infos[0]


def _write_files(
    workplace: Path,
    folder: str | os.PathLike,
    config: SigmaNormConfig,
    info: AdapterInfo,
    base: PublishedBase,
    token: str | bool | None,
) -> None:
    """Write the adapter, over its published base, and the processor."""
    processor = load_processor(os.fspath(folder), info.task, {})
    if processor is None:
        processor = load_processor(base.repo_id, info.task, {"revision": base.revision, "token": token})
    if processor is not None:
        processor.save_pretrained(workplace)
    shutil.copyfile(Path(folder, SAFETENSORS_WEIGHTS_NAME), workplace / SAFETENSORS_WEIGHTS_NAME)
    config.base_model_name_or_path, config.revision = base.repo_id, base.revision
    config.inference_mode = True
    if config.training_recipe and config.training_recipe.get("dataset"):
        config.training_recipe["dataset"] = public_name(config.training_recipe["dataset"])
    config.save_pretrained(workplace)
    for path in workplace.glob("*.json"):
        if path.name not in _FULL_OF_STRINGS:
            content = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps(_without_paths(content), indent=2, ensure_ascii=False), encoding="utf-8")


def _without_paths(value: Any) -> Any:
    """Leave out the entries that are absolute paths."""
    if isinstance(value, dict):
        return {name: _without_paths(item) for name, item in value.items() if not _is_path(item)}
    return [_without_paths(item) for item in value] if isinstance(value, list) else value


def _is_path(value: Any) -> bool:
    if not isinstance(value, str) or "\n" in value:  # such as a chat template
        return False
    is_windows = PureWindowsPath(value).is_absolute() and len(PureWindowsPath(value).parts) > 2
    return is_windows or (value.startswith("/") and len(PurePosixPath(value).parts) > 2)


def _with_own_text(
    card: ModelCard, folder: str | os.PathLike, repo_id: str, revision: str | None, token: str | bool | None
) -> ModelCard:
    """Return the card that the user wrote, with what it lacks in metadata; the given one where there is none."""
    local = Path(folder, README)
    own = _read_card(local, str(local)) if local.is_file() else None
    for branch in (revision, None):  # a branch that is not there yet will begin as the main one
        if own is None or _is_generated(own):
            own = _card_on_hub(repo_id, branch, token)
    if own is None or _is_generated(own):
        return card
    ours, theirs = card.data.to_dict(), own.data.to_dict()
    tags = [tag for tag in theirs.get("tags") or [] if not tag.startswith("base_model:")]
    # These are of this adapter, whatever the card, which peft may have begun, said before.
    fixed = {name: ours[name] for name in ("base_model", "library_name", "pipeline_tag", "model-index") if name in ours}
    own.data = ModelCardData(**(ours | theirs | fixed | {"tags": list(dict.fromkeys([*ours["tags"], *tags]))}))
    return own


def _card_on_hub(repo_id: str, revision: str | None, token: str | bool | None) -> ModelCard | None:
    try:
        path = hf_hub_download(repo_id, README, revision=revision, token=token)
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        return None
    return _read_card(Path(path), f"{README} in {repo_id}")


def _read_card(path: Path, source: str) -> ModelCard:
    try:
        return ModelCard.load(path)
    except Exception as error:  # of yaml, of the encoding, or of what the metadata are taken for
        raise ValueError(f"The metadata at the top of {source} cannot be read; mend them first. ({error})") from error


def _is_generated(card: ModelCard) -> bool:
    return any(sign in card.text for sign in _GENERATED)


def _upload(
    api: HfApi,
    workplace: tempfile.TemporaryDirectory,
    repo_id: str,
    private: bool | None,
    commit: dict[str, Any],
) -> CommitInfo:
    with workplace, _clear_failures(repo_id):
        api.create_repo(repo_id, private=private, exist_ok=True)
        if commit["revision"] is not None and not commit["create_pr"]:
            api.create_branch(repo_id, branch=commit["revision"], exist_ok=True)
        # A picture of an earlier evaluation would be taken for this one's.
        return api.upload_folder(repo_id=repo_id, folder_path=workplace.name, delete_patterns=[RELIABILITY], **commit)


@contextmanager
def _clear_failures(repo_id: str) -> Iterator[None]:
    """Say what a failure of the Hub means for the push."""
    try:
        yield
    except _FAILURES as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) else error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in (401, 403):
            mend = "Your token may not do that: log in with `hf auth login` and a token that may write there."
        else:
            mend = "Push again: a commit is there whole or not at all, so nothing half-made is left."
        raise OSError(f"The push to {repo_id} failed. {mend} ({error})") from error
