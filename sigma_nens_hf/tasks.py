"""The tasks by their names in `transformers.pipeline`, and what each takes to load."""

from dataclasses import dataclass
from typing import Any

from huggingface_hub import constants
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.utils import cached_file

# Arguments of `from_pretrained` that say how to reach the Hub and hold for a model and its processor alike.
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "force_download", "local_files_only", "trust_remote_code")


@dataclass(frozen=True)
class Task:
    """What a task takes to load.

    Attributes:
        model_class: Class of the base model.
        processor_class: Class of its tokenizer or image processor.
        processor_files: Files of which one tells that a checkpoint has a processor.
        peft_task_type: peft's name for the task, None where it has none.
    """

    model_class: type
    processor_class: type
    processor_files: tuple[str, ...]
    peft_task_type: str | None


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model")
TASKS = {
    "text-classification": Task(AutoModelForSequenceClassification, AutoTokenizer, _TOKENIZER_FILES, "SEQ_CLS"),
    "token-classification": Task(AutoModelForTokenClassification, AutoTokenizer, _TOKENIZER_FILES, "TOKEN_CLS"),
    "multiple-choice": Task(AutoModelForMultipleChoice, AutoTokenizer, _TOKENIZER_FILES, None),
    "image-classification": Task(
        AutoModelForImageClassification, AutoImageProcessor, ("preprocessor_config.json",), None
    ),
}


def task_named(name: str) -> Task:
    """Return a task by its name.

    Args:
        name: As in `transformers.pipeline`.

    Raises:
        ValueError: The task is not supported.
    """
    if name not in TASKS:
        raise ValueError(f"task must be one of {list(TASKS)}, got {name!r}.")
    return TASKS[name]


def load_processor(source: str, task: str, kwargs: dict[str, Any]) -> Any | None:
    """Load the tokenizer or image processor of a checkpoint or adapter, None where it has none.

    Args:
        source: A repository on the Hub or a local folder.
        task: Name of the task.
        kwargs: Arguments of `from_pretrained`, of which those in `HUB_ARGUMENTS` are used.
    """
    entry = task_named(task)
    hub_kwargs = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
    look_up = {name: value for name, value in hub_kwargs.items() if name != "trust_remote_code"}
    if constants.HF_HUB_OFFLINE:
        look_up["local_files_only"] = True
    for file_name in entry.processor_files:
        found = cached_file(
            source,
            file_name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **look_up,
        )
        if found:
            return entry.processor_class.from_pretrained(source, **hub_kwargs)
    return None
