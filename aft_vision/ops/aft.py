"""The AFT operations over whole sequences (AFT Eq. 2, 4, 5, 6, 10), and one of ours, AFT-axial.

Each is one custom operator with an explicit backward: O(B T D) memory besides the bias. On a CPU, and in
Triton, any finite key and bias is exact. In the torch forms on an accelerator an element underflows to 0 where w and k
both spread over more than about 69 nats. A bias of minus infinity hides a source; a target without any gives 0.
They have derivatives of every order. Autograd runs the backward of a form. Dual tensors, `torch.func` with every
transform, batches of gradients and second derivatives take the plain graph, in float64.

Backends: 'eager' is torch operations and takes any inputs; 'cpp' code compiled for the CPU; 'triton' code for
CUDA devices, in float32, bfloat16 and float16 with sums in float32, a RuntimeError where Triton is installed and cannot
compile; 'auto' the fastest of these that supports the inputs and works; 'aten' the plain graphs of `aten`, without a
custom operator, for exporters. The causal operations do not take it, and TorchScript cannot ask for it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from aft_vision.ops.axial import AXIAL
from aft_vision.ops.conv import CONV, ONEHOT
from aft_vision.ops.full import FULL
from aft_vision.ops.local import LOCAL
from aft_vision.ops.simple import SIMPLE
from aft_vision.ops.tracing import grid_arguments, saves_for_backward

F = TypeVar('F', bound=Callable[..., Any])


def _scripted_as(overload: Callable[..., Any]) -> Callable[[F], F]:
    # TorchScript takes no keyword-only defaults. Of a function with these attributes, those of
    # torch.jit.script_if_tracing, it compiles the original, which must have the same name.
    def mark(function: F) -> F:
        overload.__name__ = function.__name__
        vars(function).update(__original_fn=overload, __script_if_tracing_wrapper=True)
        return function

    return mark


def _aft_full(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    backend: str = 'auto',
    weights: Tensor | None = None,
) -> Tensor:
    if not torch.jit.is_scripting():
        return FULL(q, k, v, bias, mask, backend, weights=weights)
    return torch.ops.aft_vision.aft_full(q, k, v, bias, mask, saves_for_backward(), backend)[0]


@_scripted_as(_aft_full)
def aft_full(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    backend: str = 'auto',
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """Mix tokens with learned pair-wise position biases (AFT Eq. 2).

    Args:
        q, k, v: (B, T, D). q = None leaves the sigmoid gate out (Table 12).
        bias: (T, T) position bias w; bias[t, s] weights source s for target t.
        mask: (B, T) bool, True where a source counts; a target with no source gives 0.
        backend: 'auto', 'eager', 'cpp', 'triton' or 'aten'.
        weights: from `ops.bias_weights` for this bias and this type of v, which compiled code then reads in place
            of the bias in a call without gradients; others of the same shape give a wrong result. Ignored otherwise.

    Returns:
        (B, T, D) in q's dtype. Memory is O(B * T * D + T * T); the (T, T, D) weights are never formed.

    Raises:
        ValueError: shapes do not match, those of weights included, mask is not a bool (B, T), or the backend is
            unknown.
    """
    return _aft_full(q, k, v, bias, mask, backend, weights)


def aft_local(
    q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None = None, backend: str = 'auto'
) -> Tensor:
    """Mix tokens with position biases inside a window, and plain weights exp(k) outside it (AFT Eq. 4).

    Args:
        q, k, v: (B, T, D). q = None leaves the sigmoid gate out.
        band: (T, 2s - 1): band[t, j] is w[t, t + j - (s - 1)]; entries outside the sequence are ignored.
        mask: (B, T) bool, True where a source counts; a target with no source gives 0.
        backend: 'auto', 'eager' or 'aten'.

    Returns:
        (B, T, D) in q's dtype. Memory is O(B * T * D + T * s); no (T, T) matrix is formed.

    Raises:
        ValueError: shapes do not match, the band's width is even, mask is not a bool (B, T), or the backend is unknown.
    """
    if not torch.jit.is_scripting():
        return LOCAL(q, k, v, band, mask, backend)
    return torch.ops.aft_vision.aft_local(q, k, v, band, mask, saves_for_backward(), backend)[0]


def aft_simple(q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None = None, backend: str = 'auto') -> Tensor:
    """Gate one global, key-weighted mean of the values (AFT Eq. 5).

    Args:
        q, k, v: (B, T, D). q = None leaves the sigmoid gate out.
        mask: (B, T) bool, True where a source counts; a batch row with no source gives 0.
        backend: 'auto', 'eager', 'triton' or 'aten'.

    Returns:
        (B, T, D) in q's dtype.

    Raises:
        ValueError: shapes do not match, mask is not a bool (B, T), or the backend is unknown.
    """
    if not torch.jit.is_scripting():
        return SIMPLE(q, k, v, mask, backend)
    return torch.ops.aft_vision.aft_simple(q, k, v, mask, saves_for_backward(), backend)[0]


def _aft_conv(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    grid: tuple[int, int],
    mask: Tensor | None = None,
    global_context: bool = True,
    backend: str = 'auto',
    weights: Tensor | None = None,
) -> Tensor:
    if not torch.jit.is_scripting():
        return CONV(q, k, v, kernel, grid, mask, global_context, backend, weights=weights)
    k, sizes = grid_arguments(k, grid)
    return torch.ops.aft_vision.aft_conv(q, k, v, kernel, sizes, mask, global_context, saves_for_backward(), backend)[0]


@_scripted_as(_aft_conv)
def aft_conv(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    grid: tuple[int, int],
    mask: Tensor | None = None,
    global_context: bool = True,
    backend: str = 'auto',
    *,
    weights: Tensor | None = None,
) -> Tensor:
    """Mix a grid of tokens with relative position biases shared over the grid (AFT Eq. 6).

    Erratum: the print convolves K and K * V; it must read exp(K) and exp(K) * V, which makes it AFT Eq. 2 with the
    expanded bias. Correlation (the kernel is not flipped), zero padding, stride 1; s may exceed the grid.

    Args:
        q, v: (B, H * W, D). q = None leaves the sigmoid gate out (Table 12).
        k: (B, H * W, h), one channel per head; head i owns the channels [i * D / h, (i + 1) * D / h).
        kernel: (h, s, s) position bias w, s odd; kernel[i, s // 2 + dy, s // 2 + dx] weights the source (dy, dx) away.
        grid: (H, W), in tokens.
        mask: (B, H * W) bool, True where a source counts; a target with no source gives 0.
        global_context: False gives sources outside the window no weight (the degenerate variant of Sec. 5.3).
        backend: 'auto', 'eager', 'cpp', or one of its forms 'depthwise', 'wide' and 'conv', 'triton' or 'aten'.
        weights: from `ops.bias_weights` for this kernel and this type of v, which compiled code then reads in place
            of the kernel in a call without gradients; others of the same shape give a wrong result. Ignored otherwise.

    Returns:
        (B, H * W, D) in q's dtype.

    Raises:
        ValueError: shapes do not match, those of weights included, s is even, h does not divide D, H * W is not the
            number of tokens, mask is not a bool (B, H * W), or the backend is unknown.
    """
    return _aft_conv(q, k, v, kernel, grid, mask, global_context, backend, weights)


def aft_onehot(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    offset: Tensor,
    weight: Tensor,
    grid: tuple[int, int],
    mask: Tensor | None = None,
    backend: str = 'auto',
) -> Tensor:
    """Mix a grid of tokens with one biased offset per head: global pooling plus an index (AFT Eq. 10).

    AFT-conv whose kernel is zero except for one entry per head, what Gumbel softmax leaves at inference.

    Args:
        q, v: (B, H * W, D). q = None leaves the sigmoid gate out.
        k: (B, H * W, h), one channel per head.
        offset: (h, 2) int64, (dy, dx) in tokens from target to source; outside the grid it adds nothing.
        weight: (h,) the bias w at that offset.
        grid: (H, W), in tokens.
        mask: (B, H * W) bool, True where a source counts; a batch row with no source gives 0.
        backend: 'auto', 'eager', 'cpp', 'triton' or 'aten'.

    Returns:
        (B, H * W, D) in q's dtype.

    Raises:
        ValueError: shapes do not match, offset is not int64, h does not divide D, H * W is not the number of tokens,
            mask is not a bool (B, H * W), or the backend is unknown.
    """
    if not torch.jit.is_scripting():
        return ONEHOT(q, k, v, offset, weight, grid, mask, backend)
    k, sizes = grid_arguments(k, grid)
    return torch.ops.aft_vision.aft_onehot(q, k, v, offset, weight, sizes, mask, saves_for_backward(), backend)[0]


def aft_axial(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    row_bias: Tensor,
    column_bias: Tensor,
    grid: tuple[int, int],
    mask: Tensor | None = None,
    backend: str = 'auto',
) -> Tensor:
    """Mix a grid of tokens with a position bias that is a sum over rows and columns (AFT Eq. 2, structured).

    Ours, not the paper's: next to its factorised bias (Eq. 7) and its kernel (Eq. 6), the bias of the source (y', x')
    for the target (y, x) is row_bias[y' - y] + column_bias[x' - x]. Its exponential is a Kronecker product, so every
    pair of tokens has a learned weight in O(T (H + W)) time for each channel, and no weight is negative.

    Args:
        q, v: (B, H * W, D). q = None leaves the sigmoid gate out.
        k: (B, H * W, h), one channel per head; head i owns the channels [i * D / h, (i + 1) * D / h).
        row_bias: (h, 2a - 1): row_bias[i, a - 1 + dy] weights sources dy rows below; 0 beyond. Any a: it may exceed H.
        column_bias: (h, 2b - 1), likewise along columns.
        grid: (H, W), in tokens.
        mask: (B, H * W) bool, True where a source counts; a target with no source gives 0.
        backend: 'auto', 'eager', 'cpp', 'triton' or 'aten'.

    Returns:
        (B, H * W, D) in q's dtype. Memory is O(B * T * D + h * (H * H + W * W)).

    Raises:
        ValueError: shapes do not match, a bias has an even width, h does not divide D, H * W is not the number of
            tokens, mask is not a bool (B, H * W), or the backend is unknown.
    """
    if not torch.jit.is_scripting():
        return AXIAL(q, k, v, row_bias, column_bias, grid, mask, backend)
    k, sizes = grid_arguments(k, grid)
    return torch.ops.aft_vision.aft_axial(q, k, v, row_bias, column_bias, sizes, mask, saves_for_backward(), backend)[0]
