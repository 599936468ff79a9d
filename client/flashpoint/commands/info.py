"""`flashpoint info`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from flashpoint._client.client import Client
from flashpoint.commands import running
from flashpoint.commands.app import examples
from flashpoint.commands.running import Json, Key, Timeout, Url

EXAMPLES = """
  flashpoint info
  flashpoint info --url http://localhost:8000 --json -
"""


@examples(EXAMPLES)
def info(url: Url = None, api_key: Key = None, timeout: Timeout = 60.0, json: Json = None) -> int:
    """Show the device, the versions, and the backends with their options, here or at a server."""
    running.check_file("--json", json)
    if (url := running.server_of(url)) is None:
        document = running.local("info")()
    else:
        with Client(url, api_key=api_key, timeout=timeout) as server:
            document = server.info()
    show = running.console(json)
    device = document.get("device") or {}
    rows = {"flashpoint": document.get("version"), "device": device.get("title"), "torch's name": device.get("name")}
    if device.get("memory"):
        rows["memory"] = f"{device['memory'] / 2**30:.1f} GiB"
    if (caches := document.get("caches")) and caches["limit_bytes"]:
        used, limit = caches["bytes"] / 2**30, caches["limit_bytes"] / 2**30
        rows["KV caches"] = f"{caches['caches']:,}, {used:.3g} GiB; at most {limit:.3g} GiB in each engine"
    if kernels := document.get("kernels"):
        rows["kernels in C"] = ", ".join(f"{dtype} {kernel}" for dtype, kernel in kernels.items())
    rows |= document.get("versions", {})
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows.items():
        facts.add_row(name, str(value if value is not None else "not known yet"))
    show.print(facts)
    for line in document.get("missing", ()):
        show.print(f"\n{line}", style="yellow", highlight=False)
    if document.get("options"):
        show.print(_options(document["options"]))
    running.write_json(json, document)
    return 0


def _options(options: dict[str, list[str]]) -> Table:
    """Return a table with a row for each option and a column for each backend."""
    table = Table(box=None, pad_edge=False, title="\nwhat each backend does", title_justify="left", title_style="bold")
    table.add_column("")
    for backend in options:
        table.add_column(backend, justify="center")
    words: dict[str, Any] = dict.fromkeys(word for has in options.values() for word in sorted(has))
    for word in sorted(words, key=lambda word: (-sum(word in has for has in options.values()), word)):
        table.add_row(word, *("yes" if word in has else "–" for has in options.values()))
    return table
