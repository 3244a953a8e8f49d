"""The causal mixers of the decoders, and their block: in parallel, one token at a time, and several from a state.

All are called as `mixer(x)` in training. `step` takes one token (B, C) and `prefill` several (B, n, C), with the state
of what came before; they give what the parallel form gives, and update the state in place. `mix_step` is the part of
`step` between the projections.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision import ops
from aft_vision.layers.base import AFTMixer, resolve_num_heads
from aft_vision.layers.block import AFTBlock
from aft_vision.layers.dense_step import DenseStep
from aft_vision.layers.mixers import AFTFull, AFTLocal, AFTSimple
from aft_vision.layers.position_bias import FactorizedBias


class CausalMixer(AFTMixer):
    """What the causal mixers share."""

    def mix_step(self, projected: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token, from its queries, keys and values side by side; before the projection behind the operation."""
        raise TypeError(f'{type(self).__name__} must define mix_step()')

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token."""
        y, state = self.mix_step(self.qkv(x), state)
        return self.proj_drop(self.proj(y)), state

    def block_step(self, dense: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token through the block that the mixer is in, whose layers around `mix_step` are compiled."""
        y, state = self.mix_step(dense.project(x), state)
        return dense.finish(x, y), state

    def _mixes_by(self, mix_step: Callable[..., Any]) -> bool:
        # Not so where a subclass, or the object itself, has another.
        return getattr(self.mix_step, '__func__', None) is mix_step


class CausalLocal(AFTLocal, CausalMixer):
    """AFT-local with the future masked (AFT Eq. 4): `AFTLocal` and its state of s tokens."""

    def __init__(self, dim: int, num_tokens: int, window_size: int, **kwargs: Any) -> None:
        super().__init__(dim, num_tokens, window_size, causal=True, **kwargs)
        self.window = min(window_size, num_tokens)

    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> ops.LocalState:
        """The state before the first token."""
        return ops.aft_local_state(batch, self.qkv.in_features, self.window, dtype, device)

    def mix_step(self, projected: Tensor, state: ops.LocalState) -> tuple[Tensor, ops.LocalState]:
        return self.position_bias.step(*self._split(projected), state)

    def block_step(self, dense: Any, x: Tensor, state: ops.LocalState) -> tuple[Tensor, ops.LocalState]:
        bias, y = self.position_bias, None
        if type(bias) is FactorizedBias and self._mixes_by(CausalLocal.mix_step):
            y = ops.local_block(dense, x, self.query_gate, bias.u, bias.v, state)
        return CausalMixer.block_step(self, dense, x, state) if y is None else (y, state)

    def prefill(self, x: Tensor, state: ops.LocalState) -> tuple[Tensor, ops.LocalState]:
        """Several tokens."""
        q, k, v = self._project(x)
        y, state = ops.aft_local_prefill(q, k, v, self._band(int(state.position), x.shape[1]), state)
        return self.proj_drop(self.proj(y)), state

    def _band(self, start: int, tokens: int) -> Tensor:
        return self.position_bias()[start : start + tokens]


class CausalFull(AFTFull, CausalMixer):
    """AFT-full with the future masked (AFT Eq. 2): `AFTFull` and its state of all T tokens."""

    def __init__(self, dim: int, num_tokens: int, **kwargs: Any) -> None:
        super().__init__(dim, num_tokens, causal=True, **kwargs)
        self.window = num_tokens

    # The window of AFT-local that covers everything.
    init_state = CausalLocal.init_state
    mix_step = CausalLocal.mix_step
    block_step = CausalLocal.block_step
    prefill = CausalLocal.prefill

    def _band(self, start: int, tokens: int) -> Tensor:
        bias = self.position_bias()[start : start + tokens]
        last = torch.arange(start, start + tokens, device=bias.device)[:, None]
        return bias.gather(1, (last + 1 + torch.arange(self.window, device=bias.device)) % self.window)


class CausalSimple(AFTSimple, CausalMixer):
    """AFT-simple with the future masked (AFT Eq. 5): `AFTSimple` and its state of one token's size."""

    def __init__(self, dim: int, **kwargs: Any) -> None:
        super().__init__(dim, causal=True, **kwargs)

    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> ops.SimpleState:
        """The state before the first token."""
        return ops.aft_simple_state(batch, self.qkv.in_features, dtype, device)

    def mix_step(self, projected: Tensor, state: ops.SimpleState) -> tuple[Tensor, ops.SimpleState]:
        return ops.aft_simple_step(*self._split(projected), state)

    def block_step(self, dense: Any, x: Tensor, state: ops.SimpleState) -> tuple[Tensor, ops.SimpleState]:
        y = None
        if self._mixes_by(CausalSimple.mix_step):
            y = ops.simple_block(dense, x, self.query_gate, state)
        return super().block_step(dense, x, state) if y is None else (y, state)

    def prefill(self, x: Tensor, state: ops.SimpleState) -> tuple[Tensor, ops.SimpleState]:
        """Several tokens."""
        y, state = ops.aft_simple_prefill(*self._project(x), state)
        return self.proj_drop(self.proj(y)), state


class KeyValueState(NamedTuple):
    """What attention remembers: keys and values (B, h, T, C / h) with room for all tokens, and () int64 tokens seen."""

    keys: Tensor
    values: Tensor
    position: Tensor


