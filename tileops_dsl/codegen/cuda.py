"""CUDA text of row-wise kernels, in device words. What stands on one line of the program stands in one block of the text."""

from dataclasses import dataclass, field

from tileops_dsl import ir
from tileops_dsl.codegen.expressions import CTYPES, statement
from tileops_dsl.layouts import PerColumn, PerRow, VectorisedRows


@dataclass
class Emitter:
    kernel: ir.Kernel
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    sites: dict[int, str] = field(default_factory=dict)

    def line(self, code: str = "") -> None:
        self.lines.append("  " * self.depth + code if code else "")

    def block(self, head: str):
        return _Block(self, head)

    def loop(self, var: str, extent: int):
        """An unrolled loop: its variable is a constant wherever it indexes registers."""
        self.line("TILEOPS_UNROLL")
        return self.block(f"for (int {var} = 0; {var} < {extent}; ++{var})")

    def site(self, stmt: ir.Stmt) -> str:
        return self.site_at(stmt.location)

    def site_at(self, location: ir.Location) -> str:
        """A fresh site number; the manifest maps it to the program's line."""
        number = len(self.sites) + 1
        self.sites[number] = str(location)
        return f"site({number})"

    @property
    def tile(self) -> VectorisedRows:
        """The one distribution of rows over threads that the kernel has (infer_layouts makes all fragments agree)."""
        return next(la for la in self.kernel.layouts.values() if isinstance(la, VectorisedRows))


@dataclass
class _Block:
    emitter: Emitter
    head: str

    def __enter__(self):
        self.emitter.line(f"{self.head} {{".lstrip())
        self.emitter.depth += 1

    def __exit__(self, *exc):
        self.emitter.depth -= 1
        self.emitter.line("}")


def emit_kernel(kernel: ir.Kernel, name: str, op: str) -> tuple[str, dict[int, str]]:
    """The definition of the kernel `name`, and the program's line for each site number."""
    e = Emitter(kernel)
    _prologue(e)
    _body(e, kernel.body)
    head = f"TILEOPS_KERNEL({name}, {op}_params, {kernel.threads}, {kernel.min_blocks}) {{"
    return "\n".join([head, *e.lines, "}", ""]), e.sites


def _prologue(e: Emitter) -> None:
    """Names of the program for thread indices and parameters."""
    t = e.tile
    e.line("const int thread = thread_index();")
    if t.lanes_on_rows:
        e.line(f"const int slot = thread % {t.slots};  // of the {t.slots} vectors of rows")
        e.line(f"const int member = thread / {t.slots};  // of the {t.threads_per_row} threads of a row")
    else:
        e.line(f"const int slot = thread / {t.threads_per_row};  // row of the {t.slots} that the CTA holds at a time")
        e.line(f"const int member = thread % {t.threads_per_row};  // of the {t.threads_per_row} threads of that row")
    for block in e.kernel.blocks:
        e.line(f"const int64_t {block.name} = block_index_{block.name[-1]}();")
    for dim in (d for d in e.kernel.dims if d.name in _used(e.kernel)):
        e.line(f"const {CTYPES[dim.dtype]} {dim.name} = static_cast<{CTYPES[dim.dtype]}>(p.{dim.name});")
    if t.shifted:
        _shift(e)
    for tensor in (t for t in e.kernel.tensors if t.dtype == "any"):
        e.line(f"const int {tensor.name}_dtype = p.{tensor.name}_dtype;")
    for scalar in (s for s in e.kernel.scalars if s.name in _used(e.kernel)):
        e.line(f"const {CTYPES[scalar.dtype]} {scalar.name} = p.{scalar.name};")


