"""The per-example table: a few numbers for every example, from which all figures but class-wise ones are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pandas
import torch

from ..outputs import pooled_log_probabilities
from ..uncertainty import decompose_uncertainty, member_disagreement
from .checks import ArrayLike, as_array, checked_labels, checked_probabilities


@dataclass(frozen=True)
class ExampleTable:
    """Columns of one entry an example; but for the votes their size grows with neither members nor classes.

    Attributes:
        prediction: (N,), the most probable class; of tied classes the first.
        probability: (N,), its probability: the confidence.
        predictive_entropy: (N,), entropy of the mean of the members' probabilities, in nats; the sum of the next two.
        expected_entropy: (N,), mean of the members' entropies.
        modulation_uncertainty: (N,), what the members disagree about; 0 for a single model.
        disagreement: (N,), fraction of pairs of members that predict different classes; 0 for a single model.
        label: (N,), the right class; None where it is not known, as are the next two.
        label_probability: (N,), probability of the right class.
        squared_error: (N,), squared distance of the probabilities to the one-hot label, between 0 and 2.
        member_votes: (N, M), the class that each member predicts; None where they are not kept.
    """

    prediction: np.ndarray
    probability: np.ndarray
    predictive_entropy: np.ndarray
    expected_entropy: np.ndarray
    modulation_uncertainty: np.ndarray
    disagreement: np.ndarray
    label: np.ndarray | None = None
    label_probability: np.ndarray | None = None
    squared_error: np.ndarray | None = None
    member_votes: np.ndarray | None = None

    @classmethod
    def of_probabilities(cls, probabilities: ArrayLike, labels: ArrayLike | None = None) -> ExampleTable:
        """Make the table of a single model, or of any predictive distribution whose members are not known.

        Args:
            probabilities: (N, C).
            labels: (N,), class indices; None: not known.

        Raises:
            ValueError: The input is no set of probabilities with labels.
        """
        probabilities = checked_probabilities(probabilities)
        entropy = torch.special.entr(torch.as_tensor(probabilities)).sum(-1).numpy()
        nothing = np.zeros(len(probabilities))
        return cls(
            **_about_predictions(probabilities, labels),
            predictive_entropy=entropy,
            expected_entropy=entropy,
            modulation_uncertainty=nothing,
            disagreement=nothing,
        )

    @classmethod
    def of_members(
        cls,
        member_logits: ArrayLike,
        labels: ArrayLike | None = None,
        *,
        temperature: float = 1.0,
        keep_votes: bool = True,
    ) -> ExampleTable:
        """Make the table of an ensemble.

        Args:
            member_logits: (N, M, C), single-label logits.
            labels: (N,), class indices; None: not known.
            temperature: Softmax temperature that the pooled prediction is calibrated with. It changes the
                probabilities; entropies, votes and what is made of them are of the members as they are.
            keep_votes: Whether to keep the votes, which are M numbers an example.

        Raises:
            ValueError: The input is no set of logits with labels, or the temperature is not finite and positive.
        """
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"The temperature must be finite and positive, got {temperature}.")
        logits = torch.as_tensor(as_array(member_logits)).double()
        if logits.dim() != 3 or not logits.numel():
            raise ValueError(
                f"Expected member logits (N, M, C) with N > 0, got shape {tuple(logits.shape)}. Those of a single "
                "model are logits[:, None]."
            )
        if not torch.isfinite(logits).all():
            raise ValueError("The member logits hold NaN or infinity.")
        probabilities = (pooled_log_probabilities(logits) / temperature).softmax(-1).numpy()
        votes = logits.argmax(-1)
        parts = {name: part.double().numpy() for name, part in decompose_uncertainty(logits)._asdict().items()}
        return cls(
            **_about_predictions(probabilities, labels),
            **parts,
            disagreement=member_disagreement(votes).double().numpy(),
            member_votes=votes.numpy() if keep_votes else None,
        )

    @staticmethod
    def concatenate(tables: Sequence[ExampleTable]) -> ExampleTable:
        """Return one table of all examples, in order.

        Args:
            tables: At least one; all with the same columns.

        Raises:
            ValueError: There is none, or some lack columns that others have.
        """
        if not tables:
            raise ValueError("There are no tables to join.")
        if len({tuple(table.columns()) for table in tables}) > 1:
            raise ValueError("The tables do not have the same columns.")
        return ExampleTable(
            **{name: np.concatenate([t.columns()[name] for t in tables]) for name in tables[0].columns()}
        )

    @property
    def correct(self) -> np.ndarray:
        """(N,), whether the prediction is the label.

        Raises:
            ValueError: The labels are not known.
        """
        self.check_labelled()
        return self.prediction == self.label

    def __len__(self) -> int:
        return len(self.prediction)

    def check_labelled(self) -> None:
        """Refuse a table without labels.

        Raises:
            ValueError: The labels are not known.
        """
        if self.label is None:
            raise ValueError("This needs labels, but the table was made without them.")

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns that are there, by name."""
        by_name = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: column for name, column in by_name.items() if column is not None}

    def select(self, indices: np.ndarray) -> ExampleTable:
        """Return a table of some examples.

        Args:
            indices: (K,), in the order wanted; repetitions are allowed.
        """
        return ExampleTable(**{name: column[indices] for name, column in self.columns().items()})

    def to_pandas(self, id2label: dict[int, str] | None = None) -> pandas.DataFrame:
        """Return a data frame with a row for every example, and `vote_0` to `vote_{M-1}` for the votes.

        Args:
            id2label: Class index to name, for predictions, labels and votes; None: indices.
        """
        columns = self.columns()
        votes = columns.pop("member_votes", np.zeros((len(self), 0), dtype=np.int64))
        frame = pandas.DataFrame(columns | {f"vote_{m}": votes[:, m] for m in range(votes.shape[1])})
        if id2label is not None:
            of_classes = [name for name in frame if name in ("prediction", "label") or name.startswith("vote_")]
            frame[of_classes] = frame[of_classes].map(lambda index: id2label[int(index)])
        return frame


def _about_predictions(probabilities: np.ndarray, labels: ArrayLike | None) -> dict[str, np.ndarray]:
    """Return the columns that come from the predictive distribution (N, C)."""
    rows = np.arange(len(probabilities))
    prediction = probabilities.argmax(1)
    columns = {"prediction": prediction, "probability": probabilities[rows, prediction]}
    if labels is not None:
        labels = checked_labels(labels, *probabilities.shape)
        label_probability = probabilities[rows, labels]
        # The sum over classes of (p - onehot)^2 without making the one-hot rows.
        others = (probabilities**2).sum(1) - label_probability**2
        columns |= {
            "label": labels,
            "label_probability": label_probability,
            "squared_error": np.clip(others, 0, None) + (1 - label_probability) ** 2,
        }
    return columns
