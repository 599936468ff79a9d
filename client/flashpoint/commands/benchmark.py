"""`flashpoint benchmark`."""

from __future__ import annotations

import datetime
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from rich.console import Console

from flashpoint._calls.service import checked
from flashpoint._client.client import Client
from flashpoint._client.runs import BenchmarkRun
from flashpoint.commands import running
from flashpoint.commands.app import RIGHT, WRONG, examples
from flashpoint.commands.completion import of_kernels
from flashpoint.commands.running import (
    INTS,
    Json,
    Key,
    Plot,
    Theme,
    Timeout,
    Url,
    dtype_of,
    group,
    of_output,
    of_shape,
    words,
)
from flashpoint.commands.terminal.tables import OF_NAIVE, benchmark_tables, machine, named_rows, problem
from flashpoint.commands.verify_kernel import load_kernel
from flashpoint.errors import FlashpointError
from flashpoint_contract.schemas.benchmark import (
    ENDED,
    BenchmarkEvent,
    BenchmarkJob,
    BenchmarkRequest,
    PlotTheme,
    Preset,
    ProgressEvent,
    RowEvent,
    StateEvent,
    TimedDtype,
)
from flashpoint_contract.schemas.shapes import Direction

EXAMPLES = """
  flashpoint benchmark --preset papers --json papers.json --plot papers.svg
  flashpoint benchmark --q-len 512,1024,2048 --head-dim 64 --causal both
  flashpoint benchmark --q-len 4096 --head-dim 128 --direction backward
  flashpoint benchmark --kernel mykernels:attention --q-len 1024 --head-dim 64 --causal yes
  flashpoint benchmark --preset papers --url http://localhost:8000
"""
Kind = Literal["time", "tflops", "speedup", "memory", "roofline", "all"]
_of_timing = group("Timing")
_KERNEL = "Time your own function too, called as function(q, k, v, causal=…), of torch tensors (B, H, S, D)."
_LENGTHS, _HEADS = (256, 512, 1024), 8  # defaults if no sizes are given
_DTYPES, _DIRECTIONS = dtype_of(TimedDtype, several=True), words(lambda: get_args(Direction))
_BACKENDS = words(of_kernels("timing.case", "TIMED"))
_CAUSAL = {"no": (False,), "yes": (True,), "both": (False, True)}


@examples(EXAMPLES)
def benchmark(
    preset: Annotated[Preset | None, of_shape("A known table of cases, instead of a grid.")] = None,
    q_len: Annotated[Any, of_shape("Query length of each sequence.", **INTS)] = None,
    kv_len: Annotated[Any, of_shape("Key length of each sequence.", show_default="the query length", **INTS)] = None,
    head_dim: Annotated[Any, of_shape("Head dimension of q and k.", **INTS)] = None,
    value_dim: Annotated[int | None, of_shape("Head dimension of v.", show_default="that of q")] = None,
    batch: Annotated[int, of_shape("Number of sequences.")] = 1,
    q_heads: Annotated[int | None, of_shape("Number of query heads.", show_default="1; 8 without sizes")] = None,
    kv_heads: Annotated[int | None, of_shape("Number of key/value heads.", show_default="as query heads")] = None,
    dtype: Annotated[Any, of_shape("Data types: float32, bfloat16, float16.", **_DTYPES)] = "float32",
    causal: Annotated[Literal["no", "yes", "both"], of_shape("Use a causal mask.")] = "no",
    direction: Annotated[Any, of_shape("Directions: forward, backward, both.", **_DIRECTIONS)] = "forward",
    backend: Annotated[
        Any, _of_timing("Backends to time.", show_default="all that are worth it here", **_BACKENDS)
    ] = None,
    kernel: Annotated[str | None, _of_timing(_KERNEL, metavar="MODULE:FUNCTION")] = None,
    relative_precision: Annotated[float, _of_timing("Repeat until the median is known to this fraction.")] = 0.01,
    max_seconds: Annotated[float, _of_timing("Most seconds of repeats for a case.")] = 3.0,
    warmup_ms: Annotated[float, _of_timing("Milliseconds of calls before the first one that counts.")] = 50.0,
    url: Url = None,
    api_key: Key = None,
    timeout: Timeout = 60.0,
    json: Json = None,
    plot: Plot = None,
    kind: Annotated[Kind, of_output("Figure to draw; all: a file for each.")] = "time",
    theme: Theme = "light",
) -> int:
    """Time attention over a grid, on every backend or those named, here or on a server's device, or your own kernel.

    Lengths, dimensions, dtypes, directions and backends may be lists: 512,1024. Without sizes it times 8 heads of head
    dimension 64 at the lengths 256, 512 and 1,024.
    """
    format = running.picture_format(json, plot)
    if preset is None and (q_len, kv_len, head_dim) == (None, None, None):
        q_len, head_dim, q_heads = _LENGTHS, (64,), _HEADS if q_heads is None else q_heads
    sizes = (q_len, kv_len, head_dim, value_dim, batch, q_heads, kv_heads)
    if preset is None and not (q_len and head_dim):
        raise typer.BadParameter("give both for a grid, or give a --preset", param_hint="--q-len, --head-dim")
    if preset is not None and sizes != (None, None, None, None, 1, None, None):
        raise typer.BadParameter("has its own shapes: leave out the sizes", param_hint="--preset")
    url = running.server_of(url, {"--kernel": kernel}, ": the function runs on this machine")
    function = None if kernel is None else load_kernel(kernel)
    grid: dict[str, Any] = {"shapes": _shapes(*sizes)}
    grid |= {"dtypes": dtype, "causal": _CAUSAL[causal], "directions": direction}
    how = {"relative_precision": relative_precision, "max_seconds": max_seconds, "warmup_ms": warmup_ms}
    request = checked(BenchmarkRequest, {"preset": preset, **grid, "backends": backend or (), **how})
    if url is None:
        job = BenchmarkJob(id="local", created=datetime.datetime.now(datetime.UTC), request=request)
        job, ended = _watched(job, running.local("benchmark")(request, function))
        if kernel is not None:
            job = job.model_copy(update={"environment": {**job.environment, "kernel": kernel}})
    else:
        with Client(url, api_key=api_key, timeout=timeout) as server:
            started = server.benchmark(**dict(request), timeout=timeout)
            job, ended = _watched(started.job(), started.events(), started)
    show = running.console(json)
    show.print(machine(job.environment), style="dim", markup=False)
    for table in benchmark_tables(named_rows(job.rows, kernel), show.width):
        show.print(table)
        show.print()
    if any(row.backend.startswith("naive") and row.roofline_percent is not None for row in job.rows):
        show.print(OF_NAIVE, style="dim")
    running.write_json(json, job.model_dump(mode="json"))
    if plot is not None:
        _draw(job, plot, kind, format, theme, show)
    if kernel is not None:
        show.print(
            f"{kernel.partition(':')[2]} is {kernel}; `flashpoint verify --kernel {kernel}` judges it in all cases",
            style="dim",
        )
        wrong = [row for row in job.rows if row.backend == "kernel" and (row.skipped or "").startswith("wrong: ")]
        for row in wrong:
            print(f"flashpoint benchmark: FAIL: {kernel}: {row.skipped} ({problem(row)})", file=sys.stderr)
        if wrong:
            return WRONG
        if job.state == "done" and all(row.ms is None for row in job.rows if row.backend == "kernel"):
            print(f"flashpoint benchmark: {kernel} ran no case; the table has the reasons", file=sys.stderr)
            return WRONG
    for error in job.errors:
        print(f"flashpoint benchmark: {error}", file=sys.stderr)
    if job.state != "done":
        print(f"flashpoint benchmark: {job.state} after {job.done} of {job.total} cases", file=sys.stderr)
    if ended is not None:
        return ended
    return RIGHT if job.state == "done" else WRONG


