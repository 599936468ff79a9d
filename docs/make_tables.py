"""Fill the tables of the documentation from the code and from what was measured, so that neither drifts from the other.

`python docs/make_tables.py` writes them between their marks, `<!-- table: NAME -->` and `<!-- end -->`, and the
settings of the Helm chart into its schema; with `--check` it writes nothing and exits with 1 where a page is not as it
would write it (`make lint`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

from flashpoint.benchmark_schema import BenchmarkJob
from flashpoint.commands.tables import columns, number, problem
from flashpoint.options import AttentionOptions
from flashpoint_kernels.spec import BACKENDS
from flashpoint_kernels.support import FEATURE_FIELDS, SUPPORT
from flashpoint_kernels.timing.account import ALGORITHMS
from flashpoint_kernels.timing.sheets import SHEETS
from flashpoint_kernels.triton_backend.configurations import TABLES as TILES
from flashpoint_server.grpc.statuses import STATUSES
from flashpoint_server.metrics import Metrics
from flashpoint_server.refusal import STATUS, Refusal
from flashpoint_server.settings import Settings

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
CHART_SCHEMA = DOCS.parent / "deploy/helm/flashpoint/values.schema.json"
# What the chart decides itself, files that it does not mount, and shared memory, which ends with a pod.
NOT_OF_THE_CHART = {
    "port",
    "device",
    "api_keys",
    "api_keys_file",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "shared_memory_bytes",
}
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

WHEN = {
    "malformed_body": "the body cannot be parsed: bad JSON, a bad safetensors head, offsets that overlap or overrun, "
    "fewer or more bytes than the head says",
    "malformed_head": "the request is not HTTP/1.1",
    "unauthorized": "no key, or one that is not known",
    "forbidden": "the key has not that right",
    "not_found": "no such address",
    "method_not_allowed": "the address has other methods; `Allow` names them",
    "not_acceptable": "`Accept` takes neither encoding",
    "body_timeout": "the body came too slowly",
    "body_too_large": "the body is over its limit, by its length, by its head, or as it streams",
    "work_too_large": "the work could never fit: the device's memory, the limit of sequences, a JSON answer's limit, "
    "a verification's",
    "unsupported_media_type": "the body has another type than the two, or a content coding",
    "invalid_request": "well-formed, but not valid: names, shapes, dtypes, values of options and of headers; `errors` "
    "names each field",
    "queue_full": "as many requests, bytes, FLOPs or benchmarks are inside as may be",
    "key_limit": "over the limits of the key; `Retry-After` says when it may again, at least after",
    "head_too_large": "the request's line and fields are over 64 KiB, or the fields over 128",
    "internal_error": "our bug, logged with the request's id",
    "not_ready": "the server is starting, or its engine starts again",
    "draining": "the server is shutting down",
    "out_of_memory": "the device ran out of memory for this request",
    "engine_lost": "the engine died while this request ran; another is started",
    "deadline_exceeded": "the deadline of `X-Timeout-Ms` passed",
}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def extremes() -> str:
    """What the tests hold each backend to where inputs are at the edges of floating point."""
    sys.path.append(str(DOCS.parent))
    from tests.kernels.extremes import ANSWERS, CASES, HALF, WORDS

    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for case in CASES.values():
        value = case.value + (" (float16, bfloat16)" if case.dtypes == HALF else "")
        if value in ("+∞", "−∞"):  # in one row where they are answered alike
            other = CASES[f"{'−∞' if value == '+∞' else '+∞'} in {case.place}"]
            if other.answers == case.answers:
                if value == "−∞":
                    continue
                value = "±∞"
        merged.setdefault((value, case.answers), []).append(f"`{case.place}`")
    rows = []
    for (value, answers), places in merged.items():
        words = [WORDS[word] for word in answers]
        rows.append((value, " or ".join(places), *words))
    return table(["", "in", *(f"`{name}`" for name in ANSWERS)], rows)


def fuzz() -> str:
    """What each fuzzer has run."""
    path = RESULTS / "fuzz.json"
    if not path.exists():
        return "\nnot measured\n"
    rows = []
    for name, found in json.loads(path.read_text()).items():
        slowest, peak = found.get("slowest_seconds"), found.get("peak_mib")
        failed = "yes" if found["failed"] else "none"
        cells = (f"`{name}`", found["minutes"], f"{found['executions']:,}", found.get("edges", ""), failed)
        bounds = "" if slowest is None else f"under {slowest + 1} s", "" if peak is None else f"{peak} MiB"
        rows.append((*cells, *bounds, f"{found['date'][:10]}, `{found['commit'][:10]}`"))
    return table(["target", "minutes", "inputs", "branches", "failures", "slowest", "memory", "when, commit"], rows)


def errors() -> str:
    """Every code that the server has, in the order of the statuses."""
    rows = []
    for code, status in STATUS.items():
        wait = Refusal(code, "").headers.get("Retry-After")
        rows.append((status, f"`{code}`", WHEN[code], f"{wait} s" if wait else ""))
    return table(["status", "code", "when", "`Retry-After`"], rows)


def options() -> str:
    def values(schema: dict[str, Any]) -> str:
        variants = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
        of = variants[0].get("items", variants[0])
        words = ", ".join(f"`{word}`" for word in of["enum"]) if "enum" in of else str(variants[0]["type"])
        return f"list of {words}" if variants[0] is not of else words

    properties = AttentionOptions.model_json_schema()["properties"]
    rows = []
    for name, schema in properties.items():
        default = schema.get("default")
        rows.append((f"`{name}`", values(schema), f"`{json.dumps(default)}`", schema["description"]))
    return table(["option", "values", "default", "meaning"], rows)


def settings() -> str:
    rows = []
    for name, field in Settings.model_fields.items():
        default = field.default if field.default not in ((), None) else "none"
        rows.append(
            (f"`--{name.replace('_', '-')}`", f"`FLASHPOINT_{name.upper()}`", f"`{default}`", field.description)
        )
    return table(["flag", "variable", "default", "meaning"], rows)


def metrics() -> str:
    """Every metric that /metrics has, by the name that Prometheus shows."""
    rows = []
    for family in Metrics().families():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append((f"`{name}`", family.type, family.documentation))
    return table(["metric", "type", "what"], rows)


def support() -> str:
    """A row a feature, those that every backend has first; a column a backend."""
    rows = []
    for feature in set().union(*SUPPORT.values()):
        field, what = FEATURE_FIELDS.get(feature, (feature, feature))
        name = f"`{field}`" if field == what else f"`{field}`: {what}"
        rows.append((name, *("yes" if feature in SUPPORT[backend] else "–" for backend in BACKENDS)))
    return table(["", *BACKENDS], sorted(rows, key=lambda row: (row.count("–"), row)))


def compiled(arch: int) -> str:
    """A row a variant, a column a kernel; float32 in IEEE precision, at level 0. `benchmarks/results/` has all."""
    result = json.loads((RESULTS / f"compile-sm{arch}.json").read_text())
    kernels = {(k["dtype"], k["level"], k["head_dim"], k["kernel"]): k for k in result["kernels"]
               if k["precision"] == "ieee"}  # fmt: skip
    names = ("forward", "backward_kv", "backward_q")
    variants = [("bfloat16", level, str(level), names) for level in (0, 1, 2)] + [("float32", 0, "0", names)]
    if ("bfloat16", 0, 64, "forward_hopper") in kernels:
        variants.insert(1, ("bfloat16", 0, "0, Hopper", ("forward_hopper", "backward_kv", "backward_q_hopper")))
    rows = [
        (dtype, shown, dim, *(_variant(kernels[dtype, level, dim, kernel]) for kernel in of))
        for (dtype, level, shown, of), dim in product(variants, (64, 128, 256))
        if (dtype, level, dim, "forward") in kernels
    ]
    instructions = sorted({i for k in result["kernels"] for i in k["matrix_instructions"]})
    made = f"triton {result['triton']}, {result['date'][:10]}, commit {result['commit'][:10]}"
    said = f"\nsm_{arch}, {', '.join(f'`{i}`' for i in instructions)}; {len(result['kernels'])} variants; {made}:\n\n"
    return said + table(["dtype", "level", "D", *(f"`{name}`" for name in names)], rows)


def serving(what: str) -> str:
    """What the service was to reach, what it reached, and from what; a table of each for each machine."""
    text = ""
    for path in sorted(RESULTS.glob(f"{what}-*.json")):
        result = json.loads(path.read_text())
        made = result["environment"]
        load = made["load_average"][0]
        text += (
            f"\n{made['device']}, {made['cores']} cores, load average {load} at the start, python {made['python']}, "
            f"torch {made['torch']}, uvicorn {made['uvicorn']}, {made['date'][:10]}, commit {made['commit'][:10]}:\n\n"
        )
        rows = [(name, rate, "MiB/s") for name, rate in result.get("mib_per_second", {}).items()]
        rows += [(name, time, "µs") for name, time in result["median_microseconds"].items()]
        rows += [
            (f"resident, {process} process, {when}", size, "MiB")
            for when, sizes in result.get("resident_mib", {}).items()
            for process, size in sizes.items()
        ]
        text += targets(result) + "\n" + table(["", "median", "unit"], rows)
    return text


def targets(result: dict[str, Any]) -> str:
    """What was to be reached, and what was."""
    rows = []
    for row in result["targets"]:
        bound = f"at least {row['at_least']:.4g}" if "at_least" in row else f"at most {row['at_most']:.4g}"
        rows.append((row["what"], f"{row['value']} {row['unit']}", bound, "yes" if row["met"] else "no"))
    return table(["", "measured", "wanted", "met"], rows)


def grpc() -> str:
    """The status of every refusal, by its codes."""
    codes: dict[str, list[str]] = {}
    for code in STATUS:
        codes.setdefault(STATUSES[code], []).append(f"`{code}`")
    return table(["status", "code over HTTP"], [(f"`{status}`", ", ".join(found)) for status, found in codes.items()])


def rpc() -> str:
    """Calls over gRPC beside calls over HTTP, by what they carry."""
    text = ""
    for path in sorted(RESULTS.glob("rpc-*.json")):
        result = json.loads(path.read_text())
        made = result["environment"]
        text += (
            f"\n{made['device']}, {made['cores']} cores, load average {made['load_average'][0]} at the start, "
            f"python {made['python']}, grpcio {made['grpcio']}, {made['date'][:10]}, commit {made['commit'][:10]}:\n\n"
        )
        rows = []
        for row in result["medians"]:
            size = row["bytes"]
            carried = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
            times = row["http_microseconds"], row["grpc_microseconds"]
            rows.append((f"{carried} {row['way']}", *times, f"{times[1] / times[0]:.1f}"))
        text += table(["carried", "HTTP, µs", "gRPC, µs", "ratio"], rows)
    return text or "\nnot measured\n"


def throughput() -> str:
    """The service beside its peers: targets, requests a second of each at each case, and requests of many lengths."""
    text = ""
    for path in sorted(RESULTS.glob("throughput-*.json")):
        result = json.loads(path.read_text())
        made, cases = result["environment"], result["cases"]
        versions = {name: made[name] for name in ("python", "torch", "fastapi", "uvicorn")} | made["peers"]
        counts = [(case["thrown_away"], case["rounds"] + case["thrown_away"]) for case in cases.values()]
        thrown = ", ".join(f"{count} of {of}" for count, of in counts)
        text += (
            f"\n{made['device']}, {made['cores']} cores, load average {made['load_average'][0]} at the start, "
            f"{', '.join(f'{name} {version}' for name, version in versions.items())}; "
            f"{made['date'][:10]}, commit {made['commit'][:10]}. Rounds thrown away, by case: {thrown}.\n\n"
        )
        rows = [(way, *(_rate(case["ways"][way]) for case in cases.values())) for way in _ways(cases)]
        many = [
            (
                lengths,
                f"{m['saturated_rps']:.1f}",
                f"{m['latency_ms_p50']:.0f} / {m['latency_ms_p99']:.0f}",
                f"{m['latency_p99_over_p50']:.1f}",
                f"{m['alone_ms_p50']:.0f} / {m['alone_ms_p99']:.0f}",
                f"{m['alone_p99_over_p50']:.1f}",
                f"{m['slowdown_p50']:.1f} / {m['slowdown_p99']:.1f}",
            )
            for lengths, m in result["mixed"].items()
            if m["repetitions"]
        ]
        head = ("lengths", "saturated, 1/s", "p50 / p99, ms", "ratio", "alone, ms", "ratio", "slowdown, p50 / p99")
        text += targets(result) + "\n" + table(["requests a second", *cases], rows) + "\n" + table(head, many)
    return text or "\nnot measured\n"


def load() -> str:
    """What the load test asked, and what it counted at each step, for each machine, with its curve."""
    text = ""
    for path in sorted(RESULTS.glob("load-*.json")):
        result = json.loads(path.read_text())
        made = result["environment"]
        text += (
            f"\n{made['device']}, {made['cores']} cores, load average {made['load_average'][0]:.2f} at the start, "
            f"python {made['python']}, torch {made['torch']}, locust {made['locust']}, {made['date'][:10]}, "
            f"commit {made['commit'][:10]}: a capacity of {result['capacity']} calls a second.\n\n"
            f"![Latency against the offered rate](images/{path.stem}.svg)\n\n"
        )
        said = ((v["question"], v["found"], v["wanted"], "yes" if v["met"] else "no") for v in result["verdicts"])
        head = ("offered", "answered", "p50_ms", "p95_ms", "p99_ms", "calls", "errors", "generator_busy", "why")
        rows = (
            (f"{step['scenario']}: {step['step']}", *("" if step[name] is None else step[name] for name in head))
            for step in result["steps"]
        )
        text += table(["question", "found", "wanted", "met"], said) + "\n" + table(["step", *head], rows)
    return text or "\nnot measured\n"


def faults() -> str:
    """What was injected, what callers got while each fault was the last one, and how soon all was well again."""
    text = ""
    for path in sorted(RESULTS.glob("faults-*.json")):
        result = json.loads(path.read_text())
        made = result["runs"][0]["environment"]
        seeds = ", ".join(f"{run['seed']} ({run['workers']})" for run in result["runs"])
        text += (
            f"\n{made['device']}, {made['cores']} cores, which others used too (load average "
            f"{made['load_average'][0]:.0f} at the start), python {made['python']}, torch {made['torch']}, "
            f"{made['date'][:10]}, commit {made['commit'][:10]}; seeds, and HTTP processes: {seeds}. "
            f"{result['injected']} faults in {result['rounds']} rounds, {sum(result['calls'].values())} calls, "
            f"{len(result['violations'])} violations.\n\n"
        )
        rows = []
        for row in result["faults"]:
            others = [f"{n}× {what.removeprefix('refused ')}" for what, n in row["calls"].items() if what != "right"]
            name, right = row["fault"].replace("_", " "), row["calls"].get("right", 0)
            rows.append((name, row["injected"], right, ", ".join(others), row["recovery_median"]))
        head = ("fault", "injected", "right answers", "other outcomes", "all well again, median s")
        text += table(head, rows)
    return text or "\nnot measured\n"


def steady(what: str) -> str:
    """What was asked of a soak or an overload, and its picture."""
    text = ""
    for path in sorted(RESULTS.glob(f"{what}-*.json")):
        result = json.loads(path.read_text())
        made = result["environment"]
        text += (
            f"\n{made['device']}, {made['cores']} cores, load average {made['load_average'][0]:.2f} at the start, "
            f"python {made['python']}, torch {made['torch']}, {made['date'][:10]}, commit {made['commit'][:10]}:\n\n"
            f"![{what}](images/{path.stem}.svg)\n\n"
        )
        said = ((v["question"], v["found"], v["wanted"], "yes" if v["met"] else "no") for v in result["verdicts"])
        text += table(["question", "found", "wanted", "met"], said)
    return text or "\nnot measured\n"


def _ways(cases: dict[str, Any]) -> list[str]:
    """The fastest at the first case first, those without a figure there last."""
    ways = next(iter(cases.values()))["ways"]
    return sorted(ways, key=lambda way: -ways[way]["rps"] if isinstance(ways[way], dict) else 0.0)


def _rate(figures: dict[str, float] | str) -> str:
    return figures if isinstance(figures, str) else number(figures["rps"])


def beside() -> str:
    """A benchmark beside traffic: what was to hold, requests' latencies, and each row's milliseconds."""
    text = ""
    for path in sorted(RESULTS.glob("beside-*.json")):
        result = json.loads(path.read_text())
        made, latency = result["environment"], result["latency_ms"]
        text += (
            f"\n{made['device']}, {made['cores']} cores, load average {made['load_average'][0]} at the start, "
            f"{made['date'][:10]}, commit {made['commit'][:10]}; {result['requests_a_second']:g} requests a second, "
            f"p50 / p99 {latency['alone']['p50']} / {latency['alone']['p99']} ms alone, {latency['beside']['p50']} / "
            f"{latency['beside']['p99']} ms beside a benchmark:\n\n"
        )
        rows = [(r["backend"], r["q_len"], number(r["alone_ms"]), number(r["beside_ms"])) for r in result["rows"]]
        text += targets(result) + "\n" + table(["backend", "length", "alone, ms", "beside traffic, ms"], rows)
    return text or "\nnot measured\n"


def ray() -> str:
    """Milliseconds of a call by its direction and size, by what it passes on its way; a table for each machine."""
    text = ""
    for path in sorted(RESULTS.glob("ray-*.json")):
        result = json.loads(path.read_text())
        made, found = result["environment"], result["median_milliseconds"]
        text += (
            f"\n{made['device']}, {made['cores']} cores, load average {made['load_average'][0]} at the start, "
            f"python {made['python']}, ray {made['ray']}, uvicorn {made['uvicorn']}, {made['date'][:10]}, "
            f"commit {made['commit'][:10]}:\n\n"
        )
        ways = list(next(iter(found.values())))
        text += table(["", *ways], ((what, *(ms[way] for way in ways)) for what, ms in found.items()))
    return text or "\nnot measured\n"


def each_option() -> str:
    """Each option beside the formula written out, and torch's own operator beside ours."""
    text = ""
    for path in sorted(RESULTS.glob("options-*.json")):
        result = json.loads(path.read_text())
        made = result["environment"]
        text += (
            f"\n{made['device']}, {made['cores']} cores, load average {made['load_average'][0]} at the start, "
            f"torch {made['torch']}, {made['date'][:10]}, commit {made['commit'][:10]}:\n\n"
        )
        rows = [
            (r["option"], r["pass"], number(r["ms"]), number(r["other_ms"]), number(r["times"]), number(r["memory"]))
            for r in result["rows"]
        ]
        head = ["option", "pass", "ms", "written out, ms", "times faster", "memory / its"]
        fused = [
            (r["length"], "yes" if r["causal"] else "no", *map(number, (r["ms"], r["other_ms"], 1 / r["times"])))
            for r in result["fused"]
        ]
        text += targets(result) + "\n" + table(head, rows)
        text += "\n" + table(["N", "causal", "auto, ms", "torch's operator, ms", "time / its"], fused)
    return text or "\nnot measured\n"


