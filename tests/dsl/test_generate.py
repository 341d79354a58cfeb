"""The command: what it writes, where, and what it compares."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tileops_dsl import generate
from tileops_dsl.kernels import LIBRARY, configs_of

ROOT = Path(__file__).parents[2]
OPS = ("softmax", "rms_norm", "rms_norm_silu")
ALWAYS = {"registry.cpp", "schemas.h", "manifest.json"}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_only_and_target(tmp_path):
    assert generate.main([f"--out={tmp_path}", "--only=rms_norm", "--target=portable"]) == 0
    sources = {f"rms_norm_portable_{dtype}.cu" for dtype in ("bf16", "f16", "f32")}
    assert names(tmp_path) == {"rms_norm_params.h", *sources, *ALWAYS}


def test_both_may_be_repeated(tmp_path):
    generate.main(
        [f"--out={tmp_path}", "--build=smoke", *(f"--only={op}" for op in OPS[:2]), "--target=portable", "--target=sm_90a"]
    )
    sources = {f"{op}_{target}_bf16.cu" for op in OPS[:2] for target in ("sm_90a", "portable")}
    assert names(tmp_path) == {*(f"{op}_params.h" for op in OPS[:2]), *sources, *ALWAYS}


@pytest.mark.parametrize("option", ["--only=conv", "--target=sm_80", "--build=some", "--verbose"])
def test_unknown_values_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        generate.main([option])
    assert option.split("=")[0] in capsys.readouterr().err


def test_smoke_has_one_kernel_that_serves_anything(smoke):
    kernels = list(smoke.manifest["kernels"].values())
    every = {(row.op, row.target, row.params) for op in LIBRARY for row in configs_of(op)}
    assert sorted((k["op"], k["target"]) for k in kernels) == sorted(key[:2] for key in every)
    assert {k["op"] for k in kernels} >= {*OPS, "gemm"}
    for kernel in kernels:
        if kernel["op"] == "gemm":
            assert (kernel["x"], kernel["y"], kernel["vector"]) == ("bfloat16", "bfloat16", 8)
            assert kernel["transpose_b"] and not kernel["transpose_a"]
            continue
        if kernel["op"] == "flash_attention":
            first = (kernel["target"] == "sm_90a", 64) if kernel["lengths"] else (False, 128)
            assert (kernel["x"], kernel["causal"], kernel["tile"][2]) == ("bfloat16", *first)
            continue
        if kernel["op"].startswith(("mla_", "attention_")):  # the pieces that mla_combine reads are float32
            assert (kernel["x"], kernel["y"]) == ("float32" if kernel["op"] == "mla_combine" else "bfloat16", "bfloat16")
            continue
        assert (kernel["x"], kernel["y"], kernel["vector"], kernel["max_cols"]) == ("bfloat16", "bfloat16", 1, 0)
        assert not kernel["lanes_on_rows"] and not kernel["shifted"]


def test_all_has_every_row(everything):
    rows = [row.name for op in LIBRARY for row in configs_of(op)]
    assert len(rows) == len(set(rows)) > 100
    assert list(everything.manifest["kernels"]) == rows


def test_dump(tmp_path):
    generate.main(
        [f"--out={tmp_path / 'out'}", "--build=smoke", "--target=sm_90a", "--only=softmax", f"--dump={tmp_path / 'ir'}"]
    )
    (kernel,) = (path.stem.split(".")[0] for path in (tmp_path / "ir").glob("*.record.txt"))
    steps = ["record", "infer_layouts", "plan_shared_memory"]
    assert names(tmp_path / "ir") == {f"{kernel}.{step}.txt" for step in steps}
    texts = [(tmp_path / "ir" / f"{kernel}.{step}.txt").read_text() for step in steps]
    assert all(text.startswith("kernel softmax threads ") for text in texts) and len(set(texts)) == 3


def test_dump_skips_a_pass_that_changes_nothing(tmp_path):
    """Rows within a warp need no shared memory."""
    generate.main([f"--out={tmp_path / 'out'}", "--target=sm_90a", "--only=softmax", f"--dump={tmp_path / 'ir'}"])
    row = next(
        row
        for row in configs_of("softmax")
        if row.target == "sm_90a" and 1 < row.threads_per_row <= 32 and row.vector > 1 and not row.lanes_on_rows
    )
    written = {path.name for path in (tmp_path / "ir").glob(f"{row.name}.*")}
    assert written == {f"{row.name}.record.txt", f"{row.name}.infer_layouts.txt"}


def test_files_that_do_not_change_keep_their_time_and_others_go(tmp_path):
    """Those that an earlier run wrote, that is; what somebody else put there stays."""
    generate.main([f"--out={tmp_path}", "--build=smoke"])
    assert {"gemm_sm_90a_params.h"} < {path.name for path in tmp_path.iterdir()}
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    (tmp_path / "softmax_sm_90a_bf16.cu").write_text("old")
    for name in ("mine.cpp", "notes.txt"):
        (tmp_path / name).write_text("old")
    generate.main([f"--out={tmp_path}", "--build=smoke", "--target=sm_90a", "--only=softmax"])
    sources = {name for name in names(tmp_path) if name.endswith((".cu", "_params.h", "nt.txt"))}
    assert sources == {"softmax_sm_90a_bf16.cu", "softmax_params.h"}
    assert (tmp_path / "mine.cpp").read_text() == "old"
    newer = {path.name for path in tmp_path.iterdir() if path.stat().st_mtime > 1}
    rewritten = {"softmax_sm_90a_bf16.cu", "registry.cpp", "schemas.h", "manifest.json"}
    assert newer == rewritten | {"mine.cpp", "notes.txt"}
    assert (tmp_path / "softmax_sm_90a_bf16.cu").read_text().startswith("// Generated by: python -m tileops_dsl.generate")


# ---- --diff


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A git repository of its own with what generation reads."""
    root = tmp_path_factory.mktemp("repository")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("tileops_dsl", "build_backend", "tileops", "configs"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], check=True, cwd=root)
    return root


