"""Outputs of a teacher for fixed crops of the training images, kept in a folder, so that students need no teacher.

A student learns from the outputs for the crop that it sees, as in FKD (Shen and Xing 2022) and TinyViT (Wu et al.
2022).
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import ScheduledTransformDataset
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import hflip, pil_to_tensor, resized_crop

from aft_vision.data.augment import Augmentation, to_rgb, train_stages
from aft_vision.data.checked import CheckedDataset, naming
from aft_vision.data.datasets import Split
from aft_vision.data.sampling import CROP, derive_seed, restored_generators, seed_generators
from aft_vision.files import replacing

FACTS, NAMES = 'outputs.json', 'images.json'
# States of an image: not yet seen, stored, or skipped because it cannot be read.
MISSING, STORED, SKIPPED = 0, 1, 2


@dataclass(frozen=True)
class Facts:
    """The origin of the outputs in a folder, which is continued only with the same.

    Attributes:
        teacher: Its name.
        weights: Hash of its weights.
        mean, std: Of its normalisation.
        amp: Precision in which it was run, as in the section `run`.
        class_names: Classes of the data set, which the outputs are of.
        size: (H, W) in pixels at which the teacher sees each crop.
        crops: Crops of each image.
        top_k: Largest probabilities that are kept of each crop.
        features: Length of the teacher's pooled features; 0 if they are not kept.
        scale, hflip: Of the random crops, as in Augmentation.
        seed: Of the crops.
    """

    teacher: str
    weights: str
    mean: list[float]
    std: list[float]
    amp: str
    class_names: list[str]
    size: list[int]
    crops: int
    top_k: int
    features: int
    scale: list[float]
    hflip: float
    seed: int

    def arrays(self, images: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and the type of each array, for this number of images."""
        of_crop = (images, self.crops)
        arrays = {
            'state': ((images,), 'uint8'),
            # Top, left, height and width as fractions of the image's.
            'boxes': ((*of_crop, 4), 'float32'),
            'flips': (of_crop, 'bool'),
            'classes': ((*of_crop, self.top_k), 'uint16'),
            'log_probabilities': ((*of_crop, self.top_k), 'float16'),
        }
        return arrays | ({'features': ((*of_crop, self.features), 'float16')} if self.features else {})

    def bytes(self, images: int) -> int:
        """Return the size of all arrays."""
        return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.arrays(images).values())


def image_names(split: Split) -> list[str]:
    """Return the name of each image of a split within its folder or archive.

    Raises:
        ValueError: the images have no known order or classes, or the same name.
    """
    dataset = split.dataset
    if not isinstance(dataset, CheckedDataset):
        raise ValueError(
            'expected images in a folder, a tar file or a data set that is not streamed for the outputs of a teacher, '
            f'got {type(dataset).__name__}'
        )
    if dataset.targets is None:
        raise ValueError('expected a data set that lists the classes of its images for the outputs of a teacher')
    names = [dataset.key_of(index) for index in range(len(dataset))]
    if len(set(names)) < len(names):
        raise ValueError('expected a name for each image, got several images of the same name')
    return names


