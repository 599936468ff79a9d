"""Print each place that does not list a tensor or an option of the contract's tables, and so refuses it by name.

    .venv/bin/python -m tests.support.unhandled block_mask

Without a name: every row.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from flashpoint_contract.options import OPTIONS
from flashpoint_contract.surfaces import TAKES
from flashpoint_contract.tensors import INPUT_TENSORS
from flashpoint_kernels.cpu_backend.forward import _REPEATED
from flashpoint_kernels.cpu_backend.spans import _SHARED
from flashpoint_kernels.dispatching.support import HANDLES, IN_BLOCKS, IN_DERIVATIVES
from flashpoint_server.engine.scheduling.engine_request import _CACHED

PLACES: Mapping[str, frozenset[str]] = {
    **{f"backend {name}" + " (HANDLES)": names for name, names in HANDLES.items()},
    **{f"backend {name}" + " with a block mask (IN_BLOCKS)": names for name, names in IN_BLOCKS.items()},
    **{f"derivatives of {name}" + " (IN_DERIVATIVES)": names for name, names in IN_DERIVATIVES.items()},
    **{f"surface {name}" + " (TAKES)": names for name, names in TAKES.items()},
    "repeated calls in C (_REPEATED)": _REPEATED,
    "parts that the engine caches (_CACHED)": _CACHED,
    "calls over forks computed together (_SHARED)": _SHARED,
}


def unhandled(name: str) -> list[str]:
    """Return the places that do not list a row."""
    return [place for place, names in PLACES.items() if name not in names]


if __name__ == "__main__":
    for row in sys.argv[1:] or [*INPUT_TENSORS, *OPTIONS]:
        print(f"{row}: {', '.join(unhandled(row)) or 'handled everywhere'}")
