"""Scenes with boxes, composed of the photographs of a classification data set."""

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

# Least and most objects that are drawn for a scene.
OBJECTS = (3, 8)
# Short side of an object, and sides of a patch of the background, as shares of the side of the scene.
OBJECT_SIDES, PATCH_SIDES = (0.125, 0.45), (0.25, 0.6)
PATCHES = 8
# Share of the sides of a photograph that its corner has.
CORNER = 1 / 3
# Share of an object that others do not cover.
LEAST_VISIBLE = 0.5
# Draws of a place before an object is left out.
TRIES = 20


@dataclass(frozen=True)
class Scenes:
    """Square scenes of whole photographs at random scale, place and overlap, on enlarged corners of others.

    The corners have edges like those of the objects, so an edge alone does not tell an object. At least half of every
    object is visible, and an object that finds no place for it is left out; its box is that of the whole photograph.
    Scene i depends only on the seed, the split and i.

    Attributes:
        photographs: Data set of (PIL image, class index).
        split: Its name; each split has other layouts.
        size: Side in pixels.
        seed: Not negative.
    """

    photographs: Any
    split: str
    size: int
    seed: int = 0

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Compose a scene, any from 0 on.

        Returns:
            The image (3, size, size) in [0, 1], and its `boxes` (N, 4) as x0, y0, x1, y1 in pixels and `labels` (N,)
            from 1 on, as torchvision's detectors take them.
        """
        rng = np.random.default_rng((self.seed, zlib.crc32(self.split.encode()), index))
        scene = self._draw_background(rng)
        # The object that each pixel shows, counted from 1.
        shown = np.zeros((self.size, self.size), np.int64)
        boxes: list[tuple[int, int, int, int]] = []
        labels: list[int] = []
        for _ in range(rng.integers(*OBJECTS, endpoint=True)):
            photograph, label = self._draw_photograph(rng)
            width, height = self._draw_size(rng, photograph)
            box = _find_place(rng, shown, boxes, width, height)
            if box is not None:
                scene.paste(photograph.resize((width, height), Image.Resampling.BICUBIC), box)
                boxes.append(box)
                labels.append(label + 1)
                shown[box[1] : box[3], box[0] : box[2]] = len(boxes)
        image = torch.from_numpy(np.array(scene)).permute(2, 0, 1).contiguous().float() / 255
        return image, {'boxes': torch.tensor(boxes, dtype=torch.float32), 'labels': torch.tensor(labels)}

    def _draw_photograph(self, rng: np.random.Generator) -> tuple[Image.Image, int]:
        photograph, label = self.photographs[int(rng.integers(len(self.photographs)))]
        return (photograph.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else photograph), label

    def _draw_background(self, rng: np.random.Generator) -> Image.Image:
        scene = self._draw_corner(rng, self.size, self.size)
        for _ in range(PATCHES):
            width, height = (int(self.size * share) for share in rng.uniform(*PATCH_SIDES, 2))
            left, top = (int(rng.integers(-(side // 2), self.size - side // 2)) for side in (width, height))
            scene.paste(self._draw_corner(rng, width, height), (left, top))
        return scene

    def _draw_corner(self, rng: np.random.Generator, width: int, height: int) -> Image.Image:
        # Photographs are mirrored at random, so left corners are enough.
        photograph, _ = self._draw_photograph(rng)
        right, down = (CORNER * side for side in photograph.size)
        top = float(rng.choice([0.0, photograph.height - down]))
        return photograph.resize((width, height), Image.Resampling.BICUBIC, (0.0, top, right, top + down))

    def _draw_size(self, rng: np.random.Generator, photograph: Image.Image) -> tuple[int, int]:
        # Uniform on a logarithmic scale.
        short = self.size * float(np.exp(rng.uniform(*np.log(OBJECT_SIDES))))
        scale = min(short / min(photograph.size), self.size / max(photograph.size))
        width, height = (max(1, int(scale * side)) for side in photograph.size)
        return width, height


def _find_place(
    rng: np.random.Generator, shown: np.ndarray, boxes: list[tuple[int, int, int, int]], width: int, height: int
) -> tuple[int, int, int, int] | None:
    # Return a box that leaves enough of every other object visible, or None if no draw does.
    areas = np.array([(right - left) * (bottom - top) for left, top, right, bottom in boxes])
    visible = _count(shown, len(boxes))
    for _ in range(TRIES):
        left, top = (int(rng.integers(len(shown) - side, endpoint=True)) for side in (width, height))
        hidden = _count(shown[top : top + height, left : left + width], len(boxes))
        if np.all(visible - hidden >= LEAST_VISIBLE * areas):
            return left, top, left + width, top + height
    return None


def _count(shown: np.ndarray, objects: int) -> np.ndarray:
    # Return the visible pixels of each object.
    return np.bincount(shown.ravel(), minlength=objects + 1)[1:]
