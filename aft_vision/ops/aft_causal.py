"""The masked AFT operations, where target t sees the sources up to t (footnote 2), and their one-step forms.

A step keeps a state of constant size, whatever the number of tokens seen. States are NamedTuples of tensors of fixed
shape, so a step can be compiled, captured, copied, reordered and saved.
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from aft_vision.ops import dispatch as dispatch
from aft_vision.ops.eager.causal import HEADROOM


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
    return torch.ops.aft_vision.aft_full_causal(q, k, v, bias, mask, torch.is_grad_enabled(), backend)[0]


def aft_local_causal(
    q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None = None, backend: str = 'auto'
) -> Tensor:
    """Mix each token with those up to it, the last s of them with position biases (AFT Eq. 4, causal).

    Args:
        q, k, v: (B, T, D). q = None leaves the sigmoid gate out.
        band: (T, s): band[t, j] is w[t, t - (s - 1) + j]; entries before the sequence are ignored.
        mask: (B, T) bool, True where a source counts; a target with no source gives 0.
        backend: 'auto' or 'eager'.

    Returns:
        (B, T, D) in q's dtype. Memory is O(B * T * D + T * s); no (T, T) matrix is formed.

    Raises:
        ValueError: shapes do not match, mask is not a bool (B, T), or the backend is unknown.
    """
    return torch.ops.aft_vision.aft_local_causal(q, k, v, band, mask, torch.is_grad_enabled(), backend)[0]


def aft_simple_causal(
    q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None = None, backend: str = 'auto'
) -> Tensor:
    """Gate the key-weighted mean of the values up to each token (AFT Eq. 5, causal).

    Args:
        q, k, v: (B, T, D). q = None leaves the sigmoid gate out.
        mask: (B, T) bool, True where a source counts; a target with no source gives 0.
        backend: 'auto' or 'eager'.

    Returns:
        (B, T, D) in q's dtype.

    Raises:
        ValueError: shapes do not match, mask is not a bool (B, T), or the backend is unknown.
    """
    return torch.ops.aft_vision.aft_simple_causal(q, k, v, mask, torch.is_grad_enabled(), backend)[0]


class SimpleState(NamedTuple):
    """What AFT-simple remembers: sums of e^(k - reference) v and e^(k - reference), and the reference; (B, D) each."""

    reference: Tensor
    numerator: Tensor
    denominator: Tensor


class LocalState(NamedTuple):
    """What AFT-local remembers: `SimpleState` of the tokens before the window, and the last s - 1 keys and values."""

    reference: Tensor  # (B, D)
    numerator: Tensor  # (B, D)
    denominator: Tensor  # (B, D)
    keys: Tensor  # (B, s - 1, D), oldest first; minus infinity where no token has been
    values: Tensor  # (B, s - 1, D)


State = TypeVar('State', SimpleState, LocalState)


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
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f'dtype must be torch.float32 or torch.float64, got {dtype}')
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
    older = aft_simple_state(batch, dim, dtype, device)
    values = torch.zeros(batch, window - 1, dim, dtype=dtype, device=device)
    return LocalState(*older, torch.full_like(values, float('-inf')), values)


def aft_simple_step(q: Tensor | None, k: Tensor, v: Tensor, state: SimpleState) -> tuple[Tensor, SimpleState]:
    """One token of `aft_simple_causal` (AFT Eq. 5).

    Args:
        q, k, v: (B, D) of the token. q = None leaves the sigmoid gate out.
        state: of the tokens before it.

    Returns:
        y (B, D) in q's dtype, and the state with this token in it.

    Raises:
        ValueError: q, k or v do not match the state.
    """
    _check_step(q, k, v, state)
    state = _absorb(state, k.to(state.reference.dtype), v.to(state.reference.dtype))
    return _finish(q, v, state.numerator / state.denominator), state


def aft_local_step(
    q: Tensor | None, k: Tensor, v: Tensor, band_row: Tensor, state: LocalState
) -> tuple[Tensor, LocalState]:
    """One token of `aft_local_causal` (AFT Eq. 4).

    Args:
        q, k, v: (B, D) of the token. q = None leaves the sigmoid gate out.
        band_row: (s,), the token's row of the band.
        state: of the tokens before it.

    Returns:
        y (B, D) in q's dtype, and the state with this token in it.

    Raises:
        ValueError: q, k, v or band_row do not match the state.
    """
    _check_step(q, k, v, state)
    window = state.keys.shape[1] + 1
    if tuple(band_row.shape) != (window,):
        raise ValueError(f'band_row must have shape ({window},) to match the state, got {tuple(band_row.shape)}')
    dtype = state.reference.dtype
    keys = torch.cat([state.keys, k.to(dtype).unsqueeze(1)], 1)  # (B, s, D)
    values = torch.cat([state.values, v.to(dtype).unsqueeze(1)], 1)
    older = torch.where(state.denominator > 0, state.reference, float('-inf'))
    # Keys first relative to the largest: a large key plus a bias would round the bias away.
    base = torch.maximum(keys.amax(1), older)  # (B, D)
    logits, older = keys - base.unsqueeze(1) + band_row.to(dtype)[:, None], older - base
    peak = torch.maximum(logits.amax(1), older)
    weight, scale = torch.exp(logits - peak.unsqueeze(1)), torch.exp(older - peak)
    num = (weight * values).sum(1) + scale * state.numerator
    den = weight.sum(1) + scale * state.denominator
    kept = _absorb(SimpleState(*state[:3]), keys[:, 0], values[:, 0])
    return _finish(q, v, num / den), LocalState(*kept, keys[:, 1:].contiguous(), values[:, 1:].contiguous())


def reorder_state(state: State, index: Tensor) -> State:
    """The state with its batch rows picked by index (N,), as beam search does; rows may repeat.

    Raises:
        ValueError: index is not one-dimensional.
    """
    if index.ndim != 1:
        raise ValueError(f'index must be one-dimensional, got shape {tuple(index.shape)}')
    return type(state)(*(x.index_select(0, index) for x in state))


def _absorb(state: SimpleState, k: Tensor, v: Tensor) -> SimpleState:
    # Add a token to the sums; the reference moves, and the sums with it, only for a key far above it.
    reference = torch.where(k > state.reference + HEADROOM, k, state.reference)
    scale, weight = torch.exp(state.reference - reference), torch.exp(k - reference)
    return SimpleState(reference, state.numerator * scale + weight * v, state.denominator * scale + weight)


def _finish(q: Tensor | None, v: Tensor, mean: Tensor) -> Tensor:
    return mean.to(v.dtype) if q is None else (torch.sigmoid(q.to(mean.dtype)) * mean).to(q.dtype)


def _check_step(q: Tensor | None, k: Tensor, v: Tensor, state: SimpleState | LocalState) -> None:
    expected = tuple(state.reference.shape)
    for name, x in (('q', q), ('k', k), ('v', v)):
        if x is not None and tuple(x.shape) != expected:
            raise ValueError(f'{name} must have shape {expected} to match the state, got {tuple(x.shape)}')
