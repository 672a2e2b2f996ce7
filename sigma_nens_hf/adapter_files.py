"""The files of a saved adapter, in a folder or on the Hub, checked without building a model for them."""

import json
import os
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from peft import PeftConfig
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from .config import SigmaNormConfig


def read_adapter_config(repo_or_dir: str, hub_kwargs: dict[str, Any]) -> SigmaNormConfig:
    """Read the config of an adapter.

    Args:
        repo_or_dir: An adapter repository on the Hub or a local folder.
        hub_kwargs: `revision`, `token`, `cache_dir`, ... for the Hub.

    Raises:
        ValueError: There is none, it is damaged, or it is that of another kind of adapter.
    """
    if os.path.isdir(repo_or_dir) and not os.path.isfile(os.path.join(repo_or_dir, CONFIG_NAME)):
        is_model = os.path.isfile(os.path.join(repo_or_dir, "config.json"))
        found = "It is a model, not an adapter" if is_model else "There is no adapter in it"
        raise ValueError(f"{repo_or_dir} has no {CONFIG_NAME}. {found}.")
    try:
        config = PeftConfig.from_pretrained(repo_or_dir, **hub_kwargs)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"The adapter_config.json in {repo_or_dir} is damaged ({error!r}).") from error
    except ValueError as error:
        if CONFIG_NAME not in str(error):
            raise
        raise ValueError(
            f"There is no folder {repo_or_dir} here, and no adapter of that name could be fetched from the Hub."
        ) from error
    if not isinstance(config, SigmaNormConfig):
        raise ValueError(f"{repo_or_dir} holds an adapter of type {config.peft_type}, not a sigma-norm ensemble.")
    return config


def adapter_weights_file(repo_or_dir: str, hub_kwargs: dict[str, Any]) -> str:
    """Return the path of an adapter's weights, a whole safetensors file.

    Args:
        repo_or_dir: An adapter repository on the Hub or a local folder.
        hub_kwargs: `revision`, `token`, `cache_dir`, ... for the Hub.

    Raises:
        ValueError: There is none, or it is damaged.
    """
    path = file_of_adapter(repo_or_dir, SAFETENSORS_WEIGHTS_NAME, hub_kwargs)
    if path is None:
        raise ValueError(
            f"{repo_or_dir} has no {SAFETENSORS_WEIGHTS_NAME}. Only safetensors files are opened, never a "
            f"{WEIGHTS_NAME}, which can run code."
        )
    try:
        with safe_open(path, "pt"):
            return path
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or cut off ({error}); fetch or save it again.") from error


def check_sizes(path: str, config: SigmaNormConfig) -> None:
    """Refuse a file that is not of the members and classes of its config, before memory is taken for as many.

    Args:
        path: A safetensors file.
        config: The config that came with it.

    Raises:
        ValueError: It has other numbers of them.
    """
    with safe_open(path, "pt") as file:
        keys = file.keys()
        shapes = {key: file.get_slice(key).get_shape() for key in keys}
    heads = [shape for key, shape in shapes.items() if key.endswith(".sigma_norm_head_bias")]
    members = {shape[0] for key, shape in shapes.items() if key.endswith(".sigma_norm_scaler")}
    if max(members, default=0) != config.num_members or any(shape[0] != config.num_members for shape in heads):
        raise ValueError(f"{path} is not of the {config.num_members} members that its {CONFIG_NAME} says.")
    if config.num_labels is not None and any(shape[1] < config.num_labels for shape in heads):
        raise ValueError(f"{path} is not of the {config.num_labels} classes that its {CONFIG_NAME} says.")


def file_of_adapter(repo_or_dir: str, name: str, hub_kwargs: dict[str, Any]) -> str | None:
    """Return the path of a file, None where there is none.

    Args:
        repo_or_dir: An adapter repository on the Hub or a local folder.
        name: Name of the file.
        hub_kwargs: `revision`, `token`, `cache_dir`, ... for the Hub.
    """
    if os.path.isdir(repo_or_dir):
        path = os.path.join(repo_or_dir, name)
        return path if os.path.isfile(path) else None
    try:
        return hf_hub_download(repo_or_dir, name, **hub_kwargs)
    except EntryNotFoundError:
        return None
