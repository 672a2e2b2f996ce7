"""Images as the examples of a run: augmented in training, and preprocessed as the checkpoint's processor says."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import PIL.Image
import torch
from datasets import Image
from torch import nn

from ..encoding import size_arguments, to_rgb
from ..members import base_model_of
from .arguments import DataArguments, Split
from .augmentation import Augmentation
from .splits import LABELS, choose_column

IMAGE, TRAINING_IMAGE = "image", "training_image"
IMAGE_COLUMNS = ("image", "img")


@dataclass
class ImageArguments(DataArguments):
    """Which images are trained, calibrated and reported on."""

    dataset_name: str | None = field(
        default="ILSVRC/imagenet-1k",
        metadata={
            "help": "Dataset id on the Hub, or a local folder with train/CLASS/*.png and validation/CLASS/*.png; "
            "ignored with train_file."
        },
    )
    image_column: str | None = field(
        default=None, metadata={"help": f"Column of the image; default: the first there is of {IMAGE_COLUMNS}."}
    )
    augmentation: Literal["none", "flip", "crop_flip"] = field(
        default="crop_flip",
        metadata={
            "help": "What training images undergo: nothing; a flip left to right of one in two; a random crop and the "
            "flip. None for what has a left and a right, such as digits."
        },
    )
    crop_scale: float = field(
        default=0.35, metadata={"help": "Smallest share of an image's area that a random crop keeps."}
    )
    image_size: int | None = field(
        default=None,
        metadata={
            "help": "Side in pixels to which images are brought, instead of the checkpoint's own; position embeddings "
            "are interpolated. `predict` does so too; a forward of your own needs interpolate_pos_encoding=True."
        },
    )
    offline_assets: bool = field(
        default=False,
        metadata={
            "help": "Without the Hub: a real ViT from the Python package index and Fashion-MNIST from Debian, or "
            "scikit-learn's digits where there is none, with settings that suit two CPU cores."
        },
    )

    task: ClassVar[str] = "image-classification"
    # Not decoded: a stream is then divided, mixed and passed over without touching a pixel, and each process decodes
    # only the images of its own batches.
    input_feature: ClassVar[Any] = Image(decode=False)

    @property
    def is_augmented(self) -> bool:
        """Whether images are cropped or flipped at random; see `DataArguments`."""
        return self.augmentation != "none"

    def input_columns(self, available: list[str]) -> dict[str, str]:
        """Find the column of the image; see `DataArguments`."""
        return {IMAGE: choose_column("image", self.image_column, IMAGE_COLUMNS, available)}

    def content(self, row: dict[str, Any]) -> bytes:
        """Return an image's file, or its path where it is a file of its own; see `DataArguments`."""
        return row[IMAGE]["bytes"] or row[IMAGE]["path"].encode()

    def adjust(self, model: nn.Module, processor: Any) -> Any:
        """Return the checkpoint's processor, for another size if so wanted; see `DataArguments`."""
        if processor is None:
            raise ValueError(
                "The checkpoint has no preprocessor_config.json. With another mean and deviation than it was trained "
                "with a model can lose tens of points of accuracy, so none is made up here."
            )
        return processor if self.image_size is None else resized_processor(processor, self.image_size)

    def encode(self, split: Split, processor: Any, is_training: bool) -> Split:
        """Mark the images that are to be augmented; see `DataArguments`."""
        # There is one collator for training and evaluation; the name of the column tells it which of the two it is.
        return split.rename_column(IMAGE, TRAINING_IMAGE) if is_training else split

    def collator(self, model: nn.Module, processor: Any) -> Callable[[list], dict]:
        """Decode, augment and preprocess; see `DataArguments`."""
        augment = Augmentation(
            flip=self.augmentation != "none", smallest_crop=self.crop_scale if self.augmentation == "crop_flip" else 1.0
        )
        return ImageCollator(processor, augment, forward_arguments(model, processor))


class ImageCollator:
    """Makes a batch of images.

    Args:
        processor: The image processor.
        augment: What is done to a training image.
        forward_arguments: What the model's forward is called with beside the batch.
    """

    def __init__(self, processor: Any, augment: Augmentation, forward_arguments: dict[str, bool]):
        self.processor = processor
        self.augment = augment
        self.forward_arguments = forward_arguments
        self.decode = Image().decode_example

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Decode, augment where the row says so, and preprocess."""
        images = [
            self.augment(self._rgb(row[TRAINING_IMAGE])) if TRAINING_IMAGE in row else self._rgb(row[IMAGE])
            for row in rows
        ]
        pixels = self.processor(images, return_tensors="pt")["pixel_values"]
        labels = torch.tensor([row[LABELS] for row in rows])
        return {"pixel_values": pixels, LABELS: labels, **self.forward_arguments}

    def _rgb(self, image: dict[str, Any]) -> Any:
        # Grey and palette images, and those with transparency, are among ImageNet's.
        try:
            return to_rgb(self.decode(image))
        except (OSError, ValueError) as error:
            raise ValueError(f"The image {image['path'] or 'without a path'} cannot be read: {error}") from error


def resized_processor(processor: Any, image_size: int) -> Any:
    """Return an image processor like the given one that makes images of another size.

    Args:
        processor: The image processor.
        image_size: The side of the images in pixels.
    """
    settings = processor.to_dict()
    square = {"height": image_size, "width": image_size}
    shortest = settings["size"].get("shortest_edge")
    if shortest is None:
        sizes = {"size": square}
    elif getattr(processor, "do_center_crop", False):
        # As much is cropped off as before.
        sizes = {"size": {"shortest_edge": round(shortest * image_size / settings["crop_size"]["height"])}}
    else:
        sizes = {"size": {"shortest_edge": image_size}}
    if settings.get("crop_size"):
        sizes["crop_size"] = square
    return type(processor).from_dict({**settings, **sizes})


@torch.no_grad()
def forward_arguments(model: nn.Module, processor: Any) -> dict[str, bool]:
    """Find out what a model's forward has to be told to take images of the processor's size.

    Args:
        model: The ensemble.
        processor: The image processor.

    Returns:
        Nothing if it takes them as they are, else `interpolate_pos_encoding`.

    Raises:
        ValueError: The model does not take images of this size at all.
    """
    pixels = processor([PIL.Image.new("RGB", (64, 64))], return_tensors="pt")["pixel_values"].to(model.device)
    arguments, was_training = size_arguments(base_model_of(model), pixels), model.training
    try:
        model.eval()(pixel_values=pixels, **arguments)
    except (RuntimeError, ValueError) as error:
        size = tuple(pixels.shape[-2:])
        raise ValueError(f"The model takes no images of {size} pixels: {error}") from error
    finally:
        model.train(was_training)
    return arguments
