import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))  # for rejected


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.cu")


@pytest.fixture
def update_golden(request):
    return request.config.getoption("--update-golden")
