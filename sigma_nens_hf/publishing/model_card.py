"""The model card of an adapter, from the template beside this module."""

import math
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..adapter_info import AdapterInfo
from ..config import SigmaNormConfig
from ..evaluation.report import METRIC_TITLES
from ..regularizer import expected_sharing
from .base import PublishedBase
from .card_evaluation import CardEvaluation, public_name

MARKER = "<!-- made by sigma_nens_hf"
_TEMPLATE = Path(__file__).with_name("model_card.md")
_TAGS = ("sigma-n-ens", "ensemble", "calibration", "uncertainty", "peft")
_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$!])")
_MOST_LABELS = 20
_EXAMPLES = {
    "text-classification": '["A small miracle of a film."]',
    "token-classification": '["Ada Lovelace lived in London."]',
    "multiple-choice": '[("The sky is", ["blue.", "a fish."])]',
    "image-classification": '["picture.png"]',
}
_WITHOUT_PIPELINE = ("multiple-choice",)
_NOT_OF_RECIPE = ("dataset", "train_examples", "diversity_weight", "diversity_temperature")


def model_card(
    repo_id: str,
    info: AdapterInfo,
    config: SigmaNormConfig,
    base: PublishedBase,
    evaluation: CardEvaluation | None,
    metadata: dict[str, Any],
) -> ModelCard:
    """Return the card of an adapter.

    Args:
        repo_id: Its repository.
        info: What its files say.
        config: Its config.
        base: Its base model on the Hub.
        evaluation: What it showed, None where that is not known.
        metadata: Fields of `huggingface_hub.ModelCardData` over what is found.
    """
    name = repo_id.rpartition("/")[2]
    found = {
        "library_name": "peft",
        "pipeline_tag": info.task,
        "base_model": base.repo_id,
        "license": base.license,
        "license_name": base.license_name,
        "license_link": base.license_link,
    }
    if "license" in metadata:
        found |= {"license_name": None, "license_link": None}
    tags = list(dict.fromkeys([*_TAGS, *(metadata.get("tags") or [])]))
    results = [] if evaluation is None else _results(info.task, evaluation)
    measured = {"eval_results": results, "model_name": name} if results else {}
    data = ModelCardData(**(found | metadata | {"tags": tags} | measured))
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        title=escaped(name),
        repo_id=repo_id,
        num_members=info.num_members,
        has_member_heads=info.parts["heads"].parameters > 0,
        facts=_facts(info, config, base),
        task=info.task,
        example=_EXAMPLES[info.task],
        has_pipeline=info.task not in _WITHOUT_PIPELINE,
        processor_argument="image_processor" if info.task.startswith("image") else "tokenizer",
        base_model_class=info.base_model_class,
        num_labels=config.num_labels,
        is_regression=config.problem_type == "regression",
        kind="multi-label classification" if config.problem_type == "multi_label_classification" else "classification",
        temperature=info.calibration_temperature,
        recipe=_recipe(info.training_recipe),
        versions=", ".join(f"{package} {version}" for package, version in info.versions.items() if version),
        license_note=_license_note(base, metadata),
        **_figures(evaluation),
    )


