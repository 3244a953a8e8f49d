"""The library of compiled kernels: what it is kept by, and when it is compiled again."""

import multiprocessing
import os
import platform
import shutil
import subprocess
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
    # It has no structs and no forms.
    monkeypatch.setattr(cpp, 'STRUCTS', {})
    monkeypatch.setattr(cpp, 'JUDGES', [])
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path / 'kept'))


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
    monkeypatch.setattr(shutil, 'which', lambda name: None)
    assert build.build_library() == path


def test_machines_and_compilers_of_another_kind_do_not_share_it(monkeypatch: pytest.MonkeyPatch):
    path = build.build_library()
    monkeypatch.setattr(platform, 'machine', lambda: 'riscv64')
    assert build.build_library() != path
    monkeypatch.setenv('CXX', 'no-such-compiler')
    with pytest.raises(RuntimeError, match='expected a C\\+\\+ compiler, got none by the name of no-such-compiler'):
        build.build_library()


def test_a_damaged_library_is_compiled_again():
    build.build_library().write_bytes(b'')
    assert cpp.library.__wrapped__().answer() == 42


def test_without_a_compiler_a_damaged_library_is_one_line_and_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    build.build_library().write_bytes(b'')
    monkeypatch.setattr(shutil, 'which', lambda name: None)
    assert cpp.library.__wrapped__() is None
    assert len(logged(caplog)) == 1


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
    compiled, linked = commands
    assert ('-fno-predictive-commoning' in compiled) == is_gcc
    assert {*build.FLAGS, '-c'} <= set(compiled)
    assert '-shared' in linked


def test_a_compiler_that_does_not_know_bfloat16_does_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    # As GCC 9 says it.
    error = "g++-9: error: unrecognized command line option '-mavx512bf16'"
    refusal = f'case "$*" in *-mavx512bf16*) echo "{error}" >&2; exit 1;; esac'
    monkeypatch.setenv('CXX', write_compiler(tmp_path / 'compiler', refusal))
    monkeypatch.setattr(build, 'INSTRUCTIONS', build.INSTRUCTIONS | {'avx512': []})
    monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: 'AVX512')
    monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda: True)
    assert cpp._load(build.build_library()).answer() == 42
    with pytest.raises(RuntimeError, match='unrecognized command line option'):
        build.build_library(rebuild=True, strict=True)


def test_a_warning_is_an_error_only_if_it_is_asked_to_be():
    build.SOURCES[0].write_text(answering(42) + 'extern "C" int other(int unused) { return 1; }\n')
    with pytest.raises(RuntimeError, match='unused'):
        build.build_library(strict=True)
    assert cpp.library.__wrapped__().answer() == 42


def test_a_library_of_the_wheel_is_taken_unless_a_compiler_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(build, 'FOLDER', tmp_path / 'ops' / 'common')
    # Compilers of other processors know no flags of this one.
    monkeypatch.setattr(build, 'INSTRUCTIONS', {name: [] for name in build.INSTRUCTIONS})
    monkeypatch.setattr(build, 'native_instructions', lambda: 'avx512_bf16')
    found = build.build_for_wheel(tmp_path / 'ops' / 'lib')
    names = {
        name: path for name in build.INSTRUCTIONS for path in found if f'_{name}_{build.sources_hash()}' in path.name
    }
    assert cpp._load(found[0]).answer() == 42
    monkeypatch.delenv('CXX', raising=False)
    if platform.machine() == 'x86_64':
        assert [*names] == [*build.INSTRUCTIONS]
        for expected in ('avx512_bf16', 'avx512'):
            assert build.build_library() == names[expected]
            names[expected].unlink()
        # Those with narrower vectors are not for this processor.
        assert build.build_library() not in found
    monkeypatch.setenv('CXX', 'c++')
    assert build.build_library() not in found


def test_what_each_processor_takes_and_can_run(monkeypatch: pytest.MonkeyPatch):
    for capability, has_bfloat16, expected in (
        ('DEFAULT', False, 'baseline'),
        ('SVE256', False, 'baseline'),
        ('AVX2', False, 'avx2'),
        ('AVX512', False, 'avx512'),
        ('AVX512', True, 'avx512_bf16_amx'),
    ):
        monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda name=capability: name)
        monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda has=has_bfloat16: has)
        assert build.native_instructions() == expected
        runnable = build.runnable_instructions()
        assert runnable[0] == 'baseline'
        assert runnable[-1] == expected
        assert ('avx512_bf16' in runnable) is has_bfloat16


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name in (build.__name__, cpp.__name__)]


def test_the_compiler_may_be_several_words(monkeypatch: pytest.MonkeyPatch):
    # As `ccache g++`, which need not be installed.
    monkeypatch.setenv('CXX', f'env {os.environ.get("CXX", "c++")}')
    assert cpp.library.__wrapped__().answer() == 42
    monkeypatch.setenv('CXX', f'{os.environ["CXX"]} -DOTHER')
    assert len(kept(build.build_library().parent)) == 2


def test_processes_that_start_together_compile_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    log = tmp_path / 'log'
    lines = f'case "$*" in *-shared*) echo once >> {log};; *--version*) ;; *) sleep 0.5;; esac'
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
