"""Small launches of the kernels for Hopper that reuse each stage of shared memory, for Triton's race detector.

`make gpu` runs them. Few programs run, each with at least five tiles of keys. The forward and each gradient are
separate tests, because an instrumented kernel compiles for a minute or more. The o and lse of a gradient come from the
reference backend.
"""

from dataclasses import replace

import pytest
import torch

from flashpoint_kernels import Options, Problem, run, verify
from flashpoint_kernels.triton_backend.host import config
from flashpoint_kernels.triton_backend.host.launch import backward_calls, forward_calls
from tests.conftest import DEVICE
from tests.support.kernels.solving import qkv

pytestmark = pytest.mark.skipif(config.chip_of(torch.device(DEVICE)).arch != 90, reason="the path of sm_90")
TILES = 5
DIMS = [64, pytest.param(128, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_HOPPER", "1")
    monkeypatch.setattr(config, "stand_in", replace(config.chip_of(torch.device(DEVICE)), multiprocessors=2))


def tensors_of(dim: int) -> dict[str, torch.Tensor]:
    """Return one sequence of two heads, whose queries fill several blocks, the last one in part."""
    tiles = config.config_for(torch.device(DEVICE), "bfloat16", dim, dim, 0, True)
    keys = TILES * max(tile.block_n for tile in (tiles.forward, tiles.backward_kv, tiles.backward_q))
    queries = max(TILES * tiles.backward_kv.block_m, tiles.forward.block_m, tiles.backward_q.block_m) + 6
    tensors = qkv(1, 2, queries, keys + 3, dim, dtype=torch.bfloat16)
    forward = Problem.create({name: tensors[name] for name in "qkv"}, Options(causal=True, return_lse=True))
    run([forward], "reference")
    return tensors | forward.outputs


def check(tensors: dict[str, torch.Tensor], options: Options, kernel: str) -> None:
    """Run a kernel three times; assert right answers with the same bits."""
    direction = "backward" if "do" in tensors else "forward"
    problem = Problem.create(tensors, options, direction)
    made = forward_calls([problem]) if direction == "forward" else backward_calls([problem], [{}])
    assert kernel in [call.kernel.__name__ for call in made if call.programs]
    run([problem], "triton")
    first = {name: t.clone() for name, t in problem.outputs.items()}
    for _ in range(2):
        run([problem], "triton")
        assert all(torch.equal(t, first[name]) for name, t in problem.outputs.items())
    report = verify(tensors, options, answers=first)
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
def test_forward(dim: int) -> None:
    tensors = {name: t for name, t in tensors_of(dim).items() if name in "qkv"}
    check(tensors, Options(causal=True, return_lse=True), "attention_forward_hopper")


@pytest.mark.slow
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("grads", [("dq",), ("dk", "dv")], ids="-".join)
def test_backward(dim: int, grads: tuple[str, ...]) -> None:
    kernel = "attention_backward_q_hopper" if grads == ("dq",) else "attention_backward_kv_hopper"
    check(tensors_of(dim), Options(causal=True, grads=grads), kernel)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 256])
def test_backward_with_stored_ds(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """D 64 runs the kernel of dK and dV, D 256 those of dV and of dK; both run the kernel of dQ from stored dS."""
    monkeypatch.setenv("FLASHPOINT_STORE_DS", "1")
    check(tensors_of(dim), Options(causal=True), "attention_backward_q_stored_hopper")
