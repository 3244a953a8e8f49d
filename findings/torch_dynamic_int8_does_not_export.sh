#!/usr/bin/env bash
# torch 2.14.1: a model of `torch.ao.quantization.quantize_dynamic` does not go through torch.export.
#
# Its weights are packed in an object of the older scripting compiler, which the exporter cannot take apart. One guesses that
# what runs also exports, as the same layers by torchao's `quantize_` do. Who quantises for a CPU and then wants a file without
# Python meets it: torchao, or ONNX first and its quantiser after.
#
# Seen: float exports, int8 AttributeError
PACKAGES='torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - 2> errors <<'P'
import torch


def exported(model):
    """The outcome of an export."""
    try:
        torch.export.export(model, (torch.randn(2, 4),))
    except AttributeError as error:
        return type(error).__name__
    return 'exports'


model = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
seen = exported(model), exported(torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}))
print('float {}, int8 {}'.format(*seen))
raise SystemExit(seen != ('exports', 'AttributeError'))
P
