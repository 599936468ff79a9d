"""Run the notebook, and keep what it prints and draws in it: `python docs/run_notebook.py`.

The cells are plain Python, so that they run without Jupyter; Jupyter can open the same file.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples/attention.ipynb"


def executed(notebook: dict[str, Any], url: str) -> dict[str, Any]:
    """Return the notebook with the outputs of its cells, run in order. Raises the exception of a cell that fails."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    os.environ["FLASHPOINT_URL"] = url
    names: dict[str, Any] = {"__name__": "notebook"}
    cells, number = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), names)
            outputs: list[dict[str, Any]] = []
            if text := printed.getvalue():
                outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
            for figure in map(pyplot.figure, pyplot.get_fignums()):
                png = io.BytesIO()
                figure.savefig(png, format="png", dpi=100)
                data = {"image/png": base64.b64encode(png.getvalue()).decode()}
                outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
            pyplot.close("all")
            cell = cell | {"execution_count": number, "outputs": outputs}
        cells.append(cell)
    return notebook | {"cells": cells}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--url",
        default=os.environ.get("FLASHPOINT_URL", "http://localhost:8000"),
        help="the server (default: %(default)s)",
    )
    notebook = executed(json.loads(NOTEBOOK.read_text(encoding="utf-8")), parser.parse_args().url)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
