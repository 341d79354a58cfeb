"""The operator schemas, from schemas.json: the one place where names, arguments and defaults are fixed.

Each operator `op` of the table has three companions: the overload `op.out`, the eager twin `_eager_op` (the same function from
aten operators only; the native library calls it for what no kernel serves) and `_explain_op` (the decision that `op` would
take, as "path\\tvariant\\treason"). The twin takes the number of an activation in place of its name, because torch before 2.14
loses a copy of each str that C++ passes to an operator (csrc/library.cpp defines it so too).
"""
import functools
import json
import os
import re

NAMESPACE = "tileops"  # or what the native library was built for: _native.load sets it, before anything is registered
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")  # numbered as in csrc/check.h


@functools.cache
def _table() -> dict[str, str]:
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "schemas.json"), encoding="utf-8") as file:
        return json.load(file)


def operators() -> tuple[str, ...]:
    return tuple(_table())


def functional(op: str) -> str:
    return op + _table()[op]


def eager(op: str) -> str:
    by_number = re.sub(r"str activation='(\w+)'", lambda name: f"int activation={ACTIVATIONS.index(name[1])}", _table()[op])
    return f"_eager_{op}" + by_number


def explain(op: str) -> str:
    return f"_explain_{op}{_arguments(op)}) -> str"


def out(op: str) -> str:
    arguments = _arguments(op)
    written = [f"Tensor({letter}!)" for letter, _ in zip("ab", results(op))]
    outs = ", ".join(f"{kind} {name}" for kind, name in zip(written, results(op)))
    star = "" if ", *, " in arguments else ", *"
    return f"{op}.out{arguments}{star}, {outs}) -> " + (written[0] if len(written) == 1 else f"({', '.join(written)})")


@functools.cache
def results(op: str) -> tuple[str, ...]:
    """The names of the results, which are those of the arguments of `.out` that take them; `out` for the one without a name."""
    named = _table()[op].rpartition(") -> ")[2]
    return ("out",) if named == "Tensor" else tuple(result.split()[1] for result in named.strip("()").split(", "))


def _arguments(op: str) -> str:
    return _table()[op].rpartition(") -> ")[0]
