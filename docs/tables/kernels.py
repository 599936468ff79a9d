"""Tables of the kernels, from benchmarks/results: the compiled code, errors, and times of backends and options."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby, product
from statistics import median
from typing import Any

from flashpoint.commands.terminal.tables import columns, number, problem
from flashpoint_contract.schemas.benchmark import BenchmarkJob
from flashpoint_kernels.timing.device import SHEETS
from flashpoint_kernels.triton_backend.host.configurations import TABLES as TILES

from .markdown import NOT_MEASURED, RESULTS, TABLES, Result, by_machine, named, results, table, targets


def by_architecture(what: str) -> Iterator[tuple[str, Result]]:
    """Yield (name, result) for each GPU architecture: a name such as `sm_80`, and the content of WHAT-sm80.json."""
    found = {int(path.stem.removeprefix(f"{what}-sm")): path for path in RESULTS.glob(f"{what}-sm*.json")}
    for arch, path in sorted(found.items()):
        yield f"sm_{arch}", json.loads(path.read_text())


def compiled(arch: int) -> str:
    """Return a table of the kernels compiled for sm_`arch`: a row for each variant, a column for each kernel.

    The only variants of float32 are those of level 0, in IEEE precision.
    """
    result = json.loads((RESULTS / f"compile-sm{arch}.json").read_text())
    kernels = {(k["dtype"], k["level"], k["head_dim"], k["kernel"]): k for k in result["kernels"]
               if k["precision"] == "ieee" and not k["paged"] and k["keys"] is None}  # fmt: skip
    names = ("forward", "backward_kv", "backward_q")
    variants = [("bfloat16", level, str(level), "") for level in (0, 1, 2)] + [("float32", 0, "0", "")]
    if ("bfloat16", 0, 64, "forward_hopper") in kernels:
        variants.insert(1, ("bfloat16", 0, "0, Hopper", "_hopper"))
    rows = [
        (dtype, shown, dim, *(_variant(kernels.get((dtype, level, dim, name + suffix))) for name in names))
        for (dtype, level, shown, suffix), dim in product(variants, (64, 128, 256))
        if (dtype, level, dim, "forward") in kernels
    ]
    rows += [
        (dtype, 0, f"{dim}, Dv {values}", _variant(kernels.get((dtype, 0, dim, "forward"))), "–", "–")
        for dtype, (dim, values) in (("bfloat16", (192, 128)), ("bfloat16", (576, 512)), ("float32", (576, 512)))
    ]
    instructions = sorted({i for k in result["kernels"] for i in k["matrix_instructions"]})
    commits = ", ".join(dict.fromkeys(k["commit"][:10] for k in result["kernels"]))
    made = f"triton {result['triton']}, {result['date'][:10]}, commits {commits}"
    said = f"\nsm_{arch}, {', '.join(f'`{i}`' for i in instructions)}; {len(result['kernels'])} variants; {made}:\n\n"
    return said + table(["dtype", "level", "D", *(f"`{name}`" for name in names)], rows)


@by_machine("launch-overhead", "torch", "triton")
def launch_overhead(result: Result) -> str:
    """Return the microseconds of host time that each call takes, in this commit and in another."""
    made = result["environment"]
    rows = [(row["call"], row["us"], row["us_beside"], row["ratio"]) for row in result["rows"]]
    head = ("call", "µs", f"µs, commit {made['beside'][:10]}", "ratio")
    return f"; compiled for {made['arch']}, without the driver:\n\n{table(head, rows)}"


@by_machine("cpu-calls", "torch")
def cpu_calls(result: Result) -> str:
    """Return the time of a call on the CPU, divided by its time in another commit, for each pass and length N."""
    kinds: dict[tuple[str, str], list[float]] = {}
    for row in result["rows"]:
        kind, _, _, length = row["call"].split(", ")
        kinds.setdefault((kind, length), []).append(row["ratio"])
    rows = [
        (kind, length, f"{median(own):.2f}", f"{max(own):.2f}")
        for (kind, length), own in sorted(kinds.items(), key=lambda item: (item[0][0], int(item[0][1][2:])))
    ]
    beside = f", beside commit {result['environment']['beside'][:10]}; {result['rounds']} rounds:\n\n"
    return beside + table(("pass", "N", "time / before, median", "most"), rows)


@by_machine("cpu-beside", "torch")
def cpu_beside(result: Result) -> str:
    """Return torch's time / ours by call, and the rate of each call beside torch's fastest product or read."""
    limits = result["limits"]
    fastest = (
        f"a product of float32 {limits['float32'] / 1e9:.0f} GFLOP/s, "
        f"of bfloat16 {limits['bfloat16'] / 1e9:.0f} GFLOP/s, a read {limits['read'] / 1e9:.1f} GB/s"
    )
    rows = []
    for row in result["rows"]:
        shape = f"({','.join(map(str, row['shape']))}){', causal' if row['causal'] else ''}"
        ours, other = {
            "short": ("us", "sdpa_us"), "waiting": ("operator_ms", "rest_ms")
        }.get(row["kind"], ("ms", "other_ms"))  # fmt: skip
        unit = " µs" if row["kind"] == "short" else " ms"
        share = f"{row['share']:.2f}" if "share" in row else ""
        rows.append((
            row["kind"], row["dtype"], shape, number(row[ours]) + unit, number(row[other]) + unit,
            f"{row[other] / row[ours]:.2f}" if row["kind"] == "short" else f"{row['times']:.2f}", share,
        ))  # fmt: skip
    head = (
        "call",
        "dtype",
        "shape",
        "ours",
        "SDPA; FlexAttention; after a rest",
        "its time / ours",
        "rate / torch's product or read",
    )
    return f"; {fastest}:\n\n{targets(result)}\n{table(head, rows)}"


@by_machine("derivatives", "torch")
def derivatives(result: Result) -> str:
    """Return the times of tangents, Hessian-vector products and key weights, and the memory of derivatives."""
    shown = result["rows"]
    rows = [
        (f"{of}, beside {plain}", _tokens(row), f"{number(row['ms'][name])} ms", f"{number(row['ms'][of])} ms",
         f"{row['over_plain']:.2f}", f"{row['times']:.2f}")
        for section, plain, name in (("jvp", "a forward", "forward"), ("hvp", "forward and gradients", "gradient"))
        for row in shown[section]
        for of in [row.get("product", "jvp")]
    ]  # fmt: skip
    head = ("derivative", "tokens", "without", "with", "with / without", "math path's time / ours")
    weights = [
        (_tokens(row), f"{number(row['ms']['forward'])} ms", f"{row['added']:.2f}") for row in shown["key_weights"]
    ]
    weights += [
        (f"{row['queries']:,} over a cache of {row['keys']:,} keys, HTTP", f"{number(row['ms']['forward'])} ms",
         f"{row['added']:.2f}")
        for row in shown["cache"]
    ]  # fmt: skip
    memory = [
        (row["of"], *(f"{number(mib)} MiB" for mib in row["mib"].values()), f"{row['growth']:.2f}",
         "".join(f"{number(mib)} MiB at {int(length):,}" for length, mib in row.get("math_mib", {}).items()))
        for row in shown["memory"]
    ]  # fmt: skip
    lengths = [f"{int(length):,} tokens" for length in shown["memory"][0]["mib"]]
    return (
        f", float32, {result['heads']} heads of {result['head_dim']}:\n\n{targets(result)}\n{table(head, rows)}\n"
        + table(("tokens", "forward", "what key weights add / forward"), weights)
        + f"\n{table(('memory of', *lengths, 'the last / half', 'math path'), memory)}"
    )


def _tokens(row: dict[str, Any]) -> str:
    return f"{row['length']:,}{', causal' if row['causal'] else ''}"


@by_machine("one-row", "torch")
def one_row(result: Result) -> str:
    """Return the number of rows of o whose bits differ between calls (`library_errors.py one-row`).

    The control is the same count for torch's operator.
    """
    control = result["control"]
    return (
        f": **{result['differing']:,} of {result['rows']:,}** rows of {result['problems']} drawn problems; "
        f"torch's operator, the control: {control['differing']:,} of {control['rows']:,}.\n"
    )


_ERRORS = tuple(f"{what}, {dtype}" for what in ("o", "gradients") for dtype in ("float32", "float16", "bfloat16"))


@by_machine("library-errors", "torch")
def library_errors(result: Result) -> str:
    """Return for each function the tested options, and the largest errors of o and of the gradients."""
    rows = ((row["function"], ", ".join(row["options"]), row) for row in result["functions"])
    return _errors("options", rows)


@by_machine("library-errors", "torch", name="library-errors-each")
def library_errors_each(result: Result) -> str:
    """Return the largest errors for each option of a function, over all calls that use the option."""
    return _errors("option", ((row["function"], row["option"], row) for row in result["rows"]))


def _errors(options: str, rows: Iterable[tuple[str, str, Result]]) -> str:
    cells = (
        (f"`{function}`", options_of, row["cases"], *(f"{row[name]:.1e}" if name in row else "–" for name in _ERRORS))
        for function, options_of, row in rows
    )
    return table(("function", options, "cases", *_ERRORS), cells)


@by_machine("suites", "torch")
def suites(result: Result) -> str:
    """Return, for each test suite of another project, the number of its cases that were drawn, and of each outcome."""
    rows = [
        (f"{one['name']} `{one['commit'][:10]}`", one["over"], f"{one['drawn']:,} of {one['of']:,}",
         one["passed"], one["failed"], one["not_expressible"], one["skipped"])
        for one in result["suites"]
    ]  # fmt: skip
    return table(("suite", "over", "cases", "passed", "failed", "not expressible", "skipped by the suite"), rows)


@named
def suites_reasons() -> str:
    """Return the reasons why cases of other projects' suites failed or cannot be expressed."""
    text = ""
    for result in results("suites"):
        rows = [
            (one["name"], why["verdict"], why["cases"], why["why"])
            for one in result["suites"]
            for why in one["reasons"]
        ]
        text += "\n" + table(("suite", "", "cases", "reason"), rows)
    return text or NOT_MEASURED


