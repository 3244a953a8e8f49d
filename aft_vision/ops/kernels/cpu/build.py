"""Builds the C++ kernels at first use and keeps them; what cannot be built is said once and done without.

They include nothing of torch, so one call of the compiler is all: no headers, no ninja, and nothing that depends on the
version of torch or of Python.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob('*.cpp'))
HEADERS = sorted(FOLDER.glob('*.h'))
# Not -march=native: machines that differ may share the cache. Not -ffast-math: it would undo the rounding in exp.
# Predictive commoning keeps sources of the next tap in registers that the sums need; without it the forward is faster.
FLAGS = ['-O3', '-std=c++17', '-fopenmp', '-ffp-contract=fast', '-fno-math-errno', '-fno-predictive-commoning']
VECTOR_FLAGS = {
    'AVX2': ['-mavx2', '-mfma'],
    'AVX512': ['-mavx512f', '-mavx512bw', '-mavx512dq', '-mavx512vl', '-mfma'],
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, after one line in the log, where they cannot be built."""
    try:
        return ctypes.CDLL(str(_build()))
    except (OSError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        _logger.warning(
            'the C++ kernels cannot be built, so AFT-conv with a head per channel, the causal operations and decoding '
            'use the slower torch forms: %s',
            reason,
        )
        return None


def compiled() -> ctypes.CDLL:
    """The kernels where `library` has them."""
    found = library()
    assert found is not None
    return found


def _build() -> Path:
    """The shared library, compiled unless it was before.

    Raises:
        OSError: the folder cannot be written.
        RuntimeError: there is no compiler, or it fails.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    flags = FLAGS + VECTOR_FLAGS.get(capability, [])
    content = b''.join(path.read_bytes() for path in SOURCES + HEADERS)
    version = hashlib.sha256(content + ' '.join(flags).encode()).hexdigest()[:12]
    # Where torch keeps extensions that it builds.
    root = os.environ.get('TORCH_EXTENSIONS_DIR') or Path.home() / '.cache' / 'torch_extensions'
    path = Path(root) / 'aft_vision' / f'kernels_{capability.lower()}_{version}.so'
    if path.exists():
        return path
    chosen = os.environ.get('CXX', 'c++')
    compiler = shutil.which(chosen)
    if compiler is None:
        raise RuntimeError(f'expected a C++ compiler, got none by the name of {chosen} (set CXX to choose another)')
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes that start together may all compile; each gives the file its name when it is whole.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *flags, '-shared', '-fPIC', *map(str, SOURCES), '-o', str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f'{chosen} failed: {done.stderr.strip()}')
        os.replace(built, path)
    return path
