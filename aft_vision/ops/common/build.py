"""The build of the C++ kernels.

The sources include no torch headers, so the build is a few calls of the compiler, without ninja, and does not depend on
the version of torch or Python. A wheel may carry the libraries; else one is compiled at its first use and kept in the
folder of torch's extensions, as torch keeps its own, by a name that changes with the sources and the command: libraries
of former versions are not read. `setup.py` loads this module alone, where there is no torch.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.parent.glob('*/*.cpp'))
HEADERS = sorted(FOLDER.parent.glob('*/*.h'))
# Not -march=native, because different machines may share the cache. Not -ffast-math, which would undo the rounding in
# exp.
FLAGS = ['-O3', '-std=c++17', '-fopenmp', '-ffp-contract=fast', '-fno-math-errno']
# Predictive commoning keeps sources of the next tap in registers that the sums need, so the forward is faster without
# it. Clang does not have it and rejects the flag.
GCC_FLAGS = ['-fno-predictive-commoning']
_AVX512 = ['-mavx512f', '-mavx512bw', '-mavx512dq', '-mavx512vl', '-mfma']
# Flags of the sets of instructions that a library is compiled for, from the narrowest vectors to the most instructions.
# Code for tiles is in the last one alone, and runs where the processor and the system have them.
INSTRUCTIONS = {
    'baseline': [],
    'avx2': ['-mavx2', '-mfma'],
    'avx512': _AVX512,
    'avx512_bf16': [*_AVX512, '-mavx512bf16'],
    'avx512_bf16_amx': [*_AVX512, '-mavx512bf16', '-DAFT_AMX'],
}
# Headers have functions that not every source calls; vectors never leave the library.
WARNINGS = ['-Wall', '-Wextra', '-Wno-unused-function', '-Wno-psabi']


def build_library(instructions: str | None = None, rebuild: bool = False, strict: bool = False) -> Path:
    """Return the path of the shared library: that of the wheel unless $CXX is set, else compiled unless it is cached.

    Args:
        instructions: a set of `INSTRUCTIONS`, by default the one that suits this processor.
        rebuild: compile it even if it is cached.
        strict: a warning of the compiler, or a set of instructions that it does not know, is an error.

    Raises:
        OSError: the folder cannot be written.
        RuntimeError: there is no compiler, or it fails.
    """
    if os.name != 'posix':
        raise RuntimeError(f'expected a POSIX system, got {platform.system()}')
    instructions = instructions or native_instructions()
    packaged = None if rebuild or 'CXX' in os.environ else _packaged_library(instructions)
    if packaged is not None:
        return packaged
    flags, words = FLAGS + INSTRUCTIONS[instructions], chosen_compiler()
    version = hashlib.sha256((sources_hash() + shlex.join(words + flags + GCC_FLAGS)).encode()).hexdigest()[:12]
    path = library_folder() / f'kernels_{platform.machine()}_{instructions}_{version}.so'
    if path.exists() and not rebuild:
        return path
    compiler = shutil.which(words[0])
    if compiler is None:
        raise RuntimeError(f'expected a C++ compiler, got none by the name of {words[0]} (set CXX to choose another)')
    from aft_vision.ops.common.locks import locked

    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent / 'lock'):
        # Another process may have built it in the meantime.
        if path.exists() and not rebuild:
            return path
        command = [*_command([compiler, *words[1:]]), *WARNINGS, *(['-Werror'] if strict else [])]
        for name in [instructions] if strict else _fallbacks(instructions):
            try:
                _compile([*command, *INSTRUCTIONS[name]], path)
                break
            except RuntimeError as error:
                if not is_unknown(error) or name == _fallbacks(instructions)[-1] or strict:
                    raise
    return path


def build_for_wheel(folder: Path) -> list[Path]:
    """Compile the libraries of a wheel for this kind of machine into a folder, as far as the compiler knows them.

    Raises:
        RuntimeError: there is no compiler, or it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    on_x86 = platform.machine() in ('x86_64', 'AMD64')
    found = []
    for name in INSTRUCTIONS if on_x86 else ['baseline']:
        path = folder / _packaged_name(name)
        try:
            _compile([*_command(chosen_compiler()), *INSTRUCTIONS[name]], path)
            found.append(path)
        except RuntimeError as error:
            if not is_unknown(error):
                raise
    return found


def _packaged_library(instructions: str) -> Path | None:
    paths = [FOLDER.parent / 'lib' / _packaged_name(name) for name in _fallbacks(instructions)]
    return next((path for path in paths if path.exists()), None)


def _packaged_name(instructions: str) -> str:
    return f'kernels_{platform.machine()}_{instructions}_{sources_hash()}.so'


def _command(compiler: list[str]) -> list[str]:
    try:
        identity = subprocess.run([*compiler, '--version'], capture_output=True, check=False).stdout
    except OSError as error:
        raise RuntimeError(f'expected a C++ compiler, got none by the name of {compiler[0]}') from error
    return [*compiler, *FLAGS, *([] if b'clang' in identity else GCC_FLAGS)]


def is_unknown(error: RuntimeError) -> bool:
    """Return whether a build failed because the compiler does not know a set of instructions."""
    # In the words of GCC and Clang, and of assemblers, which may be older than a compiler.
    words = ('-mavx', '-mfma', 'no such instruction', 'invalid instruction mnemonic')
    return any(word in str(error) for word in words)


def native_instructions() -> str:
    """Return the set of `INSTRUCTIONS` that suits this processor, as far as torch uses its vectors."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability().lower()
    if capability == 'avx512' and torch.cpu._is_avx512_bf16_supported():
        return 'avx512_bf16_amx'
    return capability if capability in INSTRUCTIONS else 'baseline'


def runnable_instructions() -> list[str]:
    """Return the sets of `INSTRUCTIONS` that this processor can run."""
    names = [*INSTRUCTIONS]
    return names[: names.index(native_instructions()) + 1]


def _fallbacks(instructions: str) -> list[str]:
    # The set, and those with vectors of the same width and fewer instructions.
    names = [*INSTRUCTIONS]
    known = names[: names.index(instructions) + 1]
    return [name for name in known[::-1] if name.split('_')[0] == instructions.split('_')[0]]


def sources_hash() -> str:
    """Return a number for the sources of the kernels, in hexadecimal digits."""
    return hashlib.sha256(b''.join(path.read_bytes() for path in SOURCES + HEADERS)).hexdigest()[:12]


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
    with tempfile.TemporaryDirectory(dir=path.parent) as place, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [f'{place}/{source.parent.name}_{source.stem}.o' for source in SOURCES]
        calls = [['-fPIC', '-c', str(source), '-o', each] for source, each in zip(SOURCES, objects, strict=True)]
        for _ in pool.map(lambda call: _run([*command, *call], place), calls):
            pass
        _run([*command, '-shared', *objects, '-o', f'{place}/{path.name}'], place)
        os.replace(f'{place}/{path.name}', path)


def _run(command: Sequence[str], place: str) -> None:
    environment = {**os.environ, 'TMPDIR': place}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f'{Path(command[0]).name} failed: {_first_error(done.stderr)}')


def _first_error(output: str) -> str:
    # Lines before the first error only give context.
    lines = output.strip().splitlines()
    return next((line for line in lines if 'error:' in line.lower()), lines[0] if lines else 'it says nothing')
