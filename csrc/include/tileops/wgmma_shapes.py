"""python csrc/include/tileops/wgmma_shapes.py    writes wgmma_shapes.h beside it

One instruction for each N, in four forms; only the number of accumulator registers differs, which inline assembly must list.
"""

from pathlib import Path

HEAD = """\
// The wgmma instructions, one struct for each N. Written by wgmma_shapes.py; do not edit.
// d: N/2 accumulators from d[0] on. T: the dtypes of a and b as PTX spells them. accumulate 0 starts from zero.
#pragma once

#include <stdint.h>

#include "tileops/types.h"

namespace tileops {
namespace detail {

template <int N> struct Wgmma;
"""

TAIL = """
}  // namespace detail
}  // namespace tileops
"""


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%{i}" for i in range(first, first + count)) + "}"


def form(n: int, k: int, from_registers: bool) -> list[str]:
    """One member function. Operands: d, a, b, accumulate, dtypes; of 16 bits, the transposes of what is in shared memory."""
    d, bits = n // 2, 256 // k
    a, b = (registers(d, 4), d + 4) if from_registers else (f"%{d}", d + 1)
    majors = [] if bits == 8 else ["TransposeA", "TransposeB"][from_registers:]
    template = "".join(f", int {major}" for major in majors)
    name, a_type = (f"rs{bits}", "const uint32_t (&a)[4]") if from_registers else (f"ss{bits}", "uint64_t a")
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(d))
    inputs = [f'"r"(a[{i}])' for i in range(4)] if from_registers else ['"l"(a)']
    inputs += ['"l"(b)', '"r"(accumulate)', '"C"(T::kPtx)', *(f'"n"({major})' for major in majors)]
    immediates = ", ".join([f"%{b}", "p", "1", "1", *(f"%{b + 3 + i}" for i in range(len(majors)))])
    return [
        f"  template <typename T{template}>",
        f"  static TILEOPS_WORD void {name}(float* d, {a_type}, uint64_t b, int accumulate) {{",
        f'    asm volatile("{{\\n .reg .pred p;\\n setp.ne.b32 p, %{b + 1}, 0;\\n"',
        f'      " wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.%{b + 2} {registers(0, d)}, {a}, {immediates};\\n}}\\n"',
        f"      : {outputs}",
        f"      : {', '.join(inputs)});",
        "  }",
    ]


def shape(n: int) -> list[str]:
    forms = [form(n, k, from_registers) for k in (16, 32) for from_registers in (False, True)]
    return ["", f"template <> struct Wgmma<{n}> {{", *(line for lines in forms for line in lines), "};"]


def header() -> str:
    return HEAD + "\n".join(line for n in range(8, 257, 8) for line in shape(n)) + "\n" + TAIL


if __name__ == "__main__":
    Path(__file__).with_suffix(".h").write_text(header())
