"""The padding token of decoders, on which model and tokenizer must agree; many come without one."""

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .architectures import ARCHITECTURES

# What old configs of Llama say for none.
_NO_TOKEN = -1


def padding_token(model: PreTrainedModel, remembered: int | None) -> int:
    """Return the padding token of a model that predicts from the last token before it.

    Members make a batch even of a single example, so there has to be one.

    Args:
        model: The base model.
        remembered: The token that the adapter remembers, which goes before the model's own.

    Raises:
        ValueError: There is none, or it is no token.
    """
    text_config = model.config.get_text_config()
    token = text_config.pad_token_id if remembered is None else remembered
    if token in (None, _NO_TOKEN):
        raise ValueError(
            f"{type(model).__name__} predicts from the last token before the padding, but its config names no padding "
            "token. Set `model.config.pad_token_id`, to `tokenizer.eos_token_id` where there is no other."
        )
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < text_config.vocab_size:
        raise ValueError(f"pad_token_id must be one of the {text_config.vocab_size} tokens, got {token!r}.")
    return token


def settle_padding(model: PreTrainedModel, processor: Any, remembered: int | None) -> None:
    """Let a tokenizer pad, and a model that looks for the padding know the same token.

    Args:
        model: The base model.
        processor: Its processor; anything but a tokenizer is left alone.
        remembered: The token that the adapter remembers, if any. Else it is the tokenizer's, else the model's, else the
            end of text.
    """
    if not isinstance(processor, PreTrainedTokenizerBase):
        return
    text_config = model.config.get_text_config()
    models = None if text_config.pad_token_id == _NO_TOKEN else text_config.pad_token_id
    choices = (remembered, processor.pad_token_id, models, processor.eos_token_id)
    token = next((choice for choice in choices if choice is not None), None)
    if token is None:
        return
    if processor.pad_token_id != token:
        processor.pad_token = processor.convert_ids_to_tokens(token)
    if models is None or ARCHITECTURES[type(model).__name__].pools_last_token:
        text_config.pad_token_id = token
