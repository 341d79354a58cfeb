"""CUDA text of row-wise kernels, in device words. What stands on one line of the program stands in one block of the text."""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from tileops_dsl import ir, plan
from tileops_dsl.codegen.expressions import CODES, CTYPES, statement, text
from tileops_dsl.layouts import PerColumn, PerRow, VectorisedRows


@dataclass
class Emitter:
    kernel: ir.Kernel
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    sites: dict[int, str] = field(default_factory=dict)
    body: Callable | None = None  # how statements are written, one behind the other
    declared: dict[ir.Expr, ir.Var] = field(default_factory=dict)  # numbers that have a name here

    def definition(self, name: str, struct: str) -> str:
        """Of the kernel, whose body has been written."""
        head = f"TILEOPS_KERNEL({name}, {struct}, {plan.threads(self.kernel)}, {self.kernel.min_blocks}) {{"
        return "\n".join([head, *self.lines, "}", ""])

    def line(self, code: str = "") -> None:
        self.lines.append("  " * self.depth + code if code else "")

    @contextmanager
    def block(self, head: str):
        self.line(f"{head} {{".lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        self.line("}")

    def loop(self, var: str, end, start=0, step: int = 1, unrolled: bool = True):
        """Unrolled, its variable is a constant wherever it indexes registers."""
        self.line("TILEOPS_UNROLL" if unrolled else "TILEOPS_NO_UNROLL")
        return self.block(_head(var, end, start, step))

    def each(self, code: str, var: str, end, start=0, step: int = 1) -> None:
        """An unrolled loop over one statement."""
        self.line("TILEOPS_UNROLL")
        self.line(f"{_head(var, end, start, step)} {code}")

    def number(self, expr: ir.Expr, factor: bool = False) -> str:
        """The text of one that loads no fragment, or of a factor."""
        return (text if factor else statement)(ir.replaced(expr, self.declared), None)

    @cached_property
    def elements(self) -> dict[ir.Element, str]:
        """Names of the elements of tensors that the program uses as numbers and has not named."""
        names: dict[ir.Element, str] = {}
        exprs = {e for s in ir.walk(self.kernel.body) for x in ir.exprs_of(s) for e in ir.subexprs(x)}
        found = [e for e in exprs if isinstance(e, ir.Element) and e not in self.kernel.named]
        for expr in sorted(found, key=lambda e: (len(list(ir.subexprs(e))), str(e))):
            name = "_".join([expr.tensor.name, *(str(i) for i in expr.indices if isinstance(i, ir.Const))])
            names[expr] = name + f"_{len(names)}" * (name in names.values())
        return names

    def load_element(self, element: ir.Element, name: str, at: str) -> None:
        """So many elements behind the first of its tensor."""
        self.line(f"Fragment<{CTYPES[element.dtype]}, 1> {name};")
        pointer = f"global<{CTYPES[element.dtype]}>(p.{element.tensor.name})"
        self.line(f"load_global<1>({name}, 0, {pointer}, {at}, {self.site_at(self.kernel.location)});")
        self.declared[element] = ir.Var(element.dtype, f"{name}[0]")

    def grid_dependency(self, word: str) -> None:
        """Wait for the kernel before this one, before anything is read, or launch the next one."""
        if self.kernel.dependent:
            self.line(f"grid_dependency_{word}({self.site_at(self.kernel.location)});")

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


def _head(var: str, end, start, step: int) -> str:
    return f"for (int {var} = {start}; {var} < {end}; {f'{var} += {step}' if step > 1 else f'++{var}'})"


def emit_kernel(kernel: ir.Kernel, name: str, params: str) -> tuple[str, dict[int, str]]:
    """The definition of the kernel `name`, which takes the struct `params`, and the program's line for each site number."""
    e = Emitter(kernel, body=_body)
    _prologue(e)
    _body(e, kernel.body)
    return e.definition(name, params), e.sites


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
    if e.elements or e.kernel.dependent:
        e.line(f"// {e.kernel.location}: {e.kernel.location.text}")
    e.grid_dependency("wait")
    e.grid_dependency("launch")
    for element, name in e.elements.items():
        e.load_element(element, name, " + ".join(terms(element.tensor, [e.number(i, True) for i in element.indices])))
    if t.shifted:
        _shift(e)
    for tensor in (t for t in e.kernel.tensors if t.dtype == "any"):
        e.line(f"const int {tensor.name}_dtype = p.{tensor.name}_dtype;")
    for scalar in (s for s in e.kernel.scalars if s.name in _used(e.kernel)):
        e.line(f"const {CTYPES[scalar.dtype]} {scalar.name} = p.{scalar.name};")


def _shift(e: Emitter) -> None:
    """Where the vectors of this thread's row begin and end, from the tile that is loaded first, and its edge column."""
    loads = (s for s in ir.walk(e.kernel.body) if isinstance(s, ir.Copy) and s.region is s.src)
    region, v = next(s.src for s in loads if isinstance(e.kernel.layouts[s.dst], VectorisedRows)), e.tile.vector
    *outside, row = (e.number(o) for o in region.origin[:-1])
    offset = terms(region.tensor, [*outside, f"({row} + slot)"])
    pointer = f"global<{CTYPES[region.tensor.dtype]}>(p.{region.tensor.name})"
    e.line(f"const int head = min(elements_to_alignment<{v}>({pointer}, {' + '.join(offset)}), cols);")
    e.line(f"const int tail = head + (cols - head) / {v} * {v};  // columns head..tail-1 are aligned vectors")
    e.line(f"const int edge = member < {v} ? member : tail + member - {v};  // the column outside them of this thread,")
    e.line(f"const bool has_edge = member < {v} ? edge < head : edge < cols;  // if it has one")


def _used(kernel: ir.Kernel) -> set[str]:
    """Names that the text mentions: in expressions, or as the bounds of a copied tile."""
    names = set()
    for stmt in ir.walk(kernel.body):
        names |= {e.name for x in ir.exprs_of(stmt) for e in ir.subexprs(x) if isinstance(e, ir.Var)}
        if isinstance(stmt, ir.Copy):
            names |= {d.name for d in stmt.region.tensor.dims[-len(stmt.tile.shape) :]}
    return names


def _body(e: Emitter, body: tuple[ir.Stmt, ...]) -> None:
    for stmt in body:
        if isinstance(stmt, ir.Annotate):
            continue
        if not isinstance(stmt, ir.Alloc):
            e.line()
            e.line(f"// {stmt.location}: {stmt.location.text}")
        _EMIT[type(stmt)](e, stmt)


def _alloc(e: Emitter, stmt: ir.Alloc) -> None:
    layout = e.kernel.layouts[stmt.buffer]
    e.line(f"Fragment<{CTYPES[stmt.buffer.dtype]}, {layout.registers}> {stmt.buffer.name};  // {layout}")


def fill(e: Emitter, stmt: ir.Fill) -> None:
    registers = e.kernel.layouts[stmt.buffer].registers
    e.line(f"fill<{registers}>({stmt.buffer.name}, 0, {e.number(stmt.value)});")


def _copy(e: Emitter, stmt: ir.Copy) -> None:
    tensor = stmt.region.tensor
    if tensor.dtype != "any":
        _copy_as(e, stmt, CTYPES[tensor.dtype])
        return
    for number, (dtype, code) in enumerate(CODES.items()):
        with e.block(f"{'else ' * (number > 0)}if ({tensor.name}_dtype == {code})"):
            _copy_as(e, stmt, CTYPES[dtype])
    # In a branch of its own: in front of the others the compiler would set all registers before it needs them.
    with e.block("else"):
        e.line(f"fill<{e.kernel.layouts[stmt.dst].registers}>({stmt.dst.name}, 0, {e.number(stmt.absent)});")


def _copy_as(e: Emitter, stmt: ir.Copy, ctype: str) -> None:
    """Ragged edges: a row or a chunk outside the tensor is not touched; a loaded one becomes the fill value.

    The address of a thread's first element is computed once for each row; the chunks lie at constant distances from it,
    so that their accesses share one register pair.
    """
    tensor, layout, t = stmt.region.tensor, e.kernel.layouts[stmt.tile], e.tile
    places = 1 if isinstance(layout, PerRow) else 2  # of the tile; strides multiply the others
    origin = [e.number(o, n < len(tensor.dims) - places) for n, o in enumerate(stmt.region.origin)]
    if isinstance(layout, PerRow):
        _copy_values(e, stmt, ctype, origin)
        return
    whole, column = isinstance(layout, VectorisedRows), origin[-1]
    columns = "tail" if t.shifted else tensor.dims[-1].name
    edge = "has_edge" if column == "0" else f"has_edge && {column} == 0"
    with e.loop("r", t.passes) if whole and not t.lanes_on_rows else e.block(""):
        if whole:
            e.line(f"const int64_t row = {origin[-2]} + {f'slot * {t.vector}' if t.lanes_on_rows else _row(t)};")
            origin[-2], in_rows = "row", f"row < {tensor.dims[-2]}"
            columns, edge = f"{in_rows} ? {columns} : 0", f"{in_rows} && {edge}"
        start = [column] * (column != "0") + ["head"] * t.shifted + [f"member * {t.column_vector}"]
        e.line(f"const int col = {' + '.join(start)};")
        e.line(f"const int columns = {columns};")
        vector = t.vector if whole else t.column_vector
        row = f"r * {t.row_registers} + " if whole and not t.lanes_on_rows else ""
        stride = f" * p.{tensor.name}_stride[{len(tensor.dims) - 1}]" if t.column_vector == 1 else ""
        offset = [*terms(tensor, origin[:-1]), f"col{stride}"]
        e.line(f"const auto first = global<{ctype}>(p.{tensor.name}) + ({' + '.join(offset)});")
        step = t.threads_per_row * t.column_vector
        unaligned = t.shifted and tensor.dtype == "any"  # such a tensor lies in its vectors in its own way
        with e.loop("c", t.chunks):
            guard = f"c * {step} < columns - col"
            _access(e, stmt, vector, guard, f"c * {step}{stride}", f"{row}c * {vector}", elementwise=unaligned)
        if t.shifted:
            _access(e, stmt, 1, edge, "edge - col", f"{row}{t.row_registers - 1}")


def terms(tensor: ir.Tensor, places: list[str]) -> list[str]:
    """Of an offset: each place in the tensor's first dimensions times its stride."""
    return [f"{place} * p.{tensor.name}_stride[{d}]" for d, place in enumerate(places)]


def _copy_values(e: Emitter, stmt: ir.Copy, ctype: str, origin: list[str]) -> None:
    """One value a row: all threads of the row load it, one stores it."""
    tensor = stmt.region.tensor
    owner = " && member == 0" if isinstance(stmt.src, ir.Buffer) else ""
    with e.loop("r", e.tile.passes):
        e.line(f"const int64_t row = {origin[-1]} + {_row(e.tile)};")
        offset = " + ".join(terms(tensor, [*origin[:-1], "row"]))
        e.line(f"const auto first = global<{ctype}>(p.{tensor.name}) + ({offset});")
        _access(e, stmt, 1, f"row < {tensor.dims[-1]}{owner}", "0", "r")


def _access(e: Emitter, stmt: ir.Copy, vector: int, guard: str, at: str, register: str, elementwise: bool = False) -> None:
    """One access: where the guard holds, `vector` elements; elsewhere the fill value."""
    hint = f"_{stmt.eviction}" if stmt.eviction else ""
    if isinstance(stmt.src, ir.Buffer):
        e.line(f"if ({guard}) store_global{hint}<{vector}>(first, {at}, {stmt.src.name}, {register}, {e.site(stmt)});")
        return
    word = f"load_global_as_float{'_each' * elementwise}" if stmt.src.tensor.dtype == "any" else f"load_global{hint}"
    e.line(f"if ({guard}) {word}<{vector}>({stmt.dst.name}, {register}, first, {at}, {e.site(stmt)});")
    e.line(f"else fill<{vector}>({stmt.dst.name}, {register}, {e.number(stmt.fill)});")


def _reduce(e: Emitter, stmt: ir.Reduce) -> None:
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
            if any(isinstance(loop, ir.Serial) and stmt in ir.walk(loop.body) for loop in ir.walk(e.kernel.body)):
                e.line(f"sync_threads({e.site(stmt)});  // the last iteration's values have been read")
            member, leader = ("member", "true") if t.lanes_on_rows else ("member / 32", "member % 32 == 0")
            buffer = f"shared<float>({e.kernel.shared[stmt]})"
            arguments = f"{dst}, {buffer}, {t.slots}, slot, {member}, {leader}, {e.site(stmt)}"
            e.line(f"reduce_members<{op}, {t.warps_per_row}>({arguments});")
        if not stmt.clear:
            with e.loop("r", t.passes):
                e.line(f"{dst}[r] = {op}::combine(before[r], {dst}[r]);")


def printed(e: Emitter, stmt: ir.Print, first: int | None = None) -> None:
    """By the first thread that has the value; of groups from `first` on that have a part each, in the one of that part."""
    value, owner, register = stmt.value, 0, None
    threads = {0}
    if isinstance(value, ir.Load):
        layout, (row, *column) = e.kernel.layouts[value.buffer], (i.value for i in value.indices)
        places = [divmod(place, extent) for place, extent in zip((row, *column), layout.shape, strict=True)]
        owner = sum(part for part, _ in places)
        threads, register = layout.place(tuple(place for _, place in places))
    guard = f"thread == {min(threads)}" + (f" && group == {first + owner}" if first is not None else "")
    wide = ir.Cast("float32", value) if value.dtype in ("bfloat16", "float16") else value
    text = e.number(wide) if register is None else statement(wide, lambda tile: register)
    e.line(f'if ({guard}) print("{stmt.location}: {value}", {text}, {e.site(stmt)});')


def _parallel(e: Emitter, stmt: ir.Parallel) -> None:
    """Each thread runs over its own registers: pass r, and register q of the row."""
    t, table, v = e.tile, e.kernel.layouts, e.tile.column_vector
    whole = f"q * {t.passes} + r" if t.lanes_on_rows else f"r * {t.row_registers} + q"
    names = {VectorisedRows: whole, PerRow: "r", PerColumn: "q"}
    loops = ["r", "q"] if len(stmt.vars) == 2 else ["r"] if isinstance(table[stmt.body[0].buffer], PerRow) else ["q"]
    tile_index = {"r": _row(t), "q": f"(q / {v} * {t.threads_per_row} + member) * {v} + q % {v}"}
    numbers = {x for store in stmt.body for x in ir.as_numbers(store.value)}

    def register(buffer):
        return names[type(table[buffer])]

    with ExitStack() as nest:
        for loop in loops:
            nest.enter_context(e.loop(loop, t.passes if loop == "r" else t.row_registers))
        for var, loop in zip(stmt.vars, loops, strict=True):
            if var in numbers:
                e.line(f"const int {var.name} = {tile_index[loop]};")
        for store in stmt.body:
            value = statement(ir.replaced(store.value, e.declared), register)
            e.line(f"{store.buffer.name}[{register(store.buffer)}] = {value};")


def _row(t: VectorisedRows) -> str:
    """The tile's row of this thread in pass r."""
    return f"slot * {t.vector} + r" if t.lanes_on_rows else f"r * {t.slots} + slot"


def serial(e: Emitter, stmt: ir.Serial) -> None:
    with e.loop(stmt.var, e.number(stmt.extent), unrolled=False):
        e.body(e, stmt.body)


def _if(e: Emitter, stmt: ir.If) -> None:
    with e.block(f"if ({e.number(stmt.condition)})"):
        _body(e, stmt.body)


_EMIT = {ir.Alloc: _alloc, ir.Fill: fill, ir.Copy: _copy, ir.Reduce: _reduce, ir.Parallel: _parallel, ir.Serial: serial}
_EMIT |= {ir.If: _if, ir.Print: printed}
