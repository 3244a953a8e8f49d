"""Decoding of one or several tokens with a state, without gradients (AFT Eq. 4, 5, causal; footnote 2)."""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from aft_vision.ops.causal.bias import BandBias, NoBias
from aft_vision.ops.causal.eager import Past, mix_causal
from aft_vision.ops.common.inputs import Qkv
from aft_vision.ops.common.numerics import gated, may_branch, without_autocast
from aft_vision.ops.decode import eager as decode
from aft_vision.ops.decode import step_cpp
from aft_vision.ops.decode.block import Block, Dense
from aft_vision.ops.decode.state import LocalState, SimpleState, check_local_state, check_simple_state

# A step on a CPU branches on values, which a compiled graph cannot: there it is one node.
torch.library.custom_op(
    'aft_vision::aft_local_step',
    decode.local_step,
    mutates_args=('reference', 'sums', 'ring', 'position', 'holds_keys'),
).register_fake(lambda k, *_: torch.empty_like(k))


def step_kernels(backend: str, state: Sequence[Tensor], *inputs: Tensor | None) -> ModuleType | None:
    """Return the module with the compiled steps of decoding, where they support the state and no graph is captured."""
    if backend != 'auto':
        if backend != 'eager':
            raise ValueError(f"backend must be 'auto' or 'eager', got {backend!r}")
        return None
    if torch.compiler.is_compiling() or state[0].device.type != 'cpu' or state[0].dtype != torch.float32:
        return None
    return step_cpp if step_cpp.supports_step(state, *inputs) else None


def aft_simple_step(
    q: Tensor | None, k: Tensor, v: Tensor, state: SimpleState, backend: str = 'auto'
) -> tuple[Tensor, SimpleState]:
    """Compute one token of `aft_simple_causal` (AFT Eq. 5).

    Args:
        q, k, v: (B, D). q = None leaves out the sigmoid gate.
        state: state after the tokens before it; updated in place.
        backend: 'auto', or 'eager' for torch operations.

    Returns:
        y (B, D) in q's dtype, and the state with this token, without gradients.

    Raises:
        ValueError: q, k, v and the fields of the state do not match, or the backend is unknown.
    """
    check_simple_state(state)
    _check_tokens(q, k, v, state.reference.shape)
    kernels = step_kernels(backend, state, q, k, v)
    if kernels is not None:
        return kernels.simple_step(q, k, v, state).to(v.dtype if q is None else q.dtype), state
    dtype = state.reference.dtype
    with torch.no_grad():
        mean = decode.simple_step(k.to(dtype), v.to(dtype), *state)
        return gated(q, v, mean), state


def aft_local_step(
    q: Tensor | None, k: Tensor, v: Tensor, band_row: Tensor, state: LocalState, backend: str = 'auto'
) -> tuple[Tensor, LocalState]:
    """Compute one token of `aft_local_causal` (AFT Eq. 4).

    Args:
        q, k, v: (B, D). q = None leaves out the sigmoid gate.
        band_row: (s,), the token's row of the band.
        state: state after the tokens before it; updated in place.
        backend: 'auto', or 'eager' for torch operations.

    Returns:
        y (B, D) in q's dtype, and the state with this token, without gradients.

    Raises:
        ValueError: q, k, v, band_row and the fields of the state do not match, the backend is unknown, or, on a CPU,
            the position of the state is negative.
    """
    check_local_state(state)
    _check_tokens(q, k, v, state.reference.shape)
    window = state.ring.shape[1]
    if tuple(band_row.shape) != (window,):
        raise ValueError(f'band_row must have shape ({window},) to match the state, got {tuple(band_row.shape)}')
    kernels = step_kernels(backend, state, q, k, v, band_row)
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
        return gated(q, v, mean), state


def compile_decoder(blocks: Sequence[Block], head: Dense, batch: int) -> Callable[[Tensor], Tensor] | None:
    """Compile the blocks and the head of a decoder into one call per token.

    Args:
        blocks: blocks with their states; parameters and states must keep their memory.
        head: the layer after them.
        batch: number of sequences B.

    Returns:
        A function from a token (B, C), which it overwrites, to (B, n); None if C++ does not support the blocks.
    """
    kernels = step_kernels('auto', [head.weight])
    if kernels is None or not kernels.supports_decoder(blocks, head, batch):
        return None
    return kernels.CompiledDecoder(blocks, head, batch)


