"""AFT-simple up to each token in Triton (AFT Eq. 5, footnote 2)."""

import torch
import triton
from torch import Tensor

from aft_vision.ops.causal.simple_kernels import (
    GROUP,
    backward_kernel,
    forward_kernel,
    gradient_summary_kernel,
    group_kernel,
    scan_kernel,
    summary_kernel,
)
from aft_vision.ops.common.inputs import Qkv, empty_denominator, empty_output
from aft_vision.ops.common.kernels import MIN_FLOAT32
from aft_vision.ops.common.launch import as_bytes, launching, like, rows, strides

# Channels of a program that finds the largest key of a group.
GROUP_CHANNELS = 64
# Sequences are cut into chunks of a multiple of this many tokens, while there are fewer programs than this of CHANNELS
# channels: several per multiprocessor of a large GPU. Every tile of tokens fits into a chunk.
CHUNK = 128
PROGRAMS = 512
CHANNELS = 32
# The tile of the kernels that sum over a chunk.
SUMMARY = {'BT': 32, 'BD': CHANNELS}


def simple_causal_forward(inputs: Qkv, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators, each relative to the largest key up to its token (AFT Eq. 5, causal)."""
    q, k, v, mask = inputs
    y, den = empty_output(q, v), empty_denominator(k, v, save)
    (B, T, D), q, k, v = v.shape, rows(q), rows(k), rows(v)
    length, chunks = _cut(v)
    mask, past, steps = as_bytes(mask), _sums(v, chunks), strides(q, k, v)
    with launching('simple_causal_forward', v):
        if past is not None:
            summary_kernel[(B * chunks * triton.cdiv(D, CHANNELS),)](k, v, mask, past, T, D, length, steps, **SUMMARY)
            _scan(past, reverse=False)
        forward_kernel[lambda tile: (B * chunks * triton.cdiv(D, tile['BD']),)](
            q, k, v, mask, past, y, den if save else None, T, D, length, steps
        )
    return y, den


def simple_causal_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: Qkv, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    q, k, v, mask = inputs
    (B, T, D), grad, q, k, v, mask = v.shape, rows(grad), rows(q), rows(k), rows(v), as_bytes(mask)
    y, den = y.contiguous(), den.contiguous()
    dq, dk, dv = None if q is None else like(q), like(k), like(v)
    groups = triton.cdiv(T, GROUP.value)
    peaks = torch.full((B, 1 + groups, D), MIN_FLOAT32.value, dtype=torch.float32, device=k.device)
    length, chunks = _cut(v)
    following, steps = _sums(v, chunks), strides(grad, q, k, v)
    with launching('simple_causal_backward', v):
        grid = (B * groups * triton.cdiv(D, GROUP_CHANNELS),)
        group_kernel[grid](k, mask, peaks, T, D, *strides(k), BD=GROUP_CHANNELS)
        peaks = peaks.cummax(1).values
        if following is not None:
            gradient_summary_kernel[(B * chunks * triton.cdiv(D, CHANNELS),)](
                grad, y, den, q, k, mask, peaks, following, T, D, length, steps, **SUMMARY
            )
            _scan(following, reverse=True)
        backward_kernel[lambda tile: (B * chunks * triton.cdiv(D, tile['BD']),)](
            grad, y, den, q, k, v, mask, peaks, following, dq, dk, dv, T, D, length, steps
        )
    return k.new_empty(0) if dq is None else dq, dk, dv


def _cut(v: Tensor) -> tuple[int, int]:
    # The length and number of the chunks of each sequence.
    B, T, D = v.shape
    wanted = max(1, PROGRAMS // (B * triton.cdiv(D, CHANNELS)))
    length = triton.cdiv(triton.cdiv(T, wanted), CHUNK) * CHUNK
    return length, triton.cdiv(T, length)


def _sums(v: Tensor, chunks: int) -> Tensor | None:
    # A buffer (B, chunks, 3, D) for the sums of other chunks; None for a single chunk.
    B, _, D = v.shape
    return None if chunks == 1 else torch.empty((B, chunks, 3, D), dtype=torch.float32, device=v.device)


def _scan(sums: Tensor, reverse: bool) -> None:
    B, chunks, _, D = sums.shape
    # One warp with one channel per thread: it overwrites its input, which no other thread reads.
    scan_kernel[(B * triton.cdiv(D, CHANNELS),)](sums, D, chunks, REVERSE=reverse, BD=CHANNELS, num_warps=1)
