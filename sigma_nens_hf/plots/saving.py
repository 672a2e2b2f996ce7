"""A figure and the numbers behind it, written to disk together."""

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pandas
from matplotlib.figure import Figure

# What keeps the time of writing out of the file.
_METADATA = {".png": {}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


def save_figure(figure: Figure, numbers: pandas.DataFrame, path: str | os.PathLike | None) -> None:
    """Write a figure, and the numbers behind it as `<stem>.csv` beside it; both or none.

    Args:
        figure: The figure.
        numbers: What it shows, a row for every mark or bar.
        path: Where to; the suffix decides the format. Missing folders are made. None: nothing is written.

    Raises:
        ValueError: The suffix names no format that is supported.
        IsADirectoryError: A folder is where one of the files should be.
        OSError: The files cannot be written.
    """
    if path is None:
        return
    path = Path(path)
    if path.suffix.lower() not in _METADATA:
        raise ValueError(f"A figure is saved as one of {', '.join(_METADATA)}, got {str(path)!r}.")
    targets = (path, path.with_suffix(".csv"))
    for target in targets:
        if target.is_dir():
            raise IsADirectoryError(f"{str(target)!r} is a folder; give the figure another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as workplace:
        written = [Path(workplace, target.name) for target in targets]
        figure.savefig(written[0], metadata=_METADATA[path.suffix.lower()])
        numbers.to_csv(written[1], index=False, lineterminator="\n")
        with ExitStack() as undo:
            for unfinished, target in zip(written, targets, strict=True):
                kept = shutil.copy2(target, f"{unfinished}.kept") if target.exists() else None
                os.replace(unfinished, target)
                if kept is not None:
                    undo.callback(os.replace, kept, target)
                else:
                    undo.callback(target.unlink)
            undo.pop_all()
