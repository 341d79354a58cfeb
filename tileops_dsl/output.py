"""What generation writes: sources, the parameter structs, the dispatcher's table, the schemas and the manifest."""

import json
import re
from dataclasses import dataclass
from functools import partial

from build_backend import tables
from tileops_dsl import ir, plan, report
from tileops_dsl.codegen import emit_kernel, emit_roles, emit_threads, param_fields, params_header
from tileops_dsl.configs import Config
from tileops_dsl.errors import TileError
from tileops_dsl.kernels import PROGRAMS, configs_of
from tileops_dsl.passes import run_passes
from tileops_dsl.targets import TARGETS

# Words that few kernels have: the others need not be compiled anew with them.
OWN_HEADERS = ("copy_async_part", "deal_part", "grid_dependency", "unroll_by")


@dataclass(frozen=True)
class Generated:
    """One kernel: its text, its row of the manifest, and the fields of the struct that it takes."""

    config: Config
    text: str
    entry: dict
    report: str | None = None  # the schedule of a kernel with roles
    params = property(lambda self: self.config.params)
    fields = property(lambda self: self.entry["params"])


def compile_config(config: Config, dump=lambda kernel, step, text: None, program=None) -> Generated:
    """The kernel of one configuration row; of another program than the operator's, if one is given."""
    target = TARGETS[config.target]
    kernel = run_passes((program or PROGRAMS[config.op])(config), target, partial(dump, config.name))
    emit = emit_kernel if not kernel.roles else emit_roles if target.warp_groups else emit_threads
    code, sites = emit(kernel, config.name, config.params)
    entry = {name: getattr(config, name) for name in ("op", "target", "x", "y", *config.facts)}
    entry |= {"threads": plan.threads(kernel), "shared_bytes": kernel.shared_bytes, "params": param_fields(kernel)}
    sites = {"sites": {str(number): line for number, line in sites.items()}}
    if not kernel.roles:
        _check_grid(kernel, config)
        return Generated(config, report.of_rows(config, kernel) + code, entry | sites)
    maps = plan.tma_tensors(kernel).items() if target.warp_groups else ()
    entry["maps"] = {tensor.name: {"box": box, "swizzle": tile.swizzle.row_bytes} for tensor, (tile, box) in maps}
    for copy in (s for s in ir.walk(kernel.body, ir.Copy) if s.box_row and maps):  # the parameter that has the rows of a box
        entry["maps"][copy.src.tensor.name]["rows"] = str(copy.box_row.rows)
    return Generated(config, report.header(config, kernel) + code, entry | sites, report.report(config, kernel, target))


def _check_grid(kernel: ir.Kernel, config: Config) -> None:
    """The host launches ceil(inner / rows) x outer x batch CTAs (csrc/variant.h); the program must say the same."""
    expected = f"add(floordiv(sub(inner, 1), {config.tile[0]}), 1), outer"
    if ", ".join(map(str, kernel.grid)) not in (expected, f"{expected}, batch"):
        instead = "T.Kernel(T.ceildiv(inner, rows), outer, ...), or (.., outer, batch, ...)"
        raise TileError("the grid of a row-wise program is fixed", instead, kernel.location)


def generate(ops: list[str], targets: list[str], build: str, dump=lambda kernel, step, text: None) -> dict[str, str]:
    """File name -> text."""
    rows = [row for op in ops for row in configs_of(op) if row.target in targets]
    kept = _smoke(rows) if build == "smoke" else rows
    return files_of([compile_config(row, dump) for row in kept], targets)


def files_of(kernels: list[Generated], targets: list[str]) -> dict[str, str]:
    """What a library of these kernels is built from."""
    names = [k.config.name for k in kernels]
    for twice in (k.config for k in kernels if names.count(k.config.name) > 1):
        raise TileError(f"configs/{twice.op}.json has two rows for the kernel {twice.name}", "one of them")
    for debugged in (k.config for k in kernels if " print(" in k.text):
        raise TileError(f"the kernel {debugged.name} has a T.print", "the program without it, for the library")
    files = {f"{k.params}.h": params_header(k.params, k.fields) for k in kernels}
    files |= {f"{k.config.file}.txt": k.report for k in kernels if k.report}
    sources = []
    for file, op, target in sorted({(f"{k.config.file}.cu", k.config.op, k.config.target) for k in kernels}):
        members = [k for k in kernels if f"{k.config.file}.cu" == file]
        files[file] = source_text(members)
        entry = {"file": file, "op": op, "target": target, "params": members[0].params}
        sources.append(entry | {"kernels": [k.config.name for k in members]})
    files |= {"registry.cpp": tables.registry(kernels), "schemas.h": tables.schemas(targets)}
    manifest = {"sources": sources, "kernels": {k.config.name: k.entry for k in kernels}}
    files["manifest.json"] = json.dumps(manifest, indent=1) + "\n"
    return files


def _smoke(rows: list[Config]) -> list[Config]:
    """For each operator, target and struct of parameters the first plain bfloat16 kernel, or else the first that writes it."""
    chosen = {}
    for row in sorted(rows, key=lambda row: not (row.plain and row.x == row.y)):
        if row.y == "bfloat16":
            chosen.setdefault((row.op, row.target, row.params), row)
    return list(chosen.values())


def source_text(kernels: list[Generated]) -> str:
    """A .cu file of kernels of one operator and target."""
    first = kernels[0]
    head = [f"// Generated by: python -m tileops_dsl.generate --only {first.config.op} --target {first.config.target}"]
    words = (word for word in OWN_HEADERS if any(re.search(word, k.text, re.IGNORECASE) for k in kernels))
    head += [f"#include <tileops/{name}.h>" for name in (first.config.target if first.report else "device", *words)] + [""]
    head += [f'#include "{first.params}.h"', "", "namespace tileops {", "", ""]
    return "\n".join(head) + "\n".join(k.text for k in kernels) + "\n}  // namespace tileops\n"
