"""What the tools that draw from an autoregressive model have in common."""

import argparse
import hashlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from aft_vision.data.sampling import SAMPLE, derive_seed
from aft_vision.evaluate import resolve_device
from aft_vision.models import AFTDecoder, Sampler, load_decoder, run_batches
from aft_vision.models.sampling import fingerprint
from tools.arguments import add_device


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Take the checkpoint, the rules of drawing, and where an interrupted run goes on."""
    add = parser.add_argument
    add('--checkpoint', type=Path, required=True, help='a checkpoint of the model')
    add('--temperature', type=float, default=1.0, help='divides the logits; 0 takes the likeliest token (default: 1)')
    add('--top-k', type=int, help='draw from this many of the likeliest tokens (default: all)')
    add('--top-p', type=float, help='draw from the likeliest tokens that add up to this chance (default: all)')
    add('--seed', type=int, default=0, help='of the random numbers (default: 0)')
    add('--state', type=Path, metavar='FILE', help='where an interrupted run is kept, and goes on from (default: none)')
    add_device(parser)


def load(args: argparse.Namespace, task: str) -> AFTDecoder:
    """The model of the checkpoint.

    Raises:
        ValueError: it is not of that task.
    """
    model = load_decoder(args.checkpoint, resolve_device(args.device))
    if model.task != task:
        raise ValueError(f'expected a {task} model in {args.checkpoint}, got a {model.task} model')
    return model


def rules(args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """The arguments of a `Sampler` for one of several batches, each with random numbers of its own."""
    return dict(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=derive_seed(SAMPLE, args.seed, batch)
    )


def draw(
    samplers: Sequence[Callable[[], Sampler]], args: argparse.Namespace, model: AFTDecoder, about: dict[str, Any]
) -> list[Tensor]:
    """Run samplers; an interrupt saves the state, and leaves with a message on how to go on.

    Args:
        about: what else decides the result; a state of something else is not resumed.

    Raises:
        ValueError: the state is of another run.
        SystemExit: the run was interrupted.
    """
    about = {'weights': fingerprint(model), **rules(args, 0), 'seed': args.seed, **about}
    with _stop_on_signals(args.state is not None) as stopped:
        tokens = run_batches(
            samplers, args.state, about, progress=sys.stderr.isatty(), should_stop=lambda: bool(stopped)
        )
    if tokens is None:
        print(f'stopped; the same command goes on from {args.state}', file=sys.stderr)
        raise SystemExit(130)
    return tokens


def content_hash(*tensors: Tensor) -> str:
    """A hash of the values of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


@contextmanager
def _stop_on_signals(active: bool) -> Iterator[list[int]]:
    # An interrupt in the middle of a step would leave half of the state moved on; so it is kept until the step is over.
    received: list[int] = []
    if not active:
        yield received
        return
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
