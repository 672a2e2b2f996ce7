"""What a saved adapter is, read from its files alone: no base model is loaded or built."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft.utils import CONFIG_NAME
from rich.markup import escape
from rich.table import Table
from safetensors import safe_open

from .adapter_files import read_adapter_config
from .adapter_weights import check_finite
from .architectures import ARCHITECTURES, task_of_class
from .config import FROZEN, SigmaNormConfig
from .hub_files import adapter_weights_file, file_of_adapter
from .integrity import check_digest, tensor_digest
from .regularizer import owners_of_features

_SCALER = ".sigma_norm_scaler"
# Parts of the file, by what their keys hold, the first that fits; all else are modules that the members share.
_PARTS = {
    _SCALER: "scalers",
    ".sigma_norm_scale": "scales",
    ".sigma_norm_bias": "biases",
    ".sigma_norm_head_": "heads",
}
_SHARED_MODULES = "shared modules"
_METRICS = "metrics.json"
_MOST_LABELS_SHOWN = 10


@dataclass(frozen=True)
class PartSize:
    """Size of a part of the file.

    Attributes:
        parameters: Number of parameters.
        bytes: Their bytes.
    """

    parameters: int
    bytes: int


@dataclass(frozen=True)
class AdapterInfo:
    """What a saved adapter is.

    Attributes:
        name: "default", or the subfolder of an adapter that was saved under another name.
        base_model: Id or folder of its base model.
        revision: Revision of that.
        base_model_class: Its class in transformers.
        task: Its task as in `transformers.pipeline`.
        num_members: Number of members M.
        num_adapted_norms: Number of norms that it changes, members' and shared ones.
        branch_layer: First block that carries members; None: all do.
        prefix: What became of the norms before it; None: there are none.
        labels: Names of the classes, by index; None for choices.
        parts: Sizes of the parts of the file.
        sharing: Realised sharing as in `realized_sharing`, the mean over all features.
        sharing_by_norm: The same by norm, in the order of the layers' numbers.
        calibration_temperature: Softmax temperature, None where none was fitted.
        training_recipe: How it was trained, None where that is not known.
        versions: Versions of the packages that made it.
        metrics: Figures of an evaluation in its folder or beside that, by metric; None where there is none.
    """

    name: str
    base_model: str | None
    revision: str | None
    base_model_class: str
    task: str
    num_members: int
    num_adapted_norms: int
    branch_layer: int | None
    prefix: str | None
    labels: list[str] | None
    parts: dict[str, PartSize]
    sharing: float
    sharing_by_norm: dict[str, float]
    calibration_temperature: float | None
    training_recipe: dict[str, Any] | None
    versions: dict[str, str | None]
    metrics: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def adapter_infos(repo_or_dir: str | os.PathLike, **hub_kwargs: Any) -> list[AdapterInfo]:
    """Return what the adapters in a folder are: that of the folder itself, and those of its subfolders.

    Args:
        repo_or_dir: A local folder, or an adapter repository on the Hub.
        **hub_kwargs: `revision`, `token`, `cache_dir`, ... for the Hub.

    Raises:
        ValueError: There is no sigma-norm adapter, or one is damaged.
    """
    folder = Path(repo_or_dir)
    if not folder.is_dir():
        return [_info("default", os.fspath(repo_or_dir), hub_kwargs)]
    subfolders = sorted(path.parent for path in folder.glob(f"*/{CONFIG_NAME}"))
    infos = [_info(subfolder.name, os.fspath(subfolder), {}) for subfolder in subfolders]
    if not infos or (folder / CONFIG_NAME).is_file():
        infos.insert(0, _info("default", os.fspath(folder), {}))
    return infos


def _info(name: str, repo_or_dir: str, hub_kwargs: dict[str, Any]) -> AdapterInfo:
    config = read_adapter_config(repo_or_dir, hub_kwargs)
    if config.base_model_class not in ARCHITECTURES:
        raise ValueError(
            f"The adapter_config.json in {repo_or_dir} names a base model of class {config.base_model_class}, which is "
            "not supported."
        )
    parts, sharing = _read_weights(adapter_weights_file(repo_or_dir, hub_kwargs), config)
    features = torch.cat(list(sharing.values()))
    return AdapterInfo(
        name=name,
        base_model=config.base_model_name_or_path,
        revision=config.revision,
        base_model_class=config.base_model_class,
        task=task_of_class(config.base_model_class),
        num_members=config.num_members,
        num_adapted_norms=config.num_adapted_norms,
        branch_layer=config.branch_layer,
        prefix=None if config.branch_layer is None else config.prefix,
        labels=None if config.id2label is None else [config.id2label[index] for index in range(len(config.id2label))],
        parts=parts,
        sharing=features.mean().item(),
        sharing_by_norm={norm: owners.mean().item() for norm, owners in sharing.items()},
        calibration_temperature=config.calibration_temperature,
        training_recipe=config.training_recipe,
        versions={
            "sigma_nens_hf": config.sigma_nens_hf_version,
            "transformers": config.transformers_version,
            "peft": config.peft_version,
        },
        metrics=_read_metrics(repo_or_dir, hub_kwargs),
    )


def _read_weights(path: str, config: SigmaNormConfig) -> tuple[dict[str, PartSize], dict[str, torch.Tensor]]:
    """Return the sizes of the parts of a file, and by norm how many members own each feature, (D,).

    Raises:
        ValueError: The file is not that of the config, or holds numbers that are not finite.
    """
    sizes = {part: [0, 0] for part in (*_PARTS.values(), _SHARED_MODULES)}
    owners, num_norms, digests = {}, 0, []
    with safe_open(path, "pt") as file:
        for key in sorted(file.keys(), key=_by_number):
            tensor = file.get_tensor(key)
            check_finite(key, tensor)
            digests.append(tensor_digest(tensor))
            size = sizes[next((part for end, part in _PARTS.items() if end in key), _SHARED_MODULES)]
            size[0] += tensor.numel()
            size[1] += tensor.nbytes
            if key.endswith(_SCALER):
                gates = tensor.float().sigmoid()
                num_norms += 1
                if len(gates) == 1 < config.num_members and config.prefix != FROZEN:
                    continue  # a copy that members share
                norm = key.removesuffix(_SCALER).removeprefix("base_model.model.")
                owners[norm] = owners_of_features(gates).float()
                if len(gates) != config.num_members:
                    raise ValueError(
                        f"{path} is of {len(gates)} members, but its adapter_config.json says {config.num_members}."
                    )
    if not owners or num_norms != config.num_adapted_norms:
        raise ValueError(
            f"{path} has gates for {num_norms} norms, but its adapter_config.json says {config.num_adapted_norms}."
        )
    check_digest(digests, config.weights_digest, path)
    return {part: PartSize(*size) for part, size in sizes.items()}, owners


def _by_number(key: str) -> list[tuple[bool, int, str]]:
    """Put layer 10 behind layer 9, where the alphabet has it behind layer 1."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in key.split(".")]


