"""A mistake that only some calls show is named with what these calls have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpoint_contract.judging import Cause
from flashpoint_kernels.judging import relations
from flashpoint_kernels.judging.cases import Case
from flashpoint_kernels.judging.naming import causes
from flashpoint_kernels.judging.process import Worker, target_of
from flashpoint_kernels.judging.signatures import signature_of
from flashpoint_kernels.judging.trial import Clock, Trial
from tests.judge.corpus import WRONG
from tests.judge.right import formula_in_float32

SIZES: dict[str, Any] = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 20, "kv_len": 77, "head_dim": 32}
LONG: dict[str, Any] = {"batch": 1, "kv_heads": 4, "q_len": 6, "head_dim": 16, "value_dim": 16}


_KEPT: dict[Any, Tensor] = {}


def kept_and_cut(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Return each answer of a shape in the same memory, and ignore keys from 64 on."""
    o = formula_in_float32(q, k[:, :, :64], v[:, :, :64])
    return _KEPT.setdefault(o.shape, torch.empty_like(o)).copy_(o)


@contextlib.contextmanager
def trial_of(name: str) -> Iterator[Trial]:
    worker = Worker(target_of(kept_and_cut if name == "kept_and_cut" else WRONG[name].function), "cpu")
    signature = signature_of(worker.start())
    trial = Trial(worker, signature, Clock(1e9), precision="ieee", timeout=60.0, nan_rows=False)
    try:
        yield trial
    finally:
        trial.close()
        worker.close()


def named(name: str, calls: list[dict[str, Any]]) -> Cause:
    """Return the first cause that the judge names after these calls in float32."""
    with trial_of(name) as trial:
        cases = [Case(**(SIZES | {"value_dim": 32, "seed": n} | fields)) for n, fields in enumerate(calls)]
        return causes.explain(trial, [trial.run(case) for case in cases])[0]


BARE = [{"bare": bare, "kv_len": m, "q_len": n} for bare in (True, False) for n, m in ((20, 77), (40, 64), (7, 130))]
MISTAKES: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "window_of_future": (
        [{"window": (5, 7)}, {"window": (9, 3), "values": "sharp"}, {"window": (-1, 7)}, {"window": (-1, 0)}],
        "window-right", "where a window has a left side",
    ),
    "mask_of_first_head": (
        [{"mask": "bool-heads"}, {"mask": "bool", "batch": 1, "q_len": 33, "values": "sharp"}, {"mask": "bool"}],
        "mask-head", "where attn_mask has size 1 for sequences",
    ),
    "dim_above_96": (
        [{"head_dim": 104}, {"head_dim": 112, "values": "sharp"}, {"head_dim": 128}],
        "head-dim-tail", "dimensions of q and k from 96 on are ignored, where D is between 96 and 128",
    ),
    "group_of_eight": (
        [{"q_heads": n, "kv_heads": m, "q_len": r} for n, m in ((16, 2), (8, 1), (24, 3), (4, 2)) for r in (9, 20)],
        "unknown", "where 8 or more query heads share a key head and there are several key heads",
    ),
    "keys_by_1024": (
        [LONG | {"kv_len": 1024}, LONG | {"kv_len": 2048, "values": "sharp"}, LONG | {"kv_len": 1000}],
        "last-tile", "where the number of keys is a multiple of 1,024",
    ),
    "path_without_lse": (BARE, "without-lse", "where lse is not requested"),
    "lengths_of_whole_tiles": ([{"extras": ("kv_lengths",)}] * 3, "kv-lengths", "rounded up to multiples of 16"),
    "sink_without_maximum": ([{"extras": ("sinks",)}, {"extras": ("sinks",), "values": "sharp"}], "sinks", "at most 4"),
    "own_slopes": ([{"extras": ("alibi_slopes",)}] * 2, "alibi", "the usual slopes are used"),
    "backward_8192": ([LONG | {"kv_len": 8300}, LONG], "gradient-key-limit", "ignores keys from 8192 on"),
    "mask_gradient_scaled": ([{"mask": "float"}], "mask-gradient", "the gradient of attn_mask is wrong"),
    "sink_gradient_of_first_sequence": ([{"extras": ("sinks",)}], "sinks-gradient", "the gradient of sinks is wrong"),
    "window_of_whole_tiles": (
        [LONG | {"kv_len": 1500, "window": (100, 0)}, LONG | {"kv_len": 1300, "window": (90, -1), "values": "sharp"}],
        "window-tile", "a whole tile of 64 keys",
    ),
}  # fmt: skip
QUICK = ("window_of_future", "mask_gradient_scaled")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in MISTAKES])
def test_a_mistake_is_named_with_the_calls_that_show_it(name: str) -> None:
    calls, code, text = MISTAKES[name]
    cause = named(name, calls)
    assert cause.code == code, cause
    assert text in cause.text


