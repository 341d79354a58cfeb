"""A tile program on the CPU in one call, T.print, and the command: python -m tileops_dsl.emulate."""

from pathlib import Path

import launch
import numpy as np
import pytest
import wavefronts

from tileops_dsl import emulate, emulate_program, output
from tileops_dsl.emulate_problems import PROBLEMS
from tileops_dsl.emulate_rows import decode
from tileops_dsl.errors import TileError
from tileops_dsl.kernels import MODULES, PROGRAMS, configs_of

GEMM = Path(MODULES["gemm"].__file__)
ROW = next(row for row in configs_of("gemm") if row.name == "gemm_sm_90a_bf16_bf16_128x160x64_nt_alt")


@pytest.fixture
def changed(tmp_path):
    """The program of an operator, from a copy of its file in which texts are replaced."""

    def change(op, *pairs):
        file, text = tmp_path / f"{op}.py", Path(MODULES[op].__file__).read_text()
        for old, new in pairs:
            assert text.count(old) == 1
            text = text.replace(old, new)
        file.write_text(text)
        return emulate_program.load(file, op), file

    return change


CASES = [(op, target) for op in PROBLEMS for target in ("sm_90a", "portable")]


@pytest.mark.parametrize("op, target", [case for case in CASES if case != ("flash_attention", "portable")])
def test_the_command(op, target, capsys):
    """For each operator and target, a small ragged problem is right."""
    assert emulate_program.main([op, "--target", target]) == 0
    text = capsys.readouterr().out
    assert "right" in text and "WRONG" not in text and "bytes of shared memory used" in text


def test_the_command_tells_what_is_wrong(changed, capsys):
    _, file = changed("gemm", ("piece[r, j] + c_tile[r, j]", "piece[r, j] - c_tile[r, j]"))
    assert emulate_program.main(["gemm", "--program", str(file), "--kernel", "portable", "--target", "portable"]) == 1
    assert "WRONG" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        emulate_program.main(["gemm", "--kernel", "of_tomorrow"])
    assert "configs/gemm.json has no kernel for sm_90a with 'of_tomorrow' in its name" in capsys.readouterr().err


def test_a_changed_program_against_float64(changed):
    """From a changed line to a checked result: the residual is now subtracted twice."""
    program, _ = changed("gemm", ("piece[r, j] + c_tile[r, j]", "piece[r, j] - 2 * c_tile[r, j]"))
    tensors, scalars, (exact,) = PROBLEMS["gemm"](ROW, np.random.default_rng(1))
    (c,), report = emulate(program, *tensors, config=ROW, seed=1, **scalars)
    exact = exact - 3 * decode(tensors[3], "bfloat16")
    assert (np.abs(decode(c, "bfloat16") - exact) <= np.abs(exact) * 2**-8 + 4e-6 * np.abs(exact).max()).all()
    assert report["peak_shared_bytes"] <= output.compile_config(ROW).entry["shared_bytes"]
    assert {access["line"].split(":")[0] for access in report["shared_accesses"]} == {"gemm.py"}


def test_what_emulate_refuses():
    (a, b, bias, residual), scalars, _ = PROBLEMS["gemm"](ROW, np.random.default_rng(0))
    with pytest.raises(TypeError, match=r"^gemm takes a, b, bias, residual, activation=\.\., and config=\.\.$"):
        emulate(PROGRAMS["gemm"], a, b, config=ROW, **scalars)
    with pytest.raises(TypeError, match="gemm takes a, b"):
        emulate(PROGRAMS["gemm"], a, b, bias, residual, config=ROW)
    with pytest.raises(
        ValueError, match=r"^b has shape \(1, 264, 192\); expected b: bfloat16\[batch, n, k\] .* with {'batch': 1"
    ):
        emulate(PROGRAMS["gemm"], a, b[:, :, :192], bias, residual, config=ROW, **scalars)
    with pytest.raises(TypeError, match=r"^a is float32; expected uint16$"):
        emulate(PROGRAMS["gemm"], a.astype(np.float32), b, bias, residual, config=ROW, **scalars)
    with pytest.raises(TypeError, match=r"^bias is float64; expected uint16 or float16 or float32$"):
        emulate(PROGRAMS["gemm"], a, b, bias.astype(float), residual, config=ROW, **scalars)


# ---- T.print

LINES = "                with T.If(bias.given):\n"
PRINTS = "                T.print(row * 2)\n                T.print(acc[70, 3])\n                T.print(bias_part[130])\n"


