"""AFT-full on a GPU (AFT Eq. 2): products by the (T, T) weights.

Short sequences in bfloat16 are one kernel, in the forward with its weights in shared memory if that is large enough;
longer ones are products of torch between Triton kernels.
"""

from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from aft_vision.ops.common.inputs import empty_denominator, empty_output
from aft_vision.ops.common.kernels import largest_keys
from aft_vision.ops.common.launch import (
    SOURCES,
    TARGETS,
    as_bytes,
    keeps_weights,
    known_weights,
    launching,
    like,
    multiply,
    multiprocessors,
    pad,
    pieces,
    product_type,
    products,
    programs,
    rows,
    strides,
    whole_length,
)
from aft_vision.ops.common.tuner import run_fastest
from aft_vision.ops.full.eager import FullInputs
from aft_vision.ops.full.kernels import (
    repair_kernel,
    results_kernel,
    sources_kernel,
    stationary_kernel,
    targets_kernel,
    terms_kernel,
    weights_kernel,
    whole_results_kernel,
    whole_sources_kernel,
)

# Bytes of weights with which two programs of 32 channels share a multiprocessor with 227 KiB of shared memory.
PAIR = 87_000
# Elements of the bias gradients of single sequences that exist at the same time.
GRADIENTS = 1 << 25


class _Call:
    """The sizes of a call and its weights.

    `whole` is the length to which one kernel pads sequences, or 0 if they are too long for it.
    """

    def __init__(self, inputs: FullInputs) -> None:
        self.q, self.k, self.v = rows(inputs.q), rows(inputs.k), rows(inputs.v)
        self.bias, self.mask, self.product = inputs.bias.contiguous(), as_bytes(inputs.mask), product_type(self.v)
        self.B, self.T, self.D = self.v.shape
        self.length, self.whole = pad(self.T), whole_length(self.T, self.product)

    @cached_property
    def weights(self) -> Tensor:
        """Return the weights (length, length), or those of whole sequences."""
        return self.make_weights(self.whole or self.length)

    def make_weights(self, side: int) -> Tensor:
        """Return the weights (side, side)."""
        found = torch.empty((side, side), dtype=self.product, device=self.v.device)
        weights_kernel[(side,)](self.bias, found, self.T, side)
        return found

    def empty(self) -> Tensor:
        """Return a buffer (B, length, 2 D) for terms, or for the gradients of sums."""
        return torch.empty((self.B, self.length, 2 * self.D), dtype=self.product, device=self.v.device)

    def run(self, kernel: Any, tensors: tuple[Tensor | None, ...], tokens: int, steps: tuple[int, ...]) -> None:
        """Launch a kernel over all channels of so many tokens of each sequence."""
        kernel[lambda tile: (triton.cdiv(tokens, tile['BT']) * triton.cdiv(self.D, tile['BD']) * self.B,)](
            *tensors, self.T, self.D, self.length, steps
        )

    def run_whole(self, kernel: Any, tensors: tuple[Tensor | None, ...], *arguments: Any) -> None:
        """Launch a kernel over all channels of whole sequences."""
        kernel[lambda tile: (triton.cdiv(self.D, tile['BD']) * self.B,)](
            *tensors, self.T, self.D, *arguments, LENGTH=self.whole, **products(self.product)
        )

    def run_stationary(self, bias: Tensor, y: Tensor, den: Tensor | None) -> None:
        """Launch the forward over all channels of whole sequences, in programs that keep the weights."""
        sizes = {'TARGETS': pieces(self.T, TARGETS), 'SOURCES': pieces(self.T, SOURCES)}
        side = sum(sizes['SOURCES'])
        weights = known_weights(bias, (side, self.product), lambda: self.make_weights(side))

        def grid(tile: dict[str, int]) -> tuple[int]:
            pair = tile['BD'] <= 32 and side * side * self.product.itemsize <= PAIR
            return (programs(self.B * triton.cdiv(self.D, tile['BD']), (1 + pair) * multiprocessors(self.v.device)),)

        stationary_kernel[grid](
            *(self.q, self.k, self.v, self.mask, self.bias, weights, y, den, self.B, self.T, self.D, side),
            strides(self.k, self.v, self.q),
            **sizes,
            **products(self.product),
        )

    def terms(self, peak: Tensor) -> Tensor:
        """Return the terms (B, length, 2 D), relative to the largest keys (B, D)."""
        found = self.empty()
        tensors = self.k, self.v, self.mask, peak, found
        self.run(terms_kernel, tensors, self.length, strides(self.k, self.v))
        return found


def full_forward(inputs: FullInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (AFT Eq. 2)."""
    y, den = empty_output(inputs.q, inputs.v), empty_denominator(inputs.k, inputs.v, save)
    with launching('full_forward', inputs.v):
        call = _Call(inputs)
        q, k, v = call.q, call.k, call.v
        known, found, steps = (q, k, v, call.mask, call.bias), (y, den if save else None), strides(k, v, q)
        if call.whole:

            def streamed() -> None:
                call.run_whole(whole_results_kernel, (*known, call.make_weights(call.whole), *found), steps)

            def stationary() -> None:
                call.run_stationary(inputs.bias, *found)

            sizes = triton.next_power_of_2(call.B), triton.next_power_of_2(call.T), call.D
            run_fastest(('full', *sizes), *([stationary] if keeps_weights() else []), streamed)
        else:
            peak, _ = largest_keys(k, call.mask)
            sums = multiply(call.weights.expand(call.B, -1, -1), call.terms(peak))
            call.run(results_kernel, (*known, peak, sums, *found), call.T, steps)
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
        steps, known = strides(k, v, grad, q), (grad, den, q, k, v, call.mask, call.bias)
        # Whether any channel of a sequence has underflowed targets.
        marked = torch.zeros(1, dtype=torch.int32, device=v.device)
        slopes = terms = None
        if call.whole:
            underflowed = torch.zeros((call.B, call.D), dtype=torch.int32, device=v.device)
            if need_bias:
                slopes, terms = call.empty(), call.empty()
            found = dq, dk, dv, slopes, terms, underflowed, marked
            call.run_whole(whole_sources_kernel, (grad, y, *known[1:], call.weights, *found), call.length, steps)
        else:
            peak, underflowed = largest_keys(k, call.mask)
            slopes = call.empty()
            call.run(targets_kernel, (grad, y, den, q, dq, slopes, underflowed, marked), call.length, steps)
            sums = multiply(call.weights.T.expand(call.B, -1, -1), slopes)
            call.run(sources_kernel, (*known, peak, underflowed, sums, dk, dv), call.T, steps)
            del sums
            terms = call.terms(peak) if need_bias else None
        if slopes is not None and terms is not None:
            total = _bias_grad(call.weights, slopes, terms)[: call.T, : call.T].contiguous()
            tiles = lambda tile: (triton.cdiv(call.T, tile['BT']), triton.cdiv(call.T, tile['BS']))  # noqa: E731
            repair_kernel[tiles](*known, underflowed, marked, total, call.B, call.T, call.D, steps)
            dbias = total.to(dbias.dtype)
    return k.new_empty(0) if dq is None else dq, dk, dv, dbias


def _bias_grad(weights: Tensor, slopes: Tensor, terms: Tensor) -> Tensor:
    # (length, length) float32 of all targets but underflowed ones. Sequences are added in one order, each time.
    B, length, _ = slopes.shape
    step = max(1, GRADIENTS // length**2)
    found = multiply(slopes[:step], terms[:step].mT).sum(0)
    for i in range(step, B, step):
        found += multiply(slopes[i : i + step], terms[i : i + step].mT).sum(0)
    return found * weights[:length, :length]
