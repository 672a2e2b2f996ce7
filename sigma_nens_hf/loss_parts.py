"""The parts of the training loss that are logged, summed up between two entries of the log."""

from collections.abc import Callable

import torch

from .labels import IGNORED_LABEL
from .member_chunks import MemberChunk
from .uncertainty import member_disagreement


class LossParts:
    """Sums over batches of the task loss, the regulariser and the members' disagreement.

    They stay on the device until they are logged: to read them at every step would be to wait for every step.
    """

    def __init__(self):
        self._sums: torch.Tensor | float = 0.0
        self._num_batches = 0
        self._losses: torch.Tensor | float = 0.0
        self._votes: list[torch.Tensor] = []

    def add(
        self,
        chunk: MemberChunk,
        task_loss: torch.Tensor,
        regularizer: torch.Tensor,
        member_logits: torch.Tensor,
        labels: torch.Tensor | None,
    ) -> None:
        """Add what one chunk of members contributes to its batch; the batch counts once its last chunk is there.

        Args:
            chunk: The members.
            task_loss: Their part of the task loss.
            regularizer: Their part of the regulariser.
            member_logits: Their logits (B, K, ..., C).
            labels: The labels of the batch; with as many as there are predictions, those of -100 do not count.
        """
        if chunk.is_first:  # a step that was interrupted may have left chunks behind
            self._losses, self._votes = 0.0, []
        self._losses = self._losses + torch.stack([task_loss.detach().float(), regularizer.detach().float()])
        self._votes.append(member_logits.detach().argmax(-1))
        if chunk.is_last:
            disagreement = _mean_disagreement(torch.cat(self._votes, 1), labels)
            self._sums = self._sums + torch.cat([self._losses, disagreement[None]])
            self._num_batches += 1

    def take_means(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Return the means over batches and processes by name, none if there was no batch, and start anew.

        Args:
            gather: Gathers tensors (1, ...) of all processes into one (processes, ...).
        """
        if not self._num_batches:
            return {}
        means = gather((self._sums / self._num_batches)[None]).mean(0).tolist()
        self._sums, self._num_batches = 0.0, 0
        return dict(zip(("task_loss", "regularizer", "disagreement"), means, strict=True))


def _mean_disagreement(votes: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    disagreement = member_disagreement(votes)
    if labels is not None and labels.shape == disagreement.shape:
        labelled = labels != IGNORED_LABEL  # padding is no token to disagree on
        return (disagreement * labelled).sum() / labelled.sum().clamp_min(1)
    return disagreement.mean()
