"""The choice of tiles where it cannot be measured."""

from typing import Any

import pytest
import torch


def test_a_lack_of_memory_for_the_measurement_takes_the_first_tiles(monkeypatch: pytest.MonkeyPatch):
    triton = pytest.importorskip('triton')
    from aft_vision.ops.common.tuner import Tuner

    class Kernel:
        arg_names = ('x', 'T')
        fn = staticmethod(lambda x, T: None)

        def run(self, *args: Any, **options: Any) -> int:
            return options['BT']

    def run_out(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError('CUDA out of memory')

    tuner = Tuner(Kernel(), [triton.Config({'BT': 32}), triton.Config({'BT': 64})], ['T'])
    monkeypatch.setattr(triton.runtime.Autotuner, 'run', run_out)
    assert tuner.run(torch.ones(1), 3) == 32
    with Tuner.choosing(1):
        assert tuner.run(torch.ones(1), 3) == 64
