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
    return f"_explain_{op}" + _arguments(op) + ") -> str"


def out(op: str) -> str:
    return f"{op}.out" + _arguments(op) + ", Tensor(a!) out) -> Tensor(a!)"


def _arguments(op: str) -> str:
    schema = _table()[op]
    assert schema.endswith(") -> Tensor") and ", *, " in schema, f"schemas.json: {op}: expected `*` and one result"
    return schema.removesuffix(") -> Tensor")