def _compiled_all() -> str:
    """Return, for each architecture, the number of variants, how many spill, shared memory and matrix instructions."""
    rows = []
    for arch, result in by_architecture("compile"):
        kernels = result["kernels"]
        spilling = [k["spill_bytes"] for k in kernels if k["spill_bytes"]]
        rows.append((
            arch, len(kernels), len(spilling), max(spilling, default=0),
            f"{max(k['shared_bytes'] for k in kernels) / 1024:.0f}",
            ", ".join(f"`{i}`" for i in sorted({i for k in kernels for i in k["matrix_instructions"]})),
            f"triton {result['triton']}, {result['date'][:10]}",
        ))  # fmt: skip
    head = ("", "variants", "that spill", "most spilled bytes a thread", "most KiB of shared memory",
            "matrix instructions", "compiled with")  # fmt: skip
    return "\n" + table(head, rows)


TABLES["compiled"] = _compiled_all
TABLES.update({f"compile-sm{arch}": partial(compiled, arch) for arch in TILES})


@named
def loops_beside() -> str:
    """Return the instructions per score of our inner loops and of those of Triton's tutorial on attention.

    The loops are those of level 0, D 128 and float16.
    """
    rows = []
    for arch, result in by_architecture("loops"):
        found = {(loop["head_dim"], loop["kernel"], loop["by"]): loop["per_score"] for loop in result["loops"]}
        for (dim, kernel, by), tutorial in found.items():
            if by != "flashpoint" and dim == 128:
                ours = (found.get((dim, name, "flashpoint")) for name in (kernel, f"{kernel}_hopper"))
                rows.append((arch, f"`{kernel}`", *(f"{n:.2f}" if n else "–" for n in (*ours, tutorial))))
    return "\n" + table(["", "loop", "through pointers", "path for Hopper", "tutorial"], rows)


