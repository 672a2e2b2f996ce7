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
        ValueError: A label is no class, or the data has a name that the model lacks.
    """
    labels = set(labels)
    names = {label: str(label) for label in labels} if label_names is None else dict(enumerate(label_names))
    model_has_names = class_names is not None and not _are_generic([class_names[i] for i in range(len(class_names))])
    if model_has_names:
        # Also of numbers and of the true and false that csv files are read as, where the classes are called so.
        matched = _matched(names, class_names)
        if matched is not None:
            return matched
        if (label_names is not None and not _are_generic(label_names)) or any(isinstance(n, str) for n in labels):
            raise ValueError(_what_is_lacking(names, class_names))
    if label_names is not None:
        return {index: _index(index, class_names) for index in names}
    return {label: _index(_number_in(label), class_names) for label in labels}


def _matched(names: dict[Any, str], class_names: dict[int, str]) -> dict[Any, int] | None:
    """Match names of labels to names of classes; None if a name is that of no class."""
    fold = _folding([*names.values()], [*class_names.values()])
    class_by_name = {fold(name): index for index, name in class_names.items()}
    if any(fold(name) not in class_by_name for name in names.values()):
        return None
    return {label: class_by_name[fold(name)] for label, name in names.items()}


def _what_is_lacking(names: dict[Any, str], class_names: dict[int, str]) -> str:
    known = {name.casefold() for name in class_names.values()}
    lacking = sorted(name for name in names.values() if name.casefold() not in known)
    return (
        f"The model has no classes {_some(lacking)}, which the data's labels are named; it has "
        f"{_some([*class_names.values()])}. Is this the data that it was trained for? If so, rename the labels."
    )


def _folding(*groups: list[str]) -> Callable[[str], str]:
    """Return how names are to be compared: by upper and lower case alike, unless that makes two names one."""
    if all(len({name.casefold() for name in group}) == len(set(group)) for group in groups):
        return str.casefold
    return str


def _are_generic(names: list[str]) -> bool:
    """Whether names say nothing but the index."""
    return any(names == [f"{prefix}{index}" for index in range(len(names))] for prefix in ("LABEL_", ""))


def _number_in(name: Any) -> Any:
    """The class index that a string such as "2" or "LABEL_2" names, or what was given."""
    if not isinstance(name, str):
        return name
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
