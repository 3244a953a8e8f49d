"""The masked AFT operations, where target t sees the sources up to t (footnote 2), and their one-step forms.

On a CPU any finite key and bias is exact, and a key or value that is not finite changes no earlier target.

A step keeps a state of constant size, whatever the number of tokens seen. States are NamedTuples of tensors of fixed
shape, updated in place, so a step can be compiled, captured, copied, reordered and saved. Steps are for inference:
nothing is differentiated through a state.
"""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from aft_vision.ops import operator
from aft_vision.ops.causal.bias import BandBias, NoBias
from aft_vision.ops.causal.eager import Past, causal_forward
from aft_vision.ops.common.numerics import may_branch, without_autocast
from aft_vision.ops.decode import eager as decode
from aft_vision.ops.position_bias import factorized_band_row
from aft_vision.ops.tracing import keeps_sums


def aft_full_causal(
    q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, backend: str = 'auto'
) -> Tensor:
    """Mix each token with those up to it by pair-wise position biases (AFT Eq. 2, causal).

    Args:
        q, k, v: (B, T, D). q = None leaves the sigmoid gate out.
        bias: (T, T) position bias w, of which the lower triangle is read.
        mask: (B, T) bool, True where a source counts; a target with no source gives 0.
        backend: 'auto' or 'eager'.

    Returns:
        (B, T, D) in q's dtype.

    Raises:
        ValueError: shapes do not match, mask is not a bool (B, T), or the backend is unknown.
    """
    return torch.ops.aft_vision.aft_full_causal(q, k, v, bias, mask, keeps_sums(), backend)[0]


def aft_local_causal(
    q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None = None, backend: str = 'auto'
) -> Tensor:
    """Mix each token with those up to it, the last s of them with position biases (AFT Eq. 4, causal).

    Args:
        q, k, v: (B, T, D). q = None leaves the sigmoid gate out.
        band: (T, s): band[t, j] is w[t, t - (s - 1) + j]; entries before the sequence are ignored.
        mask: (B, T) bool, True where a source counts; a target with no source gives 0.
        backend: 'auto', 'eager', 'cpp' (the compiled kernel on a CPU, not for float64), or 'triton'.

    Returns:
        (B, T, D) in q's dtype. Memory is O(B * T * D + T * s); no (T, T) matrix is formed.

    Raises:
        ValueError: shapes do not match, mask is not a bool (B, T), or the backend is unknown.
    """
    return torch.ops.aft_vision.aft_local_causal(q, k, v, band, mask, keeps_sums(), backend)[0]


def aft_simple_causal(
    q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None = None, backend: str = 'auto'
) -> Tensor:
    """Gate the key-weighted mean of the values up to each token (AFT Eq. 5, causal).

    Args:
        q, k, v: (B, T, D). q = None leaves the sigmoid gate out.
        mask: (B, T) bool, True where a source counts; a target with no source gives 0.
        backend: 'auto', 'eager', 'cpp' (the compiled kernel on a CPU, not for float64), or 'triton'.

    Returns:
        (B, T, D) in q's dtype.

    Raises:
        ValueError: shapes do not match, mask is not a bool (B, T), or the backend is unknown.
    """
    return torch.ops.aft_vision.aft_simple_causal(q, k, v, mask, keeps_sums(), backend)[0]


class SimpleState(NamedTuple):
    """What AFT-simple remembers: sums of e^(k - reference) v and e^(k - reference), and the reference; (B, D) each."""

    reference: Tensor
    numerator: Tensor
    denominator: Tensor


class LocalState(NamedTuple):
    """What AFT-local remembers: sums over the tokens before the window, and the window as a ring of slots.

    Attributes:
        reference: (B, D) that exponents are relative to.
        sums: (B, 2D), of e^(k - reference) v and of e^(k - reference), over the tokens before the window.
        ring: (B, s, 2D); token t is in slot t mod s, as [e^(k - reference) v | e^(k - reference)] or as [v | k].
        position: () int64, tokens seen.
        holds_keys: () bool, whether the ring has values and keys themselves: always on an accelerator, on a CPU where
            the keys of a window lie too far apart for one reference.
    """

    reference: Tensor
    sums: Tensor
    ring: Tensor
    position: Tensor
    holds_keys: Tensor


State = TypeVar('State', bound=tuple[Tensor, ...])


