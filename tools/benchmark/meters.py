"""Memory of a call by what the allocators report: exact, repeatable, and no matter how loaded the machine is.

On a CPU every allocation of torch counts. The scratch that oneDNN and MKL allocate for themselves does not pass through
torch's allocator, and is not counted. Of other runtimes the memory of the process tells.
"""

import ctypes
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from aft_vision.devices import peak_memory_mb

# Before its first use, so that libkineto does not announce every start and stop on standard error.
os.environ.setdefault('KINETO_LOG_LEVEL', '6')


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Measure what a call has allocated at most, in bytes, beyond what there was before it.

    The call is made once before, so weights, their gradients and the caches of the libraries exist already.
    """
    call()
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    living: dict[int, int] = {}
    total = peak = 0
    for size, address in _allocations(call):
        if size > 0:
            living[address] = size
            total += size
        else:
            # Memory from before the call is not subtracted when it is freed.
            total -= living.pop(address, 0)
        peak = max(peak, total)
    return peak


def peak_resident(call: Callable[[], object]) -> int | None:
    """Measure the largest growth of this process's memory during a call, in bytes; None without Linux's counters.

    Runtimes keep what they have allocated for later calls, so only their first call tells.
    """
    try:
        # Free memory goes back to the system; otherwise the call would use it without growing the process.
        ctypes.CDLL(None).malloc_trim(0)
        # 5 sets the peak to the present.
        Path('/proc/self/clear_refs').write_text('5')
    except (OSError, AttributeError):
        return None
    before = peak_memory_mb('cpu')
    call()
    return max(0, round(2**20 * (peak_memory_mb('cpu') - before)))


def saved_memory(call: Callable[[], object], leave_out: Iterable[torch.Tensor] = ()) -> int:
    """Measure what autograd keeps for the backward of a call, in bytes; every storage counts once, and whole.

    Args:
        call: A forward pass; its backward cannot run.
        leave_out: Tensors whose storages do not count, such as parameters and inputs.
    """
    left_out = {x.untyped_storage().data_ptr() for x in leave_out}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> None:
        # The storage is held, so that its address is used once. The graph gets nothing: a result that holds itself
        # through the graph would never be freed.
        storage = x.untyped_storage()
        if storage.data_ptr() not in left_out:
            kept[storage.data_ptr()] = storage

    def unpack(_: None) -> torch.Tensor:
        raise RuntimeError('what is measured has no backward: nothing was kept for it')

    with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
        call()
    return sum(storage.nbytes() for storage in kept.values())


def _allocations(call: Callable[[], object]) -> list[tuple[int, int]]:
    """Return the bytes (negative when freed) and the address of each allocation on the CPU, in the order of time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    events: list[Any] = profiler.profiler.kineto_results.experimental_event_tree()
    # The list grows by the children of each event.
    for event in events:
        events += event.children
    allocations = [event for event in events if event.tag == _EventType.Allocation]
    allocations.sort(key=lambda event: event.start_time_ns)
    return [(x.alloc_size, x.ptr) for x in (event.extra_fields for event in allocations) if x.device.type == 'cpu']
