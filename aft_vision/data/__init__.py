"""Image data sets and their loaders, built on timm.data."""

from aft_vision.data.augment import Augmentation, BatchAugmentation
from aft_vision.data.datasets import CorruptImageError, Source
from aft_vision.data.imagenet import Loaders, create_eval_loader, create_loaders
from aft_vision.data.sampling import STEP, SizeSchedule, derive_seed

__all__ = [
    'STEP',
    'Augmentation',
    'BatchAugmentation',
    'CorruptImageError',
    'Loaders',
    'SizeSchedule',
    'Source',
    'create_eval_loader',
    'create_loaders',
    'derive_seed',
]
