"""The pytest fixture `judge_attention`, which judges attention functions. pytest loads it if flashpoint is installed.

    def test_my_kernel(judge_attention):
        judge_attention(my_attention, quick=True)                          # everything that the judge checks
        judge_attention(my_attention, {"q_len": 512, "head_dim": 64}, causal=True, dtype="bfloat16")

It needs torch: `pip install '.[torch]'` in a checkout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest


@pytest.fixture
def judge_attention() -> Callable[..., Any]:
    """Return a function that fails the test if an attention function is wrong. It returns the judge's report.

    It has these parameters:

    Args:
        kernel: Your function, called as kernel(q, k, v, causal=…, …) with torch tensors. It returns o, or (o, lse). It
            runs in a process of its own, which imports it, or is a fork of this one for a local function.
        shape: Sizes such as {"q_len": 512, "head_dim": 64}: `batch`, `q_heads`, `kv_heads`, `q_len`, `kv_len`,
            `head_dim`, `value_dim`. None judges all shapes and options.
        quick: About 10 seconds of the judge's own work, in place of 60.
        require: Further properties that must hold: accurate, deterministic, batch-invariant, masked-nan, lse-gradient,
            all.
        options: Options of all cases: `dtype`, `seed`, `direction`, `extras`, `causal`, `window`, …; and
            `empty_rows="nan"` where rows without keys may be NaN.
    """

    def judge(
        kernel: Callable[..., Any],
        shape: Mapping[str, int] | None = None,
        *,
        quick: bool = False,
        require: Sequence[str] = (),
        **options: Any,
    ) -> Any:
        __tracebackhide__ = True
        from flashpoint._calls.service import checked
        from flashpoint.judging import judge_arguments, registered
        from flashpoint_contract.schemas.shapes import Shape

        more = {name: options.pop(name) for name in ("empty_rows", "seconds", "timeout", "save") if name in options}
        arguments = judge_arguments(options | ({} if shape is None else {"shape": checked(Shape, shape)}))
        report = registered()(kernel, quick=quick, require=tuple(require), **arguments, **more)
        if not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report

    return judge
