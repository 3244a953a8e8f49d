"""Functions shared by the tools that sample from an autoregressive model."""

import argparse
import sys
from typing import Any

from aft_vision.devices import use_device
from aft_vision.models import AFTDecoder, load_decoder


def load_for(args: argparse.Namespace, task: str) -> AFTDecoder:
    """Load the model of the checkpoint.

    Raises:
        ValueError: it is not of that task.
    """
    model = load_decoder(args.checkpoint, use_device(args.device))
    if model.task != task:
        raise ValueError(f'expected a {task} model in {args.checkpoint}, got a {model.task} model')
    return model


def sampling_rules(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `Session.complete`, without the seeds."""
    return dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, progress=sys.stderr.isatty())
