"""The measurement of decoding: what it times, how it adds up, and the bytes of a state."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aft_vision.models import DecoderState, Session, create_decoder
from tools.benchmark import decode

SMALL = dict(img_size=(4, 4), dim=8, depth=2, num_heads=2)


def test_every_model_is_measured_at_every_position(monkeypatch: pytest.MonkeyPatch):
    taken: list[tuple[str, int]] = []

    step = Session.step

    def create(name: str, **kwargs):
        args = {key: value for key, value in kwargs.items() if key != 'num_heads' or 'transformer' in name}
        return create_decoder(name, **args, **(dict(window=4) if 'local' in name else {}))

    def recorded(self: Session, token: Tensor | None):
        taken.append((self.model.model_args['name'], int(self.state.position)))
        return step(self, token)

    monkeypatch.setattr(Session, 'step', recorded)
    monkeypatch.setattr(decode, 'create_decoder', create)
    monkeypatch.setattr(decode, 'BATCHES', (1, 2))
    monkeypatch.setattr(decode, 'POSITIONS', (0, 20, 47))
    rows = decode.measure_decode(torch.device('cpu'), 1, **SMALL)
    assert [(row['batch_size'], row['name']) for row in rows] == [(b, name) for b in (1, 2) for name in decode.MODELS]
    assert {place for _, place in taken} == {0, 20, 47}
    for row in rows:
        assert list(row['token_ms']) == [0, 20, 47]
        assert row['image_seconds'] > 0
    assert [row['ratio'] for row in rows if row['name'] == 'transformer_pixel'] == [1.0, 1.0]
    cache, local, simple = (row['state_bytes'] for row in rows[:3])
    assert cache == pytest.approx(2 * 2 * 48 * 8 * 4, abs=100)
    assert local == pytest.approx(2 * (2 * 5 + 1) * 8 * 4, abs=100)
    assert simple == pytest.approx(2 * 3 * 8 * 4, abs=100)


def test_the_figures_of_an_image_are_taken_within_the_rounds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        decode, 'create_decoder', lambda name, **args: create_decoder(name, img_size=(4, 4), dim=8, depth=1)
    )
    monkeypatch.setattr(decode, 'MODELS', ('transformer_pixel', 'aft_simple_pixel'))
    monkeypatch.setattr(decode, 'BATCHES', (1,))
    monkeypatch.setattr(decode, 'POSITIONS', (0, 10, 47))
    # The machine is ten times as slow in the second of three rounds; rows are calls: each model at 0, at 10 and at 47.
    once, seconds = [1.0, 10.0, 1.0], [[1.0, 10.0, 1.0], [1.0, 10.0, 1.0], [3.0, 30.0, 5.0]]
    seconds += [once, once, [1.0, 10.0, 2.0]]
    monkeypatch.setattr(decode, 'time_rounds', lambda calls, *args, **kwargs: seconds)
    first, simple = decode.measure_decode(torch.device('cpu'), 3)
    # 10 steps of 1, 10 and 1 seconds, and 37 of 2, 20 and 3; with AFT-simple 37 of 1, 10 and 1.5.
    assert [row['image_seconds'] for row in (first, simple)] == pytest.approx([48 / 47 * 121, 48 / 47 * 65.5])
    assert (first['ratio'], first['ratio_quartiles']) == (1.0, (1.0, 1.0))
    assert simple['ratio'] == pytest.approx(84 / 47)
    assert simple['ratio_quartiles'] == pytest.approx((84 / 47, (84 / 47 + 121 / 65.5) / 2))
    # 3, 3 and 5 against 1, 1 and 2.
    assert (first['flatness'], first['flatness_quartiles']) == (3.0, (3.0, 4.0))
    assert (simple['flatness'], simple['flatness_quartiles']) == (1.0, (1.0, 1.5))
    assert simple['token_ms'] == {0: 1e3, 10: 1e3, 47: 2e3}


class Fills(TorchDispatchMode):
    """Counts the tensors that are filled."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 'fill_' in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('name', decode.MODELS)
def test_every_model_pays_for_one_reset_and_takes_the_same_token(name: str):
    model = create_decoder(name, img_size=(4, 4), dim=8, depth=3, **(dict(window=4) if 'local' in name else {})).eval()
    tokens = torch.zeros(2, dtype=torch.int64)
    session = model.session(2)
    session.prefill(torch.arange(60).view(2, 30) % 7)
    state, counts = decode.share_positions(session.state.clone())
    with Fills() as fills:
        decode.step_at(lambda token: None, tokens, counts, 5)
    assert fills.count == 1
    assert {int(x) for x in positions_of(state)} == {5}
    logits = decode.step_at(Session(model, state).step, tokens, counts, 31)
    torch.testing.assert_close(logits, session.step(tokens), rtol=0, atol=0)
    assert {int(x) for x in positions_of(state)} == {32}


def positions_of(state: DecoderState) -> list[Tensor]:
    """Return the tensors of a state that count tokens."""
    return [state.position, *(layer.position for layer in state.layers if hasattr(layer, 'position'))]


@pytest.mark.parametrize('name', decode.MODELS)
def test_a_filled_state_has_no_untouched_memory(name: str):
    model = create_decoder(name, img_size=(4, 4), dim=8, depth=1, **(dict(window=4) if 'local' in name else {})).eval()
    state, counts = decode.share_positions(model.session(2).state)
    decode.fill_state(state)
    for x in (x for layer in state.layers for x in layer if x.ndim):
        assert (x != 0).all()
    first = decode.step_at(Session(model, state).step, torch.zeros(2, dtype=torch.int64), counts, 30)
    assert first.isfinite().all()
