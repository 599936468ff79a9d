"""Put faults in, one at a time, and see which tests find them: `python -m tests.faults --draw 40 --seed 1`.

`bank/*.toml` has the faults of the kernels, and `service/faults*.toml` those of the server, the client, the contract
and the library: `file`, its text `old`, which occurs once, the text `new` that replaces it, and `seen`, what a user
would see. `service/harmless.toml` has edits that change nothing: the same tests must stay green. A fault meets its own
`tests` first, or those of its module's path, then those that `areas.toml` has for its file. A fault is put into a copy
of the tree; the copy's tests run there, step by step, until one fails. The kernels in C are compiled again where a
fault is in their sources.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 900  # seconds of a step
BANKS = {"kernels": "bank/*.toml", "service": "service/faults*.toml", "harmless": "service/harmless.toml"}


def bank(files: str = "bank/*.toml") -> list[dict]:
    """Return all faults of some files, in the order of their ids."""
    found = [fault for file in HERE.glob(files) for fault in tomllib.loads(file.read_text())["fault"]]
    return sorted(found, key=lambda fault: fault["id"])


def steps_of(fault: dict) -> list[list[str]]:
    """Return the steps of a fault: its own tests or those at its module's path, and those of its file's area."""
    file = fault["file"]
    areas = tomllib.loads((HERE / "areas.toml").read_text())["area"]
    steps = next((area["steps"] for area in areas if file.startswith(tuple(area["files"]))), [])
    package, _, *folders, name = Path(file).parts
    if package == "kernels" and folders and folders[0] not in ("judging", "timing"):
        return steps  # the sweep comes first
    near = (ROOT / "tests" / package / Path(*folders)).glob(f"test_{Path(name).stem.strip('_')}*.py")
    own = fault.get("tests") or sorted(str(path.relative_to(ROOT)) for path in near)
    return [own, *steps] if own else steps


def mistakes(faults: list[dict]) -> list[str]:
    """Return what is wrong with the bank: every fault fits the sources, has tests and an id of its own."""
    wrong = []
    for fault in faults:
        count = (ROOT / fault["file"]).read_text().count(fault["old"])
        if count != 1:
            wrong.append(f"{fault['id']}: its old text occurs {count} times in {fault['file']}; it must occur once")
        if fault["old"] == fault["new"]:
            wrong.append(f"{fault['id']}: changes nothing")
        if not steps_of(fault):
            wrong.append(f"{fault['id']}: areas.toml has no tests for {fault['file']}")
    ids = [fault["id"] for fault in faults]
    return wrong + [f"{name}: occurs twice" for name in set(ids) if ids.count(name) > 1]


def copied(folder: Path) -> Path:
    """Return a copy of the files that git knows, with the compiled kernels and the guarded build's objects."""
    tree = folder / "tree"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in files.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    library = "kernels/flashpoint_kernels/native/libflashpoint.so"
    shutil.copy2(ROOT / library, tree / library)
    guards = (
        ROOT / "build/guards"
    )  # its files are named by the checksums of their sources, so all copies may share them
    guards.mkdir(parents=True, exist_ok=True)
    (tree / "build").mkdir()
    (tree / "build/guards").symlink_to(guards)
    return tree


def compile_kernels(tree: Path, environment: dict[str, str]) -> str:
    """Compile the kernels that are served in the copy, and return the compiler's errors."""
    command = [sys.executable, "kernels/flashpoint_kernels/native/build.py"]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True).stderr


def found_by(tree: Path, fault: dict, steps: int | None) -> dict:
    """Put one fault into the copy, run its steps, take it out, and return who found it in how many seconds."""
    path = tree / fault["file"]
    right = path.read_text()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(tree / name) for name in ("contract", "client", "kernels", "server")),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    in_c, compiled = path.suffix in (".c", ".h"), False
    began, result = time.monotonic(), {"id": fault["id"], "file": fault["file"], "seen": fault["seen"], "by": ""}
    path.write_text(right.replace(fault["old"], fault["new"]))
    try:
        for number, step in enumerate(steps_of(fault)[:steps]):
            if in_c and number:
                compiled = True
                compile_kernels(tree, environment)
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:randomly", *step]
            if in_c and not number:  # the sweep compiles its own library
                command += ["-W", "ignore:libflashpoint.so:RuntimeWarning"]
            command += [] if "-k" in step else ["-m", "not slow and not full and not gpu and not image"]
            try:
                ran = subprocess.run(
                    command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
                )
                output, failed = ran.stdout, ran.returncode == 1 or ran.returncode < 0
                if ran.returncode > 1 and ran.returncode != 5:  # 5: all tests of the step are slow
                    raise SystemExit(f"{fault['id']}: pytest ended with {ran.returncode}\n{ran.stdout}{ran.stderr}")
            except subprocess.TimeoutExpired:
                output, failed = "", True
            if failed:
                named = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                result["by"] = named[1] if named else f"{step[0]}, which crashed, or took over {LIMIT} s"
                break
    finally:
        path.write_text(right)
        if compiled:
            compile_kernels(tree, environment)
    return result | {"seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--draw", type=int, default=0, help="number of faults, drawn at random; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the draw")
    parser.add_argument("--part", default="0/1", help="k/n: the k-th of n parts of the draw, to run beside the others")
    parser.add_argument("--only", default="", help="a regular expression that the ids must match")
    parser.add_argument("--steps", type=int, help="run so many steps of each fault at most")
    parser.add_argument("--bank", choices=[*BANKS], default="kernels", help="whose faults")
    parser.add_argument("--check", action="store_true", help="check that the bank fits the sources, and run nothing")
    parser.add_argument("--json", type=Path, help="write the table to this file, after each fault")
    asked = parser.parse_args()
    faults = bank(BANKS[asked.bank])
    if wrong := mistakes(faults):
        print("\n".join(wrong))
        return 2
    print(f"{len(faults)} faults in the bank, seed {asked.seed}")
    if asked.check:
        return 0
    chosen = [fault for fault in faults if re.search(asked.only, fault["id"])]
    if asked.draw:
        chosen = random.Random(asked.seed).sample(chosen, min(asked.draw, len(chosen)))
    part, parts = map(int, asked.part.split("/"))
    chosen, rows = chosen[part::parts], []
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        for fault in chosen:
            row = found_by(tree, fault, asked.steps)
            rows.append(row)
            equivalent = fault.get("equivalent")
            missed = f"equivalent: {equivalent}" if equivalent else f"NOT FOUND: {row['seen']}"
            print(f"{row['seconds']:7.1f} s  {row['id']:24} {row['by'] or missed}", flush=True)
            found = sum(bool(row["by"]) for row in rows)
            if asked.json:
                table = {"bank": len(faults), "seed": asked.seed, "drawn": len(rows), "found": found, "faults": rows}
                asked.json.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{found} of {len(rows)} found")
    return found < len(rows)


if __name__ == "__main__":
    sys.exit(main())
