"""Training over a cache of the prefix: the cache is built or completed first, and batches are made from it."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from tqdm.auto import tqdm
from transformers import Trainer

from .architectures import task_of_class
from .blocks import trained_in_prefix
from .call_arguments import PREFIX_FEATURES
from .labels import IGNORED_LABEL
from .members import active_branch, base_model_of
from .prefix_cache import PrefixCache, size_in_bytes
from .prefix_cache_key import cache_key
from .prefix_features import prefix_features
from .staged_training import has_first_stage
from .trainer_evaluation import temporarily

PREFIX_INDEX = "prefix_index"
_PROBED_EXAMPLES = 16
_MEBIBYTE = 2**20
# Other positions make other features; another length of the batch alone, in 16 bits, hardly.
_FAR_OFF = 0.05
# Another length of the batch in full precision.
_NOT_ROUNDING = 1e-3
_DIGEST = "digest"
_RANDOM = (
    "prefix_cache: the training data is random, {} of the same examples differs from one time to the next. Features "
    "can only be kept of examples that are always the same: switch augmentation off."
)


@contextmanager
def training_from_cache(trainer: Trainer) -> Iterator[None]:
    """Let a trainer train from a cache in its `prefix_cache` folder, which is built or completed first.

    Args:
        trainer: The trainer of an ensemble.

    Raises:
        ValueError: There is no prefix that could be computed apart; it is trained; augmentation or dropout would make
            its features random; the training data is no `datasets.Dataset`; or the disk is too small.
    """
    check_can_be_cached(trainer)
    base_model = base_model_of(trainer.model)
    dataset = trainer._remove_unused_columns(trainer.train_dataset, description="prefix cache")
    collator = PrefixCollator(trainer.data_collator, base_model.main_input_name)
    collator.repeats_image = trainer.args.n_gpu > 1
    with torch.random.fork_rng():  # a training is the same whether its cache was there or not
        probe = _probe(trainer, dataset)
        precision = f"{trainer.accelerator.mixed_precision} {probe.features.dtype} {probe.features.device.type}"
        users_collator = trainer.data_collator.collator
        key = cache_key(base_model, active_branch(base_model), dataset, users_collator, probe.batch, precision)
        collator.cache = PrefixCache(trainer.args.prefix_cache, key, len(dataset))
        collator.image_shape = None if collator.is_text else tuple(probe.batch["pixel_values"].shape[1:])
        collator.constants = {name: value for name, value in probe.batch.items() if not isinstance(value, torch.Tensor)}
        with trainer.args.main_process_first(desc="prefix cache"):
            _complete(trainer, dataset, collator, probe)
        _check_features(trainer, collator.cache, probe)
    # Images need not be read any more, nor decoded.
    numbered = NumberedExamples(dataset if collator.is_text else [{}] * len(dataset))
    with temporarily(trainer, train_dataset=numbered, data_collator=collator):
        yield


class NumberedExamples(torch.utils.data.Dataset):
    """Examples with their index into a cache.

    Args:
        examples: The examples, dicts.
    """

    def __init__(self, examples: Sequence[dict[str, Any]]):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an example with its index."""
        return {**self.examples[index], PREFIX_INDEX: index}


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
            _probe(trainer, trainer._remove_unused_columns(dataset, description="prefix cache"))


