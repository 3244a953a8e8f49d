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
        positions: Places in the sequence, ascending, from its first to its last.
        model_args: Of the models, besides the paper's L = 24 and d = 256.

    Returns:
        A row for each batch size and model: `name`; `token_ms` by position; `image_seconds`, the trapezoid sum of that
        over the sequence, for the batch; `ratio`, that of the Transformer over it in the same round, above 1 is faster;
        `flatness`, the token time at FLAT[1] over that at FLAT[0] in the same round, or None if they are not measured;
        `state_bytes` of one image. Figures are medians over the rounds; `ratio_quartiles` and `flatness_quartiles` come
        with them.
    """
    models = {name: create_decoder(name, **model_args).to(device).eval() for name in MODELS}
    rows: list[dict[str, Any]] = []
    for batch in batch_sizes:
        states = {name: model.session(batch).state for name, model in models.items()}
        tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        calls: list[Callable[[], object]] = []
        for name, state in states.items():
            fill_state(state)
            state, counts = share_positions(state)
            step = Session(models[name], state).step
            calls += [partial(take_token, step, tokens, counts, place) for place in positions]
        found = torch.tensor(time_rounds(calls, device, rounds, progress=True), dtype=torch.float64)
        seconds = found.view(len(models), len(positions), rounds)
        # A sequence has a token more than steps between its first and its last position.
        tokens_per_step = (positions[-1] + 1) / positions[-1]
        images = (tokens_per_step * torch.trapezoid(seconds, torch.tensor(positions), dim=1)).tolist()
        for (name, state), token, image in zip(states.items(), seconds.tolist(), images, strict=True):
            by_position = dict(zip(positions, token, strict=True))
            ratio = compare_rounds(image, images[0])
            flat = compare_rounds(*(by_position[place] for place in FLAT)) if set(FLAT) <= set(positions) else None
            rows.append(
                {
                    'batch_size': batch,
                    'name': name,
                    'state_bytes': state.num_bytes() // batch,
                    'token_ms': {place: 1e3 * median(each) for place, each in by_position.items()},
                    'image_seconds': median(image),
                    'ratio': ratio.ratio,
                    'ratio_quartiles': ratio.quartiles,
                    'flatness': flat and flat.ratio,
                    'flatness_quartiles': flat and flat.quartiles,
                }
            )
    return rows


def take_token(step: Callable[..., Any], tokens: Tensor, counts: Tensor, position: int) -> Tensor:
    """Take one token at a position of the sequence, whatever has been taken before."""
    counts.fill_(position)
    return step(tokens if position else None)


def share_positions(state: DecoderState) -> tuple[DecoderState, Tensor]:
    """Return a state with its counts of tokens in one tensor, and that tensor.

    Some states count in every layer. One tensor is reset in one call, so that every model pays for as many.
    """
    counted = [hasattr(layer, 'position') for layer in state.layers]
    counts = state.position.repeat(1 + sum(counted))
    first, *others = counts
    places = iter(others)
    layers = (
        layer._replace(position=next(places)) if counts_tokens else layer
        for layer, counts_tokens in zip(state.layers, counted, strict=True)
    )
    return DecoderState(first, tuple(layers)), counts


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
