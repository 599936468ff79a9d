"""`make serve` passes the port to the server, and settings in bytes accept a unit, as in 4GiB."""

import os
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from flashpoint_server.config.settings import Settings
from flashpoint_server.config.sources import SettingError, load


@pytest.mark.parametrize(
    ("variables", "arguments", "port"),
    [({}, [], 8000), ({"FLASHPOINT_PORT": "8001"}, [], 8001), ({"FLASHPOINT_PORT": "8001"}, ["PORT=9000"], 9000)],
)
def test_make_serve_passes_port_or_the_variable(variables, arguments, port):
    of_make = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # `make test` sets them, and then an inner make prints more
    environment = {n: value for n, value in os.environ.items() if n not in ("PORT", "FLASHPOINT_PORT", *of_make)}
    command = ["make", "-n", "-o", ".venv/.server", "serve", *arguments]
    said = subprocess.run(
        command, cwd=Path(__file__).parents[3], env=environment | variables, capture_output=True, text=True, check=True
    )
    shown = f"echo 'In another terminal: export FLASHPOINT_URL=http://localhost:{port}'"
    assert said.stdout.splitlines() == [shown, f".venv/bin/flashpoint serve --port {port}"]


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


def test_kernels_that_are_switched_off_must_exist():
    assert Settings(kernels_off=" amx.backward,tiled").kernels_off == ("amx.backward", "tiled")
    with pytest.raises(
        ValidationError, match=r"there is no kernel or backend 'amx.back'; give names among triton, cpu"
    ):
        Settings(kernels_off="amx.back,tiled")
    with pytest.raises(SettingError, match=r"^--kernels-off: there is no kernel or backend 'avx3'; give names among"):
        load({"kernels_off": "avx3"}, environment={})
    with pytest.raises(SettingError, match=r"^FLASHPOINT_KERNELS_OFF: there is no kernel or backend 'avx3'"):
        load({}, environment={"FLASHPOINT_KERNELS_OFF": "avx3"})
