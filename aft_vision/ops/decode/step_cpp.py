"""One token at a time on a CPU: `step.cpp` and `dense.cpp`, with states in float32."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from aft_vision.ops.common.cpp import (
    DECODING,
    STRUCTS,
    compiled,
    failures,
    float_buffer,
    library,
    numbers,
    pointer,
)
from aft_vision.ops.decode import eager as decode
from aft_vision.ops.decode.block import Block, Dense
from aft_vision.ops.decode.state import LocalState, SimpleState

# For up to so many rows the compiled layers are faster than torch's products.
MAX_ROWS = 64
# Who mixes the tokens of a block, as in `step.cpp`.
SIMPLE, LOCAL, CALLER = range(3)


class _Tokens(ctypes.Structure):
    # A (B, D) float32 tensor with contiguous channels, and its stride over B; null for None.
    _fields_ = [('data', ctypes.c_void_p), ('batch', ctypes.c_int64)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ('norm_weight', 'norm_bias', 'weight', 'bias')),
        ('inputs', ctypes.c_int64),
        ('outputs', ctypes.c_int64),
        ('eps', ctypes.c_float),
        ('gelu', ctypes.c_int32),
    ]


class _Band(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ('row', 'u', 'v')),
        *((name, ctypes.c_int64) for name in ('tokens', 'width')),
    ]


class _Block(ctypes.Structure):
    _fields_ = [
        ('layers', _Layer * 4),
        *((name, ctypes.c_int64) for name in ('mixer', 'gated', 'window')),
        ('band', _Band),
        *((name, ctypes.c_void_p) for name in ('reference', 'sums', 'ring', 'position', 'holds_keys')),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ('blocks', ctypes.c_void_p),
        ('count', ctypes.c_int64),
        ('batch', ctypes.c_int64),
        ('head', _Layer),
        *((name, ctypes.c_void_p) for name in ('projected', 'mixed', 'sum', 'hidden')),
    ]


class _Limits(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ('headroom', 'reach', 'smallest')]


STRUCTS.update(aft_decode=_Decoder, aft_decode_block=_Block, aft_tokens=_Tokens, aft_step_limits=_Limits)
LIMITS = _Limits(decode.HEADROOM, decode.REACH, decode.SMALLEST)


def supports_step(state: Sequence[Tensor], *inputs: Tensor | None) -> bool:
    """Return whether the steps support a token with such a state: on a CPU, in float32."""
    for x in inputs:
        if x is not None and not x.is_cpu:
            return False
    for x in state:
        if not (x.is_cpu and x.is_contiguous()):
            return False
    if state[0].dtype != torch.float32 or state[0].numel() == 0 or library() is None:
        return False
    return DECODING not in failures


def simple_step(q: Tensor | None, k: Tensor, v: Tensor, state: Sequence[Tensor]) -> Tensor:
    """Return y (B, D) in float32 of a token, which is added to the state (AFT Eq. 5)."""
    reference, numerator, denominator = state
    out = torch.empty_like(reference)
    rows = _rows(q), _rows(k), _rows(v)
    compiled().aft_simple_step(
        numbers(reference.shape),
        *map(_tokens, rows),
        *map(pointer, (reference, numerator, denominator, out)),
        ctypes.c_float(decode.HEADROOM),
    )
    return out


def local_step(q: Tensor | None, k: Tensor, v: Tensor, band_row: Tensor, state: Sequence[Tensor]) -> Tensor:
    """Return y (B, D) in float32 of a token, which goes into the state (AFT Eq. 4)."""
    reference, sums, ring, position, holds_keys = state
    out, row = torch.empty_like(reference), band_row.float().contiguous()
    q, k, v = _rows(q), _float_rows(k), _float_rows(v)
    found = compiled().aft_local_step(
        numbers((*reference.shape, ring.shape[1])),
        *map(_tokens, (q, k, v)),
        _Band(row.data_ptr()),
        *map(pointer, (reference, sums, ring, position, holds_keys, out)),
        LIMITS,
        torch.get_num_threads(),
    )
    return out if found == 0 else _repair(found, q, k, v, row, state)


@torch.no_grad()
def _repair(found: int, q: Tensor | None, k: Tensor, v: Tensor, row: Tensor, state: Sequence[Tensor]) -> Tensor:
    # y (B, D) in torch, where the compiled step reported a repair.
    reference, sums, ring, position, holds_keys = state
    if found >= 3:
        raise IndexError(f'expected a position with a row of the bias, got {decode.tokens_seen(position)}')
    if found == 1:
        mean = decode.local_step(k.contiguous(), v.contiguous(), row, reference, sums, ring, position, holds_keys)
    else:
        mean = decode.held_mean(row, reference, sums, ring, position, holds_keys)
    return mean if q is None else mean * torch.sigmoid(q.contiguous())


def supports_decoder(blocks: Sequence[Block], head: Dense, batch: int) -> bool:
    """Return whether `CompiledDecoder` supports such blocks, whose parts match one another."""
    channels = head.weight.shape[-1]
    return (
        0 < batch <= MAX_ROWS
        and all(_is_whole(layer) for block in blocks for layer in (*block[:4], head) if layer is not None)
        and all(_matches(block, batch, channels) for block in blocks)
    )


class CompiledDecoder:
    """A token through the blocks and the head of a decoder, in one call of C++.

    It has the addresses of parameters and states, which must stay where they are.
    """

    def __init__(self, blocks: Sequence[Block], head: Dense, batch: int) -> None:
        # They hold the memory that the addresses are of.
        self._keep_alive = blocks, head
        self._outputs, channels = head.weight.shape
        window = max(block.state[2].shape[1] if _mixer(block) == LOCAL else 0 for block in blocks)
        self._row = float_buffer((window,))
        widths = max(len(block.qkv.weight) for block in blocks), max(len(block.fc1.weight) for block in blocks)
        self._workspace = [float_buffer((batch, width)) for width in (widths[0], channels, channels, widths[1])]
        self._blocks = (_Block * len(blocks))(*(_block(block, self._row) for block in blocks))
        address = ctypes.addressof(self._blocks)
        self._decoder = _Decoder(address, len(blocks), batch, _layer(head), *map(pointer, self._workspace))

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the head's result (B, n) for a token x (B, C), which is overwritten; the states take the token in.

        Raises:
            IndexError: a position bias has no row for the token.
            ValueError: the position of a state is negative.
        """
        x, place, mixed = x.float().contiguous(), ctypes.c_int64(0), None
        out = float_buffer((len(x), self._outputs))
        decoder, where = ctypes.byref(self._decoder), ctypes.byref(place)
        decode_token, threads = compiled().aft_decode, torch.get_num_threads()
        while found := decode_token(decoder, where, pointer(x), pointer(mixed), pointer(out), LIMITS, threads):
            mixed = self._mix(self._keep_alive[0][place.value], found)
        return out

    def _mix(self, block: Block, found: int) -> Tensor:
        # In torch, where the compiled decoder reported a repair.
        batch, channels = self._workspace[1].shape
        width = len(block.qkv.weight)
        projected = self._workspace[0].flatten()[: batch * width].view(batch, width)
        if found == 5:
            return block.mix(projected).contiguous()
        *queries, k, v = projected.split(channels, 1)
        row = self._row[: block.state[2].shape[1]]
        return _repair(found, queries[0] if queries else None, k, v, row, block.state)


