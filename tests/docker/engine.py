"""Provide a Docker engine for tests: a running one if it is reachable, or a new one, which is removed after the tests.

Base images are pulled from their registry. If that fails, a new engine gets a minimal Debian (by debootstrap) under the
name of the base image, as a stand-in.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {
    "dockerd": "docker.io",
    "iptables": "iptables",
    "debootstrap": "debootstrap",
    "unshare": "util-linux",
    "ip": "iproute2",
}  # program: the Debian package that has it
CLIENT = "/usr/bin:/usr/local/bin:/usr/sbin"  # prefers the distribution's client, whose version fits its engine
START_SECONDS = 60
STOP_SECONDS = 60
KEPT_SECONDS = 7 * 86400  # a cached minimal Debian that is older than this is built again
PULL_SECONDS = 30
INSTALLS = """
apt-get -qq update -o APT::Update::Error-Mode=any
apt-get -qq install --yes --no-install-recommends python3-venv >/dev/null
python3 -m venv /venv
/venv/bin/pip download --quiet --no-deps --dest /tmp h11
"""
# The files by which this machine reaches its package registries. `_debian` copies them into a minimal Debian.
BROUGHT = ("/etc/apt", "/etc/resolv.conf", "/etc/pip.conf", "/etc/ssl", "/usr/local/share/ca-certificates")
SETTINGS = re.compile(r"PIP_|SSL_CERT|REQUESTS_CA|CURL_CA")


class Build(NamedTuple):
    """The seconds of a whole build, and of each instruction whose result was not in the engine's cache."""

    seconds: float
    steps: dict[str, float]


def steps(log: str) -> dict[str, float]:
    """Return the seconds of each Dockerfile instruction, from the log of `docker build --progress=plain`."""
    named = dict(re.findall(r"^#(\d+) \[[^\]]*\d+/\d+\] (.*)$", log, re.MULTILINE))
    took = re.findall(r"^#(\d+) DONE ([\d.]+)s$", log, re.MULTILINE)
    return {" ".join(named[number].split()): float(seconds) for number, seconds in took if number in named}


class UnavailableError(Exception):
    """The error if no engine can be reached or started, or a base image is missing. The message gives the reason."""


