"""The one exception of the build: its text says what is wrong and what to do."""


class BuildError(Exception):
    pass
