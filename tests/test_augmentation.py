import numpy as np
import pytest
import torch
from PIL import Image

from sigma_nens_hf.data.augmentation import Augmentation


def position_image(width, height):
    """Every pixel holds its own place."""
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([rows, columns, np.zeros_like(rows)], -1).astype(np.uint8))


def test_crops_keep_their_share_of_the_area_and_their_ratio():
    image = position_image(80, 60)
    augment = Augmentation(flip=False, smallest_crop=0.3)
    crops = [augment(image) for _ in range(300)]
    shares = [crop.width * crop.height / (80 * 60) for crop in crops]
    ratios = [crop.width / crop.height for crop in crops]
    assert 0.28 < min(shares) < 0.4
    assert 0.9 < max(shares) <= 1
    assert min(ratios) > 0.7
    assert max(ratios) < 1.4
    assert len({np.asarray(crop)[0, 0].tobytes() for crop in crops}) > 100
    for crop in crops[:20]:  # what is left is whole: a rectangle of the image
        pixels = np.asarray(crop).astype(int)
        assert (np.diff(pixels[..., 0], axis=0) == 1).all()
        assert (np.diff(pixels[..., 1], axis=1) == 1).all()


def test_image_that_no_crop_fits_stays_whole():
    image = position_image(200, 1)
    assert Augmentation(flip=False, smallest_crop=0.9)(image).size == (200, 1)


def test_one_image_in_two_is_flipped_left_to_right():
    image = position_image(7, 5)
    flipped = [np.asarray(Augmentation(smallest_crop=1)(image)) for _ in range(200)]
    mirrored = np.asarray(image)[:, ::-1]
    count = sum(np.array_equal(pixels, mirrored) for pixels in flipped)
    assert 70 < count < 130
    assert all(np.array_equal(pixels, mirrored) or np.array_equal(pixels, np.asarray(image)) for pixels in flipped)


def test_torchs_seed_settles_the_augmentation():
    image = position_image(40, 30)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append([np.asarray(Augmentation()(image)).tobytes() for _ in range(5)])
    assert drawn[0] == drawn[1]


def test_no_augmentation_leaves_the_image_as_it_is():
    image = position_image(9, 9)
    assert Augmentation(flip=False, smallest_crop=1)(image) is image


@pytest.mark.parametrize("share", [0, -0.1, 1.5])
def test_impossible_crop_is_refused(share):
    with pytest.raises(ValueError, match="share of the image"):
        Augmentation(smallest_crop=share)
