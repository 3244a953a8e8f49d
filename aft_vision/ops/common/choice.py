"""A measured choice between ways to compute the same result, where the fastest depends on the processor.

The first call of a shape class runs each way for a few milliseconds. The result is kept beside the compiled kernels,
in one file for a processor, a version of torch and of the kernels, so later processes choose the same without
measuring. Linear layers of fused models choose in this way, and operations with weights of a bias that does not change.
Training and models that are not fused have one order of forms on every machine.

What is measured while something else runs holds for its process alone. Nothing is measured in a process that was
forked, such as a worker of a DataLoader, nor after `measure_choices(False)`, for a service with a deadline: a shape
class that is not in the file takes its first way.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from aft_vision.ops.common.build import library_folder, sources_hash
from aft_vision.ops.common.locks import locked

# Each way runs this long, but at least five times.
SECONDS = 4e-3
# The first way stays unless another takes less than this share of its time.
SHARE = 0.95
# A measurement is not kept if in half of the rounds a way took longer than its shortest time by more than this share:
# something else is running.
SPREAD = 0.25
_PROCESS = os.getpid()
_measures = True


def measure_choices(enabled: bool) -> None:
    """Allow or forbid measuring in this process; choices that are recorded are used in either case."""
    global _measures
    _measures = enabled
    for forget in on_change:
        forget()


# Called when measuring is allowed or forbidden, to forget ways that were taken because nothing was measured.
on_change: list[Callable[[], None]] = []


def fastest(subject: str, shape: tuple[Any, ...], ways: Mapping[str, Callable[[], object]]) -> str:
    """Return the name of the fastest way, measured at the first call for this subject, shape and number of threads.

    Args:
        subject: what is computed.
        shape: the shape class, with everything else that the times depend on.
        ways: calls that compute it; the first one is the default.
    """
    key = f'{subject} {" ".join(map(str, shape))}, {torch.get_num_threads()} threads'
    found = recorded().get(key)
    if found is not None and found['chosen'] in ways:
        _used[key] = found
        return found['chosen']
    default = next(iter(ways))
    if len(ways) == 1 or not _measures or os.getpid() != _PROCESS:
        return default
    rounds = _time_rounds(ways)
    times = {name: min(seconds) for name, seconds in rounds.items()}
    best = min(times, key=times.__getitem__)
    chosen = best if times[best] < SHARE * times[default] else default
    choice = {'chosen': chosen, 'ms': {name: round(1e3 * seconds, 4) for name, seconds in times.items()}}
    busy = any(median(seconds) > (1 + SPREAD) * min(seconds) for seconds in rounds.values())
    return _remember(key, choice) if busy else _record(key, choice)


def recorded() -> dict[str, Any]:
    """Return the choices of this machine: by subject, shape and threads, the way chosen and the ms of each way."""
    path = choices_path()
    if path not in _records:
        _records[path] = {} if path is None else _read(path)
    return _records[path]


@functools.cache
def choices_path() -> Path | None:
    """Return the file of the choices for this processor, torch and these kernels; None without a home folder."""
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        return library_folder() / f'choices_{processor_key()}_{capability}_{torch.__version__}_{sources_hash()}.json'
    except RuntimeError:
        return None


def processor_key() -> str:
    """Return a name for a file of what holds on processors of this kind alone, with the same instructions."""
    features = hashlib.sha256(cpu_info('flags', 'Features').encode()).hexdigest()[:8]
    return re.sub(r'[^A-Za-z0-9.]+', '-', f'{processor_name()}_{features}')


def processor_name() -> str:
    """Return the name of the processor, with its family and model where Linux tells them."""
    # The name of a virtual machine's processor may not tell its generation; the family does.
    name = cpu_info('model name') or platform.processor() or platform.machine()
    family, model = cpu_info('cpu family'), cpu_info('model')
    return f'{name} (family {family}, model {model})' if family else name


def cpu_info(*names: str) -> str:
    """Return the value of one of these names in Linux's cpuinfo, for the first core, or ''."""
    path = Path('/proc/cpuinfo')
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(':')[2].strip() for line in lines if line.partition(':')[0].strip() in names), '')


def cpu_flags() -> set[str]:
    """Return the instructions of this processor that torch uses, by Linux's names."""
    # ATEN_CPU_CAPABILITY may limit torch, and with it our kernels.
    unused = {'AVX2': ('avx512', 'amx'), 'DEFAULT': ('avx', 'amx')}.get(torch.backends.cpu.get_cpu_capability(), ())
    return {flag for flag in cpu_info('flags', 'Features').split() if not flag.startswith(unused)}


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16; otherwise it is widened, and float32 is faster."""
    if device.type == 'cuda':
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == 'cpu' and bool({'avx512_bf16', 'amx_bf16', 'bf16'} & cpu_flags())


def describe_choices() -> list[str]:
    """Return a line for each choice that this process used: what was chosen, and the milliseconds of each way."""
    return [
        f'{key}: {found["chosen"]} ({", ".join(f"{name} {ms:.3g} ms" for name, ms in found["ms"].items())})'
        for key, found in sorted(_used.items())
    ]


# Choices that this process asked for.
_used: dict[str, dict[str, Any]] = {}
# Contents of the file, which other processes add to, as this process knows them.
_records: dict[Path | None, dict[str, Any]] = {}


def _time_rounds(ways: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    # In turns, so that other work on the machine slows all of them.
    found: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + SECONDS * len(ways)
    for count in range(10_000):
        for name, call in ways.items():
            start = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - start)
        if count > 3 and time.perf_counter() > end:
            break
    return found


def _read(path: Path) -> dict[str, Any]:
    # Ignore a file that is missing, cut off or holds anything else.
    found: Any = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
    if not isinstance(found, dict):
        return {}
    for each in found.values():
        if (
            not isinstance(each, dict)
            or not isinstance(each.get('ms'), dict)
            or each.get('chosen') not in [*each['ms']]
        ):
            return {}
    return found


def _record(key: str, choice: dict[str, Any]) -> str:
    # Add a choice to the file and return it; that of another process for the same ways stays, so that all choose alike.
    path = choices_path()
    if path is None:
        return _remember(key, choice)
    # A folder that cannot be written: this process alone remembers.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix('.lock')):
            others = _read(path)
            known = others.get(key, choice)
            choice = known if known['chosen'] in choice['ms'] else choice
            part = path.with_suffix(f'.{os.getpid()}')
            part.write_text(json.dumps({**others, key: choice}, indent=1))
            os.replace(part, path)
            recorded().update(others)
    return _remember(key, choice)


def _remember(key: str, choice: dict[str, Any]) -> str:
    # In this process.
    recorded()[key] = _used[key] = choice
    return choice['chosen']
