"""The peers, the servers that throughput.py compares with ours: packages, command, path and format of each.

Each peer runs the operator with one torch thread, which is fastest for small calls and suits parallel calls. FastAPI
also runs with one thread per core, which is faster for sequential large calls. `install` makes a separate environment
for each peer that needs packages, outside the repository.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from forms import LISTS, OIP_BINARY, OIP_JSON, RAW, SAFETENSORS, Case, Form
from serving import START_SECONDS, free_ports, process, until

HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE.parent.parent / "constraints.txt"
ENVIRONMENTS = Path(tempfile.gettempdir()) / "flashpoint-peers"
PYTRITON_SYSTEM = "/usr/bin/python3"
# A peer has started when it answers both calls: it may start the models for forward and gradient one after another.
FIRST_CALLS = (Case(16, False), Case(16, True))


class Peer(NamedTuple):
    """A server. `command` starts Python or a script of the peer's environment.

    In `command` and `variables`, {port}, {port1} and {port2} stand for ports, {here} for this directory, {cores} for
    the number of cores.
    """

    name: str
    command: str
    form: Form = RAW
    path: Callable[[Case], str] = lambda case: "/attn"
    packages: tuple[str, ...] = ()  # the peer's own package first; a peer without packages runs in our environment
    environment: str = ""
    variables: dict[str, str] = {}  # noqa: RUF012
    python: str = sys.executable  # the interpreter that makes the peer's environment


PEERS = (
    Peer("bare asyncio protocol", "python {here}/bare_protocol.py {port}"),
    Peer("bare ASGI", "python {here}/on_uvicorn.py {port} bare 1"),
    Peer("FastAPI, inline", "python {here}/on_uvicorn.py {port} inline 1", SAFETENSORS),
    Peer("FastAPI, inline, a thread a core", "python {here}/on_uvicorn.py {port} inline {cores}", SAFETENSORS),
    Peer("FastAPI, thread pool", "python {here}/on_uvicorn.py {port} pool 1", SAFETENSORS),
    Peer("FastAPI, JSON lists", "python {here}/on_uvicorn.py {port} json 1", LISTS),
    Peer("LitServe", "python {here}/litserve_app.py {port}", packages=("litserve==0.2.19",), environment="litserve"),
    Peer(
        "BentoML", "bentoml serve bento_service:Attention --working-dir {here} --host 127.0.0.1 --port {port}",
        path=lambda case: "/raw/attn", packages=("bentoml==1.4.39",), environment="bentoml",
    ),
    Peer("Ray Serve", "python {here}/ray_app.py {port}", packages=("ray[serve]==2.60.0",), environment="ray"),
    Peer(
        "NVIDIA Triton server", "python {here}/triton_app.py {port} {port1}", OIP_BINARY,
        lambda case: f"/v2/models/attn{'_grad' if case.gradient else ''}/infer",
        ("nvidia-pytriton==0.7.0",), "pytriton",
        # The Python stub of Triton's server was built with an early Python 3.11, and fails with the standard library of
        # a later one: that of 3.11.2 works, that of 3.11.7 does not.
        python=PYTRITON_SYSTEM,
    ),
    Peer(
        "MLServer", "mlserver start {here}/mlserver_model", OIP_JSON, lambda case: "/v2/models/attn/infer",
        ("mlserver==1.7.1", "uvloop==0.21.0"), "mlserver",  # MLServer fails to start with later versions of uvloop
        {
            "MLSERVER_HOST": "127.0.0.1", "MLSERVER_HTTP_PORT": "{port}", "MLSERVER_GRPC_PORT": "{port1}",
            "MLSERVER_METRICS_PORT": "{port2}",
        },
    ),
)  # fmt: skip
INSTALLABLE = tuple(peer.environment for peer in PEERS if peer.packages)


def install(peer: Peer) -> None:
    """Make the peer's environment, unless it exists. Raises CalledProcessError if pip fails."""
    home = ENVIRONMENTS / peer.environment
    made = home / "made"
    wanted = "\n".join((os.path.realpath(peer.python), *peer.packages))  # an interpreter may have several names
    if made.exists() and made.read_text() == wanted:
        return
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    print(f"installing {peer.name} in {home}", flush=True)
    subprocess.run([peer.python, "-P", "-m", "venv", "--clear", str(home)], check=True)
    pip = [str(home / "bin/python"), "-P", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, torch, "numpy", *peer.packages], check=True)
    made.write_text(wanted)


def installed_version(peer: Peer) -> str:
    """Return the installed version of the peer's main package."""
    package = peer.packages[0].partition("==")[0].partition("[")[0]
    code = f"from importlib.metadata import version; print(version({package!r}))"
    command = [str(ENVIRONMENTS / peer.environment / "bin/python"), "-P", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def started(peer: Peer) -> Iterator[int]:
    """Start a peer, and yield its port as soon as it answers. If it does not start, raise RuntimeError with its log."""
    programs = ENVIRONMENTS / peer.environment / "bin" if peer.packages else Path(sys.executable).parent
    ports = free_ports(3)
    words = dict(zip(("port", "port1", "port2"), ports, strict=True)) | {"here": HERE, "cores": os.cpu_count() or 1}
    variables = {name: value.format(**words) for name, value in peer.variables.items()}
    variables |= {"PYTHONPATH": str(HERE), "PATH": f"{programs}:{os.environ['PATH']}"}
    program, *rest = peer.command.format(**words).split()
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        directory = stack.enter_context(tempfile.TemporaryDirectory())  # some peers write files to their folder
        how = {"cwd": directory, "stdout": log, "stderr": log}
        child = stack.enter_context(process([str(programs / program), *rest], variables, **how))
        try:
            until(lambda: answers(peer, ports[0]), child)
        except RuntimeError as error:
            log.seek(0)
            raise RuntimeError(f"{peer.name}: {error}: {log.read().decode(errors='replace')[-3000:]}") from None
        yield ports[0]


def answers(peer: Peer, port: int) -> bool:
    try:
        return all(ask(port, peer.path(case), peer.form, case)[0] == 200 for case in FIRST_CALLS)
    except OSError:
        return False


def ask(port: int, path: str, form: Form, case: Case) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Make one call; return the status, the headers and the body of the answer."""
    headers, body = form.whole(case.tensors)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)) as connection:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
