"""Class names are unique across the server, the client and the contract."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Class names of the server that the client or the contract may also have: FieldError is the name of a schema in
# /openapi.json.
SHARED = {"FieldError"}


def class_names(folder):
    nodes = (node for path in (ROOT / folder).rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return [node.name for node in nodes if isinstance(node, ast.ClassDef)]


def test_a_class_of_the_server_has_a_name_of_its_own():
    ours, theirs = class_names("server"), {*class_names("client"), *class_names("contract")}
    assert sorted(name for name in set(ours) if ours.count(name) > 1) == []
    assert (set(ours) & theirs) <= SHARED
