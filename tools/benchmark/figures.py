"""Measurements of each kind of figure of the table of goals."""

import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from aft_vision.timing import quartiles
from tools.benchmark import gpu
from tools.benchmark.compare import Candidate, Prepared, compare
from tools.benchmark.loader import Options, measure_loaders
from tools.benchmark.memory import saved_memory
from tools.benchmark.models import runtime_candidate
from tools.benchmark.ops import CPU, Operation, candidates_of, draw_qkv
from tools.machine import autocast

# Rounds that are enough for what takes minutes.
SLOW_ROUNDS = 5
# Photographs of the loaders' row: so many, (width, height).
PHOTOGRAPHS, PHOTOGRAPH_SIZE = 256, (400, 300)
# The trainer's row: what it trains, on a batch that stays where it is.
STEP = (
    '--config configs/smoke/one_epoch.yaml model.depth=12 model.embed_dim=192 model.num_heads=192 model.kernel_size=11 '
    'model.patch_size=16 data.img_size=[224,224] data.batch_size=16 optim.clip_grad=null ema.decay=null '
    'ema.warmup=false'
)


class Figure(NamedTuple):
    """A measured figure.

    Args:
        ratio_quartiles: Over the rounds, where it is a time.
        milliseconds_pair: Of a call of what is compared with, and of ours, on a GPU.
    """

    value: float
    ratio_quartiles: tuple[float, float] | None = None
    milliseconds_pair: tuple[float, float] | None = None


def speed(
    make: Callable[[], Sequence[Candidate]],
    direction: str = 'forward',
    dtype: str = 'float32',
    device: torch.device = CPU,
    *,
    rounds: int,
) -> Figure:
    """Measure the time of the first candidate over that of the last.

    Args:
        dtype: Key of PRECISIONS, of autocast around all calls, which then casts the weights once.
    """
    with autocast(device, dtype):
        baseline, own = _rows(make(), rounds, direction, device=device, memory=False)
    # Absolute times of a processor say nothing of another.
    pair = (baseline['milliseconds'], own['milliseconds']) if device.type == 'cuda' else None
    return Figure(own['ratio'], own['ratio_quartiles'], pair)


def memory(make: Callable[[], Sequence[Candidate]], direction: str = 'forward', *, rounds: int) -> Figure:
    """Measure the peak of the last candidate over that of the first."""
    baseline, own = _rows(make(), 0, direction)
    return Figure(own['peak_bytes'] / baseline['peak_bytes'])


def kept(operation: Operation, *, rounds: int) -> Figure:
    """Measure the bytes kept for the backward over those of attention."""
    attention, own = (each.prepare(True) for each in against_attention(operation)())
    # q, k and v count: attention and the operation are given the same. The position bias is a weight.
    return Figure(saved_memory(own.forward, own.leaves[3:]) / saved_memory(attention.forward))


def memory_exponent(make: Callable[[int], Operation], lengths: tuple[int, int], *, rounds: int) -> Figure:
    """Measure the power of the tokens that the peak of the forward grows with; 1 is linear."""
    short, long = (_rows(candidates_of({'own': make(length)}), 0, 'forward')[1] for length in lengths)
    return Figure(math.log(long['peak_bytes'] / short['peak_bytes']) / math.log(lengths[1] / lengths[0]))