def _shift(e: Emitter) -> None:
    """Where the vectors of this thread's row begin and end, from the tile that is loaded first, and its edge column."""
    copies = (s for s in ir.walk(e.kernel.body) if isinstance(s, ir.Copy) and isinstance(s.src, ir.Region))
    region, v = next(copies).src, e.tile.vector
    *outside, row = (statement(o, None) for o in region.origin[:-1])
    terms = [f"{o} * p.{region.tensor.name}_stride[{d}]" for d, o in enumerate(outside)]
    terms.append(f"({row} + slot) * p.{region.tensor.name}_stride[{len(outside)}]")
    pointer = f"global<{CTYPES[region.tensor.dtype]}>(p.{region.tensor.name})"
    e.line(f"const int head = min(elements_to_alignment<{v}>({pointer}, {' + '.join(terms)}), cols);")
    e.line(f"const int tail = head + (cols - head) / {v} * {v};  // columns head..tail-1 are aligned vectors")
    e.line(f"const int edge = member < {v} ? member : tail + member - {v};  // the column outside them of this thread,")
    e.line(f"const bool has_edge = member < {v} ? edge < head : edge < cols;  // if it has one")


def _used(kernel: ir.Kernel) -> set[str]:
    """Names that the text mentions: in expressions, or as the bounds of a copied tile."""
    names = set()
    for stmt in ir.walk(kernel.body):
        names |= {e.name for x in ir.exprs_of(stmt) for e in ir.subexprs(x) if isinstance(e, ir.Var)}
        if isinstance(stmt, ir.Copy):
            names |= {d.name for d in _region(stmt).tensor.dims[-len(_fragment(stmt).shape) :]}
    return names


def _body(e: Emitter, body: tuple[ir.Stmt, ...], in_loop: bool = False) -> None:
    for stmt in body:
        if isinstance(stmt, ir.Annotate):
            continue
        if not isinstance(stmt, ir.Alloc):
            e.line()
            e.line(f"// {stmt.location}: {stmt.location.text}")
        _EMIT[type(stmt)](e, stmt, in_loop)


def _alloc(e: Emitter, stmt: ir.Alloc, in_loop: bool) -> None:
    layout = e.kernel.layouts[stmt.buffer]
    e.line(f"Fragment<{CTYPES[stmt.buffer.dtype]}, {layout.registers}> {stmt.buffer.name};  // {layout}")


def _fill(e: Emitter, stmt: ir.Fill, in_loop: bool) -> None:
    registers = e.kernel.layouts[stmt.buffer].registers
    e.line(f"fill<{registers}>({stmt.buffer.name}, 0, {statement(stmt.value, None)});")


def _region(stmt: ir.Copy) -> ir.Region:
    return stmt.src if isinstance(stmt.src, ir.Region) else stmt.dst


def _fragment(stmt: ir.Copy) -> ir.Buffer:
    return stmt.src if isinstance(stmt.src, ir.Buffer) else stmt.dst


def _copy(e: Emitter, stmt: ir.Copy, in_loop: bool) -> None:
    tensor = _region(stmt).tensor
    if tensor.dtype != "any":
        _copy_as(e, stmt, CTYPES[tensor.dtype])
        return
    for word, dtype, code in (("if", "bfloat16", "kBf16"), ("else if", "float16", "kF16"), ("else if", "float32", "kF32")):
        with e.block(f"{word} ({tensor.name}_dtype == {code})"):
            _copy_as(e, stmt, CTYPES[dtype])
    # In a branch of its own: in front of the others the compiler would set all registers before it needs them.
    with e.block("else"):
        e.line(f"fill<{e.kernel.layouts[stmt.dst].registers}>({stmt.dst.name}, 0, {statement(stmt.absent, None)});")


