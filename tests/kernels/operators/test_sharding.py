"""Attention of DTensors sharded over the batch or the heads is that of whole tensors, in two real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.sockets import free_port

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")
def test_two_processes_compute_what_one_does() -> None:
    port, processes = str(free_port()), []
    for rank in range(2):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", "tests.support.kernels.sharded"]
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (wrong, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
        assert not wrong
