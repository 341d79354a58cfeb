"""Building and launching: what is cached, and what a launch refuses."""

import struct

import numpy as np
import pytest

from tileops_dsl import emulate

TEXT = """
TILEOPS_KERNEL(copy, Params, 32, 1) {
  Fragment<float, 1> f;
  load_global<1>(f, 0, global<float>(p.x), block_index_x() * 32 + thread_index(), site(1));
  store_global<1>(global<float>(p.y), block_index_x() * 32 + thread_index(), f, 0, site(2));
}
"""


def test_build_is_keyed_by_content(tmp_path):
    source, header = tmp_path / "k.cu", tmp_path / "include" / "k_params.h"
    header.parent.mkdir()
    header.write_text("struct K { const void* x; };\n")
    source.write_text('#include <tileops/device.h>\n#include "k_params.h"\nTILEOPS_KERNEL(k, K, 32, 1) {}\n')
    first = emulate.build(source, [header.parent])
    assert first.exists() and emulate.build(source, [header.parent]) == first
    header.write_text("struct K { const void* x; int n; };\n")
    second = emulate.build(source, [header.parent])
    assert second != first
    header.write_text("struct K { const void* x; };\n")
    assert emulate.build(source, [header.parent]) == first


def test_text_outside_the_words_does_not_compile(run_kernel):
    text = "TILEOPS_KERNEL(k, Params, 32, 1) { Fragment<bf16, 2> f; f[0] = f[0] * f[1]; }"
    with pytest.raises(RuntimeError, match=r"kernels.cu: the host compiler refuses it\n(.*\n)*.*no match for .operator\*"):
        run_kernel(text, "k")


@pytest.mark.parametrize("change, message", [
    ({"threads": 64}, "copy: launched with 64 threads; the kernel is compiled for 1 to 32"),
    ({"threads": 0}, "copy: launched with 0 threads; the kernel is compiled for 1 to 32"),
    ({"grid": (0, 1)}, r"copy: grid \(0, 1, 1\); expected x from 1 to 2147483647, y and z from 1 to 65535"),
    ({"grid": (1, 65536)}, r"copy: grid \(1, 65536, 1\); expected"),
    ({"shared": 300000}, "copy: 300000 bytes of shared memory; expected 0 to 232448"),
    ({"step": (1,)}, "step has 1 values; expected 2"),
])  # fmt: skip
def test_refused_launch(run_kernel, change, message):
    x = np.ones(32, np.float32)
    with pytest.raises(ValueError, match=message):
        run_kernel(TEXT, "copy", x, np.zeros_like(x), **change)


def test_a_kernel_that_is_not_there(run_kernel):
    with pytest.raises(RuntimeError, match="the source defines no TILEOPS_KERNEL that exports missing"):
        run_kernel(TEXT, "missing")


def test_parameters_must_have_the_size_of_the_struct(run_kernel, tmp_path):
    run_kernel(TEXT, "copy", np.ones(32, np.float32), np.zeros(32, np.float32))
    so = emulate.build(tmp_path / "kernels.cu")
    with pytest.raises(ValueError, match="copy: the launch passes 8 bytes of parameters; the kernel's struct has 48"):
        emulate.run(so, "copy", bytes(8), (1, 1), 32, 0, [])


def test_pack_lays_out_as_c_does():
    params = [
        ["x", "const void*", 1],
        ["code", "int32_t", 1],
        ["strides", "int64_t", 2],
        ["n", "int64_t", 1],
        ["eps", "float", 1],
    ]
    packed = emulate.pack(params, {"x": None, "code": 7, "strides": (1, 2), "n": (3,), "eps": 0.5})
    assert packed == struct.pack("=qi4xqqqf4x", 0, 7, 1, 2, 3, 0.5)
    with pytest.raises(
        ValueError, match=r"values for \['code', 'eps', 'extra', 'n', 'strides'\] do not match the parameter struct"
    ):
        emulate.pack(params, {"x": None, "extra": 1})


def test_grid_of_a_row_kernel(tmp_path):
    source = tmp_path / "rows.cu"
    source.write_text("""#include <tileops/device.h>
    struct Rows { void* y; int64_t outer, inner; };
    TILEOPS_KERNEL(rows, Rows, 32, 1) {
      tileops::Fragment<float, 1> f;
      f[0] = 1.0f;
      const int64_t block = tileops::block_index_y() * 3 + tileops::block_index_x();
      if (tileops::thread_index() == 0) tileops::store_global<1>(tileops::global<float>(p.y), block, f, 0, tileops::site(1));
    }""")
    y = np.zeros(12, np.float32)
    params = [["y", "void*", 1], ["outer", "int64_t", 1], ["inner", "int64_t", 1]]
    entry = {"name": "rows", "threads": 32, "shared_bytes": 0, "rows_per_block": 4, "params": params}
    report = emulate.launch(entry, source, {"y": y, "outer": 4, "inner": 9})
    assert (y == 1).all() and report["buffers"]["y"]["rewritten"] == 0


def test_an_array_that_numpy_holds_read_only_stays_so(run_kernel):
    y = np.zeros(32, np.float32)
    y.flags.writeable = False
    with pytest.raises(emulate.EmulatorError, match="of y, which this launch only reads"):
        run_kernel(TEXT, "copy", np.ones(32, np.float32), y)


def test_a_buffer_may_be_input_and_output(run_kernel):
    x = np.arange(32, dtype=np.float32)
    report = run_kernel(TEXT, "copy", x, x)
    assert report["buffers"]["x"]["bytes_read"] == report["buffers"]["y"]["bytes_written"] == x.nbytes


def test_python_without_headers_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(emulate.sysconfig, "get_path", lambda name: "/nowhere")
    with pytest.raises(RuntimeError, match=r"the emulator's driver needs /nowhere/Python\.h; install it"):
        emulate._driver.__wrapped__()