CONTEXTS = {
    "expanded": "strides", "values_are_keys": "storage", "two_layers": "state", "inputs_on_ctx": "saved-inputs",
    "wrong_in_inference_mode": "inference-mode", "wrong_in_another_thread": "thread",
    "wrong_in_two_threads": "threads", "wrong_under_autocast": "autocast",
}  # fmt: skip
MASKED: dict[str, Any] = {"mask": "bool-one", "forward": True, "bare": True}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "two_layers" else pytest.mark.slow) for n in CONTEXTS]
)
def test_a_call_that_is_wrong_in_one_context_alone_is_named_by_it(name: str) -> None:
    with trial_of(name) as trial:
        case = Case(dtype="bfloat16" if "autocast" in name else "float32", seed=1, **(SIZES | {"value_dim": 32}))
        outcomes = [trial.run(case), trial.run(replace(case, forward=True)), *relations.purity(trial, case)]
        found = causes.explain(trial, outcomes)
    assert [cause.code for cause in found] == [CONTEXTS[name]]
    assert found[0].confirmed


@pytest.mark.slow
def test_a_mask_that_is_read_wrongly_in_each_memory_form_is_not_named_by_one() -> None:
    with trial_of("mask_of_first_sequence") as trial:
        cases = [Case(**(SIZES | {"value_dim": 32, "seed": n} | MASKED)) for n in range(3)]
        outcomes = [trial.run(case) for case in cases]
        outcomes += relations.shared_memory(trial, replace(cases[0], mask="", forward=False))
        assert any(o.failed and o.relation == "a mask in another memory form" for o in outcomes)
        assert [cause.code for cause in causes.explain(trial, outcomes)] == ["mask-batch"]


TURNED: dict[str, Any] = {"views": dict.fromkeys(("q", "k", "v", "do"), "transposed")}
# (case, relation of the call, and in some how it is made) of each call, and {code: confirmed} of its causes.
# Other mistakes give some of the wrong numbers, too.
CONFIRMED: dict[str, tuple[list[tuple[Any, ...]], dict[str, bool]]] = {
    "sees_next": (
        [({"causal": True}, "accuracy"), ({"causal": True, "values": "sharp"}, "accuracy"),
         ({"causal": True, "values": "flat", "dtype": "bfloat16", "seed": 12}, "accuracy")],  # dv alone is wrong
        {"causal-by-one": True},
    ),
    "no_rescale_of_sum_half": (
        [({"kv_len": 199, "dtype": "bfloat16", "values": kind, "seed": seed}, "accuracy")
         for seed, kind in ((0, "normal"), (1, "massive"), (6, "rising"))],  # with the last, dv alone is wrong
        {"missing-rescale": True, "gradient-factor": False},
    ),
    "late_softcap": (
        [({"causal": True, "softcap": 5.0, "q_len": 77, "kv_len": 33, "values": kind}, "accuracy")
         for kind in ("normal", "sharp")],
        {"softcap-late": True},
    ),
    "third_sequence": (
        [({}, "accuracy"), ({"batch": 3}, "another shape after this one")],
        {"batch-index": True},
    ),
    "mask_gradient_of_one_head": (
        [({}, "accuracy"), ({"mask": "float-one"}, "a mask in another memory form")],
        {"mask-gradient": False},
    ),
    "do_strides": (
        [({}, "accuracy"), ({}, "transposed inputs", TURNED),
         ({}, "a gradient of o in another memory form", {"views": {"do": "transposed"}})],
        {"gradient-strides": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "late_softcap" else pytest.mark.slow) for n in CONFIRMED]
)
def test_a_mistake_that_also_gives_the_numbers_is_not_confirmed(name: str) -> None:
    calls, codes = CONFIRMED[name]
    with trial_of(name) as trial:
        outcomes = [
            trial.run(Case(**(SIZES | {"value_dim": 32} | fields)), relation, **dict(*mode))
            for fields, relation, *mode in calls
        ]
        found = causes.explain(trial, outcomes)
    assert {cause.code: cause.confirmed for cause in found} == codes, found


@pytest.mark.slow
def test_memory_that_is_kept_does_not_explain_what_a_new_process_gets_wrong() -> None:
    with trial_of("kept_and_cut") as trial:
        cases = [
            Case(**(SIZES | {"value_dim": 32, "kv_len": m, "seed": m, "forward": True})) for m in (77, 20, 150, 90)
        ]
        found = {cause.code for cause in causes.explain(trial, [trial.run(case) for case in cases])}
    assert "aliasing" in found
    assert len(found) > 1