def capacity() -> str:
    """What the calculator predicted of calls, and what they took."""
    text = ""
    for path in sorted(RESULTS.glob("capacity-*.json")):
        result = json.loads(path.read_text())
        made = result["environment"]
        rates = {name: number(value / 1e9) for name, value in result["rates"].items() if value and value > 1e6}
        text += (
            f"\n{made['device']}, {made['cores']} cores, load average {made['load_average'][0]} at the start, torch "
            f"{made['torch']}, {made['date'][:10]}, commit {made['commit'][:10]}; {result['rounds']} rounds. Rates: a "
            f"call {result['rates']['call'] * 1e3:.2f} ms, upload {rates['upload']} GB/s, download {rates['download']} "
            f"GB/s, forward {rates['flops']} GFLOP/s, gradient {rates['grad_flops']} GFLOP/s, keys read at "
            f"{rates['memory']} GB/s.\n\n![Predicted and measured](images/{path.stem}.svg)\n\n"
        )
        head = ("", "predicted, ms", "measured, ms", "ratio", "predicted, requests a second", "measured", "ratio")
        names = ("predicted_ms", "measured_ms", "ratio", "predicted_rps", "measured_rps", "rps_ratio")
        text += table(head, [(row["case"], *(number(row[name]) for name in names)) for row in result["cases"]])
    return text or "\nnot measured\n"


