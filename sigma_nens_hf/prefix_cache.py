"""What the frozen blocks below the branch make of every training example, computed once and kept on disk.

A cache is a folder named after everything that its content hangs on: weights and config of the prefix, precision,
examples, processing, versions. It holds the examples in parts, safetensors files that are mapped into memory. A part
appears under its name when it is whole, so a build that was killed goes on with the first part that is missing.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

PART_SIZE = 256
_FEATURES, _ENDS, _EXTRA = "features", "ends", "extra."
_SECONDS_TO_WRITE_A_PART = 3600


class PrefixCache:
    """The features of all examples of a dataset.

    Args:
        folder: Folder of all caches.
        key: Name of this one; see `prefix_cache_key.cache_key`.
        num_examples: Number of examples N.
    """

    def __init__(self, folder: str | os.PathLike, key: str, num_examples: int):
        self.folder = Path(folder, key)
        self.num_examples = num_examples
        self._files: dict[int, tuple[safe_open, torch.Tensor]] = {}  # with the ends of their examples

    def __getstate__(self) -> dict:
        return {**vars(self), "_files": {}}  # a worker process opens files of its own

    def missing_parts(self) -> list[range]:
        """Return the examples of the parts that are not there, or not whole."""
        parts = [
            range(start, min(start + PART_SIZE, self.num_examples)) for start in range(0, self.num_examples, PART_SIZE)
        ]
        return [part for part in parts if not self._is_whole(part)]

    def write_part(
        self, part: range, features: Sequence[torch.Tensor], extras: dict[str, Sequence[torch.Tensor]]
    ) -> None:
        """Write the features of one part.

        Args:
            part: Its examples, as of `missing_parts`.
            features: Of each example, (L, ...), with an L of its own.
            extras: What else is kept of each example, by name; of one shape each.
        """
        tensors = {
            _FEATURES: torch.cat(list(features)).cpu().contiguous(),
            _ENDS: torch.tensor([len(rows) for rows in features]).cumsum(0),
            **{f"{_EXTRA}{name}": torch.stack(list(values)).cpu() for name, values in extras.items()},
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=self.folder, suffix=".unfinished")
        try:
            os.close(handle)
            save_file(tensors, unfinished, self._metadata(part))
            with open(unfinished, "rb+") as file:
                os.fsync(file.fileno())
            os.chmod(unfinished, self.folder.stat().st_mode & 0o666)  # not the owner's alone, as temporary files are
            os.replace(unfinished, self._path(part))
        finally:
            if os.path.exists(unfinished):
                os.remove(unfinished)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the features (L, ...) of an example, and what else is kept of it."""
        number, row = divmod(index, PART_SIZE)
        if number not in self._files:
            start = number * PART_SIZE
            path = self._path(range(start, min(start + PART_SIZE, self.num_examples)))
            file = safe_open(path, "pt")
            self._files[number] = file, file.get_tensor(_ENDS)
        file, ends = self._files[number]
        first, last = ends[row - 1].item() if row else 0, ends[row].item()
        extras = {
            name.removeprefix(_EXTRA): file.get_slice(name)[row : row + 1][0]
            for name in file.keys()  # noqa: SIM118 - no mapping
            if name.startswith(_EXTRA)
        }
        return file.get_slice(_FEATURES)[first:last], extras

    def remove_unfinished(self) -> None:
        """Remove what killed builds have left of parts that they did not finish; others may be at work right now."""
        for path in self.folder.glob("*.unfinished"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _SECONDS_TO_WRITE_A_PART:
                    path.unlink()

    def _path(self, part: range) -> Path:
        return self.folder / f"part-{part.start // PART_SIZE:06d}.safetensors"

    def _metadata(self, part: range) -> dict[str, str]:
        return {"part": f"{self.folder.name}: {part.start} to {part.stop}"}

    def _is_whole(self, part: range) -> bool:
        try:
            with safe_open(self._path(part), "pt") as file:  # which checks the file's length
                return file.metadata() == self._metadata(part)
        except (OSError, SafetensorError):
            return False


def size_in_bytes(lengths: Iterator[int], row: torch.Tensor) -> int:
    """Return the size of a cache.

    Args:
        lengths: Number of rows of every example, such as its tokens.
        row: One row, of the shape and precision of all.
    """
    return sum(lengths) * row.numel() * row.element_size()
