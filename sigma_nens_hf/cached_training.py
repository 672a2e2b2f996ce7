"""Training over a cache of the prefix: the cache is built or completed first, and batches are made from it."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import datasets
import torch
from tqdm.auto import tqdm
from transformers import Trainer

from .cached_batches import DIGEST, NumberedExamples, PrefixCollator, digests, tokens_of
from .members import active_branch, base_model_of
from .prefix_cache import PrefixCache, size_in_bytes
from .prefix_cache_key import cache_key
from .prefix_checks import (
    RANDOM,
    Probe,
    check_can_be_cached,
    check_features,
    check_first_tokens,
    collated,
    probe_examples,
)
from .prefix_features import prefix_features
from .trainer_evaluation import temporarily

_MEBIBYTE = 2**20


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
        probe = probe_examples(trainer, dataset)
        precision = f"{trainer.accelerator.mixed_precision} {probe.features.dtype} {probe.features.device.type}"
        users_collator = trainer.data_collator.collator
        key = cache_key(base_model, active_branch(base_model), dataset, users_collator, probe.batch, precision)
        collator.cache = PrefixCache(trainer.args.prefix_cache, key, len(dataset))
        collator.image_shape = None if collator.is_text else tuple(probe.batch["pixel_values"].shape[1:])
        collator.constants = {name: value for name, value in probe.batch.items() if not isinstance(value, torch.Tensor)}
        with trainer.args.main_process_first(desc="prefix cache"):
            _complete(trainer, dataset, collator, probe)
        check_features(trainer, collator.cache, probe)
    # Images need not be read any more, nor decoded.
    numbered = NumberedExamples(dataset if collator.is_text else [{}] * len(dataset))
    with temporarily(trainer, train_dataset=numbered, data_collator=collator):
        yield


@torch.no_grad()
def _complete(trainer: Trainer, dataset: datasets.Dataset, collator: PrefixCollator, probe: Probe) -> None:
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
            for length in tokens_of(collated(trainer, dataset, indices)).sum(1).tolist()
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
                batch = collated(trainer, dataset, indices)
                rows = prefix_features(trainer, batch)
                if collator.is_text:
                    tokens = tokens_of(batch)
                    check_first_tokens(trainer, tokens)
                    found += [row[mask] for row, mask in zip(rows, tokens.to(rows.device), strict=True)]
                    extras.setdefault(DIGEST, []).extend(digests(batch))
                    continue
                # One in a batch twice, since augmentation may be rare.
                again = collated(trainer, dataset, indices[:1])["pixel_values"][0]
                if not torch.equal(again, batch["pixel_values"][0]):
                    raise ValueError(RANDOM.format("pixel_values"))
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
