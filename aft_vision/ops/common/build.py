"""The build of the C++ kernels.

The sources include no torch headers, so the build is one call of the compiler, without ninja, and does not depend on
the version of torch or Python. A library is kept in the folder of torch's extensions, as torch keeps its own.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from aft_vision.ops.common.locks import locked

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.parent.glob('*/*.cpp'))
HEADERS = sorted(FOLDER.parent.glob('*/*.h'))
# Not -march=native, because different machines may share the cache. Not -ffast-math, which would undo the rounding in
# exp.
FLAGS = ['-O3', '-std=c++17', '-fopenmp', '-ffp-contract=fast', '-fno-math-errno']
# Predictive commoning keeps sources of the next tap in registers that the sums need, so the forward is faster without
# it. Clang does not have it and rejects the flag.
GCC_FLAGS = ['-fno-predictive-commoning']
VECTOR_FLAGS = {
    'AVX2': ['-mavx2', '-mfma'],
    'AVX512': ['-mavx512f', '-mavx512bw', '-mavx512dq', '-mavx512vl', '-mfma'],
}
# For AVX-512 machines that multiply bfloat16; GCC 10 or newer.
HALF_FLAG = '-mavx512bf16'


def build_library(rebuild: bool = False) -> Path:
    """Return the path of the shared library; compile it unless it is cached.

    Args:
        rebuild: compile it even if it is cached.

    Raises:
        OSError: the folder cannot be written.
        RuntimeError: there is no compiler, or it fails.
    """
    if os.name != 'posix':
        raise RuntimeError(f'expected a POSIX system, got {platform.system()}')
    capability = torch.backends.cpu.get_cpu_capability()
    flags = FLAGS + VECTOR_FLAGS.get(capability, [])
    if capability == 'AVX512' and torch.cpu._is_avx512_bf16_supported():
        flags = [*flags, HALF_FLAG]
    words = chosen_compiler()
    content = b''.join(path.read_bytes() for path in SOURCES + HEADERS)
    version = hashlib.sha256(content + shlex.join(words + flags + GCC_FLAGS).encode()).hexdigest()[:12]
    path = library_folder() / f'kernels_{platform.machine()}_{capability.lower()}_{version}.so'
    if path.exists() and not rebuild:
        return path
    compiler = shutil.which(words[0])
    if compiler is None:
        raise RuntimeError(f'expected a C++ compiler, got none by the name of {words[0]} (set CXX to choose another)')
    command = [compiler, *words[1:]]
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent / 'lock'):
        # Another process may have built it in the meantime.
        if path.exists() and not rebuild:
            return path
        identity = subprocess.run([*command, '--version'], capture_output=True, check=False).stdout
        command += [*flags, *([] if b'clang' in identity else GCC_FLAGS)]
        try:
            _compile(command, path)
        except RuntimeError as error:
            # The compiler, or an assembler that is older than it, does not know all instructions of the processor.
            if HALF_FLAG not in str(error) and 'no such instruction' not in str(error):
                raise
            _compile([*(x for x in command if x != HALF_FLAG), '-DAFT_NO_AMX'], path)
    return path


def library_folder() -> Path:
    """Return the folder of the libraries, below that of torch's extensions; it may not exist yet."""
    root = os.environ.get('TORCH_EXTENSIONS_DIR') or Path.home() / '.cache' / 'torch_extensions'
    return Path(root) / 'aft_vision'


def chosen_compiler() -> list[str]:
    """Return the words of $CXX, of which several are possible, such as `ccache g++`, or c++.

    Raises:
        RuntimeError: it is not a command.
    """
    chosen = os.environ.get('CXX', 'c++')
    try:
        words = shlex.split(chosen)
    except ValueError as error:
        raise RuntimeError(f'expected CXX to be a command, got {chosen!r}: {error}') from error
    return words or ['']


def _compile(command: list[str], path: Path) -> None:
    # In a folder of its own, with the compiler's temporary files: others see a whole library or none.
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        built = Path(place) / path.name
        command = [*command, '-shared', '-fPIC', *map(str, SOURCES), '-o', str(built)]
        environment = {**os.environ, 'TMPDIR': place}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise RuntimeError(f'{Path(command[0]).name} failed: {_first_error(done.stderr)}')
        os.replace(built, path)


def _first_error(output: str) -> str:
    # Lines before the first error only give context.
    lines = output.strip().splitlines()
    return next((line for line in lines if 'error:' in line.lower()), lines[0] if lines else 'it says nothing')
