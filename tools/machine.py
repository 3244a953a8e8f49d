"""The machine, the commit and the precision of a measurement, and a check that the machine is idle."""

import contextlib
import importlib.metadata
import os
import platform
import time
from pathlib import Path

import timm
import torch

from aft_vision.cores import LoadMeter
from aft_vision.ops import operator
from aft_vision.ops.common.choice import cpu_info, processor_name

# float32, or float32 with autocast.
PRECISIONS = {'float32': None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
# Largest share of the available cores that other processes may use; above it times are not reported.
MAX_LOAD = 0.1
SAMPLE_SECONDS = 1.0


def check_load() -> None:
    """Watch the machine for a second, and raise an OSError if other processes use it."""
    meter = LoadMeter()
    if meter.load() is not None:
        time.sleep(SAMPLE_SECONDS)
        refuse_load(meter.load())
    elif hasattr(os, 'getloadavg'):
        refuse_load(os.getloadavg()[0] / (os.cpu_count() or 1))


def refuse_load(load: float | None) -> None:
    """Raise an OSError if other processes use more than MAX_LOAD; None, for unknown, passes."""
    if load is not None and load > MAX_LOAD:
        raise OSError(
            f'expected other processes to use at most {MAX_LOAD:.0%} of the available cores, got {load:.0%}; wait, or '
            'give --allow-load'
        )


def has_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16; otherwise it is widened, and its times mean little."""
    return bool({'avx512_bf16', 'amx_bf16', 'bf16'} & _cpu_flags())


def has_tiles() -> bool:
    """Return whether the processor multiplies bfloat16 in matrix tiles."""
    return 'amx_bf16' in _cpu_flags()


def describe_processor(device: torch.device | str = 'cpu') -> str:
    """Name the processor and the widest vector instructions that our kernels may use on it, or the accelerator."""
    place = torch.device(device)
    if place.type == 'cuda':
        return torch.cuda.get_device_name(place)
    flags = _cpu_flags()
    known = {'avx512_bf16': 'AVX-512 with bfloat16', 'avx512f': 'AVX-512', 'avx2': 'AVX2', 'asimd': 'NEON'}
    vectors = next((words for flag, words in known.items() if flag in flags), 'no vector instructions known')
    return f'{processor_name()}, {vectors}'


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device, without swapping; None if unknown."""
    if device.type != 'cuda':
        path = Path('/proc/meminfo')
        lines = path.read_text().splitlines() if path.exists() else []
        found = [line.split()[1] for line in lines if line.startswith('MemAvailable:')]
        return 1024 * int(found[0]) if found else None
    # Memory that torch caches is free too.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def autocast(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[object]:
    """Return the context of a precision, a key of PRECISIONS."""
    low = PRECISIONS[dtype]
    return contextlib.nullcontext() if low is None else torch.autocast(device.type, dtype=low)


def describe_machine(device: torch.device | str, precision: str = 'float32') -> str:
    """Describe the processor or accelerator, the threads, the precision and the versions in one line."""
    place = torch.device(device)
    name = torch.cuda.get_device_name(place) if place.type == 'cuda' else processor_name()
    threads = f'{os.cpu_count()} cores, {torch.get_num_threads()} threads'
    versions = f'torch {torch.__version__}, timm {timm.__version__}, Python {platform.python_version()}'
    return f'{name}; {threads}; {precision}; {versions}'


def describe_backends(device: torch.device | str) -> str:
    """Describe the backends of a device in one line: torch's libraries, and the forms of our operators."""
    if torch.device(device).type == 'cuda':
        libraries = f'CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, TF32 ' + (
            'on' if torch.backends.cuda.matmul.allow_tf32 else 'off'
        )
    else:
        from aft_vision.ops.common.cpp import library

        onednn = 'on' if torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled else 'off'
        kernel = 'cannot be built' if library() is None else 'built'
        libraries = f'{torch.backends.cpu.get_cpu_capability()}, oneDNN {onednn}, compiled kernel {kernel}'
    try:
        triton = f'Triton {importlib.metadata.version("triton")}'
    except importlib.metadata.PackageNotFoundError:
        triton = 'no Triton'
    return f'{libraries}; {triton}; backends of aft_vision: {", ".join(operator.BACKENDS)}'


def _cpu_flags() -> set[str]:
    # ATEN_CPU_CAPABILITY may limit torch, and with it our kernels.
    unused = {'AVX2': ('avx512', 'amx'), 'DEFAULT': ('avx', 'amx')}.get(torch.backends.cpu.get_cpu_capability(), ())
    return {flag for flag in cpu_info('flags', 'Features').split() if not flag.startswith(unused)}
