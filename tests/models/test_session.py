"""Drawing in a session: which tokens may be drawn, how often they are, and what their seeds decide."""

import itertools
from typing import Any

import numpy
import pytest
import torch
from helpers import assert_close, generator, pretend_terminal, randn
from small_decoders import FORMS, create, draw_tokens
from torch import Tensor

from aft_vision.models import AFTDecoder, Session
from aft_vision.models.session import filter_logits

RULES = [dict(), dict(temperature=0.5), dict(top_k=2), dict(top_p=0.7), dict(temperature=1.5, top_k=3, top_p=0.8)]


@pytest.mark.parametrize(
    ('top_k', 'top_p'), [(None, None), (None, 0.7), (None, 1.0), (1, None), (5, None), (5, 0.7), (99, 0.1)]
)
@pytest.mark.parametrize('temperature', [1.0, 0.5, 2.0])
def test_filtered_logits_are_those_of_transformers(temperature: float, top_k: int | None, top_p: float | None):
    transformers = pytest.importorskip('transformers')
    logits = randn(4, 20, scale=3.0, dtype=torch.float32)
    expected = transformers.TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
    if top_k is not None:
        expected = transformers.TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None:
        expected = transformers.TopPLogitsWarper(top_p)(None, expected)
    # Up to a constant, which a softmax does not see.
    expected = expected - expected.amax(-1, keepdim=True)
    torch.testing.assert_close(filter_logits(logits, temperature, top_k, top_p), expected)


def test_temperature_0_leaves_the_likeliest_token():
    logits = randn(4, 20)
    assert torch.equal(filter_logits(logits, 0.0).softmax(-1).argmax(-1), logits.argmax(-1))
    assert torch.equal(filter_logits(logits, 0.0).softmax(-1).sum(-1), torch.ones(4, dtype=torch.float64))
    assert (filter_logits(logits, 0.0) > float('-inf')).sum() == 4


def test_a_temperature_of_almost_0_leaves_the_likeliest_token_too():
    logits = randn(4, 20)
    assert torch.equal(filter_logits(logits, 1e-300, top_p=0.9).softmax(-1), filter_logits(logits, 0.0).softmax(-1))
    # In float32 it is 0.
    assert torch.equal(filter_logits(logits.float(), 1e-46), filter_logits(logits.float(), 0.0))
    assert filter_logits(logits.to('meta'), 0.5).is_meta


@torch.no_grad()
def exact_chances(model: AFTDecoder, length: int, given: dict[int, int], rules: dict[str, Any]) -> Tensor:
    """The probability of every sequence, each token drawn given those before it."""
    sequences = torch.tensor(list(itertools.product(range(model.vocab_size), repeat=length)))
    chances = filter_logits(model(sequences), **rules).softmax(-1).gather(2, sequences[..., None]).squeeze(2)
    for place, token in given.items():
        chances[:, place] = (sequences[:, place] == token).to(chances)
    return chances.prod(1)


@pytest.mark.parametrize(
    ('given', 'rules'),
    [*(({}, rules) for rules in RULES), *((given, RULES[-1]) for given in ({0: 2}, {1: 3}))],
    ids=str,
)
def test_sequences_are_drawn_with_their_probability(given: dict[int, int], rules: dict[str, Any]):
    model = create('local', context=3, vocab_size=4, window=2)
    model.head.weight.data *= 3
    expected = exact_chances(model, 3, given, rules)
    assert expected.sum().item() == pytest.approx(1.0)
    tokens, mask = torch.zeros(1, 3).long(), torch.zeros(3).bool()
    for place, token in given.items():
        tokens[0, place], mask[place] = token, True
    number = 20_000
    drawn = model.complete(tokens, mask, number, generator=generator(3), **rules)
    counts = torch.bincount((drawn * torch.tensor([16, 4, 1])).sum(1), minlength=64)
    assert not counts[expected == 0].any()
    likely = expected > 0
    chi_square = ((counts - number * expected) ** 2 / (number * expected))[likely].sum()
    # Its mean is the number of degrees of freedom, and its variance twice that.
    freedom = int(likely.sum()) - 1
    assert chi_square <= freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize('name', FORMS)
