"""Decoding one token at a time: AFT's state of constant size against a cache of keys and values."""

import argparse
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from aft_vision import ops
from aft_vision.layers import KeyValueState
from aft_vision.models import AFTDecoder, DecoderState, Session, create_decoder
from aft_vision.timing import compare_rounds, time_rounds
from tools.benchmark.printer import Report
from tools.benchmark.times import describe_error, fresh_compiler, show_progress

# The Transformer, which the others are compared to, comes first.
MODELS = ('transformer_pixel', 'aft_local_pixel', 'aft_simple_pixel')
POSITIONS = (0, 300, 768, 1536, 2304, 3071)
# The token time at the second over that at the first is to be 1.
FLAT = (300, 3071)
# The Transformer attends to that many slots of its cache, or to a multiple of them.
SLOTS = 256


@torch.inference_mode()
def measure_decode(
    device: torch.device,
    rounds: int,
    batch_sizes: Sequence[int] = (1, 16),
    positions: Sequence[int] = POSITIONS,
    compiled: bool = False,
    progress: bool = False,
    **model_args: Any,
) -> list[dict[str, Any]]:
    """Measure the time of a token at several positions, and the time of a whole image from it.

    Args:
        rounds: In each, every model takes a token at every position.
        batch_sizes: Images decoded together.
        positions: Places in the sequence, ascending, the first and the last of it included for the time of an image.
        compiled: Measure the compiled step too.
        model_args: Of the models, beside the paper's L = 24 and d = 256.

    Returns:
        A row for each batch size, form ('eager', 'compiled') and model: `token_ms` by position; `image_seconds`, the
        trapezoid sum of that over the sequence, for the batch; `ratio`, that of the Transformer of the same form over
        it in the same round, above 1 is faster, None if that could not be compiled; `flatness`, the token time at
        FLAT[1] over that at FLAT[0] in the same round, or None if they are not measured; `state_bytes` of one image;
        `error`, None, or all there is of a step that could not be compiled. Figures are medians over the rounds;
        `ratio_quartiles` and `flatness_quartiles` come with them.
    """
    models = {name: create_decoder(name, **model_args).to(device).eval() for name in MODELS}
    rows = []
    for batch in batch_sizes:
        states = {name: model.session(batch).state for name, model in models.items()}
        for state in states.values():
            fill_state(state)
        tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        for form in ('eager', 'compiled')[: 1 + compiled]:
            with fresh_compiler() if form == 'compiled' else contextlib.nullcontext():
                rows += _measure_form(form, models, states, tokens, positions, rounds, progress)
    return rows


