"""Every public function, class and method of the SDK and of the attention library documents each parameter."""

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import subprocess
import sys
import textwrap
from pathlib import Path

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
OPTIONAL = ("flashpoint.jax", "flashpoint.integrations.transformers", "flashpoint_kernels.transformers")
OURS = ("flashpoint", "flashpoint_contract", "flashpoint_kernels")
# Callers never construct these classes, so the parameters of `__init__` need no documentation.
MADE = re.compile("(Async)?(Sharded)?(Cache|BenchmarkRun)")


def public(module):
    """Yield the functions and classes in a module's `__all__`, or else those that it defines."""
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    ]
    for name in names:
        value = getattr(module, name)
        if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value)):
            yield f"{module.__name__}.{name}", value


def parameters(function):
    """Yield the names of a function's public parameters; for `**keywords: Unpack[T]`, the keys of the TypedDict T."""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            unpacked = re.search(r"Unpack\[(?:\w+\.)*(\w+)\]", str(parameter.annotation))
            if unpacked:
                yield from inspect.unwrap(function).__globals__[unpacked[1]].__annotations__
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
    text = inspect.getdoc(cls) or ""
    if issubclass(cls, pydantic.BaseModel):
        fields = [field for field, info in cls.model_fields.items() if not info.description]
    elif dataclasses.is_dataclass(cls):
        fields = [field.name for field in dataclasses.fields(cls) if field.init and not field.name.startswith("_")]
    elif hasattr(cls, "_fields"):
        fields = cls._fields
    elif "__init__" in vars(cls) and not MADE.fullmatch(cls.__name__):
        text += "\n" + (inspect.getdoc(cls.__init__) or "")
        fields = parameters(cls.__init__)
    else:
        fields = ()
    return [*([] if text else [f"{name}: no docstring"]), *undocumented(name, text, fields)]


def findings(module):
    for name, value in public(module):
        functions = [(name, value)] if inspect.isfunction(value) else []
        if inspect.isclass(value):
            yield from of_class(name, value)
            functions = [(f"{name}.{method}", each) for method, each in methods(value)]
        for full, function in functions:
            text = inspect.getdoc(function) or ""
            yield from [] if text else [f"{full}: no docstring"]
            yield from undocumented(full, text, parameters(function))


@pytest.mark.parametrize("name", [*MODULES, *(pytest.param(name, marks=pytest.mark.slow) for name in OPTIONAL)])
def test_every_parameter_is_in_the_docstring(name):
    if name in OPTIONAL:
        pytest.importorskip(name.rpartition(".")[2])
    assert not list(findings(importlib.import_module(name)))


def test_keywords_have_their_shapes_where_help_shows_them():
    import flashpoint
    from flashpoint_kernels import attention

    for call in (flashpoint.Client.attention, flashpoint.AsyncClient.attention, attention):
        text = inspect.getdoc(call)
        assert "causal: Query i sees key j only if" in text
        assert "q: Queries, (B, Hq, Sq, D)" in text
        assert re.search(r"kv_lengths: .*int32 or int64, \(B,\)", text)
    assert inspect.getdoc(flashpoint.Client.verify) == inspect.getdoc(flashpoint.AsyncClient.verify)


def test_the_fixture_documents_what_its_function_takes():
    from flashpoint import pytest_plugin

    text = inspect.getdoc(pytest_plugin.judge_attention)
    assert not undocumented("judge", text, ("kernel", "shape", "options"))


def twins():
    """Yield (owner, name, asyncio function, synchronous function) for each pair; owner is a class or module."""
    import flashpoint
    from flashpoint import sharded
    from flashpoint._client.attending import AsyncAttending, Attending

    for asynchronous in (
        flashpoint.AsyncClient, AsyncAttending, flashpoint.AsyncCache, flashpoint.AsyncBenchmarkRun,
        sharded.AsyncShardedCache,
    ):  # fmt: skip
        for name, function in methods(asynchronous):
            sync = asynchronous.__name__.removeprefix("Async")
            home = sharded if "Sharded" in sync else flashpoint
            like = getattr(Attending if sync == "Attending" else getattr(home, sync), name, None)
            if like is not None:  # `aclose` has no synchronous method of the same name
                yield asynchronous, name, function, like
    for name in ("attention", "attention_grad", "cache"):
        yield sharded, name, getattr(sharded, f"async_{name}"), getattr(sharded, name)


def first_line_in_source(twin, name):
    """Return the first line of the docstring, or of the string below `name = asynchronous(…)`, which editors show."""
    if not inspect.isclass(twin):
        source = ast.parse(textwrap.dedent(inspect.getsource(twin))).body[0]
        return ast.get_docstring(source).split("\n")[0]
    body = ast.parse(textwrap.dedent(inspect.getsource(twin))).body[0].body
    texts = {
        each.targets[0].id: after.value.value
        for each, after in itertools.pairwise(body)
        if isinstance(each, ast.Assign)
    }
    return texts[name] if name in texts else first_line_in_source(vars(twin)[name], name)


def test_twins_say_the_same_and_an_editor_shows_their_first_line():
    for owner, name, twin, function in twins():
        assert inspect.getdoc(twin) == inspect.getdoc(function), twin.__qualname__
        shown = first_line_in_source(owner if inspect.isclass(owner) and name in vars(owner) else twin, name)
        assert shown == inspect.getdoc(function).split("\n")[0], twin.__qualname__


def test_each_description_stands_once_in_the_sources():
    """The sources contain each shared parameter description once; imports merge it into all docstrings that need it."""
    root = Path(__file__).resolve().parents[3]
    sources = [path for package in ("client", "contract", "kernels") for path in (root / package).rglob("*.py")]
    for text in ("tanh(s/softcap), before mask and bias (Gemma 2)", "Seconds for the whole call, retries included"):
        assert len([path.name for path in sources if text in path.read_text(encoding="utf-8")]) == 1, text


def test_without_docstrings_calls_still_work():
    code = "import flashpoint; flashpoint.AttentionOptions(); print(flashpoint.Client.verify.__doc__)"
    run = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "None\n"


def test_the_site_shows_what_help_shows():
    griffe = pytest.importorskip("griffe", reason="install the extra: pip install '.[docs]'")
    import flashpoint

    root = Path(__file__).resolve().parents[3]
    extensions = griffe.load_extensions(root / "docs/site/completed.py")
    package = griffe.load("flashpoint", search_paths=[root / "client"], extensions=extensions)
    for owner, name in (("_client.client.Client", "verify"), ("_client.async_client.AsyncClient", "verify")):
        shown = package[f"{owner}.{name}"].docstring.value
        assert shown == inspect.getdoc(flashpoint.Client.verify)
    shown_names = [parameter.name for parameter in package["_client.async_client.AsyncClient.verify"].parameters]
    assert shown_names == ["self", "q", "k", "v", "keywords"]
    assert len(package["_client.attending.AsyncAttending.attention"].overloads) == 6
    contract = griffe.load("flashpoint_contract", search_paths=[root / "contract"], extensions=extensions)
    assert "softcap" in contract["schemas.options.AttentionOptions"].docstring.value
