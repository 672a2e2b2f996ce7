"""A transformers Trainer that trains members towards the task and apart from each other."""

from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from huggingface_hub import CommitInfo
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from .blocks import prefix_modules
from .cached_batches import PREFIX_INDEX
from .cached_training import training_from_cache
from .calibration import TemperatureFit, check_can_be_calibrated, fit_temperature
from .checkpoints import last_complete_checkpoint
from .labels import SINGLE_LABEL, settle_problem_type
from .loss_parts import LossParts
from .losses import task_loss
from .member_chunks import InMemberChunks, MemberChunk, check_can_be_chunked, member_chunks
from .members import active_branch, active_config, base_model_of, member_subset, problem_type_of
from .optimizer_groups import parameter_groups
from .outputs import MEMBER_LOGITS, OTHER_OUTPUTS
from .prefix_checks import check_can_be_cached
from .prefix_features import with_prefix_features
from .recipe import training_recipe
from .regularizer import check_gates, diversity_regularizer, member_gates, realized_sharing
from .staged_training import first_stage_checkpoint, has_first_stage, take_tuned_prefix, tune_prefix
from .trainer_evaluation import LabelCheckingCollator, ensemble_metrics, labelled_logits, members_first, temporarily
from .trainer_hub import check_can_push, push_checkpoint, push_of_trainer
from .training_args import SigmaNEnsTrainingArguments