# The kinds of instructions, out of `sass.KINDS`, for which the table `loops` has columns.
_SHOWN = ("matrix", "exponential", "float", "convert", "integer", "move", "memory", "control")


@named
def loops() -> str:
    """Return the instructions per score of each inner loop at level 0, beside those of Triton's tutorial."""
    text = ""
    for arch, result in by_architecture("loops"):
        made = f"triton {result['triton']}, {result['date'][:10]}, commit {result['commit'][:10]}"
        text += f"\n{arch}; {made}; the tutorial of commit "
        text += f"{result['beside']['commit'][:10]} of triton-lang/triton:\n\n"
        rows = []
        for loop in result["loops"]:
            share = loop["per_score"] / sum(loop["instructions"].values())
            spilled = f"{loop['spill_bytes']}, {loop['instructions']['spilled']}"
            beside = loop["beside"] if "hopper" in loop["kernel"] else "–"
            rows.append((
                loop["head_dim"],
                f"`{loop['kernel']}`" if loop["by"] == "flashpoint" else f"{loop['kernel']}, tutorial",
                f"{loop['block_m']}×{loop['block_n']}, {loop['num_warps']} warps, {loop['num_stages']}",
                f"{loop['registers']} / {spilled} / {loop['shared_bytes'] / 1024:.0f}", loop["programs"],
                f"{loop['per_score']:.2f}", *(f"{loop['instructions'][kind] * share:.2f}" for kind in _SHOWN), beside,
                "yes" if loop["serialised"] else "no",
            ))  # fmt: skip
        head = ("D", "loop", "tile, stages", "registers / spilled / KiB", "programs", "a score", *_SHOWN, "beside",
                "serialised")  # fmt: skip
        text += table(head, rows)
    return text


