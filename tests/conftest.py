"""The order of the tests: `--no-loadscope-reorder` keeps it where two workers take a file each."""


def pytest_collection_modifyitems(items):
    """Wheels first: one file of few tests that take minutes would otherwise come last, with the other worker idle."""
    items.sort(key=lambda item: "packaging" not in item.path.parts)
