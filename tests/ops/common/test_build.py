"""The library of compiled kernels: what it is kept by, and when it is compiled again."""

import ctypes
import logging
import multiprocessing
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aft_vision.ops.common import build, cpp


@pytest.fixture(autouse=True)
def little(compiled: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A source that compiles at once, and a folder of its own."""
    source = tmp_path / 'answer.cpp'
    source.write_text(answering(42))
    monkeypatch.setattr(build, 'SOURCES', [source])
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path / 'kept'))
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))


def answering(answer: int) -> str:
    return f'extern "C" {{ int answer() {{ return {answer}; }} int aft_layout() {{ return {cpp.LAYOUT}; }} }}\n'


def kept(folder: Path) -> set[Path]:
    """Return the names in a folder of libraries, except its lock."""
    return set(folder.iterdir()) - {folder / 'lock'}


def write_compiler(path: Path, before: str) -> str:
    """A compiler that first does what some lines of the shell say; the value of CXX."""
    path.write_text(f'#!/bin/sh\n{before}\nexec {os.environ.get("CXX", "c++")} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_built_library_is_kept_and_needs_no_compiler_again(monkeypatch: pytest.MonkeyPatch):
    path = build.build_library()
    assert kept(path.parent) == {path}
    monkeypatch.setenv('CXX', 'no-such-compiler')
    assert build.build_library() == path


def test_machines_and_compilers_of_another_kind_do_not_share_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = build.build_library()
    monkeypatch.setattr(platform, 'machine', lambda: 'riscv64')
    other_machine = build.build_library()
    # Another version of the same compiler.
    compiler = tmp_path / 'compiler'
    own = shutil.which(os.environ.get('CXX', 'c++'))
    compiler.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo 99; fi\nexec {own} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv('CXX', str(compiler))
    assert len({path, other_machine, build.build_library()}) == 3
    monkeypatch.setenv('CXX', 'no-such-compiler')
    monkeypatch.setattr(platform, 'machine', lambda: 'sparc')
    with pytest.raises(RuntimeError, match='expected a C\\+\\+ compiler, got none by the name of no-such-compiler'):
        build.build_library()


@pytest.mark.parametrize(('compiler', 'is_gcc'), [('g++ (Debian) 12.2.0', True), ('Apple clang version 14.0.0', False)])
def test_clang_gets_no_flag_that_gcc_alone_knows(compiler: str, is_gcc: bool, monkeypatch: pytest.MonkeyPatch):
    commands = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        if '--version' not in command:
            commands.append(command)
            Path(command[-1]).write_bytes(b'')
        return subprocess.CompletedProcess(command, 0, stdout=compiler.encode(), stderr='')

    monkeypatch.setattr(subprocess, 'run', run)
    build.build_library()
    (command,) = commands
    assert ('-fno-predictive-commoning' in command) == is_gcc
    assert {*build.FLAGS, '-shared'} <= set(command)


def test_clang_takes_the_other_flags(monkeypatch: pytest.MonkeyPatch):
    if shutil.which('clang++') is None:
        pytest.skip('there is no clang++ here')
    monkeypatch.setenv('CXX', 'clang++')
    assert cpp._load(build.build_library()).answer() == 42


def test_a_compiler_that_does_not_know_bfloat16_does_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    compiler = tmp_path / 'compiler'
    own = shutil.which(os.environ.get('CXX', 'c++'))
    # As GCC 9 says it.
    compiler.write_text(
        '#!/bin/sh\n'
        'case "$*" in *-mavx512bf16*)\n'
        '  echo "g++-9: error: unrecognized command line option \'-mavx512bf16\'" >&2; exit 1;;\n'
        f'esac\nexec {own} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv('CXX', str(compiler))
    monkeypatch.setattr(build, 'VECTOR_FLAGS', {})
    monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: 'AVX512')
    monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda: True)
    assert cpp._load(build.build_library()).answer() == 42


def build_version(answer: int, days: float) -> Path:
    """A build of sources of its own, that was last used so many days ago."""
    build.SOURCES[0].write_text(answering(answer))
    path = build.build_library()
    os.utime(path, (time.time() - days * 24 * 3600,) * 2)
    return path


def test_a_new_build_removes_those_of_other_versions_that_are_long_unused(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(platform, 'machine', lambda: 'riscv64')
        foreign = build_version(1, 31)
    recent, old = build_version(2, 29), build_version(3, 31)
    loaded = ctypes.CDLL(str(old))
    assert kept(old.parent) == {foreign, recent, old}
    new = build_version(4, 31)
    assert kept(new.parent) == {foreign, recent, new}
    # What a process has loaded stays with it.
    assert loaded.answer() == 3
    # Nothing is removed where nothing is built.
    os.utime(recent, (0, 0))
    assert build.build_library() == new
    assert recent.exists()


def test_a_build_that_is_loaded_is_not_unused():
    path = build_version(5, 31)
    assert cpp.library.__wrapped__().answer() == 5
    assert time.time() - path.stat().st_mtime < 3600
    build_version(6, 0)
    assert path.exists()


def test_the_time_of_a_build_need_not_be_written(monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> None:
        raise PermissionError(f'{path} is read-only')

    build_version(7, 0)
    monkeypatch.setattr(os, 'utime', refuse)
    assert cpp.library.__wrapped__().answer() == 7


def replace_symbols(path: Path) -> None:
    source = path.parent / 'other.cpp'
    source.write_text('extern "C" int other() { return 1; }\n')
    subprocess.run([*build._chosen_compiler(), '-shared', '-fPIC', str(source), '-o', str(path)], check=True)
    source.unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    # A header that is whole promises what the file no longer has.
    'truncated': lambda path: os.truncate(path, 5000),
    'zeroed': lambda path: path.write_bytes(bytes(path.stat().st_size)),
    'symbols_missing': replace_symbols,
    'empty': lambda path: path.write_bytes(b''),
}


@pytest.mark.parametrize('damage', DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_library_is_compiled_once_more_and_never_loaded(
    damage: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
):
    path = build.build_library()
    whole, loaded = path.read_bytes(), []
    damage(path)
    kernels = cpp.Kernels
    monkeypatch.setattr(cpp, 'Kernels', lambda name: (loaded.append(Path(name).read_bytes()), kernels(name))[1])
    assert cpp.library.__wrapped__().answer() == 42
    assert [len(x) for x in loaded] == [len(whole)]
    assert len(kept(path.parent)) == 1


@pytest.mark.parametrize('damage', DAMAGES.values(), ids=DAMAGES)
def test_without_a_compiler_a_damaged_library_is_one_line_and_torch(
    damage: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    damage(build.build_library())
    monkeypatch.setenv('CXX', 'no-such-compiler')
    assert cpp.library.__wrapped__() is None
    assert len(logged(caplog)) == 1


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name in (build.__name__, cpp.__name__)]


def test_a_library_is_on_the_disk_before_it_has_its_name(monkeypatch: pytest.MonkeyPatch):
    calls, sync, replace = [], os.fsync, os.replace

    def record_sync(file: int) -> None:
        calls.append(os.readlink(f'/proc/self/fd/{file}') if Path('/proc/self/fd').exists() else 'unknown')
        sync(file)

    monkeypatch.setattr(os, 'fsync', record_sync)
    monkeypatch.setattr(os, 'replace', lambda *x: (calls.append('replace'), replace(*x)))
    path = build.build_library()
    assert len(calls) == 3
    assert calls[1] == 'replace'
    assert calls[0].endswith('.so') or calls[0] == 'unknown'
    assert calls[2] in (str(path.parent), 'unknown')


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder seem to belong to another user."""
    find = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        found = find(self, **options)
        return found if self != path else os.stat_result((*found[:4], os.getuid() + 1, *found[5:10]))

    monkeypatch.setattr(Path, 'stat', stat)


EXPOSURES: dict[str, Callable[[Path], object]] = {
    'writable_by_all': lambda path: path.chmod(0o757),
    'writable_by_a_group': lambda path: path.chmod(0o775),
}


def test_nothing_is_loaded_from_a_folder_of_another_user(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    folder = build.build_library().parent
    give_away(folder, monkeypatch)
    found = cpp.library.__wrapped__()
    assert found.answer() == 42
    assert Path(found._name).parent == tmp_path / f'aft_vision_{os.getuid()}'
    (line,) = logged(caplog)
    assert str(folder) in line
    # Where the private folder is as bad, torch takes its place.
    caplog.clear()
    Path(found._name).parent.chmod(0o777)
    assert cpp.library.__wrapped__() is None
    (line,) = logged(caplog)
    assert 'other users can write' in line


@pytest.mark.parametrize('expose', EXPOSURES.values(), ids=EXPOSURES)
def test_a_folder_of_this_user_is_closed_to_others_once_and_filled_again(
    expose: Callable[[Path], object], caplog: pytest.LogCaptureFixture
):
    path = build.build_library()
    expose(path.parent)
    inode = path.stat().st_ino
    # A second file with the old inode, which the new one cannot get then.
    os.link(path, path.parent / 'old')
    for _ in range(2):
        found = cpp.library.__wrapped__()
        assert found.answer() == 42
        assert Path(found._name) == path
        assert path.stat().st_ino != inode
    assert not path.parent.stat().st_mode & 0o022
    (line,) = logged(caplog)
    assert str(path.parent) in line


def make_open(path: Path, mkdir: Callable[..., None], **options: object) -> None:
    mkdir(path, **options)
    path.chmod(0o777)


def make_link(path: Path, mkdir: Callable[..., None], **options: object) -> None:
    mkdir(path.parent / 'theirs', **options)
    path.symlink_to(path.parent / 'theirs')


@pytest.mark.parametrize('make', [make_open, make_link])
def test_a_private_folder_that_another_user_makes_first_is_refused(
    make: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    private, mkdir = tmp_path / f'aft_vision_{os.getuid()}', Path.mkdir
    give_away(build.build_library().parent, monkeypatch)
    monkeypatch.setattr(
        Path, 'mkdir', lambda self, **x: make(self, mkdir, **x) if self == private else mkdir(self, **x)
    )
    assert cpp.library.__wrapped__() is None
    assert private.exists()
    (line,) = logged(caplog)
    assert 'other users can write' in line
    assert str(private) in line


@pytest.mark.parametrize('expose', EXPOSURES.values(), ids=EXPOSURES)
def test_a_library_that_another_user_can_write_to_is_built_again(expose: Callable[[Path], object]):
    path = build.build_library()
    expose(path)
    inode = path.stat().st_ino
    found = cpp.library.__wrapped__()
    assert found.answer() == 42
    assert Path(found._name).stat().st_ino != inode
    assert not Path(found._name).stat().st_mode & 0o022


def test_a_library_is_writable_for_its_user_alone_whatever_the_umask():
    before = os.umask(0)
    try:
        path = build.build_library()
    finally:
        os.umask(before)
    assert not (path.stat().st_mode | path.parent.stat().st_mode) & 0o022


def test_the_compiler_may_be_several_words(monkeypatch: pytest.MonkeyPatch):
    # As `ccache g++`, which need not be installed.
    monkeypatch.setenv('CXX', f'env {os.environ.get("CXX", "c++")}')
    assert cpp.library.__wrapped__().answer() == 42
    monkeypatch.setenv('CXX', f'{os.environ["CXX"]} -DOTHER')
    assert len(kept(build.build_library().parent)) == 2


def test_a_compiler_that_is_no_command_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    for value in ('"g++', '', ' '):
        caplog.clear()
        monkeypatch.setenv('CXX', value)
        assert cpp.library.__wrapped__() is None
        assert len(logged(caplog)) == 1


def wait_for(found: Callable[[], object]) -> None:
    stop = time.monotonic() + 60
    while not found():
        assert time.monotonic() < stop
        time.sleep(0.01)


def test_a_build_that_runs_an_hour_later_removes_what_a_killed_one_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with monkeypatch.context() as slow:
        # As a compiler that has written a part.
        lines = 'if [ "$1" != --version ]; then echo > "$TMPDIR/part.s"; exec sleep 2; fi'
        slow.setenv('CXX', write_compiler(tmp_path / 'slow', lines))
        process = multiprocessing.get_context('fork').Process(target=build.build_library)
        process.start()
        folder = tmp_path / 'kept' / 'aft_vision'
        wait_for(lambda: list(folder.glob('*/part.s')))
        process.kill()
        process.join()
    (left,) = (part.parent for part in folder.glob('*/part.s'))
    # It does not hold the lock. A build of another host may, for all that this one knows.
    path = build.build_library()
    assert kept(folder) == {path, left}
    os.utime(left, (time.time() - 4000,) * 2)
    new = build.build_library(rebuild=True)
    assert kept(folder) == {new}


def test_processes_that_start_together_compile_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    log = tmp_path / 'log'
    lines = f'if [ "$1" != --version ]; then echo once >> {log}; sleep 0.5; fi'
    monkeypatch.setenv('CXX', write_compiler(tmp_path / 'compiler', lines))
    context = multiprocessing.get_context('fork')
    found = context.SimpleQueue()
    processes = [context.Process(target=lambda: found.put(build.build_library())) for _ in range(3)]
    for process in processes:
        process.start()
    paths = {found.get() for _ in processes}
    for process in processes:
        process.join()
    assert len(paths) == 1
    assert log.read_text() == 'once\n'


def test_an_exception_of_cpp_is_one_of_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    source = tmp_path / 'throws.cpp'
    source.write_text(
        f'#include <stdexcept>\n#include <vector>\n#include "{build.FOLDER / "guard.h"}"\n'
        'extern "C" int too_long() { return guarded([] { std::vector<int> x(-1); }); }\n'
        'extern "C" int too_large() { return guarded([] { throw std::bad_alloc(); }); }\n'
        'extern "C" int unknown() { return guarded([]() -> int { throw 1; }); }\n'
        'extern "C" int fine() { return guarded([] {}) + guarded([] { return 7; }); }\n'
        'extern "C" int within() {\n  Region region;\n'
        '#pragma omp parallel num_threads(3)\n  {\n'
        '    region.run([] { throw std::runtime_error("deliberate"); });\n'
        '#pragma omp for\n    for (int i = 0; i < 9; ++i) region.run([] {});\n  }\n'
        '  return guarded([&] { region.finish(); });\n}\n'
    )
    monkeypatch.setattr(build, 'SOURCES', [source, build.FOLDER / 'guard.cpp'])
    found = cpp.library.__wrapped__()
    assert found.fine() == 7
    with pytest.raises(MemoryError, match='too_large failed: std::bad_alloc'):
        found.too_large()
    for name, reason in (('too_long', 'vector'), ('unknown', 'unknown exception'), ('within', 'deliberate')):
        with pytest.raises(RuntimeError, match=f'{name} failed: .*{reason}'):
            getattr(found, name)()
    assert found.fine() == 7


def test_the_log_gives_the_error_of_the_compiler(caplog: pytest.LogCaptureFixture):
    # The compiler first says in which function it is.
    build.SOURCES[0].write_text('int answer() { return unknown; }\n')
    with caplog.at_level(logging.WARNING):
        assert cpp.library.__wrapped__() is None
    (message,) = [record.getMessage() for record in caplog.records if record.name in (build.__name__, cpp.__name__)]
    assert 'error:' in message
    assert 'unknown' in message
    assert 'one offset' in message


def test_what_cannot_be_loaded_is_compiled_no_more_than_once_more(monkeypatch: pytest.MonkeyPatch):
    runs = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, 'run', lambda command, **x: (runs.append(command), run(command, **x))[1])

    def fail(self: cpp.Kernels, path: str) -> None:
        raise OSError(f'{path}: version GLIBC_9.9 not found')

    monkeypatch.setattr(cpp.Kernels, '__init__', fail)
    assert cpp.library.__wrapped__() is None
    assert len([command for command in runs if '-shared' in command]) == 2
