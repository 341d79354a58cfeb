"""The schemas of the operators, and of the companions that follow from them. `tileops/ops/<op>.py` declares that of <op>: the
one place where names, arguments and defaults are fixed.

Each operator `op` has three companions: the overload `op.out`, the eager twin `_eager_op` (the same function from aten
operators only; the native library calls it for what no kernel serves) and `_explain_op` (the decision that `op` would take, as
"path\\tvariant\\treason"). The twin takes the number of an activation in place of its name, because torch before 2.14 loses a
copy of each str that C++ passes to an operator (csrc/library.cpp defines it so too).
"""
import functools
import os
import re

NAMESPACE = "tileops"  # or what the native library was built for: _native.load sets it, before anything is registered
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")  # numbered as in csrc/check.h
_signatures: dict[str, str] = {}


def operators() -> tuple[str, ...]:
    """All there are, declared yet or not."""
    names = os.listdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "ops"))
    return tuple(sorted(name[:-3] for name in names if name.endswith(".py") and not name.startswith("_")))


def declare(schema: str) -> str:
    """Takes "op(arguments) -> results" in; returns op."""
    op, _, rest = schema.partition("(")
    _signatures[op] = f"({rest}"
    return op


def functional(op: str) -> str:
    return op + _signatures[op]


def eager(op: str) -> str:
    by_number = re.sub(r"str activation='(\w+)'", lambda name: f"int activation={ACTIVATIONS.index(name[1])}", _signatures[op])
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
    named = _signatures[op].rpartition(") -> ")[2]
    return ("out",) if named == "Tensor" else tuple(result.split()[1] for result in named.strip("()").split(", "))


def _arguments(op: str) -> str:
    return _signatures[op].rpartition(") -> ")[0]
