#!/usr/bin/env bash
# safetensors 0.8.0: a model in channels_last cannot be saved.
#
# `save_file` refuses tensors that are not contiguous in the default layout, and the weights of a convolution in channels_last
# are not. `torch.save` takes them. One guesses that the values are saved in their usual order. Who trains convolutions in
# channels_last, as timm's script does with `--channels-last`, meets it: `{k: v.contiguous() for k, v in state.items()}`.
#
# Seen: ValueError, non contiguous tensor
PACKAGES='safetensors==0.8.0 torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
"$PY" - <<'P'
import torch
from safetensors.torch import load_file, save_file

model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
try:
    save_file(model.state_dict(), 'model.safetensors')
    seen = 'saved'
except ValueError as error:
    seen = f'ValueError, {"non contiguous tensor" if "non contiguous" in str(error) else error}'
save_file({name: value.contiguous() for name, value in model.state_dict().items()}, 'model.safetensors')
print(seen)
raise SystemExit('non contiguous' not in seen or not torch.equal(load_file('model.safetensors')['weight'], model.weight))
P
