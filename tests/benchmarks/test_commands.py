"""The commands from end to end on the CPU: a stand-in for the captured graph, no time asserted."""

import contextlib
import json
import types
from dataclasses import asdict

import pytest
import torch

from benchmarks import bench, contestants, host, results, startup, sweep, timing, tune_worker
from benchmarks.workloads import GemmWorkload, Workload
from tileops import knobs

WORKLOAD = Workload("rms_norm", "a small one", (6, 64), "bfloat16", -1, "same", "here")
ODD = Workload("softmax", "an odd one", (6, 33), "bfloat16", -1, "none", "here")

PRODUCT = GemmWorkload("gemm", "a product", (4, 8, 16), "bfloat16", "here", epilogue="bias+silu")


class PlainReplay(timing.GraphReplay):
    """Calls instead of a captured graph; a replay takes as long as the function's name says."""

    def __init__(self, fn, sets, calls):
        self.fn, self.sets, self.calls = fn, sets, calls
        self.outputs = [fn(*sets[call % len(sets)]) for call in range(calls)]

    def run_poisoned(self):
        for output in self.outputs:
            output.fill_(float("nan"))
        for call, output in enumerate(self.outputs):
            output.copy_(self.fn(*self.sets[call % len(self.sets)]))

    def enqueue(self):
        return None

    def microseconds(self, pending):
        return 2.0


@pytest.fixture
def cpu(monkeypatch):
    """Everything that would touch a GPU, replaced."""
    monkeypatch.setattr(timing, "DEVICE", "cpu")
    monkeypatch.setattr(timing, "GraphReplay", PlainReplay)
    monkeypatch.setattr(timing, "l2_bytes", lambda: 1000)
    monkeypatch.setattr(timing, "REPLAY_BYTES", 4000)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    copying = types.ModuleType("benchmarks.copy_kernel")
    copying.copy = torch.clone
    monkeypatch.setitem(__import__("sys").modules, "benchmarks.copy_kernel", copying)
    eager = contestants._eager
    monkeypatch.setattr(contestants, "_inductor", eager)
    monkeypatch.setattr(
        bench,
        "ours",
        lambda workload, force="": contestants.Contestant(
            force or "tileops", contestants._tileops(workload), force_knob(force)
        ),
    )


def force_knob(force):
    return (("force", force),) if force else ()


def test_bench_writes_the_row_of_the_results_format(cpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.workloads, "load", lambda op, match: [WORKLOAD, ODD])
    out = tmp_path / "h200.jsonl"
    assert bench.main(["--out", str(out), "--force", "portable", "--force", "eager", "--rounds", "3"]) == 0
    rows = results.read(out)
    assert [row["workload"] for row in rows] == ["6x64 bf16", "6x33 bf16"]
    row = rows[0]
    assert list(row)[:9] == ["op", "workload", "label", "target", "variant", "us", "tflops", "gbps", "ceiling_pct"]
    assert {"peers_us", "ratios", "error", "date", "commit", "gpu"} <= set(row)
    assert row["us"] == 2.0 and row["ceiling_pct"] == 100.0
    assert row["gbps"] == round(WORKLOAD.bytes / 2.0 * 1e-3, 1)
    assert row["peers_us"] == {"eager": 2.0, "inductor": 2.0} and row["ratios"] == {"eager": 1.0, "inductor": 1.0}
    assert 0 < row["error"] < 0.01
    assert row["forced_us"] == {"eager": 2.0}
    said = capsys.readouterr().out
    assert "note: 6x64 bf16: portable refused: rms_norm: TILEOPS_FORCE=portable " in said
    assert "2 of 2 workloads measured on NVIDIA H200" in said


def test_a_wrong_or_broken_baseline_is_an_error_and_gives_no_row(cpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.workloads, "load", lambda op, match: [WORKLOAD])
    out = tmp_path / "h200.jsonl"

    def broken(workload):
        def fn(x, weight):
            raise RuntimeError("no compiler")

        return fn

    monkeypatch.setattr(contestants, "_inductor", broken)
    assert bench.main(["--out", str(out)]) == 1
    assert "baseline inductor does not run: no compiler" in capsys.readouterr().err
    monkeypatch.setattr(
        contestants, "_inductor", lambda workload: lambda x, weight: 2 * contestants._eager(workload)(x, weight)
    )
    assert bench.main(["--out", str(out)]) == 1
    assert "inductor is wrong by" in capsys.readouterr().err
    assert not out.exists()


def test_require_native_makes_a_fallback_an_error():
    x, weight = contestants.make_sets(WORKLOAD, 1, "cpu")[0]
    contestant = contestants.ours(WORKLOAD)
    with contestant.scope(), pytest.raises(RuntimeError, match="TILEOPS_REQUIRE_NATIVE"):
        contestant.fn(x, weight)


def test_the_target_is_read_from_the_variants_name():
    assert bench.target_of("rms_norm_sm_90a_bf16_bf16_v8_t128", "rms_norm") == "sm_90a"
    assert bench.target_of("rms_norm_silu_portable_f32_f32_v4", "rms_norm_silu") == "portable"
    assert bench.target_of("", "softmax") == "unknown"


@pytest.mark.parametrize("command", [bench, sweep])
def test_without_a_gpu_a_command_says_so(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sweep, "read_manifest", dict)
    with pytest.raises(SystemExit, match="torch sees no GPU"):
        command.main(["softmax"])


def kernel(**changes):
    return {"op": "rms_norm", "target": "sm_90a", "x": "bf16", "y": "bf16", "max_cols": 64} | changes


