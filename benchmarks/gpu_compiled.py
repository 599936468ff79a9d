"""Compile kernels for a lent GPU here: `make gpu-compiled COMPILED=DIR`, then `make gpu-call COMPILED=DIR` there.

Takes the Triton of the machine with the GPU from the registry (--triton), once for this Python, which compiles, and
once for that machine's (--python), whose library is part of the keys of the cache. Triton finds the kernels there if
its release and its Python are these, and the sources are the same. It has not been tried on a GPU: gpu-call says
which kernels were found.

Writes DIR/part-*.tar.gz: attention and its gradients in 16 bits at D 64 and 128, without options; also with stored dS
and with two sets of descriptors. Takes minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_day import cache, checkout  # noqa: E402
from benchmarks.gpu_serve import PLATFORMS  # noqa: E402

ARGUMENTS = ["--arch", "90", "--dtypes", "float16", "bfloat16", "--levels", "0"]
SWITCHES = ("0", "1")  # of FLASHPOINT_STORE_DS and FLASHPOINT_TWO_SETS
MIB = 40  # a call carries 64 MiB, and the wheels take 14


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--triton", default="3.6.0", help="Triton's release on the machine with the GPU")
    parser.add_argument("--python", default="3.12", help="the Python of that machine")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here, there = (wheel(args.triton, python, folder / python) for python in (_own(), args.python))
        dims = ["--head-dims", *map(str, args.head_dims), "--processes", str(args.processes)]
        command = ["-m", "flashpoint_kernels.triton_backend.tools.ahead", *ARGUMENTS, *dims]
        library = ["--library", str(there / "triton" / "_C" / "libtriton.so")]
        paths = {
            "PYTHONPATH": os.pathsep.join([str(here), checkout.python_path()]),
            "TRITON_CACHE_DIR": f"{name}/cache",
        }
        clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | paths
        for on in SWITCHES:
            switched = clean | {"FLASHPOINT_STORE_DS": on, "FLASHPOINT_TWO_SETS": on}
            subprocess.run([sys.executable, "-P", *command, *library], env=switched, cwd=ROOT, check=True)
        packed, left = cache.pack(folder / "cache", args.out, MIB)
    size = sum(path.stat().st_size for path in args.out.glob("part-*"))
    print(f"{args.out}: {packed} compiled kernels, {size / 2**20:.1f} MiB; {left} left out")
    return 0


def wheel(release: str, python: str, folder: Path) -> Path:
    """Download Triton's wheel for a version of Python, unpack it into `folder`, and return the folder."""
    pip = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    platforms = [part for platform in PLATFORMS for part in ("--platform", platform)]
    only = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    subprocess.run([*pip, *only, *platforms, "-d", str(folder), f"triton=={release}"], check=True)
    (found,) = folder.glob("triton-*.whl")
    with zipfile.ZipFile(found) as archive:
        for member in archive.infolist():
            path = archive.extract(member, folder)
            os.chmod(path, (member.external_attr >> 16) & 0o777 or 0o644)  # ptxas and its kin are programs
    found.unlink()
    return folder


def _own() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


if __name__ == "__main__":
    sys.exit(main())
