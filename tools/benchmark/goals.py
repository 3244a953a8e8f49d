"""The goals of this project in speed and memory: what is measured, its floors and goals, and its verdicts."""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from aft_vision.ops.common.choice import has_bfloat16
from tools.benchmark import measurements
from tools.benchmark.compare import DIRECTIONS, Candidate, describe_error
from tools.benchmark.measurements import Measurement, speed
from tools.benchmark.models import RUNTIMES, Images, classifier, runtime_candidate
from tools.benchmark.ops import CPU, Operation, candidates_of, onehot_candidates, planar_layers
from tools.benchmark.printer import Report, format_rows
from tools.machine import describe_processor, has_tiles

TINY, SMALL, PEER = 'deit_tiny_patch16_224', 'deit_small_patch16_224', 'cpubone_b0_bfrobust'
CONV, FEW, FULL, PYRAMID = 'aft_conv_tiny', 'aft_conv_tiny_k11_h32', 'aft_full_tiny', 'aft_pyramid_nano'
AXIAL, PICO, CONV_SMALL = 'aft_axial_tiny', 'aft_pyramid_pico', 'aft_conv_small'
# The fastest models of timm of about the size of the smallest pyramid.
FAST = ('cpubone_nano', 'mobilenetv4_conv_small', 'efficientvim_m1', 'lcnet_100')
# Rows measured only when --rows names them: of other runtimes, peers, loaders and the trainer, of one image in tiles or
# on one thread, and of training beside the rows of all models.
ASKED_ROWS = (22, 23, 24, 25, 26, 27, 28, 29, 30, 31)

