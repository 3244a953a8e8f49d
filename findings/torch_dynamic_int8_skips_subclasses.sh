#!/usr/bin/env bash
# torch 2.14.1: `torch.ao.quantization.quantize_dynamic` leaves out subclasses of nn.Linear, without a word.
#
# It looks up the type of each module itself, so a layer that only adds a method stays float32, and the model keeps its size
# and speed. One guesses `isinstance`. Who quantises a model with linear layers of its own meets it: quantise before layers are
# replaced, or pass their types with a mapping.
#
# Seen: Linear -> quantized, subclass of Linear -> not quantized
PACKAGES='torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import torch


class Layer(torch.nn.Linear):
    """A linear layer of somebody's own."""


model = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(4, 4), Layer(4, 4)), {torch.nn.Linear})
seen = ['quantized' if 'quantized' in type(layer).__module__ else 'not quantized' for layer in model]
print(f'Linear -> {seen[0]}, subclass of Linear -> {seen[1]}')
raise SystemExit(seen != ['quantized', 'not quantized'])
P
