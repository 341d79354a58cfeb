import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tileops_dsl import generate

HERE = os.path.dirname(__file__)
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "words")]  # for rejected, and for fragments
pytest.register_assert_rewrite("rejected")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.cu")


@pytest.fixture
def update_golden(request):
    return request.config.getoption("--update-golden", default=False)  # unknown if pytest starts above this folder


@dataclass(frozen=True)
class Output:
    """What a run of the command wrote."""

    path: Path
    files: dict[str, str]
    manifest: dict


def _generated(path: Path, *options: str) -> Output:
    assert generate.main([f"--out={path}", *options]) == 0
    files = {file.name: file.read_text() for file in path.iterdir()}
    return Output(path, files, json.loads(files["manifest.json"]))


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    return _generated(tmp_path_factory.mktemp("smoke"), "--build=smoke")


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    return _generated(tmp_path_factory.mktemp("everything"))
