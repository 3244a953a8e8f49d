"""The build of the C++ kernels.

The sources include no torch headers, so the build is one call of the compiler, without ninja, and does not depend on
the version of torch or Python.

A library is named by the digest of its bytes, which is compared before it is loaded. Its folder is writable only by
this user.
"""

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from aft_vision.ops.common.locks import locked

_logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.parent.glob('*/*.cpp'))
HEADERS = sorted(FOLDER.parent.glob('*/*.h'))
# Not -march=native, because different machines may share the cache. Not -ffast-math, which would undo the rounding in
# exp.
FLAGS = ['-O3', '-std=c++17', '-fopenmp', '-ffp-contract=fast', '-fno-math-errno']
# Predictive commoning keeps sources of the next tap in registers that the sums need, so the forward is faster without
# it. Clang does not have it and rejects the flag.
GCC_FLAGS = ['-fno-predictive-commoning']
# A new build removes libraries of other versions that were not loaded for this long: 30 days.
UNUSED_SECONDS = 30 * 24 * 3600
# No build takes this long: one hour. An older unfinished one was killed, on this or another host.
KILLED_SECONDS = 3600
VECTOR_FLAGS = {
    'AVX2': ['-mavx2', '-mfma'],
    'AVX512': ['-mavx512f', '-mavx512bw', '-mavx512dq', '-mavx512vl', '-mfma'],
}


# For AVX-512 machines that multiply bfloat16; GCC 10 or newer.
HALF_FLAG = '-mavx512bf16'
# Prefix of the names of build folders.
UNFINISHED = 'unfinished_'


def build_library(rebuild: bool = False) -> Path:
    """Return the path of the shared library; compile it unless it is cached.

    Args:
        rebuild: compile it even if it is cached.

    Raises:
        OSError: the folder cannot be written.
        RuntimeError: there is no compiler, it fails, or there is no private folder.
    """
    if os.name != 'posix':
        raise RuntimeError(f'expected a POSIX system, got {platform.system()}')
    capability = torch.backends.cpu.get_cpu_capability()
    flags = FLAGS + VECTOR_FLAGS.get(capability, [])
    if capability == 'AVX512' and torch.cpu._is_avx512_bf16_supported():
        flags = [*flags, HALF_FLAG]
    chosen = _chosen_compiler()
    compiler = shutil.which(chosen[0])
    content = b''.join(path.read_bytes() for path in SOURCES + HEADERS)
    version = _digest(content + ' '.join(flags + GCC_FLAGS).encode())
    folder, kind = _folder(), f'kernels_{platform.machine()}_{capability.lower()}'
    name = f'{kind}_{version}'
    if compiler is None:
        kept = None if rebuild else _kept(folder, f'{name}_*')
        if kept is not None:
            return kept
        raise RuntimeError(f'expected a C++ compiler, got none by the name of {chosen[0]} (set CXX to choose another)')
    command = [compiler, *chosen[1:]]
    identity = subprocess.run([*command, '--version'], capture_output=True, check=False).stdout
    name = f'{name}_{_digest(identity + shlex.join(chosen[1:]).encode())}'
    kept = None if rebuild else _kept(folder, name)
    if kept is not None:
        return kept
    with locked(folder / 'lock'):
        # A build may be running on another host, which a lock local to this host does not exclude.
        _remove_old(folder.glob(f'{UNFINISHED}*'), KILLED_SECONDS)
        # Another process may have built it in the meantime.
        kept = None if rebuild else _kept(folder, name)
        if kept is not None:
            return kept
        command += [*flags, *([] if b'clang' in identity else GCC_FLAGS)]
        try:
            path = _compile(command, folder, name)
        except RuntimeError as error:
            if HALF_FLAG not in str(error):
                raise
            path = _compile([x for x in command if x != HALF_FLAG], folder, name)
        _remove_replaced([other for other in folder.glob(f'{name}_*.so') if other != path])
        _remove_old([other for other in folder.glob(f'{kind}_*.so') if other != path], UNUSED_SECONDS)
    return path


def _chosen_compiler() -> list[str]:
    # Several words are possible, such as `ccache g++`.
    chosen = os.environ.get('CXX', 'c++')
    try:
        words = shlex.split(chosen)
    except ValueError as error:
        raise RuntimeError(f'expected CXX to be a command, got {chosen!r}: {error}') from error
    return words or ['']


def _folder() -> Path:
    """Return the folder of the libraries: that of torch's extensions, or a private one.

    Raises:
        OSError: the folder cannot be created.
        RuntimeError: other users can write to both.
    """
    root = os.environ.get('TORCH_EXTENSIONS_DIR') or Path.home() / '.cache' / 'torch_extensions'
    usual, private = Path(root) / 'aft_vision', Path(tempfile.gettempdir()) / f'aft_vision_{os.getuid()}'
    usual.mkdir(mode=0o755, parents=True, exist_ok=True)
    if _others_write(usual) and usual.stat().st_uid == os.getuid():
        _close_folder(usual)
    if not _others_write(usual):
        return usual
    # Its name is predictable, so another user may have created it.
    private.mkdir(mode=0o755, parents=True, exist_ok=True)
    if private.is_symlink() or _others_write(private):
        raise RuntimeError(f'other users can write to {usual} and to {private} (chown them, or chmod go-w)')
    _logger.warning(
        'other users can write to %s, so the C++ kernels are kept in %s instead (chown the first, or chmod go-w)',
        usual,
        private,
    )
    return private


def _close_folder(path: Path) -> None:
    # Typical with a umask of 002. Other users may have changed its content.
    path.chmod(path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
    for library in path.glob('kernels_*.so'):
        library.unlink(missing_ok=True)
    _logger.warning('other users could write to %s: closed to them, and its C++ kernels are built again', path)


def _others_write(path: Path) -> bool:
    # Users other than this one and root.
    found = path.stat()
    return found.st_uid not in (0, os.getuid()) or bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _kept(folder: Path, name: str) -> Path | None:
    # The most recently used undamaged library of a name, which may be a pattern.
    found = [x for x in folder.glob(f'{name}_*.so') if not _others_write(x) and x.stem.endswith(_digest_of(x))]
    return max(found, key=lambda x: x.stat().st_mtime, default=None)


def _digest_of(path: Path) -> str:
    return f'_{_digest(path.read_bytes())}'


def _compile(command: list[str], folder: Path, name: str) -> Path:
    with tempfile.TemporaryDirectory(dir=folder, prefix=UNFINISHED) as place:
        built = Path(place) / f'{name}.so'
        command = [*command, '-shared', '-fPIC', *map(str, SOURCES), '-o', str(built)]
        # So that the compiler's temporary files are removed with ours.
        environment = {**os.environ, 'TMPDIR': place}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise RuntimeError(f'{Path(command[0]).name} failed: {_first_error(done.stderr)}')
        path = folder / f'{name}{_digest_of(built)}.so'
        built.chmod(built.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
        # Sync the bytes before the rename, in case the machine stops.
        _write_through(built)
        os.replace(built, path)
        _write_through(folder)
    return path


def _write_through(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _remove_replaced(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
        _logger.warning('%s was damaged, could not be loaded, or could be changed by other users: built again', path)


def _remove_old(paths: Iterable[Path], seconds: float) -> None:
    for path in paths:
        # Another process may remove it too. A process that has loaded a library is not affected.
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > seconds:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _first_error(output: str) -> str:
    # Lines before the first error only give context.
    lines = output.strip().splitlines()
    return next((line for line in lines if 'error:' in line), lines[0] if lines else 'it says nothing')


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
