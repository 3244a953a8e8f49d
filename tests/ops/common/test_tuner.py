"""The choice of tiles where it cannot be measured."""

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip('triton', minversion='3.6')

import triton
from kernel_checks import run_each

from aft_vision.ops.common.tuner import Tuner


class Kernel:
    arg_names = ('x', 'T')
    fn = staticmethod(lambda x, T: None)

    def run(self, *args: Any, **options: Any) -> int:
        return options['BT']


def make_tuner(*sizes: int) -> Tuner:
    return Tuner(Kernel(), [triton.Config({'BT': size}) for size in sizes], ['T'])


def test_a_lack_of_memory_for_the_measurement_takes_the_first_tiles(monkeypatch: pytest.MonkeyPatch):
    def run_out(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(triton.runtime.Autotuner, 'run', run_out)
    assert make_tuner(32, 64).run(torch.ones(1), 3) == 32


def test_each_size_of_tiles_of_the_tuners_that_run_is_chosen_once():
    tuners = [make_tuner(32), make_tuner(16, 32, 64), make_tuner(8, 16)]
    make_tuner(1, 2, 3, 4, 5)

    def launch() -> list[int]:
        return [tuner.run(torch.ones(1), 3) for tuner in tuners]

    assert list(run_each(launch)) == [[32, 16, 8], [32, 32, 16], [32, 64, 16]]
    assert list(run_each(launch, 2)) == [[32, 16, 8], [32, 32, 16]]
    assert list(run_each(partial(tuners[0].run, torch.ones(1), 3), 2)) == [32]
