"""PEP 517 hooks: setuptools' own, plus what this build needs besides. torch is not among it: csrc uses no torch header."""

import sys

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the hooks that need no change

from . import mode, toolkit
from .errors import BuildError


def native_requires() -> list[str]:
    try:
        if not mode.plan().gencode:
            return []
        return ["ninja", *([] if toolkit.find_installed() else toolkit.PYPI_PACKAGES)]
    except BuildError as error:
        sys.exit(f"error: {error}")


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + native_requires()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + native_requires()
