"""Adds the native library to the build: what is in it depends on TILEOPS_BUILD (build_backend/mode.py)."""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))
from build_backend import mode, native, wheel_tag
from build_backend.errors import BuildError

LIBRARY = "tileops/_C.so"

try:
    PLAN = mode.plan()
except BuildError as error:
    sys.exit(f"error: {error}")


class BuildLibrary(build_ext):
    """One library that knows no Python, loaded by ctypes; setuptools only has to put it in the right place."""

    def get_ext_filename(self, fullname):
        return fullname.replace(".", "/") + ".so"  # setuptools asks for the short name too

    def build_extension(self, ext):
        try:
            native.build(PLAN, Path(self.get_ext_fullpath(ext.name)))
        except BuildError as error:
            sys.exit(f"error: {error}")


class BuildPython(build_py):
    """Forgets earlier builds: the modules of a wheel, and the library in the tree where this build has none."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        elif not PLAN.gencode:
            Path(native.ROOT, LIBRARY).unlink(missing_ok=True)
        super().run()


class TaggedWheel(bdist_wheel):
    """py3-none-<oldest manylinux that serves>; for the present machine only, if built for its GPU only."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        if not PLAN.gencode:
            return python, abi, platform
        library = Path(self.bdist_dir, LIBRARY)
        if PLAN.mode == "all" and library.exists():  # it does not for an editable install
            platform = wheel_tag.platform_tag(library)
        return "py3", "none", platform


setup(
    ext_modules=[Extension("tileops._C", sources=[])] if PLAN.gencode else [],
    cmdclass={"build_py": BuildPython, "build_ext": BuildLibrary, "bdist_wheel": TaggedWheel},
)
