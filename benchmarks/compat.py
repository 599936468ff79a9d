"""Compile and interpret the kernels with other releases of Triton: the oldest supported release, and the newest one.

Each release is installed in a temporary directory, which precedes the environment's packages in the import path. With
each release, some variants of the kernels must compile, and a smoke test under the interpreter must agree with float64.
The exit code is 1 if a variant or a test fails. Register spills are reported, but are not a failure: the tiles are
tuned for the release that constraints.txt pins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# torch 2.11, the oldest torch that pyproject.toml allows, needs this Triton, whose interpreter fails with newer NumPy.
OLDEST = ("triton==3.6.0", "numpy==2.3.5")
NEWEST = ("triton",)
SMOKE = ["tests/kernels/test_triton_hopper.py", "tests/kernels/test_triton_options.py"]
SMOKE += ["-k", "hopper or alone or ragged"]


def main() -> int:
    failed = [packages for packages in (OLDEST, NEWEST) if not works(packages)]
    print(f"does not work: {failed}" if failed else "both work")
    return 1 if failed else 0


def works(packages: tuple[str, ...]) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", directory, *packages], check=True)
        path = os.pathsep.join([directory, str(ROOT / "contract"), str(ROOT / "kernels")])
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        env |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(Path(directory) / "cache")}

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-P", *arguments]
            return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

        version_and_path = run("-c", "import triton; print(triton.__version__, triton.__file__)").stdout.split()
        print(f"triton {version_and_path[0]}", flush=True)
        assert version_and_path[1].startswith(directory), "the environment's own triton would be tested"
        compiled = run("-m", "flashpoint_kernels.triton_backend.tools.aot")
        reports = [json.loads(line) for line in compiled.stdout.splitlines()]
        faults = [
            (f"sm_{report['arch']} {report['kernel']} {report['dtype']} D {report['head_dim']}", fault)
            for report in reports
            for fault in report["faults"]
        ]
        print(f"  {len(reports)} variants compiled", *(f"{what}: {fault}" for what, fault in faults), sep="\n    ")
        if not reports:
            print(compiled.stderr[-3000:])
        # NumPy warns about a conversion in the oldest release's interpreter.
        ignored = ["-W", "ignore:Conversion of an array:DeprecationWarning"]
        smoke = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *ignored, *SMOKE)
        print(f"  {smoke.stdout.strip().splitlines()[-1]}", flush=True)
        if smoke.returncode:
            print(smoke.stdout[-3000:])
        return bool(reports) and all("spill" in fault for _, fault in faults) and smoke.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