def test_a_kernel_is_eligible_by_operator_target_dtypes_and_row_length():
    kernels = {
        "fits": kernel(),
        "long names": kernel(x="bfloat16", y="bfloat16"),
        "any length": kernel(max_cols=0),
        "portable": kernel(target="portable"),
        "too short": kernel(max_cols=63),
        "other op": kernel(op="softmax"),
        "other dtype": kernel(x="f16", y="f16"),
        "other result": kernel(y="f32"),
    }
    assert sweep.eligible(kernels, WORKLOAD) == ["fits", "long names", "any length", "portable"]
    assert sweep.eligible(kernels, WORKLOAD, "portable") == ["portable"]


def test_sweep_reports_every_variant_and_those_that_refuse(cpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep.workloads, "load", lambda op, match: [WORKLOAD])
    monkeypatch.setattr(sweep, "read_manifest", lambda: {"eager": kernel(), "no_such_variant": kernel()})
    monkeypatch.setattr(sweep, "knobs", types.SimpleNamespace(scope=lambda force, require_native: knobs.scope(force=force)))
    out = tmp_path / "sweep.json"
    assert sweep.main(["rms_norm", "--out", str(out)]) == 0
    (found,) = json.loads(out.read_text())["workloads"]
    timed = [v for v in found["variants"] if "refused" not in v]
    assert [v["variant"] for v in timed] == [sweep.AUTOMATIC, "eager"]
    assert all(v["of_best"] == 1.0 and v["ceiling_pct"] == 100.0 and v["error"] < 0.01 for v in timed)
    refusals = {v["variant"]: v["refused"] for v in found["variants"] if "refused" in v}
    assert list(refusals) == ["no_such_variant"] and "TILEOPS_FORCE=no_such_variant" in refusals["no_such_variant"]
    assert "no_such_variant: refused:" in capsys.readouterr().out


def test_a_sweep_marks_a_wrong_variant_and_ends_with_an_error(cpu, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.workloads, "load", lambda op, match: [WORKLOAD])
    monkeypatch.setattr(sweep, "read_manifest", lambda: {"eager": kernel()})
    monkeypatch.setattr(sweep, "into", lambda workload: lambda x, weight, out: out.copy_(x))
    assert sweep.main(["rms_norm", "--out", str(tmp_path / "sweep.json")]) == 1


def test_a_sweep_without_a_build_says_what_to_run(tmp_path):
    with pytest.raises(SystemExit, match=r"python -m tileops_dsl\.generate"):
        sweep.read_manifest(tmp_path / "manifest.json")


def test_host_cost_runs_on_the_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host, "CALLS", 2)
    out = tmp_path / "cpu.jsonl"
    host.main(["--rounds", "1", "--out", str(out)])
    rows = results.read(out)
    assert [row["workload"] for row in rows] == [f"one call of {op}" for op in ("softmax", "rms_norm", "rms_norm_silu", "gemm")]
    assert all(list(row["peers_us"]) == ["raw operator", "eager"] and row["us"] > 0 for row in rows)


def test_startup_takes_the_median_over_processes_and_leaves_out_the_first(monkeypatch):
    answers = iter([{"us": 1e9}, {"us": 3.0}, {"us": 1.0}, {"us": 2.0}])
    monkeypatch.setattr(startup, "run", lambda program: next(answers))
    assert startup.medians("", 3) == {"us": 2.0}


def test_the_measured_import_runs_in_a_process_of_its_own():
    assert startup.run(startup.IMPORT)["us"] > 0
    with pytest.raises(SystemExit, match=r"(?s)the measured process failed: .*no_such_module"):
        startup.run("import no_such_module")


def test_bench_shows_the_arithmetic_speed_of_a_product(cpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.workloads, "load", lambda op, match: [PRODUCT])
    assert bench.main(["gemm", "--out", str(tmp_path / "h200.jsonl"), "--rounds", "3"]) == 0
    (row,) = results.read(tmp_path / "h200.jsonl")
    assert (row["workload"], row["tflops"]) == ("4x8x16 bf16 nt bias+silu", round(PRODUCT.flops / 2.0 * 1e-6, 3))
    said = capsys.readouterr().out
    assert "TFLOP/s" in said and "% of copy" not in said


def test_the_tuners_process_says_what_it_begins_and_times_what_is_right(cpu, monkeypatch):
    real, events = tune_worker.worst_error, []
    monkeypatch.setattr(tune_worker, "worst_error", lambda *a: next(spoilt, None) or real(*a))
    monkeypatch.setattr(tune_worker.knobs, "scope", lambda **setting: contextlib.nullcontext())
    spoilt = iter([None, None, 0.5])  # of the baseline and two variants
    tune_worker.measure({"workload": asdict(PRODUCT), "variants": ["right", "wrong"], "rounds": 3}, events.append)
    assert [next(iter(event.values())) for event in events[:-1]] == ["", "", "right", "right", "wrong", "wrong", None]
    assert 0 < events[1]["error"] < 0.01 and events[3]["error"] == events[1]["error"]
    assert events[5]["failed"].startswith("BenchmarkError: gemm 4x8x16 bf16 nt bias+silu: wrong is wrong by 5.00e-01")
    assert events[-1] == {"times": {"right": {"us": 2.0, "baseline_us": 2.0, "ratio": 1.0}}}


def test_the_tuners_process_times_nothing_beside_a_wrong_baseline(cpu, monkeypatch):
    events = []
    monkeypatch.setattr(tune_worker, "worst_error", lambda *a: 0.5)
    tune_worker.measure({"workload": asdict(PRODUCT), "variants": ["right"], "rounds": 3}, events.append)
    assert [event.get("end", event.get("begin")) for event in events] == ["", ""] and "eager is wrong" in events[-1]["failed"]


def test_a_product_is_not_swept():
    with pytest.raises(SystemExit, match=r"gemm has a tuner; run python -m benchmarks\.tune gemm --gpu GPU"):
        sweep.main(["gemm"])
