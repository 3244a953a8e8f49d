"""Measurements of a GPU: the time of its kernels, and what the device could do at best."""

from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from aft_vision.timing import synchronize, time_interleaved
from tools.benchmark.memory import silence_profiler
from tools.benchmark.ops import Operation

BATCH, HALF, CUDA = 256, torch.bfloat16, torch.device('cuda')
# Calls whose mean is the time of a round: one kernel of a few microseconds says little.
CALLS = 10
# A matrix product and a copy that are large enough to show what a device does at best.
MATRIX_SIDE, COPY_BYTES = 8192, 2**30
# The operations with the goal of their speed against attention.
OPERATIONS = (
    ('full, d=384, T=197', 1.3, Operation('aft_full', (BATCH, 197, 384), 6, (197, 197))),
    ('conv, d=384, h=16', 1.5, Operation('aft_conv', (BATCH, 196, 384), 6, (16, 11, 11), (14, 14), 16)),
    ('conv, d=384, h=384', 1.2, Operation('aft_conv', (BATCH, 196, 384), 6, (384, 11, 11), (14, 14))),
    ('local causal, d=256, T=3072, s=256', 4.0, Operation('aft_local_causal', (BATCH, 3072, 256), 2, (3072, 256))),
)


def device_rates(dtype: torch.dtype, device: torch.device, rounds: int) -> tuple[float, float]:
    """Return floating-point operations a second of a matrix product, and bytes read and written a second of a copy."""
    a, b = (torch.randn(MATRIX_SIDE, MATRIX_SIDE, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product, copy = time_interleaved([lambda: a @ b, lambda: target.copy_(source)], device, rounds, warmup=3)
    return 2 * MATRIX_SIDE**3 / product.seconds, 2 * COPY_BYTES / copy.seconds


def count_flops(operation: Operation) -> int:
    """Count floating-point operations of the products that give numerators and denominators.

    AFT-full and AFT-conv multiply by a (T, T) matrix, AFT-conv with few heads denominators of a channel a head;
    AFT-local multiplies blocks of 64 targets with the sources of their windows.
    """
    batch, tokens, dim = operation.shape
    sources = tokens
    if operation.name == 'aft_local_causal' and operation.bias is not None:
        sources = min(tokens, operation.bias[1] + 64)
    return 2 * batch * tokens * sources * (dim + (operation.key_heads or dim))


def count_bytes(operation: Operation, dtype: torch.dtype) -> int:
    """Count bytes of q, k, v and the result, each read or written once."""
    batch, tokens, dim = operation.shape
    return batch * tokens * (3 * dim + (operation.key_heads or dim)) * dtype.itemsize


def time_kernels(call: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Return the seconds of the kernels of a call in every round, each with CALLS of it after one that is not counted.

    Raises:
        RuntimeError: the profiler sees no kernels.
    """
    silence_profiler()
    call()
    seconds = []
    for _ in range(rounds):
        synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(CALLS):
                call()
            synchronize(device)
        kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
        spent = [event.time_range.elapsed_us() for event in kernels if not event.is_user_annotation]
        seconds.append(sum(spent) / 1e6 / CALLS)
    if not all(seconds):
        raise RuntimeError(f'expected kernels on {device}, got none from the profiler')
    return seconds
