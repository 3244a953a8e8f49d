"""Run timm's own model tests, unmodified and of the installed version, on the registered aft_* models.

    python tests/run_timm_suite.py                       # all models
    python tests/run_timm_suite.py aft_conv_tiny 'aft_full_*'
    python tests/run_timm_suite.py aft_conv_tiny -- -k forward -x      # the rest goes to pytest

The tests are only in timm's source distribution, which is fetched once into .cache/timm-sdist.
"""

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / '.cache' / 'timm-sdist'


def fetch_sdist(version: str, cache: Path = CACHE) -> Path:
    """The unpacked source distribution of a timm version, downloaded by pip when the cache has none.

    Raises:
        SystemExit: pip could not download it.
    """
    folder = cache / f'timm-{version}'
    if (folder / 'tests' / 'test_models.py').exists():
        return folder
    archive = cache / f'timm-{version}.tar.gz'
    if not archive.exists():
        pip = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--no-binary', ':all:']
        if subprocess.run([*pip, '--dest', str(cache), f'timm=={version}']).returncode:
            sys.exit(f'cannot download the source distribution of timm {version}; put timm-{version}.tar.gz in {cache}')
    with tarfile.open(archive) as tar:
        # An argument of extractall in Python 3.11.4 and later alone.
        tar.extraction_filter = getattr(tarfile, 'data_filter', lambda member, path: member)
        tar.extractall(cache)
    return folder


def run_suite(test_file: Path, patterns: Sequence[str], pytest_args: Sequence[str] = ()) -> int:
    """Run one copy of timm's test_models.py on the models that match and return pytest's exit status."""
    path = [os.environ.get('PYTHONPATH', ''), str(ROOT), str(Path(__file__).parent)]
    # On its own CI timm leaves out tests and models for want of memory: here all of them run.
    env = {k: v for k, v in os.environ.items() if k not in ('GITHUB_ACTIONS', 'TORCH_BACKEND')}
    env['PYTHONPATH'] = os.pathsep.join(p for p in path if p)
    command = [sys.executable, '-m', 'pytest', str(test_file), '-p', 'timm_suite_plugin', '-p', 'no:cacheprovider']
    command += ['-c', str(test_file.parents[1] / 'pyproject.toml'), '--import-mode=importlib', '-q', '--durations=5']
    command += [*(f'--aft-models={pattern}' for pattern in patterns), *pytest_args]
    # From a folder without a timm in it, or the source distribution would be tested in place of the installed timm.
    with tempfile.TemporaryDirectory() as neutral:
        return subprocess.run(command, cwd=neutral, env=env).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('patterns', nargs='*', default=['aft_*'], help='model names or fnmatch patterns')
    argv = list(sys.argv[1:] if argv is None else argv)
    split = argv.index('--') if '--' in argv else len(argv)
    patterns = parser.parse_args(argv[:split]).patterns
    folder = fetch_sdist(importlib.metadata.version('timm'))
    return run_suite(folder / 'tests' / 'test_models.py', patterns, argv[split + 1 :])


if __name__ == '__main__':
    sys.exit(main())
