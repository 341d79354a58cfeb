"""What a GPU can run is found once in a process, so each of these is a process of its own, over the made-up CUDA."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, json, sys, torch
library = ctypes.CDLL(sys.argv[1])
library.tileops_status.restype = library.tileops_register.restype = library.fake_last_kernel.restype = ctypes.c_char_p
library.fake_get.restype = ctypes.c_int64
assert library.tileops_register() is None
ops = getattr(torch.ops, "{namespace}")
twins = torch.library.Library("{namespace}", "FRAGMENT")
def twin(x, dim=-1, *, dtype=None):
    return torch.softmax(x.float(), dim).to(x.dtype)
twins.impl("_eager_softmax", twin, "CompositeExplicitAutograd")
x = torch.randn(4, 16).bfloat16()
def fake(**values):
    for name, value in values.items():
        library.fake_set(name.encode(), value)
def force(name):
    library.tileops_set_knob(b"force", name.encode())
def run(x=x, dim=-1):
    before = library.fake_get(b"launches")
    torch.testing.assert_close(ops.softmax(x, dim), torch.softmax(x.float(), dim).bfloat16())
    count = library.fake_get(b"launches") - before
    return [count, library.fake_last_kernel().decode()] if count else "eager"
def refused(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
def state():
    return json.loads(library.tileops_status())["devices"]["0"]
{body}
"""


@pytest.fixture
def in_process(binding, fake_path):
    def start(body):
        script = SCRIPT.format(namespace=binding.namespace, body=body)
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", script, fake_path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    return start


def warnings_of(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "tileops runs in eager PyTorch" in line]


def test_hopper_prefers_its_own_kernels(in_process):
    found, _ = in_process("fake(capability=90); print(json.dumps([run(), state()]))")
    assert found[0] == [1, "softmax_sm_90a_bf16_bf16_v8"] and found[1]["target"] == "sm_90a"


def test_hopper_without_an_sm_90a_image_is_portable(in_process):
    found, _ = in_process("fake(sm_90a_error=209); print(json.dumps([run(), state()]))")
    assert found[0] == [1, "softmax_portable_bf16_bf16_v8"] and found[1]["target"] == "portable"


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_other_gpus_are_portable(in_process, capability):
    body = f"fake(capability={capability}); first = run(); force('sm_90a'); print(json.dumps([first, state(), refused(run)]))"
    (kernel, state, refusal), _ = in_process(body)
    assert kernel == [1, "softmax_portable_bf16_bf16_v8"]
    assert state["capability"] == f"{capability // 10}.{capability % 10}"
    assert 'softmax: TILEOPS_FORCE=sm_90a cannot apply: Fake "GPU" does not run it, or this build lacks it; ' in refusal


def test_gpu_without_code_falls_back_and_warns_once(in_process):
    body = "fake(capability=75, portable_error=209); print(json.dumps([run(), run(), state(), ops._explain_softmax(x)]))"
    (first, second, state, explained), err = in_process(body)
    assert first == second == "eager"
    reason = 'this build (sm_90a,portable) has no code for Fake "GPU" of compute capability 7.5'
    assert state["reason"] == reason and state["target"] is None
    assert explained == f"eager\t\t{reason}"
    assert len(warnings_of(err)) == 1 and reason in err


def test_driver_too_old_falls_back_and_warns_once(in_process):
    body = "fake(driver_error=35); print(json.dumps([run(), run(), state()]))"
    (first, second, state), err = in_process(body)
    assert first == second == "eager" and len(warnings_of(err)) == 1
    assert state["target"] is None and "driver" in state["reason"]


def test_a_passing_failure_is_an_error_and_is_not_remembered(in_process):
    body = "fake(sm_90a_error=2); first = refused(run); fake(sm_90a_error=0); print(json.dumps([first, run()]))"
    found, _ = in_process(body)
    assert found == ["tileops: cannot load a kernel: a made-up failure (cudaErrorMadeUp)", [1, "softmax_sm_90a_bf16_bf16_v8"]]


def test_force_on_a_gpu_without_code_says_why(in_process):
    found, _ = in_process("fake(driver_error=35); force('portable'); print(json.dumps(refused(run)))")
    assert found.startswith("softmax: TILEOPS_FORCE=portable cannot apply: ")


def test_more_outer_rows_than_a_grid_has_blocks_take_several_launches(in_process):
    body = "print(json.dumps(run(torch.randn(140000, 3, 2).bfloat16(), 1)))"
    found, _ = in_process(body)
    assert found == [3, "softmax_sm_90a_bf16_bf16_v1rows"]
