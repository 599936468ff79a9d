"""Prove the service on a device: `python -m benchmarks.gpu_day.service OUT [--device cpu] [--seconds 150]`.

Each step writes a line to OUT/service.jsonl as soon as it ends: its name, whether it is right, its seconds, and what it
found, such as the kernel that ran. A step that fails does not end the proof. At the time limit the server is killed,
and the steps that are left say so. Exit code 0: every step is right.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import safetensors.torch
import torch
from torch import Tensor

FILE, LOG = "service.jsonl", "service.log"
BINARY = {"Content-Type": "application/vnd.safetensors"}
_WIDEST = 0.02  # error of a bfloat16 answer, as a share of the largest element, at which it is wrong
_CALLS = 8  # concurrent calls that may share a launch
_READY_SECONDS = 100.0  # start of CUDA and of the engine, with the check of its kernels


class Proof:
    """The steps of one run, with a server on a port of loopback."""

    def __init__(self, out: Path, device: str, seconds: float) -> None:
        self.device, self._end = device, time.monotonic() + seconds
        self._file = (out / FILE).open("a")
        self.right = True
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-P", "-m", "flashpoint_server.cli.serve", f"--port={port}", f"--device={device}"]
        with (out / LOG).open("ab") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False)

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def step(self, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """Run a step and write its line; without time, write that it did not run."""
        began = time.monotonic()
        try:
            if self.left <= 0:
                raise TimeoutError("no time was left")
            row = {"right": True} | run()
        except Exception as error:  # the other steps still run
            row = {"right": False, "error": f"{type(error).__name__}: {error}"[:1000]}
        self.right &= bool(row["right"])
        line = json.dumps({"step": name, "seconds": round(time.monotonic() - began, 2)} | row)
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Return an answer of the server. Raises RuntimeError with the text of an error."""
        answer = self._client.request(method, path, timeout=max(self.left, 0.1), **more)
        if answer.status_code >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        return answer

    def start(self) -> dict[str, Any]:
        """Wait until the server is ready, at most _READY_SECONDS."""
        limit = time.monotonic() + min(_READY_SECONDS, self.left)
        while time.monotonic() < limit:
            if self._server.poll() is not None:
                raise RuntimeError(f"the server ended with {self._server.returncode}: see {LOG}")
            try:
                if self._client.get("/health/ready", timeout=5).status_code == 200:
                    info = self.ask("GET", "/info").json()
                    names = ("device", "versions", "backends", "kernels", "gradient_kernels", "missing")
                    return {name: info.get(name) for name in names}
            except httpx.TransportError:
                pass  # it does not listen yet, or is busy
            time.sleep(0.2)
        raise TimeoutError(f"the server was not ready: see {LOG}")

    def attention(self) -> dict[str, Any]:
        t = drawn(1, 4, 300, 64)
        answer = self.ask("POST", "/attention", content=message(t), headers=BINARY)
        o, _ = expected(t)
        return of_kernel(answer) | compared({"o": o}, safetensors.torch.load(answer.content))

    def gradients(self) -> dict[str, Any]:
        t = drawn(1, 4, 300, 64)
        do = torch.randn(t["q"].shape, generator=torch.Generator().manual_seed(9), dtype=torch.float32, device="cpu")
        t["do"] = do.to(torch.bfloat16)
        answer = self.ask("POST", "/attention/grad", content=message(t), headers=BINARY)
        _, gradients = expected(t)
        return of_kernel(answer) | compared(gradients, safetensors.torch.load(answer.content))

    def together(self) -> dict[str, Any]:
        """Send _CALLS calls at once. They are right if each has the bits of the same call alone."""
        problems = [message(drawn(1, 4, 200 + n, 64, seed=n)) for n in range(_CALLS)]

        def send(body: bytes) -> httpx.Response:
            return self.ask("POST", "/attention", content=body, headers=BINARY)

        alone = [send(body).content for body in problems]
        with ThreadPoolExecutor(_CALLS) as pool:
            answers = list(pool.map(send, problems))
        same = [answer.content == one for answer, one in zip(answers, alone, strict=True)]
        return {"right": all(same), "batches": [int(answer.headers["x-batch-size"]) for answer in answers]}

    def verify(self) -> dict[str, Any]:
        sizes = {"shape": {"q_heads": 4, "q_len": 300, "head_dim": 128}, "dtype": "bfloat16", "causal": True}
        report = self.ask("POST", "/verify", json=sizes).json()
        return {"right": bool(report["ok"]), "report": report}

    def benchmark(self) -> dict[str, Any]:
        shape = {"q_heads": 4, "q_len": 512, "head_dim": 64}
        job = self.ask("POST", "/benchmark", json={"shapes": [shape], "max_seconds": 0.5}).json()
        while job["state"] in ("queued", "running"):
            if self.left <= 0:
                raise TimeoutError("the benchmark did not end")
            time.sleep(0.2)
            job = self.ask("GET", f"/benchmark/{job['id']}").json()
        return {"right": job["state"] == "done", "job": job}

    def cache(self) -> dict[str, Any]:
        """Compare a call over a cache with the call that sends all keys: the bits are equal."""
        from flashpoint import Client

        t = drawn(1, 4, 64, 64)
        address, sizes = str(self._client.base_url), {"kv_heads": 4, "head_dim": 64, "dtype": "bfloat16"}
        with Client(address, timeout=max(self.left, 0.1)) as client, client.cache(**sizes) as held:
            over, sent = held.attention(**t, causal=True), client.attention(**t, causal=True)
        return {"right": bool(torch.equal(over, sent))}

    def stop(self) -> dict[str, Any]:
        """Send SIGTERM, and return the exit code."""
        self._server.send_signal(signal.SIGTERM)
        code = self._server.wait(timeout=max(min(self.left, 30.0), 1.0))
        return {"right": code == 0, "code": code}

    def close(self) -> None:
        """Kill the server if it still runs."""
        if self._server.poll() is None:
            self._server.kill()
            self._server.wait()
        self._client.close()
        self._file.close()