def _shapes(
    q_len: Any, kv_len: Any, head_dim: Any, value_dim: Any, batch: int, q_heads: int | None, kv_heads: int | None
) -> list[dict[str, int]]:
    """Return shapes of every length with every dimension. Missing sizes get the schema's defaults."""
    shapes = [
        {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "q_len": q, "kv_len": k, "head_dim": d,
         "value_dim": value_dim}
        for d, q, k in itertools.product(head_dim or (), q_len or (), kv_len or (None,))
    ]  # fmt: skip
    return [{name: size for name, size in shape.items() if size is not None} for shape in shapes]


def _watched(
    job: BenchmarkJob, events: Iterator[BenchmarkEvent], run: BenchmarkRun | None = None
) -> tuple[BenchmarkJob, int | None]:
    """Show progress while events arrive. Return the final job, and the exit code if Ctrl-C or SIGTERM cancelled it."""
    ended = None
    job = job.model_copy(update={"rows": (), "errors": ()})  # the events contain all rows and errors
    with _progress() as show, running.terminable():
        try:
            for event in events:
                job = job.after(event)
                show(job, event)
        except KeyboardInterrupt as end:
            ended = running.code_of(end)  # the exception itself would keep connections alive
            if run is not None:
                with suppress(FlashpointError):  # the server may be gone
                    run.cancel()
            now = datetime.datetime.now(datetime.UTC)
            job = job.after(StateEvent(id=1 << 53, state="cancelled", at=now))
    assert job.state in ENDED
    return job, ended


@contextmanager
def _progress() -> Iterator[Callable[[BenchmarkJob, BenchmarkEvent], None]]:
    """Yield a function that shows progress on stderr: a bar in a terminal, otherwise one line for each case."""
    with running.progress_bar() as (update, is_terminal):

        def show(job: BenchmarkJob, event: BenchmarkEvent) -> None:
            update(completed=job.done, total=job.total or None)
            if isinstance(event, ProgressEvent):
                update(description=f"timing {event.backend}" if event.backend else "measuring what the device can do")
            elif isinstance(event, RowEvent) and not is_terminal:
                print(f"{event.done}/{event.total} {problem(event.row)} · {event.row.backend}", file=sys.stderr)

        yield show


def _draw(job: BenchmarkJob, plot: Path, kind: Kind, format: Any, theme: PlotTheme, show: Console) -> None:
    from flashpoint.plots import KINDS, plot_benchmark

    for each in KINDS if kind == "all" else (kind,):
        path = plot.with_stem(f"{plot.stem}-{each}") if kind == "all" else plot
        try:
            picture = plot_benchmark(job, each, format, theme)
        except ValueError as error:
            print(f"flashpoint benchmark: no picture of {each}: {error}", file=sys.stderr)
        else:
            running.write_file("--plot", path, picture)
            show.print(f"wrote {path}")
