#!/usr/bin/env bash
# executorch 1.5.1: a buffer that the model changes loses its value in a program, without a word, and begins at 0.
#
# The memory of such a buffer is planned but nothing is written into it, as it is taken for a cache that the first call fills.
# One guesses that it begins at the value it has, as a buffer that is only read does. Who exports a model with a counter,
# running statistics or a state that begins at something else meets it: `InitializedMutableBufferPass`.
#
# Seen: a buffer of 5, counted up by each call: torch 6 7 8, ExecuTorch 1 2 3, with the pass 6 7 8
PACKAGES='executorch==1.5.1 torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import torch
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from executorch.extension.pybindings.portable_lib import _load_for_executorch_from_buffer


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('count', torch.full((1,), 5.0))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count


def program(*passes):
    """Return a program of the counter as a function."""
    exported = torch.export.export(Counter(), (torch.zeros(1),))
    config = ExecutorchBackendConfig(passes=list(passes))
    loaded = _load_for_executorch_from_buffer(to_edge_transform_and_lower(exported).to_executorch(config).buffer)
    return lambda x: loaded.forward((x,))[0]


def outputs(count):
    return [int(count(torch.zeros(1))) for _ in range(3)]


seen = outputs(Counter()), outputs(program()), outputs(program(InitializedMutableBufferPass(['count'])))
texts = (' '.join(map(str, each)) for each in seen)
print('a buffer of 5, counted up by each call: torch {}, ExecuTorch {}, with the pass {}'.format(*texts))
raise SystemExit(seen != ([6, 7, 8], [1, 2, 3], [6, 7, 8]))
P
