"""Tables of the service's speed, from benchmarks/results: a table for each machine."""

from __future__ import annotations

from typing import Any

from flashpoint.commands.terminal.tables import number

from .markdown import NOT_MEASURED, Result, by_machine, named, results, table, targets


@by_machine("protocol", "python", "torch", "uvicorn")
@by_machine("serving", "python", "torch", "uvicorn")
def serving(result: Result) -> str:
    """Return the service's targets and measurements."""
    rows = [(name, rate, "MiB/s") for name, rate in result.get("mib_per_second", {}).items()]
    rows += [(name, time, "µs") for name, time in result["median_microseconds"].items()]
    rows += [
        (f"resident, {process} process, {when}", size, "MiB")
        for when, sizes in result.get("resident_mib", {}).items()
        for process, size in sizes.items()
    ]
    return targets(result) + "\n" + table(["", "median", "unit"], rows)


@named
def throughput() -> str:
    """Return, for each machine, the targets, a table of requests per second, and one for requests of mixed lengths.

    The first table compares the service with other servers.
    """
    text = ""
    for result in results("throughput"):
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
    return text or NOT_MEASURED


def _ways(cases: dict[str, Any]) -> list[str]:
    """Return the servers by their requests per second in the first case, fastest first; those not measured last."""
    ways = next(iter(cases.values()))["ways"]
    return sorted(ways, key=lambda way: -ways[way]["rps"] if isinstance(ways[way], dict) else 0.0)


def _rate(figures: dict[str, float] | str) -> str:
    return figures if isinstance(figures, str) else number(figures["rps"])


@by_machine("cached-decode", "python", "torch", "uvicorn")
def cached_decode(result: Result) -> str:
    """Return the targets, and the tokens per second of each way to decode."""
    rates = sorted(result["tokens_per_second"].items(), key=lambda row: -row[1])
    return (
        f"; {result['thrown_away']} of {result['rounds'] + result['thrown_away']} rounds thrown away:\n\n"
        f"{targets(result)}\n{table(['', 'tokens a second'], [(way, number(rate)) for way, rate in rates])}"
    )


by_machine("forks", "python", "torch", "uvicorn")(targets)


@by_machine("verifying", "torch", "uvicorn")
def verifying(result: Result) -> str:
    """Return the throughput and the 99th percentile with verification while serving, divided by those without."""
    rows = [(row["call"], f"{row['throughput']:.3f}", f"{row['p99']:.3f}") for row in result["rows"]]
    made = f"; --verify-rate {result['rate']:g}, {result['pairs']} pairs:\n\n{targets(result)}\n"
    return made + table(["call", "throughput with / without", "p99 with / without"], rows)


@by_machine("train-saved", "torch")
def train_saved(result: Result) -> str:
    """Return the targets, and the bytes and times of a training step with and without saved forwards."""
    steps, forward = result["training"], result["forward_ms"]
    rows = [
        ("bytes a step, in and out", *(f"{steps['bytes_per_step'][way]:,}" for way in ("served", "saved"))),
        ("a step, ms", *(f"{steps['ms_per_step'][way]:.1f}" for way in ("served", "saved"))),
        ("a forward of (1, 8, 1024, 64), ms", *(f"{forward[way]:.1f}" for way in ("unsaved", "saved"))),
    ]
    made = f"; {steps['rounds']} rounds of {steps['steps']} steps:\n\n{targets(result)}\n"
    return made + table(["median", "without `save`", "with `save`"], rows)


@by_machine("beside")
def beside(result: Result) -> str:
    """Return the targets, and the latencies of requests and the times of a benchmark, each alone and both together."""
    alone, busy = result["latency_ms"]["alone"], result["latency_ms"]["beside"]
    rows = [(r["backend"], r["q_len"], number(r["alone_ms"]), number(r["beside_ms"])) for r in result["rows"]]
    return (
        f"; {result['requests_a_second']:g} requests a second, p50 / p99 "
        f"{alone['p50']} / {alone['p99']} ms alone, {busy['p50']} / {busy['p99']} ms beside a benchmark:\n\n"
        f"{targets(result)}\n{table(['backend', 'length', 'alone, ms', 'beside traffic, ms'], rows)}"
    )


