"""Every public callable of the SDK and of the attention library says what each of its parameters is."""

import dataclasses
import importlib
import inspect
import re

import pydantic
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

MODULES = (
    "flashpoint",
    "flashpoint.capacity",
    "flashpoint.errors",
    "flashpoint.sharded",
    "flashpoint.torch",
    "flashpoint_kernels",
    "flashpoint_kernels.modules",
    "flashpoint_kernels.nano",
)
OPTIONAL = ("flashpoint.jax", "flashpoint.integrations.transformers")
OURS = ("flashpoint", "flashpoint_contract", "flashpoint_kernels")
# Made by a client, a cache or a function, never by a caller.
MADE = re.compile("(Async)?(Sharded)?(Cache|BenchmarkRun)")


def public(module):
    """The functions and classes of a module: those of `__all__`, or those that it defines."""
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    ]
    for name in names:
        value = getattr(module, name)
        if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value)):
            yield f"{module.__name__}.{name}", value


def parameters(function):
    """The names of a function's parameters, with those of the TypedDict that its keywords unpack."""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            unpacked = re.search(r"Unpack\[(?:\w+\.)*(\w+)\]", str(parameter.annotation))
            if unpacked:
                yield from function.__globals__[unpacked[1]].__annotations__
            elif not name.startswith("_"):
                yield name
        elif name not in ("self", "cls") and not name.startswith("_"):
            yield name


def methods(cls):
    for name, value in inspect.getmembers(cls):
        ours = getattr(value, "__module__", "") or ""
        if not name.startswith("_") and inspect.isroutine(value) and ours.split(".")[0] in OURS:
            yield name, value


def undocumented(name, text, names):
    named = {
        each for entry in re.findall(r"^ *((?:\w+, )*\w+): ", text, re.MULTILINE) for each in entry.split(", ")
    } | set(re.findall(r"`(\w+)`", text))
    return [f"{name}: {each}" for each in names if each not in named]


def of_class(name, cls):
    said = inspect.getdoc(cls) or ""
    if issubclass(cls, pydantic.BaseModel):
        fields = [field for field, info in cls.model_fields.items() if not info.description]
    elif dataclasses.is_dataclass(cls):
        fields = [field.name for field in dataclasses.fields(cls) if field.init and not field.name.startswith("_")]
    elif hasattr(cls, "_fields"):
        fields = cls._fields
    elif "__init__" in vars(cls) and not MADE.fullmatch(cls.__name__):
        said += "\n" + (inspect.getdoc(cls.__init__) or "")
        fields = parameters(cls.__init__)
    else:
        fields = ()
    return [*([] if said else [f"{name}: no docstring"]), *undocumented(name, said, fields)]


def findings(module):
    for name, value in public(module):
        functions = [(name, value)] if inspect.isfunction(value) else []
        if inspect.isclass(value):
            yield from of_class(name, value)
            functions = [(f"{name}.{method}", each) for method, each in methods(value)]
        for full, function in functions:
            said = inspect.getdoc(function) or ""
            yield from [] if said else [f"{full}: no docstring"]
            yield from undocumented(full, said, parameters(function))


@pytest.mark.parametrize("name", [*MODULES, *(pytest.param(name, marks=pytest.mark.slow) for name in OPTIONAL)])
def test_every_parameter_is_in_the_docstring(name):
    if name in OPTIONAL:
        pytest.importorskip(name.rpartition(".")[2])
    assert not list(findings(importlib.import_module(name)))


def test_keywords_have_their_shapes_where_help_shows_them():
    import flashpoint
    from flashpoint_kernels import attention

    for call in (flashpoint.Client.attention, flashpoint.AsyncClient.attention, attention):
        said = inspect.getdoc(call)
        assert "causal: Query i sees key j only if" in said
        assert "q: Queries, (B, Hq, Sq, D)" in said
        assert re.search(r"kv_lengths: .*int32 or int64, \(B,\)", said)
    assert inspect.getdoc(flashpoint.Client.verify) == inspect.getdoc(flashpoint.AsyncClient.verify)


def test_the_fixture_documents_what_its_function_takes():
    from flashpoint import pytest_plugin

    said = inspect.getdoc(pytest_plugin.judge_attention)
    assert not undocumented("judge", said, ("kernel", "shape", "options"))