@pytest.mark.parametrize("name, threads", [  # of acc[70, 3] and bias_part[130], in their CTA
    ("gemm_sm_90a_bf16_bf16_128x160x64_nt_alt", {(128 + 25, 128 + 2), (256 + 25, 256 + 2)}),
    ("gemm_sm_90a_bf16_bf16_128x192x64_nt", {(256 + 25, 128 + 2)}),
    ("gemm_portable_bf16_bf16_128x256x32_nt", {(153, 130)}),
])  # fmt: skip
def test_print_in_a_gemm(changed, capfd, name, threads):
    """Of each tile a line, from one thread: where in the program, what, and its value."""
    row = next(row for row in configs_of("gemm") if row.name == name)
    program, _ = changed("gemm", (LINES, PRINTS + LINES))
    tensors, scalars, _ = PROBLEMS["gemm"](row, np.random.default_rng(0))
    emulate(program, *tensors, config=row, multiprocessors=2, **scalars)
    a, b = (decode(t[0], "bfloat16") for t in tensors[:2])
    lines = [line.split(": ", 2) for line in capfd.readouterr().out.splitlines()]
    products = [(who, what) for who, _, what in lines if what.startswith("acc[70, 3] = ")]
    (bm, bn, _), values = row.tile, {float(what.split(" = ")[1]) for _, what in products}
    expected = (a @ b.T)[70::bm, 3::bn]
    assert all(min(abs(value - exact) for value in values) < 1e-3 for exact in expected.flatten())
    first = GEMM.read_text().split(LINES)[0].count("\n") + 1
    assert {where for _, where, _ in lines} == {f"gemm.py:{first + i}" for i in range(3)}
    assert {what for _, _, what in lines if what.startswith("mul(row, 2)")} >= {"mul(row, 2) = 0", "mul(row, 2) = 2"}
    biases = {who.split(" ")[-1] for who, _, what in lines if what.startswith("bias_part[130] = ")}
    found = {who.split(" ")[-1] for who, _ in products}
    assert found == {str(of_acc) for of_acc, _ in threads} and biases == {str(of_bias) for _, of_bias in threads}


@pytest.mark.parametrize("name, thread", [
    ("softmax_sm_90a_bf16_bf16_v8_t128_r32x2x1", 33), ("softmax_sm_90a_bf16_bf16_v1_t256_r8x12x1_rows", 33),
])  # fmt: skip
def test_print_in_a_row_kernel(changed, capfd, name, thread):
    row = next(row for row in configs_of("softmax") if row.name == name)
    copy = "            T.copy(x[batch, block * rows, 0], x_tile, fill=-T.infinity())\n"
    prints = "".join(f"            T.print({what})\n" for what in ("x_tile[1, 9]", "cols", "block * rows"))
    program, _ = changed("softmax", (copy, copy + prints))
    (x,), _, _ = PROBLEMS["softmax"](row, np.random.default_rng(0))
    emulate(program, x, config=row)
    value = np.float32(decode(x, "bfloat16")[0, 1, 9])
    lines = capfd.readouterr().out.splitlines()
    (element,) = (line for line in lines if line.endswith(f": x_tile[1, 9] = {value:.9g}"))
    assert element.startswith(f"block 0 0 0, thread {thread}: softmax.py:")
    assert sum(line.endswith(f": cols = {x.shape[2]}") for line in lines) == 2  # CTAs
    assert sorted(line.split(" = ")[1] for line in lines if "mul(block" in line) == ["0", str(row.tile[0])]


def test_a_library_has_no_print(changed):
    row = next(row for row in configs_of("softmax") if row.name == "softmax_sm_90a_bf16_bf16_v8_t128_r32x2x1")
    copy = "            T.copy(x[batch, block * rows, 0], x_tile, fill=-T.infinity())\n"
    program, _ = changed("softmax", (copy, copy + "            T.print(cols)\n"))
    kernel = output.compile_config(row, program=program)
    assert "print(" in kernel.text
    with pytest.raises(TileError) as error:
        output.files_of([kernel], ["sm_90a"])
    assert str(error.value) == f"the kernel {row.name} has a T.print\n    Instead: the program without it, for the library"


@pytest.mark.gpu
def test_a_gpu_prints_what_the_emulator_prints(changed, capfd):
    """Line by line, apart from the last digits of a sum; CTAs in any order."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of capability 9.0")
    row = next(row for row in configs_of("gemm") if row.name == "gemm_sm_90a_bf16_bf16_128x192x64_nt")
    program, _ = changed("gemm", (LINES, PRINTS + LINES))
    tensors, scalars, _ = PROBLEMS["gemm"](row, np.random.default_rng(0))
    kernel, held = emulate_program.bind(program, *tensors, config=row, **scalars), []
    params = launch.pack(*(wavefronts.on_gpu(value, held) for value in kernel.values))
    run = launch.load(kernel.source, row.name)
    run(params, kernel.grid, kernel.threads, kernel.shared_bytes, kernel.cluster)
    torch.cuda.synchronize()
    of_gpu = sorted(capfd.readouterr().out.splitlines())
    emulate(program, *tensors, config=row, **scalars)
    emulated = sorted(capfd.readouterr().out.splitlines())
    assert len(of_gpu) == len(emulated) > 0
    for found, expected in zip(of_gpu, emulated, strict=True):
        (what, value), (same, exact) = found.split(" = "), expected.split(" = ")
        assert what == same
        assert abs(float(value) - float(exact)) < 1e-3
