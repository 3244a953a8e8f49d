"""Run exported files in the runtimes of others, each in an environment of its own, and keep what they differ by.

    python tests/runtimes/run.py                        # every runtime
    python tests/runtimes/run.py --again opencv tvm     # these from the start

Environments have pinned packages, and are deleted after their runtime's rows. Rows go to --out one by one, and those
that are there are not computed again: an interrupted run continues. Files and images are kept in build/runtimes.
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch

import aft_vision  # noqa: F401
from aft_vision.export import choose_shape, export_onnx, export_pt2
from aft_vision.sizes import resize_model, takes_any_size

ROOT = Path(__file__).parents[2]
PLACE = ROOT / 'build' / 'runtimes'
OUT = ROOT / 'docs' / 'results' / 'data' / 'runtimes.csv'
ADAPTERS = Path(__file__).with_name('adapters.py')
# Packaged weights where there are some, otherwise random ones.
MODELS = {
    'aft_conv_nano': 'aft_conv_nano.imagenette',
    'aft_full_nano': 'aft_full_nano.imagenette',
    'aft_simple_nano': 'aft_simple_nano.imagenette',
    'aft_axial_nano': 'aft_axial_nano.imagenette',
    'aft_conv_tiny_k11_h32': None,
    'aft_pyramid_nano': None,
}
# Images of a batch, height and width.
CASES = ((1, 64, 96), (1, 224, 224), (2, 64, 96))
FIELDS = ('runtime', 'version', 'file', 'model', 'batch', 'height', 'width', 'difference', 'bytes', 'error')
SECONDS = 900
ONNX = ('any.onnx', 'fixed.onnx')


class Runtime(NamedTuple):
    """Packages of a runtime, the files that it reads, and its adapter.

    Args:
        packages: The first is the one whose version is shown.
        files: Names of files; the ending decides how it is made. 'any' has every axis open that the model allows.
        borrows: Read torch and what it needs from the environment of this script.
        python: Interpreter of the environment, if not that of this script.
        npm: A package of npm that is installed in it.
        adapter: Name of its adapter, if not that of the runtime.
        cases: Images of a batch, height and width.
    """

    packages: tuple[str, ...]
    files: tuple[str, ...] = ONNX
    borrows: bool = False
    python: str | None = None
    npm: str | None = None
    adapter: str | None = None
    cases: tuple[tuple[int, int, int], ...] = CASES


RUNTIMES = {
    'onnxruntime': Runtime(('onnxruntime==1.32.0',)),
    'opencv': Runtime(('opencv-python-headless==5.0.0.93',)),
    'opencv4': Runtime(('opencv-python-headless==4.14.0.94',), adapter='opencv'),
    'openvino': Runtime(('openvino==2026.4.1',)),
    'onnxruntime_web': Runtime(('numpy==2.4.0',), npm='onnxruntime-web@1.30.0'),
    'tract': Runtime(('tract==0.23.9',)),
    'iree': Runtime(('iree-base-compiler[onnx]==3.13.0', 'iree-base-runtime==3.13.0')),
    'mnn': Runtime(('MNN==3.6.1',)),
    # It has no axis of a batch.
    'ncnn': Runtime(('ncnn==1.0.20261020', 'pnnx==20261020'), files=('trace.pt',), borrows=True, cases=CASES[:2]),
    'tinygrad': Runtime(('tinygrad==0.14.0', 'numpy==2.4.0', 'ziglang==0.15.2')),
    'rten': Runtime(('rten-convert==0.22.0',)),
    'tvm': Runtime(('apache-tvm==0.27.0.post1', 'onnx==1.23.2')),
    'coreml': Runtime(('coremltools==9.0',), files=('program.pt2',), borrows=True),
    'litert_torch': Runtime(('litert-torch==0.10.0',), files=('program.pt2',), borrows=True),
    'onnx2tf': Runtime(('onnx2tf==2.6.9', 'ai-edge-litert==2.3.0'), python='python3.12'),
    'executorch': Runtime(('executorch==1.5.1',), files=('program.pt2',), borrows=True),
}


def build(name: str, **kwargs: Any) -> torch.nn.Module:
    """Build a model with parameters that no file can leave out unseen."""
    if MODELS[name]:
        return timm.create_model(MODELS[name], pretrained=True, **kwargs).eval()
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **kwargs).eval()
    with torch.no_grad():
        # Position biases are close to 0 at first.
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def prepare(name: str, file: str, case: tuple[int, int, int]) -> tuple[Path, Path, Path]:
    """Return the paths of a file, of images and of PyTorch's logits, and write those that do not exist."""
    batch, *size = case
    folder = PLACE / 'files' / name
    folder.mkdir(parents=True, exist_ok=True)
    shape = 'x'.join(map(str, case))
    images, logits = folder / f'images_{shape}.npy', folder / f'logits_{shape}.npy'
    model: Any = None
    if not logits.exists():
        model = build(name)
        given = torch.randn(*case[:1], 3, *size, generator=torch.Generator().manual_seed(batch))
        np.save(images, given.numpy())
        with torch.no_grad():
            np.save(logits, resize_model(model, tuple(size))(given).numpy())
    if file == 'any.onnx':
        model = model or build(name)
        path = folder / ('any.onnx' if takes_any_size(model) else f'{size[0]}x{size[1]}.onnx')
    else:
        path = folder / f'{shape}_{file}'
    if not path.exists():
        write(build(name, exportable=file == 'trace.pt'), path, file, case)
    return path, images, logits