def evaluation_folder(folder: str | os.PathLike) -> Path | None:
    """Return where the evaluation of an adapter is: in its folder, in `evaluation` there, or beside it; None: nowhere.

    Args:
        folder: The adapter's folder.
    """
    places = [Path(folder), Path(folder, "evaluation"), Path(folder).resolve().parent]
    return next((place for place in places if read_report(place / _METRICS) is not None), None)


def read_report(path: Path) -> dict[str, Any] | None:
    """Return the report that `sigma-nens evaluate` wrote, None where the file is another tool's, or there is none.

    Args:
        path: The file.

    Raises:
        ValueError: The file is damaged.
    """
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}).") from error
    metrics = found.get("metrics") if isinstance(found, dict) else None
    # Other tools call their files by this name as well.
    is_ours = isinstance(metrics, dict) and all(isinstance(figures, dict) for figures in metrics.values())
    return found if is_ours else None


def _read_metrics(repo_or_dir: str, hub_kwargs: dict[str, Any]) -> dict[str, Any] | None:
    if os.path.isdir(repo_or_dir):
        folder = evaluation_folder(repo_or_dir)
        return None if folder is None else read_report(folder / _METRICS)["metrics"]
    try:
        path = file_of_adapter(repo_or_dir, _METRICS, hub_kwargs)
    except ValueError:  # without a connection, and without them in the cache
        return None
    report = None if path is None else read_report(Path(path))
    return None if report is None else report["metrics"]


def table_of_info(info: AdapterInfo) -> Table:
    """Return what an adapter is as a table to read.

    Args:
        info: The adapter.
    """
    table = Table("", "", title=f"Adapter {info.name!r}", show_header=False, title_justify="left")
    table.columns[0].overflow = "fold"
    total = PartSize(
        sum(part.parameters for part in info.parts.values()), sum(part.bytes for part in info.parts.values())
    )
    rows = {
        "base model": f"{info.base_model} (revision {info.revision or 'not fixed'})",
        "task": f"{info.task}, {info.base_model_class}",
        "members": str(info.num_members),
        "labels": _labels(info.labels),
        "adapted norms": str(info.num_adapted_norms),
        "members start at": "the inputs"
        if info.branch_layer is None
        else f"block {info.branch_layer}, over a {info.prefix} prefix",
        **{part: _size(size) for part, size in info.parts.items()},
        "in all": _size(total),
        "members that own a feature": f"{info.sharing:.2f} of {info.num_members} on average",
        **{f"  {norm}": f"{value:.2f}" for norm, value in info.sharing_by_norm.items()},
        "calibration temperature": "not fitted"
        if info.calibration_temperature is None
        else f"{info.calibration_temperature:.4g}",
        "training": ", ".join(f"{name} {value}" for name, value in (info.training_recipe or {}).items()) or "not known",
        "metrics": _metrics(info.metrics),
        "made with": ", ".join(f"{package} {version}" for package, version in info.versions.items()),
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _size(size: PartSize) -> str:
    return f"{size.parameters:,} parameters, {size.bytes / 1024:,.1f} KiB"


def _labels(labels: list[str] | None) -> str:
    if labels is None:
        return "the choices of each question"
    rest = len(labels) - _MOST_LABELS_SHOWN
    return ", ".join(labels[:_MOST_LABELS_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _metrics(metrics: dict[str, Any] | None) -> str:
    if metrics is None:
        return "none found"
    values = {name: figures.get("value") for name, figures in metrics.items()}
    shown = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return ", ".join(f"{name} {value:.4g}" for name, value in shown.items()) or "none found"
