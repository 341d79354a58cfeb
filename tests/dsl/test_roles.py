"""The passes of kernels with roles: the IR that they leave, and verifiers that notice what a wrong pass would do."""

import functools
import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tileops_dsl.language as T
from tileops_dsl import emulate, ir, plan
from tileops_dsl.codegen import emit_roles, param_fields, params_header
from tileops_dsl.codegen.arithmetic import arithmetic, ceil_divided
from tileops_dsl.errors import TileError
from tileops_dsl.kernels.gemm import gemm
from tileops_dsl.kernels.gemm_config import GemmConfig
from tileops_dsl.layouts import Linear
from tileops_dsl.passes import run_passes
from tileops_dsl.passes.meaning import ways
from tileops_dsl.passes.simulate import Fault, simulate
from tileops_dsl.schedule import Advance, Await, Fence, Meet, Retire, Signal, Sync, Unrolled
from tileops_dsl.targets import TARGETS

verify = importlib.import_module("tileops_dsl.passes.verify")  # the package has a function of that name
TARGET = TARGETS["sm_90a"]
ROW = GemmConfig("gemm", "sm_90a", "bfloat16", "bfloat16", (128, 256, 64), 4, 2, 8, 64)  # that of tests/golden/gemm.cu
m, n, k = T.dynamic("m, n, k", "int32")


@T.prim_func
def plain(
    a: T.Tensor((m, k), "float16", vector=8), b: T.Tensor((k, n), "float16", vector=8), c: T.Tensor((m, n), "float16", vector=8)
):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "float16")
        b_tile = T.alloc_shared((64, 128), "float16")
        c_tile = T.alloc_shared((128, 128), "float16")
        acc = T.alloc_fragment((128, 128), "float32")
        out = T.alloc_fragment((128, 128), "float16")
        for row, column in T.Persistent((T.ceildiv(m, 128), T.ceildiv(n, 128))):
            for i in T.Pipelined(T.ceildiv(k, 64), num_stages=3):
                T.copy(a[row * 128, i * 64], a_tile)
                T.copy(b[i * 64, column * 128], b_tile)
                T.gemm(a_tile, b_tile, acc, clear_accum=i == 0)
            for r, j in T.Parallel(128, 128):
                out[r, j] = acc[r, j]
            T.copy(out, c_tile)
            T.copy(c_tile, c[row * 128, column * 128])


LINE = plain.location.line
TILES = "add(floordiv(sub(m, 1), 128), 1),add(floordiv(sub(n, 1), 128), 1)"
FINISHED = f"""\
kernel plain threads 256 min blocks 1 grid wave
  tensor a: float16[m, k] vector 8
  tensor b: float16[k, n] vector 8
  tensor c: float16[m, n] vector 8
  scalar m: int32
  scalar n: int32
  scalar k: int32
  layout a_tile: shared 128 x 64, swizzle of 128 bytes
  layout b_tile: shared 64 x 128, swizzle of 128 bytes
  layout c_tile: shared 64 x 128, swizzle of 128 bytes
  layout acc: wgmma accumulator 64 x 128
  layout out: wgmma accumulator 64 x 128
  shared 0: a_tile
  shared 49152: b_tile
  shared 98304: c_tile
  shared bytes 131120
  ring 0: a_tile, b_tile x 3, along i
  barrier 131072: full x 3, arrivals 1, bytes 32768
  barrier 131096: empty x 3, arrivals 8, bytes 0
  role producer: groups 0, warp 0, 40 registers
    persistent vars=row,column extents={TILES} group_size=1  // test_roles.py:{LINE + 6}
      pipelined var=i extent=add(floordiv(sub(k, 1), 64), 1) num_stages=3 pending=0  // test_roles.py:{LINE + 7}
        await barrier=empty index=i  // test_roles.py:{LINE + 8}
        signal barrier=full which=this  // test_roles.py:{LINE + 8}
        issue op=(copy src=a[mul(row, 128), mul(i, 64)] dst=a_tile) index=i  // test_roles.py:{LINE + 8}
        issue op=(copy src=b[mul(i, 64), mul(column, 128)] dst=b_tile) index=i  // test_roles.py:{LINE + 9}
        advance ring=ring 0  // test_roles.py:{LINE + 7}
  role consumer: groups 1, 2, 232 registers
    persistent vars=row,column extents={TILES} group_size=1  // test_roles.py:{LINE + 6}
      pipelined var=i extent=add(floordiv(sub(k, 1), 64), 1) num_stages=3 pending=0  // test_roles.py:{LINE + 7}
        await barrier=full index=i  // test_roles.py:{LINE + 10}
        issue op=(gemm a=a_tile b=b_tile c=acc policy=full_row clear=eq(i, 0)) index=i  // test_roles.py:{LINE + 10}
        retire product pending 0  // test_roles.py:{LINE + 10}
        signal barrier=empty which=this  // test_roles.py:{LINE + 10}
        advance ring=ring 0  // test_roles.py:{LINE + 10}
      one  // test_roles.py:{LINE + 11}
        retire read pending 0  // test_roles.py:{LINE + 11}
      sync  // test_roles.py:{LINE + 11}
      chunks columns=16  // test_roles.py:{LINE + 11}
        parallel vars=r,j extents=128,128  // test_roles.py:{LINE + 11}
          out[r, j] = float16(acc[r, j])  // test_roles.py:{LINE + 12}
        copy src=out dst=c_tile  // test_roles.py:{LINE + 13}
      fence  // test_roles.py:{LINE + 14}
      sync  // test_roles.py:{LINE + 14}
      one  // test_roles.py:{LINE + 14}
        issue op=(copy src=c_tile dst=c[mul(row, 128), mul(column, 128)]) index=0  // test_roles.py:{LINE + 14}
    one  // test_roles.py:{LINE + 14}
      retire store pending 0  // test_roles.py:{LINE + 14}
"""


