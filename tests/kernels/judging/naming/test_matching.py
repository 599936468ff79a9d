"""If a kernel's scores have a wrong factor, the judge finds the factor and its formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

import flashpoint_kernels


def with_scale(scale: Callable[[int, int], float]) -> Callable[..., Tensor]:
    """Return an attention function with the scale `scale(D, Sk)`."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        s = q.float() @ k.float().mT * scale(q.shape[3], k.shape[2])
        return (s.softmax(-1) @ v.float()).to(q.dtype)

    return attention


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        *(
            pytest.param(scale, said, marks=pytest.mark.slow)
            for scale, said in (
                (
                    lambda d, m: (d + 1) ** -0.5,
                    "1/sqrt(D + 1), not 1/sqrt(D): scores are sqrt(D/(D + 1)) times the right ones",
                ),
                (lambda d, m: m**-0.5, "1/sqrt(Sk), not 1/sqrt(D): scores are sqrt(D/Sk) times the right ones"),
                (lambda d, m: 1.3 * d**-0.5, "scores are 1.3 times the right ones"),
            )
        ),
        (lambda d, m: (1.1 + m / 500) * d**-0.5, "times the right ones, which differs from case to case"),
    ],
)
def test_a_factor_of_the_scores_is_found_with_its_formula(scale: Callable[[int, int], float], said: str) -> None:
    report = flashpoint_kernels.judge(with_scale(scale), quick=True, dtype="float32", seed=1, layout="bhsd")
    assert [(cause.code, cause.confirmed) for cause in report.causes] == [("scale", True)], report.lines()
    assert said in report.causes[0].text
