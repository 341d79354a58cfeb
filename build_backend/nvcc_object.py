"""Compiles one .cu and writes, beside the object, what ptxas said and how large each kernel's machine code is.

python nvcc_object.py SOURCE OBJECT COMMAND...    (run by ninja; a script of its own, so it imports nothing of this package)
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def text_sections(readelf_output: str) -> dict[str, int]:
    """Bytes of machine code by function, from `readelf -S -W` of a cubin: one section .text.<function> each."""
    rows = re.findall(r"\] \.text\.(\S+)\s+PROGBITS\s+[0-9a-f]+ [0-9a-f]+ ([0-9a-f]+)", readelf_output)
    return {name: int(size, 16) for name, size in rows}


def code_bytes(folder: Path, only_arch: str) -> dict[str, dict[str, int]]:
    """nvcc -keep names a cubin x.compute_90a.cubin, x.compute_120.sm_120.cubin if PTX is kept too, or x.cubin if alone."""
    sizes = {}
    for cubin in sorted(folder.glob("*.cubin")):
        named = re.search(r"\.(?:compute|sm)_(\w+)\.cubin$", cubin.name)
        arch = f"sm_{named[1]}" if named else only_arch
        listing = subprocess.run(["readelf", "-S", "-W", cubin], capture_output=True, text=True, check=True).stdout
        sizes[arch] = text_sections(listing)
    return sizes


def main(source: str, target: str, *command: str) -> int:
    archs = re.findall(r"\b(sm_\w+)", " ".join(command)) or ["none"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "-keep", "-keep-dir", folder, "-c", source, "-o", f"{target}.part"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            sys.stderr.write(done.stdout)
            return done.returncode
        report = {"source": Path(source).name, "log": done.stdout, "code_bytes": code_bytes(Path(folder), archs[0])}
    Path(target).with_suffix(".json").write_text(json.dumps(report, indent=1))
    os.replace(f"{target}.part", target)  # last: an object that exists is complete and has its report
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
