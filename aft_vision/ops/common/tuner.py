"""Choice of a kernel's tiles: Triton's tuner, by classes of lengths and by kind of device.

A launch like an earlier one goes straight to its compiled kernel.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import Autotuner

from aft_vision.ops.common.capture import is_capturing

# Kernel arguments that may change with every batch.
LENGTHS = ('T', 'height', 'width')
Key = tuple[Hashable, ...]
# The fastest of several ways, by what they compute and by kind of device.
_ways: dict[Key, int] = {}
# Launches whose kernels a tuner knows by heart.
MAX_LAUNCHES = 1000


class Handle(NamedTuple):
    """A compiled kernel, the constants after the arguments of its launches, and the sizes that its grid depends on."""

    kernel: Any
    constants: tuple[Any, ...]
    sizes: dict[str, Any]


class Tuner(Autotuner):
    """Triton's tuner with one choice for all lengths up to the same power of two, per kind of device.

    While a CUDA graph is captured nothing can be measured: the first configuration runs.
    """

    def __init__(self, kernel: Any, configs: list[triton.Config], key: list[str]) -> None:
        super().__init__(kernel, kernel.arg_names, configs, key, None, None, cache_results=True)
        self.cache = _Choices(sum(name in LENGTHS for name in key))
        # Lengths come first, so that their number identifies them.
        self.keys = sorted(key, key=lambda name: name not in LENGTHS)
        self.handles: dict[Key, Handle] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel."""
        try:
            return self._run_known(*args, **kwargs)
        except torch.OutOfMemoryError:
            # Measuring needs memory of its own, which a later call may have.
            return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    def _run_known(self, *args: Any, grid: Any = None, **kwargs: Any) -> Any:
        # Triton compiles a kernel for the types of arguments, the alignment of tensors and divisors of numbers.
        key = _current_index(), _find_kind(args), *kwargs.values()
        handle = self.handles.get(key)
        if handle is None:
            kernel = super().run(*args, grid=grid, **kwargs)
            # The interpreter has none.
            if kernel is not None:
                sizes = kwargs | self.best_config.all_kwargs()
                if len(self.handles) >= MAX_LAUNCHES:
                    self.handles.clear()
                constants = tuple(sizes[name] for name in self.arg_names[len(args) :])
                self.handles[key] = Handle(kernel, constants, sizes)
            return kernel
        found = grid(handle.sizes) if callable(grid) else grid
        handle.kernel[*found, 1, 1](*args, *handle.constants)
        return handle.kernel

    def prune_configs(self, kwargs: dict[str, Any]) -> list[triton.Config]:
        """Return the configurations that can be compared now."""
        if is_capturing():
            return self.configs[:1]
        return super().prune_configs(kwargs)

    def check_disk_cache(self, tuning_key: Key, configs: list[triton.Config], bench_fn: Callable[[], None]) -> bool:
        """Load the choice from disk, or measure and store it."""
        if is_capturing():
            bench_fn()
            return False
        return super().check_disk_cache(self.cache.find_class(tuning_key), configs, bench_fn)

    def _bench(self, *args: Any, config: triton.Config, **kwargs: Any) -> Any:
        # Triton before 3.8 also times the only configuration.
        return [0.0] * 3 if is_capturing() else super()._bench(*args, config=config, **kwargs)


def run_fastest(key: Key, *ways: Callable[[], None]) -> None:
    """Run the fastest of several ways to write the same results, measured once for a key and a kind of device.

    Where nothing was and can be measured, while a CUDA graph is captured or without memory for it, the first runs.
    """
    if len(ways) > 1:
        key = *key, _current_device()
        if key not in _ways and torch.cuda.is_initialized() and not is_capturing():
            try:
                times = [triton.testing.do_bench(way, return_mode='median') for way in ways]
            except torch.OutOfMemoryError:
                times = [0.0]
            _ways[key] = times.index(min(times))
    ways[_ways.get(key, 0)]()


class _Choices(dict[Key, triton.Config]):
    # The choice for each class of keys.

    def __init__(self, lengths: int) -> None:
        super().__init__()
        self.lengths = lengths

    def find_class(self, key: Key) -> Key:
        # The class of a class is itself.
        device = _current_device()
        lengths = (triton.next_power_of_2(length) for length in key[: self.lengths])
        return (*lengths, *(x for x in key[self.lengths :] if x != device), device)

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(self.find_class(key))

    def __getitem__(self, key: Key) -> triton.Config:
        return super().__getitem__(self.find_class(key))

    def __setitem__(self, key: Key, config: triton.Config) -> None:
        super().__setitem__(self.find_class(key), config)


def _find_kind(args: tuple[Any, ...]) -> Key:
    return tuple(
        [
            (x.dtype, x.data_ptr() & 15 == 0) if isinstance(x, Tensor) else _find_kind(x) if isinstance(x, tuple) else x
            for x in args
        ]
    )


def _current_index() -> int:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


def _current_device() -> str:
    # Kernels are launched on the device of their tensors.
    return _name_of(torch.cuda.current_device()) if torch.cuda.is_initialized() else 'none'


@functools.cache
def _name_of(device: int) -> str:
    return torch.cuda.get_device_name(device)
