"""Time operations next to FlexAttention and, where it is installed, the linear attention of flash-linear-attention.

python -m tools.gpu_report.peers --json FILE

A batch of 256 in bfloat16, forward and training; ratios are to fused attention without a bias, as torch dispatches it.
FlexAttention (compiled) has a learned bias for each pair of tokens next to AFT-full, the window of 11 x 11 next to
AFT-conv, and the causal window of 256 next to AFT-local. Linear attention is `chunk_linear_attn` of
flash-linear-attention, causal, without normalisation.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from aft_vision_cli.commandline import CommandParser, run_command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--json', type=Path, required=True, metavar='FILE', help='where to write the measurements')
    parser.add_argument('--rounds', type=int, default=10, help='(default: 10)')
    parser.add_argument('--dry-run', action='store_true', help='tiny shapes on a CPU, nothing compiled')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from aft_vision.files import write_json
from tools.benchmark.compare import DIRECTIONS, Candidate, Prepared, compare, draw
from tools.benchmark.ops import KERNEL_SIZE, Operation, Size, draw_qkv, grid_of
from tools.benchmark.printer import format_rows

WINDOW = 256
PAIRS, PLANAR, CAUSAL = 'a bias for each pair', 'a window of 11 x 11', 'causal, a window of 256'
# (B, T, D), and heads of attention.
SHAPES = {PAIRS: ((256, 197, 384), 6), PLANAR: ((256, 196, 384), 6), CAUSAL: ((256, 3072, 256), 2)}
TINY = dict.fromkeys(SHAPES, ((2, 16, 32), 2))


def main(argv: Sequence[str] | None = None) -> None:
    """Write the measurements after each group and direction.

    Raises:
        ValueError: there is no GPU.
    """
    args = parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        raise ValueError('nothing was measured: there is no GPU that torch can use')
    device = torch.device('cpu' if args.dry_run else 'cuda')
    rows: list[dict[str, Any]] = []
    for group, (shape, heads) in (TINY if args.dry_run else SHAPES).items():
        candidates = make_candidates(group, shape, heads, device)
        for direction in DIRECTIONS:
            found = compare(candidates, device, args.rounds, directions=[direction], memory=False)
            rows += [{'group': group, 'shape': shape, **row} for row in found]
            write_json(args.json, {'rows': rows})
    print(format_rows(rows))


def make_candidates(group: str, shape: Size, heads: int, device: torch.device) -> list[Candidate]:
    """Return the alternatives of a group; the first is what the others are compared with."""
    _, tokens, dim = shape
    make = partial(Operation, shape=shape, heads=heads)
    operations = {
        PAIRS: [make('aft_full', bias=(tokens, tokens))],
        PLANAR: [make('aft_conv', bias=(count, KERNEL_SIZE, KERNEL_SIZE)) for count in (dim // 24 or 1, dim)],
        CAUSAL: [make('aft_local_causal', bias=(tokens, min(WINDOW, tokens))), make('aft_simple_causal')],
    }[group]
    calls = {operations[0].attention_title: operations[0].attention} | {each.title: each.own for each in operations}
    found = [Candidate(name, partial(call, torch.bfloat16, device)) for name, call in calls.items()]
    found.append(Candidate('FlexAttention', partial(prepare_flex, group, shape, heads, device)))
    if group == CAUSAL:
        found.append(Candidate('linear attention', partial(prepare_linear, shape, heads, device)))
    return found


def prepare_flex(group: str, shape: Size, heads: int, device: torch.device, training: bool) -> Prepared:
    """Return FlexAttention with the bias or the window of a group, compiled on a GPU."""
    inputs, tokens = draw_qkv(shape, torch.bfloat16, device, training), shape[1]
    width, near = grid_of(tokens)[1], KERNEL_SIZE // 2
    bias = (0.1 * draw(tokens, tokens, seed=3)).to(device).requires_grad_(training)

    def is_near(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return ((t // width - s // width).abs() <= near) & ((t % width - s % width).abs() <= near)

    def is_before(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s <= t) & (t - s < WINDOW)

    attend = flex_attention if device.type == 'cpu' else torch.compile(flex_attention, dynamic=False)
    if group == PAIRS:
        attend = partial(attend, score_mod=lambda score, b, h, t, s: score + bias[t, s])
    else:
        inside = is_near if group == PLANAR else is_before
        attend = partial(attend, block_mask=create_block_mask(inside, None, None, tokens, tokens, device=device.type))

    def run() -> Tensor:
        q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in inputs)
        return attend(q, k, v).transpose(1, 2).flatten(2)

    return Prepared(run, [*inputs, bias] if group == PAIRS else inputs)


def prepare_linear(shape: Size, heads: int, device: torch.device, training: bool) -> Prepared:
    """Return linear attention of flash-linear-attention, whose heads come after the tokens."""
    attend = import_module('fla.ops.linear_attn').chunk_linear_attn
    inputs = draw_qkv(shape, torch.bfloat16, device, training)

    def run() -> Tensor:
        q, k, v = (x.unflatten(2, (heads, -1)) for x in inputs)
        return attend(q, k, v, normalize=False)[0].flatten(2)

    return Prepared(run, inputs)


if __name__ == '__main__':
    run_command(main)
