"""The config of a saved adapter, in a folder or on the Hub, checked without building a model for it."""

import json
from typing import Any

from peft.utils import CONFIG_NAME

from .config import SigmaNormConfig
from .hub_files import file_of_adapter
from .registration import METHOD_NAME


def read_adapter_config(repo_or_dir: str, hub_kwargs: dict[str, Any]) -> SigmaNormConfig:
    """Read the config of an adapter.

    Args:
        repo_or_dir: An adapter repository on the Hub or a local folder.
        hub_kwargs: `revision`, `token`, `cache_dir`, ... for the Hub.

    Raises:
        ValueError: There is none, it is damaged, it is that of another kind of adapter, or the weights beside it are
            not its own.
    """
    path = file_of_adapter(repo_or_dir, CONFIG_NAME, hub_kwargs)
    if path is None:
        is_model = file_of_adapter(repo_or_dir, "config.json", hub_kwargs) is not None
        found = "It is a model, not an adapter" if is_model else "There is no adapter in it"
        raise ValueError(f"{repo_or_dir} has no {CONFIG_NAME}. {found}.")
    try:
        with open(path, encoding="utf-8") as file:
            peft_type = json.load(file)["peft_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"The {CONFIG_NAME} in {repo_or_dir} is damaged ({error!r}).") from error
    if peft_type != METHOD_NAME:
        raise ValueError(f"{repo_or_dir} holds an adapter of type {peft_type}, not a sigma-norm ensemble.")
    try:
        return SigmaNormConfig.from_pretrained(repo_or_dir, **hub_kwargs)
    except TypeError as error:
        raise ValueError(f"The {CONFIG_NAME} in {repo_or_dir} is damaged ({error!r}).") from error
