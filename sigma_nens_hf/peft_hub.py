"""Makes peft's own `push_to_hub` do for this method what it cannot do by itself."""

from typing import Any

from peft import PeftModel

from .registration import METHOD_NAME

_peft_push_to_hub = PeftModel.push_to_hub


def push_to_hub(self: PeftModel, repo_id: str, **kwargs: Any) -> Any:
    """Push the active adapter; of a sigma-norm ensemble as in `publishing.push_model`, of others as peft does.

    Args:
        self: The model.
        repo_id: The repository.
        **kwargs: As in transformers, and for an ensemble as in `publishing.push_adapter`, with its `processor`.
    """
    config = self.peft_config.get(self.active_adapter) if isinstance(self.active_adapter, str) else None
    if config is None or config.peft_type != METHOD_NAME:
        return _peft_push_to_hub(self, repo_id, **kwargs)
    from .publishing import push_model  # training and inference do without

    kwargs.pop("max_shard_size", None)  # an adapter is one file
    return push_model(self, repo_id, **kwargs)


def install_push_to_hub() -> None:
    """Have `PeftModel.push_to_hub` ask for the method first; calling it again changes nothing."""
    PeftModel.push_to_hub = push_to_hub
