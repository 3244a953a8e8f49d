"""Wheels with compiled kernels: `AFT_WHEEL_KERNELS=1 python -m build`.

Without the variable a wheel has their sources alone, for every machine, and a library is compiled at its first use.
"""

import importlib.util
import os
import platform
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = os.environ.get('AFT_WHEEL_KERNELS') == '1'
FOLDER = 'aft_vision/ops'
# The glibc 2.x of manylinux's platforms, by the newest GLIBCXX_3.4.x that each has.
PLATFORMS = {19: 17, 24: 28, 29: 34, 30: 35, 32: 38, 33: 39}


class BuildWithKernels(build_py):
    """Copy the package, and compile its kernels for every set of instructions."""

    def run(self) -> None:
        super().run()
        if KERNELS and not self.editable_mode:
            path = Path(__file__).parent / FOLDER / 'common' / 'build.py'
            spec = importlib.util.spec_from_file_location('build_kernels', path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            module.build_for_wheel(Path(self.build_lib) / FOLDER / 'lib')


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python, if it has kernels."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not KERNELS

    def get_tag(self) -> tuple[str, str, str]:
        if not KERNELS:
            return super().get_tag()
        if platform.system() != 'Linux':
            return 'py3', 'none', super().get_tag()[2]
        return 'py3', 'none', f'manylinux_2_{self._find_glibc()}_{platform.machine()}'

    def _find_glibc(self) -> int:
        # The oldest platform with the newest symbols that the libraries need; torch's wheel has that of OpenMP.
        libraries = [path.read_bytes() for path in Path(self.bdist_dir).rglob('lib/kernels_*.so')]
        glibc = [int(x) for library in libraries for x in re.findall(rb'GLIBC_2\.(\d+)\b', library)]
        cxx = [int(x) for library in libraries for x in re.findall(rb'GLIBCXX_3\.4\.(\d+)\b', library)]
        return min(minor for newest, minor in PLATFORMS.items() if newest >= max(cxx) and minor >= max(glibc))


setup(cmdclass={'build_py': BuildWithKernels, 'bdist_wheel': PlatformWheel})
