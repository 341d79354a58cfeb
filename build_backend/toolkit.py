"""Finds nvcc 13.x: CUDA_HOME, then PATH, then the packages that NVIDIA publishes on PyPI."""

import os
import re
import shutil
import site
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError

# Within CUDA 13 the oldest release is the one whose code every driver from 580 on accepts. nvcc does not pin the others.
PYPI_PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)


@dataclass(frozen=True)
class Toolkit:
    nvcc: Path
    version: str  # such as 13.0.88: part of the name of every object
    root: Path  # holds include/ and lib/

    @property
    def include(self) -> Path:
        return self.root / "include"

    @property
    def cudart(self) -> Path:
        for folder in ("lib64", "lib", "targets/x86_64-linux/lib"):
            if (path := self.root / folder / "libcudart_static.a").exists():
                return path
        raise BuildError(f"no libcudart_static.a in {self.root}: install the whole CUDA 13 toolkit there, or unset CUDA_HOME")


def inspect(nvcc: Path) -> Toolkit | None:
    """The toolkit that an nvcc belongs to; None if it is not CUDA 13. nvcc itself is asked, since it may be a wrapper."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        dryrun = subprocess.run([nvcc, "--dryrun", "-E", "x.cu"], capture_output=True, text=True).stderr
    except (OSError, subprocess.CalledProcessError):
        return None
    version = re.search(r"\bV(13\.[\d.]+)", text)
    here = re.search(r"^#\$ _HERE_=(.+)$", dryrun, re.MULTILINE)
    return Toolkit(nvcc, version[1], Path(here[1]).parent) if version and here else None


def find_installed(environ=os.environ) -> Toolkit | None:
    """CUDA_HOME or PATH."""
    home = environ.get("CUDA_HOME")
    if home:
        found = inspect(Path(home, "bin", "nvcc"))
        if found is None:
            raise BuildError(f"CUDA_HOME is {home}, which holds no nvcc of CUDA 13; correct it, or unset it")
        return found
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    return inspect(Path(nvcc)) if nvcc else None


def find_in_packages(folders=None) -> Toolkit | None:
    """The PyPI packages share one folder, nvidia/cu13, on the import path."""
    for folder in folders or [*sys.path, *site.getsitepackages()]:
        nvcc = Path(folder, "nvidia", "cu13", "bin", "nvcc")
        if nvcc.exists() and (found := inspect(nvcc)):
            return found
    return None


def find() -> Toolkit:
    found = find_installed() or find_in_packages()
    if found is None:
        raise BuildError(
            "no nvcc of CUDA 13 in CUDA_HOME, PATH or site-packages. Set CUDA_HOME, or install it with "
            f"`pip install {' '.join(PYPI_PACKAGES)}`, or build without kernels: TILEOPS_BUILD=none"
        )
    return found
