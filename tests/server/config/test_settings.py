import re

import pytest

from flashpoint_server.cli.health import main as health
from flashpoint_server.config.settings import Settings


def test_every_setting_is_a_flag_with_a_help_text(capsys):
    with pytest.raises(SystemExit) as caught:
        Settings(_cli_parse_args=["--help"])
    assert caught.value.code == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')} " in text
        assert field.description.split(";")[0].split(",")[0] in text


def test_a_flag_wins_over_its_variable(monkeypatch):
    monkeypatch.setenv("FLASHPOINT_QUEUE_LIMIT", "7")
    monkeypatch.setenv("FLASHPOINT_LOG_FORMAT", "console")
    settings = Settings(_cli_parse_args=["--queue-limit", "9", "--port=0"])
    assert (settings.queue_limit, settings.log_format, settings.port) == (9, "console", 0)


@pytest.mark.parametrize(
    "flags",
    [
        ["--device", "tpu"],
        ["--body-limit", "0"],
        ["--head-limit", str(1 << 30)],
        ["--body-timeout", "inf"],
        ["--hang-timeout", "1000001"],
        ["--keep-alive", str(1 << 62)],
        ["--max-timeout-ms", str(1 << 62)],
    ],
)
def test_settings_out_of_range_are_refused(flags):
    with pytest.raises(ValueError, match=flags[0][2:].replace("-", "_")):
        Settings(_cli_parse_args=flags)


def test_an_unknown_flag_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        Settings(_cli_parse_args=["--queue", "9"])
    assert caught.value.code == 2
    assert "--queue" in capsys.readouterr().err


def test_health_is_asked_where_the_server_is(server, capsys):
    assert health(["--port", str(server.port)]) == 0
    assert health(["--port", str(server.port), "--host", "0.0.0.0", "--insecure"]) == 0  # as in the image
    assert capsys.readouterr().out == 2 * "alive: /health/live is 200\n"
    assert health(["--port", "0"]) == 2
    assert health(["--queue-limit", "0"]) == 2
    assert "flashpoint health: --queue-limit: " in capsys.readouterr().err
