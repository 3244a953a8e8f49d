"""The causal forms in torch (footnote 2): target t sums over the sources up to t.

A maximum over all positions is not possible: one large future key would underflow the past. Blocks of targets are
processed in order. Each has a reference per channel, max(largest key before the block, largest key of the block - 60).
The reference never falls, so running sums of the sources before the window are only scaled down, and keys of the block
may exceed it by 60 nats without overflow. Elements that still underflow because of a jump within the block, or that may
miss a weight that vanished, are recomputed by a joint log-sum-exp over the sources that they see.

No target depends on a later token, even if its key or value is infinite or NaN.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision.ops.causal.bias import BandBias, CausalBias, FullBias, NoBias
from aft_vision.ops.common.inputs import Inputs, empty_denominator, empty_output
from aft_vision.ops.common.numerics import (
    UNDERFLOW,
    accumulate_dtype,
    gate,
    masked_keys,
    masked_values,
    may_branch,
    product_dtype,
)
from aft_vision.ops.common.repair import joint_softmax, underflowed_elements

# How far a key may exceed its reference, in nats.
HEADROOM = 60.0
# Larger values are scaled down, because they are multiplied by the inverse of a denominator.
LARGEST = {torch.float32: 2.0**20, torch.float64: 2.0**400}

_Form = TypeVar('_Form', bound=Callable[..., tuple[Any, ...]])


class Past(NamedTuple):
    """Sums over sources before the sequence, as `ops.SimpleState` has them; (B, D) each."""

    reference: Tensor
    numerator: Tensor
    denominator: Tensor


class _Block(NamedTuple):
    # One block of targets [start, stop) with its inputs; N = B * D.
    start: int
    stop: int
    low: int
    left: slice  # sources that leave the window with this block, for the running sums
    reference: Tensor  # (N,)
    weight: Tensor  # (C, L): exp(bias - its row maximum), products' dtype
    older: Tensor  # (C, 1): the same for sources before the window
    limit: Tensor  # (C, 1): below it a denominator may have lost a term


class _Sequence:
    """Keys and values as (T, N) columns, and the blocks over them with their references."""

    def __init__(self, inputs: Inputs, bias: CausalBias, past: Past | None = None) -> None:
        k, v, mask = inputs.k, inputs.v, inputs.mask
        self.past = past
        self.dtype, self.product_dtype = accumulate_dtype(v), product_dtype(v)
        self.keys = masked_keys(k, mask).transpose(0, 1).flatten(1)  # (T, N)
        self.values = masked_values(v.to(self.dtype), mask).transpose(0, 1).flatten(1)
        self.bias = bias
        tiny = torch.finfo(self.dtype).tiny
        # Without a repair and a check of values, all targets have the same limits.
        self.may_vanish = may_branch(k) and not bias.span() <= -math.log(tiny)

    def blocks(self) -> Iterator[_Block]:
        floor = torch.finfo(self.dtype).min / 4
        past = self.keys[0].clamp_min(floor) if self.past is None else self.past.reference.flatten()
        left = 0
        for start in range(0, len(self.keys), self.bias.step):
            stop = min(start + self.bias.step, len(self.keys))
            low = self.bias.low(start)
            peak = self.keys[start:stop].amax(0)
            logits = self.bias.logits(start, stop).to(self.dtype)
            row = logits.amax(1, keepdim=True)
            has_older = low > 0 or self.past is not None
            # Finite, so that a row of minus infinity has no weights.
            row = row.clamp_min(0.0 if has_older else torch.finfo(self.dtype).min)
            reference = torch.maximum(past, peak - HEADROOM)
            weight = torch.exp(logits - row)
            older = torch.exp(-row) if has_older else torch.ones_like(row)
            limit = self._limit(logits, weight, older)
            weight = weight.to(self.product_dtype)
            yield _Block(start, stop, low, slice(left, low), reference, weight, older, limit)
            past, left = torch.maximum(past, peak), low

    def _limit(self, logits: Tensor, weight: Tensor, older: Tensor) -> Tensor:
        # `UNDERFLOW`, or `vanishing_limit` for a target with a subnormal weight.
        limit = torch.full_like(older, UNDERFLOW[self.dtype])
        if not self.may_vanish:
            return limit
        tiny = torch.finfo(self.dtype).tiny
        vanishes = ((weight < tiny) & (logits > float('-inf'))).any(1, keepdim=True) | (older < tiny)
        return limit.masked_fill_(vanishes, vanishing_limit(self.dtype, len(self.keys)))

    def exponentials(self, part: slice, reference: Tensor) -> tuple[Tensor, Tensor]:
        """Return e^(k - reference) of some sources, (L, N), and [e^k v | e^k], (L, 2N), in the products' dtype."""
        ek = torch.exp(self.keys[part] - reference)
        return ek, torch.cat([ek * self.values[part], ek], 1)


