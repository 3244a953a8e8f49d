"""The goals of this project in speed and memory: the figures, their floors and goals, and their verdicts."""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from tools.benchmark import figures, gpu
from tools.benchmark.compare import DIRECTIONS, Candidate, describe_error
from tools.benchmark.decode import measure_decode
from tools.benchmark.figures import Figure, against_attention, speed
from tools.benchmark.models import classifier
from tools.benchmark.ops import CPU, Operation, onehot_candidates, planar_layers
from tools.benchmark.printer import Report, format_rows
from tools.machine import describe_processor, has_bfloat16

TINY, SMALL, PEER = 'deit_tiny_patch16_224', 'deit_small_patch16_224', 'cpubone_b0_bfrobust'
FEW, PYRAMID = 'aft_conv_tiny_k11_h32', 'aft_pyramid_nano'
HALF = torch.bfloat16
# Rows of other runtimes, of peers, of loaders and of the trainer are measured only when --rows names them.
ASKED_ROWS = (22, 23, 24, 25, 26)


class Goal(NamedTuple):
    """One promise.

    Args:
        row: Of the table of goals; figures of one row belong together.
        floor, goal: Bounds of the figure; None where it is only reported.
        measure: Makes the figure, of a number of `rounds`.
        at_most: Whether less is better.
        needs: What it is measured on: 'cpu', 'bfloat16' (a CPU with its instructions), 'cuda', or the package of a
            runtime or a loader.
    """

    row: int
    what: str
    floor: float | None
    goal: float | None
    measure: Callable[..., Figure]
    at_most: bool = False
    needs: str = 'cpu'

    @property
    def is_open(self) -> bool:
        """Return whether what it is measured on is absent."""
        known = {'cpu': lambda: True, 'bfloat16': has_bfloat16, 'cuda': torch.cuda.is_available}
        return not (known[self.needs]() if self.needs in known else importlib.util.find_spec(self.needs))

    @property
    def device(self) -> str:
        """Return the kind of the device that it is measured on."""
        return 'cuda' if self.needs == 'cuda' else 'cpu'

    def verdict(self, value: float) -> str:
        """Return `goal`, `floor` or `below`, or `reported` without a floor."""
        for name, bound in (('goal', self.goal), ('floor', self.floor)):
            if bound is not None and ((value <= bound) if self.at_most else (value >= bound)):
                return name
        return 'reported' if self.floor is None else 'below'


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the chosen goals, each on its own device."""
    rows = measure_goals(choose(args.rows), args.rounds)
    return Report(rows, 'time of the alternative over ours; at most: ours over its')


def choose(rows: Sequence[int] | None) -> list[Goal]:
    """Return the goals of some rows; None is all but ASKED_ROWS.

    Raises:
        ValueError: there is no such row.
    """
    table = make_goals()
    known = {goal.row for goal in table}
    if unknown := set(rows or ()) - known:
        raise ValueError(f'expected rows of the goals, {min(known)} to {max(known)}, got {sorted(unknown)}')
    return [goal for goal in table if (goal.row not in ASKED_ROWS if rows is None else goal.row in rows)]


def devices(rows: Sequence[int] | None) -> list[torch.device]:
    """Return the devices that the chosen goals are measured on; the CPU where all are open."""
    names = dict.fromkeys(goal.device for goal in choose(rows) if not goal.is_open)
    return [torch.device(name) for name in names or ('cpu',)]


def measure_goals(goals: Sequence[Goal], rounds: int) -> list[dict[str, Any]]:
    """Measure every goal, and write each to standard error as it comes; one that fails ends nothing.

    Returns:
        A row for each: `row`, `what`, `floor`, `goal`, `at_most`, the fields of its Figure (`measured` is the value),
        the `processor`, `error` (why it failed), and `verdict`: that of the goal, `failed`, or `open` where what it
        needs is absent.
    """
    rows = []
    for goal in tqdm(goals, desc='goals', leave=False, disable=None):
        row: dict[str, Any] = {name: getattr(goal, name) for name in ('row', 'what', 'floor', 'goal', 'at_most')}
        try:
            if goal.is_open:
                row['verdict'] = 'open'
            else:
                figure = goal.measure(rounds=rounds)
                row |= {'measured': figure.value, **figure._asdict(), 'verdict': goal.verdict(figure.value)}
                row['processor'] = describe_processor(goal.device)
        # Whatever it is: the others are measured all the same.
        except Exception as problem:
            row |= {'error': describe_error(problem), 'verdict': 'failed'}
        rows.append(row)
        tqdm.write(format_rows(rows[-1:]).splitlines()[-1], file=sys.stderr)
    return rows


def make_goals() -> list[Goal]:
    """Return the table of goals."""
    parts = (_operations, _layers, _causal, _decoding, _models, _gpu, _single_images, _runtimes, _peers, _costs)
    return sorted((goal for part in parts for goal in part()), key=lambda goal: goal.row)


def _operations() -> Iterator[Goal]:
    full = Operation('aft_full', (32, 197, 384), 6, (197, 197))
    float32, bfloat16 = against_attention(full), against_attention(full, HALF)
    for row, direction, bounds, half_bounds in (
        (1, 'forward', (1.05, 1.35), (1.7, 2.3)),
        (2, 'training', (0.95, 1.2), (2.2, 2.7)),
    ):
        what = f'AFT-full op, T=197, against SDPA: {direction}'
        yield Goal(row, what, *bounds, partial(speed, float32, direction))
        yield Goal(row, f'{what}, bfloat16', *half_bounds, partial(speed, bfloat16, direction), needs='bfloat16')
    yield Goal(3, 'its peak memory, forward, over that of SDPA', 2.0, 1.5, partial(figures.memory, float32), True)
    yield Goal(3, 'its bytes kept for the backward over those of SDPA', 1.3, 1.0, partial(figures.kept, full), True)
    for direction in DIRECTIONS:
        what = f'one-hot op against the convolution: {direction}'
        yield Goal(
            16, what, 1.7, 3, partial(speed, lambda: onehot_candidates((8, 196, 384), 384, (14, 14))[:2], direction)
        )
    shape, kernel = (1, 4, 192), (11, 11)
    for name, operation in {
        'AFT-full': Operation('aft_full', shape, 3, (4, 4)),
        'AFT-conv, h=32': Operation('aft_conv', shape, 3, (32, *kernel), (2, 2), 32),
        'AFT-conv, h=d=192': Operation('aft_conv', shape, 3, (192, *kernel), (2, 2)),
    }.items():
        cost = partial(speed, partial(figures.call_candidates, operation))
        yield Goal(21, f'a call, T=4, inference, {name}, over SDPA', 4, 2, cost, True)


def _layers() -> Iterator[Goal]:
    for row, batch, dim, heads, *bounds in (
        (4, 32, 192, 32, (1.2, 1.5), (1.2, 1.45)),
        (4, 32, 384, 16, (1.2, 1.5), (1.2, 1.45)),
        (5, 8, 384, 384, (0.9, 1.6), (0.95, 1.3)),
    ):
        make = partial(planar_layers, (batch, 196, dim), (heads,))
        for direction, pair in zip(DIRECTIONS, bounds, strict=True):
            what = f'AFT-conv layer, k11, against attention, d={dim}, h={heads}: {direction}'
            yield Goal(row, what, *pair, partial(speed, make, direction))


def _causal() -> Iterator[Goal]:
    what, simple_what = 'AFT-local causal op, T=3072, s=256', 'AFT-simple causal op, T=3072'
    local, low = against_attention(_local(3072)), against_attention(_local(3072), HALF)
    simple = against_attention(Operation('aft_simple_causal', (2, 3072, 256), 2))
    for direction, goal, simple_bounds in (('forward', 3.5, (3.5, 5.0)), ('training', 3.2, (7.0, 9.0))):
        yield Goal(6, f'{what}, against causal SDPA: {direction}', 2.5, goal, partial(speed, local, direction))
        yield Goal(7, f'{what}: {direction}, bfloat16', 3.5, 4.5, partial(speed, low, direction), needs='bfloat16')
        yield Goal(9, f'{simple_what}: {direction}', *simple_bounds, partial(speed, simple, direction))
    long = partial(speed, against_attention(_local(16384, 1)))
    yield Goal(7, 'AFT-local causal op, T=16384, s=256: forward', 5, 8, long)
    growth = partial(speed, _twice_the_tokens)
    yield Goal(8, 'AFT-local causal: time of 6144 tokens over that of 3072', 2.2, 2.05, growth, True)
    exponent = partial(figures.memory_exponent, partial(_local, batch=1), (3072, 12288))
    yield Goal(8, 'its memory as a power of T', 1.1, 1.0, exponent, True)


def _decoding() -> Iterator[Goal]:
    # It takes minutes: once for all of its figures.
    figure = partial(figures.decoding, cache(partial(measure_decode, CPU)))
    local, simple = 'aft_local_pixel', 'aft_simple_pixel'
    for batch, name, floor, goal in ((1, local, 1.5, 2.5), (16, local, 4, 5), (16, simple, 7, 9)):
        what = f'decoding 3,072 tokens against a KV cache: {name.split("_")[1]}, B={batch}'
        yield Goal(10, what, floor, goal, partial(figure, name, batch, 'ratio'))
    for batch, name in ((1, local), (1, simple), (16, local), (16, simple)):
        what = f'decoding, time of a token at t=3071 over t=300: {name.split("_")[1]}, B={batch}'
        yield Goal(11, what, 1.15, 1.02, partial(figure, name, batch, 'flatness'), True)


def _models() -> Iterator[Goal]:
    for row, name, baseline, batch, forward, half, training in (
        (12, 'aft_full_tiny', TINY, 16, (0.97, 1.05), (1.1, 1.2), None),
        (13, FEW, TINY, 16, (1.08, 1.2), (1.25, 1.4), (1.08, 1.15)),
        (14, 'aft_conv_small', SMALL, 8, (0.95, 1.25), None, (0.75, 1.1)),
    ):
        make, what = against(name, baseline, 224, batch), f'{name} against DeiT'
        yield Goal(row, f'{what}, inference', *forward, partial(speed, make))
        if half:
            low = partial(speed, make, dtype='bfloat16')
            yield Goal(row, f'{what}, inference, bfloat16', *half, low, needs='bfloat16')
        if training:
            yield Goal(row, f'{what}, training', *training, partial(speed, make, 'training'))
    for name in ('aft_full_tiny', 'aft_conv_tiny'):
        memory = partial(figures.memory, against(name, TINY, 224, 16), 'training')
        yield Goal(15, f'training memory of {name} over DeiT', 1.25, 1.0, memory, True)


def _gpu() -> Iterator[Goal]:
    for name, goal, operation in gpu.OPERATIONS:
        make = against_attention(operation, HALF, gpu.CUDA)
        for direction in DIRECTIONS:
            what = f'GPU, B={gpu.BATCH}, bfloat16: {name}, {direction}'
            yield Goal(17, what, 1.0, goal, partial(speed, make, direction, device=gpu.CUDA), needs='cuda')
        share = partial(figures.roofline_share, operation, HALF, gpu.CUDA)
        yield Goal(18, f'GPU, share of the roofline: {name}, forward', 0.4, 0.7, share, needs='cuda')


def _single_images() -> Iterator[Goal]:
    peers = {'aft_conv_tiny': TINY, FEW: TINY, 'aft_full_tiny': TINY}
    peers |= {'aft_conv_small': SMALL, 'aft_conv_small_k11_h16': SMALL}
    sizes = {(name, 224): (1.0, 1.2) for name in peers}
    sizes |= {(name, 384): (1.2, 1.4) for name in ('aft_conv_tiny', 'aft_conv_small')}
    sizes |= {(name, 512): (1.6, 1.9) for name in ('aft_conv_tiny', 'aft_conv_small')}
    sizes |= {('aft_full_tiny', 384): (1.0, 1.15), ('aft_full_tiny', 512): (1.0, 1.15)}
    for (name, size), bounds in sizes.items():
        what = f'one image, {size} px, {name} against DeiT'
        yield Goal(19 if size == 224 else 20, what, *bounds, partial(speed, against(name, peers[name], size)))


def _runtimes() -> Iterator[Goal]:
    # By runtime and px: floor and goal of 192 heads, floor and goal of 32 heads.
    for row, runtime, size, *bounds in (
        (22, 'onnxruntime', 224, (0.85, 1.0), (1.0, 1.15)),
        (22, 'onnxruntime', 384, (1.1, 1.25), (1.3, 1.5)),
        (22, 'onnxruntime', 512, (1.4, 1.7), (1.7, 2.0)),
        (22, 'onnxruntime', 1024, (3.3, 4.0), (4.0, 5.0)),
        (23, 'openvino', 224, (0.85, 1.0), (1.05, 1.2)),
        (23, 'openvino', 512, (1.2, 1.4), (1.6, 1.8)),
    ):
        for name, pair in zip(('aft_conv_tiny', FEW), bounds, strict=True):
            what = f'{runtime}, one thread, one image, {size} px, {name} against DeiT'
            yield Goal(row, what, *pair, partial(figures.runtime_speed, name, TINY, size, runtime), needs=runtime)


def _peers() -> Iterator[Goal]:
    for name, baseline, words, sizes in (
        (PEER, TINY, 'DeiT', (224, 384, 512, 1024)),
        (PYRAMID, PEER, PEER, (224, 512, 1024)),
    ):
        for size in sizes:
            what = f'one image, {size} px, {name} against {words}'
            yield Goal(24, what, None, None, partial(speed, against(name, baseline, size)))
            runtime = partial(figures.runtime_speed, name, baseline, size, 'onnxruntime')
            yield Goal(24, f'onnxruntime, one thread, {what}', None, None, runtime, needs='onnxruntime')
    for size in (512, 1024):
        what = f'one image, {size} px, aft_conv_tiny against {PEER}'
        yield Goal(24, what, None, 1.0, partial(speed, against('aft_conv_tiny', PEER, size)))


def _costs() -> Iterator[Goal]:
    what = 'CPU time of an image of our loader over'
    yield Goal(25, f"{what} FFCV's own Loader", 1.1, 1.0, partial(figures.loader_cost, 'ffcv'), True, 'ffcv')
    yield Goal(25, f"{what} timm's, of a folder", 1.1, 1.0, partial(figures.loader_cost, 'folder'), True)
    yield Goal(26, "time of our update over that of timm's task, one batch", 1.03, 1.01, figures.step_cost, True)


def against(name: str, baseline: str, size: int, batch: int = 1) -> Callable[[], list[Candidate]]:
    """Return a function that makes a model of timm and one of ours on images of a side in pixels."""
    return lambda: [classifier(each, (batch, 3, size, size), CPU) for each in (baseline, name)]


def _local(tokens: int, batch: int = 2) -> Operation:
    return Operation('aft_local_causal', (batch, tokens, 256), 2, (tokens, 256))


def _twice_the_tokens() -> list[Candidate]:
    """Return twice the tokens first: the figure is the time of the first over that of the last."""
    lengths = {name: _local(tokens, 1) for name, tokens in (('twice', 6144), ('once', 3072))}
    return [Candidate(name, partial(each.own, torch.float32, CPU)) for name, each in lengths.items()]