@torch.no_grad()
def write(model: torch.nn.Module, path: Path, file: str, case: tuple[int, int, int]) -> None:
    """Write a file of a model."""
    batch, *size = case
    if file == 'any.onnx':
        size = [max(64, side) for side in size]
        export_onnx(model, path, choose_shape(model, tuple(size)))
    elif file == 'trace.pt':
        torch.jit.trace(resize_model(model, tuple(size)), torch.zeros(batch, 3, *size), check_trace=False).save(path)
    else:
        shape = choose_shape(model, tuple(size), fixed_size=True, batch=batch)
        export_onnx(model, path, shape) if path.suffix == '.onnx' else export_pt2(model, path, shape, aten=True)


def make_environment(folder: Path, runtime: Runtime) -> Path:
    """Install a runtime and return its interpreter.

    Raises:
        subprocess.CalledProcessError: a package cannot be installed.
        FileNotFoundError: the interpreter that it needs is not there.
    """
    if runtime.python:
        subprocess.run([runtime.python, '-m', 'venv', '--clear', folder], check=True)
    else:
        venv.create(folder, clear=True, with_pip=True)
    if runtime.borrows:
        packages = next(folder.glob('lib/python*/site-packages'))
        # Python reads the packages of these folders but not their .pth files: an editable install is one of those.
        ours = [path for path in sys.path if Path(path).name in ('site-packages', 'dist-packages')]
        (packages / 'dependencies.pth').write_text('\n'.join(ours) + '\n')
    python = folder / 'bin' / 'python'
    subprocess.run([python, '-m', 'pip', 'install', '--quiet', *runtime.packages], check=True)
    if runtime.npm:
        subprocess.run(['npm', 'install', '--silent', '--prefix', folder, runtime.npm], check=True)
    return python


