"""What the features of a prefix hang on, as one name: another model, other data or another version is another cache."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import datasets
import torch
import transformers
from datasets.fingerprint import Hasher
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from .architectures import backbone_name
from .blocks import block_names, prefix_modules
from .layer import MemberLayer, SigmaNormLayer
from .version import __version__

# Of the caches' form; raised when what is kept changes without a new version of the package.
_FORMAT = 2
# Fields of a config that say nothing of the backbone's computation.
_NAMES_AND_HEADS = frozenset(
    {
        "_name_or_path", "architectures", "dtype", "finetuning_task", "id2label", "label2id", "num_labels",
        "problem_type", "torch_dtype", "transformers_version",
    }
)  # fmt: skip
_READ_AT_ONCE = 1_000


def cache_key(
    model: nn.Module,
    block: int,
    dataset: datasets.Dataset,
    collator: Callable,
    probe: Mapping[str, Any],
    precision: str,
) -> str:
    """Return the name of the cache that belongs to a model, a dataset and a way to process it.

    Texts are known by what the dataset holds, and what becomes of them is compared text by text when the cache is used
    (see `cached_batches`). Images are known by the fingerprint that `datasets` gives a dataset, by the size and time
    of files of their own, and by the code of transforms and collators as far as it can be pickled; what these make of
    examples, by a few of them.

    Args:
        model: The base model.
        block: Number of the block at the branch.
        dataset: The examples.
        collator: What makes batches of them.
        probe: A batch of a few of them, as the model gets it.
        precision: That of the features and of the computation, and the device.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NAMES_AND_HEADS}
    is_text = model.main_input_name == "input_ids"
    parts = {
        "format": _FORMAT,
        "sigma_nens_hf": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "class": type(model).__name__,
        "config": config,
        "block": block,
        "precision": precision,
        "weights": _hash_of(_tensors_below(model, block)),
        "examples": _hash_of_texts(dataset) if is_text else _hash_of_images(dataset, collator),
        # Labels of images are kept beside the features, those of texts are not.
        "processing": _hash_of(
            (name, value) for name, value in sorted(probe.items()) if not is_text or name != "labels"
        ),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _tensors_below(model: nn.Module, block: int) -> Iterable[tuple[str, torch.Tensor | float]]:
    """Yield what the prefix computes with, and some frozen weights of the backbone beside the blocks, which do no harm.

    Members' own parameters are none of it, and of modules with trained copies only the copy in use.
    """
    modules, below = dict(model.named_modules()), prefix_modules(model, block)
    apart = [f"{name}." for name in block_names(model)[block:]]
    own = set()
    for name, module in modules.items():
        if isinstance(module, AuxiliaryTrainingWrapper):
            apart.append(f"{name}." if name in below else f"{name}.modules_to_save.")
            if name in below:
                active = next((copy for copy in module.active_adapters if copy in module.modules_to_save), None)
                used = module.original_module if active is None else module.modules_to_save[active]
                yield from ((f"{name}.{inner}", tensor) for inner, tensor in used.state_dict().items())
        elif isinstance(module, SigmaNormLayer):
            active = module.member_adapter
            own |= {
                f"{name}.{kind}.{adapter}"
                for adapter in module.role
                if adapter != active or module.carries_members(adapter)
                for kind in module.adapter_layer_names
            }
            if name in below and active is not None:
                yield f"{name}.init_scaler", module.init_scaler[active]
        elif isinstance(module, MemberLayer):
            apart.append(f"{name}.")
    for name, tensor in model.state_dict().items():
        if name.startswith(f"{backbone_name(model)}.") and name not in own and not name.startswith(tuple(apart)):
            yield name.replace(".original_module.", ".").replace(".base_layer.", "."), tensor


def _hash_of(values: Iterable[tuple[str, Any]]) -> str:
    found = hashlib.sha256()
    for name, value in values:
        found.update(name.encode())
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()


def _hash_of_texts(dataset: datasets.Dataset) -> str:
    columns = [name for name in dataset.column_names if name not in ("labels", "label", "label_ids")]
    plain = dataset.with_format(None).select_columns(columns)
    found = hashlib.sha256()
    for rows in plain.iter(_READ_AT_ONCE):
        found.update(repr([rows[name] for name in columns]).encode())
    return found.hexdigest()


def _hash_of_images(dataset: datasets.Dataset, collator: Callable) -> str:
    parts = [("fingerprint", f"{len(dataset)} {dataset._fingerprint}")]
    for name, code in (("transform", dataset.format["format_kwargs"]), ("collator", collator)):
        # What cannot be pickled is known by what it does to a few examples alone.
        with suppress(Exception):
            parts.append((name, Hasher.hash(code)))
    for column in (name for name, feature in dataset.features.items() if isinstance(feature, datasets.Image)):
        undecoded = dataset.with_format(None).cast_column(column, datasets.Image(decode=False)).flatten()
        for rows in undecoded.select_columns([f"{column}.path"]).iter(_READ_AT_ONCE):
            paths = (path for path in rows[f"{column}.path"] if path)  # of images in the dataset itself, mere names
            files = [os.stat(path) for path in paths if os.path.exists(path)]
            parts.append((column, [(file.st_size, file.st_mtime_ns) for file in files]))
    return _hash_of(parts)