def _copy_as(e: Emitter, stmt: ir.Copy, ctype: str) -> None:
    """Ragged edges: a row or a chunk outside the tensor is not touched; a loaded one becomes the fill value.

    The address of a thread's first element is computed once for each row; the chunks lie at constant distances from it,
    so that their accesses share one register pair.
    """
    region, buffer = _region(stmt), _fragment(stmt)
    tensor, t = region.tensor, e.tile
    origin = [statement(o, None) for o in region.origin]
    terms = [f"{o} * p.{tensor.name}_stride[{d}]" for d, o in enumerate(origin[: -len(buffer.shape)])]
    column = " + ".join([origin[-1]] * (origin[-1] != "0") + ["head"] * t.shifted + [f"member * {t.column_vector}"])
    bound = "tail" if t.shifted else tensor.dims[-1].name
    edge = "has_edge" if origin[-1] == "0" else f"has_edge && {origin[-1]} == 0"
    if isinstance(e.kernel.layouts[buffer], VectorisedRows):
        with e.block("") if t.lanes_on_rows else e.loop("r", t.passes):
            e.line(f"const int64_t row = {origin[-2]} + {f'slot * {t.vector}' if t.lanes_on_rows else _row(t)};")
            terms.append(f"row * p.{tensor.name}_stride[{len(terms)}]")
            in_rows = f"row < {tensor.dims[-2]}"
            _copy_row(e, stmt, ctype, column, f"{in_rows} ? {bound} : 0", f"{in_rows} && {edge}", terms)
    else:
        with e.block(""):
            _copy_row(e, stmt, ctype, column, bound, edge, terms)


def _copy_row(e: Emitter, stmt: ir.Copy, ctype: str, column: str, columns: str, edge: str, terms: list[str]) -> None:
    """One row's accesses, from the end of the tensor's `columns` and the terms of the row's offset."""
    tensor, t, whole = _region(stmt).tensor, e.tile, isinstance(e.kernel.layouts[_fragment(stmt)], VectorisedRows)
    stride = f" * p.{tensor.name}_stride[{len(tensor.dims) - 1}]" if t.column_vector == 1 else ""
    e.line(f"const int col = {column};")
    e.line(f"const int columns = {columns};")
    e.line(f"const auto first = global<{ctype}>(p.{tensor.name}) + ({' + '.join([*terms, f'col{stride}'])});")
    step = t.threads_per_row * t.column_vector
    vector = t.vector if whole else t.column_vector
    row = f"r * {t.row_registers} + " if whole and not t.lanes_on_rows else ""
    unaligned = t.shifted and tensor.dtype == "any"  # such a tensor lies in its vectors in its own way
    with e.loop("c", t.chunks):
        guard = f"c * {step} < columns - col"
        _access(e, stmt, vector, guard, f"c * {step}{stride}", f"{row}c * {vector}", elementwise=unaligned)
    if t.shifted:
        _access(e, stmt, 1, edge, "edge - col", f"{row}{t.row_registers - 1}")


def _access(e: Emitter, stmt: ir.Copy, vector: int, guard: str, at: str, register: str, elementwise: bool = False) -> None:
    """One access: where the guard holds, `vector` elements; elsewhere the fill value."""
    if isinstance(stmt.src, ir.Buffer):
        word = "store_global_evict_first" if stmt.evict_first else "store_global"
        e.line(f"if ({guard}) {word}<{vector}>(first, {at}, {stmt.src.name}, {register}, {e.site(stmt)});")
        return
    word = "load_global_evict_first" if stmt.evict_first else "load_global"
    word = "load_global_as_float" if stmt.src.tensor.dtype == "any" else word
    word += f"_each<{vector}>" if elementwise else f"<{vector}>"
    e.line(f"if ({guard}) {word}({stmt.dst.name}, {register}, first, {at}, {e.site(stmt)});")
    e.line(f"else fill<{vector}>({stmt.dst.name}, {register}, {statement(stmt.fill, None)});")


