"""The shared code of the programs here: they read cases from a directory, and write answers and a report into it."""

import json
from pathlib import Path

import numpy as np


def run(ask, url, directory):
    """Call `ask(url, cases, tensors, answers)`, which adds arrays to `answers` and returns the report of each case."""
    home, answers = Path(directory), {}
    cases, tensors = json.loads((home / "cases.json").read_text()), dict(np.load(home / "tensors.npz"))
    report = ask(url, cases, tensors, answers)
    np.savez(home / "answers.npz", **answers)
    (home / "report.json").write_text(json.dumps(report))


async def readiness(client):
    """Return what a client with asyncio's methods says of the server and of a model."""
    return [
        await client.is_server_live(),
        await client.is_server_ready(),
        await client.is_model_ready("attention"),
    ]
