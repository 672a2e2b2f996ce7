"""What a trainer pushes to the Hub, and when: adapters alone, never a training's own files."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers import Trainer
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils.hub import PushInProgress

from .config import SigmaNormConfig
from .training_args import SigmaNEnsTrainingArguments

_STRATEGIES = (HubStrategy.END, HubStrategy.EVERY_SAVE)
# What transformers' own card is told and this package's finds by itself.
_NOT_OF_CARD = ("model_name", "finetuned_from", "tasks", "dataset", "dataset_args")


def check_can_push(args: SigmaNEnsTrainingArguments, config: SigmaNormConfig) -> None:
    """Refuse, before anything is trained, what could not be pushed afterwards.

    Args:
        args: The training arguments.
        config: The adapter's config.

    Raises:
        ValueError: `hub_strategy` asks for checkpoints, or the base model is a folder of this machine.
    """
    from .publishing.base import check_base_is_public  # most trainings are not pushed

    if args.hub_strategy not in _STRATEGIES:
        raise ValueError(
            f"hub_strategy={args.hub_strategy.value!r} would push optimizer states and training arguments. Use "
            f"{' or '.join(repr(strategy.value) for strategy in _STRATEGIES)}."
        )
    check_base_is_public(config, args.hub_base_model)


def push_of_trainer(trainer: Trainer, folder: str, **kwargs: Any) -> CommitInfo | Future[CommitInfo]:
    """Push the adapter that a trainer saved, with its last evaluation.

    Args:
        trainer: The trainer.
        folder: Where it saved it.
        **kwargs: As for `publishing.push_adapter`, or for `transformers.Trainer.create_model_card`.
    """
    from .publishing import push_adapter
    from .publishing.card_evaluation import evaluation_of_trainer

    name = trainer.model.active_adapter
    adapter = folder if name == "default" else str(Path(folder, name))
    kwargs = {key: value for key, value in kwargs.items() if key not in _NOT_OF_CARD}
    if "dataset_tags" in kwargs:
        kwargs["datasets"] = kwargs.pop("dataset_tags")
    for key in ("tags", "datasets"):
        if isinstance(kwargs.get(key), str):
            kwargs[key] = [kwargs[key]]
    if "evaluation" not in kwargs:
        # One in the folder may be of earlier weights; what the trainer logged is of these.
        recipe = trainer.model.peft_config[name].training_recipe or {}
        kwargs["evaluation"] = evaluation_of_trainer(_logs_of_current_weights(trainer), recipe.get("dataset")) or False
    kwargs = {"base_model": trainer.args.hub_base_model, "token": trainer.args.hub_token} | kwargs
    return push_adapter(adapter, trainer.hub_model_id, **kwargs)


def _logs_of_current_weights(trainer: Trainer) -> list[dict[str, float]]:
    """Return what was logged of the weights that the model has now, which may be those of the best step."""
    state, history = trainer.state, trainer.state.log_history
    ends = [index for index, entry in enumerate(history) if "train_runtime" in entry]
    since = [entry for entry in history[ends[-1] + 1 if ends else 0 :] if entry.get("step") == state.global_step]
    if since or not ends:
        return since
    is_best = trainer.args.load_best_model_at_end and state.best_global_step is not None
    step = state.best_global_step if is_best else state.global_step
    return [entry for entry in history if entry.get("step") == step]


def push_checkpoint(trainer: Trainer, folder: str) -> None:
    """Push the adapter of a checkpoint in the background, unless the last push is still going on.

    Args:
        trainer: The trainer.
        folder: The checkpoint.
    """
    args, state, in_progress = trainer.args, trainer.state, trainer.push_in_progress
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return
    is_busy = in_progress is not None and not in_progress.is_done()
    if is_busy and not args.hub_always_push:
        return
    trainer.callback_handler.on_push_begin(args, state, trainer.control)
    by_steps = args.save_strategy == SaveStrategy.STEPS
    reached = f"step {state.global_step}" if by_steps else f"epoch {int(state.epoch)}"
    message = f"Training in progress, {reached}"
    job = push_of_trainer(
        trainer, folder, commit_message=message, revision=args.hub_revision, private=args.hub_private_repo,
        run_as_future=True,
    )  # fmt: skip
    if is_busy:
        in_progress.jobs.append(job)
    else:
        trainer.push_in_progress = PushInProgress([job])
