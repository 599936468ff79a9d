"""An import of the SDK imports torch, JAX and other large packages only if they are needed."""

import importlib.util
import subprocess
import sys

import pytest

import flashpoint

HEAVY = ("fastapi", "flashpoint_server", "jax", "matplotlib", "torch", "transformers", "triton")


def imported(program):
    """Run `program` in a new process; return the list of the HEAVY modules that it has imported, as text."""
    program += f"\nimport sys\nprint([name for name in {HEAVY} if name in sys.modules])"
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_client_and_its_commands_import_nothing_heavy(scripted):
    commands = ["import flashpoint.cli"]
    if importlib.util.find_spec("typer"):
        commands += [f"import flashpoint.commands.{name}" for name in ("benchmark", "capacity", "info", "verify")]
    call = f"flashpoint.Client({scripted.url!r}).attention(*[numpy.ones((2, 3), 'f4')] * 3)"
    assert imported("\n".join(["import flashpoint, numpy", *commands, call])) == "[]"


@pytest.mark.slow
def test_the_jax_functions_import_no_torch():
    pytest.importorskip("jax", reason="install the extra: pip install '.[jax]'")
    assert imported("import flashpoint.jax") == "['jax']"


def test_a_name_of_the_package_is_imported_where_it_is_used():
    loaded = "'httpx' in sys.modules"
    program = f"import flashpoint, sys\nbefore = {loaded}\nflashpoint.Client\nprint(before, {loaded})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "False True\n"


def test_every_name_of_the_package_is_there_and_no_other():
    assert set(flashpoint.__all__) <= {*dir(flashpoint), "__version__"}
    assert all(getattr(flashpoint, name) is not None for name in dir(flashpoint))
    assert flashpoint.errors.ServerError is flashpoint.ServerError
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = flashpoint.Nothing
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from flashpoint import Nothing  # noqa: F401
