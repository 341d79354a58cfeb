"""The oldest manylinux platform on which a library loads, from the symbol versions that it asks for."""

import platform
import re
import subprocess
from pathlib import Path

# Newest symbol versions that a platform provides besides glibc's own (libstdc++, libgcc), as auditwheel's policies state them.
# platform: (GLIBCXX, CXXABI, GCC). Nothing older than 2.28 is named, for torch itself needs that.
POLICIES = {
    (2, 28): ((3, 4, 24), (1, 3, 11), (7, 0, 0)),
    (2, 31): ((3, 4, 28), (1, 3, 12), (9, 0, 0)),
    (2, 34): ((3, 4, 29), (1, 3, 13), (11, 0, 0)),
    (2, 35): ((3, 4, 30), (1, 3, 13), (12, 0, 0)),
    (2, 39): ((3, 4, 33), (1, 3, 15), (14, 0, 0)),
}


def newest(readelf_output: str) -> dict[str, tuple[int, ...]]:
    """From `readelf -V -W`: the newest version asked for in each family."""
    found: dict[str, tuple[int, ...]] = {}
    for family, version in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", readelf_output):
        number = tuple(map(int, version.split(".")))
        found[family] = max(found.get(family, number), number)
    return found


def manylinux(readelf_output: str) -> tuple[int, int] | None:
    """The lowest (major, minor) that serves; None if no known platform does."""
    need = newest(readelf_output)
    for glibc, limits in POLICIES.items():
        if need.get("GLIBC", (0,))[:2] <= glibc and all(
            need.get(family, (0,)) <= limit for family, limit in zip(("GLIBCXX", "CXXABI", "GCC"), limits)
        ):
            return glibc
    return None


def platform_tag(library: Path) -> str:
    listing = subprocess.run(["readelf", "-V", "-W", library], capture_output=True, text=True, check=True).stdout
    serves = manylinux(listing)
    prefix = f"manylinux_{serves[0]}_{serves[1]}" if serves else "linux"
    return f"{prefix}_{platform.machine()}"
