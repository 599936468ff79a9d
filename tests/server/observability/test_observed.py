"""/metrics has the versions of the software and the resources of each process."""

import json
import re

from tests.support.messages import JSON, ask, post, read_metrics

AS_JSON = json.dumps({"q": [[1, 0]], "k": [[1, 0]], "v": [[1, 2]]}).encode()


def test_build_info_says_what_info_says(server):
    server.wait_ready()
    text, info = ask(server, "/metrics").body.decode(), server.get("/info")[1]
    (labels,) = re.findall(r"^flashpoint_build_info\{(.*)\} 1\.0$", text, re.MULTILINE)
    said = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    versions = {name: info["versions"][name] for name in ("python", "torch", "triton")}
    device = {"device": info["device"]["name"], "title": info["device"]["title"]}
    assert said == {"version": info["version"], **versions, **device}


def test_each_process_has_its_time_memory_and_descriptors(server):
    assert post(server, "/attention", AS_JSON, JSON).status == 200  # starts the JSON process
    codec = server.json_pid
    metrics = read_metrics(server)
    for name, pid in {"http-0": server.pid, "engine-cpu": server.engine_pid, "json-0": codec}.items():
        assert metrics[f'flashpoint_process_id{{process="{name}"}}'] == pid
        used = {what: metrics[f'process_{what}{{process="{name}"}}'] for what in (
            "cpu_seconds_total", "resident_memory_bytes", "virtual_memory_bytes", "open_fds", "max_fds",
            "start_time_seconds",
        )}  # fmt: skip
        assert all(value > 0 for value in used.values()), used
    engine, own = (metrics[f'process_resident_memory_bytes{{process="{name}"}}'] for name in ("engine-cpu", "http-0"))
    assert engine > own  # the engine has loaded torch