def hash_weights(model: nn.Module) -> str:
    """Return a hash of the weights and buffers of a model."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class TeacherOutputs:
    """A folder of outputs.

    Args:
        folder: It holds what `create` has written.

    Attributes:
        facts: What it was computed from.
        names: Name of each image.
        arrays: The arrays of `Facts.arrays`, in the file.

    Raises:
        ValueError: the folder does not exist or is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            content = json.loads((self.folder / FACTS).read_bytes())
            self.facts = Facts(**{each.name: content[each.name] for each in fields(Facts)})
            self.names: list[str] = json.loads((self.folder / NAMES).read_bytes())
            expected = self.facts.arrays(len(self.names))
            self.arrays = {name: np.load(self.folder / f'{name}.npy', mmap_mode='r') for name in expected}
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'expected the outputs of a teacher in {self.folder}, as train.store_teacher writes them, got: {error}'
            ) from error
        stored = {name: (array.shape, str(array.dtype)) for name, array in self.arrays.items()}
        if stored != expected:
            raise ValueError(f'expected the outputs of a teacher in {self.folder} to be whole, got {stored}')

    @classmethod
    def create(cls, folder: Path, facts: Facts, names: Sequence[str]) -> 'TeacherOutputs':
        """Create a folder, or open the one to continue.

        Raises:
            ValueError: the folder has outputs of something else.
        """
        if (folder / FACTS).exists():
            outputs = cls(folder)
            # The same weights may have another name.
            given = asdict(replace(facts, teacher=outputs.facts.teacher))
            changed = [key for key, value in given.items() if getattr(outputs.facts, key) != value]
            changed += ['images'] if outputs.names != list(names) else []
            if changed:
                raise ValueError(
                    f'expected {folder} to be a new folder or to have outputs of the same teacher, images and options, '
                    f'got others: {", ".join(changed)}'
                )
            return outputs
        folder.mkdir(parents=True, exist_ok=True)
        for name, (shape, dtype) in facts.arrays(len(names)).items():
            np.lib.format.open_memmap(folder / f'{name}.npy', mode='w+', dtype=dtype, shape=shape).flush()
        (folder / NAMES).write_text(json.dumps(names), encoding='utf-8')
        # Its facts make the folder valid.
        with replacing(folder / FACTS) as path:
            path.write_text(json.dumps(asdict(facts)), encoding='utf-8')
        return cls(folder)

    def count(self, state: int) -> int:
        """Return the number of images of a state."""
        return int((self.arrays['state'] == state).sum())

    def missing(self) -> np.ndarray:
        """Return the images that are not stored, also those that could not be read."""
        return np.flatnonzero(self.arrays['state'] != STORED)

    def write(self, images: Sequence[int], state: int, **values: np.ndarray) -> None:
        """Store the outputs of some images, and then that they are stored."""
        for name, value in [*values.items(), ('state', np.full(len(images), state))]:
            array = self.arrays[name]
            rows = np.ascontiguousarray(value, array.dtype).reshape(len(images), *array.shape[1:])
            # Writing through the mapping is slow on some systems.
            with (self.folder / f'{name}.npy').open('r+b') as file:
                for image, row in zip(images, rows, strict=True):
                    file.seek(array.offset + image * row.nbytes)
                    file.write(row.tobytes())

    def find(self, split: Split) -> np.ndarray:
        """Return the row of each image of a split among the stored ones.

        Raises:
            ValueError: the split has other images or classes, or the folder is not complete.
        """
        if self.facts.class_names != split.class_names:
            raise ValueError(
                f'expected the outputs in {self.folder} to be of the {len(split.class_names)} classes of the data set, '
                f'in their order, got {len(self.facts.class_names)}'
            )
        if missing := self.count(MISSING):
            raise ValueError(
                f'expected the outputs of all {len(self.names)} images in {self.folder}, got those of '
                f'{len(self.names) - missing}; run train.store_teacher again, which continues'
            )
        row_of_name, names = {name: row for row, name in enumerate(self.names)}, image_names(split)
        if others := [name for name in names if name not in row_of_name]:
            raise ValueError(
                f'expected images that the teacher has seen in {self.folder}, got {len(others)} others, such as '
                f'{others[0]}'
            )
        rows = np.array([row_of_name[name] for name in names])
        skipped = rows[self.arrays['state'][rows] == SKIPPED]
        if len(skipped) and split.dataset.on_corrupt == 'raise':
            raise ValueError(
                f'expected the outputs of every image in {self.folder}, got none of {len(skipped)} that could not be '
                f'read, such as {self.names[skipped[0]]}; run train.store_teacher again, or set '
                'data.on_corrupt_image=skip'
            )
        return rows

    def cut(self, image: Image.Image, code: int, size: Sequence[int]) -> Image.Image:
        """Return a crop of an image in RGB, resized to (H, W) and flipped as the teacher saw it.

        Args:
            code: Number of the crop among the crops of all images.
        """
        row, crop = divmod(code, self.facts.crops)
        box, flip = self.arrays['boxes'][row, crop], self.arrays['flips'][row, crop]
        return cut(image, box, bool(flip), size)