# A GPU of each architecture: its name, multiprocessors and boost clock in GHz (data sheets; GB/s are in SHEETS).
CHIPS = {
    80: ("NVIDIA A100-SXM4-80GB", 108, 1.41),
    90: ("NVIDIA H100 80GB HBM3", 132, 1.98),
    100: ("NVIDIA B200", 148, 1.965),
}
ISSUED = 4  # warp instructions that a multiprocessor issues in a cycle


@named
def stored_ds() -> str:
    """Return a table of the kernels for Hopper in bfloat16, with stored dS and without it."""
    found = json.loads((RESULTS / "compile-sm90.json").read_text())
    rows = [
        (
            str(k["head_dim"]), f"`{k['kernel'].removesuffix('_hopper')}`",
            f"{k['block_m']}×{k['block_n']}, {k['num_stages']}", str(k["registers"]),
            f"{k['spill_bytes']}, {k['loop_spills']}", str(-(-k["shared_bytes"] // 1024)), str(k["loop"]),
        )
        for k in found["kernels"]
        if k["kernel"].startswith("backward") and k["kernel"].endswith("_hopper")
        and k["dtype"] == "bfloat16" and k["head_dim"] in (64, 128, 256)
    ]  # fmt: skip
    head = ("D", "kernel", "tile, stages", "registers", "spilled", "KiB", "instructions of the loop")
    return f"\ntriton {found['triton']}:\n\n{table(head, sorted(rows, key=lambda row: (int(row[0]), row[1])))}"


@named
def two_sets() -> str:
    """Return a table of the forward for Hopper in bfloat16, with one and with two sets of descriptors."""
    found = json.loads((RESULTS / "compile-sm90.json").read_text())
    sets = {"forward_hopper": "1", "forward_two_sets_hopper": "2"}
    rows = [
        (
            str(k["head_dim"]), sets[k["kernel"]], f"{k['block_m']}×{k['block_n']}, {k['num_stages']}",
            str(k["registers"]), f"{k['spill_bytes']}, {k['loop_spills']}", str(-(-k["shared_bytes"] // 1024)),
            str(k["copies"]), str(k["loop"]), str(k["beside"]),
        )
        for k in found["kernels"]
        if k["kernel"] in sets and k["dtype"] == "bfloat16" and k["head_dim"] in (64, 128, 256)
    ]  # fmt: skip
    head = ("D", "sets", "tile, stages", "registers", "spilled", "KiB", "copies", "instructions of the loop",
            "exponentials beside a product")  # fmt: skip
    return f"\ntriton {found['triton']}:\n\n{table(head, sorted(rows, key=lambda row: (int(row[0]), row[1])))}"


@named
def stored_ds_in_general() -> str:
    """Return a table of the general kernels of gradients in bfloat16: with S computed twice, and with stored dS."""
    rows = []
    versions = set()
    for arch in TILES:
        found = json.loads((RESULTS / f"compile-sm{arch}.json").read_text())
        versions.add(found["triton"])
        kernels = {(k["kernel"], k["head_dim"]): k for k in found["kernels"]
                   if (k["dtype"], k["level"], k["mask"]) == ("bfloat16", 0, None)}  # fmt: skip
        for dim in (64, 128, 256):
            if ("backward_q_stored", dim) in kernels:
                names = ("backward_kv", "backward_kv_storing", "backward_q", "backward_q_stored")
                rows.append((f"sm_{arch}", dim, *(_gradient(kernels[name, dim]) for name in names)))
    head = ("", "D", "dK and dV", "dK, dV and dS", "dQ", "dQ from dS")
    return f"\ntriton {', '.join(sorted(versions))}:\n\n{table(head, rows)}"


def _gradient(kernel: dict[str, Any]) -> str:
    scores = kernel["block_m"] * kernel["block_n"]
    tile = f"{kernel['block_m']}×{kernel['block_n']}"
    spilled = f"{kernel['spill_bytes']}, {kernel['loop_spills']}"
    per_score = kernel["loop"] * 32 * kernel["num_warps"] / scores
    return f"{tile}: {kernel['registers']} / {spilled} / {-(-kernel['shared_bytes'] // 1024)} / {per_score:.1f}"


@named
def decode() -> str:
    """Return the instructions of decoding per byte of keys and values that it reads, at D 128.

    The column "issued per byte" has the instructions that the GPU can issue while it reads a byte from memory.
    """
    rows = []
    for arch, (name, processors, clock) in CHIPS.items():
        found = json.loads((RESULTS / f"compile-sm{arch}.json").read_text())["kernels"]
        kernels = {(k["kernel"], k["paged"], k["keys"]): _per_byte(k) for k in found
                   if (k["dtype"], k["head_dim"], k["level"]) == ("bfloat16", 128, 0)}  # fmt: skip
        general, packed = kernels["forward", False, None], kernels["forward_packed16", False, None]
        paged, shared = kernels["forward_packed16", True, None], kernels["cascade_packed16", True, None]
        others = [kernels["forward_packed16", *kind] for kind in ((False, "int8"), (False, "float8_e4m3fn"))]
        issued = ISSUED * processors * clock / SHEETS[name].gb_per_s
        figures = (general, 8 * general, packed, packed, paged, 16 * paged, shared, *others, issued)
        rows.append((f"sm_{arch}", *(f"{figure:.3f}" for figure in figures), name))
    head = ("", "one head's block, 1 head", "8 heads", "packed, 1 head", "8 heads", "packed, pages",
            "16 forks, each alone", "16 forks together", "int8", "float8", "issued per byte", "by")  # fmt: skip
    return table(head, rows)


def _per_byte(kernel: dict[str, Any]) -> float:
    """Return the instructions of all warps in a step of the inner loop, per byte of the tile's keys and values."""
    size = 1 if kernel["keys"] else 2
    return float(kernel["loop"] * kernel["num_warps"] / (kernel["block_n"] * 2 * kernel["head_dim"] * size))


def _variant(kernel: dict[str, Any] | None) -> str:
    if kernel is None:
        return "–"
    tile = f"{kernel['block_m']}×{kernel['block_n']}, {kernel['num_warps']} warps"
    loop = f" / {kernel['loop']}" if kernel["loop"] else ""
    said = f"{tile}: {kernel['registers']} / {kernel['spill_bytes']} / {kernel['shared_bytes'] / 1024:.0f}{loop}"
    return f"{said}, {kernel['beside']} beside" if kernel["beside"] else said


@named
def benchmarks() -> str:
    """Return the results of `flashpoint benchmark --json` for each machine.

    There is a table for each problem, with a row for each backend.
    """
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
            shown = columns(rows)
            text += f"\n{title}\n\n"
            text += table(["", *shown], ([row.backend, *(write(row) for write in shown.values())] for row in rows))
    return text or NOT_MEASURED


@by_machine("reproduce", "python", "torch", "triton", name="reproduced")
def reproduced(result: Result) -> str:
    """Return each claim of a paper or project that was reproduced, with the measurement and the verdict."""
    rows = [(f"`{c['name']}`", c["claim"], c["measured"], c["verdict"]) for c in result["claims"]]
    kinds = ("time", "roofline") if result["rows"] else ()
    images = (f"\n![The {kind} of each case on this machine](images/{result['stem']}-{kind}.svg)\n" for kind in kinds)
    return table(["", "claim", "measured", "verdict"], rows) + "".join(images)


@by_machine("options", "torch", name="each-option")
def each_option(result: Result) -> str:
    """Return the times of each option, of the plain formula and of FlexAttention; and of our operator and torch's."""
    rows = result["rows"]
    runs = min((len(row.get("runs", [1])) for of_section in rows.values() for row in of_section), default=1)
    repeated = f", medians of {runs} runs" if runs > 1 else ""
    formula = [
        (
            r["option"], r["pass"], *_times(r), number(r["memory"]), *_times(r["huge_pages"]),
        )
        for of_option in zip(rows.get("forward", []), rows.get("gradient", []), strict=True)
        for r in of_option
    ]  # fmt: skip
    flex = [(r["option"], *_times(r), number(r["compile_s"])) for r in rows.get("flex", [])]
    decode = [(r["decode"], *_times(r)) for r in rows.get("decode", [])]
    plain = [
        (
            r["pass"], r["dtype"], r["kernel"] or "not recorded", r["head_dim"], r["length"],
            "yes" if r["causal"] else "no", *_times(r),
        )
        for r in rows.get("plain", [])
    ]  # fmt: skip
    flexed = [
        (r["kind"], r["pass"], *_times(r), f"{r['mib']} / {r['other_mib']}" if "mib" in r else "–")
        for r in rows.get("flex_attention", [])
    ]  # fmt: skip
    masks = [(r["mask"], r["pass"], number(r["share"]), *_times(r)) for r in rows.get("block_masks", [])]
    tables = (
        (["option", "pass", "ms", "written out, ms", "times faster", "memory / its",
          "huge pages: ms", "written out, ms", "times faster"], formula),
        (["option", "ms", "FlexAttention, ms", "times its speed", "its compilation, s"], flex),
        (["decode", "ms", "torch's operator, ms", "times its speed"], decode),
        (["pass", "dtype", "kernel", "D", "N", "causal", "ms", "SDPA, ms", "SDPA's time / ours"], plain),
        (["score_mod of `flex_attention`", "pass", "ms", "torch's forward, or the formula with gradient, ms",
          "times faster", "MiB / its"], flexed),
        (["`block_mask` of `tiled`", "pass", "share of the blocks", "ms", "without it, ms", "times faster"], masks),
    )  # fmt: skip
    return f"{repeated}:\n\n{targets(result)}" + "".join(f"\n{table(head, own)}" for head, own in tables if own)


def _times(row: dict[str, float]) -> Iterator[str]:
    return (number(row[name]) for name in ("ms", "other_ms", "times"))
