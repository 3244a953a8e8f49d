"""Settings of all tests: few garbage collections, no measured choices, and nothing made that a library makes slowly.

A collection of all that is imported takes half a second, and each training by transformers makes one.
"""

import atexit
import gc
import importlib
import os
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from aft_vision.export import export_hub_folder
from aft_vision.ops import constant_bias, linear

# As it is imported, FFCV compiles for five seconds what its own loader alone uses, which computes the same without it.
os.environ.setdefault('NUMBA_DISABLE_JIT', '1')
# Commands keep these threads, also on a busy machine.
os.environ.setdefault('OMP_NUM_THREADS', str(torch.get_num_threads()))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests, of which nothing becomes garbage, and leave out what is there until the interpreter ends."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # A twentieth of the time of traces and interpreted kernels goes into collections at the default thresholds.
        gc.set_threshold(100_000, 20, 100)
        atexit.register(gc.unfreeze)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker('gpu') and not torch.cuda.is_available():
        pytest.skip('needs a CUDA device')


@pytest.fixture(autouse=True, scope='session')
def first_ways() -> Iterator[None]:
    """Let fused models compute in the same way on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (linear, constant_bias):
            patch.setattr(module, 'fastest', lambda subject, shape, ways: next(iter(ways)))
        yield


@pytest.fixture(autouse=True, scope='session')
def one_table_of_onnx() -> Iterator[None]:
    """Let torch make its table of ONNX's operators for the first export alone; it takes most of a second.

    An export with a `custom_translation_table`, of which there is none, would change it for those after it.
    """
    with pytest.MonkeyPatch.context() as patch:
        original = torch.onnx.export

        def export(*args: Any, **kwargs: Any) -> Any:
            patch.setattr(torch.onnx, 'export', original)
            registry = importlib.import_module('torch.onnx._internal.exporter._registration').ONNXRegistry
            patch.setattr(registry, 'from_torchlib', staticmethod(cache(registry.from_torchlib)))
            return original(*args, **kwargs)

        patch.setattr(torch.onnx, 'export', export)
        yield


@pytest.fixture(scope='session')
def hub(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A model of two named classes, and its folder with code, which no test changes."""
    kwargs = dict(depth=1, embed_dim=16, patch_size=8, num_heads=4, kernel_size=3, num_classes=2)
    model, folder = timm.create_model('aft_conv_tiny', **kwargs).eval(), tmp_path_factory.mktemp('hub')
    model.pretrained_cfg.update(label_names=['boot', 'hat'], input_size=(3, 32, 32), crop_pct=0.5)
    assert list(export_hub_folder(model, folder, parts=['code'])) == ['model.pt2']
    return model, folder