def aft_simple_state(
    batch: int, dim: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> SimpleState:
    """The state of AFT-simple before the first token.

    Args:
        batch: number of sequences B.
        dim: channels D.
        dtype: of the sums: float32 or float64.
        device: of the state.

    Raises:
        ValueError: dtype is not float32 or float64.
    """
    _check_dtype(dtype)
    zero = torch.zeros(batch, dim, dtype=dtype, device=device)
    return SimpleState(torch.full_like(zero, torch.finfo(dtype).min / 4), zero, zero.clone())


def aft_local_state(
    batch: int, dim: int, window: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> LocalState:
    """The state of AFT-local before the first token.

    Args:
        batch: number of sequences B.
        dim: channels D.
        window: tokens s with a position bias: the token itself and s - 1 before it.
        dtype: of the sums: float32 or float64.
        device: of the state.

    Raises:
        ValueError: window is below 1, or dtype is not float32 or float64.
    """
    if window < 1:
        raise ValueError(f'window must be at least 1, got {window}')
    _check_dtype(dtype)
    sums = torch.zeros(batch, 2 * dim, dtype=dtype, device=device)
    ring = torch.zeros(batch, window, 2 * dim, dtype=dtype, device=device)
    holds_keys = not may_branch(ring)
    if holds_keys:
        ring[..., dim:] = float('-inf')
    return LocalState(
        torch.full_like(sums[:, :dim], torch.finfo(dtype).min / 4),
        sums,
        ring,
        torch.zeros((), dtype=torch.int64, device=device),
        torch.full((), holds_keys, device=device),
    )


def aft_simple_step(q: Tensor | None, k: Tensor, v: Tensor, state: SimpleState) -> tuple[Tensor, SimpleState]:
    """One token of `aft_simple_causal` (AFT Eq. 5).

    Args:
        q, k, v: (B, D) of the token. q = None leaves the sigmoid gate out.
        state: of the tokens before it; updated in place.

    Returns:
        y (B, D) in q's dtype, and the state with this token in it. Nothing is differentiated.

    Raises:
        ValueError: q, k or v do not match the state, or its parts one another.
    """
    check_simple_state(state)
    _check_tokens(q, k, v, state.reference.shape)
    kernels = operator.step_kernels(state, q, k, v)
    if kernels is not None:
        return kernels.simple_step(q, k, v, state).to(v.dtype if q is None else q.dtype), state
    dtype = state.reference.dtype
    with torch.no_grad():
        mean = decode.simple_step(k.to(dtype), v.to(dtype), *state)
        return _finish(q, v, mean), state


def aft_local_step(
    q: Tensor | None, k: Tensor, v: Tensor, band_row: Tensor, state: LocalState
) -> tuple[Tensor, LocalState]:
    """One token of `aft_local_causal` (AFT Eq. 4).

    Args:
        q, k, v: (B, D) of the token. q = None leaves the sigmoid gate out.
        band_row: (s,), the token's row of the band.
        state: of the tokens before it; updated in place.

    Returns:
        y (B, D) in q's dtype, and the state with this token in it. Nothing is differentiated.

    Raises:
        ValueError: q, k, v or band_row do not match the state, its parts do not match one another, or, on a CPU, its
            position is negative.
    """
    check_local_state(state)
    _check_tokens(q, k, v, state.reference.shape)
    window = state.ring.shape[1]
    if tuple(band_row.shape) != (window,):
        raise ValueError(f'band_row must have shape ({window},) to match the state, got {tuple(band_row.shape)}')
    kernels = operator.step_kernels(state, q, k, v, band_row)
    if kernels is not None:
        return kernels.local_step(q, k, v, band_row, state).to(v.dtype if q is None else q.dtype), state
    dtype = state.reference.dtype
    with torch.no_grad():
        k, row = k.to(dtype), band_row.to(dtype)
        if not may_branch(k):
            mean = decode.local_step_static(k, v.to(dtype), row, *state[:-1])
        elif torch.compiler.is_compiling():
            mean = torch.ops.aft_vision.aft_local_step(k, v.to(dtype), row, *state)
        else:
            mean = decode.local_step(k, v.to(dtype), row, *state)
        return _finish(q, v, mean), state


def factorized_local_step(
    q: Tensor | None, k: Tensor, v: Tensor, bias_u: Tensor, bias_v: Tensor, state: LocalState
) -> tuple[Tensor, LocalState]:
    """`aft_local_step` with the position bias given by its factors.

    Args:
        q, k, v: (B, D) of the token. q = None leaves the sigmoid gate out.
        bias_u, bias_v: (T, d') factors of targets and of sources.
        state: of the tokens before it, for a window of T at most; updated in place.

    Returns:
        y (B, D) in q's dtype, and the state with this token in it. Nothing is differentiated.

    Raises:
        ValueError: as `aft_local_step`, or the state's window is over T.
        IndexError: on a CPU, T tokens have been taken before.
    """
    check_local_state(state)
    window, tokens = state.ring.shape[1], bias_v.shape[0]
    if window > tokens:
        raise ValueError(f'expected a state with a window of at most T = {tokens} tokens, got {window}')
    kernels = operator.step_kernels(state, q, k, v)
    if kernels is None or bias_u.shape != bias_v.shape or not kernels.covers_factors(bias_u, bias_v):
        with torch.no_grad():
            row = factorized_band_row(bias_u, bias_v, state.position, window)
        return aft_local_step(q, k, v, row, state)
    _check_tokens(q, k, v, state.reference.shape)
    y = kernels.factorized_local_step(q, k, v, bias_u, bias_v, state)
    return y.to(v.dtype if q is None else q.dtype), state


@torch.no_grad()
def aft_simple_prefill(q: Tensor | None, k: Tensor, v: Tensor, state: SimpleState) -> tuple[Tensor, SimpleState]:
    """Several tokens at once, with the results and the state of as many `aft_simple_step`.

    Args:
        q, k, v: (B, n, D) of the tokens. q = None leaves the sigmoid gate out.
        state: of the tokens before them; updated in place.

    Returns:
        y (B, n, D) in q's dtype, and the state with these tokens in it.

    Raises:
        ValueError: q, k or v do not match the state, or its parts one another.
    """
    check_simple_state(state)
    _check_chunk(q, k, v, state.reference)
    dtype = state.reference.dtype
    keys, values = k.to(dtype), decode.counted_values(k, v.to(dtype))
    with without_autocast(k.device.type):
        y = causal_forward(q, keys, values, NoBias(values), Past(*state), None, False)[0]
    decode.absorb_many(keys, values, *state)
    return y.to(v.dtype if q is None else q.dtype), state


@torch.no_grad()
def aft_local_prefill(
    q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, state: LocalState
) -> tuple[Tensor, LocalState]:
    """Several tokens at once, with the results and the state of as many `aft_local_step`.

    Args:
        q, k, v: (B, n, D) of the tokens. q = None leaves the sigmoid gate out.
        band: (n, s), the tokens' rows of the band.
        state: of the tokens before them; updated in place.

    Returns:
        y (B, n, D) in q's dtype, and the state with these tokens in it.

    Raises:
        ValueError: q, k, v or band do not match the state, its parts do not match one another, or its position is
            negative.
    """
    check_local_state(state)
    _check_chunk(q, k, v, state.reference)
    tokens, window, dim = k.shape[1], state.ring.shape[1], k.shape[2]
    if tuple(band.shape) != (tokens, window):
        raise ValueError(f'band must have shape ({tokens}, {window}) to match k and the state, got {tuple(band.shape)}')
    dtype = state.reference.dtype
    # The tokens of the ring, oldest first, go before the new ones.
    count = decode.tokens_seen(state.position)
    before = min(count, window)
    slots = torch.arange(count - before, count, device=k.device) % window
    keys, values = (x[:, slots] for x in decode.decode(state.reference, state.ring, state.holds_keys))
    keys, values = torch.cat([keys, k.to(dtype)], 1), torch.cat([values, decode.counted_values(k, v.to(dtype))], 1)
    rows = torch.cat([band.new_zeros(before, window), band])
    past = Past(state.reference, state.sums[:, :dim], state.sums[:, dim:])
    with without_autocast(k.device.type):
        mean = causal_forward(None, keys, values, BandBias(rows), past if count else None, None, False)[0][:, before:]
    leaving = max(0, before + tokens - window)
    if leaving > 0:
        decode.absorb_many(keys[:, :leaving], values[:, :leaving], *past)
    held_keys, held_values = _empty_ring(state)
    slots = torch.arange(count - before + leaving, count + tokens, device=k.device) % window
    held_keys[:, slots], held_values[:, slots] = keys[:, leaving:], values[:, leaving:]
    decode.encode(held_keys, held_values, state.reference, state.sums, state.ring, state.holds_keys)
    state.position.add_(tokens)
    return _finish(q, v, mean), state


def reorder_state(state: State, index: Tensor) -> State:
    """The state with its batch rows picked by index (N,), as beam search does; rows may repeat.

    Returns:
        A state of its own: nothing in it is shared with the old one.

    Raises:
        ValueError: index is not one-dimensional.
    """
    if index.ndim != 1:
        raise ValueError(f'index must be one-dimensional, got shape {tuple(index.shape)}')
    return type(state)(*(x.index_select(0, index) if x.ndim else x.clone() for x in state))


def clone_state(state: State) -> State:
    """A copy of a state, which a step leaves as it is."""
    return type(state)(*(x.clone() for x in state))


def move_state(state: State, device: torch.device | str | None) -> State:
    """A copy of a state on a device, in the form that steps there read."""
    moved = type(state)(*(x.to(device, copy=True) for x in state))
    if isinstance(state, LocalState) and not (may_branch(moved[2]) or bool(state.holds_keys)):
        keys, values = decode.decode(state.reference, state.ring, state.holds_keys)
        moved[2].copy_(torch.cat([values, keys], -1))
        moved[4].fill_(True)
    return moved


def _empty_ring(state: LocalState) -> tuple[Tensor, Tensor]:
    # Keys and values (B, s, D) of no tokens.
    values = torch.zeros_like(state.ring[..., : state.reference.shape[1]])
    return torch.full_like(values, float('-inf')), values


def _finish(q: Tensor | None, v: Tensor, mean: Tensor) -> Tensor:
    return mean.to(v.dtype) if q is None else (torch.sigmoid(q.to(mean.dtype)) * mean).to(q.dtype)


def check_simple_state(state: SimpleState) -> None:
    """Check that the parts of a state match one another in shape, dtype and device.

    Raises:
        ValueError: one of them does not.
    """
    if not isinstance(state, SimpleState):
        raise ValueError(f'state must be of ops.aft_simple_state, got a {type(state).__name__}')
    shape = _check_reference(state.reference)
    for x in state:
        if x.shape != shape or x.dtype != state[0].dtype or x.device != state[0].device:
            raise _mismatch(state, [(shape, state[0].dtype)] * 3)


def check_local_state(state: LocalState) -> None:
    """Check that the parts of a state match one another in shape, dtype and device; the position is not read.

    Raises:
        ValueError: one of them does not.
    """
    if not isinstance(state, LocalState):
        raise ValueError(f'state must be of ops.aft_local_state, got a {type(state).__name__}')
    reference, sums, ring, position, holds_keys = state
    batch, dim = _check_reference(reference)
    window = ring.shape[1] if ring.ndim == 3 else 0
    dtype, device = reference.dtype, reference.device
    if not (
        window > 0
        and sums.shape == (batch, 2 * dim)
        and ring.shape == (batch, window, 2 * dim)
        and sums.dtype == ring.dtype == dtype
        and position.dtype == torch.int64
        and holds_keys.dtype == torch.bool
        and position.ndim == holds_keys.ndim == 0
        and sums.device == ring.device == position.device == holds_keys.device == device
    ):
        ring_shape = (batch, window or 's', 2 * dim)
        expected = [((batch, dim), dtype), ((batch, 2 * dim), dtype), (ring_shape, dtype)]
        raise _mismatch(state, [*expected, ((), torch.int64), ((), torch.bool)])


def _check_reference(reference: Tensor) -> torch.Size:
    # Its shape, (B, D), which the shapes of the other parts follow from.
    if reference.ndim != 2 or reference.dtype not in (torch.float32, torch.float64):
        got = f'{tuple(reference.shape)} {reference.dtype}'
        raise ValueError(f'state.reference must be (B, D), in torch.float32 or torch.float64, got {got}')
    return reference.shape


def _mismatch(state: SimpleState | LocalState, expected: list[tuple[tuple[Any, ...], torch.dtype]]) -> ValueError:
    # An error that names the first part that is not as expected.
    device = state[0].device
    name, x, shape, dtype = next(
        (name, x, shape, dtype)
        for name, x, (shape, dtype) in zip(state._fields, state, expected, strict=True)
        if tuple(x.shape) != tuple(shape) or x.dtype != dtype or x.device != device
    )
    wanted = f'{tuple(shape)} {dtype} on {device}'
    return ValueError(
        f'state.{name} must be {wanted} to match state.reference, got {tuple(x.shape)} {x.dtype} on {x.device} '
        '(move a state with ops.move_state, and reorder it with ops.reorder_state)'
    )


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f'dtype must be torch.float32 or torch.float64, got {dtype}')


def _check_tokens(q: Tensor | None, k: Tensor, v: Tensor, expected: tuple[int, ...]) -> None:
    for name, x in (('q', q), ('k', k), ('v', v)):
        if x is not None and x.shape != expected:
            raise ValueError(f'{name} must have shape {tuple(expected)} to match the state, got {tuple(x.shape)}')


def _check_chunk(q: Tensor | None, k: Tensor, v: Tensor, reference: Tensor) -> None:
    batch, dim = reference.shape
    if k.ndim != 3 or k.shape[1] == 0:
        raise ValueError(f'k must have shape ({batch}, n, {dim}) with n of at least 1, got {tuple(k.shape)}')
    _check_tokens(q, k, v, (batch, k.shape[1], dim))
