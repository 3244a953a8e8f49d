"""Choice of a kernel's tiles: Triton's tuner, by classes of lengths and by kind of device."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from triton.runtime import Autotuner

from aft_vision.ops.common.capture import is_capturing

# Kernel arguments that may change with every batch.
LENGTHS = ('T', 'height', 'width')
Key = tuple[Hashable, ...]


class Tuner(Autotuner):
    """Triton's tuner with one choice for all lengths up to the same power of two, per kind of device.

    While a CUDA graph is captured nothing can be measured: the first configuration runs.
    """

    def __init__(self, kernel: Any, configs: list[triton.Config], key: list[str]) -> None:
        super().__init__(kernel, kernel.arg_names, configs, key, None, None, cache_results=True)
        self.cache = _Choices(sum(name in LENGTHS for name in key))
        # Lengths come first, so that their number identifies them.
        self.keys = sorted(key, key=lambda name: name not in LENGTHS)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel."""
        try:
            return super().run(*args, **kwargs)
        except torch.OutOfMemoryError:
            # Measuring needs memory of its own, which a later call may have.
            return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

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


def _current_device() -> str:
    # Kernels are launched on the device of their tensors.
    return _name_of(torch.cuda.current_device()) if torch.cuda.is_initialized() else 'none'


@functools.cache
def _name_of(device: int) -> str:
    return torch.cuda.get_device_name(device)
