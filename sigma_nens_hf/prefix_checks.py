"""What can have no prefix cache is refused: what is random, what is trained, and a cache that does not fit any more."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from transformers import Trainer

from .architectures import task_of_class
from .blocks import trained_in_prefix
from .cached_batches import tokens_of
from .members import active_branch, base_model_of
from .prefix_cache import PrefixCache
from .prefix_features import prefix_features
from .staged_training import has_first_stage

_PROBED_EXAMPLES = 16
# Other positions make other features; another length of the batch alone, in 16 bits, hardly.
_FAR_OFF = 0.05
# Another length of the batch in full precision.
_NOT_ROUNDING = 1e-3
RANDOM = (
    "prefix_cache: the training data is random, {} of the same examples differs from one time to the next. Features "
    "can only be kept of examples that are always the same: switch augmentation off."
)


def check_can_be_cached(trainer: Trainer) -> None:
    """Refuse what can be told before anything is trained or built to have no cache.

    Args:
        trainer: The trainer of an ensemble.

    Raises:
        ValueError: As for `training_from_cache`.
    """
    base_model, dataset = base_model_of(trainer.model), trainer.train_dataset
    if active_branch(base_model) is None or task_of_class(type(base_model).__name__) == "multiple-choice":
        raise ValueError(
            "prefix_cache needs an ensemble whose members start at a later block: give it a branch_layer (decoders, "
            "ALBERT, ModernBERT with a mean as its pooling and models for multiple choice can have no cache)."
        )
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError(
            f"prefix_cache needs a datasets.Dataset, by whose content a cache is found again, got "
            f"{type(dataset).__name__}. datasets.Dataset.from_list makes one of examples in memory."
        )
    if trainer.args.neftune_noise_alpha is not None:
        raise ValueError(
            "prefix_cache: neftune_noise_alpha makes the features before branch_layer random. Leave it out."
        )
    is_staged = has_first_stage(trainer)  # which trains the norms there, and freezes them before a cache is made
    trained = trained_in_prefix(base_model, active_branch(base_model))
    trained = [name for name in trained if not (is_staged and ".sigma_norm_" in name)]
    if trained:
        raise ValueError(
            f"prefix_cache: what runs before branch_layer is trained ({trained[0]}), so its features change. Use "
            "prefix='frozen' or 'staged', and modules_to_save of modules behind it."
        )
    if is_staged:
        with torch.random.fork_rng():
            probe_examples(trainer, trainer._remove_unused_columns(dataset, description="prefix cache"))


@dataclass(frozen=True)
class Probe:
    """A few examples, as the model gets them.

    Attributes:
        indices: Which they are.
        batch: Their batch.
        features: Their features, (B, ...).
    """

    indices: list[int]
    batch: dict[str, Any]
    features: torch.Tensor


def probe_examples(trainer: Trainer, dataset: datasets.Dataset) -> Probe:
    """Look at a few examples, and refuse what is not the same every time.

    Args:
        trainer: The trainer of an ensemble.
        dataset: Its training data.

    Raises:
        ValueError: The inputs or the features of the same examples differ.
    """
    step = max(1, len(dataset) // _PROBED_EXAMPLES)
    indices = list(range(0, len(dataset), step))[:_PROBED_EXAMPLES]
    batches = [collated(trainer, dataset, indices) for _ in range(2)]
    for name, value in batches[0].items():
        if isinstance(value, torch.Tensor) and not torch.equal(value, batches[1][name]):
            raise ValueError(RANDOM.format(name))
    trainer.model.train()
    features = [prefix_features(trainer, batch) for batch in batches]
    if not torch.allclose(*(found.float() for found in features), rtol=1e-3, atol=1e-4):
        raise ValueError(
            "prefix_cache: dropout makes the features before branch_layer random. Train without it there, with "
            "prefix_dropout=False, or load the base model without dropout."
        )
    probe = Probe(indices, dict(batches[0]), features[0].detach())
    if is_of_texts(trainer):
        _check_padding(trainer, dataset, probe)
    return probe


def is_of_texts(trainer: Trainer) -> bool:
    """Whether a trainer's model takes texts.

    Args:
        trainer: The trainer of an ensemble.
    """
    return base_model_of(trainer.model).main_input_name != "pixel_values"


def collated(trainer: Trainer, dataset: datasets.Dataset, indices: Sequence[int]) -> dict[str, Any]:
    """Return examples as the model gets them.

    Args:
        trainer: The trainer of an ensemble.
        dataset: Its training data.
        indices: Which examples.

    Raises:
        ValueError: They do not fit into one batch.
    """
    try:
        return trainer.data_collator([dataset[index] for index in indices])
    except RuntimeError as error:  # of torch.stack
        raise ValueError(
            f"prefix_cache: examples {indices[0]} to {indices[-1]} cannot be joined in one batch: {error}. Give the "
            "trainer a data_collator that pads texts, or images of one size."
        ) from error


def _check_padding(trainer: Trainer, dataset: datasets.Dataset, probe: Probe) -> None:
    """Refuse texts whose features hang on how far they are padded, and so on the others of their batch."""
    tokens = tokens_of(probe.batch)
    check_first_tokens(trainer, tokens)
    shortest = int(tokens.sum(1).argmin())
    alone = collated(trainer, dataset, [probe.indices[shortest]])
    expected = probe.features[shortest][tokens[shortest].to(probe.features.device)]
    found = prefix_features(trainer, alone)[0][tokens_of(alone)[0].to(expected.device)]
    if _differ(found, expected, _FAR_OFF):
        raise ValueError(
            "prefix_cache: the features of a text are others when it is padded further, as with padding on the left "
            "where positions are counted from there, or without an attention_mask. Pad on the right."
        )


def check_first_tokens(trainer: Trainer, tokens: torch.Tensor) -> None:
    """Refuse texts that are classified by a first token which is none.

    Args:
        trainer: The trainer of an ensemble.
        tokens: Where texts have tokens, (B, L).

    Raises:
        ValueError: A text begins with padding, or with a token that is masked.
    """
    is_sequence = task_of_class(type(base_model_of(trainer.model)).__name__) == "text-classification"
    if is_sequence and not tokens[:, 0].all():
        raise ValueError(
            "prefix_cache: texts are padded on the left, or their first token is masked, so they would be classified "
            "by the features of padding, which are not kept. Pad on the right."
        )


def _differ(found: torch.Tensor, expected: torch.Tensor, most: float) -> bool:
    """Whether features differ by more than a share of the largest."""
    if found.shape != expected.shape:
        return True
    found, expected = found.detach().float().cpu(), expected.detach().float().cpu()
    return bool((found - expected).abs().max() > most * expected.abs().max().clamp_min(1))


def check_features(trainer: Trainer, cache: PrefixCache, probe: Probe) -> None:
    """Refuse a cache whose features are not those of now, which its name does not tell of all code.

    Args:
        trainer: The trainer of an ensemble.
        cache: The whole cache.
        probe: A few examples with their features.

    Raises:
        ValueError: Features of one of them differ.
    """
    is_rounded = probe.features.dtype != torch.float32 or trainer.accelerator.mixed_precision != "no"
    for row, index in enumerate(probe.indices):
        expected, (found, _) = probe.features[row], cache[index]
        if is_of_texts(trainer):
            expected = expected[tokens_of(probe.batch)[row].to(expected.device)]
        if _differ(found, expected, _FAR_OFF if is_rounded else _NOT_ROUNDING):
            raise ValueError(
                f"The prefix cache in {cache.folder} holds other features of example {index} than the model computes "
                "now: code or weights have changed that its name does not tell of, or the file is damaged. Delete "
                "that folder; it is built anew then."
            )
