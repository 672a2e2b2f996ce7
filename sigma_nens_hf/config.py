"""The configuration of one sigma-norm adapter, and everything that makes the adapter self-contained."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from peft import PeftConfig
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import safe_open

from .hub_files import adapter_weights_file
from .integrity import digest_of_file
from .registration import extend_peft_type

PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")
HEAD_INITIALISATIONS = ("auto", "fresh", "copy")
WHOLE_HEAD = "all"
FROZEN, SHARED, STAGED = "frozen", "shared", "staged"
PREFIXES = (FROZEN, SHARED, STAGED)

# peft appends these two names to `modules_to_save` whenever `task_type` is "SEQ_CLS" or "TOKEN_CLS", which would
# wrap the head over the member heads. They carry no wish of the user: the head is always trained here.
_NAMES_ADDED_BY_PEFT = frozenset({"classifier", "score"})
_LARGEST_INIT_SCALER = 16.0
# A file that says more is damaged or wants to take the memory.
_MOST_MEMBERS = 4096
_TASK_TYPES = (None, "SEQ_CLS", "TOKEN_CLS")
# Stands for "no module at all": peft fails on a task model whose `modules_to_save` is empty.
_NO_MODULE = "sigma_norm_no_module"


class _ExactNames(list):
    """Names that stay as they are when peft appends its own, which for token classification it does after injection."""

    def extend(self, names: Iterable[str]) -> None:
        super().extend(name for name in names if name not in _NAMES_ADDED_BY_PEFT)


@dataclass
class SigmaNormConfig(PeftConfig):
    """Configuration of a sigma-norm ensemble adapter.

    Args:
        num_members: Number of members M. 1 gives a single model with tuned norms, the honest baseline. Its gates are
            its scales as well, so `gate_depth` is 1 and `train_scale` False then, whatever is given.
        target_modules: Norms that carry members: a list of module names or suffixes, or a regular expression.
            None stands for all norms of the backbone, found by their class.
        exclude_modules: Norms that do not, in the same forms.
        branch_layer: Blocks are counted in forward order, from 0; blocks from this one on and every norm after
            them carry members. What runs before it, the prefix, is computed once an example and not once a member,
            but for decoders, ALBERT and ModernBERT with a mean as its pooling. None: all norms carry members.
        prefix: What becomes of the norms before `branch_layer`: "frozen" leaves them as they are; "shared" trains one
            copy for all members; "staged" lets `SigmaNEnsTrainer` first train that copy, as part of a single model,
            and then freeze it while the members train.
        init_scaler: Start value g0 of every scaler. The reconstruction scale is s = w / sigmoid(g0).
        init_scaler_std: Standard deviation of the normal noise added to g0, separately for every member. With 0
            and copied heads all members equal the base model and, the regulariser's gradient being exactly 0
            there, stay equal.
        gate_depth: How much a gate can take from a feature, in (0, 1]: a gate that closes leaves it 1 - gate_depth of
            its weight, so that gates may all open or close without a loss of features.
        train_scale: Whether each norm that carries members also trains the scale s, which they share, so that the
            task need not go through the gates. The paper's form is False and a `gate_depth` of 1, in which a gate
            that closes leaves nothing; it wants a weight of the regulariser of about .06 / M.
        member_bias: Whether each member has its own bias where the base norm has one.
        member_heads: Head projections that every member has of its own. None: the last projection; "all": every
            projection of the head; a list of names; []: one shared head.
        head_init: "fresh" draws member heads anew, "copy" copies the head of the model, which is right if it came
            with the checkpoint. "auto" is "fresh" here; only `ensemble_from_pretrained` can know better.
        modules_to_save: Modules that are trained as one copy shared by the members and saved with the adapter. The
            projections of a fresh head that are not replicated are always among them, but for those that
            `ensemble_from_pretrained` finds in the checkpoint; the head as a whole is the business of `member_heads`,
            so naming "classifier" here changes nothing.
        num_labels: Number of classes C (outputs for regression). None: that of the model; always None for multiple
            choice, whose classes are the choices of the moment.
        id2label: Class index to name.
        label2id: Class name to index.
        problem_type: "single_label_classification", "multi_label_classification" or "regression", as in
            transformers.
        pad_token_id: Padding token of a base model that predicts from the last token before it; filled on injection.
        base_model_type: `model_type` of the base model; filled on injection.
        base_model_class: Class of the base model; filled on injection.
        base_fingerprint: What the base model's weights are known by, as from `integrity.base_fingerprint`; filled on
            injection and checked on loading.
        weights_digest: What the adapter's own weights are known by; filled on saving beside them and checked on
            loading.
        num_adapted_norms: Number of norms that the adapter changes, members' and shared ones; filled on injection and
            checked on loading.
        prefix_is_tuned: Whether the first stage of a staged prefix is over, so that it is frozen; filled by the
            trainer.
        calibration_temperature: Softmax temperature of the pooled prediction, fitted on held-out data by
            `SigmaNEnsTrainer.calibrate`; None where none was. It is stored, and used only when asked for.
        training_recipe: How the adapter was trained (tau, lambda, data, seed); filled by the trainer.
        sigma_nens_hf_version: Version of this package that made the adapter; filled on injection.
        transformers_version: Version of transformers that made the adapter; filled on injection.

    Raises:
        ValueError: A field is out of its range or two fields contradict each other.
    """

    num_members: int = field(default=4, metadata={"help": "Number of members M."})
    target_modules: list[str] | str | None = field(
        default=None, metadata={"help": "Norms that carry members; None: all norms of the backbone."}
    )
    exclude_modules: list[str] | str | None = field(default=None, metadata={"help": "Norms that do not carry members."})
    branch_layer: int | None = field(
        default=None, metadata={"help": "First block whose norms carry members; None: all norms do."}
    )
    prefix: str = field(
        default=FROZEN, metadata={"help": "The norms before branch_layer: 'frozen', 'shared' or 'staged'."}
    )
    init_scaler: float = field(default=0.0, metadata={"help": "Start value g0 of every scaler."})
    init_scaler_std: float = field(default=0.1, metadata={"help": "Standard deviation of the start noise."})
    gate_depth: float = field(default=0.15, metadata={"help": "Largest share of a feature that a gate takes away."})
    train_scale: bool = field(default=True, metadata={"help": "Whether members' norms train a scale they share."})
    member_bias: bool = field(default=True, metadata={"help": "Whether each member has its own norm biases."})
    member_heads: list[str] | str | None = field(
        default=None, metadata={"help": "Head projections of which each member has its own."}
    )
    head_init: str = field(default="auto", metadata={"help": "'fresh', 'copy' or 'auto'."})
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules trained as one copy that the members share."}
    )
    num_labels: int | None = field(default=None, metadata={"help": "Number of classes."})
    id2label: dict[int, str] | None = field(default=None, metadata={"help": "Class index to name."})
    label2id: dict[str, int] | None = field(default=None, metadata={"help": "Class name to index."})
    problem_type: str | None = field(default=None, metadata={"help": "As in transformers."})
    pad_token_id: int | None = field(default=None, metadata={"help": "Filled on injection."})
    base_model_type: str | None = field(default=None, metadata={"help": "Filled on injection."})
    base_model_class: str | None = field(default=None, metadata={"help": "Filled on injection."})
    base_fingerprint: str | None = field(default=None, metadata={"help": "Filled on injection."})
    weights_digest: str | None = field(default=None, metadata={"help": "Filled on saving."})
    num_adapted_norms: int | None = field(default=None, metadata={"help": "Filled on injection."})
    prefix_is_tuned: bool = field(default=False, metadata={"help": "Filled by the trainer."})
    calibration_temperature: float | None = field(default=None, metadata={"help": "Softmax temperature."})
    training_recipe: dict[str, Any] | None = field(default=None, metadata={"help": "Filled by the trainer."})
    sigma_nens_hf_version: str | None = field(default=None, metadata={"help": "Filled on injection."})
    transformers_version: str | None = field(default=None, metadata={"help": "Filled on injection."})

    _is_calibrated = False  # no field: a matter of this process, never saved

    def __post_init__(self):
        super().__post_init__()
        self.peft_type = extend_peft_type()
        self._check_numbers()
        if self.num_members == 1:
            self.gate_depth, self.train_scale = 1.0, False
        self._normalise_labels()
        # A saved config lists exactly the modules that its file holds; read it before peft appends to it.
        saved = tuple(name for name in self.modules_to_save or () if name != _NO_MODULE)
        self._exact_shared_modules = saved if self.is_resolved else None
        if self.modules_to_save is not None:
            self.modules_to_save = list(self.modules_to_save) or [_NO_MODULE]

    def _check_numbers(self) -> None:
        if isinstance(self.num_members, bool) or not isinstance(self.num_members, int) or self.num_members < 1:
            raise ValueError(f"num_members must be a whole number of at least 1, got {self.num_members!r}.")
        if self.num_members > _MOST_MEMBERS:
            raise ValueError(f"num_members must be at most {_MOST_MEMBERS}, got {self.num_members}.")
        if not abs(self.init_scaler) <= _LARGEST_INIT_SCALER:
            raise ValueError(
                f"init_scaler must be finite and at most {_LARGEST_INIT_SCALER} in size, since its gate must not "
                f"round to 0 or 1, got {self.init_scaler}."
            )
        if not (math.isfinite(self.init_scaler_std) and self.init_scaler_std >= 0):
            raise ValueError(f"init_scaler_std must be finite and not negative, got {self.init_scaler_std}.")
        if not 0 < self.gate_depth <= 1:
            raise ValueError(f"gate_depth must be above 0 and at most 1, got {self.gate_depth}.")
        if self.head_init not in HEAD_INITIALISATIONS:
            raise ValueError(f"head_init must be one of {HEAD_INITIALISATIONS}, got {self.head_init!r}.")
        if isinstance(self.member_heads, str) and self.member_heads != WHOLE_HEAD:
            raise ValueError(
                f"member_heads must be None (the last projection), {WHOLE_HEAD!r} (every one) or a list of module "
                f"names ([]: one head that members share), got {self.member_heads!r}."
            )
        if self.branch_layer is not None:
            if isinstance(self.branch_layer, bool) or not isinstance(self.branch_layer, Integral):
                raise ValueError(f"branch_layer must be the number of a block, or None, got {self.branch_layer!r}.")
            self.branch_layer = int(self.branch_layer)  # of numpy's, which no json can hold
            if self.branch_layer < 0:
                raise ValueError(f"branch_layer must not be negative, got {self.branch_layer}.")
        if self.prefix not in PREFIXES:
            raise ValueError(f"prefix must be one of {PREFIXES}, got {self.prefix!r}.")
        if self.prefix != FROZEN and self.branch_layer is None:
            raise ValueError(f"prefix={self.prefix!r} is about the norms before branch_layer, which is not given.")
        if self.task_type not in _TASK_TYPES:
            raise ValueError(f"task_type must be one of {_TASK_TYPES}, got {self.task_type!r}; None serves every task.")
        if isinstance(self.modules_to_save, str):
            raise ValueError(f"modules_to_save must be a list of module names, got {self.modules_to_save!r}.")
        if self.problem_type not in (None, *PROBLEM_TYPES):
            raise ValueError(f"problem_type must be one of {PROBLEM_TYPES}, got {self.problem_type!r}.")
        temperature = self.calibration_temperature
        if temperature is not None and not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"calibration_temperature must be finite and positive, got {temperature}.")

    def _normalise_labels(self) -> None:
        """Bring names and their number into line; JSON turns the indices of `id2label` into strings."""
        for name in ("id2label", "label2id"):
            if not isinstance(getattr(self, name), dict | None):
                raise ValueError(f"{name} must be a dict, got {getattr(self, name)!r}.")
        if self.label2id is not None and len(set(self.label2id.values())) != len(self.label2id):
            raise ValueError(f"Two classes in label2id have the same index: {self.label2id}.")
        if self.id2label is None and self.label2id is not None:
            self.id2label = {index: name for name, index in self.label2id.items()}
        if self.label2id is not None:
            self.label2id = {name: int(index) for name, index in self.label2id.items()}
        if self.id2label is not None:
            self.id2label = {int(index): name for index, name in self.id2label.items()}
            if sorted(self.id2label) != list(range(len(self.id2label))):
                raise ValueError(f"id2label must name the classes 0 to C-1, got {self.id2label}.")
            by_name = {name: index for index, name in self.id2label.items()}
            if len(by_name) != len(self.id2label):
                raise ValueError(f"Two classes in id2label have the same name: {self.id2label}.")
            if self.label2id not in (None, by_name):
                raise ValueError(f"id2label={self.id2label} and label2id={self.label2id} contradict each other.")
            self.label2id = by_name
            if self.num_labels is None:
                self.num_labels = len(self.id2label)
            if self.num_labels != len(self.id2label):
                raise ValueError(
                    f"num_labels={self.num_labels} does not fit the {len(self.id2label)} names in id2label."
                )
        if self.num_labels is not None and (not isinstance(self.num_labels, int) or self.num_labels < 1):
            raise ValueError(f"num_labels must be a whole number of at least 1, got {self.num_labels!r}.")

    @property
    def is_resolved(self) -> bool:
        """Whether the config has been through an injection, so that its lists of modules are exact."""
        return self.num_adapted_norms is not None

    @property
    def shared_modules_are_exact(self) -> bool:
        """Whether `shared_modules` lists all of them, so that none of the head's are to be added."""
        return self._exact_shared_modules is not None

    @property
    def shared_modules(self) -> list[str]:
        """The modules named in `modules_to_save`, without the names that peft adds on its own account."""
        if self._exact_shared_modules is not None:
            return list(self._exact_shared_modules)
        ignored = {*_NAMES_ADDED_BY_PEFT, _NO_MODULE}
        return [name for name in self.modules_to_save or [] if name not in ignored]

    @property
    def is_calibrated(self) -> bool:
        """Whether predictions are calibrated at present."""
        return self._is_calibrated

    @property
    def temperature_in_use(self) -> float:
        """The temperature that predictions are calibrated with at present, 1 where they are not."""
        return self.calibration_temperature if self._is_calibrated else 1.0

    def use_calibration(self, enabled: bool) -> None:
        """Calibrate predictions with the stored temperature, or leave that again.

        Args:
            enabled: Whether to calibrate.

        Raises:
            ValueError: There is no temperature.
        """
        if enabled and self.calibration_temperature is None:
            raise ValueError(
                "The adapter has no calibration_temperature. Fit one with `SigmaNEnsTrainer.calibrate` on examples "
                "that were not trained on, and save the adapter again."
            )
        self._is_calibrated = enabled

    def resolve_shared_modules(self, names: list[str]) -> None:
        """Fix the full names of the shared modules, which from then on are exact.

        Args:
            names: Full module names in the base model; may be empty.
        """
        self._exact_shared_modules = tuple(names)
        self.modules_to_save = _ExactNames(names or [_NO_MODULE])

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike, subfolder: str | None = None, **kwargs: Any
    ) -> "SigmaNormConfig":
        """Load the config of an adapter, and refuse weights beside it that are not its own before anyone opens them.

        Args:
            pretrained_model_name_or_path: An adapter repository on the Hub or a local folder.
            subfolder: A folder in that.
            **kwargs: As in peft.

        Raises:
            ValueError: There is no config, or its fields are not valid; or the weights are no whole safetensors file,
                or are of other numbers of members or classes. A local folder may do without weights.
        """
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        source, hub_kwargs = os.fspath(pretrained_model_name_or_path), cls._split_kwargs(kwargs)[0]
        if os.path.isdir(source):
            source = os.path.join(source, subfolder or "")
            if not any(os.path.isfile(os.path.join(source, name)) for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)):
                return config
        elif subfolder is not None:
            hub_kwargs["subfolder"] = subfolder
        config.check_sizes(adapter_weights_file(source, hub_kwargs))
        return config

    def check_sizes(self, path: str) -> None:
        """Refuse a file of other numbers of members or classes, before memory is taken for as many.

        Args:
            path: A safetensors file.

        Raises:
            ValueError: It is one.
        """
        with safe_open(path, "pt") as file:
            keys = file.keys()
            shapes = {key: file.get_slice(key).get_shape() for key in keys}
        heads = [shape for key, shape in shapes.items() if key.endswith(".sigma_norm_head_bias")]
        members = {shape[0] for key, shape in shapes.items() if key.endswith(".sigma_norm_scaler")}
        numbers = sorted({max(members, default=0), *(shape[0] for shape in heads)})
        if numbers != [self.num_members]:
            raise ValueError(
                f"{path} is of {', '.join(map(str, numbers))} members, but its {CONFIG_NAME} says {self.num_members}."
            )
        if heads and self.num_labels is not None and all(shape[1] != self.num_labels for shape in heads):
            raise ValueError(f"{path} has no head of {self.num_labels} classes, as its {CONFIG_NAME} says.")

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save the config as `adapter_config.json`, with the digest of the adapter's weights if they are there already.

        Args:
            save_directory: Folder to save it in.
            **kwargs: As in peft.
        """
        weights = os.path.join(save_directory, SAFETENSORS_WEIGHTS_NAME)
        self.weights_digest = digest_of_file(weights) if os.path.isfile(weights) else None
        try:
            super().save_pretrained(save_directory, **kwargs)
        finally:
            self.weights_digest = None  # it is the file's; the adapter in memory goes on changing

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, as they are written into `adapter_config.json`."""
        plain = super().to_dict()
        if self.modules_to_save is not None:
            plain["modules_to_save"] = self.shared_modules
        return plain
