"""The task loss of many rows, divided by a count that may span more than one batch."""

import torch
from torch.nn import functional

from .labels import IGNORED_LABEL, SINGLE_LABEL


def task_loss(
    logits: torch.Tensor, labels: torch.Tensor, problem_type: str, num_items: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Return the loss that transformers' models have for a problem type, in fp32.

    Args:
        logits: (N, ..., C).
        labels: (N, ...) class indices, of which -100 is ignored; for multi-label (N, C) zeros and ones; for regression
            as many numbers as logits.
        problem_type: "single_label_classification" (cross-entropy), "multi_label_classification" (binary cross-entropy)
            or "regression" (squared error).
        num_items: Divides the sum of the losses. None: the number of labels here, class indices of -100 aside. To weigh
            every token alike in several batches of one step, give each the number of tokens in all of them.

    Returns:
        A scalar.
    """
    logits = logits.float()
    if problem_type == SINGLE_LABEL:
        total = functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        count = (labels != IGNORED_LABEL).sum().clamp_min(1)
    else:
        labels = labels.to(logits.dtype).reshape(logits.shape)
        loss = functional.mse_loss if problem_type == "regression" else functional.binary_cross_entropy_with_logits
        total, count = loss(logits, labels, reduction="sum"), labels.numel()
    return total / (count if num_items is None else num_items)