WHOLE = Operation('aft_full', (32, 197, 384), 6, (197, 197))
LOCAL = Operation('aft_local_causal', (2, 3072, 256), 2, (3072, 256))
LONG = Operation('aft_local_causal', (1, 16384, 256), 2, (16384, 256))
SIMPLE = Operation('aft_simple_causal', (2, 3072, 256), 2)
# On a GPU, in bfloat16: operation, goal of its speed against attention.
ON_GPU = (
    (Operation('aft_full', (256, 197, 384), 6, (197, 197)), 1.3),
    (Operation('aft_conv', (256, 196, 384), 6, (16, 11, 11)), 1.5),
    (Operation('aft_conv', (256, 196, 384), 6, (384, 11, 11)), 1.2),
    (Operation('aft_local_causal', (256, 3072, 256), 2, (3072, 256)), 4.0),
)
# Operations against attention: row, operation, direction, what it needs, floor, goal.
OPERATIONS = (
    (1, WHOLE, 'forward', 'cpu', 1.05, 1.35),
    (1, WHOLE, 'forward', 'bfloat16', 1.7, 2.3),
    (2, WHOLE, 'training', 'cpu', 0.95, 1.2),
    (2, WHOLE, 'training', 'bfloat16', 2.2, 2.7),
    (6, LOCAL, 'forward', 'cpu', 2.5, 3.5),
    (6, LOCAL, 'training', 'cpu', 2.5, 3.2),
    (7, LOCAL, 'forward', 'bfloat16', 3.5, 4.5),
    (7, LOCAL, 'training', 'bfloat16', 3.5, 4.5),
    (7, LONG, 'forward', 'cpu', 5, 8),
    (27, WHOLE, 'forward', 'tiles', 1.0, 1.5),
    (27, WHOLE, 'training', 'tiles', 1.0, 2.5),
    (27, LOCAL, 'forward', 'tiles', 1.0, 4.0),
    (27, LOCAL, 'training', 'tiles', 1.0, 4.0),
    (9, SIMPLE, 'forward', 'cpu', 3.5, 5.0),
    (9, SIMPLE, 'training', 'cpu', 7.0, 9.0),
    *((17, operation, direction, 'cuda', 1.0, goal) for operation, goal in ON_GPU for direction in DIRECTIONS),
)
# Layers of AFT-conv against attention: row, batch, width, heads, floor and goal of the forward and of training.
LAYERS = (
    (4, 32, 192, 32, (1.2, 1.5), (1.2, 1.45)),
    (4, 32, 384, 16, (1.2, 1.5), (1.2, 1.45)),
    (5, 8, 384, 384, (0.9, 1.6), (0.95, 1.3)),
)
TORCH_AND_ONNX, REPORTED = ('inference', 'onnxruntime'), (None, None)
# Models against others: row, the measurement, model, baseline, batch, floor and goal by the side of the images.
MODELS: tuple[Any, ...] = (
    (12, 'inference', FULL, TINY, 16, {224: (0.97, 1.05)}),
    (12, 'bfloat16', FULL, TINY, 16, {224: (1.1, 1.2)}),
    (13, 'inference', FEW, TINY, 16, {224: (1.08, 1.2)}),
    (13, 'bfloat16', FEW, TINY, 16, {224: (1.25, 1.4)}),
    (13, 'training', FEW, TINY, 16, {224: (1.08, 1.15)}),
    (14, 'inference', CONV_SMALL, SMALL, 8, {224: (0.95, 1.25)}),
    (14, 'training', CONV_SMALL, SMALL, 8, {224: (0.75, 1.1)}),
    *((15, 'training memory', name, TINY, 16, {224: (1.25, 1.0)}) for name in (FULL, CONV)),
    *((19, 'inference', name, TINY, 1, {224: (1.0, 1.3)}) for name in (CONV, FEW, FULL)),
    *((19, 'inference', name, SMALL, 1, {224: (1.0, 1.3)}) for name in (CONV_SMALL, 'aft_conv_small_k11_h16')),
    (20, 'inference', CONV, TINY, 1, {384: (1.2, 1.4), 512: (1.6, 1.9)}),
    (20, 'inference', CONV_SMALL, SMALL, 1, {384: (1.2, 1.4), 512: (1.6, 1.9)}),
    (20, 'inference', FULL, TINY, 1, {384: (1.0, 1.15), 512: (1.0, 1.15)}),
    (22, 'onnxruntime', CONV, TINY, 1, {224: (0.85, 1.0), 384: (1.1, 1.25), 512: (1.4, 1.7), 1024: (3.3, 4.0)}),
    (22, 'onnxruntime', FEW, TINY, 1, {224: (1.0, 1.15), 384: (1.3, 1.5), 512: (1.7, 2.0), 1024: (4.0, 5.0)}),
    (23, 'openvino', CONV, TINY, 1, {224: (0.85, 1.0), 512: (1.2, 1.4)}),
    (23, 'openvino', FEW, TINY, 1, {224: (1.05, 1.2), 512: (1.6, 1.8)}),
    *((24, how, PEER, TINY, 1, dict.fromkeys((224, 384, 512, 1024), REPORTED)) for how in TORCH_AND_ONNX),
    *((24, how, PYRAMID, PEER, 1, dict.fromkeys((224, 512, 1024), REPORTED)) for how in TORCH_AND_ONNX),
    (24, 'inference', CONV, PEER, 1, dict.fromkeys((512, 1024), (None, 1.0))),
    (27, 'tiles', CONV, TINY, 1, {224: (1.0, 1.1), 512: (1.0, 1.8)}),
    (27, 'tiles', FEW, TINY, 1, {224: (1.0, 1.2), 512: (1.0, 2.0)}),
    (27, 'tiles', AXIAL, TINY, 1, {224: (1.0, 1.2), 512: (1.0, 2.2)}),
    (27, 'tiles', FULL, TINY, 1, {224: (1.0, 1.1), 512: (1.0, 1.1)}),
    (27, 'tiles', PYRAMID, TINY, 1, {224: (1.0, 1.6), 512: (1.0, 3.0)}),
    (28, 'one thread', PYRAMID, TINY, 1, {224: (1.8, 2.4), 512: (None, 5.0)}),
    (28, 'onnxruntime', PYRAMID, TINY, 1, dict.fromkeys((224, 512), REPORTED)),
    (29, 'training', FEW, TINY, 16, {224: (1.2, 1.3)}),
    (29, 'training', CONV_SMALL, SMALL, 8, {224: (1.15, 1.25)}),
    (29, 'training in bfloat16', FEW, TINY, 16, {224: (1.35, 1.5)}),
    (29, 'training in bfloat16', CONV_SMALL, SMALL, 8, {224: (1.25, 1.4)}),
    *((30, how, PICO, peer, 1, {224: REPORTED}) for peer in FAST[1:] for how in ('one thread', 'onnxruntime')),
    *((30, how, PICO, FAST[0], 1, {224: (None, 1.0)}) for how in ('one thread', 'onnxruntime')),
    (31, 'training memory', CONV_SMALL, SMALL, 8, {224: (0.9, 0.8)}),
)


