"""Real images without the Hub: Fashion-MNIST as Debian packages it, or the digits that come with scikit-learn."""

import gzip
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import PIL.Image
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from demo_assets import cache_folder, finished_or_nothing
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

FASHION_PACKAGE = "dataset-fashion-mnist"
FASHION_VERSION = "0.0~git20200523.55506a9-1"
FASHION_SHA256 = "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0"
FASHION_CLASSES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip


def demo_images() -> tuple[str, DatasetDict]:
    """Return the name and the splits "train" and "report" of Fashion-MNIST, or of the digits if it cannot be had.

    Fashion-MNIST has 60,000 and 10,000 images of 28 pixels a side, the digits 1,347 and 450 of 8; both have 10 classes.

    Raises:
        RuntimeError: What was fetched is not the package that it should be.
    """
    folder = fashion_folder()
    if folder is None:
        print(f"The Debian package {FASHION_PACKAGE} cannot be had here; scikit-learn's digits are used.", flush=True)
        return "digits", digits()
    return "Fashion-MNIST", fashion_mnist(folder)


def fashion_folder() -> Path | None:
    """Return the folder of Fashion-MNIST's files, fetched with apt-get if it is not in the cache; it needs no root.

    Returns:
        The folder; None where there is no apt-get, or it does not find this version of the package.

    Raises:
        RuntimeError: The package has another hash than the pinned one; nothing is left of it.
    """
    folder = cache_folder() / f"fashion-mnist-{FASHION_VERSION}"
    if folder.exists():
        return folder
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return None
    with tempfile.TemporaryDirectory() as workplace:
        print(f"Fetching the Debian package {FASHION_PACKAGE} {FASHION_VERSION}", flush=True)
        command = ["apt-get", "download", f"{FASHION_PACKAGE}={FASHION_VERSION}"]
        done = subprocess.run(command, cwd=workplace, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr.strip(), flush=True)
            return None
        (package,) = Path(workplace).glob("*.deb")
        if hashlib.sha256(package.read_bytes()).hexdigest() != FASHION_SHA256:
            raise RuntimeError(f"{package.name} is not the package that was pinned; its hash differs.")
        subprocess.run(["dpkg-deb", "-x", package.name, "unpacked"], cwd=workplace, check=True)
        with finished_or_nothing(folder) as target:
            shutil.copytree(Path(workplace, "unpacked/usr/share/datasets/fashion-mnist"), target)
    return folder


def fashion_mnist(folder: Path) -> DatasetDict:
    """Return the splits "train" and "report" of Fashion-MNIST.

    Args:
        folder: The folder of its four files.
    """
    return DatasetDict(
        {
            name: _as_dataset(
                _read_idx(folder / f"{prefix}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28),
                _read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", 8),
                FASHION_CLASSES,
            )
            for name, prefix in (("train", "train"), ("report", "t10k"))
        }
    )


def digits() -> DatasetDict:
    """Return the splits "train" and "report" of scikit-learn's digits, always the same."""
    images, labels = load_digits(return_X_y=True)
    pixels = (images.reshape(-1, 8, 8) * 255 / 16).round().astype(np.uint8)
    train_x, report_x, train_y, report_y = train_test_split(
        pixels, labels, test_size=0.25, random_state=0, stratify=labels
    )
    names = [str(digit) for digit in range(10)]
    return DatasetDict(
        {"train": _as_dataset(train_x, train_y, names), "report": _as_dataset(report_x, report_y, names)}
    )


def _read_idx(path: Path, header: int) -> np.ndarray:
    return np.frombuffer(gzip.decompress(path.read_bytes()), dtype=np.uint8, offset=header)


def _as_dataset(pixels: np.ndarray, labels: np.ndarray, names: list[str]) -> Dataset:
    images = [PIL.Image.fromarray(image) for image in pixels]
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    return Dataset.from_dict({"image": images, "label": labels.tolist()}, features=features)
