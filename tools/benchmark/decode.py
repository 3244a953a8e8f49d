"""Decoding one token at a time: AFT's state of constant size against a cache of keys and values."""

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from aft_vision.models import DecoderState, Session, create_decoder
from aft_vision.timing import compare_rounds, time_rounds
from tools.benchmark.printer import Report

# The Transformer, which the others are compared to, comes first.
MODELS = ('transformer_pixel', 'aft_local_pixel', 'aft_simple_pixel')
# The token time at the last over that at the second is to be 1.
POSITIONS = (0, 300, 768, 1536, 2304, 3071)
# Images decoded together.
BATCHES = (1, 16)


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the time of a token at several positions, and of an image."""
    rows = measure_decode(device, args.rounds)
    return Report(rows, 'one token at a position of the sequence; ratios are of the time of an image to the first')


@torch.inference_mode()
def measure_decode(device: torch.device, rounds: int, **model_args: Any) -> list[dict[str, Any]]:
    """Measure the time of a token at several positions, and the time of a whole image from it.

    Args:
        rounds: In each, every model takes a token at every position.
        model_args: Arguments of the models, besides the paper's L = 24 and d = 256.

    Returns:
        A row for each batch size and model: `image_seconds` of the batch is the trapezoid sum of the times of a token,
        `ratio` the Transformer's over it, `flatness` the time of a token at the last position over that at the second,
        both within a round, and `state_bytes` the bytes of one image. Times are medians over the rounds.
    """
    models = {name: create_decoder(name, **model_args).to(device).eval() for name in MODELS}
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        calls: list[Callable[[], object]] = []
        for name, model in models.items():
            state = model.session(batch).state
            fill_state(state)
            rows.append({'batch_size': batch, 'name': name, 'state_bytes': state.num_bytes() // batch})
            state, counts = share_positions(state)
            calls += [partial(step_at, Session(model, state).step, tokens, counts, position) for position in POSITIONS]
        times = torch.tensor(time_rounds(calls, device, rounds, progress=True), dtype=torch.float64)
        seconds = times.view(len(models), len(POSITIONS), rounds)
        # A sequence has a token more than steps between its first and its last position.
        tokens_per_step = (POSITIONS[-1] + 1) / POSITIONS[-1]
        images = (tokens_per_step * torch.trapezoid(seconds, torch.tensor(POSITIONS), dim=1)).tolist()
        for row, token, image in zip(rows[-len(models) :], seconds.tolist(), images, strict=True):
            row |= {'token_ms': {position: 1e3 * median(each) for position, each in zip(POSITIONS, token, strict=True)}}
            ratio, flat = compare_rounds(image, images[0]), compare_rounds(token[1], token[-1])
            row |= {'image_seconds': ratio.seconds, 'ratio': ratio.ratio, 'ratio_quartiles': ratio.quartiles}
            row |= {'flatness': flat.ratio, 'flatness_quartiles': flat.quartiles}
    return rows


def step_at(step: Callable[..., Any], tokens: Tensor, counts: Tensor, position: int) -> Tensor:
    """Take one token at a position of the sequence, whatever has been taken before."""
    counts.fill_(position)
    return step(tokens if position else None)


def share_positions(state: DecoderState) -> tuple[DecoderState, Tensor]:
    """Return a state with its counts of tokens in one tensor, and that tensor.

    Some states count in every layer. One tensor is reset in one call, so that every model pays for as many.
    """
    leaves, spec = tree_flatten(state)
    counts = state.position.repeat(sum(x.dtype == torch.int64 for x in leaves))
    values = iter(counts)
    return tree_unflatten([next(values) if x.dtype == torch.int64 else x for x in leaves], spec), counts


def fill_state(state: DecoderState) -> None:
    """Fill a state with ordinary numbers.

    Memory that has never been written would all be one page of zeros, and its reading free.
    """
    for x in tree_leaves(state):
        if x.is_floating_point():
            x.uniform_(0.5, 1.5)
