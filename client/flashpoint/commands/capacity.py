"""`flashpoint capacity`."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flashpoint import capacity as calculator
from flashpoint._calls.service import checked
from flashpoint._client.client import Client
from flashpoint.commands import running
from flashpoint.commands.app import RIGHT, examples
from flashpoint.commands.running import Json, Key, Timeout, Url, dtype_of, group, of_shape
from flashpoint.commands.terminal.tables import number
from flashpoint_contract.schemas.shapes import Dtype, Shape

EXAMPLES = """
  flashpoint capacity --url http://localhost:8000 --q-len 4096 --q-heads 8 --head-dim 64
  flashpoint capacity --tflops 400 --network-gbit 100 --pcie-gb 50 --q-len 16384 --q-heads 32 --head-dim 128 \
                      --dtype bfloat16 --causal --side backward --load 20
  flashpoint capacity --tflops 400 --network-gbit 25 --memory-gb 3000 --q-len 1 --kv-len 4096 --q-heads 32 \
                      --kv-heads 8 --head-dim 128 --dtype bfloat16 --cached --layers 32 --cache-gb 40
"""
# Assumed milliseconds of a tiny call. benchmarks/results/serving-*.json contain measured times of a small call.
CALL_MS = 1.6
_of_rates = group("Rates and load")


@examples(EXAMPLES)
def capacity(
    q_len: Annotated[int, of_shape("Query length of each sequence.")],
    head_dim: Annotated[int, of_shape("Head dimension of q and k.")],
    kv_len: Annotated[int | None, of_shape("Key length of each sequence.", show_default="the query length")] = None,
    value_dim: Annotated[int | None, of_shape("Head dimension of v.", show_default="that of q")] = None,
    batch: Annotated[int, of_shape("Number of sequences.")] = 1,
    q_heads: Annotated[int, of_shape("Number of query heads.")] = 1,
    kv_heads: Annotated[int | None, of_shape("Number of key/value heads.", show_default="as query heads")] = None,
    dtype: Annotated[Any, of_shape("Data type of q, k and v.", **dtype_of(Dtype))] = "float32",
    causal: Annotated[bool, of_shape("Count the pairs that a causal mask leaves.")] = False,
    side: Annotated[calculator.Side, of_shape("A forward, or a gradient with its o and lse.")] = "forward",
    cached: Annotated[bool, of_shape("k and v lie in KV caches on the server.")] = False,
    layers: Annotated[int, of_shape("Layers of the model, a call each; with --cached.", min=1)] = 1,
    cache_gb: Annotated[float | None, of_shape("GB for KV caches at a server; with --cached.")] = None,
    load: Annotated[float | None, _of_rates("Requests a second that must be answered.", min=0)] = None,
    tflops: Annotated[float | None, _of_rates("TFLOP/s of attention on the device.")] = None,
    network_gbit: Annotated[float | None, _of_rates("Gbit/s of the link, each way.")] = None,
    round_trip_ms: Annotated[float, _of_rates("Milliseconds to the server and back.", min=0)] = 0.0,
    call_ms: Annotated[
        float | None,
        _of_rates("Milliseconds of a tiny call.", show_default=str(CALL_MS), min=0),
    ] = None,
    memory_gb: Annotated[float | None, _of_rates("GB/s at which the device reads keys.")] = None,
    pcie_gb: Annotated[float | None, _of_rates("GB/s between server and GPU; none on a CPU.")] = None,
    same_cores: Annotated[bool, _of_rates("The server computes on the caller's own cores.")] = False,
    url: Url = None,
    api_key: Key = None,
    timeout: Timeout = 60.0,
    json: Json = None,
) -> int:
    """Predict how long a request takes in each stage, how many pass in a second, and what a load needs.

    The rates are those given, or with --url those measured at a server in some seconds. Waiting in queues is not
    included.
    """
    running.check_file("--json", json)
    sizes: dict[str, Any] = {"q_len": q_len, "kv_len": kv_len, "head_dim": head_dim, "value_dim": value_dim}
    sizes |= {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads}
    shape = checked(Shape, {name: size for name, size in sizes.items() if size is not None})
    given = {"--tflops": tflops, "--network-gbit": network_gbit, "--memory-gb": memory_gb, "--pcie-gb": pcie_gb}
    for flag, rate in given.items():
        if rate is not None and not rate > 0:
            raise typer.BadParameter(f"must be above 0, not {rate:g}", param_hint=flag)
    for flag, without in {"--layers": layers == 1, "--cache-gb": cache_gb is None}.items():
        if not (cached or without):
            raise typer.BadParameter("is taken with --cached only", param_hint=flag)
    if cache_gb is not None and not cache_gb > 0:
        raise typer.BadParameter(f"must be above 0, not {cache_gb:g}", param_hint="--cache-gb")
    given["--call-ms"] = call_ms
    if (url := running.server_of(url, given, ", which measures it")) is not None:
        with Client(url, api_key=api_key, timeout=timeout) as server:
            rates = calculator.measure(server, dtype, shared=same_cores)
            if cached and cache_gb is None:
                cache_gb = server.info()["caches"]["limit_bytes"] / 1e9
        rates = dataclasses.replace(rates, round_trip=round_trip_ms / 1e3)
    elif tflops is None or network_gbit is None:
        raise typer.BadParameter("give both, or a --url, which measures them", param_hint="--tflops, --network-gbit")
    else:
        rates = calculator.Rates(
            call=(CALL_MS if call_ms is None else call_ms) / 1e3,
            upload=network_gbit * 1e9 / 8,
            download=network_gbit * 1e9 / 8,
            flops=tflops * 1e12,
            grad_flops=tflops * 1e12,
            memory=math.inf if memory_gb is None else memory_gb * 1e9,
            pcie=math.inf if pcie_gb is None else pcie_gb * 1e9,
            round_trip=round_trip_ms / 1e3,
            shared=same_cores,
        )
    need = calculator.need(shape, dtype=dtype, side=side, causal=causal, cached=cached)
    prediction = calculator.predict(need, rates)
    needed = None if load is None else prediction.for_load(load)
    cache = _cache_of(shape, dtype, layers, cache_gb, prediction) if cached else None
    show = running.console(json)
    show.print(_stages(need, prediction))
    passing = "all of it, on the same cores" if rates.shared else prediction.bottleneck
    show.print(f"\nat most {number(prediction.requests_per_second)} requests a second; bound by: {passing}")
    if needed is not None:
        counts = ", ".join(f"{name} × {count}" for name, count in needed.items())
        show.print(f"for {number(load)} requests a second: {counts}")
    if cache is not None:
        _show_cache(show, cache, layers)
    running.write_json(json, {
        "rates": {name: None if value == math.inf else value for name, value in dataclasses.asdict(rates).items()},
        "need": dataclasses.asdict(need),
        "stages": prediction.stages,
        "seconds": prediction.seconds,
        "requests_per_second": prediction.requests_per_second,
        "bottleneck": prediction.bottleneck,
        "for_load": needed,
        "cache": cache,
    })  # fmt: skip
    return RIGHT


def _cache_of(
    shape: Shape, dtype: Dtype, layers: int, cache_gb: float | None, prediction: calculator.Prediction
) -> dict[str, Any]:
    """Return the size of a sequence's cache, how many caches fit, and the time of a step through all layers."""
    nbytes = calculator.cache_bytes(shape, dtype=dtype, layers=layers)
    return {
        "bytes": nbytes,
        "that_fit": None if cache_gb is None else int(cache_gb * 1e9 // nbytes),
        "seconds_of_a_step": layers * prediction.seconds,
    }


def _show_cache(show: Console, cache: dict[str, Any], layers: int) -> None:
    fit = "" if cache["that_fit"] is None else f"; {cache['that_fit']:,} fit"
    show.print(f"\na sequence's cache: {cache['bytes'] / 1e6:.3g} MB{fit}")
    step = cache["seconds_of_a_step"]
    show.print(f"a step through {layers} layers: {number(step * 1e3)} ms, {number(1 / step)} a second")


def _stages(need: calculator.Need, prediction: calculator.Prediction) -> Table:
    amounts = {"upload": f"{need.upload / 1e6:.3g} MB", "download": f"{need.download / 1e6:.3g} MB"}
    amounts["compute"] = f"{need.flops / 1e9:.3g} GFLOP"
    table = Table(box=None, pad_edge=False)
    table.add_column("predicted")
    for name in ("", "ms", "%"):
        table.add_column(name, justify="right")
    for name, seconds in prediction.stages.items():
        if seconds:
            share = f"{100 * seconds / prediction.seconds:.0f}"
            table.add_row(name, amounts.get(name, ""), number(seconds * 1e3), share)
    table.add_row("a request", "", number(prediction.seconds * 1e3), "100")
    return table
