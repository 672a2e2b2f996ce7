"""Random crops and flips of training images with Pillow alone, which needs no second image library beside it."""

import math
from dataclasses import dataclass

import torch
from PIL import Image, ImageOps

# Width to height of a crop, the usual range.
NARROWEST, WIDEST = 3 / 4, 4 / 3
TRIES = 10


@dataclass(frozen=True)
class Augmentation:
    """Crops and flips an image at random, by torch's generator, which a trainer stores with its checkpoints.

    The processor resizes the crop afterwards.

    Attributes:
        flip: Whether one image in two is flipped left to right.
        smallest_crop: Smallest share of the area that a crop keeps; 1: images are not cropped.
    """

    flip: bool = True
    smallest_crop: float = 0.35

    def __post_init__(self):
        if not 0 < self.smallest_crop <= 1:
            raise ValueError(f"The smallest crop must keep a share of the image in (0, 1], got {self.smallest_crop}.")

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the augmented image."""
        if self.smallest_crop < 1:
            image = image.crop(self._box(*image.size))
        if self.flip and torch.rand(()).item() < 0.5:
            image = ImageOps.mirror(image)
        return image

    def _box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Draw left, top, right and bottom of a crop; the whole image if none of the tries fits into it."""
        for _ in range(TRIES):
            share = torch.empty(()).uniform_(self.smallest_crop, 1).item()
            ratio = math.exp(torch.empty(()).uniform_(math.log(NARROWEST), math.log(WIDEST)).item())
            crop_width = round(math.sqrt(width * height * share * ratio))
            crop_height = round(math.sqrt(width * height * share / ratio))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                left = int(torch.randint(width - crop_width + 1, ()))
                top = int(torch.randint(height - crop_height + 1, ()))
                return left, top, left + crop_width, top + crop_height
        return 0, 0, width, height