def algorithms() -> str:
    """What each algorithm does, and how much of it."""
    rows = []
    for name, a in ALGORITHMS.items():
        flops = f"{2 * (a.d_products + a.dv_products)}·P·D"
        pairs = "seen" if a.skips_hidden else "all"
        causal = f", causal {a.matrix_passes + a.causal_passes}" if a.causal_passes else ""
        moves = " ".join(tensor if times == 1 else f"{times}·{tensor}" for tensor, times in Counter(a.tensors).items())
        products = (a.d_products, a.dv_products, flops, pairs)
        rows.append((f"`{name}`", a.does, *products, f"{a.matrix_passes}{causal}", moves))
    counts = ("products over D", "over Dv", "FLOPs, D = Dv", "pairs", "passes over Sq × Sk", "moves")
    return table(["", "does", *counts], rows)


def data_sheets() -> str:
    head = ["GPU", "16-bit TFLOP/s, dense", "float32 TFLOP/s", "GB/s", "source"]
    return table(head, [(name, *sheet) for name, sheet in SHEETS.items()])


def benchmarks() -> str:
    """Of each machine what `flashpoint benchmark --json` wrote: a table a problem, a row a backend."""
    text = ""
    for path in sorted(RESULTS.glob("benchmark-*.json")):
        job = BenchmarkJob.model_validate_json(path.read_text())
        made = job.environment
        cores = f"{made['cores']} cores" if "cores" in made else f"{made['multiprocessors']} multiprocessors"
        peaks = [f"{dtype} {number(p['tflops'])} TFLOP/s" for dtype, p in made["peaks"].items()]
        copied = next(iter(made["peaks"].values()))["gb_per_s"]
        text += (
            f"\n{job.device}, {cores}, load average {made['load_average'][0]} at the start, python {made['python']}, "
            f"torch {made['torch']}, triton {made['triton']}, {job.created:%Y-%m-%d}, commit {made['commit'][:10]}. "
            f"Its peaks: {', '.join(peaks)}, copying {number(copied)} GB/s.\n"
        )
        for title, group in groupby(job.rows, key=problem):
            rows = [row for row in group if row.skipped is None]
            shown = columns(rows, wide=True)
            text += f"\n{title}\n\n"
            text += table(["", *shown], ([row.backend, *(write(row) for write in shown.values())] for row in rows))
    return text or "\nnot measured\n"


