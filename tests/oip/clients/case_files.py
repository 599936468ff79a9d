"""Code that the programs in this folder share: they read cases from a directory, and write answers and a report."""

import json
from pathlib import Path

import numpy as np


def run(ask, url, directory):
    """Call `ask(url, cases, tensors, answers)`, which adds arrays to `answers` and returns a report.

    Cases and tensors are read from `directory`; the answers and the report are written into it.
    """
    home, answers = Path(directory), {}
    cases, tensors = json.loads((home / "cases.json").read_text()), dict(np.load(home / "tensors.npz"))
    report = ask(url, cases, tensors, answers)
    np.savez(home / "answers.npz", **answers)
    (home / "report.json").write_text(json.dumps(report))


async def readiness(client):
    """Return [server is live, server is ready, model is ready]; `client` is an asyncio client."""
    return [
        await client.is_server_live(),
        await client.is_server_ready(),
        await client.is_model_ready("attention"),
    ]