class Goal(NamedTuple):
    """One promise: a row of the table, and its bounds in so many `rounds`; None where it is only reported.

    Args:
        at_most: Whether less is better.
        needs: What it is measured on: 'cpu', 'bfloat16' (a CPU with its instructions), 'tiles' (one that multiplies it
            in matrix tiles), 'cuda', or the package of a runtime or a loader.
    """

    row: int
    what: str
    floor: float | None
    goal: float | None
    measure: Callable[..., Measurement]
    at_most: bool = False
    needs: str = 'cpu'

    @property
    def is_open(self) -> bool:
        """Return whether what it is measured on is absent."""
        known = {'cpu': lambda: True, 'tiles': has_tiles, 'cuda': torch.cuda.is_available}
        known['bfloat16'] = partial(has_bfloat16, CPU)
        return not (known[self.needs]() if self.needs in known else importlib.util.find_spec(self.needs))

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


def devices(goals: Sequence[Goal]) -> list[str]:
    """Return the devices that goals are measured on, without those that are absent."""
    return sorted({'cuda' if goal.needs == 'cuda' else 'cpu' for goal in goals if not goal.is_open}) or ['cpu']


def measure_goals(goals: Sequence[Goal], rounds: int) -> list[dict[str, Any]]:
    """Measure every goal, and write each to standard error when done; a failure does not stop the others.

    Returns:
        A row for each: `row`, `what`, `floor`, `goal`, `at_most`, the fields of its Measurement, the `processor`,
        `error` (why it failed), and `verdict`: the goal's, `failed`, or `open` where what it needs is absent.
    """
    rows = []
    for goal in tqdm(goals, desc='goals', leave=False, disable=None):
        row: dict[str, Any] = {name: getattr(goal, name) for name in ('row', 'what', 'floor', 'goal', 'at_most')}
        try:
            if goal.is_open:
                row['verdict'] = 'open'
            else:
                measurement = goal.measure(rounds=rounds)
                row |= {**measurement._asdict(), 'verdict': goal.verdict(measurement.measured)}
                row['processor'] = describe_processor('cuda' if goal.needs == 'cuda' else 'cpu')
        # Whatever it is: the others are measured all the same.
        except Exception as problem:
            row |= {'error': describe_error(problem), 'verdict': 'failed'}
        rows.append(row)
        tqdm.write(format_rows(rows[-1:]).splitlines()[-1], file=sys.stderr)
    return rows


def make_goals() -> list[Goal]:
    """Return the table of goals."""
    return sorted((*_operations(), *_layers(), *_models(), *_costs()), key=lambda goal: goal.row)


def _operations() -> Iterator[Goal]:
    for row, operation, direction, needs, floor, goal in OPERATIONS:
        dtype, device = (
            torch.float32 if needs == 'cpu' else torch.bfloat16,
            measurements.CUDA if needs == 'cuda' else CPU,
        )
        measure = partial(speed, partial(candidates_of, [operation], dtype, device), direction, device=device)
        where = {'cpu': '', 'bfloat16': ', bfloat16', 'tiles': ', bfloat16 in tiles', 'cuda': ', GPU, bfloat16'}[needs]
        yield Goal(row, f'{_named(operation)}{where}, {direction}', floor, goal, measure, needs=needs)
    for operation, _ in ON_GPU:
        share = partial(measurements.roofline_share, operation, torch.bfloat16, measurements.CUDA)
        yield Goal(18, f'{_named(operation)}, GPU, bfloat16, share of the roofline', 0.4, 0.7, share, needs='cuda')
    for name, bias in (('aft_full', (4, 4)), ('aft_conv', (32, 11, 11)), ('aft_conv', (192, 11, 11))):
        operation = Operation(name, (1, 4, 192), 3, bias)
        cost = partial(speed, partial(measurements.call_candidates, operation))
        yield Goal(21, f'time of a call over that of attention: {_named(operation)}', 4, 2, cost, True)
    peak = partial(measurements.memory, partial(candidates_of, [WHOLE]))
    yield Goal(3, 'peak memory of AFT-full, forward, over that of attention', 2.0, 1.5, peak, True)
    saved = partial(measurements.saved_bytes, WHOLE)
    yield Goal(3, 'its bytes kept for the backward over those of attention', 1.3, 1.0, saved, True)
    growth = partial(speed, lambda: [_at_length(6144), _at_length(3072)])
    yield Goal(8, 'AFT-local causal: time of 6144 tokens over that of 3072', 2.2, 2.05, growth, True)
    exponent = partial(measurements.memory_exponent, _at_length, (3072, 12288))
    yield Goal(8, 'its memory as a power of T', 1.1, 1.0, exponent, True)


