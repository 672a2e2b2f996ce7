"""The labels of a task: their names on a model, and whether given ones can be right."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

IGNORED_LABEL = -100
SINGLE_LABEL = "single_label_classification"
_SINGLE_LABEL_TASKS = ("token-classification", "multiple-choice")


@dataclass(frozen=True)
class LabelSet:
    """The labels that a classifier speaks of.

    Attributes:
        num_labels: Number of classes C.
        id2label: Class index to name.
        label2id: Class name to index.
        problem_type: As in transformers; None leaves the choice to the first batch with labels.
    """

    num_labels: int
    id2label: dict[int, str]
    label2id: dict[str, int]
    problem_type: str | None

    @classmethod
    def of_model(cls, model: nn.Module) -> "LabelSet":
        """Read the labels of a transformers model."""
        config = model.config
        id2label = {int(index): name for index, name in config.id2label.items()}
        label2id = dict(config.label2id or {name: index for index, name in id2label.items()})
        return cls(config.num_labels, id2label, label2id, config.problem_type)

    @classmethod
    def of_adapter(cls, config: Any, default: "LabelSet") -> "LabelSet":
        """Read the labels of an adapter's config.

        Args:
            config: A `SigmaNormConfig`.
            default: Stands in for what the config leaves open.
        """
        num_labels = default.num_labels if config.num_labels is None else config.num_labels
        # A head of another size is a new one, for a task of which the base model knows nothing.
        inherited = default.problem_type if num_labels == default.num_labels else None
        if config.id2label is not None:
            id2label = config.id2label
        elif num_labels == default.num_labels:
            id2label = default.consistent_names()
        else:
            id2label = _generic_names(num_labels)
        label2id = {name: index for index, name in id2label.items()}
        return cls(num_labels, id2label, label2id, config.problem_type or inherited)

    def consistent_names(self) -> dict[int, str]:
        """Return a name for each class; published configs may hold names in one of their two maps only, or nonsense."""
        generic = _generic_names(self.num_labels)
        inverse = {index: name for name, index in self.label2id.items()}
        for names in (self.id2label, inverse):
            is_whole = sorted(names) == list(generic) and len(set(names.values())) == len(names)
            if is_whole and names != generic and all(isinstance(name, str) for name in names.values()):
                return names
        return generic

    def for_task(self, task: str) -> "LabelSet":
        """Settle the problem type where a task leaves no choice.

        Args:
            task: Name of the task.

        Raises:
            ValueError: The problem type is not one of the task, or there is a single class to choose from.
        """
        if task not in _SINGLE_LABEL_TASKS:
            if self.problem_type == SINGLE_LABEL and self.num_labels == 1:
                raise ValueError("A single class cannot be told from others; two are num_labels=2.")
            return self
        if self.problem_type not in (None, SINGLE_LABEL):
            raise ValueError(f"problem_type={self.problem_type!r} is not possible for {task}.")
        return replace(self, problem_type=SINGLE_LABEL)

    def put_on_model(self, model: nn.Module) -> None:
        """Set the labels on a transformers model and on its config."""
        model.config.id2label = dict(self.id2label)
        model.config.label2id = dict(self.label2id)
        model.config.problem_type = self.problem_type
        if hasattr(model, "num_labels"):
            model.num_labels = self.num_labels


def _generic_names(num_labels: int) -> dict[int, str]:
    return {index: f"LABEL_{index}" for index in range(num_labels)}


def settle_problem_type(config: Any, labels: torch.Tensor) -> None:
    """Settle what kind of task labels are of, where that is open, as transformers' models do on first sight of them.

    Args:
        config: The config of a transformers model.
        labels: Labels of a batch.
    """
    if config.problem_type is None:
        if config.num_labels == 1:
            config.problem_type = "regression"
        elif labels.is_floating_point():
            config.problem_type = "multi_label_classification"
        else:
            config.problem_type = SINGLE_LABEL


def check_labels(inputs: Mapping[str, Any], num_labels: int | None, problem_type: str | None) -> None:
    """Refuse class indices that name no class.

    Labels on an accelerator are not looked at, which would force a synchronisation; the trainer checks them before
    they get there.

    Args:
        inputs: A batch; its `labels` may have any shape, or be absent.
        num_labels: Number of classes C. None: the classes are the choices of the batch.
        problem_type: As in transformers.

    Raises:
        ValueError: A class index is neither in 0 to C - 1 nor the ignored index -100.
    """
    labels = inputs.get("labels")
    if labels is None or labels.is_floating_point() or labels.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if num_labels is None:
        tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
        num_labels = tokens.shape[1]
    elif num_labels == 1 or problem_type in ("regression", "multi_label_classification"):
        return
    wrong = labels[((labels < 0) & (labels != IGNORED_LABEL)) | (labels >= num_labels)]
    if wrong.numel():
        raise ValueError(
            f"Label {wrong.flatten()[0].item()} names none of the {num_labels} classes (0 to {num_labels - 1}; "
            f"{IGNORED_LABEL} is ignored). Labels of -1 mark an unlabelled test split, which cannot be trained or "
            "reported on."
        )
