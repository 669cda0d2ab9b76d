"""Packs the library that was built beside this folder into the package, where there is one.

pyproject.toml has everything else. Without it an installed package looks for libdeepinfer.so by DEEPINFER_LIBRARY.
"""
import os
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = os.path.dirname(os.path.abspath(__file__))


class BuildWithLibrary(build_py):
    def run(self):
        super().run()
        library = os.path.join(HERE, "..", "build", "libdeepinfer.so")
        if os.path.exists(library) and not self.editable_mode:
            shutil.copy2(library, os.path.join(self.build_lib, "deepinfer", "libdeepinfer.so"))


setup(cmdclass={"build_py": BuildWithLibrary})
