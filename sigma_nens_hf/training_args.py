"""Training arguments: those of transformers, with defaults for gates and the dials of the regulariser."""

import math
import os
from dataclasses import dataclass, field
from numbers import Real

from transformers import TrainingArguments

from .regularizer import DIVERSITY_REDUCTIONS, temperature_for_sharing

DEFAULT_DIVERSITY_TEMPERATURE = 0.1


@dataclass
class SigmaNEnsTrainingArguments(TrainingArguments):
    """Arguments of `SigmaNEnsTrainer`; `SigmaNEnsTrainingArguments(output_dir)` alone gives a good fine-tune.

    Everything of `TrainingArguments` is there. Defaults that differ from it: `learning_rate` 6e-3, batches of 32, and a
    warm-up over the first tenth of the steps (they are this package's choice, as are the weights and rates below).

    Args:
        diversity_weight: Weight lambda of the regulariser. 0 switches it off. The default is for gates of bounded
            depth, for which it hardly matters; gates of the paper's full depth want about .06 / M.
        diversity_temperature: Softmax temperature tau of the regulariser. None: .1, unless
            `members_per_feature` is given.
        members_per_feature: The number k of members that are to own a feature, instead of a temperature. The
            temperature is then `temperature_for_sharing(k, M)`.
        diversity_reduction: "mean" divides the regulariser by its number of features, which makes lambda
            comparable between backbones; "sum" does not.
        diversity_layers: Names or name suffixes of the norms that are regularised. None: all.
        scaler_learning_rate: Learning rate of the scalers.
        scale_learning_rate: Learning rate of the scales that members share, where `SigmaNormConfig.train_scale` asks
            for them. They are factors on the pretrained weights.
        learning_rate: Learning rate of member biases and member heads, optimizer group 0.
        modules_to_save_learning_rate: Learning rate of the modules that the members share.
        weight_decay: For the weights of shared modules only. Scalers, biases and member heads are never
            decayed: decay would pull every gate towards .5.
        prefix_epochs: Passes over the data in the first stage of `prefix="staged"`. One by default: a prefix that had
            seen its data three times made members overconfident, in the one run that was made. None, and for data of no
            known length: as many as in the second.
        prefix_dropout: Whether dropout, and NEFTune's noise, act in training on what runs before `branch_layer` too.
        prefix_cache: Folder in which the features before `branch_layer` are kept, computed once for every example, so
            that training runs the blocks behind it alone. Only with a frozen or staged prefix, without augmentation
            and with `prefix_dropout=False`, since features must always be the same.
        return_member_logits: Let `Trainer.predict` return the members' logits (N, M, ..., C) instead of the
            ensemble's (N, ..., C).
        member_chunk_size: Members that are run at a time, forward and backward, so that the activations of no more
            than these are in memory. None, or any number above M: all at once. Smaller chunks take longer, for what
            members share is computed again for each: embeddings, and blocks below `branch_layer` where gradients go
            through them; and `torch_compile` compiles for each, up to torch's limit. The loss, the gradients and the
            predictions stay what they are, but for dropout, whose masks are drawn for each chunk.
        hub_base_model: Where the base model is on the Hub, for `push_to_hub` of an adapter that is trained over a local
            copy.

    Raises:
        ValueError: Both a temperature and a number of members per feature are given, or a value is out of range.
    """

    diversity_weight: float = field(default=0.15, metadata={"help": "Weight lambda of the diversity regulariser."})
    diversity_temperature: float | None = field(
        default=None, metadata={"help": "Softmax temperature tau of the regulariser; default .1."}
    )
    members_per_feature: int | None = field(
        default=None, metadata={"help": "Members k that are to own a feature, instead of a temperature."}
    )
    diversity_reduction: str = field(default="mean", metadata={"help": "'mean' or 'sum' over features."})
    diversity_layers: list[str] | None = field(
        default=None, metadata={"help": "Names or suffixes of the regularised norms; default all."}
    )
    scaler_learning_rate: float = field(default=3e-2, metadata={"help": "Learning rate of the scalers."})
    scale_learning_rate: float = field(default=1e-2, metadata={"help": "Learning rate of trained shared scales."})
    learning_rate: float = field(default=6e-3, metadata={"help": "Learning rate of member biases and heads."})
    modules_to_save_learning_rate: float = field(
        default=2e-4, metadata={"help": "Learning rate of the modules that members share."}
    )
    prefix_epochs: float | None = field(
        default=1.0, metadata={"help": "Epochs of the first stage of a staged prefix; None: as in the second."}
    )
    prefix_dropout: bool = field(default=True, metadata={"help": "Whether dropout acts before branch_layer as well."})
    prefix_cache: str | None = field(
        default=None, metadata={"help": "Folder in which features before branch_layer are kept, computed once."}
    )
    return_member_logits: bool = field(
        default=False, metadata={"help": "Let Trainer.predict return the members' logits."}
    )
    member_chunk_size: int | None = field(
        default=None, metadata={"help": "Members run at a time, to save memory; default all."}
    )
    hub_base_model: str | None = field(
        default=None, metadata={"help": "The base model's repository, where it is trained over a local copy."}
    )
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Batch size per device in training."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Batch size per device in evaluation."})
    warmup_steps: float = field(
        default=0.1, metadata={"help": "Steps of linear warm-up, or their share of all steps if below 1."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.diversity_temperature is not None and self.members_per_feature is not None:
            raise ValueError("Give either diversity_temperature or members_per_feature, not both.")
        tau = self.diversity_temperature
        if tau is not None and not (math.isfinite(tau) and tau > 0):
            raise ValueError(f"diversity_temperature must be finite and positive, got {tau}.")
        if not (math.isfinite(self.diversity_weight) and self.diversity_weight >= 0):
            raise ValueError(f"diversity_weight must be finite and not negative, got {self.diversity_weight}.")
        if self.members_per_feature is not None and self.members_per_feature < 1:
            raise ValueError(f"members_per_feature must be at least 1, got {self.members_per_feature}.")
        size = self.member_chunk_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"member_chunk_size must be a whole number of at least 1, or None, got {size!r}.")
        epochs = self.prefix_epochs
        if epochs is not None and not (isinstance(epochs, Real) and math.isfinite(epochs) and epochs > 0):
            raise ValueError(f"prefix_epochs must be finite and positive, or None, got {epochs!r}.")
        if self.prefix_cache is not None:
            if not isinstance(self.prefix_cache, str | os.PathLike):
                raise ValueError(f"prefix_cache must be a folder, or None, got {self.prefix_cache!r}.")
            self.prefix_cache = os.path.expanduser(self.prefix_cache)
            if os.path.exists(self.prefix_cache) and not os.path.isdir(self.prefix_cache):
                raise ValueError(f"prefix_cache must be a folder, but {self.prefix_cache} is a file.")
        if isinstance(self.diversity_layers, str):
            raise ValueError(f"diversity_layers must be a list of names, got {self.diversity_layers!r}.")
        if self.diversity_reduction not in DIVERSITY_REDUCTIONS:
            raise ValueError(
                f"diversity_reduction must be one of {DIVERSITY_REDUCTIONS}, got {self.diversity_reduction!r}."
            )

    def resolved_temperature(self, num_members: int) -> float:
        """Return the temperature tau that the arguments stand for with M members.

        Args:
            num_members: Number of members M.

        Raises:
            ValueError: No temperature makes the regulariser prefer `members_per_feature` of M members.
        """
        if self.members_per_feature is not None:
            return temperature_for_sharing(self.members_per_feature, num_members)
        return DEFAULT_DIVERSITY_TEMPERATURE if self.diversity_temperature is None else self.diversity_temperature
