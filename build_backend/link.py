"""Links the one shared library.

It needs no CUDA library (the runtime is linked in; the driver is found at run time) and no torch to build: torch's libraries
are stood in for by empty ones of the same name, and torch's symbols stay undefined (tests/packaging checks each by name).
"""

import re
import subprocess
from pathlib import Path

from .errors import BuildError

# `libtorch` leads to libtorch_cuda where torch has CUDA, and so gives the weak CUDA symbols their value.
TORCH_LIBRARIES = ("libtorch.so", "libtorch_cpu.so")

# glibc 2.34 moved these libraries into libc under a new symbol version. They still exist by name, and the symbols by their
# old version, so a library that asks for the old pair loads before and after the move.
MOVED = {
    "libdl.so.2": r"dl(open|close|sym|error|vsym|mopen)",
    "libpthread.so.0": r"(pthread|sem)_\w+",
    "librt.so.1": r"shm_\w+",
}
OLDEST_GLIBC = (2, 28)  # torch's own wheels are manylinux_2_28


def run(*command) -> str:
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BuildError(f"the link step failed: {' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def stub(cxx: str, folder: Path, soname: str, symbols: dict[str, str]) -> Path:
    """A shared library of that name which defines the symbols (name -> version) and does nothing."""
    path = folder / soname
    source = folder / f"{soname}.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in symbols))
    versions = folder / f"{soname}.map"
    by_version = {v: [s for s in symbols if symbols[s] == v] for v in sorted(set(symbols.values()))}
    versions.write_text("".join(f"{v} {{ {'; '.join(names)}; }};\n" for v, names in by_version.items()))
    script = [f"-Wl,--version-script={versions}"] if symbols else []
    flags = "-x c -fno-builtin -w -shared -nostdlib -fPIC".split()
    run(cxx, *flags, f"-Wl,-soname,{soname}", *script, source, "-o", path)
    return path


def older_versions(dynamic_symbols: str) -> dict[str, str]:
    """From `nm -D libc.so.6`: symbols whose default version is newer than OLDEST_GLIBC -> the newest older one that is kept."""
    rows = re.findall(r"(\w+)(@@?)GLIBC_(\d+)\.(\d+)(\.\d+)?$", dynamic_symbols, re.MULTILINE)
    too_new = {name for name, at, major, minor, _ in rows if at == "@@" and (int(major), int(minor)) > OLDEST_GLIBC}
    kept: dict[str, tuple] = {}
    for name, at, major, minor, patch in rows:
        version = (int(major), int(minor), patch)
        if name in too_new and at == "@" and version[:2] <= OLDEST_GLIBC:
            kept[name] = max(kept.get(name, version), version)
    return {name: f"GLIBC_{major}.{minor}{patch}" for name, (major, minor, patch) in kept.items()}


def glibc_stubs(cxx: str, folder: Path, inputs: list[Path]) -> list[Path]:
    """Stand-ins for the moved libraries, with what the inputs use of them. Linked before libc, they decide the version."""
    libc = run(cxx, "-print-file-name=libc.so.6").strip()
    kept = older_versions(run("nm", "-D", libc))
    used = set(re.findall(r"\bU (\w+)$", run("nm", "-u", *inputs), re.MULTILINE))
    stubs = []
    for soname, pattern in MOVED.items():
        symbols = {name: kept[name] for name in sorted(used & set(kept)) if re.fullmatch(pattern, name)}
        if symbols:
            stubs.append(stub(cxx, folder, soname, symbols))
    return stubs


def require_operators(library: Path) -> None:
    """A shared library may lack what it uses; torch's symbols are there when it is loaded, ours never would be."""
    missing = re.findall(r"\bU tileops::(\w+)\(", run("nm", "-DC", library))
    if missing:
        raise BuildError(
            f"csrc does not define {', '.join(missing)}; for each operator of tileops/ops expected csrc/<op>.cpp with the "
            "functions <op>, <op>_out and explain_<op>"
        )


def link(cxx: str, objects: list[Path], cudart: Path, exports: Path, folder: Path, target: Path) -> None:
    """`exports` names what a process may see of us; the static CUDA runtime stays private."""
    folder.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    torch = [stub(cxx, folder, name, {}) for name in TORCH_LIBRARIES]
    part = folder / "_C.so.part"  # renamed into place: a process that has the old library loaded keeps it intact
    run(
        cxx, "-shared", "-s", "-o", part, *objects, cudart,
        "-Wl,--no-as-needed", *torch, "-Wl,--as-needed", *glibc_stubs(cxx, folder, [*objects, cudart]),
        f"-Wl,--version-script={exports}", "-Wl,--gc-sections", "-Wl,-z,now,-z,noexecstack",
    )  # fmt: skip
    require_operators(part)
    target.unlink(missing_ok=True)
    part.replace(target)
