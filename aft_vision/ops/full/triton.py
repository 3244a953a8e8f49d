"""AFT-full on a GPU (AFT Eq. 2): products by the (T, T) weights in torch, between Triton kernels."""

from typing import Any

import torch
import triton
from torch import Tensor

from aft_vision.ops.common.inputs import FullInputs, empty_denominator, empty_output
from aft_vision.ops.common.kernels import largest_keys
from aft_vision.ops.common.launch import (
    as_bytes,
    launching,
    like,
    multiply,
    pad,
    product_type,
    rows,
    strides,
)
from aft_vision.ops.full.kernels import (
    repair_kernel,
    results_kernel,
    sources_kernel,
    targets_kernel,
    terms_kernel,
    weights_kernel,
)

# Elements of the gradients of the bias of single sequences that are there at once.
GRADIENTS = 1 << 25


class _Call:
    """The sizes of a call, its weights (length, length), and the largest keys (B, D)."""

    def __init__(self, inputs: FullInputs) -> None:
        self.q, self.k, self.v = rows(inputs.q), rows(inputs.k), rows(inputs.v)
        self.bias, self.mask, self.product = inputs.bias.contiguous(), as_bytes(inputs.mask), product_type(self.v)
        self.B, self.T, self.D = self.v.shape
        self.length = pad(self.T)
        self.weights = torch.empty((self.length, self.length), dtype=self.product, device=self.v.device)
        weights_kernel[(self.length,)](self.bias, self.weights, self.T, self.length)
        # Flags, all 0, of channels of sequences with underflowed targets.
        self.peak, self.lost = largest_keys(self.k, self.mask)

    def empty(self) -> Tensor:
        """Return a buffer (B, length, 2 D) for terms, or for the gradients of sums."""
        return torch.empty((self.B, self.length, 2 * self.D), dtype=self.product, device=self.v.device)

    def run(self, kernel: Any, tensors: tuple[Tensor | None, ...], tokens: int, steps: tuple[int, ...]) -> None:
        """Launch a kernel over all channels of so many tokens of each sequence."""
        kernel[lambda tile: (triton.cdiv(tokens, tile['BT']) * triton.cdiv(self.D, tile['BD']) * self.B,)](
            *tensors, self.T, self.D, self.length, steps
        )

    def terms(self) -> Tensor:
        """Return the terms (B, length, 2 D)."""
        found = self.empty()
        tensors = self.k, self.v, self.mask, self.peak, found
        self.run(terms_kernel, tensors, self.length, strides(self.k, self.v))
        return found


def full_forward(inputs: FullInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (AFT Eq. 2)."""
    y, den = empty_output(inputs.q, inputs.v), empty_denominator(inputs.k, inputs.v, save)
    with launching('full_forward', inputs.v):
        call = _Call(inputs)
        q, k, v = call.q, call.k, call.v
        sums = multiply(call.weights.expand(call.B, -1, -1), call.terms())
        tensors = q, k, v, call.mask, call.bias, call.peak, sums, y, den if save else None
        call.run(results_kernel, tensors, call.T, strides(k, v, q))
    return y, den


def full_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: FullInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and bias."""
    dq, dk, dv = None if inputs.q is None else like(inputs.q), like(inputs.k), like(inputs.v)
    dbias = inputs.bias.new_empty(0)
    with launching('full_backward', inputs.v):
        call, grad, y, den = _Call(inputs), rows(grad), y.contiguous(), den.contiguous()
        q, k, v = call.q, call.k, call.v
        steps, slopes = strides(k, v, grad, q), call.empty()
        # Whether any channel is marked.
        lost, marked = call.lost, torch.zeros(1, dtype=torch.int32, device=v.device)
        call.run(targets_kernel, (grad, y, den, q, dq, slopes, lost, marked), call.length, steps)
        sums = multiply(call.weights.T.expand(call.B, -1, -1), slopes)
        known = grad, den, q, k, v, call.mask, call.bias
        call.run(sources_kernel, (*known, call.peak, lost, sums, dk, dv), call.T, steps)
        del sums
        if need_bias:
            found = _bias_grad(call, slopes)
            tiles = lambda tile: (triton.cdiv(call.T, tile['BT']), triton.cdiv(call.T, tile['BS']))  # noqa: E731
            repair_kernel[tiles](*known, lost, marked, found, call.B, call.T, call.D, steps)
            dbias = found.to(dbias.dtype)
    return k.new_empty(0) if dq is None else dq, dk, dv, dbias


def _bias_grad(call: _Call, slopes: Tensor) -> Tensor:
    # (T, T) float32 of all targets but underflowed ones. Sequences are added in one order: the same every time.
    terms, step = call.terms(), max(1, GRADIENTS // call.length**2)
    found = multiply(slopes[:step], terms[:step].mT).sum(0)
    for i in range(step, call.B, step):
        found += multiply(slopes[i : i + step], terms[i : i + step].mT).sum(0)
    return (found * call.weights)[: call.T, : call.T].contiguous()
