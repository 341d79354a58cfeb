import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tileops import demo

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments):
    command = [sys.executable, "-m", "tileops.demo", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_the_demo_runs_on_a_cpu_and_prints_one_line_for_each_call():
    done = run("--quick")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("No GPU in use") and lines[1].startswith("operator")
    table = lines[2 : 2 + len(demo.CALLS)]
    assert [line.split()[0] for line in table] == [call.op for call in demo.CALLS]
    assert all(line.endswith("eager: x is on cpu") for line in table)
    assert {line.index("eager: x") for line in table} == {lines[1].index("path")}, "the columns are aligned"
    assert done.stderr.count(".") >= len(demo.CALLS), "progress goes to stderr"


def test_help_says_what_it_does():
    done = run("--help")
    assert done.returncode == 0 and "--quick" in done.stdout and "decoder layer" in done.stdout


def test_a_wrong_result_ends_the_demo_with_status_1(monkeypatch, capsys):
    monkeypatch.setattr(demo.tileops, "softmax", lambda x, dim=-1: torch.softmax(x, dim) * 1.1)
    monkeypatch.setattr(demo, "CALLS", [c for c in demo.CALLS if c.op == "softmax"][:1])
    assert demo.main(["--quick", "--cpu"]) == 1
    assert "WRONG: an error of" in capsys.readouterr().out


@pytest.mark.parametrize("dim", [-1, 1])
def test_the_error_is_relative_to_the_row_and_taken_over_all_chunks(dim, monkeypatch):
    monkeypatch.setattr(demo, "CHUNK_ELEMENTS", 20)
    x = torch.randn(3, 10, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float()
    exact = torch.softmax(x.double(), dim)
    assert demo.error("softmax", x, None, exact, dim) < 1e-14
    spoilt = exact.clone()
    spoilt[2, 9, 6] += 0.25 * exact.amax(dim)[2, 9 if dim == -1 else 6]
    assert demo.error("softmax", x, None, spoilt, dim) == pytest.approx(0.25)


def test_without_the_compiler_package_the_emulator_line_says_where_it_is(monkeypatch, capsys):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert demo.emulate()
    assert "comes with the source tree" in capsys.readouterr().out


def spec(tmp_path, monkeypatch, program):
    package = tmp_path / "tileops_dsl"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "emulate.py").write_text(program)
    found = type("Spec", (), {"submodule_search_locations": [str(package)]})
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(demo.shutil, "which", lambda name: "/usr/bin/g++")
    monkeypatch.chdir(tmp_path)


def test_the_emulator_runs_in_a_process_of_its_own(tmp_path, monkeypatch, capfd):
    spec(tmp_path, monkeypatch, "import sys; print('emulated', sys.argv[1])")
    assert demo.emulate()
    assert "emulated softmax" in capfd.readouterr().out


def test_a_fault_of_the_emulator_is_a_failure_but_slowness_is_not(tmp_path, monkeypatch, capfd):
    spec(tmp_path, monkeypatch, "import sys, time; time.sleep(60)")
    monkeypatch.setattr(demo, "EMULATOR_SECONDS", 0.5)
    assert demo.emulate()
    assert "was stopped; run it by itself: -m tileops_dsl.emulate softmax" in capfd.readouterr().out
    (tmp_path / "tileops_dsl" / "emulate.py").write_text("raise SystemExit('a race')")
    monkeypatch.setattr(demo, "EMULATOR_SECONDS", 60)
    assert not demo.emulate()
    assert "failed with status 1" in capfd.readouterr().out


def test_progress_is_dots_in_a_pipe_and_a_bar_on_a_terminal():
    pipe = io.StringIO()
    progress = demo.Progress(2, pipe)
    progress.step("a")
    progress.clear()
    progress.step("b")
    progress.close()
    assert pipe.getvalue() == "..\n"
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    progress = demo.Progress(2, terminal)
    progress.step("a")
    progress.step("b")
    assert "0/2 a" in terminal.getvalue() and "#" * 12 + "." * 12 + "] 1/2 b" in terminal.getvalue()
