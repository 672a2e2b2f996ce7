"""One call each way: a checkpoint becomes an ensemble, and a saved adapter becomes a ready model."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import transformers
from peft import PeftModel, get_peft_model
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from .adapter_files import read_adapter_config
from .architectures import backbone_name, class_named, task_of_class
from .calibration import use_calibration
from .config import SigmaNormConfig
from .heads import has_output_per_label, plan_head
from .hub_files import adapter_weights_file, commit_of
from .norms import find_norms, find_shared_norms
from .padding import settle_padding
from .tasks import HUB_ARGUMENTS, load_processor, task_named


def ensemble_from_pretrained(
    model_id: str, task: str, num_members: int = 4, num_labels: int | None = None, **kwargs: Any
) -> tuple[PeftModel, Any]:
    """Turn a pretrained checkpoint into an ensemble of members over its frozen backbone.

    A classifier that comes with the checkpoint is copied into every member; otherwise members get fresh heads. Other
    modules that the checkpoint does not bring (a pooler, the dense layer of RoBERTa's head) are trained as one copy
    that the members share.

    Args:
        model_id: A model id on the Hub or a local folder.
        task: "text-classification", "token-classification", "multiple-choice" or "image-classification", as in
            `transformers.pipeline`.
        num_members: Number of members M.
        num_labels: Number of classes. None: that of the names in `id2label`, else of the checkpoint's own classifier.
        **kwargs: Fields of `SigmaNormConfig` (`init_scaler_std`, `member_heads`, `modules_to_save`, `id2label`, ...);
            all others go to `from_pretrained` of the base model (`revision`, `dtype`, `token`, ...).

    Returns:
        The ensemble, a `PeftModel`, and the tokenizer or image processor (None where the checkpoint has none).

    Raises:
        ValueError: The task or the architecture is not supported, the number of classes is not known, there is no
            head to copy or its classes are in another order than `id2label`, or the checkpoint lacks weights of the
            backbone.
    """
    task_classes = task_named(task)
    config_fields = {field.name for field in fields(SigmaNormConfig)} - {"revision"}
    config_kwargs = {name: kwargs.pop(name) for name in list(kwargs) if name in config_fields}
    config_kwargs.setdefault("task_type", task_classes.peft_task_type)
    config = SigmaNormConfig(num_members=num_members, num_labels=num_labels, **config_kwargs)
    label_kwargs = {
        name: value
        for name in ("num_labels", "id2label", "label2id", "problem_type")
        if (value := getattr(config, name)) is not None
    }
    model, loading_info = _load_base_model(task_classes.model_class, model_id, **label_kwargs, **kwargs)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"{model_id} is an adapter, not a checkpoint; load it with `load_ensemble`.")
    absent = _absent_modules(loading_info)
    architecture = plan_head(model, config).architecture
    lacks_outputs = bool(absent & set(architecture.outputs))
    is_auto = config.head_init == "auto"
    if is_auto:
        config.head_init = "fresh" if absent & set(architecture.projections) else "copy"
    elif config.head_init == "copy" and lacks_outputs:
        raise ValueError(f"{model_id} brings no classifier of this size to copy; use head_init='fresh'.")
    if lacks_outputs and config.num_labels is None and has_output_per_label(model):
        raise ValueError(f"{model_id} brings no classifier that tells the number of classes; pass num_labels.")
    if lacks_outputs:
        model.config.problem_type = config.problem_type  # the checkpoint's was that of another task
    elif is_auto:
        hub_kwargs = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        _check_order_of_classes(AutoConfig.from_pretrained(model_id, **hub_kwargs), config)
    plan = plan_head(model, config)
    # What came with the checkpoint stays as it came, but for outputs, which are trained, and what peft takes for them.
    outputs = tuple(name for name in plan.shared if name in architecture.outputs)
    shared = [name for name in plan.shared if name in absent or name.endswith(outputs)]
    shared += _shareable(model, config, absent - set(plan.member))
    config.resolve_shared_modules([*config.shared_modules, *shared])
    config.revision = commit_of(model_id, kwargs) or kwargs.get("revision")
    processor = load_processor(model_id, task, kwargs)
    settle_padding(model, processor, config.pad_token_id)
    return get_peft_model(model, config), processor


def load_ensemble(
    repo_or_dir: str | os.PathLike,
    *,
    base_model: str | None = None,
    is_trainable: bool = False,
    calibrated: bool = False,
    **kwargs: Any,
) -> tuple[PeftModel, Any]:
    """Load a saved adapter over its base model.

    Args:
        repo_or_dir: An adapter repository on the Hub or a local folder.
        base_model: Where the base model is, if not where the adapter says.
        is_trainable: Whether to go on training.
        calibrated: Whether the ensemble's `logits` and what `predict` makes of them are to be calibrated with the
            temperature that the adapter stores; see `use_calibration`.
        **kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, ... for the adapter; the last three are used
            for the base model too, as is everything else (`dtype`, `device_map`, ...).

    Returns:
        The ensemble in evaluation mode, and the tokenizer or image processor: the adapter's own, else the base
        model's, else None.

    Raises:
        ValueError: There is no sigma-norm adapter, its file is damaged or no safetensors file, it does not fit the
            base model exactly, or it stores no temperature to calibrate with.
    """
    repo_or_dir = os.fspath(repo_or_dir)
    hub_kwargs = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    adapter_kwargs = {name: value for name, value in hub_kwargs.items() if name != "trust_remote_code"}
    base_kwargs = {name: value for name, value in kwargs.items() if name != "revision"}
    config = read_adapter_config(repo_or_dir, adapter_kwargs)
    # What can be refused is, before anything is built for it.
    config.use_calibration(calibrated)
    adapter_weights_file(repo_or_dir, adapter_kwargs)
    base_model = base_model or config.base_model_name_or_path
    if not base_model:
        raise ValueError(f"The adapter in {repo_or_dir} does not say what its base model is; pass base_model.")
    model_class, task = class_named(config.base_model_class), task_of_class(config.base_model_class)
    if config.revision is not None and not os.path.isdir(base_model):
        base_kwargs["revision"] = config.revision
    try:
        model, loading_info = _load_base_model(model_class, base_model, **base_kwargs)
    except OSError as error:
        raise ValueError(
            f"The adapter's base model {base_model} cannot be loaded; if it is elsewhere, pass base_model. {error}"
        ) from error
    _check_base_is_complete(model, loading_info, config)
    try:
        ensemble = PeftModel.from_pretrained(
            model, repo_or_dir, config=config, is_trainable=is_trainable, torch_device="cpu", **adapter_kwargs
        )
    except KeyError as error:
        raise ValueError(f"The adapter in {repo_or_dir} lacks the weights {error}.") from error
    except ValueError as error:
        raise ValueError(f"The adapter in {repo_or_dir} cannot be loaded. {error}") from error
    processor = load_processor(repo_or_dir, task, adapter_kwargs)
    if processor is None:
        processor = load_processor(base_model, task, base_kwargs)
    settle_padding(model, processor, config.pad_token_id)
    if calibrated:
        use_calibration(ensemble)
    return ensemble, processor


def _load_base_model(model_class: type, source: str, **kwargs: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a base model and tell what its checkpoint lacked.

    Raises:
        ValueError: transformers has no model of this class for the checkpoint.
    """
    try:
        with _quiet_loading():
            return model_class.from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        kind = str(error).partition("Config'>")[0].rpartition(".")[2]
        raise ValueError(
            f"transformers {transformers.__version__} has no {kind} model for {model_class.__name__}, so {source} has "
            "no head that members could have of their own."
        ) from error


def _check_order_of_classes(checkpoint: PreTrainedConfig, config: SigmaNormConfig) -> None:
    """Refuse to copy a classifier, unasked, under names that its classes have in another order.

    Raises:
        ValueError: A name that is given for one class is the checkpoint's for another.
    """
    own: dict[str, set[int]] = {}
    for index, name in checkpoint.id2label.items():  # two of ImageNet's classes are cranes
        own.setdefault(str(name).casefold(), set()).add(int(index))
    given = {index: str(name).casefold() for index, name in (config.id2label or {}).items()}
    if config.head_init == "copy" and any(index not in own.get(name, {index}) for index, name in given.items()):
        raise ValueError(
            f"The checkpoint has its classes in another order, {checkpoint.id2label}, than id2label, "
            f"{config.id2label}. Use its order; or say head_init='fresh' for heads of your own, or 'copy' if you know "
            "that the names alone are wrong."
        )


def _absent_modules(loading_info: dict[str, Any]) -> set[str]:
    """Names of the modules whose weights the checkpoint did not bring, or brought in another size."""
    keys = set(loading_info["missing_keys"]) | {key for key, *_ in loading_info["mismatched_keys"]}
    return {key.rpartition(".")[0] for key in keys}


def _shareable(model: PreTrainedModel, config: SigmaNormConfig, absent: set[str]) -> list[str]:
    """Return the absent modules that can be trained as one shared copy, or raise.

    A norm that carries members is none of them: it starts as ones and zeros, not at random, and members make it theirs.

    Raises:
        ValueError: A part of the backbone is absent; training adapters over random weights helps nobody.
    """
    backbone = f"{backbone_name(model)}."
    lost = sorted(name for name in absent if name.startswith(backbone) and ".pooler" not in name)
    if lost:
        raise ValueError(
            f"The checkpoint lacks weights of {type(model).__name__}'s backbone, or has them in another size: "
            f"{lost[:5]} ({len(lost)} modules). Is it a checkpoint of this architecture?"
        )
    return sorted(absent - {*find_norms(model, config), *find_shared_norms(model, config)})


def _check_base_is_complete(model: PreTrainedModel, loading_info: dict[str, Any], config: SigmaNormConfig) -> None:
    covered = {*config.shared_modules, *plan_head(model, config).member}
    absent = {
        name
        for name in _absent_modules(loading_info)
        if not any(f"{name}.".startswith(f"{module}.") for module in covered)
    }
    lacking = _shareable(model, config, absent)
    if lacking:
        raise ValueError(
            f"The base model lacks {lacking}, which the adapter does not bring: it was trained over "
            f"another checkpoint than {model.name_or_path}."
        )


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Hold back transformers' report that a head is new and should be trained: here that is the point."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(max(verbosity, transformers.logging.ERROR))
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
