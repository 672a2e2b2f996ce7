"""What a folder of results was made with, so that results of other settings are never mixed with them."""

import json
import os
from pathlib import Path
from typing import Any

SETTINGS_FILE = "settings.json"


def remember_settings(output_dir: Path, settings: dict[str, dict[str, Any]], has_begun: bool) -> None:
    """Write down what a folder's run was started with, or check that it is the same now.

    Args:
        output_dir: The folder.
        settings: Values by group and name.
        has_begun: Whether the folder holds results already.

    Raises:
        ValueError: The folder holds a run with other settings, which must not be mixed with this one.
    """
    path = output_dir / SETTINGS_FILE
    if not has_begun or not path.exists():
        output_dir.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
        return
    before = json.loads(path.read_text())
    changed = [
        f"{group}.{name}: {before.get(group, {}).get(name)} then, {value} now"
        for group, values in settings.items()
        for name, value in values.items()
        if before.get(group, {}).get(name) != value
    ]
    if changed:
        raise ValueError(
            f"{output_dir} holds a run with other settings ({'; '.join(changed)}). Choose another output folder, or "
            "delete this one to start anew."
        )


def write_json(path: Path, content: Any) -> None:
    """Write a json file that is there whole or not at all, also where several processes write it.

    Args:
        path: The file.
        content: What it is to hold.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content, indent=2, default=str))
    os.replace(unfinished, path)
