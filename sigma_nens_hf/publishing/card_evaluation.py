"""The figures of an evaluation, as a model card shows them."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import pandas

from ..adapter_info import read_report
from ..evaluation.files import EXAMPLES, METRICS, RELIABILITY
from ..evaluation.report import METRIC_TITLES
from ..metrics import TABLE_METRICS, ExampleTable, PairedDifference, paired_bootstrap

_DATA_FILES = (".csv", ".json", ".jsonl", ".parquet")
_NEEDED = {"dataset": str, "num_members": int, "resamples": int, "seed": int, "metrics": dict}


@dataclass(frozen=True)
class CardEvaluation:
    """What an adapter showed on a dataset.

    Attributes:
        dataset: Id of the dataset on the Hub, or the name of a local file or folder without its path.
        dataset_config: Its configuration.
        split: Its split.
        num_rows: Number of evaluated examples or words.
        temperature: Softmax temperature of the pooled prediction.
        metrics: By metric `value` and, where known, `lower`, `upper` and `noise_floor_95`.
        single_metrics: Values of a single model by metric, empty where there is none.
        differences: By metric the ensemble's minus the single model's, on the same examples.
        ood_dataset: The dataset from another distribution, None where there is none.
        ood_auroc: By score how well it tells the two apart.
        reliability: Picture of the reliability diagram.
    """

    dataset: str
    dataset_config: str | None = None
    split: str | None = None
    num_rows: int | None = None
    temperature: float | None = None
    metrics: dict[str, dict[str, float]] | None = None
    single_metrics: dict[str, float] | None = None
    differences: dict[str, PairedDifference] | None = None
    ood_dataset: str | None = None
    ood_auroc: dict[str, float] | None = None
    reliability: Path | None = None


def read_evaluation(
    folder: str | os.PathLike, single_folder: str | os.PathLike | None, num_members: int
) -> CardEvaluation:
    """Read what `sigma-nens evaluate` wrote.

    Args:
        folder: Its folder.
        single_folder: That of a single model on the same examples, for differences; None: there is none.
        num_members: Number of members of the adapter that it is to be of.

    Raises:
        ValueError: There is no evaluation, it is of another number of members, or the two are not of the same examples.
    """
    report, single = _report(folder), None if single_folder is None else _report(single_folder)
    if report["num_members"] != num_members:
        raise ValueError(
            f"The evaluation in {folder} is of {report['num_members']} members, the adapter has {num_members}. "
            "Evaluate this one, or name the evaluation that is its own."
        )
    differences = None if single is None else _differences(Path(folder), Path(single_folder), report)
    picture = Path(folder, RELIABILITY)
    out_of_distribution = report.get("out_of_distribution") or {}
    return CardEvaluation(
        dataset=public_name(report["dataset"]),
        dataset_config=report.get("dataset_config"),
        split=report.get("split"),
        num_rows=report.get("num_rows"),
        temperature=report.get("temperature"),
        metrics=_known(report["metrics"]),
        single_metrics=None if single is None else {n: of["value"] for n, of in _known(single["metrics"]).items()},
        differences=differences,
        ood_dataset=public_name(report.get("ood_dataset")),
        ood_auroc={
            score: of_score["auroc"] for score, of_score in out_of_distribution.items() if _is_finite(of_score["auroc"])
        }
        or None,
        reliability=picture if picture.is_file() else None,
    )


def evaluation_of_trainer(logs: Sequence[dict[str, float]], dataset: str | None) -> CardEvaluation | None:
    """Return the last figures that a trainer logged of its evaluation data, None where it has not evaluated.

    Args:
        logs: The trainer's `state.log_history`.
        dataset: Name of the data.
    """
    last = next((entry for entry in reversed(logs) if "eval_nll" in entry), None)
    if last is None:
        return None
    metrics = {name: {"value": last[f"eval_{name}"]} for name in METRIC_TITLES if f"eval_{name}" in last}
    return CardEvaluation(dataset or "the trainer's evaluation data", metrics=metrics)


def _report(folder: str | os.PathLike) -> dict[str, Any]:
    report = read_report(Path(folder, METRICS))
    if report is None or not all(isinstance(report.get(name), kind) for name, kind in _NEEDED.items()):
        raise ValueError(f"{folder} holds no whole evaluation by `sigma-nens evaluate`.")
    return report


def _known(metrics: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Keep the figures that are finite numbers; infinite ones are null in the file."""
    known = {
        name: {figure: value for figure, value in of_metric.items() if _is_finite(value)}
        for name, of_metric in metrics.items()
        if name in METRIC_TITLES
    }
    return {name: of_metric for name, of_metric in known.items() if "value" in of_metric}


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def public_name(dataset: str | None) -> str | None:
    """Return the name of a dataset without the path that it has on this machine.

    Args:
        dataset: An id on the Hub, or a local file or folder; None: there is none.
    """
    if dataset is None:
        return None
    is_hub_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset) and Path(dataset).suffix not in _DATA_FILES
    return dataset if is_hub_id and not os.path.exists(dataset) else PureWindowsPath(dataset).name


def _differences(folder: Path, single_folder: Path, report: dict[str, Any]) -> dict[str, PairedDifference]:
    frames = []
    for path in (folder / EXAMPLES, single_folder / EXAMPLES):
        if not path.is_file():
            raise ValueError(f"{path} is missing, so the two evaluations cannot be compared.")
        # As text: a class may be called "1" or "nan".
        try:
            frames.append(pandas.read_csv(path, dtype={"prediction": str, "label": str}, keep_default_na=False))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}).") from error
        missing = {"prediction", "label", "probability"} - set(frames[-1])
        if missing:
            raise ValueError(f"{path} is damaged: it lacks the columns {sorted(missing)}.")
    where = [[name for name in ("example", "word") if name in frame] for frame in frames]
    if where[0] != where[1] or not frames[0][[*where[0], "label"]].equals(frames[1][[*where[0], "label"]]):
        raise ValueError(f"{folder} and {single_folder} are not evaluations of the same examples.")
    ours, theirs = map(_table, frames)
    return {
        name: paired_bootstrap(ours, theirs, metric, n_resamples=report["resamples"], seed=report["seed"])
        for name, metric in TABLE_METRICS.items()
    }


def _table(frame: pandas.DataFrame) -> ExampleTable:
    classes = pandas.Index(np.unique([*frame["label"], *frame["prediction"]]))
    of_classes = {name: classes.get_indexer(frame[name]) for name in ("prediction", "label")}
    numbers = {field.name: frame[field.name].to_numpy() for field in fields(ExampleTable) if field.name in frame}
    return ExampleTable(**(numbers | of_classes))
