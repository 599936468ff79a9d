"""A benchmark request (a preset or a grid) is expanded into the cases to time."""

from flashpoint import BenchmarkRequest
from flashpoint_kernels.timing import preset
from flashpoint_server.engine.benchmarks.cases import cases_of


def test_a_preset_is_timed_on_the_backends_that_are_named():
    every = cases_of(BenchmarkRequest(preset="papers"), "cpu")
    assert every == preset("papers", "cpu")
    named = cases_of(BenchmarkRequest(preset="papers", backends=("tiled", "flex")), "cpu")
    assert [case.backend for case in named[:2]] == ["tiled", "flex"]
    assert {case.problem for case in named} == {case.problem for case in every}
    assert len(named) == 2 * len({case.problem for case in every})


def test_a_grid_is_every_combination():
    request = BenchmarkRequest.model_validate(
        {"shapes": [{"q_len": n, "head_dim": 64, "kv_heads": 1} for n in (64, 128)], "causal": [False, True],
         "directions": ["forward", "both"], "dtypes": ["float32", "bfloat16"], "backends": ["naive"]}
    )  # fmt: skip
    assert len(cases_of(request, "cpu")) == 16
    unnamed = cases_of(request.model_copy(update={"backends": ()}), "cpu")
    assert {"naive", "tiled", "cpu"} <= {case.backend for case in unnamed}
    explicit = [case.direction for case in unnamed if case.backend == "naive_explicit"]
    assert set(explicit) == {"both"}  # its forward is that of naive: a case of it would be skipped
    named = cases_of(request.model_copy(update={"backends": ("naive_explicit",)}), "cpu")
    assert {case.direction for case in named} == {"forward", "both"}
