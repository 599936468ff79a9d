"""promtool accepts deploy/prometheus, and each alert fires when it should and at no other time.

A real Prometheus scrapes a real server under load, and then has data for every expression of the Grafana dashboard.
"""

import itertools
import json
import re
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.gated import GatedServer
from tests.support.messages import JSON, PATIENCE, message, normal, post
from tests.support.servers import START_SECONDS, wait_for

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = json.loads((DEPLOY / "grafana/flashpoint.json").read_text())
SCRAPE = "500ms"
WITH_KEYS = {"flashpoint_key_requests_total"}  # has no samples here, because the server has no API keys
WINDOW = "10s"  # replaces Grafana's $__rate_interval; long enough for four scrapes or more

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="needs Prometheus: install Debian's package prometheus (apt-get install prometheus)",
)


def expressions():
    """Yield (panel title, expression as Grafana would send it) for every query of the dashboard."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, value in {"$__rate_interval": WINDOW, "$__range": "1m", "$instance": ".*"}.items():
                expression = expression.replace(name, value)
            assert "$" not in expression, expression
            yield panel["title"], expression


@pytest.mark.parametrize("command", ["check config prometheus.yml", "check rules alerts.yaml"])
def test_promtool_accepts_what_is_deployed(command):
    ran = subprocess.run(["promtool", *command.split()], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_alerts_fire_when_they_should_and_at_no_other_time():
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yaml").read_text())["tests"]
    expected = {test["alertname"]: bool(test.get("exp_alerts")) for group in tests for test in group["alert_rule_test"]}
    rules = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert set(expected) == {rule["alert"] for rule in rules}
    command = ["promtool", "test", "rules", "alerts_test.yaml"]
    ran = subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_variable_and_panel_of_the_dashboard_is_whole():
    """No two panels overlap, and each query uses the dashboard's variable for the data source."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "two panels overlap"
    assert max(x for x, _ in cells) < 24
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "instance"}
    assert all(t["datasource"]["uid"] == "${datasource}" for panel in panels for t in panel.get("targets", []))


class Prometheus:
    """A Prometheus with the deployed configuration, except that it scrapes `server`, at short intervals."""

    def __init__(self, server, folder):
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] = dict.fromkeys(config["global"], SCRAPE)
        config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
        (scrape,) = config["scrape_configs"]
        scrape["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.client = httpx.Client(timeout=PATIENCE)
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stderr=self.log,
        )  # fmt: skip

    def get(self, path, **parameters):
        """Return the data of Prometheus' answer, or None while Prometheus starts."""
        try:
            answer = self.client.get(f"{self.url}/api/v1/{path}", params=parameters)
        except httpx.TransportError:  # not listening yet
            assert self.process.poll() is None, Path(self.log.name).read_text()
            return None
        if answer.status_code == 503:  # listening, but loading its stored data
            return None
        assert answer.json()["status"] == "success", answer.text
        return answer.json()["data"]

    def numbers(self, expression):
        """Return the current values of `expression`, without NaN."""
        data = self.get("query", query=expression)
        return [float(s["value"][1]) for s in data["result"] if s["value"][1] != "NaN"] if data else []

    def stop(self):
        self.process.terminate()
        self.process.wait(START_SECONDS)
        self.client.close()
        self.log.close()


