"""Try a wheel as the user of a new environment does: python tests/try_wheel.py dist/aft_vision-0.1.0-py3-none-any.whl

It is installed into an environment of its own, out of sight of the checkout, where the first example of README.md runs,
then a forward and a backward pass of one model of each mixer, with C++ kernels compiled from the wheel where there is a
compiler, or those that a wheel for a platform carries, without one, and all packaged weights load without a network.
Then the console command trains on a few photographs, by a config of the wheel, and uses the result. Other packages are
read from the environment that runs this script, unless --dependencies installs them.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

README = Path(__file__).parents[1] / 'README.md'
PHOTOGRAPHS = README.parent / 'tests' / 'assets' / 'clothing' / 'train'
# They run in a folder that has the photographs only.
COMMANDS = (
    'train --config finetune --quiet data.dir=photographs run.dir=run schedule.epochs=2 schedule.min_updates=0',
    'eval --checkpoint run --data photographs --sizes 64 --batch-size 8',
    'predict photographs/hat --checkpoint run --top 1',
    'report --checkpoint run --images photographs --max-images 1 --out report.html',
    'export --checkpoint run --format pt2 --fixed-size --out model.pt2',
)
# A model at a resolution of its own.
COUNT = 1
# What an example must not name: it is no part of the wheel.
FILES = re.compile(r"""['"](runs|tests|configs|tools|train|saved|hub)/""")
CHECK = """
import sys
from pathlib import Path

import timm
import torch

import aft_vision
from aft_vision.ops.common.cpp import library

folder = Path(aft_vision.__file__).parent
assert folder.is_relative_to(sys.prefix), f'expected the package of {sys.prefix}, got {folder}'
for name in ('aft_axial_nano', 'aft_conv_nano', 'aft_full_nano', 'aft_simple_nano'):
    model = timm.create_model(name, depth=2)
    model(torch.randn(2, 3, 96, 96)).square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters()), name
listed = timm.list_models('aft_*', pretrained=True)
assert sorted(listed) == WEIGHTS and WEIGHTS, f'expected the weights {WEIGHTS} of the checkout, got {listed}'
for name in listed:
    assert timm.create_model(name, pretrained=True).eval()(torch.randn(1, 3, 96, 96)).isfinite().all(), name
assert library() is not None or not COMPILER, 'the C++ kernels of the wheel cannot be built'
assert not CARRIED or folder in Path(library()._name).parents, f'expected kernels of the wheel, got {library()}'
print(f'{folder}: aft_vision {aft_vision.__version__}, torch {torch.__version__},',
      'C++ kernels' if library() else 'no C++ compiler')
"""


def first_examples(text: str) -> list[str]:
    """Return the first blocks of Python in a document that read no file of a checkout or of a run.

    Raises:
        ValueError: there are fewer than COUNT.
    """
    blocks = re.findall(r'^```python\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
    found = [block for block in blocks if not FILES.search(block)][:COUNT]
    if len(found) < COUNT:
        raise ValueError(f'expected {COUNT} examples in Python without files, got {len(found)}')
    return found


def make_environment(folder: Path, wheel: Path, dependencies: bool) -> Path:
    """Install a wheel into a new environment and return its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / 'bin' / 'python'
    install = [python, '-I', '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', f'{wheel}[train]']
    subprocess.run([*install, *([] if dependencies else ['--no-deps'])], check=True)
    if not dependencies:
        packages = next(folder.glob('lib/python*/site-packages'))
        # Python reads the packages of these folders but not their .pth files: an editable install is one of those.
        ours = [path for path in sys.path if Path(path).name in ('site-packages', 'dist-packages')]
        (packages / 'dependencies.pth').write_text('\n'.join(ours) + '\n')
    return python


def run_commands(folder: Path, program: Path, environment: dict[str, str]) -> None:
    """Train on a few photographs by the console command, and use the run."""
    for kind in ('hat', 'shoes'):
        (folder / 'photographs' / kind).mkdir(parents=True)
        for path in sorted((PHOTOGRAPHS / kind).iterdir())[:8]:
            shutil.copy(path, folder / 'photographs' / kind)
    for words in COMMANDS:
        print(f'aft-vision {words}', flush=True)
        subprocess.run([program, *words.split()], cwd=folder, env=environment, check=True)


def main() -> None:
    """Exit with an error if the wheel does not work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('wheel', type=Path)
    parser.add_argument('--dependencies', action='store_true', help='install them instead of borrowing them')
    args = parser.parse_args()
    compiler = shutil.which(os.environ.get('CXX', 'c++').partition(' ')[0])
    weights = sorted(path.stem for path in (README.parent / 'aft_vision' / 'weights').glob('*.safetensors'))
    carried = not args.wheel.name.endswith('-any.whl')
    constants = [f'COMPILER = {compiler!r}', f'CARRIED = {carried}', f'WEIGHTS = {weights!r}']
    script = '\n'.join([*first_examples(README.read_text()), *constants, CHECK])
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder) / 'environment', args.wheel.resolve(), args.dependencies)
        # Kernels that an earlier build has left elsewhere would hide a file that the wheel lacks.
        environment = {**os.environ, 'TORCH_EXTENSIONS_DIR': f'{folder}/extensions', 'HF_HUB_OFFLINE': '1'}
        if carried:
            environment['PATH'] = str(python.parent)
        path = Path(folder) / 'examples.py'
        path.write_text(script)
        # -I: neither PYTHONPATH nor the working directory.
        if subprocess.run([python, '-I', path], cwd=folder, env=environment).returncode:
            sys.exit(f'{args.wheel} does not work in an environment of its own, see above')
        path.unlink()
        run_commands(Path(folder), python.with_name('aft-vision'), environment)


if __name__ == '__main__':
    main()
