"""Every command of the registry exists. If a package is missing, a command says what to install."""

import importlib

import pytest

from flashpoint.commands import app
from flashpoint.commands.registry import COMMANDS


def test_a_command_that_lacks_a_package_says_what_to_install(run, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name="fastapi")

    monkeypatch.setattr(app.importlib, "import_module", missing)
    code, out, err = run("serve")
    assert (code, out) == (2, "")
    message, hint = err.splitlines()
    assert message == "flashpoint serve: needs fastapi, which is not installed"
    assert hint.startswith("  hint: install it with: pip install '.[server]' in a checkout")


def test_a_package_that_is_broken_is_no_matter_of_an_extra(run, monkeypatch):
    def broken(name):
        raise ModuleNotFoundError(name="flashpoint_server.gone")

    monkeypatch.setattr(app.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError):
        run("serve")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_where_the_list_says(name):
    module, _, function = COMMANDS[name].target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
