"""Takes one plain model out of an ensemble, into a folder that transformers loads by itself."""

import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from .hub import load_ensemble


def extract_to_folder(
    adapter: str | os.PathLike, output_dir: str | os.PathLike, member: int | Literal["mean"], **kwargs: Any
) -> None:
    """Write one member, or the mean of all, as a plain transformers model with its processor and labels.

    Args:
        adapter: A folder or a repository on the Hub.
        output_dir: The folder, new or empty. It is there whole or not at all.
        member: Index of the member, or "mean", as in `extract_mean`.
        **kwargs: As for `load_ensemble`.

    Raises:
        ValueError: The folder holds something, the adapter cannot be loaded, or there is no such member.
    """
    target = Path(output_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is there already and is no empty folder; choose another one.")
    model, processor = load_ensemble(adapter, **kwargs)
    plain = model.merge_and_unload(member=member)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=target.parent) as workplace:
        folder = Path(workplace, "model")
        plain.save_pretrained(folder)
        if processor is not None:
            processor.save_pretrained(folder)
        os.replace(folder, target)
