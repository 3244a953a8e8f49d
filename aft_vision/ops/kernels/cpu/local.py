"""AFT-local with the future masked on a CPU: `local.cpp`, with sums in float32.

The blocks, references and repairs are those of `ops.eager.causal`, in whose place it comes.
"""

import torch
from torch import Tensor
from torch.profiler import record_function

from aft_vision.ops.eager.band import skew
from aft_vision.ops.eager.causal import HEADROOM, logits_grad, repair_backward, repair_forward
from aft_vision.ops.eager.causal_bias import BandBias
from aft_vision.ops.eager.numerics import (
    UNDERFLOW,
    accumulate_dtype,
    empty_denominator,
    empty_output,
    gate,
    masked_keys,
)
from aft_vision.ops.kernels.cpu.build import compiled, library
from aft_vision.ops.kernels.cpu.tensors import (
    cast,
    float_output,
    neighbours,
    number,
    numbers,
    on_cpu,
    pointer,
    room,
    tokens,
)

LEAST = UNDERFLOW[torch.float32]


class _Band:
    """The weights of a band (T, s), and the blocks of targets that it is worked in.

    window: (T, s), exp(w - reference of its row), 0 before the sequence.
    older: (T,), the same of a source before the window; 0 where there is none.
    """

    def __init__(self, band: Tensor) -> None:
        self.bias = BandBias(band)
        size = band.shape[1]
        band = band.float().clone(memory_format=torch.contiguous_format)
        head = band[: size - 1]
        tokens, places = torch.arange(len(head))[:, None], torch.arange(size)
        head.masked_fill_(tokens + places < size - 1, float('-inf'))
        row = band.amax(1, keepdim=True)
        row[size:].clamp_min_(0.0)
        self.window = band.sub_(row).exp_()
        self.older = torch.exp(-row.squeeze(1))
        self.older[:size] = 0.0

    def sizes(self, v: Tensor) -> list[int]:
        """B, T, D, s, and the targets of a block."""
        return [*v.shape, self.window.shape[1], self.bias.step]

    def block(self, start: int, stop: int) -> Tensor:
        """(stop - start, sources) weights of a block of targets."""
        return skew(self.window[start:stop])[:, self.bias.low(start) - (start - self.window.shape[1] + 1) :]

    def references(self, k: Tensor, mask: Tensor | None) -> Tensor:
        """Of each block of keys, (B, blocks, D)."""
        keys = masked_keys(k, mask)
        peaks = torch.stack([part.amax(1) for part in keys.split(self.bias.step, 1)], 1)
        first = keys[:, :1].clamp_min(torch.finfo(keys.dtype).min / 4)
        past = torch.cat([first, peaks[:, :-1]], 1).cummax(1).values
        return torch.maximum(past, peaks - HEADROOM)


def covers_local_causal(q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None) -> bool:
    """Whether this is made for such inputs: a CPU, sums in float32."""
    return (
        on_cpu(q, k, v, band, mask)
        and accumulate_dtype(v) == torch.float32
        and band.dtype != torch.float64
        and v.numel() > 0
        and library() is not None
    )


def local_causal_forward(
    q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None, save: bool
) -> tuple[Tensor, Tensor]:
    """y and the denominators (AFT Eq. 4, causal)."""
    out, den = empty_output(q, v), empty_denominator(k, v, save)
    y, bottom, weights = float_output(out), float_output(den), _Band(band)
    if not _forward(q, k, v, mask, weights, y, bottom if save else None):
        if not save:
            bottom = room(v.shape)
            _forward(q, k, v, mask, weights, y, bottom)
        _repair(y, bottom, q, k, v, mask, weights.bias)
    if save and bottom is not den:
        den.copy_(bottom)
    return (out if y is out else out.copy_(y)), den


def local_causal_backward(
    grad: Tensor,
    y: Tensor,
    den: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    band: Tensor,
    mask: Tensor | None,
    need_bias: bool,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and band. A scan over the blocks, last to first."""
    weights = _Band(band)
    step, bias, (batch, length, dim) = weights.bias.step, weights.bias, v.shape
    inputs = [neighbours(x) for x in (grad, y, den, q, k, v)]
    given_mask, references = None if mask is None else mask.contiguous(), weights.references(k, mask)
    dq, dk, dv = None if q is None else room(q.shape), room(k.shape).zero_(), room(v.shape).zero_()
    d_state = room((batch, 2, dim)).zero_()
    rows = _scratch(step, 2 * batch * dim) if need_bias else None
    entries = _scratch(step + band.shape[1] - 1, 2 * batch * dim) if need_bias else None
    for start in reversed(range(0, length, step)):
        stop, low = min(start + step, length), bias.low(start)
        with record_function('aft_vision::local_backward'):
            compiled().aft_local_causal_backward(
                numbers(weights.sizes(v)),
                numbers((start, stop, low, bias.low(start - step) if start else 0)),
                *map(tokens, inputs),
                pointer(given_mask),
                pointer(weights.window),
                pointer(weights.older),
                *map(tokens, (references, dq, dk, dv, d_state, _as_tokens(rows), _as_tokens(entries))),
                number(LEAST),
                torch.get_num_threads(),
            )
        if rows is not None and entries is not None:
            left, right = rows[: stop - start], entries[: stop - low]
            bias.add_grad(start, stop, logits_grad(weights.block(start, stop), left, right, torch.float32))
    # As the kernel compares: in bfloat16 the limit itself would be rounded.
    lost = den.float() < LEAST
    if bool(lost.any()):
        s = gate(q, torch.float32)
        a = grad.float() if s is None else grad.float() * s
        repair_backward(a, k, v, mask, bias, lost, dk, dv, need_bias)
    return cast((dq, dk, dv, bias.grad if need_bias else None), (q, k, v, band), k)


def _forward(
    q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None, weights: _Band, y: Tensor, den: Tensor | None
) -> bool:
    # Whether y and den are right everywhere.
    inputs, references = [neighbours(x) for x in (q, k, v)], weights.references(k, mask)
    mask = None if mask is None else mask.contiguous()
    with record_function('aft_vision::local_forward'):
        good = compiled().aft_local_causal_forward(
            numbers(weights.sizes(v)),
            *map(tokens, inputs),
            pointer(mask),
            pointer(weights.window),
            pointer(weights.older),
            *map(tokens, (references, y, den)),
            number(LEAST),
            torch.get_num_threads(),
        )
    return bool(good)


def _repair(
    y: Tensor, den: Tensor, q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None, bias: BandBias
) -> None:
    # Compute again what has underflowed in y.
    lost = den < LEAST
    ratio = torch.zeros_like(y)
    repair_forward(ratio, k, v, mask, bias, lost, 0, None)
    s = gate(q, y.dtype)
    y.copy_(torch.where(lost, ratio if s is None else ratio * s, y))


def _scratch(rows: int, columns: int) -> Tensor:
    # Columns are written one by one: rows a power of two apart would all take one place of the cache.
    return room((rows, columns + 16))[:, :columns]


def _as_tokens(x: Tensor | None) -> Tensor | None:
    # (n, m) as tokens of a batch of one.
    return None if x is None else x.unsqueeze(0)
