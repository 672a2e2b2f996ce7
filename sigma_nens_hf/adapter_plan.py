"""What an adapter is going to change in a model, settled before anything is changed."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from .architectures import task_of_class
from .config import SigmaNormConfig
from .heads import HeadPlan, has_output_per_label, plan_head
from .labels import LabelSet
from .norms import find_norms
from .padding import padding_token
from .shared_modules import resolve_shared_modules


@dataclass(frozen=True)
class AdapterPlan:
    """What an adapter is going to change.

    Attributes:
        norms: Names of the norms that carry members.
        head: What becomes of the head's projections.
    """

    norms: frozenset[str]
    head: HeadPlan


def plan_adapter(model: PreTrainedModel, config: SigmaNormConfig, base_labels: LabelSet) -> AdapterPlan:
    """Check a config against a model, and fix in it what it leaves open.

    Args:
        model: The base model, with or without sigma-norm adapters on it.
        config: The adapter's config, which is completed.
        base_labels: The labels that the model came with.

    Raises:
        ValueError: The config does not fit the model; the message names the cause.
    """
    model_type, model_class = model.config.model_type, type(model).__name__
    if config.base_model_type not in (None, model_type):
        raise ValueError(
            f"The adapter was made for a base of type {config.base_model_type!r}, this one is {model_type!r} "
            f"({model_class})."
        )
    if config.base_model_class not in (None, model_class):
        raise ValueError(f"The adapter was made for a {config.base_model_class}, this base is a {model_class}.")
    head = plan_head(model, config)
    norms = find_norms(model, config)
    if config.num_adapted_norms not in (None, len(norms)):
        raise ValueError(
            f"The adapter was made for a base with {config.num_adapted_norms} adapted norms, in this one "
            f"({model_class}) there are {len(norms)}. Load it over its own base, "
            f"{config.base_model_name_or_path}, and make a new SigmaNormConfig for every other one."
        )
    shared = resolve_shared_modules(model, config, head, norms)
    labels = LabelSet.of_adapter(config, default=base_labels).for_task(task_of_class(model_class))
    if head.architecture.pools_last_token:
        config.pad_token_id = padding_token(model, config.pad_token_id)
    config.resolve_shared_modules(shared)
    config.problem_type = labels.problem_type
    if has_output_per_label(model):
        config.num_labels = labels.num_labels
        config.id2label, config.label2id = labels.id2label, labels.label2id
    return AdapterPlan(frozenset(norms), head)
