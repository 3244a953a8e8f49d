"""The goals of this project in speed and memory: the figures, their floors and goals, and their verdicts."""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from tools.benchmark import figures, gpu
from tools.benchmark.figures import Figure, Measure
from tools.benchmark.ops import Operation
from tools.benchmark.printer import Report, format_rows
from tools.benchmark.times import describe_error, show_progress
from tools.machine import has_bfloat16

TINY, SMALL = 'deit_tiny_patch16_224', 'deit_small_patch16_224'
FEW = 'aft_conv_tiny_k11_h32'
# Rows of other runtimes are measured only when --rows names them.
ASKED_ROWS = (22, 23)


class Goal(NamedTuple):
    """One promise.

    Args:
        row: Of the table of goals; figures of one row belong together.
        measure: Makes the figure, of a number of rounds.
        at_most: Whether less is better.
        most_rounds: Rounds that are enough for it; None is as many as are wanted.
        needs: What it is measured on: 'cpu', 'bfloat16' (a CPU with its instructions), 'cuda', or a runtime's package.
    """

    row: int
    what: str
    floor: float
    goal: float
    measure: Measure
    at_most: bool = False
    most_rounds: int | None = None
    needs: str = 'cpu'

    @property
    def is_open(self) -> bool:
        """Return whether what it is measured on is absent."""
        return not available(self.needs)

    def verdict(self, figure: Figure | None) -> str:
        """Return `goal`, `floor`, `below`, or `open` where nothing was measured."""
        if figure is None:
            return 'open'
        for name, bound in (('goal', self.goal), ('floor', self.floor)):
            if (figure.value <= bound) if self.at_most else (figure.value >= bound):
                return name
        return 'below'


