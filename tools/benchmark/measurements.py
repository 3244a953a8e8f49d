"""Measurement of each kind of row of the table of goals."""

import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import cache, partial
from io import StringIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from aft_vision.devices import synchronize
from aft_vision.timing import quartiles, time_interleaved
from tools.benchmark.compare import Candidate, Prepared, compare
from tools.benchmark.decode import measure_decode
from tools.benchmark.loader import measure_loaders
from tools.benchmark.meters import saved_memory
from tools.benchmark.ops import CPU, Operation, candidates_of, draw_qkv
from tools.machine import autocast

CUDA = torch.device('cuda')
# Rounds that are enough for what takes minutes.
SLOW_ROUNDS = 5
# Calls whose mean is the time of a round: one kernel of a few microseconds says little.
CALLS = 10
# A matrix product and a copy that are large enough to show what a device does at best.
MATRIX_SIDE, COPY_BYTES = 8192, 2**30
# Photographs of the loaders' row: so many, (width, height).
PHOTOGRAPHS, PHOTOGRAPH_SIZE = 256, (400, 300)
Make = Callable[[], Sequence[Candidate]]
# Two epochs of fine-tuning, with one evaluation.
FINETUNING = (
    '--config configs/finetune.yaml schedule.epochs=2 schedule.min_updates=1 run.eval_every=2 run.throughput_batches=0 '
    'run.tensorboard=false'
)
# The trainer's row: what it trains, on a batch that stays where it is.
STEP = (
    '--config smoke/one_epoch model.depth=12 model.embed_dim=192 model.num_heads=192 model.kernel_size=11 '
    'model.patch_size=16 data.img_size=[224,224] data.batch_size=16 optim.clip_grad=null ema.decay=null '
    'ema.warmup=false'
)


class Measurement(NamedTuple):
    """A value; of a time also quartiles over the rounds, on a GPU the milliseconds of the other and of ours."""

    measured: float
    ratio_quartiles: tuple[float, float] | None = None
    milliseconds_pair: tuple[float, float] | None = None


def speed(
    make: Make, direction: str = 'forward', dtype: str = 'float32', device: torch.device = CPU, *, rounds: int
) -> Measurement:
    """Measure the time of the first candidate over the last one's.

    Args:
        dtype: Key of PRECISIONS, of autocast around all calls, which then casts the weights once.
    """
    with autocast(device, dtype):
        first, own = _rows(make(), device, rounds, directions=[direction], memory=False)
    # Absolute times of a processor say nothing of another.
    pair = (first['milliseconds'], own['milliseconds']) if device.type == 'cuda' else None
    return Measurement(own['ratio'], own['ratio_quartiles'], pair)


def memory(make: Make, direction: str = 'forward', *, rounds: int) -> Measurement:
    """Measure the peak of the last candidate over the first one's."""
    return Measurement(_rows(make(), CPU, 0, directions=[direction])[1]['peak_ratio'])


def memory_exponent(make: Callable[[int], Candidate], lengths: tuple[int, int], *, rounds: int) -> Measurement:
    """Measure the exponent with which the forward's peak memory grows in the tokens; 1 is linear."""
    growth = memory(lambda: [make(length) for length in lengths], rounds=rounds).measured
    return Measurement(math.log(growth) / math.log(lengths[1] / lengths[0]))


def saved_bytes(operation: Operation, *, rounds: int) -> Measurement:
    """Measure the bytes kept for the backward over attention's."""
    attention, own = (each.prepare(True) for each in candidates_of([operation])[::2])
    # q, k and v count: attention and the operation are given the same. The position bias is a weight.
    return Measurement(saved_memory(own.forward, own.leaves[3:]) / saved_memory(attention.forward))


def call_candidates(operation: Operation) -> list[Candidate]:
    """Return an operation, and `F.scaled_dot_product_attention` with its heads split before."""

    def attend(training: bool) -> Prepared:
        inputs = draw_qkv(operation.shape, torch.float32, CPU, training)
        q, k, v = (x.unflatten(2, (operation.heads, -1)).transpose(1, 2) for x in inputs)
        return Prepared(lambda: F.scaled_dot_product_attention(q, k, v))

    return [Candidate('AFT', partial(operation.own, torch.float32, CPU)), Candidate('SDPA', attend)]


# It takes minutes: once for all that is measured of it.
decode = cache(partial(measure_decode, CPU))


def decoding(name: str, batch: int, key: str, *, rounds: int) -> Measurement:
    """Return a measurement of `measure_decode`, `ratio` or `flatness`."""
    rows = decode(min(rounds, SLOW_ROUNDS))
    row = next(row for row in rows if (row['name'], row['batch_size']) == (name, batch))
    return Measurement(row[key], row[f'{key}_quartiles'])


def loader_cost(files: str, *, rounds: int) -> Measurement:
    """Measure the CPU time of an image of our loader over timm's, of a 'folder', or FFCV's own, 'ffcv'."""
    with TemporaryDirectory() as folder:
        source = Path(folder) / 'images'
        for split, count in (('train', PHOTOGRAPHS), ('val', 2)):
            _write_photographs(source / split, count)
        if files == 'ffcv':
            from tools.write_ffcv import main as write_ffcv

            images, source = source, Path(folder) / 'ffcv'
            with redirect_stdout(StringIO()):
                write_ffcv(['--data', str(images), '--out', str(source), '--workers', '0', '--quiet'])
        # In this process, whose time is counted finest.
        row = measure_loaders([str(source)], 224, 64, 0, min(rounds, SLOW_ROUNDS))[0]
        return Measurement(row['cpu_ratio'], row['cpu_quartiles'])


