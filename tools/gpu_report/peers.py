"""Time operations next to FlexAttention and, where it is installed, the linear attention of flash-linear-attention.

python -m tools.gpu_report.peers --json FILE

A batch of 256 in bfloat16, forward and training; ratios are to fused attention without a bias, as torch dispatches it.
FlexAttention (compiled) has a learned bias for each pair of tokens next to AFT-full, the window of 11 x 11 next to
AFT-conv, and the causal window of 256 next to AFT-local. Linear attention is `chunk_linear_attn` of
flash-linear-attention, causal, without normalisation.
"""

import argparse
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tools.arguments import CommandParser
from tools.results import format_table


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--json', type=Path, required=True, metavar='FILE', help='where to write the figures')
    parser.add_argument('--rounds', type=int, default=10, help='(default: 10)')
    parser.add_argument('--dry-run', action='store_true', help='tiny shapes on a CPU, nothing compiled')
    return parser.parse_args(argv)


# Before the imports that take seconds: --help and a mistyped option are answered at once.
if __name__ == '__main__':
    parse_args()

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from aft_vision import ops
from aft_vision.commandline import run_command
from aft_vision.timing import time_interleaved

KERNEL, WINDOW = 11, 256
# Characters of an error that are printed.
WIDEST = 48
# (B, T, D), heads of attention, and the grid.
SHAPES = {
    'a bias for each pair': ((256, 197, 384), 6, None),
    'a window of 11 x 11': ((256, 196, 384), 6, (14, 14)),
    'causal, a window of 256': ((256, 3072, 256), 2, None),
}
TINY = {name: ((2, 16, 32), 2, grid and (4, 4)) for name, (_, _, grid) in SHAPES.items()}


class Form(NamedTuple):
    """One of the alternatives: a function of q, k, v (B, T, D) and its weights; k may have fewer channels."""

    operate: Callable[..., Tensor]
    weights: Sequence[Tensor] = ()
    key_channels: int | None = None

    def call(self, shape: tuple[int, int, int], training: bool, device: torch.device) -> Callable[[], object]:
        """Return the call that is timed: a forward, or with all gradients."""
        widths = (shape[2], self.key_channels or shape[2], shape[2])
        qkv = [torch.randn(*shape[:2], n, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(widths)]
        leaves = [*(x.to(device, torch.bfloat16) for x in qkv), *self.weights]
        leaves = [x.detach().requires_grad_(training) for x in leaves]
        if not training:
            return lambda: self.operate(*leaves)
        grad = torch.ones(shape, dtype=torch.bfloat16, device=device)
        return lambda: torch.autograd.grad(self.operate(*leaves), leaves, grad)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the figures after each group and direction.

    Raises:
        ValueError: there is no GPU.
    """
    args = parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        raise ValueError('nothing was measured: there is no GPU that torch can use')
    device = torch.device('cpu' if args.dry_run else 'cuda')
    rows: list[dict[str, Any]] = []
    for group, (shape, heads, grid) in (TINY if args.dry_run else SHAPES).items():
        forms = dict(make_forms(group, shape, heads, grid, device))
        for training in (False, True):
            place = {'group': group, 'shape': shape, 'direction': 'training' if training else 'forward'}
            calls = {name: form.call(shape, training, device) for name, form in forms.items()}
            rows += [{**place, **row} for row in measure(calls, device, args.rounds)]
            args.json.write_text(json.dumps({'rows': rows}, indent=2) + '\n')
    print(format_table(['', 'direction', 'group', 'ms', 'ratio'], *map(show, rows)))


def make_forms(
    group: str, shape: tuple[int, int, int], heads: int, grid: tuple[int, int] | None, device: torch.device
) -> Iterator[tuple[str, Form]]:
    """Yield the alternatives of a group by name; the first is what they are compared with."""
    _, T, D = shape
    window, causal = min(WINDOW, T), group.startswith('causal')
    flex = flex_attention if device.type == 'cpu' else torch.compile(flex_attention, dynamic=False)

    def draw(*size: int) -> list[Tensor]:
        return [0.1 * torch.randn(size, generator=torch.Generator().manual_seed(1)).to(device)]

    def masked(inside: Callable[..., Tensor]) -> Form:
        block_mask = create_block_mask(inside, None, None, T, T, device=device.type)
        return Form(split(heads, lambda q, k, v: flex(q, k, v, block_mask=block_mask)))

    yield 'SDPA', Form(split(heads, partial(F.scaled_dot_product_attention, is_causal=causal)))
    if grid is not None:
        near, width = KERNEL // 2, grid[1]

        def is_near(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            return ((t // width - s // width).abs() <= near) & ((t % width - s % width).abs() <= near)

        for h in (D // 24 or 1, D):
            yield (
                f'AFT-conv, h={h}',
                Form(lambda q, k, v, w: ops.aft_conv(q, k, v, w, grid), draw(h, KERNEL, KERNEL), h),
            )
        yield 'FlexAttention', masked(is_near)
    elif causal:
        yield f'AFT-local, s={window}', Form(ops.aft_local_causal, draw(T, window))
        yield 'AFT-simple', Form(ops.aft_simple_causal)
        yield 'FlexAttention', masked(lambda b, h, t, s: (s <= t) & (t - s < window))
        yield 'linear attention', Form(partial(linear_attention, heads))
    else:
        yield 'AFT-full', Form(ops.aft_full, draw(T, T))
        biased = split(heads, lambda q, k, v, w: flex(q, k, v, score_mod=lambda score, b, h, t, s: score + w[t, s]))
        yield 'FlexAttention', Form(biased, draw(T, T))


def show(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row."""
    figures = [row['error'][:WIDEST], '-'] if 'error' in row else [f'{row["milliseconds"]:.3f}', f'{row["ratio"]:.2f}']
    return [row['name'], row['direction'], row['group'], *figures]


def split(heads: int, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return attention of q, k and v (B, T, D), with the heads taken from the channels and put back."""

    def run(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        return attend(q, k, v, *weights).transpose(1, 2).flatten(2)

    return run


def linear_attention(heads: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return linear attention of flash-linear-attention, whose heads come after the tokens."""
    library = importlib.import_module('fla.ops.linear_attn')
    q, k, v = (x.unflatten(2, (heads, -1)) for x in (q, k, v))
    return library.chunk_linear_attn(q, k, v, normalize=False)[0].flatten(2)


def measure(calls: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each call: its time and the ratio to the first, or why there is none."""
    rows, running = [], {}
    for name, call in calls.items():
        try:
            call()
        # A package that is not installed, or inputs that it does not take: the others are measured all the same.
        except Exception as error:
            rows.append({'name': name, 'error': f'{type(error).__name__}: {error}'.splitlines()[0]})
        else:
            running[name] = call
    timings = time_interleaved([*running.values()], device, rounds)
    figures = [{'milliseconds': 1e3 * timing.seconds, 'ratio': timing.ratio} for timing in timings]
    return [{'name': name, **found} for name, found in zip(running, figures, strict=True)] + rows


if __name__ == '__main__':
    run_command(main)
