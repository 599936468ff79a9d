"""A command gets a flag for each attention option of the table OPTIONS, placed before `--url`."""

import inspect
import typing

import pytest
import typer

from flashpoint.commands.flags import takes_options
from flashpoint_contract.options import OPTIONS

FLAGS = {name: row for name, row in OPTIONS.items() if "cli" not in row.refused}


def command(size: int = 1, url: str | None = None, options: typing.Mapping[str, object] | None = None) -> int:
    """Record the arguments in `received`."""
    received.append((size, url, options))
    return 3


received: list = []


def test_the_flags_of_the_table_stand_before_url():
    signature = inspect.signature(takes_options(command))
    assert list(signature.parameters) == ["size", *FLAGS, "url"]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in signature.parameters.values())
    assert all(signature.parameters[name].default is None for name in FLAGS)


def test_only_the_options_that_were_given_reach_the_command():
    received.clear()
    assert takes_options(command)(size=2, url=None, causal=True, window=(3, 0), scale=None) == 3
    assert received == [(2, None, {"causal": True, "window": (3, 0)})]


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_shows_the_text_and_the_default_of_its_row(name):
    annotation = inspect.signature(takes_options(command)).parameters[name].annotation
    _, option = typing.get_args(annotation)
    assert option.help.lower() == f"{FLAGS[name].text}.".lower()
    if isinstance(FLAGS[name].default, str):
        assert option.show_default == FLAGS[name].default


def test_values_are_parsed_as_the_option_needs_them():
    app = typer.Typer()
    app.command()(takes_options(command))
    received.clear()
    arguments = ["--window", "3, 0", "--grads", "dk,dq", "--softcap", "2", "--no-causal", "--layout", "thd"]
    assert app(arguments, standalone_mode=False) == 3
    options = {"layout": "thd", "causal": False, "window": (3, 0), "softcap": 2.0, "grads": ("dk", "dq")}
    assert received == [(1, None, options)]
    with pytest.raises(typer.TyperException, match="must be integers"):
        app(["--window", "a"], standalone_mode=False)
