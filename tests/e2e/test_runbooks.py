"""The procedures of docs/runbooks.md work, as far as they need no systemd, Docker or Kubernetes."""

import configparser
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import flashpoint
from flashpoint._http import exchange
from tests.support.messages import ask, message, normal, post
from tests.support.servers import wait_for

ROOT = Path(__file__).parents[2]
FLASHPOINT = str(Path(sys.executable).parent / "flashpoint")
RUNBOOKS = (ROOT / "docs/runbooks.md").read_text()
UNIT = ROOT / "deploy/systemd/flashpoint.service"
SHAPE = {"kv_heads": 1, "head_dim": 4}


def key(*arguments):
    """Run `flashpoint key`; return the API key that it prints, or "" if it prints none."""
    ran = subprocess.run([FLASHPOINT, "key", *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stdout or re.fullmatch(r"fp_[\w-]{43}\n", ran.stdout)
    return ran.stdout.strip()


@pytest.mark.slow
def test_a_key_is_rotated_without_losing_its_caches(start_server, tmp_path):
    """After the rotation of a key, the new key has the caches of the old one.

    Revoking the name deletes its caches: a later key of the same name does not get them.
    """
    file = str(tmp_path / "keys.toml")
    old, other = key("alice", "--file", file), key("bob", "--file", file)
    server = start_server(api_keys_file=file)

    def reread(*arguments):
        seen = len([line for line in server.lines if line["event"] == "keys loaded"])
        drawn = key(*arguments, "--file", file)
        wait_for(lambda: len([line for line in server.lines if line["event"] == "keys loaded"]) > seen, lambda: file)
        return drawn

    def cache_ids(given):
        """Return the ids of this API key's caches, or the HTTP status if the key is refused."""
        answer = ask(server, "/caches", authorization=f"Bearer {given}")
        return [one["id"] for one in answer.json["caches"]] if answer.status == 200 else answer.status

    with flashpoint.Client(server.url, api_key=old) as client:
        expected = [client.cache(**SHAPE).id]
    new = reread("alice", "--rotate")
    assert cache_ids(new) == cache_ids(old) == expected
    reread("alice", "--retire")
    assert (cache_ids(new), cache_ids(old), cache_ids(other)) == (expected, 401, [])
    reread("alice", "--revoke")
    assert cache_ids(new) == 401
    assert cache_ids(reread("alice")) == []


@pytest.mark.slow
def test_the_unit_of_systemd_starts_reloads_and_stops_the_server(tmp_path):
    """The systemd unit's commands start and reload a server, and SIGTERM stops it. The test needs no systemd."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(UNIT)
    service = unit["Service"]
    keys, config = tmp_path / "keys.toml", tmp_path / "flashpoint.toml"
    key("alice", "--file", str(keys))
    config.write_text(f'port = 0\ndevice = "cpu"\napi_keys_file = "{keys}"\n')
    command = shlex.split(service["ExecStart"])
    assert command[0] == "/opt/flashpoint/bin/flashpoint"
    command = [FLASHPOINT, *command[1:]]
    command[command.index("/etc/flashpoint/flashpoint.toml")] = str(config)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            events = map(json.loads, server.stderr)
            listening = next(line for line in events if line["event"] == "listening")
            next(line for line in events if line["event"] == "ready")
            reload = service["ExecReload"].replace("$MAINPID", str(server.pid))
            subprocess.run(shlex.split(reload), check=True)
            next(line for line in events if line["event"] == "keys loaded")
            assert listening["port"]
        finally:
            os.kill(server.pid, signal.SIGTERM)
            rest = server.stderr.read()
    assert server.returncode == 0, rest
    wrong = subprocess.run([*command[:2], "--port", "x"], capture_output=True)
    assert str(wrong.returncode) == service["RestartPreventExitStatus"]
    shown = subprocess.run([FLASHPOINT, "config"], capture_output=True, text=True, check=True).stdout
    assert float(re.search(r"^shutdown_timeout = ([\d.]+)", shown, re.M)[1]) < float(service["TimeoutStopSec"])


@pytest.mark.parametrize(
    ("retries", "minimum", "maximum"), re.findall(r"^\| (\d+)[^|]*\| ([\d.]+) to ([\d.]+) \|", RUNBOOKS, re.M)
)
def test_the_gap_that_retries_bridge(retries, minimum, maximum):
    longest = [min(exchange.FIRST_DELAY * 2.0**n, exchange.LONGEST_DELAY) for n in range(int(retries))]
    assert sum(longest) == pytest.approx(float(maximum), abs=0.06)
    assert sum(longest) / 2 == pytest.approx(float(minimum), abs=0.06)
    assert all(delay / 2 <= exchange.backoff(n) <= delay for n, delay in enumerate(longest))


def test_a_call_of_a_version_that_the_server_does_not_know_names_what_it_refuses(server):
    """If a newer client sends an option that the server does not know, the error names this option."""
    tensors = {name: normal(2, 3) for name in "qkv"}
    answer = post(server, "/attention", message(tensors, an_option_of_tomorrow=True))
    assert answer.status == 422
    assert "an_option_of_tomorrow" in answer.body.decode()
