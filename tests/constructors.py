"""Find calls that make a tensor without naming its dtype and its device: `python tests/constructors.py [FILES]`.

Without them torch uses the defaults of the process, which a program may change at any time (`torch.set_default_dtype`,
`with torch.device(…)`). The rule holds for the packages, not for tests. tests/kernels/ambient has the proof.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("contract", "kernels", "client", "server")
DEVICE = frozenset({
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
})  # fmt: skip
NEVER = frozenset({"Tensor", "FloatTensor", "LongTensor", "IntTensor", "BoolTensor"})


def violations(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number of each call that breaks the rule, and a sentence about it."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
            continue
        name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
        if name in NEVER:
            yield node.lineno, f"torch.{name} has the default dtype: use torch.tensor or torch.empty"
        elif name == "where" and len(node.args) == 3 and all(map(_is_number, node.args[1:])):
            yield node.lineno, "torch.where of two numbers has the default dtype: make one of them a tensor"
        elif name in DEVICE and (missing := sorted({"dtype", "device"} - given)):
            yield node.lineno, f"torch.{name} without {' and '.join(missing)}"


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    infinite = isinstance(node, ast.Attribute) and node.attr in ("inf", "nan")
    return infinite or (isinstance(node, ast.Constant) and isinstance(node.value, (int, float)))


def main() -> int:
    files = [Path(name).resolve() for name in sys.argv[1:]]
    files = files or [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    places = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path in files
        for line, sentence in violations(path.read_text(encoding="utf-8"))
    ]
    print("\n".join(places), end="\n" if places else "")
    return 1 if places else 0


if __name__ == "__main__":
    sys.exit(main())
