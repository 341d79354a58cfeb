"""The operators, as the files of tileops/ops declare them. They are read, not imported: a build needs no torch.

python -m build_backend.operators    writes tileops/ops/__init__.py, which names them all
"""

import ast
from pathlib import Path

from .errors import BuildError

OPS = Path(__file__).parent.parent / "tileops" / "ops"


def schemas() -> dict[str, str]:
    """Operator -> "op(arguments) -> results", from the `register("op(arguments) -> results", ...)` of tileops/ops/<op>.py."""
    declared = {}
    for path in sorted(path for path in OPS.glob("*.py") if not path.name.startswith("_")):
        op, found = path.stem, []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="register"), args=[ast.Constant(value=str(text)), *_]):
                    found.append(text)
        if len(found) != 1 or not found[0].startswith(f"{op}("):
            problem = f"tileops/ops/{path.name} declares {', '.join(found) or 'no operator'}"
            raise BuildError(f'{problem}; expected _op = register("{op}(Tensor x, ...) -> Tensor", ...), once')
        declared[op] = found[0]
    return declared


def module() -> str:
    """The text of tileops/ops/__init__.py."""
    names = list(schemas())
    lines = ['"""One module per operator, top to bottom: check, eager formula, gradient, public function.']
    lines += ["", "Written by python -m build_backend.operators.", '"""']
    lines += [f"from .{op} import {op}" for op in names]
    return "\n".join([*lines, "", "__all__ = [", *(f'    "{op}",' for op in names), "]", ""])


if __name__ == "__main__":
    (OPS / "__init__.py").write_text(module(), encoding="utf-8")
