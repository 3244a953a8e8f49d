"""AFT-local, causal, in Triton (AFT Eq. 4): all blocks of targets at once.

Two short kernels compute the sums before each block, so that blocks also run in parallel, and a few long sequences fill
a GPU.
"""

import torch
import triton
from torch import Tensor

from aft_vision.ops.causal import local_backward_kernels as backward
from aft_vision.ops.causal import local_kernels as device
from aft_vision.ops.causal import local_repair_kernels as repair
from aft_vision.ops.common.inputs import empty_denominator, empty_output
from aft_vision.ops.common.launch import as_bytes, interprets, launching, like, product_type, products, rows
from aft_vision.ops.local.eager import LocalInputs

# Approximate number of programs for the gradient of the band: several per multiprocessor of a large GPU.
PROGRAMS = 512
# With fewer, tiles spill out of the registers into device memory.
REPAIR_WARPS = 8
# Steps of a scan are short and follow each other.
SCAN_WARPS = 1


class _Call:
    """Sizes, tiles, the weights and the sums of the past, shared by forward and backward."""

    def __init__(self, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None) -> None:
        self.k, self.v, self.mask, self.band = rows(k), rows(v), as_bytes(mask), band.contiguous()
        (self.B, self.T, self.D), self.window = v.shape, band.shape[1]
        self.product = product_type(v)
        self.products = products(self.product)
        # Wider tiles of float32 spill out of the registers and do not fit the shared memory of every GPU. Those of the
        # interpreter are so small that small tests have several.
        least, side = (4, 16) if interprets() else (16, 32 if self.product == torch.float32 else 64)
        self.BC = min(side, 32) if self.window <= 32 else side
        self.BD = min(side, max(least, triton.next_power_of_2(self.D)))
        self.blocks, self.strips = triton.cdiv(self.T, self.BC), triton.cdiv(self.D, self.BD)
        self.grid = self.blocks, self.strips, self.B
        # The blocks that the window of a block reaches.
        self.tiles = min(triton.cdiv(self.window - 1, self.BC) + 1, self.blocks)
        self.tile = {'BC': self.BC, 'BD': self.BD}
        self.past = self._past()
        self.weights, self.older = self._weights()
        # The first unmasked token of each sequence: targets before it see no source, which is not an underflow.
        self.first = None if mask is None else torch.where(mask.any(1), mask.int().argmax(1), self.T).int()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return T, D, s, the number of blocks, and of those that a block weights individually."""
        return self.T, self.D, self.window, self.blocks, self.tiles

    @property
    def keys_and_values(self) -> tuple[Tensor | None, ...]:
        """Return keys and values in the layout of the kernels."""
        return self.k, self.v, self.mask

    def pair(self) -> Tensor:
        """Return an uninitialised buffer (2, B, T, D) of operands of products, padded to whole blocks."""
        size = 2, self.B, self.blocks * self.BC, self.D
        return torch.empty(size, dtype=self.product, device=self.v.device)

    def _weights(self) -> tuple[Tensor, Tensor]:
        # Those of the sources of the last blocks up to a target's, and that of the sources before.
        count, rows = self.tiles * self.BC, self.blocks * self.BC
        weights = torch.empty((rows, count), dtype=self.product, device=self.v.device)
        older = torch.empty(self.T, dtype=torch.float32, device=self.v.device)
        device.weights_kernel[(rows,)](self.band, weights, older, self.T, self.window, count, BC=self.BC)
        return weights, older

    def _past(self) -> Tensor:
        summary, past = (
            torch.empty((self.B, self.blocks, rows, self.D), dtype=torch.float32, device=self.v.device)
            for rows in (4, device.ROWS.value)
        )
        device.summary_kernel[self.grid](
            *self.keys_and_values, summary, self.T, self.D, self.blocks, *_strides(self.k, self.v), **self.tile
        )
        sizes = self.T, self.D, self.blocks, self.tiles
        device.scan_kernel[(self.strips, self.B)](
            self.k, self.mask, summary, past, *sizes, *_strides(self.k), BD=self.BD, num_warps=SCAN_WARPS
        )
        return past

    def terms(self) -> Tensor:
        """Return the terms, and complete `past`."""
        found = self.pair()
        device.terms_kernel[self.grid](
            *self.keys_and_values,
            *(self.past, found, self.B, self.T, self.D, self.blocks),
            *_strides(self.k, self.v),
            **self.tile,
        )
        return found

    def underflowed(self) -> Tensor:
        """Return an uninitialised buffer of flags for tiles with underflowed elements."""
        return torch.empty((self.blocks, self.B, self.strips), dtype=torch.int32, device=self.v.device)


def local_causal_forward(inputs: LocalInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (AFT Eq. 4, causal)."""
    q, k, v, band, mask = inputs
    y, den, q = empty_output(q, v), empty_denominator(k, v, save), rows(q)
    with launching('local_causal_forward', v):
        call = _Call(k, v, band, mask)
        underflowed = call.underflowed()
        device.forward_kernel[call.grid](
            *(q, call.weights, call.older, call.past, call.terms(), y, den if save else None, underflowed, call.first),
            call.B,
            *call.sizes,
            *_strides(q),
            **call.products,
            **call.tile,
        )
        repair.forward_kernel[call.grid](
            q,
            *call.keys_and_values,
            *(call.band, call.past, y, underflowed),
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
        r = call.pair()
        dpast = torch.empty((call.B, call.blocks, 2, call.D), dtype=torch.float32, device=v.device)
        underflowed = call.underflowed()
        backward.rows_kernel[call.grid](
            *(grad, y, den, q, call.older, dq, r, dpast, underflowed, call.first),
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
            *(call.weights, call.past, dpast, dk, dv, call.B, *call.sizes),
            *_strides(call.k, call.v),
            PRECISION=call.products['PRECISION'],
            **call.tile,
        )
        tensors, steps = (grad, y, den, q, *call.keys_and_values), _strides(grad, y, q, call.k, call.v)
        repair.sources_kernel[call.grid](
            *(*tensors, call.band, call.past, underflowed, dk, dv, *call.sizes, *steps),
            **call.tile,
            num_warps=REPAIR_WARPS,
        )
        dband = band.new_empty(0)
        if need_bias:
            found = _band_grad(call, r)
            repair.band_kernel[(call.blocks, call.tiles)](
                *(*tensors, call.band, call.past, underflowed, found, call.B, *call.sizes, call.strips, *steps),
                **call.tile,
                num_warps=REPAIR_WARPS,
            )
            dband = found.to(band.dtype)
    return k.new_empty(0) if dq is None else dq, dk, dv, dband


def _band_grad(call: _Call, r: Tensor) -> Tensor:
    """Return the gradient of the band (T, s)."""
    strips = call.B * call.strips
    splits = max(1, min(strips, PROGRAMS // (call.blocks * call.tiles)))
    grad = r.new_zeros((splits, call.T, call.window), dtype=torch.float32)
    backward.band_kernel[(call.blocks, call.tiles, splits)](
        *(r, call.weights, call.past, call.terms(), grad, call.B, *call.sizes),
        *(call.strips, triton.cdiv(strips, splits)),
        **call.products,
        **call.tile,
    )
    return grad.sum(0)


def _strides(*tensors: Tensor | None) -> list[tuple[int, int]]:
    return [(0, 0) if x is None else (x.stride(0), x.stride(1)) for x in tensors]
