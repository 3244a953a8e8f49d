"""AFT-local, causal, in Triton (AFT Eq. 4): all blocks of targets at once.

Two short kernels compute the sums before each block, so that blocks also run in parallel, and a few long sequences fill
a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aft_vision.ops.causal import local_backward_kernels as backward
from aft_vision.ops.causal import local_kernels as device
from aft_vision.ops.causal import local_repair_kernels as repair
from aft_vision.ops.common.inputs import LocalInputs, empty_denominator, empty_output
from aft_vision.ops.common.kernels import FLOOR
from aft_vision.ops.common.launch import as_bytes, interprets, launching, like, products, rows

# Approximate number of programs for the gradient of the band: several per multiprocessor of a large GPU.
PROGRAMS = 512
# With fewer, tiles spill out of the registers into device memory.
REPAIR_WARPS = 8
# A scan overwrites its input. Several warps would have the same channels, and one might read too late.
SCAN_WARPS = 1


class _Call:
    """Sizes, tiles, the exponentials of the band and the sums of the past, shared by forward and backward."""

    def __init__(self, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None) -> None:
        self.k, self.v, self.mask, self.band = rows(k), rows(v), as_bytes(mask), band.contiguous()
        (self.B, self.T, self.D), self.window = v.shape, band.shape[1]
        self.products = products(v)
        # Wider tiles of float32 spill out of the registers and do not fit the shared memory of every GPU. Those of the
        # interpreter are so small that small tests have several.
        least, side = (4, 16) if interprets() else (16, 32 if self.product_dtype == torch.float32 else 64)
        self.BC = min(side, 32) if self.window <= 32 else side
        self.BD = min(side, max(least, triton.next_power_of_2(self.D)))
        self.blocks, self.strips = triton.cdiv(self.T, self.BC), triton.cdiv(self.D, self.BD)
        self.grid = self.blocks, self.strips, self.B
        # Weights of BC sources, over the window of a block.
        self.band_tiles = min(triton.cdiv(self.window - 1, self.BC) + 1, self.blocks)
        self.tile = {'BC': self.BC, 'BD': self.BD}
        self.exp, self.older = self._exponentials()
        self.past = self._past()
        # The first unmasked token of each sequence: targets before it see no source, which is not an underflow.
        self.first = None if mask is None else torch.where(mask.any(1), mask.int().argmax(1), self.T).int()

    @property
    def product_dtype(self) -> torch.dtype:
        """Return the type of the operands of products."""
        return torch.float32 if self.products['PRODUCT'] is tl.float32 else torch.bfloat16

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return T, D, s and the number of blocks."""
        return self.T, self.D, self.window, self.blocks

    @property
    def keys_and_values(self) -> tuple[Tensor | None, ...]:
        """Return keys and values in the layout of the kernels."""
        return self.k, self.v, self.mask

    def _exponentials(self) -> tuple[Tensor, Tensor]:
        # (T, s) of the band and (T,) of the zero before the window, both relative to the largest that a target sees.
        target = torch.arange(self.T, device=self.band.device)
        outside = torch.arange(self.window, device=self.band.device) < self.window - 1 - target[:, None]
        w = self.band.float().masked_fill(outside, float('-inf'))
        row = w.amax(1)
        # A row of minus infinity sees no source.
        row = torch.where(target < self.window, row.clamp_min(FLOOR.value), row.clamp_min(0.0))
        return torch.exp(w - row[:, None]).to(self.product_dtype), torch.exp(-row.clamp_min(0.0))

    def _past(self) -> Tensor:
        past = torch.empty((self.B, self.blocks, device.ROWS.value, self.D), dtype=torch.float32, device=self.v.device)
        device.summary_kernel[self.grid](
            *self.keys_and_values,
            past,
            *self.sizes,
            *_strides(self.k, self.v),
            **self.tile,
        )
        device.scan_kernel[(self.strips, self.B)](
            self.k, self.mask, past, self.T, self.D, self.blocks, *_strides(self.k), BD=self.BD, num_warps=SCAN_WARPS
        )
        return past

    def lost(self) -> Tensor:
        """Return an uninitialised buffer of flags for tiles with underflowed elements."""
        return torch.empty((self.blocks, self.B, self.strips), dtype=torch.int32, device=self.v.device)