def run_case(python: Path, adapter: str, paths: tuple[Path, Path, Path]) -> dict[str, str]:
    """Run one file in a process of its own."""
    file, images, expected = paths
    path = f'{python.parent}{os.pathsep}{os.environ["PATH"]}'
    environment = os.environ | {'OMP_NUM_THREADS': '1', 'PATH': path, 'PYTHONPATH': '', 'CUDA_VISIBLE_DEVICES': ''}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, 'logits.npy')
        command = [python, ADAPTERS, adapter, file, images, found]
        options = dict(env=environment, cwd=folder, timeout=SECONDS, text=True, errors='replace', capture_output=True)
        try:
            ended = subprocess.run(command, **options)
        except subprocess.TimeoutExpired:
            return {'error': f'not ready after {SECONDS} s'}
        if ended.returncode:
            return {'error': first_error(ended.stdout + ended.stderr, ended.returncode)}
        logits = np.load(found) if found.exists() else None
    row = {'bytes': ended.stdout.rsplit('bytes: ', 1)[1].strip()}
    right = np.load(expected)
    if logits is None:
        return row | {'difference': 'converts'}
    if logits.shape != right.shape:
        return row | {'error': f'logits of shape {logits.shape}, expected {right.shape}'}
    return row | {'difference': f'{abs(logits - right).max() / abs(right).max():.1e}'}


def first_error(said: str, status: int) -> str:
    """Return the line that says what failed, or the last one, without numbers of nodes."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and 'CalledProcessError' not in line]
    # OpenCV has what failed after a `>`.
    for word in ('> Node', 'error:', 'Error:', 'Error', 'Exception', 'panicked'):
        for line in lines:
            if word in line:
                return re.sub(r'_\d+\b', '', line.removeprefix('> '))[:200]
    return f'exit status {status}: {lines[-1] if lines else ""}'[:200]


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the rows that there are."""
    if not path.exists():
        return []
    with path.open(newline='', encoding='utf-8') as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write all rows, in the order of the runtimes and models."""
    order = [*RUNTIMES, *MODELS]

    def place(row: dict[str, str]) -> tuple[Any, ...]:
        shape = int(row['height']), int(row['batch'])
        return order.index(row['runtime']), row['file'], order.index(row['model']), shape

    with path.with_suffix('.new').open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator='\n')
        writer.writeheader()
        writer.writerows(sorted(rows, key=place))
    path.with_suffix('.new').replace(path)


def missing(name: str, rows: Sequence[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield the cells of a runtime's row that are not there in its version."""
    runtime = RUNTIMES[name]
    version = (runtime.npm or runtime.packages[0]).replace('@', '==').rsplit('==', 1)[1]
    there = {tuple(row[field] for field in FIELDS[:7]) for row in rows}
    for case, file, model in product(runtime.cases, runtime.files, MODELS):
        key = (name, version, file, model, *map(str, case))
        if key not in there:
            yield dict(zip(FIELDS, key, strict=False))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runtimes', nargs='*', metavar='RUNTIME', help=', '.join(RUNTIMES))
    parser.add_argument('--out', type=Path, default=OUT, help='a table (default: docs/results/data/runtimes.csv)')
    parser.add_argument('--again', action='store_true', help='compute their rows again')
    parser.add_argument('--keep', action='store_true', help='keep the environments')
    args = parser.parse_args(argv)
    if unknown := [name for name in args.runtimes if name not in RUNTIMES]:
        parser.error(f'expected RUNTIME to be one of {", ".join(RUNTIMES)}, got {", ".join(unknown)}')
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing."""
    args = parse_args(argv)
    names = args.runtimes or list(RUNTIMES)
    rows = [row for row in rows_of(args.out) if not (args.again and row['runtime'] in names)]
    for name in names:
        if not (remaining := list(missing(name, rows))):
            continue
        # Rows of other versions.
        rows = [row for row in rows if row['runtime'] != name or row['version'] == remaining[0]['version']]
        folder = PLACE / 'environments' / name
        python = folder / 'bin' / 'python'
        try:
            if not python.exists():
                python = make_environment(folder, RUNTIMES[name])
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            print(f'{name} is left out: {error}', flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            continue
        for row in remaining:
            case = (int(row['batch']), int(row['height']), int(row['width']))
            row |= run_case(python, RUNTIMES[name].adapter or name, prepare(row['model'], row['file'], case))
            rows.append(row)
            write_rows(args.out, rows)
            print(*(row.get(field, '') for field in FIELDS), flush=True)
        if not args.keep:
            shutil.rmtree(folder)


if __name__ == '__main__':
    main()
