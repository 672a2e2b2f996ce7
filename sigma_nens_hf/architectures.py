"""The supported architectures: their heads, their backbones, and why others are not among them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import transformers
from transformers import PreTrainedModel

from . import dinov3
from .norm_formulas import NormFormula, is_norm


@dataclass(frozen=True)
class Architecture:
    """What members have to know of a transformers class.

    Attributes:
        outputs: Names of the linear projections onto the classes.
        before: Names of the head's linear projections in front of them, in forward order.
        backbone: Name of the module under the head. None: transformers' `base_model_prefix`.
        without_members: Norms of the backbone that cannot carry members, by the end of their name, with the reason.
        within_blocks: Modules listed behind the blocks that run as part of one, with its number, or in front of all of
            them: -1.
        pools_last_token: Whether the prediction is that for the last token before the padding, which must be known.
        branches_late: Whether rows can be repeated at a block. Not where a block is used again and again, nor where
            the head looks at the inputs once more, whose rows would be the examples'.
    """

    outputs: tuple[str, ...] = ("classifier",)
    before: tuple[str, ...] = ()
    backbone: str | None = None
    without_members: Mapping[str, str] = field(default_factory=dict)
    within_blocks: Mapping[str, int] = field(default_factory=dict)
    pools_last_token: bool = False
    branches_late: bool = True

    @property
    def projections(self) -> tuple[str, ...]:
        """All projections of the head in forward order."""
        return (*self.before, *self.outputs)


_CLASSIFIER = Architecture()
_CLASSIFIER_WITHOUT_BRANCH = Architecture(branches_late=False)
_SCORE = Architecture(("score",), branches_late=False)
_SCORE_OF_LAST_TOKEN = Architecture(("score",), pools_last_token=True, branches_late=False)
_DENSE_AND_PROJECTION = Architecture(("classifier.out_proj",), ("classifier.dense",))
_MODERN_BERT = Architecture(before=("head.dense",))
_POSITION_NORM = {"encoder.LayerNorm": "it acts on the table of relative positions, whose rows are no examples"}
_RELATIVE_EMBEDDINGS = {"encoder.rel_embeddings": -1}
_BESIDE_DEBERTA_V2 = {"encoder.conv": 0, "encoder.LayerNorm": -1, **_RELATIVE_EMBEDDINGS}
_DEBERTA_V2 = Architecture(before=("pooler.dense",), without_members=_POSITION_NORM, within_blocks=_BESIDE_DEBERTA_V2)
_RELATIVE_BIAS = {"encoder.relative_attention_bias": -1}

# An architecture is supported if it stands here: its head is known and the tests cover it.
ARCHITECTURES = {
    "AlbertForMultipleChoice": _CLASSIFIER_WITHOUT_BRANCH,
    "AlbertForSequenceClassification": _CLASSIFIER_WITHOUT_BRANCH,
    "AlbertForTokenClassification": _CLASSIFIER_WITHOUT_BRANCH,
    "BeitForImageClassification": _CLASSIFIER,
    "BertForMultipleChoice": _CLASSIFIER,
    "BertForSequenceClassification": _CLASSIFIER,
    "BertForTokenClassification": _CLASSIFIER,
    "CamembertForMultipleChoice": _CLASSIFIER,
    "CamembertForSequenceClassification": _DENSE_AND_PROJECTION,
    "CamembertForTokenClassification": _CLASSIFIER,
    "CLIPForImageClassification": Architecture(
        backbone="vision_model",
        without_members={"post_layernorm": "the classifier does not see its output"},
    ),
    "ConvNextForImageClassification": _CLASSIFIER,
    "ConvNextV2ForImageClassification": _CLASSIFIER,
    "DebertaForSequenceClassification": Architecture(before=("pooler.dense",), within_blocks=_RELATIVE_EMBEDDINGS),
    "DebertaForTokenClassification": Architecture(within_blocks=_RELATIVE_EMBEDDINGS),
    "DebertaV2ForMultipleChoice": _DEBERTA_V2,
    "DebertaV2ForSequenceClassification": _DEBERTA_V2,
    "DebertaV2ForTokenClassification": Architecture(without_members=_POSITION_NORM, within_blocks=_BESIDE_DEBERTA_V2),
    "DeiTForImageClassification": _CLASSIFIER,
    "DeiTForImageClassificationWithTeacher": Architecture(("cls_classifier", "distillation_classifier")),
    "Dinov2ForImageClassification": _CLASSIFIER,
    "Dinov2WithRegistersForImageClassification": _CLASSIFIER,
    "DINOv3ViTForImageClassification": _CLASSIFIER,
    "DistilBertForMultipleChoice": Architecture(before=("pre_classifier",)),
    "DistilBertForSequenceClassification": Architecture(before=("pre_classifier",)),
    "DistilBertForTokenClassification": _CLASSIFIER,
    "ElectraForMultipleChoice": Architecture(before=("sequence_summary.summary",)),
    "ElectraForSequenceClassification": _DENSE_AND_PROJECTION,
    "ElectraForTokenClassification": _CLASSIFIER,
    "GPT2ForSequenceClassification": _SCORE_OF_LAST_TOKEN,
    "GPT2ForTokenClassification": _CLASSIFIER_WITHOUT_BRANCH,
    "LlamaForSequenceClassification": _SCORE_OF_LAST_TOKEN,
    "LlamaForTokenClassification": _SCORE,
    "ModernBertForMultipleChoice": Architecture(before=("head.dense",), branches_late=False),
    "ModernBertForSequenceClassification": _MODERN_BERT,
    "ModernBertForTokenClassification": _MODERN_BERT,
    "MPNetForMultipleChoice": Architecture(within_blocks=_RELATIVE_BIAS),
    "MPNetForSequenceClassification": Architecture(
        ("classifier.out_proj",), ("classifier.dense",), within_blocks=_RELATIVE_BIAS
    ),
    "MPNetForTokenClassification": Architecture(within_blocks=_RELATIVE_BIAS),
    "Qwen2ForSequenceClassification": _SCORE_OF_LAST_TOKEN,
    "Qwen2ForTokenClassification": _SCORE,
    "Qwen3ForSequenceClassification": _SCORE_OF_LAST_TOKEN,
    "Qwen3ForTokenClassification": _SCORE,
    "RobertaForMultipleChoice": _CLASSIFIER,
    "RobertaForSequenceClassification": _DENSE_AND_PROJECTION,
    "RobertaForTokenClassification": _CLASSIFIER,
    "SiglipForImageClassification": Architecture(
        backbone="vision_model",
        without_members={"head.layernorm": "the classifier does not see its output"},
    ),
    "SwinForImageClassification": _CLASSIFIER,
    "Swinv2ForImageClassification": _CLASSIFIER,
    "ViTForImageClassification": _CLASSIFIER,
    "XLMRobertaForMultipleChoice": _CLASSIFIER,
    "XLMRobertaForSequenceClassification": _DENSE_AND_PROJECTION,
    "XLMRobertaForTokenClassification": _CLASSIFIER,
}

_TASKS_BY_SUFFIX = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForMultipleChoice": "multiple-choice",
    "ForImageClassification": "image-classification",
    "ForImageClassificationWithTeacher": "image-classification",
}


def architecture_of(model: PreTrainedModel) -> Architecture:
    """Return what members have to know of a model.

    Args:
        model: The base model.

    Raises:
        ValueError: Its class is not supported; the message gives the reason where one is known.
    """
    name = type(model).__name__
    if name not in ARCHITECTURES:
        raise ValueError(f"{name} is not supported: {_reason_against(model)} Supported are {', '.join(ARCHITECTURES)}.")
    return ARCHITECTURES[name]


def backbone_name(model: PreTrainedModel) -> str:
    """Return the name of the module under the head.

    Args:
        model: The base model, of a supported class.
    """
    return ARCHITECTURES[type(model).__name__].backbone or model.base_model_prefix


def can_branch_late(model: PreTrainedModel) -> bool:
    """Whether the rows of a model can be repeated at one of its blocks instead of at its inputs.

    Args:
        model: The base model, of a supported class.
    """
    pools_by_mask = getattr(model.config, "classifier_pooling", "cls") == "mean"  # a mask of the examples' rows
    return ARCHITECTURES[type(model).__name__].branches_late and not pools_by_mask


def class_named(name: str) -> type[PreTrainedModel]:
    """Return a supported class by its name.

    Args:
        name: Name of the class.

    Raises:
        ValueError: The class is not supported.
    """
    # The name may come from a downloaded file: nothing is looked up for a name that is not known here.
    if name not in ARCHITECTURES:
        raise ValueError(f"The adapter's base model is of class {name}, which is not supported.")
    return getattr(transformers, name, None) or getattr(dinov3, name)


def task_of_class(name: str) -> str:
    """Return the task of a supported class by its name in `transformers.pipeline`.

    Args:
        name: Name of the class.
    """
    return next(task for suffix, task in _TASKS_BY_SUFFIX.items() if name.endswith(suffix))


def _reason_against(model: PreTrainedModel) -> str:
    if hasattr(model, "logit_scale"):
        return (
            "it compares every image of a batch with every text (`logits_per_image`), and members live in the batch. "
            "Its image tower is supported as a classifier, through AutoModelForImageClassification."
        )
    if "mamba" in model.config.model_type:
        return "its norms are fused with other operations, where members cannot reach them."
    if model.can_generate():
        return "it generates, and beam search reorders the rows of the batch, in which the members live."
    for name, module in model.named_modules():
        if is_norm(module):
            try:
                NormFormula.of(module)
            except ValueError as error:
                return f"its norm {name}, {error}."
    if not any(type(model).__name__.endswith(suffix) for suffix in _TASKS_BY_SUFFIX):
        return (
            "it has no classification head. It is loaded with one through AutoModelForSequenceClassification and its "
            "like for other tasks, or by `ensemble_from_pretrained`."
        )
    return f"its head is not known here (transformers {transformers.__version__})."
