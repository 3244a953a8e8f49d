"""The earlier name of `aft_vision.data.loaders`."""

from aft_vision.data.loaders import create_eval_loader, create_loaders

__all__ = ['create_eval_loader', 'create_loaders']
