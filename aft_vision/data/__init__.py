"""Image data sets and their loaders, built on timm.data."""

from aft_vision.data.imagenet import Augmentation, Loaders, create_eval_loader, create_loaders, find_split

__all__ = ['Augmentation', 'Loaders', 'create_eval_loader', 'create_loaders', 'find_split']
