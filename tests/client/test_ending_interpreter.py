"""A call while the interpreter ends is refused. A thread that is started then never runs, so that it would hang."""

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

PROGRAM = '''
import asyncio
import os
import sys
import numpy as np
import torch
import flashpoint
import flashpoint.torch
from flashpoint import sharded

url = sys.argv[1]
q = np.zeros((1, 1, 2, 4), np.float32)
sizes = dict(layers=1, kv_heads=1, head_dim=4)
tensor = torch.ones(1, 1, 2, 4, dtype=torch.float32, device="cpu", requires_grad=True)


def client():
    return flashpoint.Client(url, timeout=10)


async def asynchronous():
    await flashpoint.AsyncClient(url, timeout=10).attention(q, q, q)


class Late:
    """Calls `call` when the interpreter ends, which then collects garbage."""

    def __init__(self, name, call):
        self.name, self.call, self.itself = name, call, self

    def __del__(self, write=os.write, refused=flashpoint.ClosedError):
        try:
            self.call()
        except refused:
            write(1, f"{self.name} ".encode())


def generator():  # closed after garbage was collected
    with client() as inside, inside.cache(**sizes) as cache:
        yield cache


def spread():
    with sharded.cache([client(), client()], **sizes) as cache:
        yield cache


suspended = [generator(), spread()]
for each in suspended:
    next(each)
unused = client()
Late("call", lambda: unused.attention(q, q, q))
Late("health", lambda: unused.live())
Late("async", lambda: asyncio.run(asynchronous()))
Late("sharded", lambda: sharded.attention([unused, client()], q, q, q))
Late("torch", lambda: flashpoint.torch.attention(tensor, tensor, tensor, client=unused))
'''


def test_calls_while_the_interpreter_ends_are_refused(server):
    command = [sys.executable, "-c", PROGRAM, server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["async", "call", "health", "sharded", "torch"], done.stderr
    assert done.stderr.count("ClosedError: the interpreter is ending") == 2  # "Exception ignored in: <generator …>"