@torch.no_grad()
def aft_simple_prefill(q: Tensor | None, k: Tensor, v: Tensor, state: SimpleState) -> tuple[Tensor, SimpleState]:
    """Compute several tokens at once, equivalent to repeated `aft_simple_step`.

    Args:
        q, k, v: (B, n, D). q = None leaves out the sigmoid gate.
        state: state after the tokens before them; updated in place.

    Returns:
        y (B, n, D) in q's dtype, and the state with these tokens.

    Raises:
        ValueError: q, k, v and the fields of the state do not match.
    """
    check_simple_state(state)
    _check_chunk(q, k, v, state.reference)
    dtype = state.reference.dtype
    keys, values = k.to(dtype), decode.counted_values(k, v.to(dtype))
    with without_autocast(k.device.type):
        y = mix_causal(Qkv(q, keys, values, None), NoBias(values), Past(*state), False)[0]
    decode.absorb_many(keys, values, *state)
    return y.to(v.dtype if q is None else q.dtype), state


@torch.no_grad()
def aft_local_prefill(
    q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, state: LocalState
) -> tuple[Tensor, LocalState]:
    """Compute several tokens at once, equivalent to repeated `aft_local_step`.

    Args:
        q, k, v: (B, n, D). q = None leaves out the sigmoid gate.
        band: (n, s), the tokens' rows of the band.
        state: state after the tokens before them; updated in place.

    Returns:
        y (B, n, D) in q's dtype, and the state with these tokens.

    Raises:
        ValueError: q, k, v, band and the fields of the state do not match, or its position is negative.
    """
    check_local_state(state)
    _check_chunk(q, k, v, state.reference)
    tokens, window, dim = k.shape[1], state.ring.shape[1], k.shape[2]
    if tuple(band.shape) != (tokens, window):
        raise ValueError(f'band must have shape ({tokens}, {window}) to match k and the state, got {tuple(band.shape)}')
    dtype = state.reference.dtype
    # Prepend the tokens of the ring, oldest first.
    count = decode.tokens_seen(state.position)
    before = min(count, window)
    slots = torch.arange(count - before, count, device=k.device) % window
    keys, values = (x[:, slots] for x in decode.decode(state.reference, state.ring, state.holds_keys))
    keys, values = torch.cat([keys, k.to(dtype)], 1), torch.cat([values, decode.counted_values(k, v.to(dtype))], 1)
    rows = torch.cat([band.new_zeros(before, window), band])
    past = Past(state.reference, state.sums[:, :dim], state.sums[:, dim:])
    with without_autocast(k.device.type):
        mean = mix_causal(Qkv(None, keys, values, None), BandBias(rows), past if count else None, False)[0][:, before:]
    leaving = max(0, before + tokens - window)
    if leaving > 0:
        decode.absorb_many(keys[:, :leaving], values[:, :leaving], *past)
    held_values = torch.zeros_like(state.ring[..., :dim])
    held_keys = torch.full_like(held_values, float('-inf'))
    slots = torch.arange(count - before + leaving, count + tokens, device=k.device) % window
    held_keys[:, slots], held_values[:, slots] = keys[:, leaving:], values[:, leaving:]
    decode.encode(held_keys, held_values, state.reference, state.sums, state.ring, state.holds_keys)
    state.position.add_(tokens)
    return gated(q, v, mean), state


def _check_tokens(q: Tensor | None, k: Tensor, v: Tensor, expected: tuple[int, ...]) -> None:
    for name, x in (('q', q), ('k', k), ('v', v)):
        if x is not None and x.shape != expected:
            raise ValueError(f'{name} must have shape {tuple(expected)} to match the state, got {tuple(x.shape)}')


def _check_chunk(q: Tensor | None, k: Tensor, v: Tensor, reference: Tensor) -> None:
    batch, dim = reference.shape
    if k.ndim != 3 or k.shape[1] == 0:
        raise ValueError(f'k must have shape ({batch}, n, {dim}) with n of at least 1, got {tuple(k.shape)}')
    _check_tokens(q, k, v, (batch, k.shape[1], dim))
