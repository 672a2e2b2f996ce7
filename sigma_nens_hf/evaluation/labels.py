"""From the labels of a dataset, whatever it calls them, to the classes of a model."""

from collections.abc import Callable, Iterable
from typing import Any

_MOST_NAMES_SHOWN = 5


def classes_of_labels(
    labels: Iterable[Any], label_names: list[str] | None, class_names: dict[int, str] | None
) -> dict[Any, int]:
    """Return the class of a model for every label of a dataset.

    Names are matched, in whatever order the two have them, by upper and lower case alike. Labels are taken for class
    indices where one side has no names of its own: whole numbers in the data, or `LABEL_0`, `LABEL_1`, ... in a model.

    Args:
        labels: The labels that occur, as they stand in the data.
        label_names: The names of whole-number labels, by their index; None: they have none.
        class_names: The model's classes, index to name; None: they are choices, which have neither names nor a fixed
            number.

    Raises:
        ValueError: A label says that there is none, is no class, or the data has a name that the model lacks.
    """
    labels = set(labels)
    if labels & {None, -1}:
        raise ValueError(
            "The data holds labels of -1 or none at all: it is an unlabelled split, as many test splits are. Evaluate "
            "on another one."
        )
    if all(isinstance(label, str) for label in labels):
        names = {label: label for label in labels}
    elif label_names is not None and not _are_generic(label_names):
        names = dict(enumerate(label_names))
    else:
        return {label: _index(label, class_names) for label in labels}
    if class_names is None or _are_generic([class_names[index] for index in range(len(class_names))]):
        if label_names is None:
            return {label: _index(_number_in(label), class_names) for label in labels}
        return {index: _index(index, class_names) for index in names}
    return _matched(names, class_names)


def _matched(names: dict[Any, str], class_names: dict[int, str]) -> dict[Any, int]:
    """Match names of labels to names of classes."""
    fold = _folding([*names.values()], [*class_names.values()])
    class_by_name = {fold(name): index for index, name in class_names.items()}
    lacking = sorted(name for name in names.values() if fold(name) not in class_by_name)
    if lacking:
        raise ValueError(
            f"The model has no classes {_some(lacking)}, which the data's labels are named; it has "
            f"{_some([*class_names.values()])}. Is this the data that it was trained for?"
        )
    return {label: class_by_name[fold(name)] for label, name in names.items()}


def _folding(*groups: list[str]) -> Callable[[str], str]:
    """Return how names are to be compared: by upper and lower case alike, unless that makes two names one."""
    if all(len({name.casefold() for name in group}) == len(set(group)) for group in groups):
        return str.casefold
    return str


def _are_generic(names: list[str]) -> bool:
    """Whether names say nothing but the index."""
    return any(names == [f"{prefix}{index}" for index in range(len(names))] for prefix in ("LABEL_", ""))


def _number_in(name: str) -> Any:
    """The class index that a string such as "2" or "LABEL_2" names, or the string."""
    digits = name.removeprefix("LABEL_")
    return int(digits) if digits.isdecimal() else name


def _index(label: Any, class_names: dict[int, str] | None) -> int:
    is_index = isinstance(label, int) or (isinstance(label, float) and label.is_integer())
    if not is_index:
        raise ValueError(
            f"The label {label!r} is neither the name of one of the model's classes nor a class index. (Numbers to be "
            "estimated and sets of labels cannot be evaluated here.)"
        )
    if label < 0 or (class_names is not None and label >= len(class_names)):
        raise ValueError(
            f"The data has a class {int(label)}, but the model's {len(class_names or ())} classes are counted from 0."
        )
    return int(label)


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_MOST_NAMES_SHOWN]))
    rest = len(names) - _MOST_NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown
