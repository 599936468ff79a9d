"""`flashpoint verify`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from flashpoint._arrays import unpack
from flashpoint._calls import checked
from flashpoint._proof import DRAWN
from flashpoint.commands.flags import takes_options
from flashpoint.commands.running import (
    RIGHT,
    WORDS,
    WRONG,
    Json,
    Key,
    Plot,
    Theme,
    Timeout,
    Url,
    client,
    console,
    local,
    picture_format,
    run,
    write_json,
)  # fmt: skip
from flashpoint.commands.tables import verification_table
from flashpoint.errors import all_invalid, invalid
from flashpoint.options import AttentionOptions
from flashpoint.shape_schema import Direction, Dtype
from flashpoint.verify_schema import VerifyReport, VerifyRequest
from flashpoint_contract import wire
from flashpoint_contract.tensors import EXTRAS, REQUIRED, refusals

EXAMPLES = """
  flashpoint verify --q-len 512 --head-dim 64 --causal
  flashpoint verify --q-len 300 --head-dim 80 --dtype bfloat16 --backend tiled
  flashpoint verify --q-len 64 --head-dim 16 --extras float_mask,kv_lengths
  flashpoint verify mine.safetensors --plot errors.svg
  flashpoint verify --q-len 512 --head-dim 64 --url http://localhost:8000
"""
_FILE = (
    "A safetensors file of your own: q, k, v, do for gradients, and o, lse, dq, dk, dv… of your kernel, which are "
    "judged. Its metadata has the options. Without it, a problem is drawn."
)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code. `argv` are the flags, of the process by default."""
    return run(verify, sys.argv[1:] if argv is None else argv, EXAMPLES)


@takes_options
def verify(
    file: Annotated[Path | None, typer.Argument(help=_FILE, exists=True, dir_okay=False, readable=True)] = None,
    q_len: Annotated[int | None, typer.Option(help="Queries of a sequence.")] = None,
    kv_len: Annotated[int | None, typer.Option(help="Keys of a sequence; as many as queries.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Columns of q and k.")] = None,
    value_dim: Annotated[int | None, typer.Option(help="Columns of v; those of q.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences; 1.")] = None,
    q_heads: Annotated[int | None, typer.Option(help="Query heads; 1.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; as many as query heads.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="float32 if not given.")] = None,
    seed: Annotated[int | None, typer.Option(help="What the tensors are drawn from; 0.")] = None,
    direction: Annotated[Direction | None, typer.Option(help="Judge o and lse, gradients, or both.")] = None,
    extras: Annotated[Any, typer.Option(help=f"Optional inputs: {', '.join(EXTRAS)}.", **WORDS)] = None,
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
    format = picture_format(plot)
    sizes = {
        "batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len,
        "head_dim": head_dim, "value_dim": value_dim,
    }  # fmt: skip
    asked = {
        "shape": {name: value for name, value in sizes.items() if value is not None} or None,
        "dtype": dtype, "seed": seed, "direction": direction, "extras": extras,
    }  # fmt: skip
    keywords = {name: value for name, value in asked.items() if value is not None} | dict(options)
    if file is None and (q_len is None or head_dim is None):
        raise typer.BadParameter("a problem has both; or name a file", param_hint="--q-len, --head-dim")
    tensors: dict[str, Any] = {}
    if file is not None:
        tensors, of_file = read_tensors(file)
        keywords = of_file | keywords
    if url is not None:
        with client(url, api_key, timeout) as server:
            report = server.verify(**tensors, **keywords)
    elif tensors:
        if drawn := [name for name in DRAWN if name in keywords]:
            raise invalid(drawn[0], "is not taken beside tensors")
        report = local("verify_tensors")(tensors, checked(AttentionOptions, keywords))
    else:
        report = local("verify")(checked(VerifyRequest, keywords))
    write_json(json, report.model_dump(mode="json"))
    _show(report, console(json), of_file=file is not None)
    if plot is not None:
        from flashpoint.plots import plot_verification

        plot.write_bytes(plot_verification(report, format, theme))
    return RIGHT if report.ok else WRONG


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a safetensors file as numpy arrays, and the options of its metadata. Raises InvalidInputError."""
    buffer = np.fromfile(path, np.uint8)
    try:
        size = wire.head_size(buffer[:8].data)
        head = wire.parse_head(buffer[:size].data)
    except wire.WireError as error:
        raise invalid("file", f"{path} is no safetensors file: {error}") from None
    if len(buffer) != head.size + head.data_size:
        raise invalid("file", f"{path} has {len(buffer)} bytes where its head says {head.size + head.data_size}")
    specs = {spec.name: spec for spec in head.tensors}
    if not specs.keys() >= set(REQUIRED["forward"]):
        raise invalid("file", f"{path} has no q, k and v, but {', '.join(specs) or 'nothing'}")
    if refused := refusals("cli", specs):
        raise all_invalid(refused)
    return unpack(buffer[head.size :], specs, buffer), wire.decode_options(head.metadata)


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
    show.print("[green]right[/]" if report.ok else "[bold red]wrong[/]")
