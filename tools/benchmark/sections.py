"""What each section of the benchmark measures, and how it shows that."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from tools.benchmark import (
    classifiers,
    conversion,
    curves,
    decode,
    fastformer,
    goals,
    layers,
    loaders,
    onehot,
    operations,
    pixels,
    scaling,
    tables,
)
from tools.benchmark import sequences as sequence_tables
from tools.benchmark.columns import format_comparison
from tools.benchmark.goal_table import make_goals
from tools.benchmark.paper import TABLES
from tools.benchmark.paper_sequences import SEQUENCE_TABLES
from tools.machine import free_memory

# Of the memory that is free, what a call may take unless it is said.
MOST_MEMORY = 0.5


class Report(NamedTuple):
    """What was measured.

    Args:
        figures: To be written as JSON; `rows` at least.
        text: To be printed.
        draw: Writes the picture of it to a file, where there is one.
    """

    figures: dict[str, Any]
    text: str
    draw: Callable[[Path], None] | None = None


def run_operations(args: argparse.Namespace, device: torch.device) -> Report:
    """Operations against attention."""
    rows = operations.measure_operations(
        operations.make_groups(args.batch_size), device, args.dtype, args.rounds, args.compile, show_progress()
    )
    return Report({'rows': rows}, _by_shape('q, k and v of', rows))


def run_layers(args: argparse.Namespace, device: torch.device) -> Report:
    """Layers against attention."""
    rows = layers.measure_layers(
        layers.make_layer_groups(args.batch_size), device, args.dtype, args.rounds, args.compile, show_progress()
    )
    return Report({'rows': rows}, _by_shape('tokens of', rows))


def run_classifiers(args: argparse.Namespace, device: torch.device) -> Report:
    """Classifiers of timm at several sizes."""
    rows = classifiers.measure_classifiers(
        args.models or classifiers.MODELS,
        args.sizes or classifiers.SIZES,
        args.batch_size,
        device,
        args.dtype,
        args.rounds,
        training=args.training,
        compiled=args.compile,
        most_bytes=most_bytes(args, device),
        progress=show_progress(),
    )
    head = (
        f'classifiers, batch of {args.batch_size}; ratios of images/s to {classifiers.BASELINE} of that size and form'
    )
    return Report({'rows': rows}, f'{head}\n{classifiers.format_classifiers(rows)}')


def run_scaling(args: argparse.Namespace, device: torch.device) -> Report:
    """Operations against the number of tokens."""
    limit = scaling.Limit(args.most_seconds, most_bytes(args, device))
    rows, stops = scaling.measure_scaling(
        args.scaling or scaling.TOKENS, limit, device, args.dtype, args.rounds, args.training, show_progress()
    )
    fits = curves.fit_scaling(rows)
    direction = 'forward and backward' if args.training else 'forward'
    head = (
        f'{direction}, batch of 1, d = {scaling.DIM}, {scaling.HEADS} heads of attention; exponents of the upper half'
    )
    text = f'{head}\n{curves.format_scaling(rows, fits, stops)}'
    return Report({'rows': rows, 'fits': fits, 'stops': stops}, text, partial(curves.plot_scaling, rows, fits, head))


def run_fastformer(args: argparse.Namespace, device: torch.device) -> Report:
    """Fastformer and other text encoders against the number of tokens."""
    size = fastformer.Size(args.dim, args.heads, args.depth)
    figures = fastformer.measure_fastformer(
        args.fastformer or scaling.TOKENS,
        args.total_tokens,
        scaling.Limit(args.most_seconds, most_bytes(args, device)),
        device,
        args.dtype,
        args.rounds,
        models=args.models,
        size=size,
        progress=show_progress(),
    )
    head = (
        f'{size.depth} layers, width {size.dim}, {size.heads} heads, {args.total_tokens} tokens in a batch; figures '
        'are of one text of the batch, exponents of the upper half'
    )
    text = f'{head}\n{fastformer.format_fastformer(**figures)}'
    return Report(figures, text, partial(fastformer.plot_fastformer, figures['rows'], figures['fits']))


def run_conversion(args: argparse.Namespace, device: torch.device) -> Report:
    """Latency and memory of predicting conversions."""
    setting = conversion.Setting(args.ads, args.text_tokens, args.dim, args.heads, args.depth)
    rows = conversion.measure_conversion(
        args.conversion or conversion.BEHAVIORS,
        setting,
        device,
        args.dtype,
        args.rounds,
        models=args.models,
        progress=show_progress(),
    )
    head = (
        f'one user with {setting.ads} ads, {setting.text_tokens} tokens a text, {setting.depth} layers, width '
        f'{setting.dim}, {setting.heads} heads; ratios are of the time of the first encoder to it'
    )
    return Report({'rows': rows}, f'{head}\n{conversion.format_conversion(rows)}')


def run_table(args: argparse.Namespace, device: torch.device) -> Report:
    """A table of the paper's image models."""
    table = TABLES[args.table]
    size = args.img_size or table.img_size
    rows = tables.measure_table(
        args.table, args.batch_size, size, device, args.dtype, args.rounds, args.compile, show_progress()
    )
    head = (
        f'AFT Table {args.table}: inference at {size} px, batch of {args.batch_size}; ratios to the DeiT of that size'
    )
    return Report({'rows': rows}, f'{head}\n{tables.format_table(args.table, rows)}')


