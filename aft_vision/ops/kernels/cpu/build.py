"""Builds the C++ kernels at first use and keeps them; what cannot be built is said once and done without.

They include nothing of torch, so one call of the compiler is all: no headers, no ninja, and nothing that depends on the
version of torch or of Python.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

_logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob('*.cpp'))
HEADERS = sorted(FOLDER.glob('*.h'))
# Not -march=native: machines that differ may share the cache. Not -ffast-math: it would undo the rounding in exp.
FLAGS = ['-O3', '-std=c++17', '-fopenmp', '-ffp-contract=fast', '-fno-math-errno']
# Predictive commoning keeps sources of the next tap in registers that the sums need; without it the forward is faster.
# Clang has no such thing, and refuses the flag.
GCC_FLAGS = ['-fno-predictive-commoning']
# A new build takes the place of those of other versions that nobody has loaded for so long: 30 days.
UNUSED_SECONDS = 30 * 24 * 3600
VECTOR_FLAGS = {
    'AVX2': ['-mavx2', '-mfma'],
    'AVX512': ['-mavx512f', '-mavx512bw', '-mavx512dq', '-mavx512vl', '-mfma'],
}


# Of AVX512 machines that multiply bfloat16. GCC knows it from version 10 on.
HALF_FLAG = '-mavx512bf16'


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, after one line in the log, where they cannot be built."""
    try:
        try:
            return _load(_build())
        except OSError:
            # What was kept is damaged, or belongs to a system with other libraries.
            return _load(_build(anew=True))
    except (OSError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        _logger.warning(
            'the C++ kernels cannot be built, so AFT-full, AFT-conv, AFT with one offset a channel, the causal '
            'operations and decoding use the slower torch forms: %s',
            reason,
        )
        return None


def compiled() -> ctypes.CDLL:
    """The kernels where `library` has them."""
    found = library()
    assert found is not None
    return found


def _load(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    # The time of its last use. The folder may be one that others have filled.
    with contextlib.suppress(OSError):
        os.utime(path)
    return found


def _build(anew: bool = False) -> Path:
    """The shared library, compiled unless it was before.

    Args:
        anew: whether to compile it although it was.

    Raises:
        OSError: the folder cannot be written.
        RuntimeError: there is no compiler, or it fails.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    flags = FLAGS + VECTOR_FLAGS.get(capability, [])
    if capability == 'AVX512' and torch.cpu._is_avx512_bf16_supported():
        flags = [*flags, HALF_FLAG]
    chosen = os.environ.get('CXX', 'c++')
    compiler = shutil.which(chosen)
    content = b''.join(path.read_bytes() for path in SOURCES + HEADERS)
    version = _digest(content + ' '.join(flags + GCC_FLAGS).encode())
    # Where torch keeps extensions that it builds.
    root = os.environ.get('TORCH_EXTENSIONS_DIR') or Path.home() / '.cache' / 'torch_extensions'
    folder, kind = Path(root) / 'aft_vision', f'kernels_{platform.machine()}_{capability.lower()}'
    name = f'{kind}_{version}'
    if compiler is None:
        kept = [] if anew else sorted(folder.glob(f'{name}_*.so'))
        if kept:
            return kept[0]
        raise RuntimeError(f'expected a C++ compiler, got none by the name of {chosen} (set CXX to choose another)')
    identity = _identify(compiler)
    path = folder / f'{name}_{_digest(identity)}.so'
    if anew or not path.exists():
        command = [compiler, *flags, *([] if b'clang' in identity else GCC_FLAGS)]
        try:
            _compile(command, path)
        except RuntimeError as error:
            if HALF_FLAG not in str(error):
                raise
            _compile([x for x in command if x != HALF_FLAG], path)
        _remove_unused([other for other in folder.glob(f'{kind}_*.so') if other != path])
    return path


def _compile(command: list[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes that start together may all compile; each gives the file its name when it is whole.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [*command, '-shared', '-fPIC', *map(str, SOURCES), '-o', str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f'{Path(command[0]).name} failed: {_first_error(done.stderr)}')
        os.replace(built, path)


def _remove_unused(paths: Iterable[Path]) -> None:
    for path in paths:
        # Another process may remove it too. One that has loaded it keeps what it has.
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED_SECONDS:
                path.unlink()


def _first_error(output: str) -> str:
    # What a compiler says before only leads to it.
    lines = output.strip().splitlines()
    return next((line for line in lines if 'error:' in line), lines[0] if lines else 'it says nothing')


def _identify(compiler: str) -> bytes:
    # By what it says of its name and version.
    return subprocess.run([compiler, '--version'], capture_output=True, check=False).stdout


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
