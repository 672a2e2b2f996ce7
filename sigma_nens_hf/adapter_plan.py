"""What an adapter is going to change in a model, settled before anything is changed."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from .architectures import task_of_class
from .config import SigmaNormConfig
from .heads import HeadPlan, has_output_per_label, plan_head
from .labels import LabelSet
from .norms import find_norms
from .shared_modules import resolve_shared_modules


@dataclass(frozen=True)
class AdapterPlan:
    """What an adapter is going to change.

    Attributes:
        norms: Names of the norms that carry members.
        head: What becomes of the head's projections.
        labels: The labels that the model will speak of.
    """

    norms: frozenset[str]
    head: HeadPlan
    labels: LabelSet


def plan_adapter(model: PreTrainedModel, config: SigmaNormConfig, base_labels: LabelSet) -> AdapterPlan:
    """Check a config against a model, and fix in it what it leaves open.

    Args:
        model: The base model, with or without sigma-norm adapters on it.
        config: The adapter's config, which is completed.
        base_labels: The labels that the model came with.

    Raises:
        ValueError: The config does not fit the model; the message names the cause.
    """
    model_type = model.config.model_type
    if config.base_model_type not in (None, model_type):
        raise ValueError(
            f"The adapter was made for a base of type {config.base_model_type!r}, this one is {model_type!r} "
            f"({type(model).__name__})."
        )
    head = plan_head(model, config)
    norms = find_norms(model, config)
    if config.num_adapted_norms not in (None, len(norms)):
        raise ValueError(
            f"The adapter was made for a base with {config.num_adapted_norms} adapted norms, in this one "
            f"({type(model).__name__}) there are {len(norms)}. Load it over its own base, "
            f"{config.base_model_name_or_path}, and make a new SigmaNormConfig for every other one."
        )
    shared = resolve_shared_modules(model, config, head, norms)
    labels = LabelSet.of_adapter(config, default=base_labels).for_task(task_of_class(type(model).__name__))
    if head.architecture.pools_last_token:
        _settle_padding(model, config)
    config.resolve_shared_modules(shared)
    config.problem_type = labels.problem_type
    if has_output_per_label(model):
        config.num_labels = labels.num_labels
        config.id2label, config.label2id = labels.id2label, labels.label2id
    return AdapterPlan(frozenset(norms), head, labels)


def _settle_padding(model: PreTrainedModel, config: SigmaNormConfig) -> None:
    """Let model and adapter agree on the padding token; members make a batch even of a single example."""
    text_config = model.config.get_text_config()
    if text_config.pad_token_id is None:
        text_config.pad_token_id = config.pad_token_id
    if text_config.pad_token_id is None:
        raise ValueError(
            f"{type(model).__name__} predicts from the last token before the padding, but its config names no padding "
            "token. Set `model.config.pad_token_id`, to `tokenizer.eos_token_id` where there is no other."
        )
    config.pad_token_id = text_config.pad_token_id
