"""Decoding one token at a time: AFT's state of constant size against a cache of keys and values."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aft_vision import ops
from aft_vision.layers import KeyValueState
from aft_vision.models import DecoderState, create_decoder
from aft_vision.timing import time_interleaved

# The Transformer, which the others are compared to, comes first.
MODELS = ('transformer_pixel', 'aft_local_pixel', 'aft_simple_pixel')
POSITIONS = (0, 300, 768, 1536, 2304, 3071)
# The token time at the second over that at the first is to be 1.
FLAT = (300, 3071)


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
        compiled: Compile the step.
        model_args: Of the models, beside the paper's L = 24 and d = 256.

    Returns:
        A row for each batch size and model: `token_ms` by position; `image_seconds`, the trapezoid sum of that over the
        sequence, for the batch; `ratio`, that of the Transformer over it, above 1 is faster; `flatness`, the token time
        at FLAT[1] over that at FLAT[0], or None if they are not measured; `state_bytes` of one image.
    """
    models = {name: create_decoder(name, **model_args).to(device).eval() for name in MODELS}
    steps: dict[str, Callable[..., Any]] = {
        name: torch.compile(model.step, fullgraph=True) if compiled else model.step for name, model in models.items()
    }
    rows = []
    for batch in batch_sizes:
        tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        calls: dict[tuple[str, int], Callable[[], object]] = {}
        sizes = {}
        for name, model in models.items():
            state = model.init_state(batch)
            sizes[name] = state.num_bytes() // batch
            fill_state(state, model)
            for position in positions:
                calls[name, position] = partial(take_token, steps[name], tokens, state, position)
        found = time_interleaved(list(calls.values()), device, rounds, progress=progress)
        seconds = {key: timing.seconds for key, timing in zip(calls, found, strict=True)}
        images = {name: integrate(positions, [seconds[name, place] for place in positions]) for name in models}
        rows += [
            {
                'batch_size': batch,
                'model': name,
                'token_ms': {place: 1e3 * seconds[name, place] for place in positions},
                'image_seconds': images[name],
                'ratio': images[MODELS[0]] / images[name],
                'flatness': seconds[name, FLAT[1]] / seconds[name, FLAT[0]] if set(FLAT) <= set(positions) else None,
                'state_bytes': sizes[name],
            }
            for name in models
        ]
    return rows


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
    positions = list(rows[0]['token_ms'])
    head = ' '.join(f'{"t=" + str(place):>8}' for place in positions)
    lines = [f'{"":>5} {"ms per token":18} {head} {"last/300":>8} {"image s":>8} {"ratio":>6} {"state KiB/image":>15}']
    for row in rows:
        times = ' '.join(f'{row["token_ms"][place]:8.2f}' for place in positions)
        flat = '-' if row['flatness'] is None else f'{row["flatness"]:.3f}'
        batch = f'B={row["batch_size"]}'
        lines.append(
            f'{batch:>5} {row["model"]:18} {times} {flat:>8} {row["image_seconds"]:8.1f} '
            f'{row["ratio"]:6.2f} {row["state_bytes"] / 1024:15.0f}'
        )
    return '\n'.join(lines)