def _layers() -> Iterator[Goal]:
    for row, batch, dim, heads, *bounds in LAYERS:
        make = partial(planar_layers, (batch, 196, dim), (heads,))
        for direction, pair in zip(DIRECTIONS, bounds, strict=True):
            what = f'AFT-conv layer, k11, against attention, d={dim}, h={heads}: {direction}'
            yield Goal(row, what, *pair, partial(speed, make, direction))
    for direction in DIRECTIONS:
        measure = partial(speed, lambda: onehot_candidates((8, 196, 384), 384)[:2], direction)
        yield Goal(16, f'one-hot op against the convolution: {direction}', 1.7, 3, measure)


def _models() -> Iterator[Goal]:
    for row, how, name, baseline, batch, bounds in MODELS:
        for size, (floor, goal) in bounds.items():
            make = partial(_classifiers, (baseline, name), (batch, 3, size, size), how)
            direction = 'training' if how.startswith('training') else 'forward'
            measure = partial(measurements.memory if how.endswith('memory') else speed, make, direction)
            if how in ('bfloat16', 'tiles', 'training in bfloat16'):
                measure = partial(measure, dtype='bfloat16')
            if how == 'one thread':
                measure = partial(_with_one_thread, measure)
            needs = how if how in ('bfloat16', 'tiles', *RUNTIMES) else 'cpu'
            needs = 'bfloat16' if how.endswith('in bfloat16') else needs
            described = 'bfloat16 in tiles' if how == 'tiles' else how
            what = f'{name} against {baseline}, {described}, {size} px, B={batch}'
            yield Goal(row, what, floor, goal, measure, how == 'training memory', needs)


def _costs() -> Iterator[Goal]:
    local, simple = 'aft_local_pixel', 'aft_simple_pixel'
    for batch, name, floor, goal in ((1, local, 1.5, 2.5), (16, local, 4, 5), (16, simple, 7, 9)):
        measure = partial(measurements.decoding, name, batch, 'ratio')
        yield Goal(10, f'decoding 3,072 tokens against a KV cache: {name}, B={batch}', floor, goal, measure)
    for batch, name in product((1, 16), (local, simple)):
        what = f'decoding, time of a token at t=3071 over t=300: {name}, B={batch}'
        yield Goal(11, what, 1.15, 1.02, partial(measurements.decoding, name, batch, 'flatness'), True)
    what = 'CPU time of an image of our loader over'
    yield Goal(25, f"{what} FFCV's own Loader", 1.1, 1.0, partial(measurements.loader_cost, 'ffcv'), True, 'ffcv')
    yield Goal(25, f"{what} timm's, of a folder", 1.1, 1.0, partial(measurements.loader_cost, 'folder'), True)
    what = 'images/s of configs/finetune.yaml over those in float32 by an optimizer of many calls'
    yield Goal(31, what, 1.25, 1.5, measurements.finetuning_speed)
    yield Goal(26, "time of our update over that of timm's task, one batch", 1.03, 1.01, measurements.step_cost, True)


def _named(operation: Operation) -> str:
    batch, tokens, dim = operation.shape
    return f'{operation.title}, B={batch}, T={tokens}, d={dim}'


def _classifiers(names: Sequence[str], shape: Images, how: str) -> list[Candidate]:
    if how in RUNTIMES:
        return [runtime_candidate(name, shape, how, threads=1) for name in names]
    return [classifier(name, shape, CPU) for name in names]


def _with_one_thread(measure: Callable[..., Measurement], **options: Any) -> Measurement:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return measure(**options)
    finally:
        torch.set_num_threads(threads)


def _at_length(tokens: int) -> Candidate:
    operation = Operation('aft_local_causal', (1, tokens, 256), 2, (tokens, 256))
    return Candidate(f'T={tokens}', partial(operation.own, torch.float32, CPU))
