"""The causal mixers of the decoders and their block, for training and for decoding.

Training calls `mixer(x)` on all tokens in parallel. `step` takes one token (B, C) and `prefill` several (B, n, C),
with the state of the tokens before them. Both update the state in place and return the output of the parallel mixers.
`mix_step` is the part of `step` between the projections. `compile_decoder` compiles the steps of all blocks into one
call.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm, Mlp
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from aft_vision import ops
from aft_vision.layers.base import CAUSAL_MIXERS, find_mixer, register_mixer
from aft_vision.layers.block import AFTBlock
from aft_vision.layers.fused import FusedLinear, InplaceGELU
from aft_vision.layers.mixers import AFTFull, AFTLocal, AFTMixer, AFTSimple, resolve_num_heads
from aft_vision.layers.position_bias import FactorizedBias


class CausalMixer(AFTMixer):
    """A causal AFT mixer. For decoding it defines `init_state`, `mix_step` and, to be faster, `prefill`."""

    causal = True

    def mix_step(self, projected: Tensor, state: Any) -> Tensor:
        """Mix one token, given its concatenated query, key and value; the output projection is not applied."""
        raise TypeError(f'{type(self).__name__} must define mix_step()')

    def step(self, x: Tensor, state: Any) -> Tensor:
        """Take one token."""
        return self.proj_drop(self.proj(self.mix_step(self.qkv(x), state)))

    def prefill(self, x: Tensor, state: Any) -> Tensor:
        """Take several tokens."""
        return torch.stack([self.step(token, state) for token in x.unbind(1)], 1)


@register_mixer
class CausalLocal(AFTLocal, CausalMixer):
    """Causal AFT-local (AFT Eq. 4): `AFTLocal` with a state of s tokens, the window."""

    given = ('num_tokens', 'grid', 'window_size')

    def __init__(self, dim: int, num_tokens: int, window: int, **kwargs: Any) -> None:
        super().__init__(dim, num_tokens, window, **kwargs)

    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> ops.LocalState:
        """Return the state before the first token."""
        return ops.aft_local_state(batch, self.qkv.in_features, self.window, dtype, device)

    def mix_step(self, projected: Tensor, state: ops.LocalState) -> Tensor:
        with torch.no_grad():
            row = self.position_bias.band_row(state.position, state.ring.shape[1])
        return ops.aft_local_step(*self._split(projected), row, state)[0]

    def prefill(self, x: Tensor, state: ops.LocalState) -> Tensor:
        """Take several tokens."""
        q, k, v = self.project_qkv(x)
        y, _ = ops.aft_local_prefill(q, k, v, self._band(int(state.position), x.shape[1]), state)
        return self.proj_drop(self.proj(y))

    def _band(self, start: int, tokens: int) -> Tensor:
        return self.position_bias(copy=False)[start : start + tokens]


@register_mixer
class CausalFull(AFTFull, CausalMixer):
    """Causal AFT-full (AFT Eq. 2): `AFTFull` with a state of all T tokens."""

    # Decoding is that of AFT-local with a window of all T tokens.
    init_state = CausalLocal.init_state
    mix_step = CausalLocal.mix_step
    prefill = CausalLocal.prefill

    def _band(self, start: int, tokens: int) -> Tensor:
        bias = self.position_bias(copy=False)[start : start + tokens]
        last = torch.arange(start, start + tokens, device=bias.device)[:, None]
        return bias.gather(1, (last + 1 + torch.arange(self.window, device=bias.device)) % self.window)


@register_mixer
class CausalSimple(AFTSimple, CausalMixer):
    """Causal AFT-simple (AFT Eq. 5): `AFTSimple` with a state of the size of one token."""

    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> ops.SimpleState:
        """Return the state before the first token."""
        return ops.aft_simple_state(batch, self.qkv.in_features, dtype, device)

    def mix_step(self, projected: Tensor, state: ops.SimpleState) -> Tensor:
        return ops.aft_simple_step(*self._split(projected), state)[0]

    def prefill(self, x: Tensor, state: ops.SimpleState) -> Tensor:
        """Take several tokens."""
        y, _ = ops.aft_simple_prefill(*self.project_qkv(x), state)
        return self.proj_drop(self.proj(y))


class KeyValueState(NamedTuple):
    """The state of attention: keys and values (B, h, T, C / h) of all tokens, and () int64, the tokens seen."""

    keys: Tensor
    values: Tensor
    position: Tensor


@register_mixer
class CausalAttention(CausalMixer):
    """Causal dot-product attention, for the Transformer baselines of AFT Tables 2 and 4.

    Args:
        dim: channels C.
        num_tokens: T, slots of the state.
        num_heads: h, which divides dim.
        kwargs: of `AFTMixer`, without `query_gate`.

    Raises:
        ValueError: num_heads does not divide dim.
        TypeError: query_gate is given, which attention does not have.
    """

    name = 'attention'

    def __init__(self, dim: int, num_tokens: int, num_heads: int, **kwargs: Any) -> None:
        if not kwargs.pop('query_gate', True):
            raise TypeError('query_gate is an argument of AFT mixers; attention has no query gate')
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
        """Return the state before the first token, with slots for all."""
        heads, width = self.num_heads, self.qkv.in_features // self.num_heads
        keys = torch.zeros(batch, heads, self.num_tokens, width, dtype=self.qkv.weight.dtype, device=device)
        return KeyValueState(keys, torch.zeros_like(keys), torch.zeros((), dtype=torch.int64, device=device))

    @torch.no_grad()
    def mix_step(self, projected: Tensor, state: KeyValueState) -> Tensor:
        q, k, v = self._heads(projected.unsqueeze(1))
        if q.device.type == 'cpu' and not torch.compiler.is_compiling():
            y = self._attend_from(int(state.position), q, k, v, state)
        else:
            # Nothing here depends on a value on the host.
            place = state.position.view(1)
            state.keys.index_copy_(2, place, k.to(state.keys.dtype))
            state.values.index_copy_(2, place, v.to(state.keys.dtype))
            # A state may have slots for fewer tokens than the model.
            seen = torch.arange(state.keys.shape[2], device=q.device) <= state.position
            keys, values = (part.to(q.dtype) for part in state[:2])
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[None, None, None])
        state.position.add_(1)
        return y.flatten(1)

    @torch.no_grad()
    def prefill(self, x: Tensor, state: KeyValueState) -> Tensor:
        """Take several tokens."""
        y = self._attend_from(int(state.position), *self._heads(self.qkv(x)), state)
        state.position.add_(x.shape[1])
        return self._merge(y)

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


class CausalBlock(AFTBlock):
    """`AFTBlock` around a causal mixer, with decoding.

    Args:
        dim: channels C.
        mixer: 'local', 'simple', 'full', 'attention', or the name of a registered causal mixer.
        kwargs: of `AFTBlock` and of the mixer.

    Raises:
        ValueError: there is no mixer of that name.
        TypeError: the mixer has no such argument.
    """

    # AFTBlock declares a TokenMixer, which need not decode.
    attn: Any

    def __init__(self, dim: int, mixer: str, **kwargs: Any) -> None:
        super().__init__(dim, mixer=find_mixer(mixer, CAUSAL_MIXERS), **kwargs)

    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> Any:
        """Return the mixer's state before the first token."""
        return self.attn.init_state(batch, dtype, device)

    def step(self, x: Tensor, state: Any) -> Tensor:
        """Take one token (B, C)."""
        return self._rest(x, self.attn.step(self.norm1(x), state))

    def prefill(self, x: Tensor, state: Any) -> Tensor:
        """Take several tokens (B, n, C)."""
        return self._rest(x, self.attn.prefill(self.norm1(x), state))

    def _rest(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.ls1(y)
        return x + self.ls2(self.mlp(self.norm2(x)))


LINEAR = (nn.Linear, FusedLinear)
# The modules of a block that `compile_decoder` supports, and their types.
COMPILED: dict[str, tuple[type[nn.Module], ...]] = {
    'norm1': (LayerNorm,),
    'attn': (CausalLocal, CausalFull, CausalSimple, CausalAttention),
    'attn.qkv': LINEAR,
    'attn.proj': (*LINEAR, nn.Identity),
    'attn.proj_drop': (nn.Dropout,),
    'ls1': (nn.Identity,),
    'norm2': (LayerNorm,),
    'mlp': (Mlp,),
    'mlp.fc1': LINEAR,
    'mlp.act': (nn.GELU, InplaceGELU),
    'mlp.drop1': (nn.Dropout,),
    'mlp.norm': (nn.Identity,),
    'mlp.fc2': LINEAR,
    'mlp.drop2': (nn.Dropout,),
    'ls2': (nn.Identity,),
}


def compile_decoder(
    blocks: Sequence[CausalBlock], norm: nn.Module, head: nn.Module, states: Sequence[Any]
) -> Callable[[Tensor], Tensor] | None:
    """Compile the steps of all blocks, the final norm and the head into one call, with the current parameters.

    Args:
        states: one state per block; updated in place.

    Returns:
        A function from a token (B, C), which it overwrites, to logits (B, V). Returns None if a module is not the one
        of a `CausalBlock`, has hooks, an overridden function or dropout, or is not in float32 on a CPU.
    """
    if torch.is_autocast_enabled('cpu') or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return None
    if not (_is_plain(norm, (LayerNorm,)) and _is_plain(head, LINEAR) and all(map(_is_compiled, blocks))):
        return None
    parts = [_describe(block, state) for block, state in zip(blocks, states, strict=True)]
    return ops.compile_decoder(parts, _dense(head, norm), len(states[0][0]))


def _is_compiled(block: nn.Module) -> bool:
    found = dict(block.named_modules())
    if not _is_plain(block, (CausalBlock,)) or not all(
        name in found and _is_plain(found[name], kinds) for name, kinds in COMPILED.items()
    ):
        return False
    return found['mlp.act'].approximate == 'none'


def _is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    # A subclass, a parametrisation, a hook or an overridden function may compute something else.
    if type(module) not in kinds or module._forward_hooks or module._forward_pre_hooks or 'forward' in vars(module):
        return False
    if isinstance(module, LayerNorm):
        return module.weight is not None and module.bias is not None
    return not (isinstance(module, nn.Dropout) and module.training and module.p > 0)


def _describe(block: CausalBlock, state: Any) -> ops.Block:
    mixer, mlp = block.attn, block.mlp
    bias = getattr(mixer, 'position_bias', None)
    return ops.Block(
        qkv=_dense(mixer.qkv, block.norm1),
        proj=_dense(mixer.proj) if isinstance(mixer.proj, nn.Linear) else None,
        fc1=_dense(mlp.fc1, block.norm2)._replace(gelu=True),
        fc2=_dense(mlp.fc2),
        gated=mixer.query_gate,
        state=state,
        factors=(bias.u, bias.v) if type(bias) is FactorizedBias else None,
        mix=lambda projected: mixer.mix_step(projected, state),
    )


def _dense(linear: Any, norm: Any = None) -> ops.Dense:
    norms = () if norm is None else (norm.weight, norm.bias, norm.eps)
    return ops.Dense(linear.weight, linear.bias, *norms)
