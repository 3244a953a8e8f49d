"""Measure whether the loader or the model limits a run, and the overhead of the trainer.

python -m train.throughput --config FILE [--rounds N] [section.key=value ...]

Nothing is trained. The command prints images/s of the loader, of the model on a batch that stays on the device, and of
both together. Then it prints the time of an update by the trainer relative to a minimal one (forward, backward and
optimizer) on the same batch: the median ratio of interleaved updates, and its quartiles.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path

from train.command_line import CommandParser, run_command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument(
        '--config', type=Path, required=True, help='the YAML experiment, or the name of one of the package'
    )
    parser.add_argument('--rounds', type=int, default=20, help='batches and updates that are timed (default: 20)')
    parser.add_argument('overrides', nargs='*', metavar='section.key=value', help='changes to the experiment')
    return parser.parse_intermixed_args(argv)


if __name__ == '__main__':
    parse_args()

import torch

from aft_vision.data import Loaders, move
from aft_vision.devices import synchronize
from aft_vision.timing import Timing, time_interleaved
from train.build import build_loaders, build_state, resolve_images
from train.config import load_config
from train.distributed import join_world
from train.engine import train_step
from train.objective import Batch
from train.state import TrainState


@dataclass(frozen=True)
class Throughput:
    """Images/s, or sequences/s, over all processes.

    Attributes:
        loader: Rate of the loader without the model.
        model: Rate of forward and backward passes on one batch, with the augmentation of training.
        both: Rate of these passes on the batches of the loader.
        unit: Unit that is counted.
    """

    loader: float
    model: float
    both: float
    unit: str = 'images'

    def __str__(self) -> str:
        limit = 'the loader' if self.loader < self.model else 'the model'
        rates = f'loader alone {self.loader:.0f}, model alone {self.model:.0f}, both {self.both:.0f}'
        return f'{self.unit}/s: {rates}; {limit} limits the run'


def measure_throughput(state: TrainState, loaders: Loaders, batches: int) -> Throughput:
    """Time the loader, the model and both without changing the state.

    All images have the last of the training sizes.

    Args:
        batches: Number of timed batches in each case, after those that the loader has prefetched. A short epoch is
            loaded several times.
    """
    # Each loading process may have prefetched two batches. timm's loaders contain torch's.
    ahead = min(1 + 2 * getattr(loaders.train, 'loader', loaders.train).num_workers, len(loaders.train))
    # Use the whole epoch; training sets its own position later.
    loaders.set_epoch(state.progress.epoch, size=-1)
    resident: Batch = next(iter(loaders.train))
    cases: list[tuple[Iterable[Batch], int, Callable[[TrainState, Batch], None]]] = [
        (loaders.train, ahead, lambda state, batch: None),
        ([resident], 1, _forward_backward),
        (loaders.train, ahead, _forward_backward),
    ]
    rates = []
    with _restoring_buffers(state):
        for source, untimed, work in cases:
            again = chain.from_iterable(repeat(source))
            seconds = _time(state, islice(again, untimed + batches), work, untimed)
            rates.append(state.loop.batch_size // state.loop.accumulate * batches / seconds)
    return Throughput(rates[0], rates[1], rates[2], state.objective.unit)


def warm_up_ddp(state: TrainState) -> None:
    """Run two passes on a blank batch, so that sums over processes keep their order from then on.

    DistributedDataParallel changes the layout of its gradient buckets after the first pass. Three or more processes add
    the elements of a bucket in an order that depends on their positions. Without these passes, the first update of a
    restarted process would round differently from one that was not restarted.
    """
    if not state.world.is_distributed:
        return
    # The batch is as large as in training, so that a compiled model is compiled only once.
    blank = state.objective.blank(state.loop.batch_size // (state.loop.accumulate * state.world.size))
    with _restoring_buffers(state):
        # The layout changes at the beginning of the second pass.
        for _ in range(2):
            _forward_backward(state, blank)


@contextlib.contextmanager
def _restoring_buffers(state: TrainState) -> Iterator[None]:
    """Restore what passes in training mode change except the weights: running statistics and gradients."""
    state.model.train()
    buffers = {name: buffer.clone() for name, buffer in state.model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in state.model.named_buffers():
                buffer.copy_(buffers[name])
        state.optimizer.zero_grad(set_to_none=True)


def measure_overhead(state: TrainState, batch: Batch, rounds: int) -> Timing:
    """Time a bare update in turns with one by the trainer, on one batch; `ratio` is the trainer's time over its own.

    The weights change. What a recipe adds to the update, such as clipping and a moving average, counts as the
    trainer's: leave it out of the experiment to see what the trainer itself costs.
    """
    micro_batches = [batch] * state.loop.accumulate
    updates = [partial(update, state, micro_batches) for update in (train_step, _bare_update)]
    state.model.train()
    return time_interleaved(updates, state.world.device, rounds, min_seconds=0.0)[1]


def _bare_update(state: TrainState, micro_batches: Sequence[Batch]) -> None:
    state.optimizer.zero_grad(set_to_none=True)
    for batch in micro_batches:
        _forward_backward(state, batch)
    state.scaler.step(state.optimizer)
    state.scaler.update()


def _forward_backward(state: TrainState, batch: Batch) -> None:
    """Go forward and backward, and change no weight."""
    device = state.world.device
    # A copy, because a batch is changed in place.
    images, targets = state.augment(move(batch[0], device, copy=True), batch[1].to(device))
    with state.autocast():
        loss = state.task(images, targets)['loss']
    state.scaler.scale(loss + state.regularization.penalty()).backward()


def _time(state: TrainState, source: Iterable[Batch], work: Callable[[TrainState, Batch], None], untimed: int) -> float:
    """Return the seconds for all batches except the first ones."""
    start = time.perf_counter()
    for count, batch in enumerate(source, start=1):
        work(state, batch)
        if count == untimed:
            synchronize(state.world.device)
            start = time.perf_counter()
    synchronize(state.world.device)
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Print what limits the run, and what the trainer costs.

    Raises:
        ValueError: the experiment is not valid, or there is no round.
    """
    args = parse_args(argv)
    if args.rounds < 1:
        raise ValueError(f'expected at least 1 round, got {args.rounds}')
    config = load_config(args.config, args.overrides)
    with join_world(config.run.device, config.run.cpu_threads, config.run.timeout_minutes) as world:
        images = resolve_images(config)
        loaders = build_loaders(config, images, world)
        state, _ = build_state(config, images, loaders, world)
        throughput = measure_throughput(state, loaders, args.rounds)
        overhead = measure_overhead(state, next(iter(loaders.train)), args.rounds)
        if world.is_primary:
            print(throughput)
            low, high = overhead.quartiles
            print(f'update by the trainer / bare update: {overhead.ratio:.3f}, quartiles {low:.3f} to {high:.3f}')


if __name__ == '__main__':
    run_command(main)
