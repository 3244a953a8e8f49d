"""Attention-free vision transformers for timm; importing the package registers the `aft_*` models."""

from aft_vision import models as models

__version__ = '0.1.0'