def available(needs: str) -> bool:
    """Return whether there is a device, an instruction or a package that a goal needs."""
    known = {'cpu': lambda: True, 'bfloat16': has_bfloat16, 'cuda': torch.cuda.is_available}
    return known[needs]() if needs in known else importlib.util.find_spec(needs) is not None


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the chosen goals, each on its own device; each is on standard error as it comes."""

    def show(row: dict[str, Any]) -> None:
        tqdm.write(format_rows([row]).splitlines()[-1], file=sys.stderr)

    rows = measure_goals(choose(args.rows), args.rounds, show)
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
    chosen = [goal for goal in choose(rows) if not goal.is_open]
    names = dict.fromkeys('cuda' if goal.needs == 'cuda' else 'cpu' for goal in chosen)
    return [torch.device(name) for name in names or ('cpu',)]


def measure_goals(
    goals: Sequence[Goal], rounds: int, show: Callable[[dict[str, Any]], None] = lambda row: None
) -> list[dict[str, Any]]:
    """Measure every goal; one that fails ends nothing.

    Args:
        show: Gets every row as it comes.

    Returns:
        A row for each: `row`, `what`, `floor`, `goal`, `at_most`, the fields of its Figure (`measured` is the value),
        `error` (why it failed), and `verdict`: that of the goal, or `failed`.
    """
    rows = []
    for goal in tqdm(goals, desc='goals', leave=False, disable=None if show_progress() else True):
        rows.append(_measure(goal, rounds))
        show(rows[-1])
    return rows


def _measure(goal: Goal, rounds: int) -> dict[str, Any]:
    turns = rounds if goal.most_rounds is None else min(rounds, goal.most_rounds)
    row: dict[str, Any] = {name: getattr(goal, name) for name in ('row', 'what', 'floor', 'goal', 'at_most')}
    if goal.is_open:
        return {**row, 'verdict': goal.verdict(None)}
    try:
        figure = goal.measure(turns)
    # Whatever it is: the others are measured all the same.
    except Exception as problem:
        return {**row, 'error': describe_error(problem), 'verdict': 'failed'}
    return {**row, 'measured': figure.value, **figure._asdict(), 'verdict': goal.verdict(figure)}


def make_goals() -> list[Goal]:
    """Return the table of goals."""
    parts = (_operations, _layers, _causal, _decoding, _models, _gpu, _single_images, _calls, _runtimes)
    return [goal for part in parts for goal in part()]


def _operations() -> Iterator[Goal]:
    half, what = torch.bfloat16, 'AFT-full op, T=197, against SDPA'
    full = Operation('aft_full', (32, 197, 384), 6, (197, 197))
    yield Goal(1, f'{what}: forward', 1.05, 1.35, figures.speed(full))
    yield Goal(1, f'{what}: forward, bfloat16', 1.7, 2.3, figures.speed(full, half), needs='bfloat16')
    yield Goal(2, f'{what}: training', 0.95, 1.2, figures.speed(full, training=True))
    yield Goal(2, f'{what}: training, bfloat16', 2.2, 2.7, figures.speed(full, half, training=True), needs='bfloat16')
    yield Goal(3, 'its peak memory, forward, over that of SDPA', 2.0, 1.5, figures.memory(full), True)
    yield Goal(3, 'its bytes kept for the backward over those of SDPA', 1.3, 1.0, figures.kept(full), True)


def _layers() -> Iterator[Goal]:
    layer = 'AFT-conv layer, k11, against attention'
    for dim, heads in ((192, 32), (384, 16)):
        what = f'{layer}, d={dim}, h={heads}'
        yield Goal(4, f'{what}: forward', 1.2, 1.5, figures.layer_speed(dim, heads, 32, training=False))
        yield Goal(4, f'{what}: training', 1.2, 1.45, figures.layer_speed(dim, heads, 32, training=True))
    yield Goal(5, f'{layer}, h=d=384: forward', 0.9, 1.6, figures.layer_speed(384, 384, 8, training=False))
    yield Goal(5, f'{layer}, h=d=384: training', 0.95, 1.3, figures.layer_speed(384, 384, 8, training=True))


def _causal() -> Iterator[Goal]:
    what, three, half = 'AFT-local causal op, T=3072, s=256', _local(3072), torch.bfloat16
    simple = Operation('aft_simple_causal', (2, 3072, 256), 2)
    exponent = figures.memory_exponent(_local1, (3072, 12288))
    yield Goal(6, f'{what}, against causal SDPA: forward', 2.5, 3.5, figures.speed(three))
    yield Goal(6, f'{what}, against causal SDPA: training', 2.5, 3.2, figures.speed(three, training=True))
    yield Goal(7, f'{what}: forward, bfloat16', 3.5, 4.5, figures.speed(three, half), needs='bfloat16')
    learning = figures.speed(three, half, training=True)
    yield Goal(7, f'{what}: training, bfloat16', 3.5, 4.5, learning, needs='bfloat16')
    yield Goal(7, 'AFT-local causal op, T=16384, s=256: forward', 5, 8, figures.speed(_local1(16384)))
    growth = figures.growth(_local1, 3072)
    yield Goal(8, 'AFT-local causal: time of 6144 tokens over that of 3072', 2.2, 2.05, growth, True, most_rounds=5)
    yield Goal(8, 'its memory as a power of T', 1.1, 1.0, exponent, True)
    yield Goal(9, 'AFT-simple causal op, T=3072: forward', 3.5, 5, figures.speed(simple))
    yield Goal(9, 'AFT-simple causal op, T=3072: training', 7, 9, figures.speed(simple, training=True))


def _decoding() -> Iterator[Goal]:
    local, simple, what = 'aft_local_pixel', 'aft_simple_pixel', 'decoding 3,072 tokens against a KV cache'
    decoding = figures.Decoding()
    for batch, name, floor, goal in ((1, local, 1.5, 2.5), (16, local, 4, 5), (16, simple, 7, 9)):
        kind = name.split('_')[1]
        yield Goal(10, f'{what}: {kind}, B={batch}', floor, goal, decoding.figure(name, batch, 'ratio'), most_rounds=5)
    for batch, name in ((1, local), (1, simple), (16, local), (16, simple)):
        text = f'decoding, time of a token at t=3071 over t=300: {name.split("_")[1]}, B={batch}'
        flatness = decoding.figure(name, batch, 'flatness')
        yield Goal(11, text, 1.15, 1.02, flatness, True, most_rounds=5)


def _models() -> Iterator[Goal]:
    speed, memory = figures.model_speed, figures.model_memory
    half = speed('aft_full_tiny', TINY, 16, 'bfloat16')
    yield Goal(12, 'aft_full_tiny against DeiT, inference', 0.97, 1.05, speed('aft_full_tiny', TINY, 16))
    yield Goal(12, 'the same, bfloat16', 1.1, 1.2, half, needs='bfloat16')
    yield Goal(13, f'{FEW}, inference', 1.08, 1.2, speed(FEW, TINY, 16))
    yield Goal(13, 'the same, bfloat16', 1.25, 1.4, speed(FEW, TINY, 16, 'bfloat16'), needs='bfloat16')
    yield Goal(13, 'the same, training', 1.08, 1.15, speed(FEW, TINY, 16, training=True))
    yield Goal(14, 'aft_conv_small (h=384), inference', 0.95, 1.25, speed('aft_conv_small', SMALL, 8))
    yield Goal(14, 'the same, training', 0.75, 1.1, speed('aft_conv_small', SMALL, 8, training=True))
    for name in ('aft_full_tiny', 'aft_conv_tiny'):
        yield Goal(15, f'training memory of {name} over DeiT', 1.25, 1.0, memory(name, TINY, 16), True)
    yield Goal(16, 'one-hot op against the convolution: forward', 1.7, 3, figures.onehot_speed('forward'))
    yield Goal(16, 'one-hot op against the convolution: training', 1.7, 3, figures.onehot_speed('training'))


def _gpu() -> Iterator[Goal]:
    for name, goal, operation in gpu.OPERATIONS:
        for training in (False, True):
            what = f'GPU, B={gpu.BATCH}, bfloat16: {name}, {"training" if training else "forward"}'
            measure = figures.speed(operation, gpu.HALF, training, gpu.CUDA)
            yield Goal(17, what, 1.0, goal, measure, needs='cuda')
    for name, _, operation in gpu.OPERATIONS:
        share = figures.roofline_share(operation, gpu.HALF, gpu.CUDA)
        yield Goal(18, f'GPU, share of the roofline: {name}, forward', 0.4, 0.7, share, needs='cuda')


def _single_images() -> Iterator[Goal]:
    speed = figures.model_speed
    peers = {'aft_conv_tiny': TINY, FEW: TINY, 'aft_full_tiny': TINY}
    peers |= {'aft_conv_small': SMALL, 'aft_conv_small_k11_h16': SMALL}
    for name, peer in peers.items():
        yield Goal(19, f'one image, 224 px, {name} against DeiT', 1.0, 1.2, speed(name, peer, 1))
    bounds = {384: (1.2, 1.4), 512: (1.6, 1.9)}
    for name in ('aft_conv_tiny', 'aft_conv_small', 'aft_full_tiny'):
        for size, (floor, goal) in bounds.items():
            low, high = (1.0, 1.15) if name == 'aft_full_tiny' else (floor, goal)
            measure = speed(name, peers[name], 1, size=size)
            yield Goal(20, f'one image, {size} px, {name} against DeiT', low, high, measure)


def _calls() -> Iterator[Goal]:
    shape, kernel = (1, 4, 192), (11, 11)
    operations = {
        'AFT-full': Operation('aft_full', shape, 3, (4, 4)),
        'AFT-conv, h=32': Operation('aft_conv', shape, 3, (32, *kernel), (2, 2), 32),
        'AFT-conv, h=d=192': Operation('aft_conv', shape, 3, (192, *kernel), (2, 2)),
    }
    for name, operation in operations.items():
        yield Goal(21, f'a call, T=4, inference, {name}, over SDPA', 4, 2, figures.call_cost(operation), True)


def _runtimes() -> Iterator[Goal]:
    # (px, floor and goal of 192 heads, floor and goal of 32 heads)
    onnx = (
        (224, 0.85, 1.0, 1.0, 1.15),
        (384, 1.1, 1.25, 1.3, 1.5),
        (512, 1.4, 1.7, 1.7, 2.0),
        (1024, 3.3, 4.0, 4.0, 5.0),
    )
    openvino = ((224, 0.85, 1.0, 1.05, 1.2), (512, 1.2, 1.4, 1.6, 1.8))
    for row, runtime, bounds in ((22, 'onnxruntime', onnx), (23, 'openvino', openvino)):
        for size, *pairs in bounds:
            for name, (floor, goal) in zip(('aft_conv_tiny', FEW), (pairs[:2], pairs[2:]), strict=True):
                what = f'{runtime}, one thread, one image, {size} px, {name} against DeiT'
                measure = figures.runtime_speed(name, TINY, size, runtime)
                yield Goal(row, what, floor, goal, measure, needs=runtime)


def _local(tokens: int, batch: int = 2) -> Operation:
    return Operation('aft_local_causal', (batch, tokens, 256), 2, (tokens, 256))


def _local1(tokens: int) -> Operation:
    return _local(tokens, batch=1)
