"""Which columns of a dataset hold the inputs and the labels of a task."""

from collections.abc import Iterable, Sequence

# The usual columns of inputs; the first of these groups that is there.
_INPUT_COLUMNS = {
    "text-classification": (
        ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"),
        ("text", "text_pair"), ("sentence",), ("text",),
    ),
    "token-classification": (("tokens",), ("words",)),
    "multiple-choice": (("question", "choices"), ("question", "options"), ("ctx", "endings"), ("text", "choices")),
    "image-classification": (("image",), ("img",)),
}  # fmt: skip
_LABEL_COLUMNS = {"token-classification": ("ner_tags", "pos_tags", "tags", "labels")}
_USUAL_LABEL_COLUMNS = ("label", "labels", "fine_label")


def input_columns_of(task: str, given: Sequence[str], available: list[str]) -> list[str]:
    """Return the columns of the inputs.

    Args:
        task: Name of the task.
        given: Their names; none: the first usual ones that are there.
        available: The columns of the data.

    Raises:
        ValueError: There are none, or not those that were given.
    """
    if given:
        _check_columns(given, available)
        return list(given)
    usual = _INPUT_COLUMNS[task]
    found = next((list(columns) for columns in usual if set(columns) <= set(available)), None)
    if found is None:
        raise ValueError(
            f"No column for the inputs: for {task} that is {' or '.join(map(' and '.join, usual))}, but there are "
            f"{available}. Name the right one (on the command line --text-column or --image-column)."
        )
    return found


def label_column_of(task: str, given: str | None, available: list[str]) -> str:
    """Return the column of the labels.

    Args:
        task: Name of the task.
        given: Its name; None: the first usual one that is there.
        available: The columns of the data.

    Raises:
        ValueError: There is none, or not the one that was given.
    """
    if given:
        _check_columns([given], available)
        return given
    usual = _LABEL_COLUMNS.get(task, _USUAL_LABEL_COLUMNS)
    found = next((column for column in usual if column in available), None)
    if found is None:
        raise ValueError(
            f"No column for the labels: none of {', '.join(usual)} is among {available}. Name the right one (on the "
            "command line --label-column); figures cannot be made of data without labels."
        )
    return found


def _check_columns(given: Iterable[str], available: list[str]) -> None:
    missing = sorted(set(given) - set(available))
    if missing:
        raise ValueError(f"The data has no column {', '.join(missing)}, only {available}.")
