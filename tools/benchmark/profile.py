"""Where the time of an image classifier goes: milliseconds of each kind of layer, next to those of the baseline."""

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from timm.utils import reparameterize_model
from torch import Tensor, nn

from aft_vision.timing import synchronize
from tools.benchmark.models import check_model, create
from tools.benchmark.printer import Report

MODELS = ('aft_conv_tiny', 'aft_conv_tiny_k11_h32', 'aft_full_tiny')
SIZES = ((224, 224), (384, 384))
# Modules that do nothing in evaluation.
IDLE = (nn.Identity, nn.Dropout)


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the baseline and models on images of each size, a layer at a time."""
    names = list(dict.fromkeys([args.baseline, *(args.models or MODELS)]))
    for name in names:
        check_model(name)
    rows = []
    for size in args.sizes or SIZES:
        rows += measure_layers(names, args.batch_size, size, device, args.rounds)
    return Report(rows, f'all layers of a kind, without those in them, least of the rounds; batch of {args.batch_size}')


def measure_layers(
    names: Sequence[str], batch: int, size: tuple[int, int], device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    """Measure the layers of fused models on random images, in turn in every round.

    Returns:
        A row for each model and kind of layer: `size`, `name`, `what` (the layer's path without indices) and
        `milliseconds`, the least of the rounds, of all layers of that kind without the modules in them: CPU time with
        one thread of a CPU, else wall time.
    """
    images = torch.randn((batch, 3, *size), generator=torch.Generator().manual_seed(0)).to(device)
    clocks = {name: _Clock(reparameterize_model(create(name, size), inplace=True).to(device), device) for name in names}
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with torch.inference_mode():
        for turn in range(rounds + 1):
            for name, clock in clocks.items():
                # The first turn warms up.
                for kind, seconds in clock.measure(images).items() if turn else ():
                    found[name, kind].append(seconds)
    return [
        {'size': size, 'name': name, 'what': kind, 'milliseconds': 1e3 * min(seconds)}
        for (name, kind), seconds in found.items()
    ]


class _Clock:
    """The time of every kind of layer of a model."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.alone = device.type == 'cpu' and torch.get_num_threads() == 1
        self.seconds: dict[str, float] = defaultdict(float)
        # Of modules that are running: when each began, and the time of those in it.
        self.running: list[list[float]] = []
        for name, module in model.named_modules():
            if not isinstance(module, IDLE):
                kind = '.'.join(part for part in name.split('.') if not part.isdigit()) or 'model'
                module.register_forward_pre_hook(lambda *_: self._begin())
                module.register_forward_hook(lambda *_, kind=kind: self._end(kind))

    def measure(self, images: Tensor) -> dict[str, float]:
        """Return the seconds of one forward by kind of layer."""
        self.seconds.clear()
        self.model(images)
        return dict(self.seconds)

    def _now(self) -> float:
        synchronize(self.device)
        # The time of one thread on a CPU does not count other processes.
        return time.thread_time() if self.alone else time.perf_counter()

    def _begin(self) -> None:
        self.running.append([self._now(), 0.0])

    def _end(self, kind: str) -> None:
        start, inner = self.running.pop()
        whole = self._now() - start
        self.seconds[kind] += whole - inner
        if self.running:
            self.running[-1][1] += whole