def test_greedy_sampling_takes_the_likeliest_token_of_the_parallel_form(name: str):
    model = create(name)
    drawn = model.sample(2, temperature=0.0)
    assert drawn.shape == (2, 24)
    assert torch.equal(model(drawn).argmax(-1), drawn)


def test_a_seed_decides_a_sequence_whatever_its_batch():
    model = create()
    first = model.sample(3, seed=5)
    assert torch.equal(model.sample(3, seed=5), first)
    assert torch.equal(model.sample(2, seed=6), first[1:])
    assert torch.equal(model.sample(2, seed=[7, 5]), first[[2, 0]])
    assert torch.equal(model.sample(3, seed=numpy.int64(5)), first)
    assert torch.equal(model.sample(3, seed=numpy.arange(5, 8)), first)
    assert len({tuple(row) for row in first.tolist()}) == 3


def test_a_seed_decides_a_completion_whatever_else_is_completed():
    model, tokens = create(), draw_tokens()
    given = torch.ones(tokens.shape, dtype=torch.bool)
    given[0, 2:], given[1, 5:8] = False, False
    alone = model.complete(tokens[1:], given[1:], seed=8)
    assert torch.equal(model.complete(tokens, given, seed=7)[1:, :8], alone[:, :8])


def test_all_tokens_of_the_context_may_be_given():
    model, tokens = create(), draw_tokens()
    session = model.session(len(tokens))
    whole = tokens[:, : model.context]
    assert torch.equal(session.complete(whole, torch.ones(whole.shape, dtype=torch.bool)), whole)


def test_a_generator_draws_for_all_sequences():
    model = create()
    first = model.sample(3, generator=generator(5))
    assert torch.equal(model.sample(3, generator=generator(5)), first)
    assert not torch.equal(model.sample(3, generator=generator(6)), first)
    torch.manual_seed(5)
    assert torch.equal(model.sample(3), first)


@pytest.mark.parametrize('name', FORMS)
def test_a_session_goes_on_from_what_it_has_drawn(name: str):
    model, tokens = create(name), draw_tokens()
    session = model.session(2)
    session.prefill(tokens[:, :3])
    parts = [session.sample(5, temperature=0.0), session.sample(16, temperature=0.0)]
    assert torch.equal(torch.cat([tokens[:, :3], *parts], 1), model.sample(prompt=tokens[:, :3], temperature=0.0))
    with pytest.raises(ValueError, match='expected at most 0 tokens, the positions that are left, got 1'):
        session.sample(1)


def test_a_used_state_draws_from_the_logits_that_it_is_given():
    model, tokens = create(), draw_tokens()
    session = model.session(2)
    session.prefill(tokens[:, :3])
    bare = Session(model, session.state.clone())
    with pytest.raises(ValueError, match=r'expected the logits of the next token, .* take session\.clone\(\)'):
        bare.sample(2)
    assert torch.equal(
        Session(model, session.state.clone(), session.logits).sample(5, seed=1), session.clone().sample(5, seed=1)
    )
    bare.step(tokens[:, 3])
    assert bare.sample(20, seed=1).shape == (2, 20)
    with pytest.raises(ValueError, match='expected at most 0 tokens, the positions that are left, got 1'):
        bare.sample(1)
    with pytest.raises(ValueError, match='a prompt of at most 0 tokens'):
        bare.prefill(tokens[:, :1])


def test_samples_of_several_prompts_begin_with_them():
    model, prompts = create(), draw_tokens(2, 9)
    drawn = model.sample(3, prompt=prompts, seed=0)
    assert drawn.shape == (6, 24)
    assert torch.equal(drawn[:, :9], prompts.repeat_interleave(3, 0))
    assert len({tuple(row) for row in drawn.tolist()}) == 6
    alone = model.sample(3, prompt=prompts[0], length=12, seed=0)
    assert alone.shape == (3, 12)