def diff(root: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tileops_dsl.generate", "--diff=HEAD", "--build=smoke", *options]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=root, capture_output=True, text=True, env=inherited)


def edit(root: Path, file: str, before: str, after: str) -> str:
    """The file's text before the edit."""
    text = (root / file).read_text()
    assert before in text
    (root / file).write_text(text.replace(before, after))
    return text


def test_diff_of_nothing(repository):
    done = diff(repository)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (repository / "csrc").exists()


def test_diff_of_a_changed_kernel(repository):
    file = "tileops_dsl/kernels/softmax.py"
    text = edit(repository, file, "total[i] = 1.0 / total[i]", "total[i] = T.reciprocal(total[i])")
    try:
        done, others = diff(repository), diff(repository, "--only=rms_norm")
    finally:
        (repository / file).write_text(text)
    assert done.returncode == 1 and done.stderr == ""
    changed = [line for line in done.stdout.splitlines() if line[0] in "-+" and not line.startswith(("---", "+++"))]
    code = [line for line in changed if "softmax.py" not in line]
    assert sorted(set(code)) == ["+    total[r] = reciprocal(total[r]);", "-    total[r] = divide(1.0f, total[r]);"]
    assert (others.returncode, others.stdout) == (0, "")


def test_diff_of_a_revision_that_is_none(repository):
    command = [sys.executable, "-m", "tileops_dsl.generate", "--diff=nowhere"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("--diff nowhere: ") and "Traceback" not in done.stderr


def test_diff_of_the_files_themselves(repository):
    """A file more or less is a difference too."""
    text = edit(repository, "configs/rms_norm.json", '"target": "portable"', '"target": "sm_90a"')
    try:
        done = diff(repository, "--only=rms_norm")
    finally:
        (repository / "configs/rms_norm.json").write_text(text)
    assert done.returncode == 1 and "-TILEOPS_KERNEL(rms_norm_portable_bf16_bf16_v1" in done.stdout


def test_diff_of_an_unknown_revision(repository):
    done = subprocess.run(
        [sys.executable, "-m", "tileops_dsl.generate", "--diff=nowhere"], cwd=repository, capture_output=True, text=True
    )
    assert done.returncode != 0 and "nowhere" in done.stderr