def cut(image: Image.Image, box: np.ndarray, flip: bool, size: Sequence[int]) -> Image.Image:
    """Return the crop of a box (top, left, height, width, as fractions) in RGB, resized to (H, W) by bicubic."""
    sides = (image.height, image.width, image.height, image.width)
    top, left, height, width = (round(float(part) * side) for part, side in zip(box, sides, strict=True))
    crop = resized_crop(to_rgb(image), top, left, height, width, list(size), InterpolationMode.BICUBIC)
    return hflip(crop) if flip else crop


class TaughtDataset(ScheduledTransformDataset):
    """A data set indexed by image and size, of crops that a teacher has seen; their number is the target.

    Args:
        dataset: Its own transform is None.
        transforms: One for each size, of a crop.
        sizes: (H, W) in pixels of each.
        rows: Row of each image in the outputs.
    """

    def __init__(
        self,
        dataset: CheckedDataset,
        transforms: Sequence[Any],
        sizes: Sequence[tuple[int, int]],
        outputs: TeacherOutputs,
        rows: np.ndarray,
    ) -> None:
        super().__init__(dataset, transforms)
        self.sizes, self.outputs, self.rows = sizes, outputs, rows
        self.is_stored = self.outputs.arrays['state'][rows] == STORED

    def __getitem__(self, index: tuple[int, int]) -> tuple[Tensor, int]:
        dataset: Any = self.dataset
        # The teacher could not read every image, and the data set may take another one in place of the chosen.
        for chosen in range(index[0], index[0] + len(dataset)):
            if self.is_stored[chosen % len(dataset)]:
                image, _ = dataset[chosen % len(dataset)]
                if self.is_stored[dataset.last]:
                    break
        row, crops = int(self.rows[dataset.last]), self.outputs.facts.crops
        code = row * crops + random.randrange(crops)
        with naming(dataset.name_of_last):
            return self.transforms[index[1]](self.outputs.cut(image, code, self.sizes[index[1]])), code


class DrawnCrops(Dataset):
    """A data set of all crops of an image at once, for the teacher.

    Args:
        dataset: Its own transform is None, and it returns None for an image that cannot be read.
        images: Those to draw crops of.

    An item is the index of the image, its crops (crops, 3, H, W), uint8, and their boxes and flips; or None.
    """

    def __init__(self, dataset: CheckedDataset, images: np.ndarray, facts: Facts, augment: Augmentation) -> None:
        self.dataset, self.images, self.facts = dataset, images, facts
        (self.crop, *_), _, _ = train_stages(facts.size, augment, (0.5,) * 3, (0.5,) * 3)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[int, Tensor | None, np.ndarray, np.ndarray]:
        image_index, facts = int(self.images[index]), self.facts
        boxes, flips = np.zeros((facts.crops, 4), np.float32), np.zeros(facts.crops, bool)
        sample = self.dataset[image_index]
        if sample is None:
            return image_index, None, boxes, flips
        image, crops = sample[0], []
        with restored_generators():
            for number in range(facts.crops):
                seed_generators(derive_seed(CROP, facts.seed, image_index, number))
                top, left, height, width = self.crop.get_params(image, self.crop.scale, self.crop.ratio)
                sides = (image.height, image.width, image.height, image.width)
                boxes[number] = np.divide((top, left, height, width), sides)
                flips[number] = random.random() < facts.hflip
                crops.append(pil_to_tensor(cut(image, boxes[number], flips[number], facts.size)))
        return image_index, torch.stack(crops), boxes, flips
