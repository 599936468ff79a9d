"""Fill the tables of the documentation from the code and from measured results, so that both always agree.

`python docs/make_tables.py` writes the tables between their marks, `<!-- table: NAME -->` and `<!-- end -->`. It also
writes the server's settings into the schema of the Helm chart, the schema of the judge's report, and the tutorial as
HTML for the server's page. With `--check` it writes nothing, and exits with 1 if a file would change (`make lint`). The
modules in `docs/tables/` make the tables.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from markdown import markdown

from flashpoint_contract import judging
from flashpoint_server.config.settings import Settings
from tables import TABLES

DOCS = Path(__file__).resolve().parent
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
CHART_SCHEMA = DOCS.parent / "deploy/helm/flashpoint/values.schema.json"
REPORT_SCHEMA = DOCS / "reference/judge-report.schema.json"
TUTORIAL = DOCS.parent / "server/flashpoint_server/page/templates/tutorial.html"
# The server's settings that users of the Helm chart cannot set: the chart sets some of them; others are secrets, need
# files that the chart does not mount, or need shared memory.
NOT_OF_THE_CHART = {
    "port",
    "device",
    "api_keys",
    "api_keys_file",
    "insecure",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "shared_memory_bytes",
    "cache_secret",
    "replica",
}


def filled(text: str) -> str:
    """Return the page `text` with its tables made anew. Raises KeyError for an unknown table."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def with_settings(text: str) -> str:
    """Return `text`, the JSON schema of the Helm chart's values, with the server's current settings."""
    schema = json.loads(text)
    schema["properties"]["settings"]["properties"] = {
        name: {key: value for key, value in field.items() if key not in ("title", "default")}
        for name, field in Settings.model_json_schema()["properties"].items()
        if name not in NOT_OF_THE_CHART
    }
    return json.dumps(schema, indent=2) + "\n"


def tutorial(_: str) -> str:
    """Return the tutorial as HTML for the server's page. The keyboard can scroll blocks of code."""
    html = markdown((DOCS / "tutorial.md").read_text(encoding="utf-8"), extensions=["fenced_code", "sane_lists"])
    parts = html.split("<pre>")
    regions = (f'<pre tabindex="0" role="region" aria-label="Code {n}">{part}' for n, part in enumerate(parts[1:], 1))
    return parts[0] + "".join(regions) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page has drifted")
    check = parser.parse_args().check
    drifted = []
    made = {
        CHART_SCHEMA: with_settings, REPORT_SCHEMA: lambda _: json.dumps(judging.schema(), indent=2) + "\n",
        TUTORIAL: tutorial,
    }  # fmt: skip
    for page in [*sorted(DOCS.rglob("*.md")), *made]:
        before = page.read_text(encoding="utf-8")
        after = made.get(page, filled)(before)
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
