"""The forward in Triton is right if its keys are split into parts, with any scale, and with TF32."""

from typing import Any

import pytest

from tests.conftest import INTERPRETING
from tests.support.kernels.triton_cases import PLAIN, check, name_of


@pytest.mark.parametrize("scale", [-0.3, *(pytest.param(scale, marks=pytest.mark.slow) for scale in (1.0, 0.0, 1e-42))])
def test_any_scale(scale: float) -> None:
    """Any scale is right. The fast variant scales only the largest product of a row, which needs a scale above 0."""
    check(PLAIN | {"band": "causal"}, 20, 70, batch=1, scale=scale)


@pytest.mark.parametrize(
    "case",
    [
        PLAIN | {"sinks": True},
        pytest.param(PLAIN | {"band": "window", "sinks": True}, marks=pytest.mark.slow),
        pytest.param(PLAIN | {"dropout": True}, marks=pytest.mark.slow),
    ],
    ids=name_of,
)
def test_few_queries_and_many_keys_are_split_and_merged(case: dict[str, Any]) -> None:
    """With few queries and many keys, the keys are split into parts and the results merged; a sink counts once."""
    check(case, 2, 140 if INTERPRETING else 5000, batch=1)


def test_precision_tf32_is_taken() -> None:
    check(PLAIN, 40, 40, batch=1, precision="tf32")
