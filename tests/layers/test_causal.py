"""The causal mixers as modules, and their compiled steps; tests/models compares sessions with the parallel form."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_close, generator, randn
from small_decoders import randomize
from timm.layers import LayerNorm, Mlp
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from aft_vision.layers import CausalAttention, CausalBlock, fused
from aft_vision.layers.causal import CausalSimple, compile_decoder
from aft_vision.ops import linear
from aft_vision.ops.common.cpp import library

needs_compiler = pytest.mark.skipif(library() is None, reason='there is no compiler here')
MIXERS: dict[str, dict[str, Any]] = {
    'local': dict(num_tokens=9, window=4),
    'full': dict(num_tokens=9),
    'simple': {},
    'attention': dict(num_tokens=9, num_heads=2),
}


@pytest.mark.parametrize('masked', [False, True], ids=['whole', 'masked'])
def test_attention_is_softmax_attention_to_the_past(masked: bool):
    mixer = randomize(CausalAttention(8, 9, 2).double())
    x = randn(2, 9, 8)
    mask = torch.rand(2, 9, generator=generator(3)) > 0.4 if masked else None
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in mixer.qkv(x).chunk(3, -1))
    logits = q @ k.mT / 2.0
    seen = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9)
    if mask is not None:
        seen = seen & mask[:, None, None]
    weight = logits.masked_fill(~seen, float('-inf')).softmax(-1).nan_to_num(0.0)
    expected = mixer.proj((weight @ v).transpose(1, 2).flatten(2))
    assert_close(mixer(x, None, mask), expected, 1e-12)


@pytest.mark.parametrize('name', MIXERS)
def test_a_padded_sequence_gives_what_it_gives_without_padding(name: str):
    block = randomize(CausalBlock(8, name, **MIXERS[name]).double())
    x, mask = randn(2, 9, 8), torch.arange(9) < torch.tensor([[9], [5]])
    assert_close(block(x, None, mask)[1, :5], block(x[1:, :5])[0], 1e-12)


def test_a_causal_block_is_an_ordinary_block_in_training():
    block = CausalBlock(8, 'local', num_tokens=9, window=4, init_values=0.5, proj_drop=0.5).double()
    assert isinstance(block.attn.proj_drop, nn.Dropout)
    x = randn(1, 9, 8)
    block.eval()
    state = block.init_state(1, torch.float64, x.device)
    rows = [block.prefill(x[:, :5], state)]
    rows += [block.step(x[:, t], state)[:, None] for t in range(5, 9)]
    assert_close(torch.cat(rows, 1), block(x), 1e-12)


class Stack(nn.Module):
    """Blocks with the norm and head of a decoder."""

    def __init__(self, name: str, depth: int = 2, **kwargs: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CausalBlock(24, name, **MIXERS[name], **kwargs) for _ in range(depth))
        self.norm, self.head = LayerNorm(24), nn.Linear(24, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def compile(self, batch: int = 3) -> Callable[[Tensor], Tensor] | None:
        states = [block.init_state(batch, torch.float32, torch.device('cpu')) for block in self.blocks]
        return compile_decoder(self.blocks, self.norm, self.head, states)


def run_compiled(stack: Stack, x: Tensor) -> Tensor:
    step = stack.compile(len(x))
    assert step is not None
    return torch.stack([step(x[:, t].clone()) for t in range(x.shape[1])], 1)


SWITCHES: list[dict[str, Any]] = [{}, dict(out_proj=False), dict(qkv_bias=False), dict(proj_bias=False)]
FORMS = [(name, args) for name in MIXERS for args in SWITCHES]
FORMS += [(name, dict(query_gate=False)) for name in ('local', 'full', 'simple')]
FORMS += [(name, dict(factorize_bias=False)) for name in ('local', 'full')]


@needs_compiler
@pytest.mark.parametrize(('name', 'args'), FORMS, ids=str)
def test_compiled_steps_are_those_of_the_modules(name: str, args: dict[str, Any]):
    stack, x = randomize(Stack(name, **args)), randn(3, 9, 24).float()
    assert_close(run_compiled(stack, x), copy.deepcopy(stack).double()(x.double()), 3e-6)


@needs_compiler
def test_fused_layers_have_compiled_steps_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, 'fastest', lambda *_: 'onednn')
    stack, x = randomize(Stack('local')), randn(3, 9, 24).float()
    expected = run_compiled(stack, x)
    fused.fuse_linear(stack)
    assert type(stack.head) is fused.FusedLinear
    assert torch.equal(run_compiled(stack, x), expected)


@needs_compiler
@pytest.mark.parametrize('gated', [True, False], ids=['gated', 'no gate'])
@pytest.mark.parametrize('name', ['local', 'full'])
def test_a_compiled_step_leaves_to_torch_what_it_cannot_represent(name: str, gated: bool):
    stack = randomize(Stack(name, query_gate=gated))
    for block in stack.blocks:
        # Biases further apart than exponentials of float32 reach.
        block.attn.position_bias.u.data *= 60
    x = randn(3, 9, 24).float()
    band = stack.blocks[0].attn.position_bias()
    assert band.max() - band.min() > 150
    assert_close(run_compiled(stack, x), copy.deepcopy(stack).double()(x.double()), 1e-5)


@needs_compiler
def test_a_compiled_step_beyond_the_sequence_is_an_error():
    with pytest.raises(IndexError, match='expected a position with a row of the bias, got 9'):
        run_compiled(randomize(Stack('local')), randn(3, 10, 24).float())


class Shifted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Doubled(CausalSimple):
    def step(self, x: Tensor, state: Any) -> Tensor:
        return 2 * super().step(x, state)


def with_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: 2 * output)


CHANGES: dict[str, Callable[[CausalBlock], object]] = {
    'a hook': lambda block: with_hook(block.mlp.fc2),
    'a hook before': lambda block: block.mlp.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    'another layer': lambda block: setattr(block.attn, 'qkv', Shifted(24, 72)),
    'another activation': lambda block: setattr(block.mlp, 'act', nn.ReLU()),
    'an approximate activation': lambda block: setattr(block.mlp, 'act', nn.GELU('tanh')),
    'another MLP': lambda block: setattr(block, 'mlp', nn.Linear(24, 24)),
    'layer scale': lambda block: setattr(block, 'ls2', nn.Linear(24, 24)),
    'a norm without weights': lambda block: setattr(block.norm1, 'weight', None),
    'a function of its own': lambda block: setattr(block.mlp.fc2, 'forward', lambda x: x),
    'another mixer': lambda block: setattr(block, 'attn', Doubled(24)),
    'a parametrisation': lambda block: nn.utils.parametrize.register_parametrization(block.mlp.fc1, 'bias', nn.ReLU()),
    'dropout': lambda block: (setattr(block.mlp.drop1, 'p', 0.5), block.train()),
    'bfloat16': lambda block: block.bfloat16(),
    'float64': lambda block: block.double(),
    'few parts': lambda block: setattr(block.attn, 'qkv', nn.Linear(24, 48)),
    'a narrow MLP': lambda block: setattr(block, 'mlp', Mlp(24, 96, out_features=32)),
    'a narrow norm': lambda block: setattr(block, 'norm1', LayerNorm(16)),
    'a narrow projection': lambda block: setattr(block.attn, 'proj', nn.Linear(16, 24)),
    'a turned weight': lambda block: setattr(block.attn.proj.weight, 'data', block.attn.proj.weight.data.mT),
}


@needs_compiler
@pytest.mark.parametrize('change', CHANGES)
def test_other_modules_are_not_compiled(change: str):
    stack = randomize(Stack('simple'))
    assert stack.compile() is not None
    CHANGES[change](stack.blocks[1])
    assert stack.compile() is None


@needs_compiler
def test_hooks_on_the_head_or_on_all_modules_and_autocast_are_not_compiled():
    stack = randomize(Stack('simple'))
    with torch.autocast('cpu', torch.bfloat16):
        assert stack.compile() is None
    hook = register_module_forward_hook(lambda *args: None)
    try:
        assert stack.compile() is None
    finally:
        hook.remove()
    assert stack.compile() is not None
    with_hook(stack.head)
    assert stack.compile() is None
