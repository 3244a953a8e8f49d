"""The packages, and wheels with compiled kernels: `AFT_WHEEL_KERNELS=1 python -m build`.

Without the variable a wheel has their sources alone, for every machine, and a library is compiled at its first use.
"""

import importlib.util
import os
import platform
import re
import shutil
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = os.environ.get('AFT_WHEEL_KERNELS') == '1'
FOLDER = 'aft_vision/ops'
# The commands and configs are installed in a package of their own, because other packages may have their names.
CLI = {f'aft_vision_cli.{name}': name for name in ('train', 'tools', 'configs')}
COMMANDS = find_namespace_packages(include=['train*', 'tools*', 'configs*'])
PACKAGES = [*find_namespace_packages(include=['aft_vision*']), *(f'aft_vision_cli.{name}' for name in COMMANDS)]
# The glibc 2.x of manylinux's platforms, with the newest GLIBCXX_3.4.x and CXXABI_1.3.x that each has.
PLATFORMS = {17: (19, 7), 28: (24, 11), 34: (29, 13), 35: (30, 13)}


class BuildWithKernels(build_py):
    """Copy the package, and compile its kernels for every set of instructions."""

    def run(self) -> None:
        super().run()
        # Those of an earlier build may be there.
        shutil.rmtree(Path(self.build_lib) / FOLDER / 'lib', ignore_errors=True)
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
        # The oldest platform with the newest symbols that the libraries need; torch's wheel has those of OpenMP. With
        # a static libstdc++ they are of the glibc that it was made for, which is newer.
        content = b''.join(path.read_bytes() for path in Path(self.bdist_dir).rglob('lib/kernels_*.so'))
        glibc, cxx, abi = (
            max((int(x) for x in re.findall(rb'\b%s\.(\d+)\b' % name, content)), default=0)
            for name in (rb'GLIBC_2', rb'GLIBCXX_3\.4', rb'CXXABI_1\.3')
        )
        for minor, (newest_cxx, newest_abi) in PLATFORMS.items():
            if glibc <= minor and cxx <= newest_cxx and abi <= newest_abi:
                return minor
        raise ValueError(
            f'expected libraries for glibc 2.{max(PLATFORMS)} or older, got GLIBC_2.{glibc}, GLIBCXX_3.4.{cxx} and '
            f'CXXABI_1.3.{abi}: compile them with an older GCC'
        )


setup(packages=PACKAGES, package_dir=CLI, cmdclass={'build_py': BuildWithKernels, 'bdist_wheel': PlatformWheel})