@pytest.fixture(scope="module")
def loaded(start_server, tmp_path_factory):
    """Yield a server to which threads send requests of several kinds until the tests of this module end."""
    settings = {"max_queue_delay": 0.02, "verify_rate": 0.1, "kernels_off": "amx"}  # the last two have metrics, too
    server = GatedServer(start_server, tmp_path_factory.mktemp("gates"), interpret=True, **settings).server
    small = {name: normal(1, 2, 5, 8, seed=seed) for seed, name in enumerate("qkv")}
    longer = {name: normal(1, 2, 9, 8, seed=seed) for seed, name in enumerate("qkv")}
    given = message({**small, "do": small["q"]})
    over = threading.Event()

    def ask(kind):
        while not over.is_set():
            kind()

    def launches():
        post(server, "/attention", message(small, backend="triton"))

    def longer_launches():
        post(server, "/attention", message(longer, backend="triton"))

    def others():
        assert post(server, "/attention/grad", given).status == 200
        assert post(server, "/verify", given).status == 200
        assert post(server, "/attention", message(small, casual=True)).status == 422

    cache = post(server, "/caches", json.dumps({"kv_heads": 2, "head_dim": 8}).encode(), JSON).json["caches"][0]["id"]

    def caches():
        document = json.dumps({"length": 0}).encode()
        assert post(server, f"/caches/{cache}/truncate", document, JSON).status == 200
        document = json.dumps({"length": 1}).encode()  # beyond the end of the cache, so an error
        assert post(server, f"/caches/{cache}/truncate", document, JSON).status == 409

    threads = [threading.Thread(target=ask, args=(kind,)) for kind in (launches, longer_launches, others, caches)]
    for thread in threads:
        thread.start()
    yield server
    over.set()
    for thread in threads:
        thread.join()


@pytest.fixture(scope="module")
def prometheus(loaded, tmp_path_factory):
    prometheus = Prometheus(loaded, tmp_path_factory.mktemp("prometheus"))
    yield prometheus
    prometheus.stop()


@pytest.mark.slow
def test_every_panel_of_the_dashboard_has_something_to_show(prometheus):
    targets = list(expressions())
    assert len(targets) > 20
    missing = {expression: title for title, expression in targets}

    def all_there():
        for expression in list(missing):
            if prometheus.numbers(expression):
                del missing[expression]
        return not missing

    wait_for(all_there, lambda: f"empty: {missing}")


@pytest.mark.slow
def test_the_panels_show_what_was_asked(prometheus):
    by_title = {}
    for title, expression in expressions():
        by_title.setdefault(title, []).append(expression)
    (routes,) = by_title["By route"]

    def labels(expression):
        data = prometheus.get("query", query=expression)
        return {value for series in data["result"] for value in series["metric"].values()} if data else set()

    sent = {"/attention", "/attention/grad", "/verify", "/caches/*/truncate", "other"}
    wait_for(lambda: sent <= labels(routes), lambda: labels(routes))
    (why,) = by_title["Why not answered"]
    wait_for(lambda: "invalid_request" in labels(why), lambda: labels(why))
    (share,) = by_title["Not answered"]
    wait_for(lambda: [n for n in prometheus.numbers(share) if 0 < n < 1], lambda: prometheus.numbers(share))
    (speed, last) = by_title["Speed by backend"]
    assert all(n > 0 for n in prometheus.numbers(speed) + prometheus.numbers(last))
    stages = labels(by_title["Time by stage"][0])
    assert stages == {"decode", "queue", "copy_in", "compute", "copy_out", "encode"}


@pytest.mark.slow
def test_the_alerts_are_evaluated_and_all_is_well(prometheus):
    def evaluated():
        groups = (prometheus.get("rules") or {"groups": []})["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return rules if rules and all(rule["health"] != "unknown" for rule in rules) else None

    rules = wait_for(evaluated, lambda: prometheus.get("rules"))
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    assert {rule["name"] for rule in rules if rule["state"] == "firing"} == set()
    named = set(itertools.chain(*(re.findall(r"flashpoint_\w+", rule["query"]) for rule in rules))) - WITH_KEYS
    wait_for(lambda: named <= set(prometheus.get("label/__name__/values")), lambda: f"not exported: one of {named}")


@pytest.mark.slow
def test_the_dashboards_variable_has_values(prometheus):
    (definition,) = (v["definition"] for v in DASHBOARD["templating"]["list"] if v["name"] == "instance")
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", definition).groups()
    wait_for(lambda: prometheus.get(f"label/{label}/values", **{"match[]": metric}), lambda: metric)
