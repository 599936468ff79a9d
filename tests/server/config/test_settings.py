import os
import re
import subprocess
from pathlib import Path

import pytest

from flashpoint.cli import main
from flashpoint_server.config.settings import Settings
from flashpoint_server.config.sources import SettingError, as_environment, load


def test_every_setting_is_a_flag_with_a_help_text(capsys):
    assert main(["serve", "--help"]) == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description[1:].split(";")[0].split(",")[0] in text


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.toml").write_text(
        'queue_limit = 1\nkeep_alive = 2\ncors_origins = ["https://a.org", "https://b.org"]\n'
    )
    (tmp_path / "a.env").write_text("export FLASHPOINT_KEEP_ALIVE='3'\n# no\nflashpoint_workers=2\nOTHER=$HOME\n")
    return tmp_path / "a.toml", tmp_path / "a.env"


def test_a_flag_wins_over_a_variable_over_a_file_of_them_over_a_toml_file(files):
    toml, env = files
    loaded = load({"port": "0"}, toml, env, {"FLASHPOINT_WORKERS": "4", "FLASHPOINT_PORT": "1"})
    settings = loaded.settings
    assert (settings.port, settings.workers, settings.keep_alive, settings.queue_limit) == (0, 4, 3, 1)
    assert settings.cors_origins == ("https://a.org", "https://b.org")
    assert loaded.sources == {
        "port": "--port",
        "workers": "FLASHPOINT_WORKERS",
        "keep_alive": f"FLASHPOINT_KEEP_ALIVE in {env}",
        "queue_limit": f"queue_limit in {toml}",
        "cors_origins": f"cors_origins in {toml}",
    }


def test_a_stray_env_file_has_no_effect(tmp_path, monkeypatch):
    (tmp_path / ".env").write_text("FLASHPOINT_PORT=1\n")
    monkeypatch.chdir(tmp_path)
    assert load({}, environment={}).settings == Settings()


@pytest.mark.parametrize(
    ("variables", "arguments", "port"),
    [({}, [], 8000), ({"FLASHPOINT_PORT": "8001"}, [], 8001), ({"FLASHPOINT_PORT": "8001"}, ["PORT=9000"], 9000)],
)
def test_make_serve_passes_port_or_the_variable(variables, arguments, port):
    of_make = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # `make test` sets them, and another make then prints more
    environment = {n: value for n, value in os.environ.items() if n not in ("PORT", "FLASHPOINT_PORT", *of_make)}
    command = ["make", "-n", "-o", ".venv/.server", "serve", *arguments]
    said = subprocess.run(
        command, cwd=Path(__file__).parents[3], env=environment | variables, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == f".venv/bin/flashpoint serve --port {port}"


def test_settings_pass_through_an_environment():
    flags = {"api_keys": "a:info,b", "cache_secret": "x" * 32, "insecure": "true", "grpc_port": "5", "port": "6"}
    settings = load(flags, environment={}).settings
    there = as_environment(settings, {"flashpoint_port": "7", "HOME": "/"})
    assert there["HOME"] == "/"
    assert load({}, environment=there).settings == settings


@pytest.mark.parametrize(
    ("flags", "variables", "toml", "message"),
    [
        ({"device": "tpu"}, {}, "", "--device: 'tpu' is not valid"),
        ({"body_limit": "0"}, {}, "", "--body-limit: must be greater than or equal to 1, not '0'"),
        ({"body_timeout": "inf"}, {}, "", "--body-timeout: "),
        ({"keep_alive": str(1 << 62)}, {}, "", "--keep-alive: "),
        ({}, {"FLASHPOINT_PORT": "abc"}, "", "FLASHPOINT_PORT: must be an integer, not 'abc'"),
        ({}, {"FLASHPOINT_API_KEYS": "a:none"}, "", "FLASHPOINT_API_KEYS: key 1 must be KEY"),
        ({}, {"flashpoint_insecure": "maybe"}, "", "flashpoint_insecure: must be true or false, not 'maybe'"),
        ({}, {}, "port = -1", "port in FILE: must be greater than or equal to 0, not '-1'"),
        ({}, {}, "prot = 1", "prot in FILE: unknown setting; did you mean port?"),
        ({}, {}, "[port]\nx = 1", "port in FILE: must be a value, not a table"),
        ({}, {}, "port", "--config: FILE is not TOML"),
    ],
)
def test_a_wrong_value_blames_its_source(tmp_path, flags, variables, toml, message):
    (tmp_path / "x.toml").write_text(toml)
    with pytest.raises(SettingError) as caught:
        load(flags, tmp_path / "x.toml", environment=variables)
    assert str(caught.value).replace(str(tmp_path / "x.toml"), "FILE").startswith(message)


def test_bytes_may_have_a_unit():
    names = [name for name in Settings.model_fields if name.endswith("_bytes")]
    names += ["body_limit", "json_limit", "body_rate"]
    given = dict.fromkeys(names, "4GiB")
    loaded = load(given, environment={"FLASHPOINT_HEAD_LIMIT": "64 KiB"}).settings
    assert {getattr(loaded, name) for name in names} == {4 << 30}
    assert loaded.head_limit == 64 << 10
    assert load({"cache_bytes": "0"}, environment={}).settings.cache_bytes == 0
    for name in names:
        for wrong in ("4GB", "4g", "many", "-1MiB", "1.5GiB", ""):
            with pytest.raises(SettingError, match=f"must be bytes, such as 4294967296 or 4GiB, not '{wrong}'"):
                load({name: wrong}, environment={})


def test_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(SettingError, match=r"--config: .*nope cannot be read: no such file"):
        load({}, tmp_path / "nope")
    with pytest.raises(SettingError, match=r"--env-file: .*nope cannot be read: no such file"):
        load({}, None, tmp_path / "nope")


def test_config_prints_what_is_in_force_and_where_it_comes_from(files, monkeypatch, capsys, tmp_path):
    toml, env = files
    monkeypatch.setenv("FLASHPOINT_CACHE_SECRET", "s" * 40)
    monkeypatch.setenv("FLASHPOINT_PROT", "1")
    assert main(["config", "--config", str(toml), "--env-file", str(env), "--port", "9", "--changed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r"  +# ", line) for line in lines] == [
        ["port = 9", "--port"],
        ["workers = 2", f"flashpoint_workers in {env}"],
        ['cors_origins = ["https://a.org", "https://b.org"]', f"cors_origins in {toml}"],
        ["keep_alive = 3", f"FLASHPOINT_KEEP_ALIVE in {env}"],
        ["queue_limit = 1", f"queue_limit in {toml}"],
        ['# cache_secret = "**********"', "FLASHPOINT_CACHE_SECRET"],
        ["# FLASHPOINT_PROT is not a setting: did you mean FLASHPOINT_PORT?"],
    ]
    assert main(["config", "--keep-alive", "7"]) == 0
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    monkeypatch.delenv("FLASHPOINT_CACHE_SECRET")
    assert load({}, again, environment={}).settings.keep_alive == 7


def test_health_is_asked_where_the_server_is(server, capsys):
    assert main(["health", "--port", str(server.port)]) == 0
    assert (
        main(["health", "--port", str(server.port), "--host", "0.0.0.0", "--insecure"]) == 0
    )  # like the image's health check
    assert capsys.readouterr().out == 2 * "alive: /health/live is 200\n"
    assert main(["health", "--port", "0"]) == 2
    assert main(["health", "--queue-limit", "0"]) == 2
    assert "flashpoint health: --queue-limit: " in capsys.readouterr().err
