"""The clients of docs/languages.md: each runs against a real server, asks again when told to, and is as shown there."""

import http.client
import json
import re
import shutil
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "examples/clients"
PAGE = (ROOT / "docs/languages.md").read_text()

FULL = {"type": "about:blank", "status": 429, "code": "queue_full", "detail": "come again"}


class Front(ThreadingHTTPServer):
    """Stands before a server, as full as it is told to be: `full` requests are asked to come again after a second."""

    daemon_threads = True

    def __init__(self, server):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind = server.port
        self.full = 0
        self.after = "1"
        self.seen = []  # when, and with which key
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((time.monotonic(), self.headers["Authorization"]))
        if self.server.full:
            self.server.full -= 1
            self.answer(429, {"Content-Type": "application/problem+json"}, json.dumps(FULL).encode(), self.server.after)
            return
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
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


def tool(name):
    if (path := shutil.which(name)) is None:
        pytest.skip(f"{name} is not on this machine")
    return path


@pytest.fixture(scope="module")
def javascript():
    version = subprocess.run([tool("node"), "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").partition(".")[0]) < 20:
        pytest.skip(f"Node {version} is older than 20")
    return ["node", CLIENTS / "attention.mjs"]


@pytest.fixture(scope="module")
def go(tmp_path_factory):
    program = tmp_path_factory.mktemp("go") / "attention"
    subprocess.run([tool("go"), "vet", CLIENTS / "attention.go"], check=True)
    subprocess.run(["go", "build", "-o", program, CLIENTS / "attention.go"], check=True)
    return [program]


@pytest.fixture(scope="module")
def curl():
    tool("curl")
    return ["sh", CLIENTS / "attention.sh"]


@pytest.fixture
def command(request):
    return request.getfixturevalue(request.param)


def run(command, *arguments):
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=False)


CALLS = {"javascript": ("attention.mjs", 3), "go": ("attention.go", 3), "curl": ("attention.sh", 4)}


@pytest.mark.parametrize("command", CALLS, indirect=True)
def test_it_prints_what_the_page_says_and_asks_again(command, front, request):
    file, calls = CALLS[request.node.callspec.id]
    printed = re.search(rf"^```sh\n.* examples/clients/{file} .*\n```\n\n```text\n([^`]*)```$", PAGE, re.MULTILINE)
    front.full = 1
    ran = run(command, front.url, "a key")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.sub(r'"request_id": "\w+"', '"request_id": "…"', ran.stdout) == printed[1]
    first, again, *_ = [when for when, _ in front.seen]
    assert again - first >= 1  # Retry-After
    assert [key for _, key in front.seen] == ["Bearer a key"] * (1 + calls)


@pytest.mark.parametrize("command", ["javascript", "go"], indirect=True)
def test_it_gives_up_with_the_problem(command, front):
    front.full, front.after = 99, "0"
    ran = run(command, front.url)
    assert ran.returncode == 1
    assert "429 queue_full: come again" in ran.stderr
    assert len(front.seen) == 5


def test_javascript_waits_no_longer_than_its_timeout(javascript, front):
    front.full, front.after = 99, "60"
    program = f"""
        import {{ Flashpoint }} from {json.dumps((CLIENTS / "attention.mjs").as_uri())};
        const one = {{ dtype: "F32", shape: [1, 1], data: new Float32Array(1) }};
        const client = new Flashpoint({json.dumps(front.url)}, {{ timeout: 5000 }});
        await client.attention({{ q: one, k: one, v: one }}).catch((problem) => console.log(problem.message));
    """
    begun = time.monotonic()
    ran = run([javascript[0], "--input-type=module", "--eval", program])
    assert (ran.stdout, ran.stderr) == ("429 queue_full: come again\n", "")
    assert time.monotonic() - begun < 50  # of the 60 that it is asked to wait
    assert len(front.seen) == 1


def test_the_page_shows_the_files():
    shown = dict(re.findall(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", PAGE, re.M | re.S))
    assert shown == {f"examples/clients/{path.name}": path.read_text() for path in CLIENTS.iterdir()}