class CausalAttention(CausalMixer):
    """Dot-product attention of each token to those up to it, the Transformer of AFT Tables 2 and 4.

    Args:
        dim: channels C.
        num_tokens: T, for which the state has room.
        num_heads: h, which divides dim.
        kwargs: of `AFTMixer`, without `query_gate`.

    Raises:
        ValueError: num_heads does not divide dim.
        TypeError: query_gate is given: the query of attention is no gate.
    """

    def __init__(self, dim: int, num_tokens: int, num_heads: int, **kwargs: Any) -> None:
        if not kwargs.pop('query_gate', True):
            raise TypeError('query_gate=False is for AFT, whose query is a gate; attention needs its queries')
        num_heads = resolve_num_heads(dim, num_heads)
        super().__init__(dim, dim, **kwargs)
        self.num_tokens, self.num_heads = num_tokens, num_heads
        self.reset_parameters()

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = self._heads(self.qkv(x))
        if mask is None:
            return self._merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        tokens = torch.arange(x.shape[1], device=x.device)
        seen = (tokens <= tokens[:, None]) & mask[:, None, None, :]
        return self._merge(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))

    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> KeyValueState:
        """The state before the first token, with room for all."""
        heads, width = self.num_heads, self.qkv.in_features // self.num_heads
        keys = torch.zeros(batch, heads, self.num_tokens, width, dtype=self.qkv.weight.dtype, device=device)
        return KeyValueState(keys, torch.zeros_like(keys), torch.zeros((), dtype=torch.int64, device=device))

    @torch.no_grad()
    def mix_step(self, projected: Tensor, state: KeyValueState) -> tuple[Tensor, KeyValueState]:
        q, k, v = self._heads(projected.unsqueeze(1))
        if q.device.type == 'cpu' and not torch.compiler.is_compiling():
            y = self._attend_from(int(state.position), q, k, v, state)
        else:
            # Nothing here depends on a number on the host.
            place = state.position.view(1)
            state.keys.index_copy_(2, place, k.to(state.keys.dtype))
            state.values.index_copy_(2, place, v.to(state.keys.dtype))
            # A state may have room for fewer tokens than the model.
            seen = torch.arange(state.keys.shape[2], device=q.device) <= state.position
            keys, values = (part.to(q.dtype) for part in state[:2])
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[None, None, None])
        state.position.add_(1)
        return y.flatten(1), state

    @torch.no_grad()
    def prefill(self, x: Tensor, state: KeyValueState) -> tuple[Tensor, KeyValueState]:
        """Several tokens."""
        y = self._attend_from(int(state.position), *self._heads(self.qkv(x)), state)
        state.position.add_(x.shape[1])
        return self._merge(y), state

    def _attend_from(self, start: int, q: Tensor, k: Tensor, v: Tensor, state: KeyValueState) -> Tensor:
        stop = start + q.shape[2]
        state.keys[:, :, start:stop], state.values[:, :, start:stop] = k, v
        keys, values = (part[:, :, :stop].to(q.dtype) for part in state[:2])
        if start == 0 or q.shape[2] == 1:
            return F.scaled_dot_product_attention(q, keys, values, is_causal=start == 0)
        tokens = torch.arange(stop, device=q.device)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=tokens <= tokens[start:, None])

    def _heads(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # (B, T, 3C) -> three of (B, h, T, C / h)
        q, k, v = projected.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def _merge(self, y: Tensor) -> Tensor:
        return self.proj_drop(self.proj(y.transpose(1, 2).flatten(2)))


MIXERS: dict[str, type[AFTMixer]] = {
    'local': CausalLocal,
    'simple': CausalSimple,
    'full': CausalFull,
    'attention': CausalAttention,
}


class CausalBlock(AFTBlock):
    """`AFTBlock` around a causal mixer, with its decoding.

    Args:
        dim: channels C.
        mixer: 'local', 'simple', 'full' or 'attention'.
        kwargs: of `AFTBlock` and of the mixer.

    Raises:
        ValueError: there is no mixer of that name.
        TypeError: the mixer has no such argument.
    """

    # AFTBlock's is an AFTMixer, which cannot decode.
    attn: Any
    # Of the class, for a block that was saved without one.
    _dense_step: DenseStep | None = None

    def __init__(self, dim: int, mixer: str, **kwargs: Any) -> None:
        if mixer not in MIXERS:
            raise ValueError(f'mixer must be one of {", ".join(MIXERS)}, got {mixer!r}')
        super().__init__(dim, mixer=MIXERS[mixer], **kwargs)

    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> Any:
        """The mixer's state before the first token."""
        return self.attn.init_state(batch, dtype, device)

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token (B, C)."""
        dense = self.compiled_dense(x)
        if dense is None:
            y, state = self.attn.step(self.norm1(x), state)
            return self._rest(x, y), state
        return self.attn.block_step(dense, x, state)

    def prefill(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Several tokens (B, n, C)."""
        y, state = self.attn.prefill(self.norm1(x), state)
        return self._rest(x, y), state

    def compiled_dense(self, x: Tensor) -> Any | None:
        """The linear layers around the mixer for a token (B, C), where they are compiled."""
        if torch.compiler.is_compiling():
            return None
        if not x.is_cpu:
            # It would keep the parameters that the block had on the CPU.
            if self._dense_step is not None:
                self._dense_step = None
            return None
        if torch.is_grad_enabled() or torch.is_autocast_enabled('cpu'):
            return None
        if self._dense_step is None or not self._dense_step.is_current():
            self._dense_step = DenseStep(self, CausalMixer.step)
        dense = self._dense_step.kernels()
        return dense if dense is not None and dense.covers(x) else None

    def _rest(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.ls1(y)
        return x + self.ls2(self.mlp(self.norm2(x)))
