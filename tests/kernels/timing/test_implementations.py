"""Each timed implementation that runs here gives the reference's answers and gradients."""

import shutil

import pytest
import torch

from flashpoint_kernels.timing.case import TIMED, Case
from flashpoint_kernels.timing.implementations import IMPLEMENTATIONS, CannotRunError
from tests.support.kernels.solving import backward, forward, qkv

ON_CPU = ("naive", "naive_explicit", "cpu", "tiled", "sdpa_flash", "sdpa_math")


def answers(case: Case, t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    attend = IMPLEMENTATIONS[case.backend].make(case, "cpu")
    leaves = [t[name].clone().requires_grad_() for name in ("q", "k", "v")]
    o = attend(*leaves)
    return dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *torch.autograd.grad(o, leaves, t["do"])), strict=True))


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len", "kv_len", "causal"),
    # Causal with fewer keys than queries is left out: naive attention gives NaN for rows that see no key.
    [(2, 2, 33, 33, False), (2, 2, 33, 33, True), (4, 2, 20, 31, False), (4, 2, 20, 31, True), (3, 3, 31, 20, False)],
)
def test_answers_are_the_references(
    backend: str, heads: int, kv_heads: int, q_len: int, kv_len: int, causal: bool
) -> None:
    case = Case(
        backend=backend, batch=2, q_heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=16,
        dtype="float32", causal=causal, direction="both",
    )  # fmt: skip
    t = qkv(2, heads, q_len, kv_len, 16, kv_heads=kv_heads)
    if backend.startswith("sdpa") and causal and q_len != kv_len:
        with pytest.raises(CannotRunError, match="top left"):
            answers(case, t)
        return
    actual = answers(case, t)
    exact = forward("reference", t, causal=causal) | backward("reference", t, causal=causal)
    for name, answer in actual.items():
        torch.testing.assert_close(answer, exact[name], atol=2e-6, rtol=1e-5)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch.compile
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile compiles C++: install g++ (apt-get install g++)")
@pytest.mark.parametrize("causal", [False, True])
def test_flex_computes_the_same(causal: bool) -> None:
    case = Case(
        backend="flex", batch=1, q_heads=4, kv_heads=2, q_len=128, kv_len=200, head_dim=32, dtype="float32",
        causal=causal,
    )  # fmt: skip
    t = qkv(1, 4, 128, 200, 32, kv_heads=2)
    o = IMPLEMENTATIONS["flex"].make(case, "cpu")(t["q"], t["k"], t["v"])
    torch.testing.assert_close(o, forward("reference", t, causal=causal)["o"], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("backend", "direction", "reason"),
    [
        ("triton", "forward", "CUDA"),
        ("naive_explicit", "forward", "that of naive"),
        ("flex", "backward", "no backward on the CPU"),
        ("flash_attn", "forward", "CUDA"),
        ("flash_attn_3", "forward", "CUDA"),
        ("flashinfer", "forward", "CUDA"),
        ("flashinfer", "backward", "no backward"),
        ("xformers", "forward", "CUDA"),
    ],
)
def test_what_cannot_run_says_why(backend: str, direction: str, reason: str) -> None:
    case = Case(backend=backend, batch=1, q_heads=1, q_len=8, head_dim=16, direction=direction)  # type: ignore[arg-type]
    with pytest.raises(CannotRunError, match=reason):
        IMPLEMENTATIONS[backend].make(case, "cpu")


def test_everything_has_a_version_or_is_not_installed() -> None:
    versions = {}
    for name in TIMED:
        try:
            versions[name] = IMPLEMENTATIONS[name].version()
        except CannotRunError as reason:
            assert "is not installed" in str(reason)  # noqa: PT017
    assert versions["naive"] == f"torch {torch.__version__}"
    assert "triton" in versions["triton"]
