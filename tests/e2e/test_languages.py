"""Each client of docs/languages.md works with a real server, and retries after the time in the server's Retry-After.

No test measures time. To test waits, a fake timer of JavaScript or Go records the requested wait and returns at once;
curl prints its wait.
"""

import http.client
import json
import os
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "examples/clients"
PAGE = (ROOT / "docs/languages.md").read_text()

FULL = {"type": "about:blank", "status": 429, "code": "queue_full", "detail": "come again"}


class Front(ThreadingHTTPServer):
    """A proxy for a server. For each value in `refusals`, it answers one request with 429 and this Retry-After.

    It forwards all other requests to the server.
    """

    daemon_threads = True

    def __init__(self, server):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind = server.port
        self.refusals = []
        self.keys = []  # the Authorization header of each request
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.keys.append(self.headers["Authorization"])
        if self.server.refusals:
            after = str(self.server.refusals.pop(0))
            self.answer(429, {"Content-Type": "application/problem+json"}, json.dumps(FULL).encode(), after)
            return
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=600)
        behind.request("POST", self.path, body, {name: self.headers[name] for name in ("Content-Type", "X-Timeout-Ms")})
        response = behind.getresponse()
        self.answer(response.status, {"Content-Type": response.headers["Content-Type"]}, response.read())
        behind.close()

    def answer(self, status, headers, body, after=None):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body)), "Retry-After": after}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def front(server):
    front = Front(server)
    thread = threading.Thread(target=front.serve_forever)
    thread.start()
    yield front
    front.shutdown()
    thread.join()
    front.server_close()


def tool(name, package):
    if (path := shutil.which(name)) is None:
        pytest.skip(f"install Debian's package {package} (apt-get install {package}): there is no {name}")
    return path


@pytest.fixture(scope="module")
def javascript():
    version = subprocess.run([tool("node", "nodejs"), "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").partition(".")[0]) < 20:
        pytest.skip(f"install Node 20 or later (https://nodejs.org): this is {version}")
    return ["node", CLIENTS / "attention.mjs"]


@pytest.fixture(scope="module")
def go(tmp_path_factory):
    program = tmp_path_factory.mktemp("go") / "attention"
    subprocess.run([tool("go", "golang"), "vet", CLIENTS / "attention.go"], check=True)
    subprocess.run(["go", "build", "-o", program, CLIENTS / "attention.go"], check=True)
    return [program]


@pytest.fixture(scope="module")
def curl():
    tool("curl", "curl")
    return ["sh", CLIENTS / "attention.sh"]


@pytest.fixture
def command(request):
    return request.getfixturevalue(request.param)


def run(command, *arguments):
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=600, check=False)


GO = pytest.param("go", id="go", marks=pytest.mark.slow)  # Go compiles slowly without its build cache
# language: (the client whose output docs/languages.md shows, its number of calls). Go prints the lines of JavaScript.
CALLS = {"javascript": ("attention.mjs", 3), "go": ("attention.mjs", 3), "curl": ("attention.sh", 4)}


@pytest.mark.parametrize("command", ["javascript", GO, "curl"], indirect=True)
def test_it_prints_what_the_page_says_and_asks_again(command, front, request):
    file, calls = CALLS[request.node.callspec.id]
    printed = re.search(rf"^```sh\n.* examples/clients/{file}\n```\n\n```text\n([^`]*)```$", PAGE, re.MULTILINE)
    front.refusals = [0]
    ran = run(command, front.url, "a key")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.sub(r'"request_id": "\w+"', '"request_id": "…"', ran.stdout) == printed[1]
    assert front.keys == ["Bearer a key"] * (1 + calls)


@pytest.mark.parametrize("command", ["javascript", GO, "curl"], indirect=True)
def test_without_an_address_it_calls_flashpoint_url(command, server, monkeypatch):
    monkeypatch.setenv("FLASHPOINT_URL", server.url)
    ran = run(command)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "refused: " in ran.stdout


