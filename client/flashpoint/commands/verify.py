"""`flashpoint verify`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from rich.console import Console

from flashpoint._calls import checked
from flashpoint._proof import DRAWN
from flashpoint.cases import read_case
from flashpoint.commands.app import RIGHT, WRONG, examples
from flashpoint.commands.flags import takes_options
from flashpoint.commands.running import (
    WORDS,
    Json,
    Key,
    Plot,
    Theme,
    Timeout,
    Url,
    client,
    console,
    local,
    of_shape,
    picture_format,
    working,
    write_json,
)  # fmt: skip
from flashpoint.commands.tables import verification_table
from flashpoint.errors import invalid
from flashpoint.options import AttentionOptions
from flashpoint.shape_schema import Direction, Dtype, Shape
from flashpoint.verdicts import findings, options_line
from flashpoint.verify_schema import VerifyProgress, VerifyReport, VerifyRequest
from flashpoint_contract.tensors import EXTRAS

EXAMPLES = """
  flashpoint verify --q-len 512 --head-dim 64 --causal
  flashpoint verify --q-len 300 --head-dim 80 --dtype bfloat16 --backend tiled
  flashpoint verify --q-len 64 --head-dim 16 --extras float_mask,kv_lengths
  flashpoint verify mine.safetensors --plot errors.svg
  flashpoint verify --kernel mykernels:attention
  flashpoint verify --q-len 512 --head-dim 64 --url http://localhost:8000
"""
_FILE = (
    "A safetensors file of your own: q, k, v, do for gradients, and o, lse, dq, dk, dv… of your kernel, which are "
    "judged. Its metadata has the options. Without it, a problem is drawn."
)

_KERNEL = (
    "A function of your own, called as function(q, k, v, causal=…): it is judged over a grid of shapes and of the "
    "options that it takes, with gradients by autograd."
)


@examples(EXAMPLES)
@takes_options
def verify(
    file: Annotated[Path | None, typer.Argument(help=_FILE, exists=True, dir_okay=False, readable=True)] = None,
    kernel: Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION", help=_KERNEL)] = None,
    q_len: Annotated[int | None, of_shape("Query length of each sequence.")] = None,
    kv_len: Annotated[int | None, of_shape("Key length of each sequence.", show_default="the query length")] = None,
    head_dim: Annotated[int | None, of_shape("Head dimension of q and k.")] = None,
    value_dim: Annotated[int | None, of_shape("Head dimension of v.", show_default="that of q")] = None,
    batch: Annotated[int | None, of_shape("Number of sequences.", show_default="1")] = None,
    q_heads: Annotated[int | None, of_shape("Number of query heads.", show_default="1")] = None,
    kv_heads: Annotated[int | None, of_shape("Number of key/value heads.", show_default="as query heads")] = None,
    dtype: Annotated[Dtype | None, of_shape("Data type of q, k, v and do.", show_default="float32")] = None,
    seed: Annotated[int | None, of_shape("Seed that the tensors are drawn from.", show_default="0")] = None,
    direction: Annotated[
        Direction | None, of_shape("Judge o and lse, gradients, or both.", show_default="both")
    ] = None,
    extras: Annotated[Any, of_shape(f"Optional inputs: {', '.join(EXTRAS)}.", **WORDS)] = None,
    url: Url = None,
    api_key: Key = None,
    timeout: Timeout = 60.0,
    json: Json = None,
    plot: Plot = None,
    theme: Theme = "light",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Judge attention against float64, here or at a server: a backend's, or your own kernel's from a file.

    Each tensor's largest error is held to a bound that comes from torch's own math in the same dtype.
    """
    format = picture_format(json, plot)
    sizes = {
        "batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len,
        "head_dim": head_dim, "value_dim": value_dim,
    }  # fmt: skip
    asked = {
        "shape": {name: value for name, value in sizes.items() if value is not None} or None,
        "dtype": dtype, "seed": seed, "direction": direction, "extras": extras,
    }  # fmt: skip
    keywords = {name: value for name, value in asked.items() if value is not None} | dict(options)
    if kernel is not None:
        if url is not None or file is not None:
            raise typer.BadParameter(
                "is not taken with --url or FILE: the function runs on this machine, on drawn problems",
                param_hint="--kernel",
            )
        return _kernel(kernel, keywords, json, plot)
    if file is None and (q_len is None or head_dim is None):
        raise typer.BadParameter("give both for a problem, or give a FILE", param_hint="--q-len, --head-dim")
    tensors: dict[str, Any] = {}
    if file is not None:
        tensors, of_file = read_case(file)
        keywords = of_file | keywords
    with working("judging against float64") as show_progress:
        report, mistakes = _report(tensors, keywords, url, api_key, timeout, show_progress)
    write_json(json, report.model_dump(mode="json"))
    show = console(json)
    _show(report, show, of_file=file is not None)
    show.print(options_line(keywords), style="dim", highlight=False, markup=False)
    for line in findings(report, keywords.get("layout", "bhsd"), mistakes):
        show.print(line, markup=False)
    show.print("[green]PASS[/]" if report.ok else "[bold red]FAIL[/]")
    if plot is not None:
        from flashpoint.plots import plot_verification

        plot.write_bytes(plot_verification(report, format, theme))
    return RIGHT if report.ok else WRONG


