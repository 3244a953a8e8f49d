"""Goals on a GPU: the fused kernels against flash attention, and against what the device could do at best."""

from collections.abc import Iterator
from statistics import median

import torch

from aft_vision.timing import quartiles, time_interleaved, time_rounds
from tools.benchmark import figures
from tools.benchmark.goals import Figure, Goal
from tools.benchmark.kernel_time import time_kernels
from tools.benchmark.operations import Operation

BATCH, HALF = 256, torch.bfloat16
# A matrix product and a copy that are large enough to show what a device does at best.
MATRIX_SIDE, COPY_BYTES = 8192, 2**30
# The operations with the goal of their speed against attention.
OPERATIONS = (
    ('full, d=384, T=197', 1.3, Operation('aft_full', (BATCH, 197, 384), 6, (197, 197))),
    ('conv, d=384, h=16', 1.5, Operation('aft_conv', (BATCH, 196, 384), 6, (16, 11, 11), (14, 14), 16)),
    ('conv, d=384, h=384', 1.2, Operation('aft_conv', (BATCH, 196, 384), 6, (384, 11, 11), (14, 14))),
    ('local causal, d=256, T=3072, s=256', 4.0, Operation('aft_local_causal', (BATCH, 3072, 256), 2, (3072, 256))),
)


def gpu_goals() -> Iterator[Goal]:
    """Rows 17 and 18, open without a CUDA device."""
    device = torch.device('cuda') if torch.cuda.is_available() else None
    for name, goal, operation in OPERATIONS:
        for training in (False, True):
            what = f'GPU, B={BATCH}, bfloat16: {name}, {"training" if training else "forward"}'
            measure = figures.speed(operation, HALF, training, device) if device else None
            yield Goal(17, what, 1.0, goal, measure, device='cuda')
    for name, _, operation in OPERATIONS:
        what = f'GPU, share of the roofline: {name}, forward'
        share = roofline_share(operation, HALF, device) if device else None
        yield Goal(18, what, 0.4, 0.7, share, device='cuda')


def roofline_share(
    operation: Operation, dtype: torch.dtype, device: torch.device, side: int = MATRIX_SIDE, size: int = COPY_BYTES
) -> figures.Measure:
    """The shortest time that a device could take for a forward, over the time that its kernels take.

    Where the kernels cannot be told from the rest, as on a CPU, it is the time of the call.

    Args:
        side, size: Of the matrices and of the copy whose rates are taken for what the device does at best.
    """

    def measure(rounds: int) -> Figure:
        flops, bandwidth = device_rates(dtype, device, rounds, side, size)
        least = max(count_flops(operation) / flops, count_bytes(operation, dtype) / bandwidth)
        call = operation.calls(dtype, device=device, written_out=False)[1]
        (whole,) = time_rounds([call], device, rounds, warmup=3)
        found = time_kernels([call], device, rounds)
        kernels = whole if found is None else found[0]
        shares = [least / seconds for seconds in kernels]
        return Figure(
            median(shares),
            quartiles(shares),
            milliseconds=(1e3 * least, 1e3 * median(whole)),
            kernel_milliseconds=None if found is None else (1e3 * least, 1e3 * median(kernels)),
        )

    return measure


def device_rates(
    dtype: torch.dtype, device: torch.device, rounds: int, side: int = MATRIX_SIDE, size: int = COPY_BYTES
) -> tuple[float, float]:
    """Floating-point operations a second of a matrix product, and bytes read and written a second of a copy."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product, copy = time_interleaved([lambda: a @ b, lambda: target.copy_(source)], device, rounds, warmup=3)
    return 2 * side**3 / product.seconds, 2 * size / copy.seconds


def count_flops(operation: Operation) -> int:
    """Floating-point operations of the products that give numerators and denominators, by matrices where they are.

    AFT-full and AFT-conv multiply by a (T, T) matrix, AFT-conv with few heads denominators of a channel a head;
    AFT-local multiplies blocks of 64 targets with the sources of their windows.
    """
    batch, tokens, dim = operation.shape
    sums = dim + (operation.key_heads or dim)
    if operation.name == 'aft_local_causal':
        assert operation.bias is not None
        return 2 * batch * tokens * min(tokens, operation.bias[1] + 64) * sums
    return 2 * batch * tokens**2 * sums


def count_bytes(operation: Operation, dtype: torch.dtype) -> int:
    """Bytes of q, k, v and the result, each read or written once."""
    batch, tokens, dim = operation.shape
    return batch * tokens * (3 * dim + (operation.key_heads or dim)) * dtype.itemsize
