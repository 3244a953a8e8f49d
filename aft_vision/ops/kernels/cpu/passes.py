"""AFT-full, and AFT-conv in the Toeplitz form, on a CPU: torch's products with the passes of `passes.cpp` around them.

Sums are float32; the operands of the products, and what is read and written, are float32 or bfloat16. A chunk with a
denominator that underflows is left to the passes in torch, which repair it.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from aft_vision.ops.eager import conv, full
from aft_vision.ops.eager.mixing import Passes, Weights, Workspace
from aft_vision.ops.eager.numerics import UNDERFLOW, masked_values, product_dtype
from aft_vision.ops.kernels.cpu import depthwise
from aft_vision.ops.kernels.cpu.build import compiled, library
from aft_vision.ops.kernels.cpu.tensors import number, numbers, on_cpu, pointer

LEAST = UNDERFLOW[torch.float32]
DTYPES = (torch.float32, torch.bfloat16)


class _Array(ctypes.Structure):
    _fields_ = [
        ('data', ctypes.c_void_p),
        ('batch', ctypes.c_int64),
        ('token', ctypes.c_int64),
        ('half', ctypes.c_int64),
    ]


class _Space(ctypes.Structure):
    _fields_ = [('data', ctypes.c_void_p), ('half', ctypes.c_int64)]


class CompiledPasses(Passes):
    """The same, compiled.

    Args:
        by_channel: the workspaces are rows of channels (h, c + 1, B, T); else of tokens, (2, B, T, D).
    """

    def __init__(self, by_channel: bool) -> None:
        self.by_channel = by_channel

    def forward(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        weights: Weights,
        spaces: list[Workspace],
        out: Tensor,
        den: Tensor,
    ) -> None:
        x, spare = spaces
        self._enter(k, v, mask, x)
        sums = weights.apply(x, spare)
        q_, mask_ = _neighbours(q), None if mask is None else mask.contiguous()
        with record_function('aft_vision::passes_leave'):
            good = compiled().aft_pass_leave(
                self._sizes(k, v),
                _space(sums),
                _array(q_),
                pointer(mask_),
                _array(out),
                _array(den if den.numel() else None),
                number(LEAST),
                torch.get_num_threads(),
            )
        if not good:
            self.leave(q, k, v, mask, weights, sums, out, den)

    def backward(
        self,
        grad: Tensor,
        y: Tensor,
        den: Tensor,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        weights: Weights,
        need_bias: bool,
        spaces: list[Workspace],
        dq: Tensor | None,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        r, x, spare = spaces
        sizes, threads = self._sizes(k, v), torch.get_num_threads()
        inputs = [_neighbours(each) for each in (grad, y, den, q)]
        with record_function('aft_vision::passes_spread'):
            good = compiled().aft_pass_spread(sizes, *map(_array, (*inputs, dq)), _space(r), number(LEAST), threads)
        if not good:
            super().backward(grad, y, den, q, k, v, mask, weights, need_bias, spaces, dq, dk, dv)
            return
        self._enter(k, v, mask, x)
        z, v_ = weights.apply_transpose(r, spare), _neighbours(masked_values(v, mask))
        with record_function('aft_vision::passes_collect'):
            compiled().aft_pass_collect(sizes, _space(z), _space(x), *map(_array, (v_, dk, dv)), threads)
        if need_bias:
            weights.add_grad(r, x)

    def _enter(self, k: Tensor, v: Tensor, mask: Tensor | None, x: Workspace) -> None:
        k_, v_ = _neighbours(k), _neighbours(masked_values(v, mask))
        mask = None if mask is None else mask.contiguous()
        with record_function('aft_vision::passes_enter'):
            compiled().aft_pass_enter(
                self._sizes(k, v), _array(k_), _array(v_), pointer(mask), _space(x), torch.get_num_threads()
            )

    def _sizes(self, k: Tensor, v: Tensor) -> ctypes.Array[ctypes.c_int64]:
        return numbers((*v.shape, k.shape[2], self.by_channel))


TOKENS, CHANNELS = CompiledPasses(by_channel=False), CompiledPasses(by_channel=True)


def covers_full(q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> bool:
    """Whether this is made for such inputs and the faster form: a CPU, sums in float32."""
    # In float32 with several threads torch's own passes are the faster ones, by a fifth with two.
    faster = product_dtype(v) == torch.bfloat16 or torch.get_num_threads() == 1
    return faster and _covers(q, k, v, bias, mask)


def full_forward(
    q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, save: bool
) -> tuple[Tensor, Tensor]:
    """y and the denominators (AFT Eq. 2)."""
    return full.full_forward_by(TOKENS, q, k, v, bias, mask, save)


def full_backward(
    grad: Tensor,
    y: Tensor,
    den: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and bias."""
    return full.full_backward_by(TOKENS, grad, y, den, q, k, v, bias, mask, need_bias)


def covers_conv(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    grid: Sequence[int],
    mask: Tensor | None,
    global_context: bool,
) -> bool:
    """Whether this is made for such inputs: a CPU, sums in float32, the Toeplitz form or a kernel per channel."""
    own = _covers(q, k, v, kernel, mask) and not conv.prefers_depthwise(k, kernel)
    return own or depthwise.covers_conv(q, k, v, kernel, grid, mask, global_context)


def conv_forward(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    grid: Sequence[int],
    mask: Tensor | None,
    global_context: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """y and the denominators (AFT Eq. 6)."""
    if depthwise.covers_conv(q, k, v, kernel, grid, mask, global_context):
        return depthwise.conv_forward(q, k, v, kernel, grid, mask, global_context, save)
    return conv.toeplitz_forward(CHANNELS, q, k, v, kernel, grid, mask, global_context, save)


def conv_backward(
    grad: Tensor,
    y: Tensor,
    den: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    grid: Sequence[int],
    mask: Tensor | None,
    global_context: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and kernel."""
    if depthwise.covers_conv(q, k, v, kernel, grid, mask, global_context):
        return depthwise.conv_backward(grad, y, den, q, k, v, kernel, grid, mask, global_context, need_bias)
    return conv.toeplitz_backward(CHANNELS, grad, y, den, q, k, v, kernel, grid, mask, global_context, need_bias)


def _covers(q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> bool:
    floats = all(x is None or x.dtype in DTYPES for x in (q, k, v))
    return on_cpu(q, k, v, bias, mask) and floats and v.numel() > 0 and library() is not None


def _neighbours(x: Tensor | None) -> Tensor | None:
    # Whose channels are neighbours in memory, as a part of a fused projection has them; the caller keeps it alive.
    return x if x is None or x.stride(2) == 1 else x.contiguous()


def _array(x: Tensor | None) -> _Array:
    # (B, T, n); null without one.
    if x is None:
        return _Array(None, 0, 0, 0)
    return _Array(x.data_ptr(), x.stride(0), x.stride(1), x.dtype == torch.bfloat16)


def _space(x: Workspace) -> _Space:
    return _Space(x.buffer.data_ptr(), x.buffer.dtype == torch.bfloat16)
