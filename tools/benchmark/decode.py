"""Decoding one token at a time: AFT's state of constant size against a cache of keys and values."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from aft_vision import ops
from aft_vision.layers import KeyValueState
from aft_vision.models import DecoderState, Session, create_decoder
from aft_vision.timing import compare_rounds, time_rounds
from tools.benchmark.compare import show_progress
from tools.benchmark.printer import Report

# The Transformer, which the others are compared to, comes first.
MODELS = ('transformer_pixel', 'aft_local_pixel', 'aft_simple_pixel')
POSITIONS = (0, 300, 768, 1536, 2304, 3071)
# The token time at the second over that at the first is to be 1.
FLAT = (300, 3071)


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the time of a token at several positions, and of an image."""
    rows = measure_decode(device, args.rounds)
    return Report(rows, 'one token at a position of the sequence; ratios are of the time of an image to the first')


@torch.inference_mode()
def measure_decode(
    device: torch.device,
    rounds: int,
    batch_sizes: Sequence[int] = (1, 16),
    positions: Sequence[int] = POSITIONS,
    **model_args: Any,
) -> list[dict[str, Any]]:
    """Measure the time of a token at several positions, and the time of a whole image from it.

    Args:
        rounds: In each, every model takes a token at every position.
        batch_sizes: Images decoded together.
        positions: Places in the sequence, ascending, the first and the last of it included for the time of an image.
        model_args: Of the models, beside the paper's L = 24 and d = 256.

    Returns:
        A row for each batch size and model: `name`; `token_ms` by position; `image_seconds`, the trapezoid sum of that
        over the sequence, for the batch; `ratio`, that of the Transformer over it in the same round, above 1 is faster;
        `flatness`, the token time at FLAT[1] over that at FLAT[0] in the same round, or None if they are not measured;
        `state_bytes` of one image. Figures are medians over the rounds; `ratio_quartiles` and `flatness_quartiles` come
        with them.
    """
    models = {name: create_decoder(name, **model_args).to(device).eval() for name in MODELS}
    rows = []
    for batch in batch_sizes:
        states = {name: model.session(batch).state for name, model in models.items()}
        tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        # Every model pays for as many resets, however many positions its state has.
        resets = max(len(positions_of(state)) for state in states.values())
        calls: dict[tuple[str, int], Callable[[], object]] = {}
        for name, state in states.items():
            fill_state(state)
            step = Session(models[name], state).step
            calls |= {(name, place): partial(take_token, step, tokens, state, place, resets) for place in positions}
        seconds = time_rounds(list(calls.values()), device, rounds, progress=show_progress())
        found = dict(zip(calls, seconds, strict=True))
        by_model = {name: {place: found[name, place] for place in positions} for name in models}
        first = _image_rounds(by_model[MODELS[0]])
        for name, token in by_model.items():
            size = states[name].num_bytes() // batch
            rows.append({'batch_size': batch, 'name': name, 'state_bytes': size, **_figures(token, first)})
    return rows


def _image_rounds(token: dict[int, list[float]]) -> list[float]:
    """Return the seconds of an image in every round, from those of a token by position."""
    return [integrate(list(token), each) for each in zip(*token.values(), strict=True)]


def _figures(token: dict[int, list[float]], first: list[float]) -> dict[str, Any]:
    """Return the figures of a model.

    Args:
        token: Seconds in every round of a token, by position.
        first: Seconds in every round of an image with the Transformer.
    """
    images = _image_rounds(token)
    ratio = compare_rounds(images, first)
    flat = compare_rounds(token[FLAT[0]], token[FLAT[1]]) if set(FLAT) <= set(token) else None
    return {
        'token_ms': {place: 1e3 * median(each) for place, each in token.items()},
        'image_seconds': median(images),
        'ratio': ratio.ratio,
        'ratio_quartiles': ratio.quartiles,
        'flatness': flat and flat.ratio,
        'flatness_quartiles': flat and flat.quartiles,
    }


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
    """Return the tensors of a state that count tokens."""
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
    """Return the time of all tokens, from that of some, by trapezoids; that at both ends of the sequence must be known.

    Raises:
        ValueError: there are fewer than two positions, or they do not ascend from 0.
    """
    if len(positions) < 2 or positions[0] != 0 or sorted(set(positions)) != list(positions):
        raise ValueError(f'expected ascending positions from 0, two or more, got {list(positions)}')
    y, x = torch.tensor(seconds, dtype=torch.float64), torch.tensor(positions, dtype=torch.float64)
    # A sequence has a token more than steps between its first and its last position.
    return torch.trapezoid(y, x).item() * (positions[-1] + 1) / positions[-1]
