"""The catalogue lists the mistakes that a case's options make possible. Each mistake's answers can be computed."""

from typing import Any

import pytest

from flashpoint_kernels.judging.cases import Case
from flashpoint_kernels.judging.naming.catalogue import known, of_gradients
from flashpoint_kernels.judging.naming.mutants import answers
from flashpoint_kernels.judging.values import draw

SIZES: dict[str, Any] = {
    "batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 33, "kv_len": 77, "head_dim": 16, "value_dim": 24,
}  # fmt: skip
CASES = [
    {},
    {"causal": True, "window": (20, 0)},
    {"softcap": 3.0, "scale": 0.3},
    {"mask": "float", "extras": ("alibi_slopes",), "q_heads": 2},
    {"mask": "bool", "dtype": "bfloat16", "batch": 1},
    {"extras": ("sinks", "kv_lengths"), "causal": True},
    {"extras": ("alibi_slopes",), "q_heads": 34, "q_len": 5, "kv_len": 9, "batch": 1},
]


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_every_mistake_that_is_possible_has_answers_of_the_cases_shapes(fields: dict[str, Any]) -> None:
    case = Case(**(SIZES | fields))
    t = draw(case)
    shapes = {"o": (*t["q"].shape[:3], case.value_dim), "lse": t["q"].shape[:3]}
    shapes |= {f"d{name}": t[name].shape for name in "qkv"}
    mistakes = [*known(case), *of_gradients(case)]
    assert len({str(mistake) for mistake in mistakes}) == len(mistakes)
    for mistake in mistakes:
        assert bool(mistake.forward) != bool(mistake.backward), mistake
        assert mistake.text, mistake
        assert mistake.advice, mistake
        for name, x in answers(mistake, t, case, False, gradients=True).items():
            assert x.shape == shapes[name], (mistake, name)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"causal": True}, "causal-missing"),
        ({"window": (20, 11)}, "window-missing"),
        ({"softcap": 3.0}, "softcap-missing"),
        ({"scale": 0.3}, "scale-ignored"),
    ],
)
def test_an_option_that_a_case_lacks_cannot_be_ignored(fields: dict[str, Any], code: str) -> None:
    codes = {mistake.code for mistake in known(Case(**(SIZES | fields)))}
    assert code in codes
    assert code not in {mistake.code for mistake in known(Case(**SIZES))}
