"""The tables that figures of predictions are made of."""

from collections.abc import Mapping

import pandas

from ..metrics.example_table import ExampleTable
from .style import SERIES_STYLES


def check_table(table: ExampleTable, name: str) -> None:
    """Refuse what is no table, or one of no examples.

    Args:
        table: The table.
        name: What to call it in messages.

    Raises:
        TypeError: It is none.
        ValueError: It has no examples.
    """
    if not isinstance(table, ExampleTable):
        raise TypeError(
            f"{name} must be an ExampleTable, got {type(table).__name__}. Make one with ExampleTable.of_probabilities "
            "or ExampleTable.of_members."
        )
    if not len(table):
        raise ValueError(f"{name} has no examples.")


def labelled_tables(tables: ExampleTable | Mapping[str, ExampleTable]) -> dict[str, ExampleTable]:
    """Return labelled tables by the names of their models; one without a name is called "model".

    Args:
        tables: A labelled table; or up to 6 by the names of their models.

    Raises:
        TypeError: It is neither.
        ValueError: There is no table, or more than 6; one is empty or without labels; or a name is not fit for a
            legend.
    """
    by_name = dict(tables) if isinstance(tables, Mapping) else {"model": tables}
    if not 1 <= len(by_name) <= len(SERIES_STYLES):
        raise ValueError(f"A figure compares 1 to {len(SERIES_STYLES)} models, got {len(by_name)}.")
    for name, table in by_name.items():
        if not isinstance(name, str) or not name or name.startswith("_"):
            raise ValueError(f"The name of a model must be text that does not begin with '_', got {name!r}.")
        check_table(table, f"The table of {name!r}")
        table.check_labelled()
    return by_name


def long_format(parts: dict[str, pandas.DataFrame], name: str) -> pandas.DataFrame:
    """Return one frame of all parts, whose first column holds the name of the part.

    Args:
        parts: Frames of the same columns by name.
        name: What to call the first column.
    """
    return pandas.concat(parts, names=[name]).reset_index(name)
