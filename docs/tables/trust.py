"""Tables of the service's reliability, from benchmarks/results: load, hours of use, injected faults, and fuzzing.

They also show how long an installation takes, and the size of the image for GPUs.
"""

from __future__ import annotations

import json
import re

from .markdown import NOT_MEASURED, RESULTS, Result, by_machine, named, results, table, verdicts


@by_machine("load", "python", "torch", "locust")
def load(result: Result) -> str:
    """Return the load test's capacity, its picture of latency against load, and the questions that it answers."""
    image = f"![Latency against the offered rate](images/{result['stem']}.svg)"
    return f": a capacity of {result['capacity']} calls a second.\n\n{image}\n\n{verdicts(result)}"


@by_machine("load", "python", "torch", "locust", name="load-steps")
def load_steps(result: Result) -> str:
    """Return the load test's counts at each step, for each machine."""
    head = ("offered", "answered", "p50_ms", "p95_ms", "p99_ms", "calls", "errors", "generator_busy", "why")
    rows = (
        (f"{step['scenario']}: {step['step']}", *("" if step[name] is None else step[name] for name in head))
        for step in result["steps"]
    )
    return table(["step", *head], rows)


@by_machine("soak", "python", "torch")
def soak(result: Result) -> str:
    """Return the picture of a soak test, and the questions that the test answers."""
    image = f"![Memory, descriptors, threads and latency, minute by minute](images/{result['stem']}.svg)"
    return f"{image}\n\n{verdicts(result)}"


@by_machine("overload", "python", "torch")
def overload(result: Result) -> str:
    """Return the picture of an overload test, and the questions that the test answers."""
    return f"![Calls answered in time against calls offered](images/{result['stem']}.svg)\n\n{verdicts(result)}"


@named
def faults() -> str:
    """Return the numbers of injected faults, calls, right answers and forbidden outcomes, for each machine."""
    rows = []
    for result in results("faults"):
        made, calls = result["runs"][0]["environment"], result["calls"]
        machine = f"{made['device']}, {made['date'][:10]}, `{made['commit'][:10]}`"
        counts = (sum(calls.values()), calls.get("right", 0), len(result["violations"]))
        rows.append((machine, result["injected"], result["rounds"], *(f"{count:,}" for count in counts)))
    head = ("machine", "faults", "rounds", "calls", "right answers", "violations")
    return "\n" + table(head, rows) if rows else NOT_MEASURED


@named
def each_fault() -> str:
    """Return each kind of injected fault, the outcomes of calls from it until the next fault, and the recovery time."""
    text = ""
    for result in results("faults"):
        made = result["runs"][0]["environment"]
        seeds = ", ".join(f"{run['seed']} ({run['workers']})" for run in result["runs"])
        text += (
            f"\n{made['device']}, {made['cores']} cores, shared with other work (load average "
            f"{made['load_average'][0]:.0f} at the start), python {made['python']}, torch {made['torch']}, "
            f"{made['date'][:10]}, commit {made['commit'][:10]}; seeds, and HTTP processes: {seeds}:\n\n"
        )
        rows = []
        for row in result["faults"]:
            others = [f"{n}× {what.removeprefix('refused ')}" for what, n in row["calls"].items() if what != "right"]
            name, right = row["fault"].replace("_", " "), row["calls"].get("right", 0)
            rows.append((name, row["injected"], right, ", ".join(others), row["recovery_median"]))
        head = ("fault", "injected", "right answers", "other outcomes", "all well again, median s")
        text += table(head, rows)
    return text or NOT_MEASURED


@by_machine("install", "python", "torch")
def install(result: Result) -> str:
    """Return the times from the wheel to the first answer, for the server and for the SDK alone."""
    both = result["server"], result["sdk"]
    rows = [
        ("an empty environment, s", *(each["environment_s"] for each in both)),
        ("`pip install`, s", *(each["install_s"] for each in both)),
        ("`flashpoint serve` until it listens, s", result["server"]["listening_s"], "a server that runs"),
        ("a program that asks, s", *(each["call_s"] for each in both)),
        ("all, s", *(each["total_s"] for each in both)),
        ("installed, MB", *(f"{each['installed_mb']:,}" for each in both)),
        ("packages", *(each["packages"] for each in both)),
        ("of them downloaded; the others were on the machine", *(each["downloaded"] for each in both)),
    ]
    sizes = f"the wheel has {result['wheel_mb']} MB, the source distribution {result['sdist_mb']} MB"
    return f"; {sizes}:\n\n" + table(["", "wheel with `[server]`", "wheel alone: the SDK"], rows)


# Groups of packages in the image for GPUs: a regular expression for their names, by their purpose. A package belongs to
# the first group that matches.
PARTS = {
    "torch": r"torch ",
    "Triton, with its compiler and NVIDIA's assembler": r"triton ",
    "cuBLAS and cuDNN, which torch links": r"nvidia-cu(blas|dnn)",
    "cuFFT, cuRAND, cuSOLVER, cuSPARSE and cuSPARSELt, which torch links": r"nvidia-cu(fft|rand|solver|sparse)",
    "NCCL and NVSHMEM, which torch links, for several GPUs": r"nvidia-(nccl|nvshmem)",
    "NVRTC, CUPTI, cuFile, nvJitLink and the runtime, which torch links": r"nvidia-|cuda-",
}


@by_machine("gpu-image")
def gpu_image(result: Result) -> str:
    """Return the sizes of the parts of the image for GPUs, and the steps of its build that took 10 s or more."""
    left, rows = dict(result["packages"]), []
    for part, pattern in PARTS.items():
        own = [name for name in left if re.match(pattern, name)]
        rows.append((part, f"{sum(left.pop(name) for name in own) / 1e9:.2f}"))
    rows += [("the other packages", f"{sum(left.values()) / 1e9:.2f}")]
    compiled, packages = result["compiled"], sum(result["packages"].values())
    kernels = f"{sum(compiled['kernels'].values()):,} kernels, for {len(compiled['kernels'])} architectures"
    rows += [(kernels, f"{compiled['bytes'] / 1e9:.2f}")]
    rows += [("the base, Python and gcc", f"{(result['bytes'] - packages - compiled['bytes']) / 1e9:.2f}")]
    rows += [("**all**", f"**{result['bytes'] / 1e9:.2f}**")]
    torch = next(name for name in result["packages"] if name.startswith("torch "))
    note = f"; {result['note']}" if "note" in result else ""
    slow = [(f"`{step[:100]}`", round(s)) for step, s in result["steps"].items() if s >= 10]
    steps = table(["step of the build", "s"], [*slow, ("the whole run", result["build_s"])])
    return f"; {torch}; base: {result['base']}{note}:\n\n{table(['', 'GB'], rows)}\n{steps}"


@named
def fuzz() -> str:
    """Return a table of the fuzz targets: duration, inputs, failures, slowest input and memory of the runs of each."""
    path = RESULTS / "fuzz.json"
    if not path.exists():
        return NOT_MEASURED
    rows = []
    for name, found in json.loads(path.read_text()).items():
        slowest, peak = found.get("slowest_seconds"), found.get("peak_mib")
        failed = "yes" if found["failed"] else "none"
        cells = (f"`{name}`", found["minutes"], f"{found['executions']:,}", found.get("edges", ""), failed)
        bounds = "" if slowest is None else f"under {slowest + 1} s", "" if peak is None else f"{peak} MiB"
        rows.append((*cells, *bounds, f"{found['date'][:10]}, `{found['commit'][:10]}`"))
    return table(["target", "minutes", "inputs", "branches", "failures", "slowest", "memory", "when, commit"], rows)