def drawn(batch: int, heads: int, length: int, dim: int, seed: int = 0) -> dict[str, Tensor]:
    """Return q, k and v in bfloat16."""
    random = torch.Generator().manual_seed(seed)
    shape = (batch, heads, length, dim)
    numbers = {n: torch.randn(shape, generator=random, dtype=torch.float32, device="cpu") for n in "qkv"}
    return {name: t.to(torch.bfloat16) for name, t in numbers.items()}


def message(t: dict[str, Tensor]) -> bytes:
    """Return the body of a causal call."""
    return safetensors.torch.save(t, {"causal": "true"})


def expected(t: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return o of a causal call, and with `do` its gradients, in float64 on the CPU."""
    q, k, v = (t[name].double().requires_grad_() for name in "qkv")
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device="cpu").triu(1)
    scores = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill(hidden, -math.inf)
    o = scores.softmax(-1) @ v
    if "do" not in t:
        return o.detach(), {}
    gradients = torch.autograd.grad(o, (q, k, v), t["do"].double())
    return o.detach(), dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def compared(right: dict[str, Tensor], answer: dict[str, Tensor]) -> dict[str, Any]:
    """Return the largest errors, each as a share of the largest element, and whether all are small enough."""
    errors = {n: float((answer[n].double() - t).abs().max() / t.abs().max()) for n, t in right.items()}
    return {"right": all(error <= _WIDEST for error in errors.values()), "errors": errors}  # NaN is wrong, too


def of_kernel(answer: httpx.Response) -> dict[str, Any]:
    names = ("x-backend", "x-kernel", "server-timing")
    return {name: answer.headers[name] for name in names if name in answer.headers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=150.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    proof = Proof(args.out, args.device, args.seconds)
    try:
        proof.step("ready", proof.start)
        for run in (proof.attention, proof.gradients, proof.verify, proof.together, proof.cache, proof.benchmark):
            proof.step(run.__name__, run)
        proof.step("stop", proof.stop)
    finally:
        proof.close()
    return 0 if proof.right else 1


if __name__ == "__main__":
    sys.exit(main())