def run_sequences(args: argparse.Namespace, device: torch.device) -> Report:
    """A table of the paper's pixel or character models."""
    rows = sequence_tables.measure_sequences(
        args.table,
        args.batch_size,
        args.depth,
        most_bytes(args, device),
        device,
        args.dtype,
        args.rounds,
        compiled=args.compile,
        progress=show_progress(),
    )
    depth = 'the depth of the row'
    if args.depth is not None:
        depth = f'every model cut to {args.depth} block{"s" * (args.depth > 1)}'
    head = (
        f'AFT Table {args.table}: training iterations, batch of {args.batch_size}, {depth}, '
        f'T = {SEQUENCE_TABLES[args.table].tokens}; ratios to the Transformer of that width'
    )
    return Report({'rows': rows}, f'{head}\n{sequence_tables.format_sequences(args.table, rows)}')


def run_memory(args: argparse.Namespace, device: torch.device) -> Report:
    """Memory against pixels."""
    rows = pixels.measure_pixels(
        args.models or pixels.MODELS,
        args.sizes or pixels.SIZES,
        args.batch_size,
        args.training,
        device,
        args.dtype,
        progress=show_progress(),
    )
    fits = pixels.fit_pixels(rows)
    head = f'dense features, batch of {args.batch_size}, beyond weights and images'
    text = f'{head}\n{pixels.format_pixels(rows, fits)}'
    return Report({'rows': rows, 'fits': fits}, text, partial(pixels.plot_pixels, rows, fits))


def run_onehot(args: argparse.Namespace, device: torch.device) -> Report:
    """The times of the one-offset operation."""
    rows = onehot.measure_onehot(device, args.dtype, args.rounds, onehot.SHAPES, progress=show_progress())
    head = f'grid {onehot.GRID}, kernel {onehot.KERNEL_SIZE}; ratios of the time of the convolution to that of the form'
    return Report({'rows': rows}, f'{head}\n{onehot.format_onehot(rows)}')


def run_goals(args: argparse.Namespace, device: torch.device) -> Report:
    """The promises and what is measured of them, each on its own device."""
    # They take minutes: each is there as it comes, even if the report is not.
    rows = goals.measure_goals(
        chosen_goals(args),
        args.rounds,
        show_progress(),
        lambda row: tqdm.write(goals.format_goal(row), file=sys.stderr),
    )
    return Report({'rows': rows}, goals.format_goals(rows))


def goal_devices(args: argparse.Namespace) -> list[torch.device]:
    """The devices that the chosen goals are measured on; the CPU where all are open."""
    names = dict.fromkeys(goal.device for goal in chosen_goals(args) if goal.measure is not None)
    return [torch.device(name) for name in names or ('cpu',)]


def chosen_goals(args: argparse.Namespace) -> list[goals.Goal]:
    """The goals of --rows, or all.

    Raises:
        ValueError: there is no such row.
    """
    table = make_goals()
    known = {goal.row for goal in table}
    if unknown := set(args.rows or ()) - known:
        raise ValueError(f'expected rows of the goals, {min(known)} to {max(known)}, got {sorted(unknown)}')
    return [goal for goal in table if args.rows is None or goal.row in args.rows]


def run_decode(args: argparse.Namespace, device: torch.device) -> Report:
    """The times of decoding."""
    rows = decode.measure_decode(device, args.rounds, compiled=args.compile, progress=show_progress())
    head = 'one token at a position of the sequence; ratios are of the time of an image with the Transformer to it'
    return Report({'rows': rows}, f'{head}\n{decode.format_decode(rows)}')


def run_loader(args: argparse.Namespace, device: torch.device) -> Report:
    """The throughput of loaders."""
    rows = loaders.time_loaders(
        args.loader, args.augment, args.img_size, args.batch_size, args.workers, str(device), args.rounds
    )
    return Report({'rows': rows}, loaders.format_loaders(rows))


def most_bytes(args: argparse.Namespace, device: torch.device) -> float:
    """What a call may take: --most-gib, or half of what is free on the device."""
    if args.most_gib is not None:
        return args.most_gib * 2**30
    return MOST_MEMORY * (free_memory(device) or 8 * 2**30)


def show_progress() -> bool:
    """Whether somebody looks at standard error."""
    return sys.stderr.isatty()


def _by_shape(words: str, rows: Sequence[dict[str, Any]]) -> str:
    lines = ['ratios to fused attention, which comes first; kept: for the backward, beside what gets gradients']
    for shape in dict.fromkeys(row['shape'] for row in rows):
        own = [row for row in rows if row['shape'] == shape]
        lines += [f'{words} {shape}', format_comparison(own, indent='  ')]
    return '\n'.join(lines)
