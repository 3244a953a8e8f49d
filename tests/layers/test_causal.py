"""The causal mixers as modules; what they decode is held to the parallel form in tests/models."""

import pytest
import torch
from helpers import assert_close, generator, randn
from small_decoders import randomize
from torch import nn

from aft_vision.layers import CausalAttention, CausalBlock


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


@pytest.mark.parametrize('name', ['local', 'simple', 'full', 'attention'])
def test_a_padded_sequence_gives_what_it_gives_without_padding(name: str):
    args = {'local': dict(num_tokens=9, window_size=4), 'full': dict(num_tokens=9), 'simple': {}}
    block = randomize(CausalBlock(8, name, **args.get(name, dict(num_tokens=9, num_heads=2))).double())
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