def test_text_after_all_passes():
    """No cluster, so every warp hands back; no product left unfinished, so this stage; one stage of c."""
    dumped = {}
    run_passes(plain, TARGET, dumped.__setitem__)
    assert dumped["barriers"] == FINISHED
    steps = ["record", "roles", "pipeline", "infer_layouts", "plan_shared_memory", "budgets", "barriers"]
    assert list(dumped) == steps


# ---- corrupted kernels


@functools.cache
def finished() -> ir.Kernel:
    return run_passes(gemm(ROW), TARGET)


def buffer(name: str) -> ir.Buffer:
    return next(b for b in finished().layouts if b.name == name)


def edited(kernel: ir.Kernel, change) -> ir.Kernel:
    """With change(statement) in place of each statement of a role, or without those for which it is None."""

    def body(stmts):
        for stmt in stmts:
            new = change(stmt)
            if new is not None:
                yield replace(new, body=tuple(body(new.body))) if hasattr(new, "body") and new is stmt else new

    return replace(kernel, roles=tuple(replace(role, body=tuple(body(role.body))) for role in kernel.roles))


def without(kernel: ir.Kernel, target: ir.Stmt) -> ir.Kernel:
    return edited(kernel, lambda stmt: None if stmt is target else stmt)


def first(kernel: ir.Kernel, kind: type, role: int = 1) -> ir.Stmt:
    return next(s for s in ir.walk(kernel.roles[role].body) if isinstance(s, kind))


def one_iteration_less(kernel: ir.Kernel) -> ir.Kernel:
    return edited(kernel, lambda s: replace(s, extent=3) if isinstance(s, Unrolled) and s.extent == 4 else s)


def with_layout(kernel: ir.Kernel, name: str, layout) -> ir.Kernel:
    return replace(kernel, layouts={**kernel.layouts, buffer(name): layout})


def moved(kernel: ir.Kernel, name: str, offset: int) -> ir.Kernel:
    return replace(kernel, shared={**kernel.shared, buffer(name): offset})


def with_registers(kernel: ir.Kernel, count: int) -> ir.Kernel:
    return replace(kernel, roles=(kernel.roles[0], replace(kernel.roles[1], registers=count)))


CORRUPTED = {
    "no product": ("roles", lambda k: without(k, first(k, ir.Pipelined)), "a statement is in no role or in two"),
    "a loop too short": ("schedule", one_iteration_less, "the roles do not do what the program does, for 0 steps"),
    "an element of another shape": (
        "layouts",
        lambda k: with_layout(k, "out", k.layouts[buffer("acc")]),
        r"out is \[64, 64\] and its layout \[64, 256\]: wgmma accumulator 64 x 256",
    ),
    "threads that do not divide": (
        "layouts",
        lambda k: with_layout(k, "bias_part", Linear(256, 100)),
        "the layout of bias_part has 100 threads of 128",
    ),
    "a tile beside its swizzle": ("shared_memory", lambda k: moved(k, "c_tile", 196608 + 512), "c_tile starts at byte 197120"),
    "two tiles in one place": ("shared_memory", lambda k: moved(k, "b_tile", 0), "shared memory of 231520 bytes of 232448"),
    "no wait": ("barriers", lambda k: without(k, first(k, Await)), "the barriers are wrong: gemm.py:47 reads a_tile too early"),
    "too few registers": ("budgets", lambda k: with_registers(k, 136), "registers of 39936 in all, 132 in fragments"),
}  # fmt: skip


