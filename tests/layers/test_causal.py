"""The causal mixers as modules; what they decode is held to the parallel form in tests/models."""

import copy
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_close, generator, randn
from small_decoders import randomize
from timm.layers import LayerNorm, Mlp
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from aft_vision.layers import CausalAttention, CausalBlock
from aft_vision.layers.causal import CausalLocal, CausalSimple
from aft_vision.ops.common.build import library

needs_compiler = pytest.mark.skipif(library() is None, reason='there is no compiler here')
MIXERS: dict[str, dict[str, Any]] = {
    'local': dict(num_tokens=9, window_size=4),
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


@pytest.mark.parametrize(
    ('kwargs', 'error', 'message'),
    [
        (dict(mixer='conv'), ValueError, "mixer must be one of local, simple, full, attention, got 'conv'"),
        (dict(mixer='attention', num_tokens=9, num_heads=3), ValueError, 'num_heads must divide dim = 8, got 3'),
        (dict(mixer='attention', num_tokens=9, num_heads=2, query_gate=False), TypeError, 'needs its queries'),
        (dict(mixer='simple', window_size=3), TypeError, 'window_size'),
    ],
    ids=['name', 'heads', 'gate', 'argument'],
)
def test_a_wrong_argument_is_named(kwargs, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        CausalBlock(8, **kwargs)


def test_a_causal_block_is_an_ordinary_block_in_training():
    block = CausalBlock(8, 'local', num_tokens=9, window_size=4, init_values=0.5, proj_drop=0.5).double()
    assert isinstance(block.attn.proj_drop, nn.Dropout)
    x = randn(1, 9, 8)
    block.eval()
    state = block.init_state(1, torch.float64, x.device)
    y, state = block.prefill(x[:, :5], state)
    rows = [y]
    for t in range(5, 9):
        row, state = block.step(x[:, t], state)
        rows.append(row[:, None])
    assert_close(torch.cat(rows, 1), block(x), 1e-12)


@torch.no_grad()
def run_steps(block: CausalBlock, x: Tensor) -> Tensor:
    state, rows = block.init_state(len(x), torch.float32, x.device), []
    for t in range(x.shape[1]):
        row, state = block.step(x[:, t].contiguous(), state)
        rows.append(row)
    return torch.stack(rows, 1)


def is_compiled(block: CausalBlock, x: Tensor) -> bool:
    with torch.no_grad():
        return block.compiled_dense(x[:, 0].contiguous()) is not None


SWITCHES: list[dict[str, Any]] = [{}, dict(out_proj=False), dict(qkv_bias=False), dict(proj_bias=False)]
FORMS = [(name, args) for name in MIXERS for args in SWITCHES]
FORMS += [(name, dict(query_gate=False)) for name in ('local', 'full', 'simple')]
FORMS += [(name, dict(factorize_bias=False)) for name in ('local', 'full')]


@needs_compiler
@pytest.mark.parametrize(('name', 'args'), FORMS, ids=str)
def test_a_compiled_step_is_that_of_the_modules(name: str, args: dict[str, Any]):
    block, x = randomize(CausalBlock(24, name, **MIXERS[name], **args)), randn(3, 9, 24).float()
    assert is_compiled(block, x)
    expected = copy.deepcopy(block).double()(x.double())
    assert_close(run_steps(block, x), expected, 2e-6)


@needs_compiler
@pytest.mark.parametrize('gated', [True, False], ids=['gated', 'no gate'])
@pytest.mark.parametrize('name', ['local', 'full'])
def test_a_compiled_step_leaves_to_torch_what_it_cannot_represent(name: str, gated: bool):
    block = randomize(CausalBlock(24, name, query_gate=gated, **MIXERS[name]))
    with torch.no_grad():
        # Biases further apart than exponentials of float32 reach.
        block.attn.position_bias.u *= 60
    x = randn(3, 9, 24).float()
    band = block.attn.position_bias()
    assert band.max() - band.min() > 150
    expected = copy.deepcopy(block).double()(x.double())
    assert_close(run_steps(block, x), expected, 1e-5)


@needs_compiler
def test_a_compiled_step_beyond_the_sequence_is_an_error():
    block, x = randomize(CausalBlock(24, 'local', **MIXERS['local'])), randn(3, 10, 24).float()
    with pytest.raises(IndexError):
        run_steps(block, x)


@needs_compiler
def test_a_state_of_a_longer_sequence_is_an_error():
    block = randomize(CausalBlock(24, 'full', num_tokens=9))
    state = CausalBlock(24, 'full', num_tokens=12).init_state(2, torch.float32, torch.device('cpu'))
    with pytest.raises(ValueError, match='a window of at most T = 9 tokens, got 12'), torch.no_grad():
        block.step(torch.zeros(2, 24), state)


@needs_compiler
@pytest.mark.parametrize('shape', [(2, 16), (2, 32), (16,)], ids=str)
def test_a_token_of_another_width_is_an_error(shape: tuple[int, ...]):
    block = randomize(CausalBlock(24, 'simple'))
    with pytest.raises(RuntimeError, match='normalized_shape'), torch.no_grad():
        block.step(torch.zeros(shape), block.init_state(2, torch.float32, torch.device('cpu')))


@needs_compiler
def test_a_step_of_several_tokens_is_an_error():
    block = randomize(CausalBlock(24, 'simple'))
    with pytest.raises(ValueError, match='to match the state'), torch.no_grad():
        block.step(torch.zeros(1, 5, 24), block.init_state(1, torch.float32, torch.device('cpu')))


MISFITS: dict[str, Callable[[CausalBlock], object]] = {
    'few parts': lambda block: setattr(block.attn, 'qkv', nn.Linear(24, 48)),
    'a narrow MLP': lambda block: setattr(block, 'mlp', Mlp(24, 96, out_features=32)),
    'a narrow norm': lambda block: setattr(block, 'norm1', LayerNorm(16)),
    'a narrow projection': lambda block: setattr(block.attn, 'proj', nn.Linear(16, 24)),
}


@needs_compiler
@pytest.mark.parametrize('name', ['local', 'simple'])
@pytest.mark.parametrize('change', MISFITS)
def test_layers_that_do_not_fit_each_other_are_an_error(change: str, name: str):
    block = CausalBlock(24, name, **MIXERS[name])
    MISFITS[change](block)
    with pytest.raises(RuntimeError):
        run_steps(block, randn(3, 9, 24).float())


def double_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


class Shifted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Doubled(CausalSimple):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return 2 * super().forward(x, *args)

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = super().step(x, state)
        return 2 * y, state


def double_forward(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda x: 2 * forward(x)


CHANGES: dict[str, Callable[[CausalBlock], object]] = {
    'a hook': lambda block: block.mlp.fc2.register_forward_hook(double_output),
    'a hook before': lambda block: block.mlp.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    'another layer': lambda block: setattr(block.attn, 'qkv', randomize(Shifted(24, 72))),
    'another activation': lambda block: setattr(block.mlp, 'act', nn.ReLU()),
    'an approximate activation': lambda block: setattr(block.mlp, 'act', nn.GELU('tanh')),
    'another MLP': lambda block: setattr(block, 'mlp', nn.Linear(24, 24)),
    'layer scale': lambda block: setattr(block, 'ls2', nn.Linear(24, 24)),
    'a norm without weights': lambda block: setattr(block.norm1, 'weight', None),
    'a function of its own': lambda block: double_forward(block.mlp.fc2),
    'another mixer': lambda block: setattr(block, 'attn', randomize(Doubled(24))),
    'a parametrisation': lambda block: nn.utils.parametrize.register_parametrization(block.mlp.fc1, 'bias', nn.ReLU()),
}


@needs_compiler
@pytest.mark.parametrize('change', CHANGES)
def test_a_step_calls_modules_that_are_not_the_compiled_ones(change: str):
    block, x = randomize(CausalBlock(24, 'simple')), randn(3, 9, 24).float()
    before = run_steps(block, x)
    CHANGES[change](block)
    expected = block(x)
    assert not torch.allclose(before, expected, rtol=1e-6, atol=1e-6)
    assert not is_compiled(block, x)
    assert_close(run_steps(block, x), expected.double(), 2e-6)


@needs_compiler
@pytest.mark.parametrize('change', ['in place', 'data', 'parameter', 'module', 'mixer', 'setting', 'cast'])
def test_a_compiled_step_has_the_parameters_of_the_moment(change: str):
    block, x = randomize(CausalBlock(24, 'simple')), randn(3, 9, 24).float()
    before, other = run_steps(block, x), randomize(CausalBlock(24, 'simple'), 1)
    if change == 'in place':
        block.load_state_dict(other.state_dict())
    elif change == 'data':
        block.mlp.fc1.weight.data = other.mlp.fc1.weight.data
    elif change == 'parameter':
        block.mlp.fc1.weight = other.mlp.fc1.weight
    elif change == 'module':
        block.mlp = other.mlp
    elif change == 'mixer':
        block.attn = other.attn
    elif change == 'setting':
        block.norm2.eps = 1.0
    else:
        block.double().float().norm1.weight.data *= 2
    assert is_compiled(block, x)
    expected = block(x)
    assert not torch.allclose(before, expected, rtol=1e-3)
    assert_close(run_steps(block, x), expected.double(), 2e-6)


@needs_compiler
@pytest.mark.parametrize(
    ('name', 'args', 'called'),
    [
        ('simple', {}, 'simple_block'),
        ('local', {}, 'local_block'),
        ('full', {}, 'local_block'),
        ('local', dict(factorize_bias=False), None),
        ('attention', {}, None),
    ],
)
def test_a_token_passes_a_block_in_one_call(
    name: str, args: dict[str, Any], called: str | None, monkeypatch: pytest.MonkeyPatch
):
    from aft_vision.ops.decode import step_cpp as step

    calls: list[str] = []
    for each in ('simple_block', 'local_block'):
        function = getattr(step, each)

        def spy(*inputs: Any, each: str = each, function: Any = function) -> Any:
            calls.append(each)
            return function(*inputs)

        monkeypatch.setattr(step, each, spy)
    block, x = randomize(CausalBlock(24, name, **MIXERS[name], **args)), randn(3, 9, 24).float()
    run_steps(block, x)
    assert calls == ([called] * x.shape[1] if called else [])


@needs_compiler
@pytest.mark.parametrize('before', [True, False], ids=['before', 'behind'])
def test_a_hook_of_all_modules_is_called(before: bool):
    block, x = randomize(CausalBlock(24, 'simple')), randn(3, 9, 24).float()
    called: list[type[nn.Module]] = []
    register = register_module_forward_pre_hook if before else register_module_forward_hook
    assert is_compiled(block, x)
    hook = register(lambda module, *args: called.append(type(module)))
    try:
        assert not is_compiled(block, x)
        run_steps(block, x[:, :1])
    finally:
        hook.remove()
    assert called.count(nn.Linear) == 4
    assert is_compiled(block, x)


class Plain(CausalLocal):
    def mix_step(self, projected: Tensor, state: Any) -> tuple[Tensor, Any]:
        return projected[:, :24], state


class PlainSimple(CausalSimple):
    mix_step = Plain.mix_step


@needs_compiler
@pytest.mark.parametrize('name', ['local', 'simple'])
def test_a_compiled_step_mixes_as_a_subclass_does(name: str):
    block, x = randomize(CausalBlock(24, name, **MIXERS[name])), randn(3, 1, 24).float()
    block.attn = randomize({'local': Plain, 'simple': PlainSimple}[name](24, **MIXERS[name]))
    assert is_compiled(block, x)
    mixed = block.attn.proj(block.attn.qkv(block.norm1(x))[..., :24])
    expected = x + mixed + block.mlp(block.norm2(x + mixed))
    assert_close(run_steps(block, x), expected.double(), 2e-6)


VIEWS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    'turned': ('weight', lambda x: x.mT),
    'fewer rows': ('weight', lambda x: x[:12]),
    'another type': ('weight', lambda x: x.view(torch.int32)),
    'a shorter bias': ('bias', lambda x: x[:12]),
    'every other bias': ('bias', lambda x: x[::2]),
}


@needs_compiler
@pytest.mark.parametrize('view', VIEWS)
def test_a_step_sees_another_view_of_the_same_memory(view: str):
    block, x = randomize(CausalBlock(24, 'simple')), randn(3, 9, 24).float()
    before, (name, take) = run_steps(block, x), VIEWS[view]
    parameter = getattr(block.attn.proj, name).requires_grad_(False)
    parameter.data = take(parameter.data)
    assert not is_compiled(block, x)
    if view != 'turned':
        with pytest.raises(RuntimeError):
            run_steps(block, x)
        return
    expected = block(x)
    assert not torch.allclose(before, expected, rtol=1e-3)
    assert_close(run_steps(block, x), expected.double(), 2e-6)


@needs_compiler
def test_what_is_not_for_the_compiled_layers_goes_to_the_modules():
    block, x = randomize(CausalBlock(24, 'simple', proj_drop=0.5)), randn(2, 1, 24).float()
    assert is_compiled(block, x)
    assert block.compiled_dense(x[:, 0].contiguous()) is None, 'with gradients'
    with torch.autocast('cpu', torch.bfloat16):
        assert not is_compiled(block, x)
    assert not is_compiled(block.train(), x)
    assert not is_compiled(block.eval().bfloat16(), x.bfloat16())
    assert not is_compiled(block.double(), x.double())


@needs_compiler
def test_a_block_that_has_stepped_can_be_copied_and_saved():
    block, x = randomize(CausalBlock(24, 'simple')), randn(2, 9, 24).float()
    expected, file = run_steps(block, x), io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    for other in (copy.deepcopy(block), torch.load(file, weights_only=False)):
        nn.init.zeros_(block.mlp.fc1.weight)
        assert torch.equal(run_steps(other, x), expected)


@needs_compiler
def test_a_block_that_was_saved_before_there_were_compiled_steps_has_them():
    block, x = randomize(CausalBlock(24, 'simple')), randn(2, 9, 24).float()
    vars(block).pop('_dense_step', None)
    assert is_compiled(block, x)


@needs_compiler
def test_a_block_elsewhere_keeps_no_parameters_on_the_cpu():
    block, x = randomize(CausalBlock(24, 'simple')), randn(2, 1, 24).float()
    assert is_compiled(block, x)
    weight = weakref.ref(block.mlp.fc1.weight)
    block.to('meta')
    assert not is_compiled(block, x.to('meta'))
    assert weight() is None
