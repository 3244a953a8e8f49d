#!/usr/bin/env bash
# torch 2.14.1: a package of AOTInductor forgets what `forward` writes into a buffer of one element.
#
# The value that the buffer has at the export goes into the compiled code as a number, so each call begins from it again; a
# buffer of two elements keeps its state from call to call. One guesses that the package counts like the exported program, as
# it takes the buffer among its constants. Who exports a model with a counter, a temperature or a running scale meets it: give
# the state as an input and an output.
#
# Seen: a buffer of 5, counted up by each call: torch.export 6 7 8, AOTInductor 6 6 6, of two elements 6 7 8
PACKAGES='torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import torch
from torch import _inductor


class Counter(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer('count', torch.full((size,), 5.0))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count


def package(size):
    exported = torch.export.export(Counter(size), (torch.zeros(size),))
    return _inductor.aoti_load_package(_inductor.aoti_compile_and_package(exported, package_path=f'{size}.pt2'))


def outputs(count, size):
    return [int(count(torch.zeros(size))[0]) for _ in range(3)]


exported = torch.export.export(Counter(1), (torch.zeros(1),)).module()
seen = outputs(exported, 1), outputs(package(1), 1), outputs(package(2), 2)
texts = (' '.join(map(str, each)) for each in seen)
print('a buffer of 5, counted up by each call: torch.export {}, AOTInductor {}, of two elements {}'.format(*texts))
raise SystemExit(seen != ([6, 7, 8], [6, 6, 6], [6, 7, 8]))
P