def step_cost(*, rounds: int) -> Measurement:
    """Measure the time of an update by our trainer over that of a written-out one of timm's task, on one batch."""
    words = [*STEP.split(), '--rounds', str(rounds), f'run.cpu_threads={torch.get_num_threads()}']
    # The trainer is a program of its own: tools import nothing of it.
    command = [sys.executable, '-m', 'train.throughput', *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(r'bare update: ([\d.]+), quartiles ([\d.]+) to ([\d.]+)', done.stdout)
    if match is None:
        raise RuntimeError(f'expected the ratio of updates from train.throughput, got {done.stderr or done.stdout}')
    value, low, high = map(float, match.groups())
    return Measurement(value, (low, high))


def finetuning_speed(*, rounds: int) -> Measurement:
    """Measure the images/s of fine-tuning, loading included, over those of the same experiment without its options."""
    with TemporaryDirectory() as folder:
        source, ratios = Path(folder) / 'images', []
        _write_photographs(source, PHOTOGRAPHS)
        for turn in range(min(rounds, SLOW_ROUNDS)):
            words = [*FINETUNING.split(), f'data.dir={source}', f'run.cpu_threads={torch.get_num_threads()}']
            own, plain = (
                _images_per_second([*words, *options, f'run.dir={folder}/{turn}/{place}'])
                for place, options in enumerate(((), ('run.amp=none', 'optim.args={fused: false}')))
            )
            ratios.append(own / plain)
    return Measurement(median(ratios), quartiles(ratios))


def _images_per_second(words: Sequence[str]) -> float:
    # The trainer is a program of its own: tools import nothing of it.
    done = subprocess.run([sys.executable, '-m', 'train.imagenet', *words], capture_output=True, text=True, check=False)
    found = re.findall(r'(\d+) images/s', done.stdout)
    if not found:
        raise RuntimeError(f'expected images/s from train.imagenet, got {done.stderr or done.stdout}')
    # The first epoch has the first calls.
    return float(found[-1])


def roofline_share(operation: Operation, dtype: torch.dtype, device: torch.device, *, rounds: int) -> Measurement:
    """Measure the shortest time that a GPU could take for a forward over the time of its kernels.

    That is the larger of the times for its floating-point operations, and for q, k, v and the result, each read or
    written once, at the rates of a matrix product and a copy.
    """
    flops, bandwidth = device_rates(dtype, device, rounds)
    prepared = operation.own(dtype, device, False)
    with torch.inference_mode():
        with FlopCounterMode(display=False) as counter:
            result = prepared.forward()
        count = sum(x.nbytes for x in (*prepared.leaves[:3], result))
        kernels = time_kernels(prepared.forward, device, rounds)
    shortest = max(counter.get_total_flops() / flops, count / bandwidth)
    shares = [shortest / seconds for seconds in kernels]
    return Measurement(median(shares), quartiles(shares), (1e3 * shortest, 1e3 * median(kernels)))


def device_rates(dtype: torch.dtype, device: torch.device, rounds: int) -> tuple[float, float]:
    """Return floating-point operations a second of a matrix product, and bytes read and written a second of a copy."""
    a, b = (torch.randn(MATRIX_SIDE, MATRIX_SIDE, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product, copy = time_interleaved([lambda: a @ b, lambda: target.copy_(source)], device, rounds, warmup=3)
    return 2 * MATRIX_SIDE**3 / product.seconds, 2 * COPY_BYTES / copy.seconds


def time_kernels(call: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Return the seconds of the kernels of a call in every round, each with CALLS of it after one that is not counted.

    Raises:
        RuntimeError: the profiler sees no kernels.
    """
    call()
    seconds = []
    for _ in range(rounds):
        synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(CALLS):
                call()
            synchronize(device)
        kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
        spent = [event.time_range.elapsed_us() for event in kernels if not event.is_user_annotation]
        seconds.append(sum(spent) / 1e6 / CALLS)
    if not all(seconds):
        raise RuntimeError(f'expected kernels on {device}, got none from the profiler')
    return seconds


def _rows(candidates: Sequence[Candidate], *args: Any, **options: Any) -> list[dict[str, Any]]:
    """Return the rows of the first and the last candidate, which is compared with it.

    Raises:
        RuntimeError: one of them failed.
    """
    rows = compare([each._replace(baseline=None) for each in (candidates[0], candidates[-1])], *args, **options)
    for row in rows:
        if 'error' in row:
            raise RuntimeError(f'{row["name"]}: {row["error"]}')
    return rows


def _write_photographs(folder: Path, count: int) -> None:
    """Write JPEG files of two classes, with colours that change slowly and some noise, as in photographs."""
    for index in range(count):
        path = folder / f'class_{index % 2}' / f'{index}.jpg'
        path.parent.mkdir(parents=True, exist_ok=True)
        bands = [Image.effect_noise((12, 9), 60).resize(PHOTOGRAPH_SIZE, Image.Resampling.BICUBIC) for _ in 'RGB']
        noise = Image.effect_noise(PHOTOGRAPH_SIZE, 8)
        Image.merge('RGB', [Image.blend(band, noise, 0.5) for band in bands]).save(path, quality=90)
