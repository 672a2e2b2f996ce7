"""The ensemble's output: the base model's output class with one more field, `member_logits`."""

import math
from dataclasses import fields, make_dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers.utils import ModelOutput

MEMBER_LOGITS = "member_logits"
# All else that the outputs of supported models may hold, the loss aside.
OTHER_OUTPUTS = (
    "logits", "cls_logits", "distillation_logits", "hidden_states", "attentions", "reshaped_hidden_states",
)  # fmt: skip
_ensemble_classes: dict[type[ModelOutput], type[ModelOutput]] = {}


def pooled_log_probabilities(member_logits: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the mean over members of their probabilities, in the precision of the logits.

    Args:
        member_logits: (B, M, ..., C), single-label logits.

    Returns:
        (B, ..., C).
    """
    return member_logits.log_softmax(-1).logsumexp(1) - math.log(member_logits.shape[1])


def ensemble_logits(member_logits: torch.Tensor, problem_type: str, temperature: float = 1.0) -> torch.Tensor:
    """Form the ensemble's logits, in fp32, from those of its members.

    The prediction is the mean over members of their probabilities, never the softmax of mean logits, and `logits` are
    chosen so that the usual map from logits gives just that: log mean softmax for a single label, the logit of the
    mean sigmoid for multi-label, the mean for regression.

    Args:
        member_logits: (B, M, ..., C).
        problem_type: "single_label_classification", "multi_label_classification" or "regression".
        temperature: Softmax temperature that a single-label prediction is calibrated with after pooling.

    Returns:
        (B, ..., C), fp32.
    """
    member_logits = member_logits.float()
    if problem_type == "regression":
        return member_logits.mean(1)
    if problem_type == "multi_label_classification":
        log_num_members = math.log(member_logits.shape[1])
        log_mean = functional.logsigmoid(member_logits).logsumexp(1) - log_num_members
        log_mean_of_complement = functional.logsigmoid(-member_logits).logsumexp(1) - log_num_members
        return log_mean - log_mean_of_complement
    pooled = pooled_log_probabilities(member_logits)
    return pooled if temperature == 1 else (pooled / temperature).log_softmax(-1)


def reduce_members(
    output: ModelOutput, num_members: int, num_rows: int, problem_type: str, temperature: float = 1.0
) -> ModelOutput:
    """Turn the output for the expanded batch into the ensemble's output.

    Args:
        output: Output of the base model for M * B rows, member-major.
        num_members: Number of members M in the rows.
        num_rows: M * B.
        problem_type: As in transformers.
        temperature: As for `ensemble_logits`.

    Returns:
        An output of a subclass of the base model's output class: `logits` and every further field of logits (B, ...)
        reduced as by `ensemble_logits`; `member_logits` (B, M, ...); hidden states and attentions (B, M, ...), or
        (B * K, M, ...) where the model has K rows an example; the loss as it was, the mean over members. In batch-first
        form gathering and truncation act on examples.
    """

    def batch_first(value: Any) -> Any:
        # Of choices and of windows there are several rows an example; they stay rows, as in the base model's output.
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] % num_rows == 0:
            return value.unflatten(0, (num_members, -1)).transpose(0, 1)
        if isinstance(value, tuple | list):
            return type(value)(batch_first(item) for item in value)
        return value

    reduced = {}
    for name, value in output.items():
        if name == "loss":
            reduced[name] = value
            continue
        value = batch_first(value)
        if name == "logits":
            reduced[MEMBER_LOGITS] = value
        if name == "logits" or name.endswith("_logits"):
            value = ensemble_logits(value, problem_type, temperature)
        reduced[name] = value
    return ensemble_output_class(type(output))(**reduced)


def ensemble_output_class(base_class: type[ModelOutput]) -> type[ModelOutput]:
    """Return the subclass of a transformers output class that has `member_logits` as its last field.

    Args:
        base_class: The output class of the base model.
    """
    if base_class not in _ensemble_classes:
        _ensemble_classes[base_class] = make_dataclass(
            f"Ensemble{base_class.__name__}",
            [(MEMBER_LOGITS, torch.FloatTensor | None, None)],
            bases=(base_class,),
            namespace={"__reduce__": _reduce_for_pickle, "__module__": __name__},
        )
    return _ensemble_classes[base_class]


def _reduce_for_pickle(output: ModelOutput) -> tuple:
    # The class is made at run time and cannot be found by name, but its base can.
    values = tuple(getattr(output, field.name) for field in fields(output))
    return _rebuild, (type(output).__bases__[0], values)


def _rebuild(base_class: type[ModelOutput], values: tuple) -> ModelOutput:
    return ensemble_output_class(base_class)(*values)
