"""benchmarks.mla with a stand-in for TileLang's example: what its kernel is given, the check of its result, what is refused."""

import types

import pytest
import torch

from benchmarks import mla, mla_tilelang, results, timing

EXAMPLE = '''
"""A kernel with the arguments, the dtypes and the result of TileLang's two examples, in eager PyTorch."""
import torch

WRONG = 0.0


class Parameter:
    def __init__(self, shape, dtype=torch.float16):
        self.shape, self.torch_dtype = shape, lambda: dtype


class Kernel:
    def __init__(self, params, scale):
        self.params, self.scale = params, scale

    def __call__(self, q, q_pe, kv, k_pe, table=None, lengths=None, *unused):
        given = [q, q_pe, kv, k_pe, *([] if table is None else [table, lengths]), *unused]
        assert [(list(t.shape), t.dtype) for t in given] == [(p.shape, p.torch_dtype()) for p in self.params[:-1]]
        assert all(t.is_contiguous() for t in given)
        if table is not None:
            assert (lengths == kv.shape[0] // len(q)).all()
            pages = table.shape[1] * len(q)
            kv, k_pe = (t.view(pages, -1, t.shape[-1])[table.long()].flatten(1, 2).unsqueeze(2) for t in (kv, k_pe))
        keys = torch.cat((kv, k_pe), -1).squeeze(2).float()
        weights = (torch.cat((q, q_pe), -1).float() @ keys.mT * self.scale).softmax(-1)
        return ((weights + WRONG) @ kv.squeeze(2).float()).half()
'''
PAGED = (
    EXAMPLE
    + """
def mla_decode_tilelang(batch, h_q, h_kv, max_seqlen_pad, dv, dpe, block_N, block_H, num_split, block_size, softmax_scale):
    assert (h_kv, dv, dpe, block_N, block_H, num_split) == (1, 512, 64, 64, 64, 1)
    queries, tokens = [batch, h_q], [batch * max_seqlen_pad, 1]
    numbers = Parameter([batch, max_seqlen_pad // block_size], torch.int32), Parameter([batch], torch.int32)
    partial = Parameter([batch, h_q, 1]), Parameter([batch, h_q, 1, dv])
    parts = [Parameter([*rows, dim]) for rows in (queries, tokens) for dim in (dv, dpe)]
    return Kernel([*parts, *numbers, *partial, Parameter([batch, h_q, dv])], softmax_scale)
"""
)
DENSE = (
    EXAMPLE
    + """
def flashattn(batch, heads, kv_head_num, seqlen_kv, dim, pe_dim, block_N, block_H, num_split, softmax_scale):
    parts = [Parameter([batch, *rows, width]) for rows in ([heads], [seqlen_kv, 1]) for width in (dim, pe_dim)]
    return Kernel([*parts, Parameter([batch, heads, dim])], softmax_scale)
"""
)
PROBLEM = mla.Problem(64, 128, 128)


class PlainReplay:
    def __init__(self, fn, sets, calls):
        self.outputs = [fn(*sets[call % len(sets)]) for call in range(calls)]

    def enqueue(self):
        pass

    def microseconds(self, pending):
        return 2.0


@pytest.fixture
def cpu(monkeypatch):
    for name, value in {"DEVICE": "cpu", "GraphReplay": PlainReplay, "l2_bytes": lambda: 1000, "REPLAY_BYTES": 4000}.items():
        monkeypatch.setattr(timing, name, value)
    for name, value in (
        ("is_available", True),
        ("get_device_name", "NVIDIA H200"),
        ("synchronize", None),
        ("empty_cache", None),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(mla, "PEERS", ("no_such_module",))
    monkeypatch.setattr(mla, "PROBLEMS", [PROBLEM, mla.Problem(2, 128, 128)])


@pytest.fixture
def example(tmp_path):
    def write(text):
        path = tmp_path / "example_mla_decode.py"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("text", [PAGED, DENSE], ids=["paged", "dense"])
def test_tilelang_is_measured_where_it_fills_the_gpu(cpu, example, tmp_path, capsys, text):
    out = tmp_path / "h200.jsonl"
    mla.main(["--tilelang", str(example(text)), "--out", str(out), "--rounds", "3"])
    rows = {row["workload"]: row for row in results.read(out)}
    assert rows["b64 s128 h128 q1"]["peers_us"] == {"tilelang": 2.0} and rows["b64 s128 h128 q1"]["ratios"] == {"tilelang": 1.0}
    assert rows["b2 s128 h128 q1"]["peers_us"] == {}
    assert [line.split()[-3:-1] for line in capsys.readouterr().out.splitlines()][:1] == [["vs", "tilelang"]]


def test_its_result_is_checked_against_float64(cpu, example, tmp_path):
    with pytest.raises(SystemExit, match=r"b64 s128 h128 q1: wrong results, \{'tileops': 0\.00\d+, 'tilelang': "):
        mla.main(["--tilelang", str(example(PAGED.replace("WRONG = 0.0", "WRONG = 0.01"))), "--out", str(tmp_path / "rows")])
    assert not (tmp_path / "rows").exists()


def test_without_it_there_is_no_column(cpu, tmp_path, capsys):
    mla.main(["--out", str(tmp_path / "rows"), "--match", "b2"])
    assert "vs" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "paged", "dense"),
    [({}, True, True), ({"page": 16}, False, True), ({"page": 128}, True, True), ({"queries": 2}, False, False),
     ({"mixed": True}, False, False), ({"heads": 16, "batch": 512}, False, False), ({"batch": 32}, False, False),
     ({"heads": 64, "batch": 128}, True, True), ({"tokens": 96}, False, False)],
    ids=str,
)  # fmt: skip
def test_what_it_serves(change, paged, dense):
    problem = PROBLEM._replace(**change)
    assert [mla_tilelang.serves(mla_tilelang.Example(None, kind), problem) for kind in (True, False)] == [paged, dense]


@pytest.mark.parametrize(
    ("text", "said"),
    [("import no_such_tilelang", "which cannot be imported: No module named 'no_such_tilelang'; expected tilelang and"),
     ("x = 1", "which has neither mla_decode_tilelang nor flashattn; expected TileLang's example_mla_decode_paged.py")],
    ids=["no tilelang", "another file"],
)  # fmt: skip
def test_a_file_that_does_not_serve(example, text, said):
    path = example(text)
    with pytest.raises(SystemExit) as caught:
        mla_tilelang.load(path)
    assert str(caught.value).startswith(f"benchmarks.mla: --tilelang is {path}, {said}")


def test_no_file(tmp_path):
    with pytest.raises(SystemExit, match=r"--tilelang is .*/none\.py, which is no file; expected TileLang's"):
        mla_tilelang.load(tmp_path / "none.py")


def test_its_functions_are_taken_from_the_file(example):
    paged, dense = (mla_tilelang.load(example(text)) for text in (PAGED, DENSE))
    assert paged.paged and not dense.paged and isinstance(paged.build, types.FunctionType)
