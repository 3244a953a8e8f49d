"""Decoding states, of constant size for any number of tokens.

States are NamedTuples of tensors of fixed shape, updated in place, so a step can be compiled, captured, copied and
reordered. A state has no gradients.
"""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from aft_vision.ops.common.numerics import may_branch


class SimpleState(NamedTuple):
    """The state of AFT-simple: sums of e^(k - reference) v and e^(k - reference), and the reference; (B, D) each."""

    reference: Tensor
    numerator: Tensor
    denominator: Tensor


class LocalState(NamedTuple):
    """The state of AFT-local: sums over the tokens before the window, and the window as a ring buffer.

    Attributes:
        reference: (B, D), subtracted from keys before the exponential.
        sums: (B, 2D), of e^(k - reference) v and of e^(k - reference), over the tokens before the window.
        ring: (B, s, 2D); token t is in slot t mod s, as [e^(k - reference) v | e^(k - reference)] or as [v | k].
        position: () int64, tokens seen.
        holds_keys: () bool, whether the ring stores values and keys themselves: always on an accelerator, and on a CPU
            if the keys of a window are too far apart for one reference.
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
    """Return the state of AFT-simple before the first token.

    Args:
        batch: number of sequences B.
        dim: channels D.
        dtype: dtype of the sums, float32 or float64.
        device: device of the state.

    Raises:
        ValueError: dtype is not float32 or float64.
    """
    _check_dtype(dtype)
    zero = torch.zeros(batch, dim, dtype=dtype, device=device)
    return SimpleState(torch.full_like(zero, torch.finfo(dtype).min / 4), zero, zero.clone())


def aft_local_state(
    batch: int, dim: int, window: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> LocalState:
    """Return the state of AFT-local before the first token.

    Args:
        batch: number of sequences B.
        dim: channels D.
        window: s, tokens with a position bias: the token itself and the s - 1 tokens before it.
        dtype: dtype of the sums, float32 or float64.
        device: device of the state.

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


def reorder_state(state: State, index: Tensor) -> State:
    """Return the state with batch rows selected by index (N,), as in beam search; rows may repeat.

    Returns:
        A new state that shares no memory with the old one.

    Raises:
        ValueError: index is not one-dimensional.
    """
    if index.ndim != 1:
        raise ValueError(f'index must be one-dimensional, got shape {tuple(index.shape)}')
    return type(state)(*(x.index_select(0, index) if x.ndim else x.clone() for x in state))


def clone_state(state: State) -> State:
    """Return a copy that steps of the original do not change."""
    return type(state)(*(x.clone() for x in state))


def check_simple_state(state: SimpleState) -> None:
    """Check that the fields of a state match in shape, dtype and device.

    Raises:
        ValueError: a field does not match.
    """
    if not isinstance(state, SimpleState):
        raise ValueError(f'state must be of ops.aft_simple_state, got a {type(state).__name__}')
    shape = _check_reference(state.reference)
    for x in state:
        if x.shape != shape or x.dtype != state[0].dtype or x.device != state[0].device:
            raise _mismatch(state, [(shape, state[0].dtype)] * 3)


def check_local_state(state: LocalState) -> None:
    """Check that the fields of a state match in shape, dtype and device; the position is not read.

    Raises:
        ValueError: a field does not match.
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
    # Its shape (B, D) determines the shapes of the other fields.
    if reference.ndim != 2 or reference.dtype not in (torch.float32, torch.float64):
        got = f'{tuple(reference.shape)} {reference.dtype}'
        raise ValueError(f'state.reference must be (B, D), in torch.float32 or torch.float64, got {got}')
    return reference.shape


def _mismatch(state: SimpleState | LocalState, expected: list[tuple[tuple[Any, ...], torch.dtype]]) -> ValueError:
    # The error of the first field that does not match.
    device = state[0].device
    name, x, shape, dtype = next(
        (name, x, shape, dtype)
        for name, x, (shape, dtype) in zip(state._fields, state, expected, strict=True)
        if tuple(x.shape) != tuple(shape) or x.dtype != dtype or x.device != device
    )
    wanted = f'{tuple(shape)} {dtype} on {device}'
    return ValueError(
        f'state.{name} must be {wanted} to match state.reference, got {tuple(x.shape)} {x.dtype} on {x.device} '
        '(make a state with ops.aft_local_state or ops.aft_simple_state, and reorder it with ops.reorder_state)'
    )


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f'dtype must be torch.float32 or torch.float64, got {dtype}')