def _mixer(block: Block) -> int:
    if isinstance(block.state, SimpleState):
        return SIMPLE
    return LOCAL if isinstance(block.state, LocalState) and block.factors is not None else CALLER


def _block(block: Block, row: Tensor) -> _Block:
    layers, mixer = (_Layer * 4)(*map(_layer, block[:4])), _mixer(block)
    found = _Block(layers, mixer, block.gated)
    if mixer == CALLER:
        return found
    parts = [x.data_ptr() for x in block.state]
    found.reference, found.sums, found.ring = parts[:3]
    if mixer == LOCAL:
        assert block.factors is not None
        found.window, (found.position, found.holds_keys) = block.state[2].shape[1], parts[3:]
        found.band = _Band(row.data_ptr(), *(x.data_ptr() for x in block.factors), *block.factors[0].shape)
    return found


def _matches(block: Block, batch: int, channels: int) -> bool:
    # True if the sizes of consecutive layers agree, which nothing else checks.
    qkv, proj, fc1, fc2 = block[:4]
    square = proj is None or proj.weight.shape == (channels, channels)
    hidden = len(fc1.weight)
    if not (square and qkv.weight.shape[1] == fc1.weight.shape[1] == channels):
        return False
    if fc2.weight.shape != (channels, hidden):
        return False
    if _mixer(block) == CALLER:
        return True
    if block.state[0].shape != (batch, channels) or not supports_step(block.state):
        return False
    if len(qkv.weight) != (2 + block.gated) * channels:
        return False
    if _mixer(block) == SIMPLE:
        return True
    assert block.factors is not None
    u, v = block.factors
    # A window above the number of tokens is an error, for the torch form to raise.
    return _is_plain(u) and _is_plain(v) and u.shape == v.shape and block.state[2].shape[1] <= len(v)


def _is_whole(layer: Dense) -> bool:
    if layer.weight.dim() != 2 or not all(_is_plain(x) for x in layer[:4] if isinstance(x, Tensor)):
        return False
    if (layer.norm_weight is None) != (layer.norm_bias is None):
        return False
    outputs, inputs = layer.weight.shape
    sizes = ((layer.bias, outputs), (layer.norm_weight, inputs), (layer.norm_bias, inputs))
    return all(x is None or x.shape == (n,) for x, n in sizes)


def _is_plain(x: Tensor) -> bool:
    # A subclass may have its numbers elsewhere.
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.device.type == 'cpu'
    return plain and x.dtype == torch.float32 and x.is_contiguous()


def _layer(layer: Dense | None) -> _Layer:
    if layer is None:
        return _Layer()
    outputs, inputs = layer.weight.shape
    pointers = (pointer(x) for x in (layer.norm_weight, layer.norm_bias, layer.weight, layer.bias))
    return _Layer(*pointers, inputs, outputs, layer.eps, layer.gelu)


def _rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else _float_rows(x)


def _float_rows(x: Tensor) -> Tensor:
    # (B, D) float32 whose channels are neighbours in memory.
    x = x.float()
    return x if x.stride(1) == 1 else x.contiguous()


def _tokens(x: Tensor | None) -> _Tokens:
    return _Tokens(None, 0) if x is None else _Tokens(x.data_ptr(), x.stride(0))
