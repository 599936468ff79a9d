"""Import the library in a state, and call each function there first and then in the plain state.

`python -m tests.kernels.ambient.fresh STATE…` prints one line of JSON for each state: the digests of the answers in the
state, and then in the plain one. Each state has a process of its own, which has
imported torch but nothing of the library.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import nullcontext
from typing import Any

import torch

from tests.kernels.ambient.states import STATES


def digests() -> dict[str, str]:
    """Return a digest of the answers of each call, without gradients, which some states do not have."""
    from tests.kernels.ambient.calls import CALLS

    found = {}
    for name, call in CALLS.items():
        answers = call.run(call.inputs(), ())
        digest = hashlib.sha256()
        for key, t in sorted(answers.items()):
            digest.update(f"{key} {t.dtype} {tuple(t.shape)} {t.device}".encode())
            digest.update(t.detach().resolve_neg().contiguous().view(torch.uint8).numpy().tobytes())
        found[name] = digest.hexdigest()
    return found


def main() -> int:
    for name in sys.argv[1:]:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            state: Any = STATES[name].enter() if name else nullcontext()
            with state:
                within = digests()
            print(json.dumps({"state": name, "within": within, "after": digests()}), flush=True)
            os._exit(0)
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            print(json.dumps({"state": name, "ended": code}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
