"""Every kernel of the library on the same inputs: a GPU has the emulator's results, up to the order of summation.

python -m pytest tests/emulator/test_agreement.py -m gpu -n 8     all that was compiled; a file of csrc/generated each

Without a GPU the emulator is held against float64 in the same way, so that the problems are known to be right.
"""

import json
from pathlib import Path

import pytest
import torch
from agreement import disagreement, moved, problem_of

import tileops

GENERATED = Path(tileops.__file__).parents[1] / "csrc" / "generated"
MANIFEST = GENERATED / "manifest.json"
EVERY = json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {"sources": [], "kernels": {}}
SOURCES = {source["file"]: source["kernels"] for source in EVERY["sources"]}


def disagreements(file, run, share=0.0):
    """Of each kernel of a file: run(name, problem) gives what the emulator's results are compared with."""
    for seed, name in enumerate(SOURCES[file]):
        problem = problem_of(EVERY["kernels"][name] | {"name": name}, seed)
        expected = run(name, problem)
        problem.emulate(GENERATED / file, seed)
        for (out, emulated), found, slack in zip(problem.outs.items(), expected, problem.slack, strict=True):
            wrong = disagreement(found, emulated, slack, max(problem.share, share))
            if wrong:
                yield f"{name}: {out}: {wrong}"


def on_a_gpu(name, problem):
    op = EVERY["kernels"][name]["op"].removesuffix("_few")
    outs = {key: moved(out, "cuda") for key, out in problem.outs.items()}
    args = [moved(arg, "cuda") if isinstance(arg, torch.Tensor) else arg for arg in problem.args]
    options = {k: moved(v, "cuda") if isinstance(v, torch.Tensor) else v for k, v in problem.options.items()}
    with tileops.knobs.scope(force=name, require_native=True):
        getattr(tileops, problem.op or op)(*args, **options, **outs)
    return [out.cpu() for out in outs.values()]


def in_float64(name, problem):
    return [exact.to(out.dtype) for exact, out in zip(problem.exact, problem.outs.values(), strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("file", SOURCES)
def test_a_gpu_agrees(file):
    op, target = (EVERY["kernels"][SOURCES[file][0]][key] for key in ("op", "target"))
    if op == "mla_combine":
        pytest.skip("not an operator: tests/ops/test_mla_decode_kernels.py has it, behind mla_decode")
    if not torch.cuda.is_available() or (target == "sm_90a" and torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip(f"no GPU for {target}")
    assert list(disagreements(file, on_a_gpu)) == []


@pytest.mark.parametrize("file", SOURCES)
def test_float64_agrees(file):
    """What is rounded on the way, to the dtype of P, rounds more of the results of attention the other way."""
    of_p = EVERY["kernels"][SOURCES[file][0]]["op"] in ("flash_attention", "attention_decode", "mla_decode", "mla_decode_few")
    assert list(disagreements(file, in_float64, share=float(of_p))) == []


def test_what_is_no_agreement():
    ours = torch.linspace(1, 2, 1000).bfloat16()
    one, theirs = ours.clone(), ours.double()
    one[7] = one[7].nextafter(torch.tensor(4.0).bfloat16())
    assert not disagreement(one, ours, torch.tensor(0.0), 0.01)
    assert "0.10% of the elements differ; expected at most 0%" in disagreement(one, ours, torch.tensor(0.0), 0.0)
    theirs[7] += 2**-6
    wrong = disagreement(theirs.bfloat16(), ours, torch.tensor(2.0**-8), 0.01)
    assert wrong == "beyond what summation order explains by 3.9e-03"
    theirs[7] = torch.nan
    assert disagreement(theirs.bfloat16(), ours, torch.tensor(1.0), 1.0) == "1 and 0 are NaN"
