#!/usr/bin/env bash
# Triton 3.8.0 (torch 2.14.1): an autotuned kernel does not run in the interpreter on a machine without a GPU.
#
# TRITON_INTERPRET=1 runs kernels without a device, but `triton.autotune` asks for the driver to time its configs, also where
# it has nothing to choose from. One guesses that the first config runs, as there is nothing to time. Who tests kernels in
# continuous integration meets it: call the kernel within, with the config's values.
#
# Seen: autotuned RuntimeError: 0 active drivers; within 16
PACKAGES='torch==2.14.1 numpy==2.4.6'
. "$(dirname "$0")/environment"
cat > kernel.py <<'P'
import os

os.environ.update(TRITON_INTERPRET='1', CUDA_VISIBLE_DEVICES='')
import torch
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({'SIZE': 16}), triton.Config({'SIZE': 32})], key=['n'])
@triton.jit
def write(result, n, SIZE: tl.constexpr):
    tl.store(result + tl.arange(0, 1), SIZE)


result = torch.zeros(1)
try:
    write[(1,)](result, 1)
    seen = 'runs'
except RuntimeError as error:
    seen = f'{type(error).__name__}: {str(error).split(" (")[0]}'
write.fn[(1,)](result, 1, SIZE=16)
print(f'autotuned {seen}; within {result.item():.0f}')
raise SystemExit('drivers' not in seen or result.item() != 16)
P
"$PY" kernel.py
