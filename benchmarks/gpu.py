"""Prove and time the kernels on a real GPU: `make gpu`.

Runs the kernel tests on the device, then times forward and backward against torch SDPA's backends, side by side in one
process, and writes benchmarks/results/gpu-<device>.json with device, versions, commit and date. Each stage saves what
it has as it goes. Needs torch, triton, numpy and pytest alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "kernels"))

import torch  # noqa: E402
import triton  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from flashpoint_kernels import Options, Problem, triton_backend  # noqa: E402

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
TOKENS, WIDTH = 16384, 2048  # batch·seq and heads·D of the published FlashAttention grid


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def environment() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def test_kernels() -> dict[str, Any]:
    """The kernel tests on the device: exit code and pytest's own closing line."""
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests/kernels").glob("test_triton_*.py"))
    env = {**os.environ, "FLASHPOINT_TEST_DEVICE": "cuda", "PYTHONPATH": str(ROOT / "kernels")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    print(run.stdout[-4000:], run.stderr[-2000:], flush=True)
    return {"exit_code": run.returncode, "summary": run.stdout.strip().splitlines()[-1] if run.stdout.strip() else ""}


def standard_flops(batch: int, heads: int, seq: int, dim: int, causal: bool, direction: str) -> float:
    """What all papers count: forward 4·B·H·S²·D, half when causal; backward 2.5 times that."""
    return 4 * batch * heads * seq * seq * dim * (0.5 if causal else 1.0) * (2.5 if direction == "backward" else 1.0)


def median_ms(call: Callable[[], Any]) -> float:
    return float(triton.testing.do_bench(call, warmup=25, rep=100, return_mode="median"))


def sdpa_calls(
    backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, causal: bool
) -> dict[str, Callable[[], Any]]:
    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(backend):
        o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    return {"forward": forward, "backward": lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)}


def our_calls(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, causal: bool
) -> dict[str, Callable[[], Any]]:
    tensors, options = {"q": q, "k": k, "v": v}, Options(causal=causal, return_lse=True)

    def forward() -> Problem:
        problem = Problem.create(tensors, options)
        triton_backend.forward([problem])
        return problem

    saved = forward().outputs

    def backward() -> None:
        triton_backend.backward([Problem.create({**tensors, **saved, "do": do}, options, "backward")])

    return {"forward": forward, "backward": backward}


def time_grid(dtype: torch.dtype, dims: list[int], seqs: list[int]) -> Iterator[dict[str, Any]]:
    for dim, causal, seq in product(dims, (False, True), seqs):
        batch, heads = max(TOKENS // seq, 1), WIDTH // dim
        q, k, v, do = (torch.randn(batch, heads, seq, dim, device="cuda", dtype=dtype) for _ in range(4))
        makers: dict[str, Callable[[], dict[str, Callable[[], Any]]]] = {
            "flashpoint": lambda q=q, k=k, v=v, do=do, causal=causal: our_calls(q, k, v, do, causal)
        }
        for name, backend in SDPA.items():
            if name == "math" and seq > 4096:
                continue  # its scores alone would not fit
            makers[name] = lambda b=backend, q=q, k=k, v=v, do=do, causal=causal: sdpa_calls(b, q, k, v, do, causal)
        row: dict[str, Any] = {"dim": dim, "causal": causal, "seq": seq, "batch": batch, "heads": heads}
        for name, make in makers.items():
            try:
                calls = make()
                for direction, call in calls.items():
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    call()
                    peak = torch.cuda.max_memory_allocated() - before
                    ms = median_ms(call)
                    flops = standard_flops(batch, heads, seq, dim, causal, direction)
                    row[f"{name}_{direction}"] = {"ms": ms, "tflops": flops / ms / 1e9, "peak_bytes": peak}
            except RuntimeError as error:
                row[f"{name}_error"] = str(error).splitlines()[0]
        print(json.dumps(row), flush=True)
        yield row


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric mean of each SDPA backend's time over ours, by direction: above 1 where we are faster."""
    means = {}
    for name, direction in product(SDPA, ("forward", "backward")):
        found = [
            math.log(row[f"{name}_{direction}"]["ms"] / row[f"flashpoint_{direction}"]["ms"])
            for row in rows
            if f"{name}_{direction}" in row and f"flashpoint_{direction}" in row
        ]
        if found:
            means[f"{name}_{direction}"] = math.exp(sum(found) / len(found))
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--stages", nargs="+", choices=["tests", "timings"], default=["tests", "timings"])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--seqs", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192, 16384])
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "no CUDA device here: nothing was tested and nothing was timed\n")
    result: dict[str, Any] = {"environment": environment()}
    name = re.sub(r"[^a-z0-9]+", "-", result["environment"]["device"].lower()).strip("-")
    path = asked.out / f"gpu-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        path.write_text(json.dumps(result, indent=1) + "\n")

    if "tests" in asked.stages:
        result["tests"] = test_kernels()
        save()
    if "timings" in asked.stages:
        result["rows"] = []
        for row in time_grid(torch.bfloat16, asked.dims, asked.seqs):
            result["rows"].append(row)
            result["faster_than"] = ratios(result["rows"])
            save()
        print(json.dumps(result["faster_than"], indent=1))
    print(f"written: {path}")
    sys.exit(result.get("tests", {}).get("exit_code", 0))


if __name__ == "__main__":
    main()
