"""Writes csrc/include/tileops/wgmma_shapes.h: python -m tileops_dsl.targets.wgmma_shapes > csrc/include/tileops/wgmma_shapes.h

One instruction for each N, in four forms; only the number of accumulator registers differs, which inline assembly must list.
"""

HEAD = """\
// The wgmma instructions, one struct for each N. Written by `python -m tileops_dsl.targets.wgmma_shapes`; do not edit.
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


def form(n: int, name: str, k: int, from_registers: bool, transposes: bool) -> list[str]:
    """One member function. Operands: d, then a, b, accumulate, the two signs and the transposes (none of a in registers)."""
    d = n // 2
    a = registers(d, 4) if from_registers else f"%{d}"
    b = d + (4 if from_registers else 1)
    flags = [] if not transposes else [f"%{b + 3}"] if from_registers else [f"%{b + 3}", f"%{b + 4}"]
    types = b + 2
    parameters = "const uint32_t (&a)[4]" if from_registers else "uint64_t a"
    major = "" if not transposes else ", int TransposeB" if from_registers else ", int TransposeA, int TransposeB"
    a_operands = ", ".join(f'"r"(a[{i}])' for i in range(4)) if from_registers else '"l"(a)'
    transposed = "" if not transposes else ', "n"(TransposeB)' if from_registers else ', "n"(TransposeA), "n"(TransposeB)'
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(d))
    immediates = ", ".join([f"%{b}", "p", "1", "1", *flags])
    return [
        f"  template <typename T{major}>",
        f"  static TILEOPS_WORD void {name}(float* d, {parameters}, uint64_t b, int accumulate) {{",
        '    asm volatile("{\\n .reg .pred p;\\n setp.ne.b32 p, %' + str(b + 1) + ', 0;\\n"',
        f'      " wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.%{types} {registers(0, d)}, {a}, {immediates};\\n}}\\n"',
        f"      : {outputs}",
        f'      : {a_operands}, "l"(b), "r"(accumulate), "C"(T::kPtx){transposed});',
        "  }",
    ]


def shape(n: int) -> list[str]:
    lines = ["", f"template <> struct Wgmma<{n}> {{"]
    lines += form(n, "ss16", 16, from_registers=False, transposes=True)
    lines += form(n, "rs16", 16, from_registers=True, transposes=True)
    lines += form(n, "ss8", 32, from_registers=False, transposes=False)
    lines += form(n, "rs8", 32, from_registers=True, transposes=False)
    return [*lines, "};"]


def header() -> str:
    return HEAD + "\n".join(line for n in range(8, 257, 8) for line in shape(n)) + "\n" + TAIL


if __name__ == "__main__":
    print(header(), end="")