def _report(
    tensors: dict[str, Any],
    keywords: dict[str, Any],
    url: str | None,
    api_key: str | None,
    timeout: float,
    progress: Callable[[VerifyProgress], None] | None,
) -> tuple[VerifyReport, dict[str, str]]:
    """Verify here or on a server. Return the report, and the known mistake that explains each wrong tensor."""
    if url is not None:
        with client(url, api_key, timeout) as server:
            return server.verify(**tensors, **keywords, progress=progress), {}
    if not tensors:
        return local("verify")(checked(VerifyRequest, keywords), progress=progress), {}
    if drawn := [name for name in DRAWN if name in keywords]:
        raise invalid(drawn[0], "cannot be combined with tensors")
    options = checked(AttentionOptions, keywords)
    report = local("verify_tensors")(tensors, options, progress)
    if report.ok or report.backend != "given":
        return report, {}
    return report, local("mistakes")(tensors, options, report)


def _kernel(name: str, keywords: dict[str, Any], json: Path | None, plot: Path | None) -> int:
    """Judge the caller's own function, on a grid or on the given shape."""
    from flashpoint.commands import verify_kernel

    if plot is not None:
        raise typer.BadParameter("draws one problem; --kernel has many", param_hint="--plot")
    kernel = verify_kernel.load_kernel(name)
    shape = keywords.get("shape")
    if shape is not None:
        keywords["shape"] = checked(Shape, shape)
    requests = local("kernel_grid", served=False)(kernel, **keywords)
    cases, code = verify_kernel.judge(
        local("verify_kernel", served=False)(kernel, requests), len(requests), console(json)
    )
    write_json(json, [
        {"problem": case.problem, "ok": case.ok, "skipped": case.skipped, "note": case.note,
         "mistakes": dict(case.mistakes), "report": case.report and case.report.model_dump(mode="json")}
        for case in cases
    ])  # fmt: skip
    return code


def _show(report: VerifyReport, show: Console, *, of_file: bool) -> None:
    drawn = f", drawn from seed {report.seed}" if report.seed is not None else ""
    about = f"{report.backend} · {report.dtype} · {report.device} · {report.seconds:.1f} s{drawn}"
    show.print(f"[bold]{about}[/]")
    if of_file and report.backend == "given":
        show.print(f"judged: the file's own {', '.join(t.name for t in report.tensors)}")
    elif of_file:
        show.print(f"judged: backend {report.backend}, for the file has no answers")
    show.print(verification_table(report))
    for t in report.tensors:
        show.print(f"{t.name}: at most {t.bound:.1e}, {t.rule}", style="dim")
