"""`flashpoint verify`."""

from __future__ import annotations

import json as jsons
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from flashpoint._calls.arrays import pack
from flashpoint._calls.service import checked
from flashpoint._calls.verification import DRAWN
from flashpoint._client.client import Client
from flashpoint.cases import MEANT, read_case
from flashpoint.commands import running, verify_kernel
from flashpoint.commands.app import RIGHT, WRONG, CommandError, examples
from flashpoint.commands.flags import takes_options
from flashpoint.commands.running import Json, Key, Plot, Theme, Timeout, Url, dtype_of, group, of_shape, words
from flashpoint.commands.terminal.tables import verification_table
from flashpoint.errors import invalid
from flashpoint_contract.judging import LAYOUTS as OF_KERNELS
from flashpoint_contract.judging import REQUIREMENTS
from flashpoint_contract.options import LAYOUTS, OPTIONS
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.schemas.shapes import Direction, Dtype, Shape
from flashpoint_contract.schemas.verify import Judgement, VerifyProgress, VerifyReport, VerifyRequest
from flashpoint_contract.tensors import EXTRAS, TENSORS

EXAMPLES = """
  flashpoint verify --q-len 512 --head-dim 64 --causal
  flashpoint verify --q-len 300 --head-dim 80 --dtype bfloat16 --backend tiled
  flashpoint verify --q-len 64 --head-dim 16 --extras float_mask,kv_lengths
  flashpoint verify mine.safetensors --plot errors.svg
  flashpoint verify --kernel mykernels:attention --quick
  flashpoint verify --kernel mykernels:attention --require deterministic --json report.json --save case.safetensors
  flashpoint verify --q-len 512 --head-dim 64 --url http://localhost:8000
"""
_FILE = (
    "A safetensors file of your own: q, k, v, do for gradients, and o, lse, dq, dk, dv… of your kernel, which are "
    "judged. Its metadata has the options. Without it, a problem is drawn."
)

_KERNEL = (
    "A function of your own, called as function(q, k, v, causal=…): accuracy on shapes, options and values that break "
    "kernels, gradients by autograd, purity and races are judged."
)
_REQUIRE = f"Further properties that must hold: {', '.join(REQUIREMENTS)}."
_AXES = {"B": "batch", "Hq": "head", "Hk": "head", "Sq": "row", "Sk": "row", "D": "column", "Dv": "column"}
of_kernel = group("Own function")
_LAYOUT = (
    "bhsd (B,H,S,D), bshd (B,S,H,D), or thd (T,H,D): packed sequences of different lengths; with --kernel the axes of "
    "its q, k and v in any of these orders."
)
_LAYOUTS = Literal["bhsd", "bshd", "thd", "sbhd", "shd", "hsd", "bsd", "sd"]
Layout = Annotated[_LAYOUTS | None, group(running.OPTIONS)(_LAYOUT, show_default="bhsd; with --kernel, found by trial")]
EmptyRows = Literal["zero", "nan"]
_SEED = "0; with --kernel, another one in each run"


