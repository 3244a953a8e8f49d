"""The decoders: likelihood, sessions against the parallel form, parameter counts, and what is rejected."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, torch_version
from small_decoders import FORMS, NAMES, create, draw_tokens, randomize
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from aft_vision.layers import CausalMixer, CausalSimple, register_mixer
from aft_vision.layers.base import CAUSAL_MIXERS
from aft_vision.models import AFTDecoder, bits, create_decoder, load_decoder, save_decoder
from train.model_section import check_decoder


def run_steps(model: AFTDecoder, tokens: Tensor) -> Tensor:
    session = model.session(len(tokens))
    return torch.stack([session.step(tokens[:, t - 1] if t else None) for t in range(tokens.shape[1])], 1)


def run_chunks(model: AFTDecoder, tokens: Tensor, chunks: list[int]) -> Tensor:
    """Single steps where a chunk is 1, all at once where it is more; the start of the sequence is with the first."""
    session, rows, taken = model.session(len(tokens)), [], 0
    for chunk in chunks:
        if chunk == 1 and taken:
            rows.append(session.step(tokens[:, taken])[:, None])
        else:
            rows.append(session.prefill(tokens[:, taken : taken + chunk], all_logits=True))
        taken += chunk
    return torch.cat(rows, 1)


@pytest.mark.parametrize(
    ('name', 'dtype', 'bound'),
    [
        *((name, torch.float32, 5e-5) for name in FORMS),
        ('local', torch.float64, 1e-10),
        *((name, torch.bfloat16, 3e-2) for name in ('local', 'attention')),
    ],
    ids=str,
)
def test_parallel_blocks_and_some_single_steps_agree_over_3072_tokens(name: str, dtype: torch.dtype, bound: float):
    window = dict(window=256) if name == 'local' else {}
    model = create(name, context=3072, depth=1, **window)
    tokens = draw_tokens(1, 3072)
    model = model.to(dtype)
    expected = create(name, context=3072, depth=1, **window)
    expected.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = expected(tokens)
        assert_close(model(tokens), expected, bound)
    # The tests of the operations take all 3072 as single steps.
    assert_close(run_chunks(model, tokens, [700, 1, 1, 300, 1024, 1, 944, *[1] * 100]), expected, bound)


@pytest.mark.parametrize('name', NAMES)
def test_every_way_of_decoding_agrees_with_the_parallel_form(name: str):
    model, tokens = create(name), draw_tokens()
    expected = model(tokens)
    assert_close(run_steps(model, tokens), expected, 1e-12)
    for chunks in ([23], [0, 1, 1, 21], [3, 1, 9, 1, 1, 8], [1, 22]):
        assert_close(run_chunks(model, tokens, chunks), expected, 1e-12)


@pytest.mark.parametrize('name', FORMS)
def test_a_prompt_taken_at_once_leaves_the_state_of_steps(name: str):
    model, tokens = create(name), draw_tokens()
    session, other = model.session(2), model.session(2)
    session.prefill(tokens[:, :9])
    for t in range(-1, 9):
        other.step(tokens[:, t] if t >= 0 else None)
    assert int(session.state.position) == int(other.state.position) == 10
    for t in range(9, 23):
        assert_close(session.step(tokens[:, t]), other.step(tokens[:, t]), 1e-12)


@pytest.mark.parametrize('name', FORMS)
def test_logits_see_the_tokens_before_them_alone(name: str):
    model, tokens = create(name), draw_tokens()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(after[:, :10], before[:, :10])
    assert not torch.isclose(after[:, 10:], before[:, 10:]).all(-1).any()
    assert torch.equal(run_steps(model, changed)[:, :10], run_steps(model, tokens)[:, :10])


def test_the_first_logits_are_those_of_the_start_embedding():
    model = create(depth=1)
    first = model(draw_tokens(3))[:, 0]
    assert torch.equal(first[0], first[1])
    model.start_embed.data[0] += 1
    assert not torch.isclose(model(draw_tokens(3))[:, 0], first).any()


def test_the_likelihood_of_a_uniform_model_is_8_bits():
    model = create(vocab_size=256, dtype=torch.float32)
    nn.init.zeros_(model.head.weight)
    nats = model.nll(draw_tokens(vocab_size=256))
    assert nats.dtype == torch.float32
    torch.testing.assert_close(bits(nats), torch.full((2, 24), 8.0))
    assert bits(1.0) == pytest.approx(1.4426950408889634)


def test_the_likelihood_is_that_of_the_logits():
    model, tokens = create(), draw_tokens()
    expected = -model(tokens).log_softmax(-1).gather(2, tokens[..., None]).squeeze(2)
    torch.testing.assert_close(model.nll(tokens), expected.float())


@pytest.mark.parametrize('name', FORMS)
def test_a_session_can_be_reordered_and_copied(name: str):
    model, tokens = create(name), draw_tokens(3)
    session, index = model.session(3), torch.tensor([2, 2, 0, 1])
    session.prefill(tokens[:, :9])
    picked, copy = session.reorder(index), session.clone()
    assert torch.equal(picked.logits, session.logits[index])
    assert torch.equal(session.clone().sample(3, seed=5), session.clone().sample(3, seed=5))
    session.clone().logits.zero_()
    assert torch.equal(picked.logits, session.logits[index])
    expected = session.step(tokens[:, 9])
    assert torch.equal(copy.step(tokens[:, 9]), expected)
    # Not bit for bit: a product of four rows may add in another order than one of three.
    assert_close(picked.step(tokens[index, 9]), expected[index], 1e-12)


def test_a_state_has_a_constant_size():
    dim, layers, window = 256, 2, 256
    for mixer, args, expected in (
        # The ring and the sums, and the reference.
        ('local', dict(window=window), layers * (2 * dim * (window + 1) + dim) * 4),
        ('simple', {}, layers * 3 * dim * 4),
        ('attention', dict(num_heads=2), layers * 2 * 3072 * dim * 4),
    ):
        model = AFTDecoder(3072, dim=dim, depth=layers, mixer=mixer, device='meta', **args)
        state = model.eval().session(1).state
        assert expected <= state.num_bytes() <= expected + 1000


# AFT-full decodes as AFT-local does. docs/guide/install.md: older ones compile no step, or one for each position.
@pytest.mark.skipif(torch_version() < (2, 14), reason='needs torch 2.14')
@pytest.mark.parametrize('name', ['local', 'simple', 'attention'])
def test_a_step_compiles_to_one_graph_for_all_positions(name: str):
    model, tokens = create(name, depth=1), draw_tokens()
    counter, session = CompileCounter(), model.session(2)
    step = torch.compile(session.step, backend=counter, fullgraph=True)
    rows = [step(tokens[:, t - 1] if t else None) for t in range(24)]
    assert_close(torch.stack(rows, 1), model(tokens), 1e-12)
    # The start, which has no token, and all other positions.
    assert counter.frame_count == 2


@pytest.mark.parametrize('name', ['local', 'attention'])
def test_the_parallel_form_compiles_and_exports(name: str):
    model, tokens = create(name, depth=1), draw_tokens()
    expected = model(tokens)
    assert_close(torch.compile(model, backend='aot_eager', fullgraph=True)(tokens), expected, 1e-12)
    assert_close(torch.export.export(model, (tokens,)).module()(tokens), expected, 1e-12)


@pytest.mark.parametrize('name', NAMES)
def test_checkpointing_changes_no_gradient(name: str):
    model, tokens = create(name).train(), draw_tokens()
    grads = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        grads.append(torch.autograd.grad(model.nll(tokens).mean(), list(model.parameters())))
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_every_parameter_of_every_switch_is_trained():
    for args in ({}, dict(out_proj=False), dict(query_gate=False), dict(tie_embedding=True), dict(qkv_bias=False)):
        model = create(**args)
        for name, grad in zip(
            dict(model.named_parameters()),
            torch.autograd.grad(model.nll(draw_tokens()).mean(), list(model.parameters())),
            strict=True,
        ):
            assert grad.abs().max() > 0, f'{name} of {args}'


def test_a_tied_head_is_the_embedding():
    model = create(tie_embedding=True)
    assert model.head.weight is model.token_embed.weight
    assert sum(p.numel() for p in create().parameters()) - sum(p.numel() for p in model.parameters()) == 11 * 8


@pytest.mark.parametrize('name', NAMES)
def test_weight_decay_is_on_linear_weights_alone(name: str):
    model = create(name)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = create_optimizer_v2(model, 'adamw', lr=1e-3, weight_decay=0.1).param_groups
    decayed = {names[id(p)] for group in groups if group['weight_decay'] for p in group['params']}
    assert decayed == {f'{name}.weight' for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def test_parameter_groups_follow_the_depth():
    groups = create_optimizer_v2(create(), 'adamw', lr=1e-3, weight_decay=0.1, layer_decay=0.5).param_groups
    assert sorted({group['lr_scale'] for group in groups}) == [0.125, 0.25, 0.5, 1.0]


def test_dropout_leaves_decoding_alone_in_evaluation():
    model, tokens = create(dropout=0.5), draw_tokens()
    assert_close(run_steps(model, tokens), model(tokens), 1e-12)
    assert not torch.equal(model.train()(tokens), model(tokens))


def test_decoding_under_autocast_keeps_its_sums_in_float32():
    model, tokens = create().float(), draw_tokens()
    with torch.autocast('cpu', torch.bfloat16):
        parallel, steps = model(tokens), run_steps(model, tokens)
        chunks = run_chunks(model, tokens, [10, 13])
        session = model.session(len(tokens))
        session.prefill(tokens[:, :10])
        session.step(tokens[:, 10])
    for got in (parallel, steps, chunks):
        assert_close(got, create()(tokens), 3e-2)
    assert {x.dtype for layer in session.state.layers for x in layer if x.is_floating_point()} == {torch.float32}


REJECTED = [
    (lambda: create()(draw_tokens(2, 25)), r'T from 1 to 24, got \(2, 25\)'),
    (lambda: create()(torch.full((1, 3), 11)), 'tokens must be from 0 to 10, got 11'),
    (lambda: create()(torch.full((1, 3), -1)), 'tokens must be from 0 to 10, got -1'),
    (lambda: create()(torch.zeros(1, 3)), 'tokens must be int64, got torch.float32'),
    (
        lambda: create().session(2).prefill(draw_tokens(2, 24)),
        'a prompt of at most 23 tokens, .* 24 positions .* got 24',
    ),
    (lambda: create().session(2).prefill(draw_tokens(3, 4)), r'tokens must have shape \(2, n\), got \(3, 4\)'),
    (lambda: create().session(2).prefill(torch.full((2, 3), 12)), 'tokens must be from 0 to 10, got 12'),
    (lambda: create().train().session(2), r'a model in evaluation mode .* got one in training mode \(call eval'),
    (lambda: create(context=0), 'context must be at least 1, got 0'),
    (lambda: create(mixer='conv'), "mixer must be one of local, full, simple, attention, got 'conv'"),
    (lambda: create('attention', num_heads=3), 'num_heads must divide dim = 8, got 3'),
    (lambda: create(window=0), 'window must be at least 1'),
]


@pytest.mark.parametrize(('call', 'message'), REJECTED, ids=[message for _, message in REJECTED])
def test_a_wrong_input_is_named(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
def test_a_step_reads_no_memory_that_is_not_its_own(dtype: torch.dtype):
    model = create(context=3, dtype=dtype)
    session = model.session(2)
    session.prefill(draw_tokens(2, 2))
    with pytest.raises(IndexError):
        session.step(torch.zeros(2).long())
    session = model.session(2)
    session.step(None)
    for count in (1, 3):
        with pytest.raises(ValueError, match=rf'token must have shape \(2,\) to match the state, got \({count},\)'):
            session.step(torch.zeros(count).long())
    for token in (-1, 99):
        with pytest.raises(IndexError):
            session.step(torch.full((2,), token))


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize('name', FORMS)
def test_a_session_made_in_inference_mode_goes_on_outside_it(name: str, dtype: torch.dtype):
    model, tokens = create(name, dtype=dtype), draw_tokens()
    with torch.inference_mode():
        session = model.session(2)
        session.prefill(tokens[:, :4])
        sessions = [session.clone(), session.reorder(torch.arange(2)), session]
        session.step(tokens[:, 4])
    for each in sessions:
        for t in range(int(each.state.position) - 1, 9):
            found = each.step(tokens[:, t])
        assert_close(found, model(tokens)[:, 9].double(), 1e-5)
        each.prefill(tokens[:, 9:23])


@pytest.mark.parametrize(
    ('name', 'kwargs', 'message'),
    [
        ('simple', dict(window=5), "mixer='simple' has no window; it takes none"),
        ('attention', dict(bias_dim=5), "mixer='attention' has no bias_dim; it takes num_heads"),
        ('full', dict(mixer_args={'window': 5}), "mixer='full' has no window; it takes factorize_bias, bias_dim"),
        ('local', dict(window=None), "missing 1 required positional argument: 'window'"),
        ('local', dict(kernel_size=3), 'AFTDecoder has no kernel_size; it takes context, .* tie_embedding, .* window'),
        ('local', dict(windows=3, window=None), 'AFTDecoder has no windows'),
        ('local', dict(mixer_args=5), 'mixer_args must be a mapping of arguments to values, got 5'),
        ('attention', dict(query_gate=False), 'attention has no query gate'),
    ],
    ids=str,
)
def test_an_argument_that_the_mixer_lacks_or_needs_is_named(name: str, kwargs: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=message):
        create(name, **kwargs)


Previous = namedtuple('Previous', 'v')


class Pairs(CausalMixer):
    """Each value plus a share of the one before it, and the gate."""

    name = 'pairs'

    def __init__(self, dim: int, share: float = 0.5, **options: Any) -> None:
        super().__init__(dim, dim, **options)
        self.share = share

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        q, _, v = self.project_qkv(x)
        return self.proj(torch.sigmoid(q) * (v + self.share * nn.functional.pad(v, (0, 0, 1, -1))))

    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> Previous:
        return Previous(torch.zeros(batch, self.qkv.in_features, dtype=dtype, device=device))

    def mix_step(self, projected: Tensor, state: Previous) -> Tensor:
        q, _, v = projected.split(self.split_sizes, dim=-1)
        y = torch.sigmoid(q) * (v + self.share * state.v)
        state.v.copy_(v)
        return y


def test_a_causal_mixer_of_ones_own_decodes_and_stands_in_configs(tmp_path: Path, request: pytest.FixtureRequest):
    request.addfinalizer(lambda: CAUSAL_MIXERS.pop('pairs'))
    register_mixer(Pairs)
    section = {'name': 'aft_simple_char', 'mixer': 'pairs', 'share': 0.9}
    assert check_decoder(section) == section
    made = dict(context=24, vocab_size=11, dim=8, depth=2, mixer='pairs', mixer_args={'share': 0.9})
    model, tokens = randomize(create_decoder('aft_simple_char', **made)), draw_tokens()
    assert_close(run_steps(model, tokens), model(tokens), 1e-5)
    assert_close(run_chunks(model, tokens, [3, 1, 9, 10]), model(tokens), 1e-5)
    save_decoder(model, tmp_path / 'model.pt')
    assert torch.equal(load_decoder(tmp_path / 'model.pt')(tokens), model(tokens))
    flat = create_decoder('aft_simple_char', **{**made, 'mixer_args': None, 'share': 0.9})
    flat.load_state_dict(model.state_dict())
    assert torch.equal(flat.eval()(tokens), model(tokens))


def test_a_causal_mixer_of_ones_own_may_have_a_window(request: pytest.FixtureRequest):
    class Windowed(CausalSimple):
        name = 'windowed'

        def __init__(self, dim: int, window: int, **options: Any) -> None:
            super().__init__(dim, **options)
            self.width = window

    request.addfinalizer(lambda: CAUSAL_MIXERS.pop('windowed'))
    register_mixer(Windowed)
    assert AFTDecoder(8, dim=8, depth=1, mixer='windowed', window=3).blocks[0].attn.width == 3
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'window'"):
        AFTDecoder(8, dim=8, depth=1, mixer='windowed')
