"""Digests by which an adapter knows its own weights, and the base model that it was made over."""

import hashlib
from collections.abc import Iterable

import torch
from safetensors import safe_open
from torch import nn

from .registration import PARAMETER_PREFIX

_SAMPLES = 256  # of each tensor of the base model: all of a few hundred million numbers would take seconds
# What peft and this package put into the names of a base model's own parameters.
_WRAPPERS = (".base_layer", ".original_module")


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Return the SHA-256 of a tensor's dtype, shape and bytes.

    Args:
        tensor: The tensor.
    """
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + data).digest()


def joint_digest(digests: Iterable[bytes]) -> str:
    """Return one digest, in hexadecimal, for those of several tensors in any order, since their names may change.

    Args:
        digests: As from `tensor_digest`.
    """
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def digest_of_file(path: str) -> str:
    """Return the joint digest of the tensors in a safetensors file.

    Args:
        path: The file.
    """
    with safe_open(path, "pt") as file:
        keys = file.keys()
        return joint_digest(tensor_digest(file.get_tensor(key)) for key in keys)


def check_digest(digests: Iterable[bytes], expected: str | None, source: str) -> None:
    """Refuse weights that are not those that an adapter was saved with.

    Args:
        digests: Of the weights, as from `tensor_digest`.
        expected: Their joint digest; None, which passes everything: not known.
        source: What they are, for the error.

    Raises:
        ValueError: They are others.
    """
    if expected is not None and joint_digest(digests) != expected:
        raise ValueError(
            f"{source} does not hold the weights that its adapter_config.json was saved with: a file was damaged, or "
            'changed, or is another adapter\'s. If you changed it, put "weights_digest": null into adapter_config.json.'
        )


def base_fingerprint(model: nn.Module, replaced: Iterable[str]) -> str | None:
    """Return the dtypes of a base model and a digest of numbers sampled from everything that an adapter leaves in use.

    Left out are the input embeddings, which may be resized for new tokens.

    Args:
        model: The base model, with or without adapters on it.
        replaced: Names of the modules that the adapter replaces.

    Returns:
        Such as "float32:" and 64 hexadecimal digits; None while the weights are not in memory.
    """
    try:
        embeddings = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embeddings = None  # transformers says in either way that a model of images has none
    left_out = {id(parameter) for parameter in embeddings.parameters()} if embeddings is not None else set()
    prefixes = tuple(f"{name}." for name in replaced)
    dtypes, digests = set(), []
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        is_of_adapter = f".{PARAMETER_PREFIX}" in name or ".modules_to_save." in name
        if is_of_adapter or id(parameter) in left_out or name.startswith(prefixes):
            continue
        if parameter.is_meta or not parameter.numel():
            return None
        flat = parameter.detach().flatten()
        rows = torch.linspace(0, len(flat) - 1, min(len(flat), _SAMPLES), dtype=torch.float64).long()
        digests.append(tensor_digest(flat[rows.to(flat.device)]))
        dtypes.add(str(parameter.dtype).removeprefix("torch."))
    return f"{','.join(sorted(dtypes))}:{joint_digest(digests)}"


def check_base(found: str | None, expected: str | None, base: str | None) -> None:
    """Refuse a base model that is not the one that an adapter was made over.

    Args:
        found: Fingerprint of the base model.
        expected: That of the adapter's; None: not known. What is in another precision cannot be compared and passes.
        base: What the adapter calls its base model, for the error.

    Raises:
        ValueError: It is another one.
    """
    if found is None or expected is None or found == expected:
        return
    if found.partition(":")[0] == expected.partition(":")[0]:
        raise ValueError(
            f"The base model does not have the weights that the adapter was trained over: {base} has changed since, or "
            "this is another checkpoint, or a part of it that the adapter does not bring is new and random. Load the "
            'one that it was trained over, or, if you mean this one, put "base_fingerprint": null into '
            "adapter_config.json."
        )
