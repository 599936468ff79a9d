"""Cases are drawn from seeds, can be rebuilt from their fields, and cross options with classes of lengths."""

from __future__ import annotations

import itertools

import pytest

import flashpoint_kernels
from flashpoint_kernels.judging.cases import CLASSES, TYPES, Case, crossed, listed, random_case
from tests.judge.corpus import RIGHT, WRONG

EVERY = ("causal", "scale", "window", "softcap", "attn_mask", "alibi_slopes", "sinks", "kv_lengths")


def test_a_random_case_finds_a_wrong_kernel() -> None:
    """A random case finds a wrong kernel, so a test of right kernels on random cases (test_trial.py) can fail."""
    case = random_case(4, ("causal",)).to_dict()
    assert flashpoint_kernels.judge(WRONG["no_rescale"].function, only=case | {"kv_len": 300}).verdict == "wrong"


def test_each_option_meets_each_class_type_and_gradient() -> None:
    """With quick, each pair of option, class of lengths, type and gradients occurs; in full, each combination."""
    kinds = set(itertools.product(TYPES, (False, True)))
    for quick in (True, False):
        cases = list(crossed(3, quick, EVERY, False))
        single = [case for case in cases if len(case.options - {"causal"}) <= 1]
        for option in EVERY:
            having = [case for case in single if option in case.options]
            assert {(case.dtype, case.forward) for case in having} == kinds
            assert len({(case.q_len, case.kv_len) for case in having}) >= len(CLASSES)
            for shape in () if quick else {case.shape for case in having}:
                assert {(c.dtype, c.forward) for c in cases if c.shape == shape and option in c.options} == kinds
    pairs = {tuple(sorted(pair)) for case in cases for pair in itertools.combinations(case.options, 2)}
    assert len(pairs) == len(EVERY) * (len(EVERY) - 1) / 2


def test_quick_has_long_cases_groups_masks_and_odd_dimensions() -> None:
    for seed in range(5):
        cases = listed(seed, quick=True, takes=EVERY)
        assert {case.head_dim for case in cases} >= {72, 104, 112, 256}
        assert {8, 16} <= {case.group for case in cases}
        forms = {form for case in cases for form in case.mask.split("-")[1:]}
        assert forms >= {"one", "keys", "heads", "tiles", "empty"}
        assert any(case.kv_len % 1024 == 0 for case in cases)
        assert any(case.causal and min(case.q_len, case.kv_len) > 1024 for case in cases)
        assert any(case.kv_len > 8192 and not case.forward for case in cases)
        assert any(case.q_len == 1 and case.head_dim == 256 for case in cases)
        many = [case.options for case in cases if case.batch * case.q_heads > 132 and case.q_heads > 32]
        assert all(any(option in options for options in many) for option in EVERY)


def test_quick_has_each_length_for_a_function_of_few_options() -> None:
    lengths = set(itertools.chain(*CLASSES.values()))
    for seed, takes in itertools.product(range(5), (("causal",), ("causal", "window"), ())):
        cases = list(crossed(seed, True, takes, False))
        assert {(case.q_len, case.kv_len) for case in cases} == lengths
        assert any(case.q_len == 1 and case.head_dim == 256 for case in cases)
        in_float32 = [case for case in cases if case.dtype == "float32" and not case.forward]
        assert max(case.q_len for case in in_float32) > 2048
        assert max(case.kv_len for case in in_float32) > 8192


@pytest.mark.parametrize("dtype", TYPES)
def test_one_data_type_has_as_many_quick_cases_as_three(dtype: str) -> None:
    cases = listed(2, quick=True, takes=EVERY, dtypes=(dtype,))
    assert {case.dtype for case in cases} == {dtype}
    for option in EVERY:
        having = [case for case in cases if option in case.options]
        assert {case.forward for case in having} == {True, False}
        assert len({(case.q_len, case.kv_len) for case in having}) >= len(CLASSES)


def test_sequences_of_ragged_cases_have_unlike_lengths() -> None:
    case = Case(batch=4, q_len=50, kv_len=90, unlike=True, seed=2)
    lengths = case.lengths
    assert (50, 90) in lengths
    assert any(n == 0 < m for n, m in lengths)
    assert any(m == 0 < n for n, m in lengths)
    assert len(set(lengths)) == 4
    assert any(each.unlike for each in crossed(1, True, ("causal",), True))
    report = flashpoint_kernels.judge(RIGHT["varlen"], only=case.to_dict() | {"causal": True}, dtype="float32")
    assert (report.verdict, report.layout) == ("right", "thd"), report.lines()


@pytest.mark.parametrize("name", ["varlen_packed", "varlen_packed_keys"])
def test_packed_ragged_sequences_of_unlike_lengths_are_judged(name: str) -> None:
    """q, k and v that are one tensor have one length in each sequence."""
    case = Case(batch=4, q_len=50, kv_len=50, unlike=True, seed=2)
    assert len(set(case.lengths)) > 1
    report = flashpoint_kernels.judge(RIGHT[name], only=case.to_dict(), dtype="float32")
    assert (report.verdict, report.layout) == ("right", "thd"), report.lines()


MISTAKES = {
    "mask_of_first_tile": {"mask": "bool-one-tiles", "kv_len": 200},
    "mask_of_whole_rows": {"mask": "float-one-empty"}, "mask_of_first_sequence": {"mask": "bool-one"},
    "mask_gradient_of_one_head": {"mask": "float-one"}, "sink_gradient_of_first_sequence": {"extras": ["sinks"]},
    "sink_of_each_split": {"extras": ["sinks"], "kv_len": 700}, "slopes_of_32_heads": {"extras": ["alibi_slopes"]},
    "mask_of_1024_keys": {"mask": "bool-keys", "kv_len": 1500, "values": "aimed"},
    "window_of_decoding": {"window": [16, 0], "q_len": 1, "kv_len": 300}, "path_without_lse": {"bare": True},
    "lengths_of_whole_tiles": {"extras": ["kv_lengths"]}, "dim_72": {"head_dim": 72, "value_dim": 72},
    "keys_by_1024": {"kv_len": 1024, "values": "aimed"}, "backward_8192": {"kv_len": 8300, "q_len": 3},
    "varlen_of_equal_lengths": {"unlike": True}, "varlen_gradient_of_longest": {"unlike": True},
    "below_1e_6": {"values": "tiny"},
}  # fmt: skip


SLOW = {"backward_8192"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MISTAKES])
def test_the_cases_of_a_kind_show_its_mistakes(name: str) -> None:
    heads = {"q_heads": 40, "kv_heads": 40} if name == "slopes_of_32_heads" else {"q_heads": 4, "kv_heads": 2}
    case = Case(batch=3, q_len=20, kv_len=77, head_dim=32, value_dim=32, seed=7).to_dict() | heads | MISTAKES[name]
    report = flashpoint_kernels.judge(WRONG[name].function, quick=True, only=case)
    assert report.verdict == "wrong", report.lines()
    right = RIGHT["varlen" if name.startswith("varlen") else "every_option"]
    assert flashpoint_kernels.judge(right, quick=True, only=case).verdict in ("right", "imprecise")
