"""The mode of models."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_evaluation(*models: nn.Module) -> Iterator[None]:
    """Put models into evaluation mode inside a context; afterwards every module is in its earlier mode."""
    before = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training