class SigmaNEnsTrainer(Trainer):
    """Fine-tunes a sigma-norm ensemble; used like `transformers.Trainer`.

    The loss is the mean over members of their own task losses plus lambda times the diversity regulariser. In training
    the parts of the loss are logged (`task_loss`, `regularizer`), the `realized_sharing` and the `disagreement` of
    members on the training batches; the logged learning rate is that of optimizer group 0. Evaluation logs `eval_loss`,
    the mean task loss of members without the regulariser, and for single-label tasks `eval_nll`, `eval_accuracy` and
    `eval_ece` of the ensemble, beside whatever `compute_metrics` returns (not with `batch_eval_metrics` or
    `preprocess_logits_for_metrics`, which leave no logits to compute them from). Standard `compute_metrics` functions
    see the ensemble's logits.

    Args:
        model: A `PeftModel` with an active sigma-norm adapter.
        args: The training arguments. None: the defaults, with output in `tmp_trainer`, as in transformers.
        **kwargs: As for `transformers.Trainer`. A `compute_loss_func` is given the members' logits as the rows of one
            larger batch, labels repeated to match; as in transformers it must itself divide by
            `num_items_in_batch`, the number of labels in all micro-batches of a step, repeated ones included. With
            `member_chunk_size` it is called for each chunk of members.

    Raises:
        ValueError: The model carries no sigma-norm adapter, the arguments do not fit it, or `member_chunk_size` is
            given under `torch.nn.DataParallel` or DeepSpeed.
        TypeError: The arguments are plain `TrainingArguments`.
    """

    def __init__(self, model: nn.Module, args: SigmaNEnsTrainingArguments | None = None, **kwargs: Any):
        args = SigmaNEnsTrainingArguments("tmp_trainer") if args is None else args
        if not isinstance(args, SigmaNEnsTrainingArguments):
            raise TypeError(f"args must be SigmaNEnsTrainingArguments, got {type(args).__name__}.")
        base_model = base_model_of(model)
        adapter = active_config(base_model)
        self._temperature = args.resolved_temperature(adapter.num_members) if adapter.num_members > 1 else None
        member_gates(model, args.diversity_layers)  # names that match no norm are refused before anything is done
        if args.push_to_hub:
            check_can_push(args, adapter)
        super().__init__(model=model, args=args, **kwargs)
        self.data_collator = LabelCheckingCollator(self.data_collator, base_model)
        # The Trainer is to count the labels of all micro-batches of a step, by which `compute_loss` divides; left to
        # itself it goes by the signature of the model's forward, and takes BERT for a model that divides.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        if not self.label_names:  # of DeiT with a teacher, whose forward takes none
            self.label_names = ["labels"]
        if args.member_chunk_size is not None:
            check_can_be_chunked(args.n_gpu > 1 or isinstance(model, nn.DataParallel), self.is_deepspeed_enabled)
        self._chunk = MemberChunk(tuple(range(adapter.num_members)))
        self._parts = LossParts()

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train, and note the recipe in the adapter's config.

        Args:
            resume_from_checkpoint: As in transformers; True takes the last checkpoint that was written to its end.
            **kwargs: As in transformers.

        Raises:
            ValueError: No parameter is trainable, there is no complete checkpoint to resume from, a checkpoint does
                not fit the model, or the scalers have stopped being finite.
        """
        is_staged, resumes_last = has_first_stage(self), resume_from_checkpoint is True
        if resumes_last:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
            has_begun = is_staged and first_stage_checkpoint(self) is not None
            if resume_from_checkpoint is None and not has_begun:
                raise ValueError(f"There is no complete checkpoint in {self.args.output_dir} to resume from.")
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ValueError(
                "No parameter of the model is trainable. Load an adapter that is to be trained further with "
                "`load_ensemble(..., is_trainable=True)` or `PeftModel.from_pretrained(..., is_trainable=True)`."
            )
        if self.args.prefix_cache:
            check_can_be_cached(self)
        recipe = training_recipe(self.args, self._temperature, self.train_dataset)
        config = active_config(base_model_of(self.model))
        config.training_recipe = recipe
        config.use_calibration(False)
        config.calibration_temperature = None  # it was that of other weights
        if is_staged and resume_from_checkpoint:
            take_tuned_prefix(self, resume_from_checkpoint)
        elif is_staged:
            tune_prefix(self, resumes_last, **kwargs)
        with training_from_cache(self) if self.args.prefix_cache else nullcontext():
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def set_prefix_mode(self) -> None:
        """Switch dropout off in what runs before the branch, if `prefix_dropout` says so."""
        if self.args.prefix_dropout:
            return
        base_model = base_model_of(self.model)
        block = active_branch(base_model)
        if block is not None:
            for module in prefix_modules(base_model, block).values():
                module.training = False

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = list(dict.fromkeys([*self._signature_columns, PREFIX_INDEX]))

    def calibrate(self, calibration_dataset: Any) -> TemperatureFit:
        """Fit the temperature of the pooled prediction, and note it in the adapter's config, which stores it.

        Predictions are calibrated with it when asked: `load_ensemble(..., calibrated=True)`, `use_calibration(model)`.
        Training further takes it away again.

        Args:
            calibration_dataset: Labelled examples that were neither trained on nor will be reported on.

        Raises:
            ValueError: The model is not for single labels, or no example has a label. The adapter is as before.
        """
        check_can_be_calibrated(self.model)
        config = active_config(base_model_of(self.model))
        is_calibrated = config.is_calibrated
        config.use_calibration(False)
        try:
            # Under other settings predictions would not be the logits of all examples.
            with (
                temporarily(self, preprocess_logits_for_metrics=None),
                temporarily(self.args, prediction_loss_only=False, eval_do_concat_batches=True),
            ):
                prediction = self.predict(calibration_dataset, metric_key_prefix="calibration")
        finally:
            config.use_calibration(is_calibrated)
        fit = fit_temperature(*labelled_logits(prediction, config.num_labels is None, self.args.return_member_logits))
        config.calibration_temperature = fit.temperature
        return fit

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Save the adapter in the output folder, and push it with its processor, card and last evaluation.

        Args:
            commit_message: Title of the commit.
            blocking: Whether to wait for the end of the upload.
            token: Of the Hub, in place of `args.hub_token`.
            revision: Branch, in place of `args.hub_revision`.
            private: Whether a new repository is private, in place of `args.hub_private_repo`.
            **kwargs: As for `publishing.push_adapter`, or for `transformers.Trainer.create_model_card`.

        Returns:
            The commit, or a future of it; None on all processes but the first.

        Raises:
            ValueError: As for `publishing.push_adapter`.
            OSError: As for `publishing.push_adapter`.
        """
        check_can_push(self.args, active_config(base_model_of(self.model)))
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        where = {"revision": revision or self.args.hub_revision, "private": private}
        if token is not None:
            where["token"] = token
        return push_of_trainer(
            self, self.args.output_dir, commit_message=commit_message, run_as_future=not blocking, **where, **kwargs
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        push_checkpoint(self, checkpoint_folder)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer with a group each for heads and member biases, scalers, and shared modules.

        Raises:
            ValueError: `args.optim` names an optimizer that chooses its own parameters.
        """
        if self.optimizer is not None:
            return self.optimizer
        if self.optimizer_cls_and_kwargs is not None:
            optimizer_class, optimizer_kwargs = self.optimizer_cls_and_kwargs
        else:
            optimizer_class, optimizer_kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        if not isinstance(optimizer_class, type) or {"params", "model", "optimizer_dict"} & optimizer_kwargs.keys():
            raise ValueError(
                f"optim={self.args.optim!s} chooses its own parameters and cannot keep the learning rates of scalers "
                "and heads apart; use one such as 'adamw_torch'."
            )
        model = model or self.model
        groups = parameter_groups(model, self.args, decayed=set(self.get_decay_parameter_names(model)))
        self.optimizer = optimizer_class(groups, **optimizer_kwargs)
        return self.optimizer

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run one batch forward and backward, `member_chunk_size` members at a time.

        Args:
            model: The (wrapped) model.
            inputs: One batch.
            num_items_in_batch: As for `compute_loss`.

        Returns:
            The detached loss, the sum over the chunks.
        """
        if self.args.member_chunk_size is None:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        inputs, losses = with_prefix_features(self, self._prepare_inputs(inputs)), []
        for chunk in member_chunks(self.model, self.args.member_chunk_size):
            # Processes exchange the sum of the chunks' gradients, with those of the last one.
            exchange = nullcontext() if chunk.is_last else self.accelerator.no_sync(model)
            with exchange, temporarily(self, _chunk=chunk), member_subset(self.model, chunk.members):
                losses.append(super().training_step(model, inputs, num_items_in_batch))
        return torch.stack(losses).sum()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return the mean of the members' task losses, in training plus lambda times the regulariser.

        For a chunk of members in `training_step` it is their part of that; the first chunk's has the regulariser.

        Args:
            model: The (wrapped) model.
            inputs: One batch.
            return_outputs: Whether to return the model's outputs as well.
            num_items_in_batch: Labels in all micro-batches of a step and in all processes, so that every label weighs
                the same, a token's in a short text as in a long one.

        Raises:
            ValueError: There are no labels, or they cannot be smoothed.
        """
        inputs = dict(inputs)
        labels = inputs.pop("labels", None)
        if labels is None and self.compute_loss_func is None:
            raise ValueError(f"No labels among the inputs ({', '.join(inputs)}), so there is no loss.")
        if labels is not None:
            self._settle_problem_type(labels)
        if model.training:
            self.set_prefix_mode()
        outputs = model(**inputs, return_dict=True)
        loss = self._member_loss(outputs, labels, num_items_in_batch)
        if model.training:
            loss = self._training_loss(loss, outputs, labels)
        return (loss, outputs) if return_outputs else loss

    def _settle_problem_type(self, labels: torch.Tensor) -> None:
        config = base_model_of(self.model).config
        settle_problem_type(config, labels)
        if self.label_smoother is not None and config.problem_type != SINGLE_LABEL:
            raise ValueError(f"label_smoothing_factor is for single labels, this model is for {config.problem_type}.")

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | int | None:
        """Count labels; see `transformers.Trainer`, which takes -100 for no label even where it is a number."""
        if batch_samples and isinstance(batch_samples[0].get("labels"), torch.Tensor):
            self._settle_problem_type(batch_samples[0]["labels"])
            if problem_type_of(self.model.config) != SINGLE_LABEL:
                batch_samples = [{"labels": torch.zeros_like(batch["labels"])} for batch in batch_samples]
        return super()._get_num_items_in_batch(batch_samples, device)

    def _member_loss(
        self, outputs: Any, labels: torch.Tensor | None, num_items: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Apply the task's loss, label smoothing or the user's loss to every member, as to rows of one larger batch."""
        member_logits = outputs[MEMBER_LOGITS]
        num_members = member_logits.shape[1]
        rows = member_logits.flatten(0, 1)
        row_labels = None if labels is None else labels.repeat_interleave(num_members, 0)
        if num_items is not None:
            # Under DataParallel it is repeated; without any label there is nothing to divide.
            num_items = torch.as_tensor(num_items).max().clamp_min(1) * num_members
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(_with_logits(outputs, rows), row_labels, num_items_in_batch=num_items)
        elif self.label_smoother is not None:
            loss = self.label_smoother({"logits": rows}, row_labels, num_items_in_batch=num_items)
        else:
            loss = task_loss(rows, row_labels, problem_type_of(self.model.config), num_items)
        # The count is over all processes, whose gradients are averaged afterwards.
        is_global = self.args.average_tokens_across_devices and num_items is not None
        return loss * self.accelerator.num_processes if is_global else loss

    def _training_loss(self, mean_loss: torch.Tensor, outputs: Any, labels: torch.Tensor | None) -> torch.Tensor:
        """Turn the mean task loss of the members that are run into their part of the step's loss, and note its parts.

        The mean is already divided by the labels of all micro-batches, the regulariser not.
        """
        args, chunk = self.args, self._chunk
        micro_batches = self.current_gradient_accumulation_steps
        loss, regularizer = mean_loss * chunk.weight, torch.zeros((), device=mean_loss.device)
        task_part = loss * micro_batches
        if chunk.is_first and self._temperature is not None:
            regularizer = diversity_regularizer(
                base_model_of(self.model),
                self._temperature,
                reduction=args.diversity_reduction,
                layers=args.diversity_layers,
            )
            loss = loss + args.diversity_weight / micro_batches * regularizer
        self._parts.add(chunk, task_part, regularizer, outputs[MEMBER_LOGITS], labels)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, adding to a training step's entry the means of the loss's parts since the last one.

        Raises:
            ValueError: The scalers have stopped being finite.
        """
        if "loss" in logs and (parts := self._parts.take_means(self.accelerator.gather)):
            if self._temperature is None:
                parts = {"task_loss": parts["task_loss"]}
            else:
                check_gates(member_gates(self.model, self.args.diversity_layers))
                parts["realized_sharing"] = realized_sharing(self.model, layers=self.args.diversity_layers)
            if problem_type_of(self.model.config) != SINGLE_LABEL:
                parts.pop("disagreement", None)
            logs |= parts
        super().log(logs, start_time)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Evaluate one batch, `member_chunk_size` members at a time; see `transformers.Trainer.prediction_step`."""
        if self.args.member_chunk_size is not None:
            model = InMemberChunks(model, self.args.member_chunk_size)
            inputs = with_prefix_features(self, self._prepare_inputs(inputs))
        if self.args.return_member_logits:
            ignored = ignore_keys if ignore_keys is not None else self.model.config.keys_to_ignore_at_inference
            ignore_keys = [*(key for key in ignored if key != MEMBER_LOGITS), *OTHER_OUTPUTS]
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if self.args.return_member_logits and isinstance(logits, torch.Tensor):
            # Batches are padded and joined along dimension 1, which must be that of tokens or choices meanwhile.
            logits = logits.transpose(1, 2)
        return loss, logits, labels

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, **kwargs: Any
    ) -> EvalLoopOutput:
        """Run an evaluation; see `transformers.Trainer.evaluation_loop`."""
        user_metrics = self.compute_metrics
        if not (self.args.batch_eval_metrics or self.preprocess_logits_for_metrics is not None):
            if user_metrics is None:
                prediction_loss_only = None  # the ensemble's own metrics need the logits
            self.compute_metrics = partial(ensemble_metrics, user_metrics, self.model, self.args.return_member_logits)
        try:
            output = super().evaluation_loop(dataloader, description, prediction_loss_only, **kwargs)
        finally:
            self.compute_metrics = user_metrics
        if self.args.return_member_logits:
            output = output._replace(predictions=members_first(output.predictions))
        return output


def _with_logits(outputs: Any, rows: torch.Tensor) -> Any:
    """Return the model's outputs with the members' rows as `logits`, as a loss function expects them."""
    return type(outputs)(**{**outputs, "logits": rows})
