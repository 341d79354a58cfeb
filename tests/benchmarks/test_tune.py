"""The tuner without a GPU: what it tries, keeps, remembers and chooses, with a stand-in for the measuring process."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks import tune, tune_candidates, tune_choice, tune_library
from benchmarks.gpus import GPUS
from benchmarks.tune_measure import MeasureError, Worker
from benchmarks.workloads import GemmWorkload
from tileops_dsl import configs
from tileops_dsl.kernels import configs_of
from tileops_dsl.targets import TARGETS

H200 = GPUS["h200"]
LARGE = GemmWorkload("gemm", "large", (4096, 4096, 4096), "bfloat16", "here")
DECODE = GemmWorkload("gemm", "decode", (16, 4096, 4096), "bfloat16", "here")
OTHERS = [
    GemmWorkload("gemm", "nn", (2048, 2048, 2048), "bfloat16", "here", layout="nn"),
    GemmWorkload("gemm", "float32", (2048, 2048, 2048), "bfloat16", "here", out="float32"),
]


def rows_of(x="bfloat16", y="bfloat16", layout="nt"):
    return tune_candidates.candidates("gemm", "sm_90a", x, y, layout)


def test_candidates_fit_and_have_names_of_their_own_and_the_most_stages():
    rows = rows_of()
    assert len({row.name for row in rows}) == len(rows) > 20
    assert all(map(tune_candidates.fits, rows))
    most = max(TARGETS["sm_90a"].candidates["gemm"]["stages"])
    assert not any(tune_candidates.fits(replace(row, stages=row.stages + 1)) for row in rows if row.stages < most)
    usual = next(row for row in rows if row.name == "gemm_sm_90a_bf16_bf16_128x256x64_nt")
    assert (usual.stages, usual.cluster, usual.store_columns) == (4, 2, 64)
    assert any(row.name == "gemm_sm_90a_bf16_bf16_128x256x64_nt_c1" and row.cluster == 1 for row in rows)
    assert all(row.store_columns == 32 and row.y == "float32" for row in rows_of(y="float32"))
    assert all(row.transpose_a and not row.transpose_b for row in rows_of(layout="tn"))


def test_a_further_field_of_a_target_is_a_dimension_and_a_tag():
    space = {"tile": ((64, 64, 64),), "cluster": (2, 1), "group_size": (8, 16), "alternate": (False, True), "stages": (4,)}
    fields = [{"tile": 0, "stages": 4, "alternate": True, "cluster": c, "group_size": g} for c in (2, 1) for g in (8, 16)]
    tags = [tune_candidates.tag(one, space) for one in fields]
    assert tags == ["", "g16", "c1", "c1g16"]
    assert any(row.alternate and row.name.endswith("128x128x64_nt_alt_c1") for row in rows_of())


def test_a_target_without_candidates_is_refused():
    with pytest.raises(SystemExit, match="target sm_90a lists no candidates for softmax; targets that do: none"):
        tune_candidates.candidates("softmax", "sm_90a", *tune.MAIN)


def test_the_estimate_prefers_wide_tiles_for_large_products_and_narrow_ones_for_decoding():
    rows = rows_of()
    assert tune_candidates.prune(rows, LARGE, H200, 1)[0].tile == (128, 256, 64)
    assert {row.tile[0] for row in tune_candidates.prune(rows, DECODE, H200, 5)} == {64}
    assert len(tune_candidates.prune(rows, LARGE, H200, 7)) == 7
    bound = LARGE.flops / (H200.multiprocessors * H200.flops_per_clock["sm_90a"] * H200.clock_ghz * 1e3)
    assert all(tune_candidates.estimate_us(row, LARGE, H200) > bound for row in rows)


def test_the_journal_keeps_the_last_entry_and_survives_a_run_that_was_killed(tmp_path):
    path = tmp_path / "a" / "journal.jsonl"
    journal = tune.Journal(path)
    journal.add({"key": "k", "workload": "w", "gpu": "g", "us": 1.0})
    journal.add({"key": "k", "workload": "w", "gpu": "g", "us": 2.0})
    with path.open("a") as file:
        file.write('{"key": "half')
    again = tune.Journal(path)
    assert again.find("k", "w", "g")["us"] == 2.0 and again.find("k", "v", "g") is None
    again.add({"key": "k", "workload": tune.EVERY, "gpu": "g", "failed": "spills"})
    assert tune.Journal(path).find("k", "v", "g")["failed"] == "spills"


def test_the_choice_is_greedy_over_all_workloads_and_stops_where_nothing_is_gained():
    times = {"w": {"a": 0.8, "b": 0.9, "c": 0.79}, "v": {"a": 1.2, "b": 0.9}, "u": {"b": 0.95, "d": 0.7}}
    assert tune_choice.choose(times, 1) == ["d"], "0.7 of one beats 0.9 x 0.9 x 0.95 of three"
    assert tune_choice.choose(times, 2) == ["d", "c"]
    assert tune_choice.choose(times, 5) == ["d", "c", "b"], "a is worth nothing beside c"
    assert tune_choice.choose({"w": {"a": 1.3, "b": 1.1}}, 3) == ["b"], "none wins: the nearest"
    assert tune_choice.choose({"w": {}}, 3) == []
    assert [tune_choice.budget(*group, 6) for group in ((True, "nt"), (True, "nn"), (False, "nt"))] == [6, 3, 2]


def test_a_workload_is_recorded_with_its_fastest_row_and_the_ratio_that_was_measured():
    first, second = rows_of()[:2]
    found = {LARGE: {first: {"us": 200.0, "ratio": 1.02}, second: {"us": 190.0, "ratio": 1.05}}, DECODE: {}}
    plain, fast = tune_choice.with_measurements([first, second], found, H200.name)
    assert plain.measured == ()
    assert (fast.measured[0].m, fast.measured[0].us, fast.measured[0].baseline_us) == (4096, 190.0, 199.5)


def test_rows_that_were_not_tuned_stay_and_the_text_reads_back(monkeypatch, tmp_path):
    monkeypatch.setattr(configs, "CONFIGS", tmp_path)
    present = [rows_of(layout="nn")[0], rows_of()[0], replace(rows_of()[0], target="portable"), replace(rows_of()[0], vector=1)]
    (tmp_path / "gemm.json").write_text(tune_choice.text(present))
    tuned = tune_choice.with_measurements(rows_of()[5:7], {LARGE: {rows_of()[5]: {"us": 1.0, "ratio": 1.5}}}, H200.name)
    merged = tune_choice.merged("gemm", {tune.MAIN: tuned, ("float16", "float16", "nt"): []}, "sm_90a")
    (tmp_path / "gemm.json").write_text(tune_choice.text(merged))
    found = configs_of("gemm")
    names = [row.name for row in found]
    assert names == [tuned[0].name, tuned[1].name, present[0].name, present[2].name, present[3].name]
    assert found[0].measured == tuned[0].measured and len(found[0].measured) == 1
    assert len((tmp_path / "gemm.json").read_text().splitlines()) == len(merged) + 2, "one kernel a line"


# --- the measuring process

CHILD = """
import json, sys, time
print(json.dumps({"gpu": "NVIDIA H200"}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    say = lambda **event: print(json.dumps(event), flush=True)
    names = ["", *job["variants"]]
    for name in names:
        say(begin=name)
        if name == "hangs": time.sleep(60)
        if name == "dies": sys.exit("CUDA error: an illegal memory access was encountered")
        if name == "wrong" or job["workload"]["label"] == "no baseline": say(end=name, failed="is wrong by 0.5"); continue
        say(end=name, error=0.001)
    say(begin=None)
    if "racy" in names and len(names) > 2 or names == ["", "racy"]: sys.exit("lost in the timing")
    say(times={name: {"us": 2.0, "baseline_us": 3.0, "ratio": 1.5} for name in names if name and name != "wrong"})
"""


@pytest.fixture
def worker(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    made = Worker(tmp_path, H200.name, limit=3, rounds=3, command=(sys.executable, "child.py"))
    yield made
    made.close()


def test_one_bad_variant_costs_nothing_but_itself(worker):
    found = worker.measure(LARGE, ["a", "wrong", "dies", "hangs", "b"])
    assert set(found) == {"a", "wrong", "dies", "hangs", "b"}
    assert found["a"] == found["b"] == {"error": 0.001, "us": 2.0, "baseline_us": 3.0, "ratio": 1.5}
    assert found["wrong"] == {"failed": "is wrong by 0.5"}
    assert found["dies"]["failed"] == "dies (status 1): CUDA error: an illegal memory access was encountered"
    assert found["hangs"]["failed"] == "hangs: nothing for 3 s"
    assert "ratio" in worker.measure(LARGE, ["c"])["c"]


def test_a_process_lost_in_the_timing_leads_to_each_variant_alone(worker):
    found = worker.measure(LARGE, ["a", "racy", "b"])
    assert "ratio" in found["a"] and "ratio" in found["b"]
    assert found["racy"]["failed"] == "dies (status 1): lost in the timing"


def test_a_workload_without_a_baseline_another_gpu_and_a_process_that_does_not_start_are_plain(worker, tmp_path):
    with pytest.raises(MeasureError, match=r"4096x4096x4096 bf16 nt: eager PyTorch: is wrong by 0\.5"):
        worker.measure(replace(LARGE, label="no baseline"), ["a"])
    other = Worker(tmp_path, "NVIDIA H100", 3, 3, (sys.executable, "child.py"))
    with pytest.raises(SystemExit, match="this machine has NVIDIA H200; expected NVIDIA H100"):
        other.measure(LARGE, ["a"])
    with pytest.raises(SystemExit, match=r"does not start: dies \(status 1\): no GPU"):
        Worker(tmp_path, H200.name, 3, 3, (sys.executable, "-c", "exit('no GPU')")).measure(LARGE, ["a"])


# --- the command


class FakeWorker:
    """128x256 is twice as fast as eager, 64x64 three times at decoding, all else as fast; one decode tile is wrong."""

    measured = []  # noqa: RUF012  of all workers, for the tests

    def __init__(self, tree, gpu, limit, rounds):
        pass

    def measure(self, workload, variants):
        self.measured.append((workload.name, tuple(variants)))
        return {name: self.result(workload, name) for name in variants}

    def result(self, workload, name):
        if workload.mnk[0] == 16 and "64x256" in name:
            return {"failed": "is wrong"}
        ratio = 3.0 if workload.mnk[0] == 16 and "_64x64x" in name else 2.0 if "_128x256x" in name else 1.0
        return {"us": 10.0, "baseline_us": 10.0 * ratio, "ratio": ratio, "error": 0.001}

    def close(self):
        pass


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """The command with three workloads, no compiler and no GPU; `built` are the names of each library."""
    built = []

    def build(kernels, gpu, tree):
        built.append([row.name for row in kernels])
        return tune_library.Library(tree, {name: "spills registers" for name in built[-1] if "_128x64x" in name})

    def generate(rows):
        return {row: "TileError: no" if row.tile[1] == 96 else row for row in rows}

    monkeypatch.setattr(tune_library, "generate", generate)
    monkeypatch.setattr(tune_library, "key", lambda kernel: f"key of {kernel.name}")
    monkeypatch.setattr(tune_library, "build", build)
    monkeypatch.setattr(tune, "Worker", FakeWorker)
    monkeypatch.setattr(tune, "CONFIGS", tmp_path)
    monkeypatch.setattr(configs, "CONFIGS", tmp_path)
    monkeypatch.setattr(tune.workloads, "load", lambda op: [LARGE, DECODE, *OTHERS])
    monkeypatch.setattr(FakeWorker, "measured", [])
    (tmp_path / "gemm.json").write_text("[]\n")
    command = ["gemm", "--gpu", "h200", "--candidates", "99", "--journal", str(tmp_path / "journal.jsonl")]
    return command, built, tmp_path / "gemm.json"


def test_the_command_writes_the_few_rows_that_serve_best_and_measures_nothing_twice(fake, capsys):
    command, built, path = fake
    assert tune.main(command) == 0
    found = configs_of("gemm")
    groups = {}
    for row in found:
        groups.setdefault(tune_choice.group_of(row), []).append(row.tile)
    wide, narrow = [128, 256, 64], [64, 64, 64]
    assert list(groups.values()) == [[wide, narrow], [wide], [wide]] * 2
    assert [group[0] for group in groups] == ["bfloat16"] * 3 + ["float16"] * 3
    assert {p.m for row in found for p in row.measured} == {16, 2048, 4096}
    said = capsys.readouterr().out
    assert "4096x4096x4096 bf16 nt" in said and "2.000x" in said
    assert "TileError: no" in said and "spills registers" in said and "is wrong" in said
    libraries, measurements, text = len(built), len(FakeWorker.measured), path.read_text()
    assert libraries == 3
    assert tune.main(command) == 0
    assert (len(built), len(FakeWorker.measured), path.read_text()) == (libraries, measurements, text)


def test_a_run_out_of_time_keeps_the_journal_and_the_next_goes_on(fake, monkeypatch, capsys):
    command, _, path = fake
    clock = iter([0.0, 0.0, 61.0])
    monkeypatch.setattr(tune.time, "monotonic", lambda: next(clock))
    assert tune.main([*command, "--minutes", "1"]) == 1
    assert [name for name, _ in FakeWorker.measured] == [LARGE.name] and path.read_text() == "[]\n"
    assert "measurements are missing" in capsys.readouterr().out
    monkeypatch.undo()
    entries = [json.loads(line) for line in (path.parent / "journal.jsonl").read_text().splitlines()]
    assert {entry["workload"] for entry in entries} == {LARGE.name, tune.EVERY}


def test_part_of_the_workloads_or_the_build_alone_write_nothing_unless_asked_to(fake):
    command, built, path = fake
    assert tune.main([*command, "--build-only"]) == 1
    assert len(built) == 1 and FakeWorker.measured == []
    assert tune.main([*command, "--workloads", "decode"]) == 1
    assert [name for name, _ in FakeWorker.measured] == [DECODE.name] and path.read_text() == "[]\n"
    assert built[0] == built[1], "what was built beforehand can be taken as it is"
    assert tune.main([*command, "--write"]) == 0
    assert [row.tile for row in configs_of("gemm")] == [[64, 64, 64]], "what is known of decoding"


def test_the_gpu_must_be_known(capsys):
    with pytest.raises(SystemExit):
        tune.main(["gemm", "--gpu", "h300"])
    assert "choose from" in capsys.readouterr().err


# --- the library


def test_a_key_follows_the_text_and_the_device_headers(monkeypatch, tmp_path):
    row = next(row for row in configs_of("gemm") if row.target == "sm_90a")
    kernel = tune_library._generate(row)
    before = tune_library.key(kernel)
    assert tune_library.key(replace(kernel, text=kernel.text + "//")) != before
    assert tune_library.key(replace(kernel, entry={})) == before


def test_a_candidate_that_does_not_generate_is_told_apart():
    row = rows_of()[0]
    found = tune_library.generate([row, replace(row, tile=(64, 72, 64))])
    assert found[row].config == row
    assert "Error: " in found[replace(row, tile=(64, 72, 64))]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_library_holds_the_kernels_that_compile_and_the_reasons_of_the_others(tmp_path, monkeypatch):
    rows = [row for row in rows_of() if row.tile == (64, 64, 64) and row.cluster == 1]
    good, bad = tune_library.generate(rows).values()
    bad = replace(bad, text=bad.text + "\nthis is not CUDA\n")
    library = tune_library.build([good, bad], H200, tmp_path)
    assert library.failures == {bad.config.name: "nvcc refuses it: see try.log"}
    told = "import tileops; print(tileops.__file__, tileops.status())"
    said = subprocess.run([sys.executable, "-c", told], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.startswith(str(tmp_path)) and "native library: loaded" in said
    monkeypatch.setattr(tune_library, "run_in", lambda *arguments: pytest.fail("it is there already"))
    assert tune_library.build([good, bad], H200, tmp_path) == library