def vanishing_limit(dtype: torch.dtype, tokens: int) -> float:
    """Return the threshold of denominators for a target with a weight that may have vanished.

    Below it, the lost part of sources that exceed their reference by the headroom may be significant.
    """
    info = torch.finfo(dtype)
    return tokens * info.tiny * math.exp(HEADROOM) / (100 * info.eps)


def shield_forward(form: _Form) -> _Form:
    """Wrap a forward (inputs, ...) so that values that are not finite do not reach earlier targets.

    A source with a key of minus infinity has no weight, whatever its value.

    Args:
        form: returns y, and more; its y becomes NaN from the first such source of a channel on.
    """

    @functools.wraps(form)
    def shielded(inputs: Any, *others: Any) -> tuple[Tensor, ...]:
        k, v = inputs.k, inputs.v
        found = form(inputs, *others) if may_branch(k) else None
        if found is not None and _is_finite(found[0]):
            return found
        tainted, hidden = _tainted(inputs), k == float('-inf')
        if found is not None and not bool((tainted | (hidden & ~v.isfinite())).any()):
            return found
        k, v = k.masked_fill(tainted, float('-inf')), v.masked_fill(tainted | hidden, 0.0)
        y, *more = form(inputs._replace(k=k, v=v), *others)
        return y.masked_fill_(tainted, float('nan')), *more

    return cast(_Form, shielded)


def shield_backward(form: _Form) -> _Form:
    """Wrap a backward so that values that are not finite do not reach earlier targets.

    Args:
        form: returns the gradients of q, k, v and more; gradients from a target with such a source are NaN.
    """

    @functools.wraps(form)
    def shielded(grad: Tensor, y: Tensor, den: Tensor, inputs: Any, need_bias: bool) -> tuple[Tensor, ...]:
        q, k, v = inputs.q, inputs.k, inputs.v
        if may_branch(k) and _is_finite(y) and _largest(v) < math.inf:
            return _scaled_backward(form, grad, y, den, inputs, need_bias)
        tainted = _tainted(inputs)
        grad_, y = grad.masked_fill(tainted, 0.0), y.masked_fill(tainted, 0.0)
        clean = inputs._replace(
            q=None if q is None else q.masked_fill(tainted, 0.0),
            k=k.masked_fill(tainted, float('-inf')),
            v=v.masked_fill(tainted | (k == float('-inf')), 0.0),
        )
        dq, dk, dv, *d_bias = _scaled_backward(form, grad_, y, den, clean, need_bias)
        spoilt = tainted & (grad != 0)  # a NaN target makes the gradients of all its inputs NaN
        if q is not None:
            dq = dq.masked_fill(spoilt, float('nan'))
        channels = spoilt.any(1, keepdim=True)
        dk, dv = (x.masked_fill(channels, float('nan')) for x in (dk, dv))
        if need_bias:
            d_bias = [x.masked_fill(spoilt.any(2).any(0).unsqueeze(1), float('nan')) for x in d_bias]
        return dq, dk, dv, *d_bias

    return cast(_Form, shielded)


