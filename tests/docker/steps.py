"""Run a Dockerfile's steps without Docker, each in a clean root, and then its service: `make docker-steps`, as root.

A base image's part is played by a minimal Debian made by debootstrap; a step runs in its stage's root by chroot, as the
stage's user and with its variables. Then the image's command runs as `docker run --read-only` would run it: the root
mounted read-only, with memory where compose.yaml has it. It must pass the health check, answer a request exactly, and
end with 0 on SIGTERM. The machine's access to its package registries (settings of pip and apt, certificates) is
copied.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import flashpoint

ROOT = Path(__file__).resolve().parents[2]
BROUGHT = (
    "/etc/apt",
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/pip.conf",
    "/etc/ssl",
    "/usr/local/share/ca-certificates",
)
SETTINGS = re.compile(r"PIP_|SSL_|REQUESTS_|CURL_")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PORT = 18000
START_SECONDS = 120


@dataclass
class Stage:
    root: Path
    env: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    directory: str = "/"
    said: dict[str, str] = field(default_factory=dict)  # CMD, ENTRYPOINT, HEALTHCHECK …

    def command(self, command: list[str], user: str | None = None) -> list[str]:
        inside = f"cd {self.directory} && exec {shlex.join(command)}"
        return ["chroot", f"--userspec={user or self.user}", str(self.root), "/bin/sh", "-c", inside]

    def run(self, command: list[str], brought: Mapping[str, str]) -> None:
        env = {"PATH": PATH, "HOME": "/root", **brought, **self.env}
        subprocess.run(self.command(command), env=env, check=True)


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """(word, rest) of each instruction, continued lines joined, comments dropped."""
    text = "\n".join(line for line in dockerfile.splitlines() if not line.lstrip().startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.strip().partition(" ") for line in lines) if word]


def expanded(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values[found[1]], text)


def debian(root: Path) -> None:
    """A minimal Debian of this machine's release, from the mirror that this machine's apt uses."""
    release = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())
    assert release
    targets = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", f"Codename: {release[1]}"]
    mirror = subprocess.run(targets, capture_output=True, text=True, check=True).stdout.split()[0]
    command = ["debootstrap", "--variant=minbase", release[1], str(root), mirror]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    settings = [Path(value) for name, value in os.environ.items() if SETTINGS.match(name) and value[:1] == "/"]
    for path in {*map(Path, BROUGHT), *settings, Path.home() / ".config/pip"}:
        if path.exists():
            target = root / path.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", "--no-target-directory", path.resolve(), target], check=True)


def build(work: Path, arguments: Mapping[str, str]) -> Stage:
    """Every stage that the last one needs, each in a root of its own; the last."""
    brought = {name: value for name, value in os.environ.items() if SETTINGS.match(name)}
    known = dict(arguments)
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    needed = True
    for word, rest in instructions((ROOT / "Dockerfile").read_text()):
        if word == "FROM":
            base, _, name = expanded(rest, known).partition(" AS ")
            needed = not name.startswith("base-") or name == f"base-{known['DEVICE']}"
            if not needed:
                continue
            print(f"--- {name} from {base}", flush=True)
            stage = stages[name] = Stage(work / name)
            if base in stages:
                subprocess.run(["cp", "-a", stages[base].root, stage.root], check=True)
                stage.env = dict(stages[base].env)
            else:
                debian(stage.root)
            continue
        if word == "ARG":
            name, _, value = rest.partition("=")
            known.setdefault(name, value)
            if stage:
                stage.env.setdefault(name, known[name])
            continue
        if not needed:
            continue
        assert stage
        print(f"{word} {rest}"[:160], flush=True)
        if word == "RUN":
            stage.run(["/bin/sh", "-c", rest], brought)
        elif word == "ENV":
            for pair in shlex.split(rest):
                name, _, value = pair.partition("=")
                stage.env[name] = known.get(name, expanded(value, {"PATH": PATH, **stage.env}))
        elif word == "WORKDIR":
            stage.directory = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            stage.user = rest
        elif word == "COPY":
            *sources, target = shlex.split(rest)
            origin = ROOT
            if sources[0].startswith("--from="):
                origin = stages[sources.pop(0).removeprefix("--from=")].root
            place = stage.root / os.path.join(stage.directory, target).lstrip("/")
            for source in sources:
                path = origin / source.lstrip("/")
                copied = place / path.name if target.endswith("/") else place
                copied.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", "--no-target-directory", path, copied], check=True)
        else:
            stage.said[word] = rest
    assert stage
    return stage


def serve(stage: Stage) -> None:
    """Raises where the service does not do what the module says."""
    entry, command, check = (_words(stage.said[word]) for word in ("ENTRYPOINT", "CMD", "HEALTHCHECK"))
    env = {**os.environ, "HOME": stage.directory, **stage.env, "FLASHPOINT_PORT": str(PORT)}
    env["FLASHPOINT_HOST"] = "127.0.0.1"
    root = str(stage.root)
    mounts = [
        f"mount --bind {root} {root}",
        f"mount -o remount,ro,bind {root}",
        f"mount -t proc proc {root}/proc",
        f"mount -t tmpfs -o mode=1777 none {root}/tmp",
        f"mount -t tmpfs -o uid=10001,mode=755 none {root}/var/cache/triton",
        f"mount -t tmpfs -o mode=755 none {root}/dev",
        f"mknod -m 666 {root}/dev/null c 1 3",
        f"mknod -m 666 {root}/dev/urandom c 1 9",
        f"exec {shlex.join(stage.command([*entry, *command]))}",
    ]
    process = subprocess.Popen(["unshare", "--mount", "/bin/sh", "-c", " && ".join(mounts)], env=env)
    try:
        with flashpoint.Client(f"http://127.0.0.1:{PORT}") as client:
            deadline = time.monotonic() + START_SECONDS
            while not client.ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("it is not ready")
                time.sleep(0.1)  # between two looks
            q = np.random.default_rng(0).standard_normal((1, 2, 5, 8), np.float32)
            p = np.exp(q.astype(np.float64) @ q.swapaxes(-1, -2) / 8**0.5)
            np.testing.assert_allclose(client.attention(q, q, q), p / p.sum(-1, keepdims=True) @ q, atol=1e-6)
        subprocess.run(stage.command(check), env=env, check=True)
        process.send_signal(signal.SIGTERM)
        if code := process.wait(60):
            raise RuntimeError(f"it ended with {code} on SIGTERM")
    finally:
        process.kill()
        process.wait()


def _words(said: str) -> list[str]:
    """Return the words of an instruction in its JSON form, which may have options before it."""
    words: list[str] = json.loads(said[said.index("[") :])
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="arguments and variables of the build"
    )
    asked = parser.parse_args()
    arguments = {"DEVICE": "gpu", **dict(pair.split("=", 1) for pair in asked.set)}
    with tempfile.TemporaryDirectory() as work:
        stage = build(Path(work), arguments)
        files = sum(1 for path in (stage.root / "opt/flashpoint/compiled").rglob("*.cubin"))
        print(f"{files} kernels are compiled in it", flush=True)
        serve(stage)
    print("it serves, from a read-only root, and ends when it is told to")
    return 0


if __name__ == "__main__":
    sys.exit(main())
