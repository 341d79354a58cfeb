import json
import subprocess

import pytest

from benchmarks import results


def row(op, workload, us):
    return {"op": op, "workload": workload, "us": us}


def test_the_newest_run_of_a_workload_replaces_the_older_where_it_stands():
    old = [row("softmax", "a", 1), row("softmax", "b", 2), row("rms_norm", "a", 3)]
    merged = results.merge(old, [row("softmax", "a", 10), row("rms_norm", "b", 4)])
    assert [(r["op"], r["workload"], r["us"]) for r in merged] == [
        ("softmax", "a", 10),
        ("softmax", "b", 2),
        ("rms_norm", "a", 3),
        ("rms_norm", "b", 4),
    ]


def test_a_written_file_has_one_object_per_line_and_is_merged_into(tmp_path):
    path = tmp_path / "deep" / "h200.jsonl"
    results.write(path, [row("softmax", "a", 1), row("softmax", "b", 2)])
    results.write(path, [row("softmax", "b", 3)])
    assert [json.loads(line)["us"] for line in path.read_text().splitlines()] == [1, 3]
    assert results.read(path) == [row("softmax", "a", 1), row("softmax", "b", 3)]
    assert list(path.parent.iterdir()) == [path], "nothing half-written is left"


def test_a_broken_line_is_named_and_the_file_kept(tmp_path):
    path = tmp_path / "h200.jsonl"
    path.write_text('{"op": "softmax", "workload": "a", "us": 1}\n{"op": \n')
    with pytest.raises(SystemExit, match=r"h200.jsonl, line 2 is not JSON"):
        results.write(path, [row("softmax", "b", 2)])
    assert path.read_text().endswith('{"op": \n')


def test_a_missing_file_has_no_rows(tmp_path):
    assert results.read(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(
    ("gpu", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("cpu", "cpu"),
    ],
)
def test_a_results_file_is_named_after_the_gpu(gpu, slug):
    assert results.slug(gpu) == slug


def git(folder, *arguments):
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=folder, check=True, capture_output=True
    )


def test_the_commit_is_gits_marked_where_the_tree_differs_else_the_environments(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("TILEOPS_COMMIT", raising=False)
    assert results.commit() == "unknown"
    monkeypatch.setenv("TILEOPS_COMMIT", "abc")
    assert results.commit() == "abc"
    kept = tmp_path / "benchmarks" / "results" / "h200.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text("1")
    (tmp_path / "code").write_text("1")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = results.commit()
    assert len(clean) == 10
    kept.write_text("2")
    assert results.commit() == clean, "a new result is not a change of the code"
    (tmp_path / "code").write_text("2")
    assert results.commit() == clean + "+changed"


def test_rows_written_elsewhere_are_merged_into_the_file_of_their_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    results.write(
        tmp_path / "fetched.jsonl", [row("softmax", "a", 1) | {"gpu": "NVIDIA H200"}, row("host", "a", 2) | {"gpu": "cpu"}]
    )
    results.main([tmp_path / "fetched.jsonl"])
    assert [r["us"] for r in results.read(tmp_path / "results" / "h200.jsonl")] == [1]
    assert [r["us"] for r in results.read(tmp_path / "results" / "cpu.jsonl")] == [2]
    with pytest.raises(SystemExit, match="no file was given"):
        results.main([])
