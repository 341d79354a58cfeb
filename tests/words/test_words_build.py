"""The kernels of this folder compile, without spills, serialised products or ignored register budgets."""

import re

import launch
import pytest
from words_reference import HERE, stamps

from build_backend import toolkit
from build_backend.errors import BuildError

SM_80 = "arch=compute_80,code=sm_80"
FILES = [("words.cu", launch.SM_90A), ("words_wgmma.cu", launch.SM_90A)]
FILES += [("words_portable.cu", gencode) for gencode in (launch.SM_90A, SM_80, "arch=compute_120,code=sm_120")]


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    try:
        toolkit.find()
    except BuildError as error:
        pytest.skip(f"needs nvcc: {error}")
    monkeypatch.setattr(launch, "CACHE", tmp_path)
    return lambda file, gencode: launch.compile_cubin(HERE / file, gencode)[1]


@pytest.mark.parametrize("file, gencode", FILES)
def test_compiles_without_a_warning(compiled, file, gencode):
    log = compiled(file, gencode)
    assert len(re.findall("Compiling entry function", log)) > 10
    assert set(re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)) == {"0"}
    assert not re.search(r"warning|C75\d\d|setmaxnreg", log), log


@pytest.mark.parametrize("stamp", stamps(), ids=lambda stamp: stamp.name)
def test_the_descriptors_are_those_of_the_tables(stamp):
    """So what the GPU computes with them proves the tables."""
    operands = [operand for operand in (stamp.a, stamp.b) if operand]
    assert stamp.strides == tuple(number for operand in operands for number in (operand.stride, operand.leading))


def test_each_form_of_operand_is_there():
    """Both majors with each swizzle, of A and of B."""
    for which in ("a", "b"):
        operands = [getattr(stamp, which) for stamp in stamps() if getattr(stamp, which)]
        assert len({(operand.mn_major, operand.tile.swizzle) for operand in operands}) == 8
