"""Decoding one token at a time: AFT's state of constant size against a cache of keys and values."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aft_vision import ops
from aft_vision.layers import KeyValueState
from aft_vision.models import DecoderState, create_decoder
from aft_vision.models.autoregressive import AFTDecoder
from aft_vision.timing import time_interleaved
from tools.benchmark.compare import describe_error, fresh_compiler

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
        it, above 1 is faster, None if that could not be compiled; `flatness`, the token time at FLAT[1] over that at
        FLAT[0], or None if they are not measured; `state_bytes` of one image; `error`, None, or all there is of a step
        that could not be compiled.
    """
    models = {name: create_decoder(name, **model_args).to(device).eval() for name in MODELS}
    rows = []
    for batch in batch_sizes:
        states = {name: model.init_state(batch) for name, model in models.items()}
        for name, state in states.items():
            fill_state(state, models[name])
        for form in ('eager', 'compiled')[: 1 + compiled]:
            with fresh_compiler() if form == 'compiled' else contextlib.nullcontext():
                rows += _measure_form(form, models, states, batch, positions, device, rounds, progress)
    return rows


def _measure_form(
    form: str,
    models: dict[str, AFTDecoder],
    states: dict[str, DecoderState],
    batch: int,
    positions: Sequence[int],
    device: torch.device,
    rounds: int,
    progress: bool,
) -> list[dict[str, Any]]:
    tokens = torch.zeros(batch, dtype=torch.int64, device=device)
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    errors: dict[str, str] = {}
    for name, model in models.items():
        own: dict[tuple[str, int], Callable[[], object]] = {}
        try:
            step = torch.compile(model.step, fullgraph=True) if form == 'compiled' else model.step
            for place in positions:
                part = filled_part(states[name], place)
                own[name, place] = partial(take_token, step, tokens, part, place)
                # Compiles, for the first token, for a length, and for any length.
                own[name, place]()
        # Whatever the compiler raises: the others are measured all the same.
        except Exception as error:
            if form == 'eager':
                raise
            errors[name] = describe_error(error)
        else:
            calls |= own
    found = time_interleaved(list(calls.values()), device, rounds, progress=progress) if calls else []
    seconds = {key: timing.seconds for key, timing in zip(calls, found, strict=True)}
    rows: list[dict[str, Any]] = []
    images: dict[str, float] = {}
    for name, state in states.items():
        row = {'batch_size': batch, 'form': form, 'model': name, 'state_bytes': state.num_bytes() // batch}
        if name in errors:
            rows.append({**row, 'error': errors[name]})
            continue
        images[name] = integrate(positions, [seconds[name, place] for place in positions])
        flat = seconds[name, FLAT[1]] / seconds[name, FLAT[0]] if set(FLAT) <= set(positions) else None
        figures = {
            'token_ms': {place: 1e3 * seconds[name, place] for place in positions},
            'image_seconds': images[name],
            'ratio': images[MODELS[0]] / images[name] if MODELS[0] in images else None,
            'flatness': flat,
            'error': None,
        }
        rows.append({**row, **figures})
    return rows


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


def take_token(step: Callable[..., Any], tokens: Tensor, state: DecoderState, position: int) -> Tensor:
    """Take one token at a position of the sequence, whatever has been taken before."""
    for place in positions_of(state):
        place.fill_(position)
    return step(tokens if position else None, state)[0]


def positions_of(state: DecoderState) -> list[Tensor]:
    """The tensors of a state that count tokens."""
    return [state.position, *(layer.position for layer in state.layers if hasattr(layer, 'position'))]


def fill_state(state: DecoderState, model: nn.Module) -> None:
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


def format_decode(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    positions = next((list(row['token_ms']) for row in rows if row['error'] is None), [])
    head = ' '.join(f'{"t=" + str(place):>8}' for place in positions)
    lines = [f'{"":>5} {"ms per token":27} {head} {"last/300":>8} {"image s":>8} {"ratio":>6} {"state KiB/image":>15}']
    for row in rows:
        batch, name = f'B={row["batch_size"]}', f'{row["model"]}{", compiled" * (row["form"] == "compiled")}'
        if row['error'] is not None:
            lines.append(f'{batch:>5} {name:27} failed: {row["error"][:100]}')
            continue
        times = ' '.join(f'{row["token_ms"][place]:8.2f}' for place in positions)
        flat = '-' if row['flatness'] is None else f'{row["flatness"]:.3f}'
        ratio = '-' if row['ratio'] is None else f'{row["ratio"]:.2f}'
        lines.append(
            f'{batch:>5} {name:27} {times} {flat:>8} {row["image_seconds"]:8.1f} '
            f'{ratio:>6} {row["state_bytes"] / 1024:15.0f}'
        )
    return '\n'.join(lines)