def _reduce(e: Emitter, stmt: ir.Reduce, in_loop: bool) -> None:
    """In the thread, then across its warp's lanes, then across warps through shared memory."""
    t, op = e.kernel.layouts[stmt.src], {"max": "Max", "sum": "Sum"}[stmt.op]
    src, dst = stmt.src.name, stmt.dst.name
    with e.block(""):
        if not stmt.clear:
            e.line(f"const auto before = {dst};")
        with e.loop("r", t.passes):
            stride, start = (f", {t.passes}", "r") if t.passes > 1 and t.lanes_on_rows else ("", f"r * {t.row_registers}")
            e.line(f"{dst}[r] = reduce_registers<{op}, {t.row_registers}{stride}>({src}, {start});")
            if not t.lanes_on_rows and t.threads_per_row > 1:
                e.line(f"{dst}[r] = reduce_lanes<{op}, {min(t.threads_per_row, 32)}>({dst}[r], {e.site(stmt)});")
        if stmt in e.kernel.shared:
            if in_loop:
                e.line(f"sync_threads({e.site(stmt)});  // the last iteration's values have been read")
            member, leader = ("member", "true") if t.lanes_on_rows else ("member / 32", "member % 32 == 0")
            buffer = f"shared<float>({e.kernel.shared[stmt]})"
            arguments = f"{dst}, {buffer}, {t.slots}, slot, {member}, {leader}, {e.site(stmt)}"
            e.line(f"reduce_members<{op}, {t.warps_per_row}>({arguments});")
        if not stmt.clear:
            with e.loop("r", t.passes):
                e.line(f"{dst}[r] = {op}::combine(before[r], {dst}[r]);")


def _parallel(e: Emitter, stmt: ir.Parallel, in_loop: bool) -> None:
    """Each thread runs over its own registers: pass r, and register q of the row."""
    t, table = e.tile, e.kernel.layouts
    layouts = [table[store.buffer] for store in stmt.body]
    whole = f"q * {t.passes} + r" if t.lanes_on_rows else f"r * {t.row_registers} + q"
    names = {VectorisedRows: whole, PerRow: "r", PerColumn: "q"}
    loops = ["r", "q"] if len(stmt.vars) == 2 else ["r"] if isinstance(layouts[0], PerRow) else ["q"]

    def register(buffer):
        return names[type(table[buffer])]

    def nest(loops):
        if loops:
            with e.loop(loops[0], t.passes if loops[0] == "r" else t.row_registers):
                nest(loops[1:])
        else:
            _element_indices(e, stmt)
            for store in stmt.body:
                e.line(f"{store.buffer.name}[{register(store.buffer)}] = {statement(store.value, register)};")

    nest(loops)


def _row(t: VectorisedRows) -> str:
    """The tile's row of this thread in pass r."""
    return f"slot * {t.vector} + r" if t.lanes_on_rows else f"r * {t.slots} + slot"


def _element_indices(e: Emitter, stmt: ir.Parallel) -> None:
    """The loop's variables as tile indices, where an expression uses them as numbers."""
    used = {x.name for store in stmt.body for x in ir.as_numbers(store.value) if isinstance(x, ir.Var)}
    t = e.tile
    row, v = _row(t), t.column_vector
    column = f"(q / {v} * {t.threads_per_row} + member) * {v} + q % {v}"
    is_row = isinstance(e.kernel.layouts[stmt.body[0].buffer], PerRow)
    forms = (row, column) if len(stmt.vars) == 2 else (row,) if is_row else (column,)
    for var, form in zip(stmt.vars, forms, strict=True):
        if var.name in used:
            e.line(f"const int {var.name} = {form};")


def _serial(e: Emitter, stmt: ir.Serial, in_loop: bool) -> None:
    e.line("TILEOPS_NO_UNROLL")
    var = stmt.var.name
    with e.block(f"for (int {var} = 0; {var} < {statement(stmt.extent, None)}; ++{var})"):
        _body(e, stmt.body, in_loop=True)


def _if(e: Emitter, stmt: ir.If, in_loop: bool) -> None:
    with e.block(f"if ({statement(stmt.condition, None)})"):
        _body(e, stmt.body, in_loop)


_EMIT = {
    ir.Alloc: _alloc,
    ir.Fill: _fill,
    ir.Copy: _copy,
    ir.Reduce: _reduce,
    ir.Parallel: _parallel,
    ir.Serial: _serial,
    ir.If: _if,
}
