"""Run `flashpoint serve` with a private /dev/shm and $TMPDIR of 1 MiB, which faults can fill. Needs to mount."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

CLONE_NEWNS = 0x00020000
MS_PRIVATE_ALL = 0x44000  # MS_PRIVATE | MS_REC: other mount namespaces do not see mounts of this one
CANNOT = 3  # the exit code without permission to mount


def contain() -> bool:
    folder = Path(os.environ["TMPDIR"]) if "TMPDIR" in os.environ and "--try" not in sys.argv else None
    libc = ctypes.CDLL(None, use_errno=True)
    return not (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, MS_PRIVATE_ALL, None)
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m")
        or (folder is not None and libc.mount(b"tmpfs", os.fsencode(folder.parent), b"tmpfs", 0, b"size=1m"))
    )


def can_contain() -> bool:
    """Return whether this user may mount. A separate process tries it, so that its mounts end with it."""
    return subprocess.run([sys.executable, "-m", "chaos.contained", "--try"], check=False).returncode == 0


if __name__ == "__main__":
    if not contain():
        sys.exit(CANNOT)
    if "--try" in sys.argv:
        sys.exit(0)
    Path(os.environ["TMPDIR"]).mkdir()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "flashpoint_server.cli.serve", *sys.argv[1:]])