def scaled_forward(form: _Form) -> _Form:
    """Wrap a forward (inputs, ...) to scale large values by powers of two per channel, against overflow."""

    @functools.wraps(form)
    def scaled(inputs: Any, *others: Any) -> tuple[Tensor, ...]:
        scale = _value_scale(inputs)
        if scale is None:
            return form(inputs, *others)
        others = tuple(x._replace(numerator=x.numerator / scale[:, 0]) if isinstance(x, Past) else x for x in others)
        y, *more = form(inputs._replace(v=(inputs.v / scale).to(inputs.v.dtype)), *others)
        return (y * scale).to(y.dtype), *more

    return cast(_Form, scaled)


def _scaled_backward(
    form: Callable[..., tuple[Tensor, ...]],
    grad: Tensor,
    y: Tensor,
    den: Tensor,
    inputs: Any,
    need_bias: bool,
) -> tuple[Tensor, ...]:
    # A backward with the values of `scaled_forward` and a gradient near 1: the inverse of a denominator may be as small
    # as e^-60. float16 has no exponents for that and does not need them.
    v = inputs.v
    if not may_branch(v) or torch.float16 in (grad.dtype, inputs.k.dtype, v.dtype):
        return form(grad, y, den, inputs, need_bias)
    scale = _value_scale(inputs)
    if scale is not None:
        grad, y = (grad * scale).to(grad.dtype), (y / scale).to(y.dtype)
        inputs = inputs._replace(v=(v / scale).to(v.dtype))
    size = _largest(grad)
    exponent = 0 if 1e-6 < size < 1e6 or not math.isfinite(size) else max(-120, min(120, math.frexp(size)[1]))
    found = form(grad if exponent == 0 else grad * 2.0**-exponent, y, den, inputs, need_bias)
    dq, dk, dv, *d_bias = found if exponent == 0 else [x * 2.0**exponent for x in found]
    return dq, dk, dv if scale is None else (dv / scale).to(dv.dtype), *d_bias


def _value_scale(inputs: Inputs) -> Tensor | None:
    # (B, 1, D): powers of two that bring finite values into range; None where they are.
    v, mask = inputs.v, inputs.mask
    limit = LARGEST[accumulate_dtype(v)]
    if not may_branch(v) or _largest(v) <= limit:
        return None
    size = masked_values(v, mask).to(accumulate_dtype(v)).abs()
    peak = size.masked_fill(~size.isfinite(), 0.0).amax(1, keepdim=True)
    exponent = torch.frexp(peak / limit).exponent.clamp_min(0)
    return torch.ldexp(torch.ones_like(peak), exponent)


def _largest(x: Tensor) -> float:
    # The largest absolute value; NaN if there is one.
    if not x.numel():
        return 0.0
    low, high = (float(end) for end in x.aminmax())
    return high if math.isnan(high) else max(-low, high)


def _is_finite(y: Tensor) -> bool:
    # Use the last target, which sees all sources.
    return math.isfinite(float(y[:, -1].sum(dtype=accumulate_dtype(y))))


def _tainted(inputs: Inputs) -> Tensor:
    # (B, T, D) bool: targets with a source that is not finite; a key of minus infinity counts for nothing.
    k, v, mask = inputs.k, inputs.v, inputs.mask
    bad = ~(k < float('inf')) | ((k > float('-inf')) & ~v.isfinite())
    if mask is not None:
        bad = bad & mask.unsqueeze(-1)
    return bad.cumsum(1) > 0


