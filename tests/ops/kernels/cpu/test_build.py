"""The library of compiled kernels: what it is kept by, and when it is compiled again."""

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from aft_vision.ops.kernels.cpu import build


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A source that compiles at once, and a folder of its own."""
    source = tmp_path / 'answer.cpp'
    source.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, 'SOURCES', [source])
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path / 'kept'))


def test_a_built_library_is_kept_and_needs_no_compiler_again(monkeypatch: pytest.MonkeyPatch):
    path = build._build()
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.setenv('CXX', 'no-such-compiler')
    assert build._build() == path


def test_machines_and_compilers_of_another_kind_do_not_share_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = build._build()
    monkeypatch.setattr(platform, 'machine', lambda: 'riscv64')
    other_machine = build._build()
    # Another version of the same compiler.
    compiler = tmp_path / 'compiler'
    own = shutil.which(os.environ.get('CXX', 'c++'))
    compiler.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo 99; fi\nexec {own} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv('CXX', str(compiler))
    assert len({path, other_machine, build._build()}) == 3
    monkeypatch.setenv('CXX', 'no-such-compiler')
    monkeypatch.setattr(platform, 'machine', lambda: 'sparc')
    with pytest.raises(RuntimeError, match='expected a C\\+\\+ compiler, got none by the name of no-such-compiler'):
        build._build()


@pytest.mark.parametrize(('compiler', 'is_gcc'), [('g++ (Debian) 12.2.0', True), ('Apple clang version 14.0.0', False)])
def test_clang_gets_no_flag_that_gcc_alone_knows(compiler: str, is_gcc: bool, monkeypatch: pytest.MonkeyPatch):
    commands = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        if '--version' not in command:
            commands.append(command)
            Path(command[-1]).write_bytes(b'')
        return subprocess.CompletedProcess(command, 0, stdout=compiler.encode(), stderr='')

    monkeypatch.setattr(subprocess, 'run', run)
    build._build()
    (command,) = commands
    assert ('-fno-predictive-commoning' in command) == is_gcc
    assert {*build.FLAGS, '-shared'} <= set(command)


def test_clang_takes_the_other_flags(monkeypatch: pytest.MonkeyPatch):
    if shutil.which('clang++') is None:
        pytest.skip('there is no clang++ here')
    monkeypatch.setenv('CXX', 'clang++')
    assert build._load(build._build()).answer() == 42


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
    assert build._load(build._build()).answer() == 42


def build_version(answer: int, days: float) -> Path:
    """A build of sources of its own, that was last used so many days ago."""
    build.SOURCES[0].write_text(f'extern "C" int answer() {{ return {answer}; }}\n')
    path = build._build()
    os.utime(path, (time.time() - days * 24 * 3600,) * 2)
    return path


def test_a_new_build_removes_those_of_other_versions_that_are_long_unused(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(platform, 'machine', lambda: 'riscv64')
        foreign = build_version(1, 31)
    recent, old = build_version(2, 29), build_version(3, 31)
    loaded = ctypes.CDLL(str(old))
    assert set(old.parent.iterdir()) == {foreign, recent, old}
    new = build_version(4, 31)
    assert set(new.parent.iterdir()) == {foreign, recent, new}
    # What a process has loaded stays with it.
    assert loaded.answer() == 3
    # Nothing is removed where nothing is built.
    os.utime(recent, (0, 0))
    assert build._build() == new
    assert recent.exists()


def test_a_build_that_is_loaded_is_not_unused():
    path = build_version(5, 31)
    assert build.library.__wrapped__().answer() == 5
    assert time.time() - path.stat().st_mtime < 3600
    build_version(6, 0)
    assert path.exists()


def test_the_time_of_a_build_need_not_be_written(monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> None:
        raise PermissionError(f'{path} is read-only')

    build_version(7, 0)
    monkeypatch.setattr(os, 'utime', refuse)
    assert build.library.__wrapped__().answer() == 7


def test_a_damaged_library_is_compiled_once_more():
    path = build._build()
    path.write_bytes(b'cut short')
    assert build.library.__wrapped__().answer() == 42
    assert path.read_bytes()[1:4] == b'ELF'


def test_a_damaged_library_without_a_compiler_is_done_without(monkeypatch: pytest.MonkeyPatch, caplog):
    build._build().write_bytes(b'cut short')
    monkeypatch.setenv('CXX', 'no-such-compiler')
    assert build.library.__wrapped__() is None
    assert len([record for record in caplog.records if record.name == build.__name__]) == 1


def test_the_log_gives_the_error_of_the_compiler(caplog: pytest.LogCaptureFixture):
    # The compiler first says in which function it is.
    build.SOURCES[0].write_text('int answer() { return unknown; }\n')
    with caplog.at_level(logging.WARNING):
        assert build.library.__wrapped__() is None
    (message,) = [record.getMessage() for record in caplog.records if record.name == build.__name__]
    assert 'error:' in message
    assert 'unknown' in message
    assert 'one offset' in message


def test_what_cannot_be_loaded_is_compiled_no_more_than_once_more(monkeypatch: pytest.MonkeyPatch):
    runs = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, 'run', lambda command, **x: (runs.append(command), run(command, **x))[1])

    def fail(path: str) -> None:
        raise OSError(f'{path}: version GLIBC_9.9 not found')

    monkeypatch.setattr(build.ctypes, 'CDLL', fail)
    assert build.library.__wrapped__() is None
    assert len([command for command in runs if '-shared' in command]) == 2
