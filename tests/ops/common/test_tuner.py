"""The choice of tiles where it cannot be measured."""

from typing import Any

import pytest
import torch

pytest.importorskip('triton', minversion='3.6')

import triton

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


class Recorder:
    """A kernel that notes how it is launched: by Triton, which looks for the compiled one, or as compiled."""

    arg_names = ('x', 'T', 'size', 'KIND', 'BT')
    fn = staticmethod(lambda x, T, size, KIND, BT: None)

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def run(self, *args: Any, grid: Any, **options: Any) -> 'Recorder':
        self.launches.append('Triton')
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launches.append((grid, args[1:]))


def test_a_launch_like_an_earlier_one_takes_its_compiled_kernel_and_another_does_not():
    recorder = Recorder()
    tuner = Tuner(recorder, [triton.Config({'BT': 32})], ['T'])
    memory = torch.ones(64)

    def launch(x: torch.Tensor = memory, T: int = 3, size: Any = (2, memory), KIND: int = 7) -> Any:
        recorder.launches.clear()
        tuner.run(x, T, size, KIND=KIND, grid=lambda tile: (tile['BT'], T))
        return recorder.launches[0]

    assert launch() == 'Triton'
    assert launch() == launch(memory.clone()) == ((32, 3, 1, 1), (3, (2, memory), 7, 32))
    others = [{'x': memory[1:]}, {'x': memory.half()}, {'T': 4}, {'size': (3, memory)}, {'size': (2, memory[1:])}]
    for other in [*others, {'KIND': 8}]:
        assert launch(**other) == 'Triton'
        assert launch(**other) != 'Triton'
