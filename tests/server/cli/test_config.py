"""`flashpoint config` prints the effective settings and their sources."""

import re

from flashpoint.cli import main
from flashpoint_server.config.sources import load


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
