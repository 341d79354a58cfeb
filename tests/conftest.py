"""The order of the tests: `--no-loadscope-reorder` keeps it where two workers take a file each."""

LONGEST = ("tests/packaging/test_wheel.py", "tests/emulator/test_library.py")


def pytest_collection_modifyitems(items):
    """Files that take minutes come first: as the last one, such a file would leave the other worker idle."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