@examples(EXAMPLES)
@partial(takes_options, layout=Layout)
def verify(
    file: Annotated[Path | None, typer.Argument(help=_FILE, exists=True, dir_okay=False, readable=True)] = None,
    kernel: Annotated[str | None, of_kernel(_KERNEL, metavar="MODULE:FUNCTION")] = None,
    quick: Annotated[bool, of_kernel("About 10 seconds of the judge's own work, in place of 60.")] = False,
    require: Annotated[Any, of_kernel(_REQUIRE, **words(lambda: REQUIREMENTS))] = None,
    case: Annotated[str | None, of_kernel("One case alone, in JSON, as a report has it.", metavar="JSON")] = None,
    seconds: Annotated[float | None, of_kernel("Most seconds in all.", show_default="600, quick 120", min=1.0)] = None,
    empty_rows: Annotated[
        EmptyRows | None,
        of_kernel("Rows without keys: 0, or NaN is right, too.", show_default="zero, nan for SDPA's signature"),
    ] = None,
    save: Annotated[
        Path | None, of_kernel("Write the smallest failing case as safetensors, for verify FILE.", metavar="FILE")
    ] = None,
    q_len: Annotated[int | None, of_shape("Query length of each sequence.")] = None,
    kv_len: Annotated[int | None, of_shape("Key length of each sequence.", show_default="the query length")] = None,
    head_dim: Annotated[int | None, of_shape("Head dimension of q and k.")] = None,
    value_dim: Annotated[int | None, of_shape("Head dimension of v.", show_default="that of q")] = None,
    batch: Annotated[int | None, of_shape("Number of sequences.", show_default="1")] = None,
    q_heads: Annotated[int | None, of_shape("Number of query heads.", show_default="1; 2 without sizes")] = None,
    kv_heads: Annotated[int | None, of_shape("Number of key/value heads.", show_default="as query heads")] = None,
    dtype: Annotated[Any, of_shape("Data type of q, k, v and do.", show_default="float32", **dtype_of(Dtype))] = None,
    seed: Annotated[int | None, of_shape("Seed that the tensors are drawn from.", show_default=_SEED)] = None,
    direction: Annotated[
        Direction | None, of_shape("Judge o and lse, gradients, or both.", show_default="both")
    ] = None,
    extras: Annotated[Any, of_shape(f"Optional inputs: {', '.join(EXTRAS)}.", **words(lambda: EXTRAS))] = None,
    url: Url = None,
    api_key: Key = None,
    timeout: Timeout = 60.0,
    json: Json = None,
    plot: Plot = None,
    theme: Theme = "light",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Judge attention against float64: a backend, your kernel's answers in FILE, or a function (--kernel).

    A backend runs on this machine or at a server. Without FILE it computes a drawn problem: 2 heads of 256 queries and
    keys, of head dimension 64, unless --q-len and --head-dim set other sizes. Errors have bounds that depend on the
    dtype, on the values, and on the error of torch's own math.
    """
    format = running.picture_format(json, plot)
    sizes = {
        "batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len,
        "head_dim": head_dim, "value_dim": value_dim,
    }  # fmt: skip
    drawn = {
        "shape": {name: value for name, value in sizes.items() if value is not None} or None,
        "dtype": dtype, "seed": seed, "direction": direction, "extras": extras,
    }  # fmt: skip
    keywords = {name: value for name, value in drawn.items() if value is not None} | dict(options)
    if kernel is not None:
        running.server_of(url, {"--kernel": kernel}, ": the function runs on this machine")
        if unknown := [name for name in require or () if name not in REQUIREMENTS]:
            known = ", ".join(map(repr, REQUIREMENTS))
            raise typer.BadParameter(f"{unknown[0]!r} is not one of {known}", param_hint="--require")
        if file is not None:
            raise typer.BadParameter(
                "is not taken with FILE: the function runs on drawn problems", param_hint="--kernel"
            )
        if plot is not None:
            raise typer.BadParameter("draws one problem; --kernel has many", param_hint="--plot")
        if (layout := keywords.get("layout", "bhsd")) not in OF_KERNELS:
            raise typer.BadParameter(
                f"{layout} is not for --kernel: its packed sequences are known by cu_seqlens_q", param_hint="--layout"
            )
        if keywords.get("shape") is not None:
            keywords["shape"] = checked(Shape, keywords["shape"])
        return verify_kernel.judge(
            kernel, keywords, quick=quick, require=require or (), case=case, seconds=seconds, empty_rows=empty_rows,
            save=save, json_file=json,
        )  # fmt: skip
    for_kernel = {
        "--quick": quick, "--require": require, "--case": case, "--seconds": seconds, "--empty-rows": empty_rows,
        "--save": save,
    }  # fmt: skip
    if unused := [flag for flag, value in for_kernel.items() if value]:
        raise typer.BadParameter("is for --kernel", param_hint=unused[0])
    if (layout := keywords.get("layout", "bhsd")) not in LAYOUTS:
        raise typer.BadParameter(f"{layout} is for --kernel; others are {', '.join(LAYOUTS)}", param_hint="--layout")
    if file is None and q_len is None and head_dim is None:
        keywords["shape"] = {"q_len": 256, "head_dim": 64, "q_heads": 2} | keywords.get("shape", {})
    elif file is None and (q_len is None or head_dim is None):
        raise typer.BadParameter("give both for a problem, or give a FILE", param_hint="--q-len, --head-dim")
    tensors: dict[str, Any] = {}
    if file is not None:
        if file.suffix == ".py":
            raise CommandError(
                f"FILE: {file} is Python, and no safetensors file",
                f"write --kernel {file.stem}:FUNCTION for a function of it",
            )
        tensors, of_file = read_case(file)
        keywords = of_file | keywords
    with running.working("judging against float64") as show_progress:
        report = _report(tensors, keywords, running.server_of(url), api_key, timeout, show_progress)
    show = running.console(json)
    _show(report, show, of_file=file is not None)
    show.print(_options_line(keywords), style="dim", highlight=False, markup=False)
    for line in _findings(report, keywords.get("layout", "bhsd")):
        show.print(line, markup=False)
    show.print("[green]PASS[/]" if report.ok else "[bold red]FAIL[/]")
    if plot is not None:
        from flashpoint.plots import plot_verification

        running.write_file("--plot", plot, plot_verification(report, format, theme))
    running.write_json(json, report.model_dump(mode="json"))
    return RIGHT if report.ok else WRONG


def _report(
    tensors: dict[str, Any], keywords: dict[str, Any], url: str | None, api_key: str | None, timeout: float,
    progress: Callable[[VerifyProgress], None] | None,
) -> VerifyReport:  # fmt: skip
    """Verify on this machine or on a server, and return the report."""
    if url is not None:
        with Client(url, api_key=api_key, timeout=timeout) as server:
            return server.verify(**tensors, **keywords, progress=progress)
    report: VerifyReport
    if not tensors:
        report = running.local("verify")(checked(VerifyRequest, keywords), progress=progress)
        return report
    if drawn := [name for name in DRAWN if name in keywords]:
        raise invalid(drawn[0], "cannot be combined with tensors")
    options = checked(AttentionOptions, keywords)
    packed = {name: pack(name, array) for name, array in tensors.items()}
    report = running.local("verify_tensors")(packed, options, progress)
    return report


def _show(report: VerifyReport, show: Console, *, of_file: bool) -> None:
    drawn = f", drawn from seed {report.seed}" if report.seed is not None else ""
    about = f"{report.backend} · {report.dtype} · {report.device} · {report.seconds:.1f} s{drawn}"
    show.print(f"[bold]{about}[/]")
    if of_file and report.backend == "given":
        show.print(f"judged: the file's own {', '.join(t.name for t in report.tensors)}")
    elif of_file:
        show.print(f"judged: backend {report.backend}, for the file has no answers")
    show.print(verification_table(report, show.width))
    for t in report.tensors:
        show.print(f"{t.name}: at most {t.bound:.1e}, {t.rule}", style="dim")


def _pairs(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{n}={value if isinstance(value, str) else jsons.dumps(value)}" for n, value in options.items())


def _options_line(keywords: Mapping[str, Any]) -> str:
    """Return a line with the options of a problem: the given options, and the defaults of the other options."""
    given = {name: value for name, value in keywords.items() if name in OPTIONS}
    missing = {n: "1/sqrt(D)" if n == "scale" else OPTIONS[n].default for n in MEANT if n not in given}
    parts = [f"options: {_pairs(given) or 'none given'}", *([_pairs(missing)] if missing else [])]
    return "; not given, so the default: ".join(parts)


def _place(judged: Judgement, layout: str) -> str:
    """Return the place of the largest error, such as `batch 0, head 3, row 17, column 5`."""
    index = judged.worst_index
    if not index:
        return "nowhere"
    row = TENSORS[judged.name]
    for rank in (4, 3, 2):  # possible ranks of q, which determine the axes of the answer
        axes = row.axes_in(layout, rank)
        if len(axes) == len(index):
            return ", ".join(f"{_AXES.get(axis, axis)} {i}" for axis, i in zip(axes, index, strict=True))
    return f"index {','.join(map(str, index))}"


def _findings(report: VerifyReport, layout: str) -> Iterator[str]:
    """Yield lines of text about the causes and about each wrong or imprecise tensor."""
    for cause in report.causes:
        yield f"cause: {cause.text} [{cause.code}, {'confirmed' if cause.confirmed else 'probable'}]"
        yield f"  hint: {cause.advice}"
    for t in report.tensors:
        if t.imprecise:
            yield f"{t.name} is imprecise: its error is larger than scores in float32 explain, or than torch's own"
        if t.ok:
            continue
        what = f"{t.name} is off by {t.max_abs:.1e}, over the bound of {t.bound:.1e}, at {_place(t, layout)}"
        if t.worst_value is not None and t.worst_expected is not None:
            what += f": {t.worst_value:.6g} where float64 has {t.worst_expected:.6g}"
        yield what
        if t.where:
            yield f"  wrong: {t.where}"