def escaped(text: Any) -> str:
    """Return text as a markdown table shows it: on one line, with nothing in it taken for markup.

    Args:
        text: Anything.
    """
    line = re.sub(r"\s+", " ", str(text)).strip()
    return _SPECIAL.sub(r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _facts(info: AdapterInfo, config: SigmaNormConfig, base: PublishedBase) -> dict[str, str]:
    recipe = info.training_recipe or {}
    tau, members = recipe.get("diversity_temperature"), info.num_members
    preferred = "" if tau is None else f"; the regulariser alone would have {expected_sharing(tau, members)}"
    total = sum(part.bytes for part in info.parts.values()) / 1024
    branch = "the inputs" if info.branch_layer is None else f"block {info.branch_layer}, over a {info.prefix} prefix"
    temperature = info.calibration_temperature
    data = public_name(recipe.get("dataset")) or "not known"
    examples = recipe.get("train_examples")
    facts = {
        "task": info.task,
        "base model": f"[{escaped(base.repo_id)}](https://huggingface.co/{base.repo_id}) at revision `{base.revision}`",
        "members": str(members),
        "members start at": branch,
        "classes": _labels(info.labels),
        "stored": f"{total:,.0f} KiB, for {info.num_adapted_norms} norms and the head",
        "training data": escaped(data) + (f", {examples:,} examples" if examples else ""),
        "diversity temperature tau": "not known" if tau is None else f"{tau:.4g}",
        "weight lambda": str(recipe.get("diversity_weight", "not known")),
        "gates": f"depth {config.gate_depth:g}, {'trained' if config.train_scale else 'fixed'} scale",
        "members that own a feature": f"{info.sharing:.2f} of {members} on average{preferred}",
        "calibration temperature": "not fitted" if temperature is None else f"{temperature:.4g}",
    }
    return facts


def _labels(labels: list[str] | None) -> str:
    if labels is None:
        return "the choices of each question"
    rest = len(labels) - _MOST_LABELS
    return ", ".join(map(escaped, labels[:_MOST_LABELS])) + (f" and {rest:,} more" if rest > 0 else "")


def _recipe(recipe: dict[str, Any] | None) -> dict[str, str]:
    known = {name: value for name, value in (recipe or {}).items() if value is not None and name not in _NOT_OF_RECIPE}
    return {name.replace("_", " "): escaped(value) for name, value in known.items()}


def _license_note(base: PublishedBase, metadata: dict[str, Any]) -> str:
    if metadata.get("license"):
        return f"Licence of the adapter: {escaped(metadata['license'])}; that of the base model holds for the base."
    if base.license is None:
        return "The base model names no licence."
    name = base.license_name or base.license
    return f"The licence is the base model's: {escaped(name)}."


def _figures(evaluation: CardEvaluation | None) -> dict[str, Any]:
    """Return what the template wants to know of an evaluation."""
    if evaluation is None or not evaluation.metrics:
        return {"metrics": None}
    where = [evaluation.dataset, evaluation.dataset_config, evaluation.split]
    has_single, used = evaluation.single_metrics is not None, evaluation.temperature
    return {
        "metrics": [_row(name, figures, evaluation) for name, figures in evaluation.metrics.items()],
        "dataset": ", ".join(escaped(part) for part in where if part),
        "num_rows": f"{evaluation.num_rows:,}" if evaluation.num_rows else None,
        "used_temperature": None if used is None else f"{used:.4g}",
        "has_single": has_single,
        "ood_dataset": escaped(evaluation.ood_dataset),
        "ood": ", ".join(
            f"{auroc:.3f} by {score.replace('_', ' ')}" for score, auroc in (evaluation.ood_auroc or {}).items()
        ),
        "has_picture": evaluation.reliability is not None,
    }


def _row(name: str, figures: dict[str, float], evaluation: CardEvaluation) -> list[str]:
    interval = f"{figures['lower']:.4f} to {figures['upper']:.4f}" if {"lower", "upper"} <= figures.keys() else ""
    floor = f"{figures['noise_floor_95']:.4f}" if "noise_floor_95" in figures else ""
    row = [METRIC_TITLES[name], f"{figures['value']:.4f}", interval, floor]
    if evaluation.single_metrics is None:
        return row
    difference = (evaluation.differences or {}).get(name)
    if difference is not None and all(map(math.isfinite, difference)):
        return [*row, f"{difference.difference:+.4f} ({difference.lower:+.4f} to {difference.upper:+.4f})"]
    single = evaluation.single_metrics.get(name)
    return [*row, "" if single is None else f"{figures['value'] - single:+.4f}"]


def _results(task: str, evaluation: CardEvaluation) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=task,
            dataset_type=evaluation.dataset,
            dataset_name=evaluation.dataset,
            dataset_config=evaluation.dataset_config,
            dataset_split=evaluation.split,
            metric_type=name,
            metric_name=METRIC_TITLES[name],
            metric_value=figures["value"],
        )
        for name, figures in (evaluation.metrics or {}).items()
    ]
