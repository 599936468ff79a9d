"""A call in another process that ends when the test releases it."""

import time
from pathlib import Path


def hold(folder):
    """Signal the start, wait for the release, and return; both signals are files in `folder`."""
    Path(folder, "begun").touch()
    while not Path(folder, "released").exists():
        time.sleep(0.005)