def local_causal_forward(inputs: LocalInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (AFT Eq. 4, causal)."""
    q, k, v, band, mask = inputs
    y, den, q = empty_output(q, v), empty_denominator(k, v, save), rows(q)
    with launching('local_causal_forward', v):
        call = _Call(k, v, band, mask)
        lost = call.lost()
        device.forward_kernel[call.grid](
            q,
            *call.keys_and_values,
            *(call.exp, call.older, call.past, y, den if save else None, lost, call.first),
            call.B,
            *call.sizes,
            *_strides(q, call.k, call.v),
            **call.products,
            **call.tile,
        )
        repair.forward_kernel[call.grid](
            q,
            *call.keys_and_values,
            *(call.band, call.past, y, lost),
            *call.sizes,
            *_strides(q, call.k, call.v),
            **call.tile,
            num_warps=REPAIR_WARPS,
        )
    return y, den


def local_causal_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: LocalInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and band."""
    q, k, v, band, mask = inputs
    grad, q, y, den = rows(grad), rows(q), rows(y), den.contiguous()
    dq, dk, dv = None if q is None else like(q), like(k), like(v)
    with launching('local_causal_backward', v):
        call = _Call(k, v, band, mask)
        r = torch.empty((2, *v.shape), dtype=call.product_dtype, device=v.device)
        dpast = torch.empty((call.B, call.blocks, 2, call.D), dtype=torch.float32, device=v.device)
        lost = call.lost()
        backward.rows_kernel[call.grid](
            *(grad, y, den, q, call.older, dq, r, dpast, lost, call.first),
            *(call.B, call.T, call.D, call.blocks),
            *_strides(grad, y, q),
            **call.tile,
        )
        backward.reverse_kernel[(call.strips, call.B)](
            call.past, dpast, call.D, call.blocks, BD=call.BD, num_warps=SCAN_WARPS
        )
        backward.sources_kernel[call.grid](
            r,
            *call.keys_and_values,
            *(call.exp, call.older, call.past, dpast, dk, dv),
            call.B,
            *call.sizes,
            *_strides(call.k, call.v),
            **call.products,
            **call.tile,
        )
        tensors, steps = (grad, y, den, q, *call.keys_and_values), _strides(grad, y, q, call.k, call.v)
        repair.sources_kernel[call.grid](
            *(*tensors, call.band, call.past, lost, dk, dv, *call.sizes, *steps), **call.tile, num_warps=REPAIR_WARPS
        )
        dband = band.new_empty(0)
        if need_bias:
            found = _band_grad(call, r)
            repair.band_kernel[(call.blocks, call.band_tiles)](
                *(*tensors, call.band, call.past, lost, found, call.B, *call.sizes, call.strips, *steps),
                **call.tile,
                num_warps=REPAIR_WARPS,
            )
            dband = found.to(band.dtype)
    return k.new_empty(0) if dq is None else dq, dk, dv, dband


def _band_grad(call: _Call, r: Tensor) -> Tensor:
    """Return the gradient of the band (T, s)."""
    strips = call.B * call.strips
    splits = max(1, min(strips, PROGRAMS // (call.blocks * call.band_tiles)))
    grad = r.new_zeros((splits, call.T, call.window), dtype=torch.float32)
    backward.band_kernel[(call.blocks, call.band_tiles, splits)](
        r,
        *call.keys_and_values,
        *(call.exp, call.older, call.past, grad, call.B, call.T, call.D, call.window, call.blocks),
        *(call.strips, triton.cdiv(strips, splits)),
        *_strides(call.k, call.v),
        **call.products,
        **call.tile,
    )
    return grad.sum(0)


def _strides(*tensors: Tensor | None) -> list[tuple[int, int]]:
    return [(0, 0) if x is None else (x.stride(0), x.stride(1)) for x in tensors]