def error_of_corrupted(name: str) -> TileError:
    check, corrupt, message = CORRUPTED[name]
    with pytest.raises(TileError, match=message) as caught:
        verify.verify(corrupt(finished()), TARGET, (check,))
    return caught.value


@pytest.mark.parametrize("name", CORRUPTED)
def test_corrupted(name):
    error_of_corrupted(name)


# ---- the simulation

ORDERING = (Advance, Await, Fence, Meet, Retire, Signal, Sync)


def is_noticed(kernel: ir.Kernel) -> bool:
    """Whether an order shows the fault."""
    for way in (w for w in ways(kernel) if w["activation"] == 0):
        for seed in range(12):
            try:
                simulate(kernel, way, seed)
            except Fault:
                return True
    return False


@functools.cache
def odd() -> ir.Kernel:
    """One group; three parts of c go round two stages."""
    return run_passes(gemm(replace(ROW, tile=(64, 96, 64), cluster=1, store_columns=32)), TARGET)


@functools.cache
def alternating() -> ir.Kernel:
    """Each group has a tile of its own; three parts of c go round two stages."""
    return run_passes(gemm(replace(ROW, tile=(128, 96, 64), store_columns=32, alternate=True)), TARGET)


@pytest.mark.parametrize("kernel", [finished, odd, alternating])
@pytest.mark.parametrize("role", [0, 1])
def test_nothing_that_orders_is_too_much(kernel, role):
    """Without any one of them, some order fails."""
    kernel = kernel()
    unnoticed = [
        f"{stmt.location} {stmt}"
        for stmt in ir.walk(kernel.roles[role].body)
        if isinstance(stmt, ORDERING) and not is_noticed(without(kernel, stmt))
    ]
    assert unnoticed == []


def test_turns_are_needed():
    """Without all of them a group takes the end of the other's round for that of its own."""
    assert is_noticed(edited(alternating(), lambda s: None if isinstance(s, Meet) else s))


@pytest.mark.parametrize("name, change", [
    ("full", {"bytes": 32768}), ("full", {"bytes": 49152 + 16384}), ("full", {"arrivals": 2}), ("empty", {"arrivals": 3}),
    ("empty", {"arrivals": 5}), ("residual_full", {"bytes": 4096}),
])  # fmt: skip
def test_wrong_counts_are_noticed(name, change):
    kernel = finished()
    barriers = tuple(replace(b, **change) if b.name == name else b for b in kernel.barriers)
    assert is_noticed(replace(kernel, barriers=barriers))


def test_a_stage_less_is_noticed():
    """A producer that goes round fewer stages than the consumers."""
    kernel = finished()
    assert is_noticed(
        edited(kernel, lambda s: replace(s, which="this") if isinstance(s, Signal) and s.which == "before" else s)
    )


def test_ways():
    assert ways(finished()) == [
        {"bias_dtype": bias, "activation": activation, "has_residual": residual}
        for bias in (0, 1)
        for activation in range(5)
        for residual in (0, 1)
    ]


def test_questions():
    kernel = finished()
    assert [plan.copies(kernel, buffer(name)) for name in ("a_tile", "b_tile", "c_tile", "bias_row")] == [1, 1, 2, 2]
    assert [plan.registers(kernel, buffer(name)) for name in ("acc", "bias_part", "out")] == [128, 2, 8]


# ---- texts of other programs


def write(path: Path, kernel: ir.Kernel) -> None:
    kernel = run_passes(kernel, TARGET)
    code, _ = emit_roles(kernel, "kernel", "kernel_params")
    includes = '#include <tileops/sm_90a.h>\n\n#include "kernel_params.h"\n\n'
    path.write_text(f"{includes}namespace tileops {{\n\n{code}\n}}  // namespace tileops\n")
    (path.parent / "kernel_params.h").write_text(params_header("kernel_params", param_fields(kernel)))


@pytest.mark.parametrize("shape", [(128, 128, 64), (200, 264, 328)])
def test_a_product_without_a_cluster(tmp_path, shape):
    """B [K, N] in two boxes, with unit stride in N; every warp hands back the present stage; c in one stage of two boxes."""
    path = tmp_path / "plain.cu"
    write(path, plain)
    (rows, columns, depth), rng = shape, np.random.default_rng(0)
    a, b = rng.standard_normal((rows, depth)).astype(np.float16), rng.standard_normal((depth, columns)).astype(np.float16)
    c, kernel = np.zeros((rows, columns), np.float16), run_passes(plain, TARGET)
    maps = {tensor.name: box for tensor, (_, box) in plan.tma_tensors(kernel).items()}
    values = [emulate.TensorMap(x, maps[name], 128, writable=x is c) for name, x in (("a", a), ("b", b), ("c", c))]
    for seed in range(3):
        emulate.launch_kernel(path, "kernel", [*values, *map(emulate.I32, shape)], 2, 384, kernel.shared_bytes, seed=seed)
        exact = a.astype(np.float64) @ b.astype(np.float64)
        assert np.max(np.abs(c - exact) - np.abs(exact) * 2**-10) < 1e-3