def against_attention(operation: Operation, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Any:
    """Return a function that makes fused attention and an operation."""
    return lambda: candidates_of({'own': operation}, dtype, device)[::2]


def call_candidates(operation: Operation) -> list[Candidate]:
    """Return an operation, and `F.scaled_dot_product_attention` with its heads split before."""

    def attend(training: bool) -> Prepared:
        inputs = draw_qkv(operation.shape, torch.float32, CPU, training)
        q, k, v = (x.unflatten(2, (operation.heads, -1)).transpose(1, 2) for x in inputs)
        return Prepared(lambda: F.scaled_dot_product_attention(q, k, v))

    return [Candidate('AFT', partial(operation.own, torch.float32, CPU)), Candidate('SDPA', attend)]


def runtime_speed(name: str, baseline: str, size: int, runtime: str, *, rounds: int) -> Figure:
    """Measure the time of a model of timm over that of ours, exported, one thread and one image."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with TemporaryDirectory() as folder:
            shape = (1, 3, size, size)
            models = [runtime_candidate(each, shape, runtime, Path(folder)) for each in (baseline, name)]
            return speed(lambda: models, rounds=rounds)
    finally:
        torch.set_num_threads(threads)


def decoding(
    measured: Callable[[int], list[dict[str, Any]]], name: str, batch: int, key: str, *, rounds: int
) -> Figure:
    """Return a figure of `measure_decode`, `ratio` or `flatness`, of its rows for a number of rounds."""
    rows = measured(min(rounds, SLOW_ROUNDS))
    row = next(row for row in rows if (row['name'], row['batch_size']) == (name, batch))
    return Figure(row[key], row[f'{key}_quartiles'])


def loader_cost(kind: str, *, rounds: int) -> Figure:
    """Measure the CPU time of an image of our loader over that of the one that it replaces.

    Args:
        kind: 'folder' (timm's loader) or 'ffcv' (FFCV's own).
    """
    with TemporaryDirectory() as folder:
        source = Path(folder) / 'images'
        for split, count in (('train', PHOTOGRAPHS), ('val', 2)):
            _write_photographs(source / split, count)
        if kind == 'ffcv':
            from tools.write_ffcv import main as write_ffcv

            images, source = source, Path(folder) / 'ffcv'
            with redirect_stdout(StringIO()):
                write_ffcv(['--data', str(images), '--out', str(source), '--workers', '0', '--quiet'])
        # In this process, whose time is counted finest.
        row = measure_loaders([str(source)], Options(224, 64, 0), min(rounds, SLOW_ROUNDS))[0]
        return Figure(row['cpu_ratio'], row['cpu_quartiles'])


def step_cost(*, rounds: int) -> Figure:
    """Measure the time of an update by our trainer over that of a written-out one of timm's task, on one batch."""
    command = [sys.executable, '-m', 'train.throughput', *STEP.split(), '--rounds', str(max(rounds, 2))]
    # The trainer is a program of its own: tools import nothing of it.
    done = subprocess.run(
        [*command, f'run.cpu_threads={torch.get_num_threads()}'], capture_output=True, text=True, check=False
    )
    found = re.search(r'bare update: ([\d.]+), quartiles ([\d.]+) to ([\d.]+)', done.stdout)
    if found is None:
        raise RuntimeError(f'expected the ratio of updates from train.throughput, got {done.stderr or done.stdout}')
    value, low, high = map(float, found.groups())
    return Figure(value, (low, high))


def roofline_share(operation: Operation, dtype: torch.dtype, device: torch.device, *, rounds: int) -> Figure:
    """Measure the shortest time that a GPU could take for a forward over that of its kernels."""
    flops, bandwidth = gpu.device_rates(dtype, device, rounds)
    shortest = max(gpu.count_flops(operation) / flops, gpu.count_bytes(operation, dtype) / bandwidth)
    with torch.inference_mode():
        kernels = gpu.time_kernels(operation.own(dtype, device, False).forward, device, rounds)
    shares = [shortest / seconds for seconds in kernels]
    return Figure(median(shares), quartiles(shares), (1e3 * shortest, 1e3 * median(kernels)))


def _rows(
    candidates: Sequence[Candidate], rounds: int, direction: str, *, device: torch.device = CPU, **options: Any
) -> list[dict[str, Any]]:
    """Return the rows of the first and the last candidate.

    Raises:
        RuntimeError: one of them failed.
    """
    first, last = candidates[0], candidates[-1]
    rows = compare([first, last._replace(baseline=first.name)], device, rounds, directions=[direction], **options)
    for row in rows:
        if 'error' in row:
            raise RuntimeError(f'{row["name"]}: {row["error"]}')
    return rows


def _write_photographs(folder: Path, count: int) -> None:
    """Write JPEG files of two classes, with colours that change slowly and some noise, as in photographs."""
    generator = np.random.default_rng(0)
    width, height = PHOTOGRAPH_SIZE
    for index in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (9, 12, 3), np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
        noisy = smooth + generator.normal(0, 4, smooth.shape)
        path = folder / f'class_{index % 2}' / f'{index}.jpg'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