@shield_forward
@scaled_forward
def mix_causal(inputs: Inputs, bias: CausalBias, past: Past | None, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (B, T, D), each at the reference of its block; 0 where they underflow.

    Args:
        past: sums over sources before the sequence, which every target sees without a bias.
    """
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    out, den = empty_output(q, v), empty_denominator(k, v, save)
    sequence = _Sequence(inputs, bias, past)
    state = sequence.keys.new_zeros(2 * sequence.keys.shape[1])
    reference = seen = None
    if past is not None:
        state, reference = torch.cat([past.numerator.flatten(), past.denominator.flatten()]), past.reference.flatten()
    for block in sequence.blocks():
        if reference is not None:
            # In two steps, because the factor may underflow for large sums.
            half = torch.exp((reference - block.reference) / 2).repeat(2)
            state = state * half * half
        reference = block.reference
        state = state + sequence.exponentials(block.left, reference)[1].sum(0)
        x = sequence.exponentials(slice(block.low, block.stop), reference)[1]
        sums = (block.weight @ x.to(sequence.product_dtype)).to(sequence.dtype)
        if block.low > 0 or past is not None:
            sums = torch.addcmul(sums, block.older, state)
        rows = slice(block.start, block.stop)
        num, denominator = (part.unflatten(1, (len(v), v.shape[2])).transpose(0, 1) for part in sums.chunk(2, dim=1))
        ratio = num / denominator.clamp_min(UNDERFLOW[sequence.dtype])  # (B, C, D)
        if may_branch(k) and bool((underflowed := denominator < block.limit).any()):
            seen = sees_keys(k, mask, past) if seen is None else seen
            repair_forward(ratio, inputs, bias, underflowed & seen[:, rows], block.start, past)
            denominator = denominator.masked_fill(underflowed, 0.0)
        s = gate(None if q is None else q[:, rows], sequence.dtype)
        out[:, rows] = ratio if s is None else ratio * s
        if save:
            den[:, rows] = denominator
    return out, den


def causal_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: Inputs, bias: CausalBias, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by a scan over the blocks in reverse; `bias` accumulates its own gradient."""
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    sequence = _Sequence(inputs, bias)
    g, out = grad.to(sequence.dtype), y.to(sequence.dtype)
    s = gate(q, sequence.dtype)
    dq = k.new_empty(0) if q is None or s is None else (g * out * (1 - s)).to(q.dtype)
    a = g if s is None else g * s
    underflowed = den.to(sequence.dtype) < UNDERFLOW[sequence.dtype]
    inverse = (1 / den.to(sequence.dtype).clamp_min(UNDERFLOW[sequence.dtype])).masked_fill(underflowed, 0.0)
    rows = torch.stack([a * inverse, -g * out * inverse]).permute(2, 0, 1, 3).flatten(1)  # (T, 2N)
    dk, dv = torch.zeros_like(sequence.keys), torch.zeros_like(sequence.keys)

    def add(part: slice, ek: Tensor, dx: Tensor) -> None:
        d_values, d_keys = dx.chunk(2, dim=-1)
        dv[part] += d_values * ek
        dk[part] += (d_values * sequence.values[part] + d_keys) * ek

    d_state, following = torch.zeros_like(rows[0]), None
    for block in reversed(list(sequence.blocks())):
        if following is not None:
            d_state = d_state * torch.exp(block.reference - following).repeat(2)
        following = block.reference
        r = rows[block.start : block.stop]
        window = slice(block.low, block.stop)
        ek, x = sequence.exponentials(window, block.reference)
        left, right = r.to(sequence.product_dtype), x.to(sequence.product_dtype)
        add(window, ek, (block.weight.t() @ left).to(sequence.dtype))
        if need_bias:
            bias.add_grad(block.start, block.stop, logits_grad(block.weight, left, right, sequence.dtype))
        if block.low > 0:
            d_state = d_state + (block.older * r).sum(0)
            add(block.left, sequence.exponentials(block.left, block.reference)[0], d_state)
    dk, dv = (x.unflatten(1, (len(v), v.shape[2])).transpose(0, 1) for x in (dk, dv))
    if may_branch(k) and bool(underflowed.any()):
        repair_backward(a, inputs, bias, underflowed & sees_keys(k, mask), dk, dv, need_bias)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def sees_keys(k: Tensor, mask: Tensor | None, past: Past | None = None) -> Tensor:
    """Return (B, T, D) bool, True for targets that see a source; the others are 0 and need no repair."""
    seen = (masked_keys(k, mask) > float('-inf')).cumsum(1, dtype=torch.int32) > 0
    return seen if past is None else seen | (past.denominator > 0).unsqueeze(1)


def logits_grad(weight: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient (C, L) of a block's logits, from the gradients of its sums (C, 2N) and exponentials (L, 2N).

    A future source, whose weight is 0, may exceed a small denominator by e^60 and overflow.
    """
    grad = torch.where(weight > 0, (left @ right.t()).to(dtype) * weight, 0.0)
    if may_branch(weight) and not bool(grad.isfinite().all()):
        product = left.double() @ right.double().t()
        grad = torch.where(weight > 0, product * weight, 0.0).to(dtype)
    return grad


def repair_forward(
    ratio: Tensor, inputs: Inputs, bias: CausalBias, underflowed: Tensor, start: int, past: Past | None
) -> None:
    """Recompute the underflowed elements of the ratio (B, C, D) of the block from target `start`."""
    if not bool(underflowed.any()):
        return
    k, mask = inputs.k, inputs.mask
    v = masked_values(inputs.v, mask)
    if past is not None:
        # One more source for all sources before the sequence; the mask has no past.
        older = past.reference.double() + past.denominator.double().log()
        k = torch.cat([older.unsqueeze(1), k.double()], 1)
        mean = past.numerator.double() / past.denominator.double().clamp_min(torch.finfo(torch.double).tiny)
        v = torch.cat([mean.unsqueeze(1), v.double()], 1)
    for batch, row, channel in underflowed_elements(underflowed, v.shape[1]):
        rows = bias.rows(row + start)
        p = joint_softmax(k, mask, batch, channel, rows if past is None else F.pad(rows, (1, 0)))
        ratio[batch, row, channel] = (p * v.transpose(1, 2)[batch, channel].double()).sum(1).to(ratio.dtype)


def repair_backward(
    a: Tensor, inputs: Inputs, bias: CausalBias, underflowed: Tensor, dk: Tensor, dv: Tensor, need_bias: bool
) -> None:
    """Add the gradients of the underflowed elements, (B, T, D); `a` is the gradient of the mean of the values."""
    if not bool(underflowed.any()):
        return
    k, mask = inputs.k, inputs.mask
    v = masked_values(inputs.v, mask)
    for batch, target, channel in underflowed_elements(underflowed, v.shape[1]):
        p = joint_softmax(k, mask, batch, channel, bias.rows(target))
        values = v.transpose(1, 2)[batch, channel].double()
        spread = p * a[batch, target, channel].double()[:, None]  # (N, T)
        dlogits = (spread * (values - (p * values).sum(1, keepdim=True))).to(dk.dtype)
        dk.transpose(1, 2).index_put_((batch, channel), dlogits, accumulate=True)
        dv.transpose(1, 2).index_put_((batch, channel), spread.to(dv.dtype), accumulate=True)
        if need_bias:
            bias.add_rows_grad(target, dlogits)


def causal_operator(read: Callable[[Any], CausalBias]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and the backward of a causal operator.

    Args:
        read: returns the bias of the inputs.
    """

    def forward(inputs: Any, save: bool) -> tuple[Tensor, ...]:
        return mix_causal(inputs, read(inputs), None, save)

    @shield_backward
    def backward(grad: Tensor, y: Tensor, den: Tensor, inputs: Any, need_bias: bool) -> tuple[Tensor, ...]:
        bias = read(inputs)
        return *causal_backward(grad, y, den, inputs, bias, need_bias), *bias.grads(need_bias)

    return forward, backward


# AFT Eq. 2, 4 and 5, causal.
full_causal_forward, full_causal_backward = causal_operator(lambda inputs: FullBias(inputs.bias))
local_causal_forward, local_causal_backward = causal_operator(lambda inputs: BandBias(inputs.band))
simple_causal_forward, simple_causal_backward = causal_operator(lambda inputs: NoBias(inputs.v))