@T.prim_func
def with_bias(
    a: T.Tensor((m, k), "float16", vector=8),
    b: T.Tensor((n, k), "float16", vector=8),
    c: T.Tensor((m, n), "float16", vector=8),
    bias: T.Tensor((n,), "any"),
    mode: T.Scalar("int32", below=2),
):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "float16")
        b_tile = T.alloc_shared((128, 64), "float16")
        c_tile = T.alloc_shared((128, 128), "float16")
        bias_row = T.alloc_shared((128,), "float32")
        part = T.alloc_fragment((128,), "float32")
        acc = T.alloc_fragment((128, 128), "float32")
        out = T.alloc_fragment((128, 128), "float16")
        for row, column in T.Persistent((T.ceildiv(m, 128), T.ceildiv(n, 128))):
            T.copy(bias[column * 128], part, fill=0.0, absent=2.0)
            T.copy(part, bias_row)
            for i in T.Pipelined(T.ceildiv(k, 64), num_stages=2):
                T.copy(a[row * 128, i * 64], a_tile)
                T.copy(b[column * 128, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True, clear_accum=i == 0)
            with T.If(mode == 0):
                for r, j in T.Parallel(128, 128):
                    acc[r, j] = T.relu(acc[r, j])
            with T.If(mode == 1):
                for r, j in T.Parallel(128, 128):
                    acc[r, j] = acc[r, j] * 2.0
            for r, j in T.Parallel(128, 128):
                out[r, j] = acc[r, j] + bias_row[j]
            T.copy(out, c_tile)
            T.copy(c_tile, c[row * 128, column * 128])


@pytest.mark.parametrize("given, mode", [(False, 0), (True, 1)])
def test_what_is_read_for_a_missing_vector(tmp_path, given, mode):
    """A vector in shared memory is read a chunk at a time; two barriers keep its writer and its readers apart."""
    path = tmp_path / "with_bias.cu"
    write(path, with_bias)
    assert "else fill<1>(part, x, 2.0f);" in path.read_text() and path.read_text().count("p.mode") == 1
    shape, rng = (264, 264, 128), np.random.default_rng(0)
    a, b = (rng.standard_normal((size, 128)).astype(np.float16) for size in (264, 264))
    c, bias = np.zeros((264, 264), np.float16), rng.standard_normal(264).astype(np.float32)
    values = [emulate.TensorMap(x, (64, 64 if x is c else 128), 128, writable=x is c) for x in (a, b, c)]
    values += [emulate.In(bias) if given else None, *map(emulate.I32, (*shape, 3 if given else 0, mode))]
    shared_bytes = run_passes(with_bias, TARGET).shared_bytes
    product = a.astype(np.float64) @ b.astype(np.float64).T
    exact = (product * 2 if mode else np.maximum(product, 0)) + (bias if given else 2.0)
    for seed in range(3):
        emulate.launch_kernel(path, "kernel", values, 2, 384, shared_bytes, seed=seed)
        assert np.max(np.abs(c - exact) - np.abs(exact) * 2**-10) < 2e-3


# ---- index arithmetic


@pytest.mark.parametrize("value, expected", [
    (m + n * 2, "p.m + p.n * 2"),
    ((m + n) * 2, "(p.m + p.n) * 2"),
    (m - (n - k), "p.m - (p.n - p.k)"),
    (m + (n + k), "p.m + p.n + p.k"),
    (m // (n // k), "p.m / (p.n / p.k)"),
    (m * (n // k), "p.m * (p.n / p.k)"),
    (m * 2 // k, "p.m * 2 / p.k"),
    (m + 1 < n * 2, "p.m + 1 < p.n * 2"),
])  # fmt: skip
def test_parentheses(value, expected):
    assert arithmetic(plain, value.expr) == expected


@pytest.mark.parametrize("value, expected", [
    (T.ceildiv(m, 128), "(p.m - 1) / 256 + 1"),
    (m, "(p.m - 1) / 2 + 1"),
])  # fmt: skip
def test_extents_of_a_cluster(value, expected):
    assert arithmetic(plain, ceil_divided(value.expr, 2)) == expected
