"""The pytest fixture `judge_attention`, which judges attention functions. pytest loads it if flashpoint is installed.

    def test_my_kernel(judge_attention):
        judge_attention(my_attention)                                      # a grid of shapes and options
        judge_attention(my_attention, {"q_len": 512, "head_dim": 64}, causal=True, dtype="bfloat16")

It needs the extra `server`: `pip install '.[server]'` in a checkout.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest

LOCAL = "flashpoint_server.engine.local"


@pytest.fixture
def judge_attention() -> Callable[..., None]:
    """Return a function that fails the test where an attention function is not near enough to float64.

    The function that it returns has these parameters:

    Args:
        kernel: Your function, called as kernel(q, k, v, causal=…, …) with torch tensors (B, H, S, D). It returns o, or
            (o, lse). Only options that differ from their defaults are passed.
        shape: Sizes such as {"q_len": 512, "head_dim": 64}: `batch`, `q_heads`, `kv_heads`, `q_len`, `kv_len`,
            `head_dim`, `value_dim`. None judges a grid of shapes and options.
        options: Options of `flashpoint.VerifyRequest`: `dtype`, `seed`, `direction`, `extras`, `causal`, `window`, …
    """

    def judge(kernel: Callable[..., Any], shape: Mapping[str, int] | None = None, **options: Any) -> None:
        __tracebackhide__ = True
        from flashpoint._calls import checked
        from flashpoint.shape_schema import Shape
        from flashpoint.verdicts import findings

        local = importlib.import_module(LOCAL)
        asked = options | ({} if shape is None else {"shape": checked(Shape, shape)})
        cases = list(local.verify_kernel(kernel, local.kernel_grid(kernel, **asked)))
        wrong = [case for case in cases if not case.ok]
        lines = []
        for case in wrong:
            lines.append(f"{case.problem}: {case.note}" if case.report is None else case.problem)
            if case.report is not None:
                lines += [f"  {line}" for line in findings(case.report, case.request.layout, case.mistakes)]
        if wrong:
            pytest.fail(f"{len(wrong)} of {len(cases)} cases are wrong:\n" + "\n".join(lines), pytrace=False)
        if all(case.skipped for case in cases):
            pytest.fail("no case could be judged: " + "; ".join(sorted({case.note for case in cases})), pytrace=False)

    return judge