def _measure_form(
    form: str,
    models: dict[str, AFTDecoder],
    states: dict[str, DecoderState],
    tokens: Tensor,
    positions: Sequence[int],
    rounds: int,
    progress: bool,
) -> list[dict[str, Any]]:
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    errors: dict[str, str] = {}
    # Every model pays for as many resets, however many positions its state has.
    resets = max(len(positions_of(state)) for state in states.values())
    for name, model in models.items():
        try:
            own = _token_calls(model, form, tokens, states[name], positions, resets)
        # Whatever the compiler raises: the others are measured all the same.
        except Exception as error:
            if form == 'eager':
                raise
            errors[name] = describe_error(error)
        else:
            calls |= {(name, place): call for place, call in own.items()}
    found = time_rounds(list(calls.values()), tokens.device, rounds, progress=progress) if calls else []
    seconds = dict(zip(calls, found, strict=True))
    images = {name: _image_rounds(name, positions, seconds) for name in models if name not in errors}
    rows: list[dict[str, Any]] = []
    for name, state in states.items():
        batch = len(tokens)
        row = {'batch_size': batch, 'form': form, 'model': name, 'state_bytes': state.num_bytes() // batch}
        if name in errors:
            rows.append({**row, 'error': errors[name]})
        else:
            token = {place: seconds[name, place] for place in positions}
            rows.append({**row, **_figures(token, images[name], images.get(MODELS[0])), 'error': None})
    return rows


def _token_calls(
    model: AFTDecoder, form: str, tokens: Tensor, state: DecoderState, positions: Sequence[int], resets: int
) -> dict[int, Callable[[], object]]:
    calls: dict[int, Callable[[], object]] = {}
    for place in positions:
        session = Session(model, filled_part(state, place))
        step = torch.compile(session.step, fullgraph=True) if form == 'compiled' else session.step
        calls[place] = partial(take_token, step, tokens, session.state, place, resets)
    for call in calls.values():
        # Compiles, for the first token, for a length, and for any length.
        call()
    return calls


def _image_rounds(name: str, positions: Sequence[int], seconds: dict[tuple[str, int], list[float]]) -> list[float]:
    rounds = zip(*(seconds[name, place] for place in positions), strict=True)
    return [integrate(positions, each) for each in rounds]


def _figures(seconds: dict[int, list[float]], images: list[float], first: list[float] | None) -> dict[str, Any]:
    # Of the seconds in every round of a token by position, of an image, and of an image with the Transformer.
    ratio = None if first is None else compare_rounds(images, first)
    flat = compare_rounds(seconds[FLAT[0]], seconds[FLAT[1]]) if set(FLAT) <= set(seconds) else None
    return {
        'token_ms': {place: 1e3 * median(each) for place, each in seconds.items()},
        'image_seconds': median(images),
        'ratio': ratio and ratio.ratio,
        'ratio_quartiles': ratio and ratio.quartiles,
        'flatness': flat and flat.ratio,
        'flatness_quartiles': flat and flat.quartiles,
    }


def filled_part(state: DecoderState, position: int) -> DecoderState:
    """A view of a state that has, of a cache of keys and values, the slots up to a position, rounded up to SLOTS.

    On an accelerator attention reads every slot that it is given, so a whole cache would cost the Transformer the same
    at every position.
    """
    stop = SLOTS * (position // SLOTS + 1)
    layers = [
        KeyValueState(layer.keys[:, :, :stop], layer.values[:, :, :stop], layer.position)
        if isinstance(layer, KeyValueState)
        else layer
        for layer in state.layers
    ]
    return DecoderState(state.position, tuple(layers))


def take_token(step: Callable[..., Any], tokens: Tensor, state: DecoderState, position: int, resets: int = 0) -> Tensor:
    """Take one token at a position of the sequence, whatever has been taken before.

    Args:
        resets: Tensors that are set to the position at least, those of the state first.
    """
    places = positions_of(state)
    for place in (*places, *[places[0]] * (resets - len(places))):
        place.fill_(position)
    return step(tokens if position else None)


def positions_of(state: DecoderState) -> list[Tensor]:
    """The tensors of a state that count tokens."""
    return [state.position, *(layer.position for layer in state.layers if hasattr(layer, 'position'))]


def fill_state(state: DecoderState) -> None:
    """Fill a state as after a whole sequence of ordinary keys and values.

    Memory that has never been written would all be one page of zeros, and its reading free.
    """
    for layer in state.layers:
        if isinstance(layer, KeyValueState):
            layer.keys.normal_()
            layer.values.normal_()
        elif isinstance(layer, ops.LocalState):
            batch, window, width = layer.ring.shape
            k, v = torch.randn(2, batch, window + 1, width // 2, dtype=layer.ring.dtype, device=layer.ring.device)
            ops.aft_local_prefill(None, k, v, k.new_zeros(window + 1, window), layer)
        else:
            k, v = torch.randn(2, *layer.reference.shape, dtype=layer.reference.dtype, device=layer.reference.device)
            ops.aft_simple_step(None, k, v, layer)


def integrate(positions: Sequence[int], seconds: Sequence[float]) -> float:
    """The time of all tokens, from that of some, by trapezoids; that at both ends of the sequence must be known.

    Raises:
        ValueError: there are fewer than two positions, or they do not ascend from 0.
    """
    if len(positions) < 2 or positions[0] != 0 or sorted(set(positions)) != list(positions):
        raise ValueError(f'expected ascending positions from 0, two or more, got {list(positions)}')
    y, x = torch.tensor(seconds, dtype=torch.float64), torch.tensor(positions, dtype=torch.float64)
    # A sequence has a token more than steps between its first and its last position.
    return torch.trapezoid(y, x).item() * (positions[-1] + 1) / positions[-1]


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the time of a token at several positions, and of an image."""
    rows = measure_decode(device, args.rounds, compiled=args.compile, progress=show_progress())
    head = 'one token at a position of the sequence; ratios are of the time of an image with the Transformer to it'
    return Report([{'name': row['model'], **row} for row in rows], head)
