import pytest

from benchmarks import plot, results, workloads


def sample():
    """Rows such as bench writes, on the file's own workloads."""
    rows = []
    for n, w in enumerate(workloads.load()):
        us = w.bytes / (4e6 - 1e5 * n % 1e6)
        peers = {"eager": 2 * us, "inductor": 1.25 * us}
        if w.op == "rms_norm_silu":
            peers["formula"] = 10 * us
        rows.append(
            {"op": w.op, "workload": w.name, "label": w.label, "target": "sm_90a", "variant": "v", "us": us, "tflops": 1.0}
            | {"gbps": w.bytes / us * 1e-3, "ceiling_pct": 95.0, "peers_us": peers}
            | {"ratios": {name: t / us for name, t in peers.items()}, "error": 0.0039}
            | {"date": "2026-11-29", "commit": "abc", "gpu": "NVIDIA H200"}
        )
    host = {
        "op": "host",
        "workload": "one call of softmax",
        "target": "host",
        "variant": "v",
        "us": 3.5,
        "peers_us": {"eager": 5.25},
    }
    return [*rows, host | {"error": 0.0, "date": "2026-11-30", "commit": "def", "gpu": "NVIDIA H200"}]


def test_the_bytes_and_the_roof_come_back_out_of_a_row():
    row = sample()[0]
    assert plot.moved(row) == pytest.approx(workloads.load()[0].bytes)
    rows = [row | {"us": 10.0, "gbps": gbps, "ceiling_pct": 50.0} for gbps in (1000.0, 1010.0, 1004.0, 3000.0)]
    assert plot.roof(rows) == [(1e7, pytest.approx(2008)), (3e7, pytest.approx(6000))], "three runs of one size are one point"


def test_tables_follow_the_order_of_the_workloads_and_leave_out_no_row():
    rows = sample()
    groups = plot.by_op(list(reversed(rows)))
    assert [r["workload"] for r in groups["softmax"]] == [w.name for w in workloads.load("softmax")]
    text = plot.section(rows, "roofline.png")
    assert all(f"| {row['workload']} |" in text for row in rows)
    assert "| 10.00x |" in text and "| 1.25x |" in text
    assert "2026-11-29 to 2026-11-30" in text and "commit abc, def" in text
    assert "| one call of softmax | 3.5 us | eager 5.2 us |" in text


def test_attention_beside_its_peers():
    row = {"op": "attention_peers", "workload": "b4 h16/16 s4096 d128 full", "us": 2.0, "tflops": 500.2, "fastest": "fa4"}
    row |= {"peers_us": {"cudnn": 3.0, "fa4": 2.1}, "ratios": {"cudnn": 1.5, "fa4": 1.05}}
    row |= {"errors": {"tileops": 1e-3, "cudnn": 3e-3, "fa4": 2e-3}}
    (line,) = plot.peers_table([row, {"op": "gemm"}]).splitlines()[2:]
    assert line == "| b4 h16/16 s4096 d128 full | 2.0 | 500 | 1.05x | 1.50x |  | 1.0e-03 | 2.0e-03 |"
    assert plot.peers_table([{"op": "gemm"}]) == ""


def test_attention_shows_some_of_its_rows():
    names = [
        "b4 h16 s4096 d64 bf16 full",
        "b4 h16 s2048 d64 bf16 full",
        "b1 h16 s4096 d64 bf16 full",
        "b4 h16 s4096 d64 f16 full",
    ]
    ratios = {"eager": 1.5, "cudnn": 1.25}
    rows = [
        {"op": "flash_attention", "workload": name, "us": 2.0, "tflops": 500.2, "ratios": ratios, "error": 1e-3}
        for name in names
    ]
    assert plot.attention_table(rows).splitlines()[2:] == [f"| {names[0]} | 2.0 | 500 | 1.50x | 1.25x | 1.0e-03 |"]
    rows[0] |= {"workload": "b4 h16 s4096 d60 bf16 full", "ratios": {"eager": 1.5}}  # cuDNN does not take it
    assert plot.attention_table(rows).splitlines()[2].split(" | ")[3:5] == ["1.50x", ""]


def test_a_row_without_a_peer_leaves_its_cell_empty():
    rows = [row for row in sample() if row["op"] == "rms_norm_silu"][:2]
    del rows[0]["peers_us"]["formula"], rows[0]["ratios"]["formula"]
    first = plot.kernel_table(rows).splitlines()[2]
    assert first.split(" | ")[7] == ""


def test_only_what_is_between_the_markers_is_replaced():
    text = f"before\n{plot.BEGIN}\nold\n{plot.END}\nafter\n"
    assert plot.replace_section(text, "new") == f"before\n{plot.BEGIN}\nnew\n{plot.END}\nafter\n"


@pytest.mark.parametrize("text", ["", plot.BEGIN, f"{plot.END}\n{plot.BEGIN}", f"{plot.BEGIN}{plot.BEGIN}{plot.END}"])
def test_a_readme_without_the_markers_is_refused(text):
    with pytest.raises(SystemExit, match="no single pair"):
        plot.replace_section(text, "new")


def test_the_command_writes_picture_and_readme(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rows, readme, picture = tmp_path / "h200.jsonl", tmp_path / "README.md", tmp_path / "results" / "roofline.png"
    picture.parent.mkdir()
    results.write(rows, sample())
    readme.write_text(f"# x\n{plot.BEGIN}\n{plot.END}\n")
    plot.main(["--results", str(rows), "--readme", str(readme), "--picture", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "](results/roofline.png)" in readme.read_text()
    once = readme.read_text()
    plot.main(["--results", str(rows), "--readme", str(readme), "--picture", str(picture)])
    assert readme.read_text() == once
    assert f"{len(sample())} rows" in capsys.readouterr().out


def test_missing_rows_or_readme_are_errors_that_say_what_to_do(tmp_path):
    with pytest.raises(SystemExit, match=r"python -m benchmarks.bench"):
        plot.main(["--results", str(tmp_path / "none.jsonl")])
    results.write(tmp_path / "h200.jsonl", sample())
    with pytest.raises(SystemExit, match=r"README\.md does not exist"):
        plot.main(["--results", str(tmp_path / "h200.jsonl"), "--readme", str(tmp_path / "README.md")])