WAITING_JAVASCRIPT = """
import { appendFileSync } from "node:fs";
const wait = globalThis.setTimeout;
globalThis.setTimeout = (done, milliseconds, ...rest) => {
  if (!new Error().stack.includes("attention.mjs")) return wait(done, milliseconds, ...rest);
  appendFileSync(process.env.WAITS, `${milliseconds / 1000}\\n`);
  return wait(done, 0, ...rest);
};
"""
WAITING_GO = """
package main

import (
	"fmt"
	"os"
	"time"
)

func waiting(d time.Duration) <-chan time.Time {
	file, err := os.OpenFile(os.Getenv("WAITS"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	defer file.Close()
	fmt.Fprintln(file, d.Seconds())
	return time.After(0)
}
"""


@pytest.fixture
def waiting_javascript(javascript, tmp_path):
    (tmp_path / "waiting.mjs").write_text(WAITING_JAVASCRIPT)
    return [javascript[0], "--import", (tmp_path / "waiting.mjs").as_uri(), *javascript[1:]]


@pytest.fixture
def waiting_go(go, tmp_path):
    code = (CLIENTS / "attention.go").read_text()
    assert code.count("time.After(") == 1
    (tmp_path / "attention.go").write_text(code.replace("time.After(", "waiting("))
    (tmp_path / "waiting.go").write_text(WAITING_GO)
    command = ["go", "build", "-o", "waiting", "attention.go", "waiting.go"]
    subprocess.run(command, cwd=tmp_path, check=True)
    return [tmp_path / "waiting"]


WAITING = ["waiting_javascript", pytest.param("waiting_go", marks=pytest.mark.slow)]


@pytest.mark.parametrize("command", WAITING, indirect=True)
def test_it_waits_as_long_as_it_is_told_and_gives_up_with_the_problem(command, front, monkeypatch, tmp_path):
    """Each client waits for the longer of Retry-After and its own delay, which doubles at each retry."""
    monkeypatch.setenv("WAITS", str(tmp_path / "waits"))
    front.refusals = [7, 0, 0, 3, 0]
    ran = run(command, front.url)
    assert ran.returncode == 1
    assert "429 queue_full: come again" in ran.stderr
    assert len(front.keys) == 5
    assert [float(wait) for wait in (tmp_path / "waits").read_text().split()] == [7, 0.2, 0.4, 3]


@pytest.mark.slow  # curl waits two seconds
def test_curl_waits_as_long_as_it_is_told(curl, front, monkeypatch, tmp_path):
    talking = tmp_path / "curl"
    talking.write_text(f'#!/bin/sh\nexec {shutil.which("curl")} "$@" --no-silent --no-progress-meter\n')
    talking.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    front.refusals = [2]
    ran = run(curl, front.url)
    assert ran.returncode == 0
    assert "retry in 2" in ran.stderr


def test_javascript_does_not_wait_beyond_its_timeout(javascript, front):
    front.refusals = [86_400]
    program = f"""
        import {{ Flashpoint }} from {json.dumps((CLIENTS / "attention.mjs").as_uri())};
        const one = {{ dtype: "F32", shape: [1, 1], data: new Float32Array(1) }};
        const client = new Flashpoint({json.dumps(front.url)}, {{ timeout: 3600_000 }});
        await client.attention({{ q: one, k: one, v: one }}).catch((problem) => console.log(problem.message));
    """
    ran = run([javascript[0], "--input-type=module", "--eval", program])
    assert (ran.stdout, ran.stderr) == ("429 queue_full: come again\n", "")
    assert len(front.keys) == 1


def test_the_page_links_to_the_files():
    linked = re.findall(r"^(?:The whole client|Its types for TypeScript): \[(\S+)\]\(\.\./\1\)\.", PAGE, re.M)
    assert sorted(linked) == sorted(f"examples/clients/{path.name}" for path in CLIENTS.iterdir())
