"""Where the time of an image classifier goes: milliseconds of each kind of layer, next to those of the baseline."""

import argparse
import time
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import nn

from aft_vision.devices import synchronize
from tools.benchmark.compare import deploy, draw
from tools.benchmark.models import create, model_names
from tools.benchmark.printer import Report

# Modules that do nothing in evaluation.
IDLE = (nn.Identity, nn.Dropout)


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure fused models and the baseline on random images of each size, in turn in every round, a layer at a time.

    Of all layers of a kind, without the modules in them, the least of the rounds counts: CPU time with one thread of a
    CPU, else wall time.
    """
    names = model_names(args.baseline, *args.models)
    found: dict[tuple[Any, str, str], list[float]] = defaultdict(list)
    for size in args.sizes:
        images = draw(args.batch_size, 3, *size).to(device)
        models = {name: deploy(create(name, size)).to(device) for name in names}
        clocks = {name: _watch(model, device) for name, model in models.items()}
        for turn in range(args.rounds + 1):
            for name, clock in clocks.items():
                clock.clear()
                with torch.inference_mode():
                    models[name](images)
                # The first turn warms up.
                for kind, seconds in clock.items() if turn else ():
                    found[size, name, kind].append(seconds)
    rows = [
        {'size': size, 'name': name, 'what': kind, 'milliseconds': 1e3 * min(seconds)}
        for (size, name, kind), seconds in found.items()
    ]
    return Report(rows, f'all layers of a kind, without those in them, least of the rounds; batch of {args.batch_size}')


def _watch(model: nn.Module, device: torch.device) -> dict[str, float]:
    """Return the seconds of every kind of layer, which calls of the model add to."""
    seconds: dict[str, float] = defaultdict(float)
    # Of modules that are running: when each began, and the time of those in it.
    running: list[list[float]] = []
    # The time of one thread on a CPU does not count other processes.
    clock = time.thread_time if device.type == 'cpu' and torch.get_num_threads() == 1 else time.perf_counter

    def begin(*_: Any) -> None:
        synchronize(device)
        running.append([clock(), 0.0])

    def end(kind: str, *_: Any) -> None:
        synchronize(device)
        start, inner = running.pop()
        whole = clock() - start
        seconds[kind] += whole - inner
        if running:
            running[-1][1] += whole

    for name, module in model.named_modules():
        if not isinstance(module, IDLE):
            kind = '.'.join(part for part in name.split('.') if not part.isdigit()) or 'model'
            module.register_forward_pre_hook(begin)
            module.register_forward_hook(partial(end, kind))
    return seconds