def _variant(kernel: dict[str, Any]) -> str:
    tile = f"{kernel['block_m']}×{kernel['block_n']}, {kernel['num_warps']} warps"
    loop = f" / {kernel['loop']}" if kernel["loop"] else ""
    return f"{tile}: {kernel['registers']} / {kernel['spill_bytes']} / {kernel['shared_bytes'] / 1024:.0f}{loop}"


TABLES: dict[str, Callable[[], str]] = {
    "algorithms": algorithms,
    "benchmarks": benchmarks,
    "capacity": capacity,
    "data-sheets": data_sheets,
    "errors": errors,
    "extremes": extremes,
    "fuzz": fuzz,
    "faults": faults,
    "grpc": grpc,
    "load": load,
    "metrics": metrics,
    "options": options,
    "rpc": rpc,
    "ray": ray,
    "settings": settings,
    **{what: partial(serving, what) for what in ("protocol", "serving")},
    **{what: partial(steady, what) for what in ("overload", "soak")},
    "support": support,
    "throughput": throughput,
    "beside": beside,
    "each-option": each_option,
    **{f"compile-sm{arch}": partial(compiled, arch) for arch in TILES},
}


def filled(text: str) -> str:
    """The page with its tables as they are now. Raises KeyError for a table that there is not."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def with_settings(text: str) -> str:
    """The schema of the chart's values, with the server's settings as they are now."""
    schema = json.loads(text)
    schema["properties"]["settings"]["properties"] = {
        name: {key: value for key, value in field.items() if key not in ("title", "default")}
        for name, field in Settings.model_json_schema()["properties"].items()
        if name not in NOT_OF_THE_CHART
    }
    return json.dumps(schema, indent=2) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page has drifted")
    check = parser.parse_args().check
    drifted = []
    for page in [*sorted(DOCS.glob("*.md")), CHART_SCHEMA]:
        before = page.read_text(encoding="utf-8")
        after = with_settings(before) if page == CHART_SCHEMA else filled(before)
        if after != before:
            drifted.append(page.name)
            if not check:
                page.write_text(after, encoding="utf-8")
    if check and drifted:
        print(f"{', '.join(drifted)}: not as the code is; run python docs/make_tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
