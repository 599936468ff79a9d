"""Flags override environment variables, which override files. The error about a wrong value names its source."""

import pytest

from flashpoint_server.config.settings import Settings
from flashpoint_server.config.sources import SettingError, as_environment, load


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


def test_files_may_begin_with_a_byte_order_mark(tmp_path):
    """Editors on Windows write one."""
    toml, env, keys = (tmp_path / name for name in ("a.toml", "a.env", "keys.toml"))
    toml.write_text("port = 1\n", encoding="utf-8-sig")
    env.write_text("FLASHPOINT_WORKERS=3\n", encoding="utf-8-sig")
    keys.write_text(f'[alice]\nsha256 = "{"0" * 64}"\nrights = ["info"]\n', encoding="utf-8-sig")
    settings = load({"api_keys_file": str(keys)}, toml, env, {}).settings
    assert (settings.port, settings.workers, settings.api_keys_file) == (1, 3, keys)


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


def test_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(SettingError, match=r"--config: .*nope cannot be read: no such file"):
        load({}, tmp_path / "nope")
    with pytest.raises(SettingError, match=r"--env-file: .*nope cannot be read: no such file"):
        load({}, None, tmp_path / "nope")
