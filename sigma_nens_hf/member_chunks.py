"""Members in chunks: which members are run together, and one output from those of the chunks.

A forward and a backward pass of few members at a time need the memory of few members. Nothing else is to change: every
chunk weighs as many members as it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from .labels import SINGLE_LABEL
from .members import active_config, base_model_of, chosen_members, member_subset, problem_type_of
from .outputs import MEMBER_LOGITS, ensemble_logits


@dataclass(frozen=True)
class MemberChunk:
    """Members that are run together.

    Attributes:
        members: Their indices.
        weight: Their share of all members that take part.
        is_first: Whether it is the first chunk of a batch.
        is_last: Whether it is the last one.
    """

    members: tuple[int, ...]
    weight: float = 1.0
    is_first: bool = True
    is_last: bool = True


def split_members(members: Sequence[int], size: int) -> list[MemberChunk]:
    """Split members into chunks of a size, of which the last may be smaller.

    Args:
        members: Indices of all members that take part.
        size: Members in a chunk, at least 1.
    """
    parts = [tuple(members[start : start + size]) for start in range(0, len(members), size)]
    return [
        MemberChunk(part, len(part) / len(members), is_first=part is parts[0], is_last=part is parts[-1])
        for part in parts
    ]


def member_chunks(model: nn.Module, size: int) -> list[MemberChunk]:
    """Split the members of a model into chunks; inside a `member_subset` only those of the subset.

    Args:
        model: The ensemble.
        size: Members in a chunk, at least 1.
    """
    return split_members(chosen_members(base_model_of(model)), size)


def check_can_be_chunked(is_data_parallel: bool, is_deepspeed: bool) -> None:
    """Refuse the ways of running a model in which chunks would go wrong.

    Args:
        is_data_parallel: Whether the model runs under `torch.nn.DataParallel`.
        is_deepspeed: Whether it is trained by DeepSpeed.

    Raises:
        ValueError: It is one of them.
    """
    if is_data_parallel:
        raise ValueError(
            "member_chunk_size cannot be used under torch.nn.DataParallel, whose threads do not see which members are "
            "chosen. Start one process for each GPU (`torchrun`, `accelerate launch`), or let the process see one GPU "
            "only (CUDA_VISIBLE_DEVICES=0)."
        )
    if is_deepspeed:
        raise ValueError(
            "member_chunk_size cannot be used with DeepSpeed, whose engine would take an optimizer step after the "
            "backward pass of every chunk."
        )


class InMemberChunks:
    """A model that runs its members chunk by chunk and returns what it would return for all at once.

    Args:
        model: The (wrapped) ensemble.
        size: Members in a chunk, at least 1.
    """

    def __init__(self, model: nn.Module, size: int):
        self.model = model
        self.size = size

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    def __call__(self, *args: Any, return_dict: bool | None = None, **kwargs: Any) -> ModelOutput | tuple:
        """Run the model."""
        config = base_model_of(self.model).config
        chunks, outputs = member_chunks(self.model, self.size), []
        for chunk in chunks:
            with member_subset(self.model, chunk.members):
                outputs.append(self.model(*args, return_dict=True, **kwargs))
            if MEMBER_LOGITS not in outputs[0]:  # the adapter is disabled: no member takes part
                break
        joined = outputs[0]
        if len(outputs) > 1:
            temperature = active_config(base_model_of(self.model)).temperature_in_use
            joined = join_outputs(outputs, problem_type_of(config), temperature)
        wants_object = config.return_dict if return_dict is None else return_dict
        return joined if wants_object else joined.to_tuple()


def join_outputs(outputs: Sequence[ModelOutput], problem_type: str, temperature: float = 1.0) -> ModelOutput:
    """Join the outputs of chunks of members into that of all their members.

    Args:
        outputs: What the model returns for every chunk; `member_logits` (B, K, ...) of its K members.
        problem_type: As in transformers.
        temperature: The softmax temperature that the outputs' `logits` are calibrated with.

    Returns:
        An output of the same class: `member_logits` (B, M, ...), `logits` and every further field of logits (B, ...) as
        of all members, hidden states and attentions (B, M, ...), the loss as the mean over all members.
    """
    sizes = [output[MEMBER_LOGITS].shape[1] for output in outputs]
    joined = {}
    for name in outputs[0]:
        values = [output[name] for output in outputs]
        if name == "loss":
            joined[name] = sum(size * value for size, value in zip(sizes, values, strict=True)) / sum(sizes)
        elif name == "logits":
            member_logits = torch.cat([output[MEMBER_LOGITS] for output in outputs], 1)
            joined[name] = ensemble_logits(member_logits, problem_type, temperature)
        elif name.endswith("_logits") and name != MEMBER_LOGITS:
            joined[name] = _join_predictions(values, sizes, problem_type, temperature)
        else:
            joined[name] = _join_members(values)
    return type(outputs[0])(**joined)


def _join_predictions(
    logits: list[torch.Tensor], sizes: list[int], problem_type: str, temperature: float
) -> torch.Tensor:
    """Join predictions (B, ..., C) of chunks whose members' own are not known: each counts once for every member."""
    if problem_type == SINGLE_LABEL:
        logits = [chunk * temperature for chunk in logits]  # as before calibration, but for a constant
    repeated = [
        chunk.unsqueeze(1).expand(-1, size, *chunk.shape[1:]) for chunk, size in zip(logits, sizes, strict=True)
    ]
    return ensemble_logits(torch.cat(repeated, 1), problem_type, temperature)


def _join_members(values: list[Any]) -> Any:
    """Join what is (B, K, ...) for chunks of K members, or a tuple of such."""
    if isinstance(values[0], tuple | list):
        return type(values[0])(_join_members(list(parts)) for parts in zip(*values, strict=True))
    return torch.cat(values, 1) if isinstance(values[0], torch.Tensor) else values[0]