def test_given_tokens_stay_and_all_others_are_drawn():
    model, tokens = create(), draw_tokens(2)
    mask = torch.rand(2, 24, generator=generator(4)) > 0.5
    mask[:, 10:15], mask[:, 20:] = True, True
    drawn = model.complete(tokens, mask, 2, seed=0)
    assert torch.equal(
        drawn[mask.repeat_interleave(2, 0)], tokens.repeat_interleave(2, 0)[mask.repeat_interleave(2, 0)]
    )
    changed = tokens.masked_fill(~mask, 3)
    assert torch.equal(model.complete(changed, mask, 2, seed=0), drawn)
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(model.complete(tokens, torch.ones(24).bool()), tokens)


def test_a_session_calls_modules_that_have_hooks():
    model, calls = create().float(), []
    hook = model.blocks[0].mlp.fc2.register_forward_hook(lambda module, args, output: calls.append(output.shape))
    session = model.session(2)
    session.step(None)
    hook.remove()
    # Decided where the session was made.
    expected = session.step(torch.zeros(2).long())
    assert calls == [(2, 8)]
    other = model.session(2)
    other.step(None)
    assert_close(other.step(torch.zeros(2).long()), expected.double(), 1e-5)


def test_a_sequence_starts_once():
    session = create().session(2)
    session.step(None)
    with pytest.raises(ValueError, match='expected a token after the start'):
        session.step(None)
    with pytest.raises(ValueError, match=r'shape \(2, n >= 1\), got \(2, 0\)'):
        session.prefill(torch.zeros(2, 0).long())


def test_sampling_leaves_a_model_in_its_mode():
    model = create(dropout=0.5).train()
    first = model.sample(2, seed=1)
    assert model.training
    assert torch.equal(model.eval().sample(2, seed=1), first)


def test_a_progress_bar_shows_tokens_per_second(capsys, monkeypatch):
    pretend_terminal(monkeypatch)
    create().sample(2, seed=1, progress=True)
    shown = capsys.readouterr().err
    assert '48/48' in shown
    assert 'tokens/s' in shown


@pytest.mark.parametrize('temperature', [1.0, 0.0])
def test_logits_that_are_no_numbers_are_an_error(temperature: float):
    model = create()
    model.head.weight.data[0, 0] = float('nan')
    with pytest.raises(ValueError, match='expected logits that are numbers, got NaN'):
        model.sample(2, temperature=temperature, seed=0)


REJECTED = [
    (dict(temperature=-1.0), 'temperature must be at least 0, got -1.0'),
    (dict(top_k=0), 'top_k must be at least 1, got 0'),
    (dict(top_p=0.0), r'top_p must be in \(0, 1\], got 0.0'),
    (dict(num_samples=0), 'num_samples must be at least 1, got 0'),
    (dict(seed=1, generator=generator()), 'a generator or a seed, got both'),
    (dict(num_samples=2, seed=[1]), 'expected a seed for each of 2 sequences, got 1'),
    (dict(length=25), 'length must be from 1, .* to 24, .* got 25'),
    (dict(prompt=draw_tokens(1, 9), length=8), 'length must be from 9, .* got 8'),
    (dict(prompt=torch.full((1, 3), 11)), 'tokens must be from 0 to 10, got 11'),
    (dict(prompt=draw_tokens(1, 25)), 'expected at most 24 tokens, the positions of the model, got 25'),
]


@pytest.mark.parametrize(('kwargs', 'message'), REJECTED, ids=[message for _, message in REJECTED])
def test_a_wrong_argument_is_named(kwargs: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        create().sample(**kwargs)


def test_a_mask_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r'given must be a bool tensor of shape \(2, 24\) or \(24,\)'):
        create().complete(draw_tokens(), torch.ones(23).bool())
