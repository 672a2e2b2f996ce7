"""The files of an adapter, in a folder or on the Hub, and what to say where they cannot be had."""

import os
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from transformers.utils import CONFIG_NAME as TRANSFORMERS_CONFIG_NAME
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash


def file_of_adapter(repo_or_dir: str, name: str, hub_kwargs: dict[str, Any]) -> str | None:
    """Return the path of a file, None where there is none.

    Args:
        repo_or_dir: An adapter repository on the Hub or a local folder.
        name: Name of the file.
        hub_kwargs: `revision`, `token`, `cache_dir`, ... for the Hub.

    Raises:
        ValueError: The repository cannot be had, with the reason.
    """
    if os.path.isdir(repo_or_dir):
        path = os.path.join(repo_or_dir, name)
        return path if os.path.isfile(path) else None
    no_folder = f"There is no folder {repo_or_dir} here"
    try:
        return hf_hub_download(repo_or_dir, name, **hub_kwargs)
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ValueError(
            f"{no_folder}, the Hub cannot be reached (or HF_HUB_OFFLINE is set), and {name} of a repository of that "
            "name is not in the cache. Load it once with a connection."
        ) from error
    except EntryNotFoundError:
        return None
    except GatedRepoError as error:
        raise ValueError(
            f"Access to {repo_or_dir} on the Hub is restricted: ask for it on its page, and log in with "
            "`hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{repo_or_dir} on the Hub has no revision {hub_kwargs.get('revision')!r}.") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{no_folder}, and no adapter of that name could be fetched from the Hub. If it is private, log in with "
            "`hf auth login`."
        ) from error
    except HFValidationError as error:
        raise ValueError(f"{no_folder}, and it is no name of a repository on the Hub ({error}).") from error


def adapter_weights_file(repo_or_dir: str, hub_kwargs: dict[str, Any]) -> str:
    """Return the path of an adapter's weights, a whole safetensors file.

    Args:
        repo_or_dir: An adapter repository on the Hub or a local folder.
        hub_kwargs: `revision`, `token`, `cache_dir`, ... for the Hub.

    Raises:
        ValueError: There is none, it is damaged, or the repository cannot be had.
    """
    path = file_of_adapter(repo_or_dir, SAFETENSORS_WEIGHTS_NAME, hub_kwargs)
    if path is None:
        raise ValueError(
            f"{repo_or_dir} has no {SAFETENSORS_WEIGHTS_NAME}. Only safetensors files are opened, never "
            f"{WEIGHTS_NAME}, which can run code."
        )
    try:
        with safe_open(path, "pt"):
            return path
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut off ({error}); fetch or save it again.") from error


def commit_of(model_id: str, kwargs: dict[str, Any]) -> str | None:
    """Return the commit of a model that was loaded from the Hub, None where it was a local folder.

    Args:
        model_id: A repository on the Hub or a local folder.
        kwargs: Arguments of `from_pretrained` that it was loaded with.
    """
    where = {name: kwargs[name] for name in ("revision", "cache_dir") if kwargs.get(name) is not None}
    if os.path.isdir(model_id):
        return None
    path = cached_file(
        model_id, TRANSFORMERS_CONFIG_NAME, local_files_only=True, _raise_exceptions_for_missing_entries=False, **where
    )
    return extract_commit_hash(path, None)