@by_machine("fairness", "torch", "grpcio")
def fairness(result: Result) -> str:
    """Return the latency of small requests alone and beside four large ones, for each kind of large request."""
    rows = [
        (
            row["kind"],
            row["protocol"],
            row.get("limit", "none"),
            f"{row['large_alone_seconds']:.2f}",
            *(f"{row[when]['p50']:.1f} / {row[when]['p99']:.1f}" for when in ("small_alone_ms", "small_beside_ms")),
        )
        for row in result["rows"]
    ]
    head = ("large request", "over", "limit of its key", "alone, s", "small alone, ms", "small beside four, ms")
    return f"; p50 / p99:\n\n{targets(result)}\n{table(head, rows)}"


@by_machine("rpc", "python", "grpcio")
def rpc(result: Result) -> str:
    """Return the times of calls over HTTP and gRPC, by size and direction."""
    rows = []
    for row in result["medians"]:
        size = row["bytes"]
        carried = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
        times = row["http_microseconds"], row["grpc_microseconds"]
        rows.append((f"{carried} {row['way']}", *times, f"{times[1] / times[0]:.1f}"))
    return table(["carried", "HTTP, µs", "gRPC, µs", "ratio"], rows)


@by_machine("ray", "python", "ray", "uvicorn")
def ray(result: Result) -> str:
    """Return the milliseconds of a call by direction and size, for each kind of server and proxy."""
    found = result["median_milliseconds"]
    ways = list(next(iter(found.values())))
    return table(["", *ways], ((what, *(ms[way] for way in ways)) for what, ms in found.items()))


@by_machine("capacity", "torch")
def capacity(result: Result) -> str:
    """Return the calculator's predictions of calls, and their measured times."""
    rates = {name: number(value / 1e9) for name, value in result["rates"].items() if value and value > 1e6}
    head = ("", "predicted, ms", "measured, ms", "ratio", "predicted, requests a second", "measured", "ratio")
    names = ("predicted_ms", "measured_ms", "ratio", "predicted_rps", "measured_rps", "rps_ratio")
    return (
        f"; {result['rounds']} rounds. Rates: a "
        f"call {result['rates']['call'] * 1e3:.2f} ms, upload {rates['upload']} GB/s, download {rates['download']} "
        f"GB/s, forward {rates['flops']} GFLOP/s, gradient {rates['grad_flops']} GFLOP/s, keys read at "
        f"{rates['memory']} GB/s.\n\n![Predicted and measured](../images/{result['stem']}.svg)\n\n"
        + table(head, [(row["case"], *(number(row[name]) for name in names)) for row in result["cases"]])
    )


@named
def capacity_ratio() -> str:
    """Return a sentence for each machine with the smallest and largest ratio of measured to predicted time."""
    text = ""
    for result in results("capacity"):
        ratios = [row["ratio"] for row in result["cases"]]
        made = result["environment"]
        span = f"{number(min(ratios))} to {number(max(ratios))} times the predicted ones"
        text += f"\nThe measured times of {len(ratios)} calls were {span} ({made['device']}, {made['date'][:10]}).\n"
    return text or NOT_MEASURED


@by_machine("sharded-cache", "python", "torch")
def sharded_cache(result: Result) -> str:
    """Return the targets, and the times of one query over a cache on four servers, and over local keys and values."""
    ways = {"operator": "the operator in process", "sdpa": "torch's own in process", "sharded": "four servers"}
    milliseconds, errors = result["median_milliseconds"], result["errors"]
    rows = [(way, milliseconds[name], errors[name]) for name, way in ways.items()]
    return (
        f"; one query over {result['tokens']:,} tokens ({result['kv_heads']} key heads, D {result['head_dim']}, "
        f"{result['dtype']}, {result['bytes'] / 2**30:.2g} GiB) at {result['servers']} servers of this machine; "
        f"median of {result['rounds']}. An error of 1 is the bound above.\n\n"
        f"{targets(result)}\n{table(['', 'ms', 'largest error / bound'], rows)}"
    )
