"""Data sets and loaders: images, built on timm.data, and sequences: sub-pixels, characters, associative recall."""

from aft_vision.data.augment import Augmentation, BatchAugmentation, PatchAugmentation
from aft_vision.data.bytes import VOCABULARIES, Text, read_text
from aft_vision.data.datasets import Source
from aft_vision.data.images import CorruptImageError, Decoding, LargeImageError, open_image
from aft_vision.data.loaders import Loaders, Preprocessing, create_eval_loader, create_loaders
from aft_vision.data.native import Inputs, NativeShape, move
from aft_vision.data.pixels import PixelAugmentation, read_cifar10
from aft_vision.data.recall import RecallTask
from aft_vision.data.sampling import STEP, Draw, Shard, SizeSchedule, derive_seed
from aft_vision.data.sequences import (
    IGNORED,
    EvalDataset,
    PixelDataset,
    RecallDataset,
    WindowDataset,
    sequence_eval_loader,
    sequence_train_loader,
    sliding_windows,
)