class Engine:
    """A Docker engine at the address `host` (None: the client's default). `own`: whether this module started it."""

    def __init__(self, host: str | None, *, own: bool) -> None:
        self.own = own
        client = shutil.which("docker", path=CLIENT)
        if client is None:
            raise UnavailableError("no Docker client: install docker.io")
        self.client = client
        self.environment = {**os.environ, "DOCKER_BUILDKIT": "1", **({"DOCKER_HOST": host} if host else {})}

    def docker(self, *words: object, seconds: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the Docker client with these arguments. Raises RuntimeError with the client's output if it fails."""
        command = [self.client, *map(str, words)]
        run = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        if check and run.returncode:
            raise RuntimeError(f"docker {' '.join(command[1:])}: {run.stdout[-2000:]}{run.stderr[-4000:]}")
        return run

    def build(self, tag: str, *flags: object, context: Path = ROOT, seconds: float = 900) -> Build:
        """Build an image with this tag from the folder `context`; return the durations. Raises as `docker` does."""
        began = time.monotonic()
        run = self.docker("build", "--progress=plain", "-t", tag, *flags, context, seconds=seconds)
        return Build(time.monotonic() - began, steps(run.stderr))

    def check_registries(self, base: str) -> None:
        """Raise UnavailableError if a container of the Debian image `base` cannot install packages with apt and pip."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            run = self.docker("run", "--rm", base, "sh", "-ec", INSTALLS, seconds=120, check=False)
            if run.returncode == 0:
                return
            errors = re.findall(r"^E(?:RROR)?: .*", run.stderr, re.MULTILINE) or [run.stderr[-200:]]
            raise UnavailableError(f"a container cannot install packages: {errors[-1]}")
        raise UnavailableError("a container cannot install packages within 120 s")

    def size(self, image: str) -> int:
        """Return the size of an image in bytes."""
        return int(self.docker("image", "inspect", "-f", "{{.Size}}", image).stdout)

    def layers(self, image: str) -> list[tuple[str, str]]:
        """Return (size, instruction) of each layer of an image that is not empty, in build order."""
        lines = self.docker("history", "--no-trunc", "--format", "{{.Size}}\t{{.CreatedBy}}", image).stdout.splitlines()
        return [(size, by) for size, _, by in (line.partition("\t") for line in reversed(lines)) if size != "0B"]

    def pulls(self, name: str) -> bool:
        """Pull an image. Return False if the pull fails or takes longer than PULL_SECONDS."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.docker("pull", "-q", name, seconds=PULL_SECONDS, check=False).returncode == 0
        return False

    def provide(self, name: str, *, wheels: bool) -> str:
        """Make a base image, or a minimal Debian under its name, available; return where it came from, in words.

        With `wheels`, pip in that Debian also searches a copy of this machine's package folder (PIP_FIND_LINKS).
        Raises UnavailableError if neither is possible.
        """
        if self.docker("image", "inspect", name, check=False).returncode == 0:
            return "there"
        if self.pulls(name):
            return "pulled"
        if not self.own:  # other users of the engine would get the minimal Debian under the image's name
            raise UnavailableError(f"the base image {name} cannot be pulled")
        variables = {key: value for key, value in os.environ.items() if SETTINGS.match(key)}
        if not wheels:
            variables.pop("PIP_FIND_LINKS", None)
        changes = [word for key, value in variables.items() for word in ("--change", f"ENV {key}={value}")]
        with tempfile.TemporaryDirectory() as work:
            root = Path(work) / "root"
            _debian(root, [Path(value) for value in variables.values() if value.startswith("/")])
            with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as archive:
                command = [self.client, "import", *changes, "-", name]
                run = partial(subprocess.run, env=self.environment, stdin=archive.stdout, check=True, timeout=300)
                run(command, stdout=subprocess.DEVNULL)
        return "a minimal Debian by debootstrap"


@contextlib.contextmanager
def engine(size: int = 8 << 30) -> Iterator[Engine]:
    """Yield an engine. Raises UnavailableError if none is reachable and none can be started.

    size: the bytes that the images need. A new engine stores them in memory if twice as much memory is available.
    """
    with contextlib.suppress(UnavailableError, subprocess.TimeoutExpired):
        there = Engine(None, own=False)
        if there.docker("version", seconds=20, check=False).returncode == 0:
            yield there
            return
    missing = [
        package
        for program, package in NEEDED.items()
        if shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin") is None
    ]
    if os.geteuid() != 0 or missing:
        remedy = f"install {', '.join(missing)}" if missing else "run as root"
        raise UnavailableError(f"no Docker engine is reachable, and none can be started: {remedy}")
    in_memory = _available_memory() > 2 * size
    if not in_memory and shutil.disk_usage(tempfile.gettempdir()).free < size:
        raise UnavailableError(f"the images need {size >> 30} GiB in {tempfile.gettempdir()}")
    folder = Path(tempfile.mkdtemp(prefix="flashpoint-docker-"))
    keeper = _start(folder, in_memory=in_memory)
    try:
        yield _when_ready(keeper, folder)
    finally:
        keeper.stdin.close()  # type: ignore[union-attr]  # stdin is a pipe
        keeper.wait(
            2 * STOP_SECONDS
        )  # KEEPER then deletes the folder in the background, because this may take minutes on a disk


# This shell script runs the engine in separate process and mount namespaces. It stops the engine when its standard
# input closes, so nothing outlives a killed test run. The engine has a separate bridge and separate iptables rules:
# otherwise two engines would give containers on docker0 the same addresses and delete each other's rules.
# $1: folder; $2: size of a tmpfs for the data, or empty; $3: bridge; $4: n of 10.n.0.0/16; the rest: dockerd's command.
KEEPER = f"""
folder=$1 size=$2 bridge=$3 network=10.$4.0.0/16 address=10.$4.0.1/24; shift 4
exec 3<&0
rules() {{
  iptables --wait -t nat "-$1" POSTROUTING -s "$network" ! -d "$network" -j MASQUERADE
  iptables --wait "-$1" FORWARD -s "$network" -j ACCEPT
  iptables --wait "-$1" FORWARD -d "$network" -j ACCEPT
}}
ip link add "$bridge" type bridge && ip address add "$address" dev "$bridge" && ip link set "$bridge" up
rules I
unshare --mount --pid --fork --kill-child --mount-proc sh -c '
  if [ -n "$1" ]; then mount -t tmpfs -o "size=$1" tmpfs "$0/data" || exit 1; fi
  shift
  "$@" 3<&- & engine=$!
  (cat <&3 >/dev/null; kill -TERM $engine; sleep {STOP_SECONDS}; kill -KILL $engine) &
  wait $engine' "$folder" "$size" "$@"
rules D
ip link delete "$bridge"
rm -rf "$folder" &
"""


def _start(folder: Path, *, in_memory: bool) -> subprocess.Popen[bytes]:
    (folder / "data").mkdir()
    size = "80%" if in_memory else ""
    bridge, network = f"fp{os.getpid()}", _free_network()
    command = [
        "dockerd", "--data-root", folder / "data", "--exec-root", folder / "exec", "--pidfile", folder / "pid",
        "--host", f"unix://{folder / 'socket'}", f"--mtu={_mtu()}",
        "--iptables=false", f"--bridge={bridge}", f"--default-address-pool=base=10.{network}.128.0/17,size=24",
    ]  # fmt: skip
    environment = {**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            ["sh", "-c", KEEPER, "keeper", folder, size, bridge, str(network), *command],
            stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


def _when_ready(keeper: subprocess.Popen[bytes], folder: Path) -> Engine:
    docker_engine = Engine(f"unix://{folder / 'socket'}", own=True)
    log, end = (folder / "log").open(errors="replace"), time.monotonic() + START_SECONDS
    with log:
        while docker_engine.docker("version", check=False).returncode:
            if keeper.poll() is not None or time.monotonic() > end:
                last = "\n".join(log.read().splitlines()[-5:])
                raise UnavailableError(
                    "dockerd does not start (it needs CAP_SYS_ADMIN, and namespaces, cgroups, overlay, bridges and "
                    f"iptables in the kernel):\n{last}"
                )
            time.sleep(0.2)  # between two polls
    return docker_engine


def _available_memory() -> int:
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(match[1]) * 1024 if match else 0


def _free_network() -> int:
    """Return a random n such that no route of this machine has an address 10.n.x.y."""
    taken = subprocess.run(["ip", "-4", "route", "show", "table", "all"], capture_output=True, text=True, check=True)
    used = {int(n) for n in re.findall(r"\b10\.(\d+)\.", taken.stdout)}
    return random.choice([n for n in range(16, 256) if n not in used])


def _mtu() -> int:
    """Return the smallest MTU of this machine's network interfaces. A larger one in a container loses long packets."""
    mtus = [
        int((one / "mtu").read_text()) for one in Path("/sys/class/net").iterdir() if one.name.startswith(("e", "w"))
    ]
    return min([1500, *mtus])


def _debian(root: Path, brought: Sequence[Path]) -> None:
    """Create a minimal Debian of this machine's release in `root`, with copies of the paths `brought` and `BROUGHT`."""
    release = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())
    if release is None:
        raise UnavailableError("a stand-in for the base images needs a machine with Debian")
    targets = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", f"Codename: {release[1]}"]
    mirror = subprocess.run(targets, capture_output=True, text=True, check=True).stdout.split()[0]
    archive = Path.home() / f".cache/flashpoint/debian-{release[1]}.tar"
    if not archive.exists() or time.time() - archive.stat().st_mtime > KEPT_SECONDS:
        archive.parent.mkdir(parents=True, exist_ok=True)
        command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", release[1], str(root), mirror]
        made = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
        if made.returncode:
            raise UnavailableError(f"debootstrap failed: {made.stdout[-500:]}{made.stderr[-500:]}")
        with tempfile.NamedTemporaryFile(dir=archive.parent, delete=False) as partial_file:
            subprocess.run(
                ["tar", "-C", root, "--exclude=./var/cache/apt/archives/*.deb", "-c", "."],
                stdout=partial_file,
                check=True,
            )
        os.replace(partial_file.name, archive)
        shutil.rmtree(root)
    root.mkdir(parents=True)
    subprocess.run(["tar", "-C", root, "-xf", archive], check=True, timeout=300)
    for path in {*map(Path, BROUGHT), *brought}:
        if path.exists():
            target = root / path.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", "--no-target-directory", path.resolve(), target], check=True)
    # Delete the copied apt sources of repositories other than Debian's.
    for other in (root / "etc/apt/sources.list.d").glob("*"):
        if "debian" not in other.name:
            other.unlink()
