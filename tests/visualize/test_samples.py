"""Sheets of small images."""

import numpy as np
import pytest
import torch

from aft_vision.visualize import completion_sheet, image_sheet, load_pixels


def test_a_sheet_has_the_images_in_rows():
    images = torch.arange(5 * 3 * 2 * 4).reshape(5, 3, 2, 4).to(torch.uint8)
    sheet = np.array(image_sheet(images, columns=3, scale=1))
    assert sheet.shape == (2 * 3 + 1, 3 * 5 + 1, 3)
    assert np.array_equal(sheet[4:6, 6:10], images[4].permute(1, 2, 0).numpy())
    assert (sheet[4:6, 11:15] == 255).all()
    assert np.array(image_sheet(images)).shape[1] == 2 * (4 * 4 + 4) + 4


def test_what_does_not_fit_is_named():
    images = torch.zeros(2, 3, 2, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match='got 0, 1 and 4'):
        image_sheet(images[:0])
    with pytest.raises(ValueError, match='got 2, 0 and 4'):
        image_sheet(images, columns=0)
    with pytest.raises(ValueError, match='expected a multiple of 2 completions, got 3'):
        completion_sheet(images, torch.ones(2, 2).bool(), images[[0, 0, 1]])
    with pytest.raises(ValueError, match=r'expected an image .* got missing.png'):
        load_pixels(['missing.png'], (2, 2))