class PrefixCollator:
    """Makes batches with the features of the prefix for examples with an index into a cache, and plain ones for others.

    Args:
        collator: The plain collator.
        main_input_name: Name of the model's main input.
    """

    def __init__(self, collator: Callable, main_input_name: str):
        self.collator = collator
        self.is_text = main_input_name != "pixel_values"
        self.cache: PrefixCache | None = None
        self.image_shape: tuple[int, ...] | None = None
        self.constants: dict[str, Any] = {}
        # torch.nn.DataParallel takes all tensors of a batch apart.
        self.repeats_image = False

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Make one batch.

        Returns:
            `prefix_features` (B, L, ...), padded as the inputs are, with what the model needs beside them: of texts all
            their inputs, of images one empty image, for its size.
        """
        if PREFIX_INDEX not in examples[0]:
            return self.collator(examples)
        rows = [self.cache[example[PREFIX_INDEX]] for example in examples]
        features = [row for row, _ in rows]
        if not self.is_text:
            kept = {name: torch.stack([extras[name] for _, extras in rows]) for name in rows[0][1]}
            image = torch.zeros(len(rows) if self.repeats_image else 1, *self.image_shape)
            return {PREFIX_FEATURES: torch.stack(features), "pixel_values": image, **kept, **self.constants}
        batch = self.collator([{k: v for k, v in example.items() if k != PREFIX_INDEX} for example in examples])
        for example, digest, (_, extras) in zip(examples, _digests(batch), rows, strict=True):
            if digest != extras[_DIGEST]:
                raise ValueError(
                    f"prefix_cache: the tokens of example {example[PREFIX_INDEX]} are not those of which features are "
                    f"kept in {self.cache.folder}. Where texts are processed differently every time, features cannot "
                    "be kept; otherwise delete that folder."
                )
        tokens = tokens_of(batch)
        labels = batch.get("labels")
        if labels is not None and labels.shape == tokens.shape and (labels[~tokens] != IGNORED_LABEL).any():
            raise ValueError(
                f"prefix_cache: padding has labels other than {IGNORED_LABEL}, but its features are not kept."
            )
        padded = features[0].new_zeros(*tokens.shape, *features[0].shape[1:])
        padded[tokens] = torch.cat(features)
        return {PREFIX_FEATURES: padded, **batch}


def tokens_of(batch: dict[str, Any]) -> torch.Tensor:
    """Return where a batch of texts has tokens and no padding, (B, L).

    Args:
        batch: The inputs of a model.
    """
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


@dataclass(frozen=True)
class _Probe:
    """A few examples, as the model gets them.

    Attributes:
        indices: Which they are.
        batch: Their batch.
        features: Their features, (B, ...).
    """

    indices: list[int]
    batch: dict[str, Any]
    features: torch.Tensor


def _probe(trainer: Trainer, dataset: datasets.Dataset) -> _Probe:
    """Look at a few examples, and refuse what is not the same every time."""
    step = max(1, len(dataset) // _PROBED_EXAMPLES)
    indices = list(range(0, len(dataset), step))[:_PROBED_EXAMPLES]
    batches = [_collated(trainer, dataset, indices) for _ in range(2)]
    for name, value in batches[0].items():
        if isinstance(value, torch.Tensor) and not torch.equal(value, batches[1][name]):
            raise ValueError(_RANDOM.format(name))
    trainer.model.train()
    features = [prefix_features(trainer, batch) for batch in batches]
    if not torch.allclose(*(found.float() for found in features), rtol=1e-3, atol=1e-4):
        raise ValueError(
            "prefix_cache: dropout makes the features before branch_layer random. Train without it there, with "
            "prefix_dropout=False, or load the base model without dropout."
        )
    probe = _Probe(indices, dict(batches[0]), features[0].detach())
    if _is_of_texts(trainer):
        _check_padding(trainer, dataset, probe)
    return probe


def _is_of_texts(trainer: Trainer) -> bool:
    return base_model_of(trainer.model).main_input_name != "pixel_values"


def _collated(trainer: Trainer, dataset: datasets.Dataset, indices: Sequence[int]) -> dict[str, Any]:
    try:
        return trainer.data_collator([dataset[index] for index in indices])
    except RuntimeError as error:  # of torch.stack
        raise ValueError(
            f"prefix_cache: examples {indices[0]} to {indices[-1]} cannot be joined in one batch: {error}. Give the "
            "trainer a data_collator that pads texts, or images of one size."
        ) from error


def _check_padding(trainer: Trainer, dataset: datasets.Dataset, probe: _Probe) -> None:
    """Refuse texts whose features hang on how far they are padded, and so on the others of their batch."""
    tokens = tokens_of(probe.batch)
    _check_first_tokens(trainer, tokens)
    shortest = int(tokens.sum(1).argmin())
    alone = _collated(trainer, dataset, [probe.indices[shortest]])
    expected = probe.features[shortest][tokens[shortest].to(probe.features.device)]
    found = prefix_features(trainer, alone)[0][tokens_of(alone)[0].to(expected.device)]
    if _differ(found, expected, _FAR_OFF):
        raise ValueError(
            "prefix_cache: the features of a text are others when it is padded further, as with padding on the left "
            "where positions are counted from there, or without an attention_mask. Pad on the right."
        )


def _check_first_tokens(trainer: Trainer, tokens: torch.Tensor) -> None:
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


def _check_features(trainer: Trainer, cache: PrefixCache, probe: _Probe) -> None:
    """Refuse a cache whose features are not those of now, which its name does not tell of all code."""
    is_rounded = probe.features.dtype != torch.float32 or trainer.accelerator.mixed_precision != "no"
    for row, index in enumerate(probe.indices):
        expected, (found, _) = probe.features[row], cache[index]
        if _is_of_texts(trainer):
            expected = expected[tokens_of(probe.batch)[row].to(expected.device)]
        if _differ(found, expected, _FAR_OFF if is_rounded else _NOT_ROUNDING):
            raise ValueError(
                f"The prefix cache in {cache.folder} holds other features of example {index} than the model computes "
                "now: code or weights have changed that its name does not tell of, or the file is damaged. Delete "
                "that folder; it is built anew then."
            )


@torch.no_grad()
def _complete(trainer: Trainer, dataset: datasets.Dataset, collator: PrefixCollator, probe: _Probe) -> None:
    """Compute the parts of a cache that are missing, after saying how large it is going to be."""
    cache, args = collator.cache, trainer.args
    missing = cache.missing_parts()
    if not missing:
        return
    cache.remove_unfinished()
    examples = [index for part in missing for index in part]
    if collator.is_text:
        lengths = (
            length
            for indices in _batches(examples, args.eval_batch_size)
            for length in tokens_of(_collated(trainer, dataset, indices)).sum(1).tolist()
        )
        size = size_in_bytes(lengths, probe.features[0, 0])
    else:
        size = size_in_bytes([1] * len(examples), probe.features[0])
    where = f"{size / _MEBIBYTE:,.1f} MiB for {len(examples):,} of {len(dataset):,} examples in {cache.folder}"
    if args.should_log:
        print(f"Prefix cache: {where}", flush=True)
    cache.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache.folder).free
    if size > free:
        raise ValueError(f"The prefix cache takes {where}, but only {free / _MEBIBYTE:,.1f} MiB are free there.")
    was_training = trainer.model.training
    trainer.model.eval()
    try:
        for part in tqdm(missing, desc="Prefix cache", disable=args.disable_tqdm or not args.should_log):
            found, extras = [], {}
            for indices in _batches(part, args.eval_batch_size):
                batch = _collated(trainer, dataset, indices)
                rows = prefix_features(trainer, batch)
                if collator.is_text:
                    tokens = tokens_of(batch)
                    _check_first_tokens(trainer, tokens)
                    found += [row[mask] for row, mask in zip(rows, tokens.to(rows.device), strict=True)]
                    extras.setdefault(_DIGEST, []).extend(_digests(batch))
                    continue
                # One in a batch twice, since augmentation may be rare.
                again = _collated(trainer, dataset, indices[:1])["pixel_values"][0]
                if not torch.equal(again, batch["pixel_values"][0]):
                    raise ValueError(_RANDOM.format("pixel_values"))
                found += list(rows)
                for name, value in batch.items():
                    if isinstance(value, torch.Tensor) and name != "pixel_values":
                        extras.setdefault(name, []).extend(value)
            cache.write_part(part, found, extras)
    finally:
        trainer.model.train(was_training)


def _batches(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


def _digests(batch: dict[str, Any]) -> torch.Tensor:
    """Return a number for each text that tells its inputs from others, (B,), whatever it is padded to."""
    tokens = tokens_of(batch)
    inputs = [batch[name] for name in sorted(batch.keys() - {"labels"})]
    inputs = [value for value in inputs if isinstance(value, torch.Tensor) and value.shape == tokens.shape]
    inputs.append(torch.arange(tokens.shape[1]).expand_as(tokens))  # a mask may have holes
    rows = ([value[row][mask].numpy().tobytes() for value in inputs] for row, mask in enumerate(tokens))
    found = [hashlib.blake2b(b"".join(parts), digest_size=8).digest() for parts in rows]
    return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in found])
