"""What the tools that draw from an autoregressive model have in common."""

import argparse
import hashlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from aft_vision.data.sampling import SAMPLE, derive_seed
from aft_vision.evaluate import resolve_device
from aft_vision.models import AFTDecoder, Sampler, load_decoder, run_batches
from aft_vision.models.sampling import fingerprint


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
