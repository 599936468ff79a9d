"""Draw the figures of the documentation: `python -m docs.make_figures [NAME …]` writes docs/images/NAME.svg.

They come from benchmarks/results and from the scripts in docs/figures, in the style of `flashpoint benchmark --plot`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from docs.figures import every
from flashpoint.plots import style

IMAGES = Path(__file__).resolve().parent / "images"


def main(*names: str) -> int:
    drawn = every()
    if unknown := set(names) - drawn.keys():
        print(f"no figure {', '.join(sorted(unknown))}; there are {', '.join(drawn)}", file=sys.stderr)
        return 2
    for name in names or drawn:
        (IMAGES / f"{name}.svg").write_bytes(style.saved(drawn[name], "svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
