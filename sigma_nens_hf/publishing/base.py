"""The base model as others find it: a revision of a repository on the Hub."""

import os
from dataclasses import dataclass

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from transformers import AutoConfig

from ..config import SigmaNormConfig


@dataclass(frozen=True)
class PublishedBase:
    """A base model on the Hub.

    Attributes:
        repo_id: Its repository.
        revision: The commit, which never changes.
        license: Its licence, None where it names none; `license_name` and `license_link` where that is "other".
    """

    repo_id: str
    revision: str
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None


def check_base_is_public(config: SigmaNormConfig, base_model: str | None) -> str:
    """Return the repository that an adapter's base model is to be loaded from, without asking the Hub for it.

    Args:
        config: The adapter's config.
        base_model: A repository to name in place of the adapter's own base model.

    Raises:
        ValueError: There is none, or it is a folder of this machine.
    """
    source = base_model or config.base_model_name_or_path
    if not source:
        raise ValueError("The adapter does not say what its base model is; name it with base_model (--base-model).")
    if os.path.isdir(source) or os.path.isabs(source):
        raise ValueError(
            f"The base model is the local folder {source}, which nobody else has. Name the repository on the Hub that "
            "holds the same weights: base_model='organisation/name' (--base-model organisation/name; in training "
            "hub_base_model)."
        )
    return source


def published_base(config: SigmaNormConfig, base_model: str | None, token: str | bool | None) -> PublishedBase:
    """Find the base model of an adapter on the Hub.

    Args:
        config: The adapter's config.
        base_model: A repository to name in place of the adapter's own base model.
        token: Of the Hub.

    Raises:
        ValueError: It is a local folder, is not on the Hub, or is of another type than the adapter's.
    """
    source = check_base_is_public(config, base_model)
    revision = config.revision if source == config.base_model_name_or_path else None
    try:
        info = HfApi().model_info(source, revision=revision, token=token)
    except RevisionNotFoundError as error:
        raise ValueError(f"The base model {source} has no revision {revision} on the Hub any more.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(
            f"There is no base model {source} on the Hub, or your token may not see it; name one with base_model "
            "(--base-model)."
        ) from error
    model_type = AutoConfig.from_pretrained(info.id, revision=info.sha, token=token).model_type
    if model_type != config.base_model_type:
        raise ValueError(
            f"The base model {info.id} is of type {model_type!r}, the adapter is for {config.base_model_type!r}."
        )
    card = info.card_data or ModelCardData()
    return PublishedBase(
        info.id,
        info.sha,
        license=card.get("license"),
        license_name=card.get("license_name"),
        license_link=card.get("license_link"),
    )
