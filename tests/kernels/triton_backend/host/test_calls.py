"""Kernel, tile and constants identify a call's code; calls run in order; a compilation's error reaches its future."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from flashpoint_kernels import Options, Problem
from flashpoint_kernels.triton_backend.host import launch
from flashpoint_kernels.triton_backend.host.calls import Call, Code, run_calls, start_compiling
from flashpoint_kernels.triton_backend.kernels.groups import Constants
from tests.conftest import DEVICE
from tests.support.kernels.solving import qkv


def problem_of(seed: int = 0) -> Problem:
    t = {name: x for name, x in qkv(1, 2, 3, 300, 16, seed=seed).items() if name != "do"}
    problem = Problem.create(t, Options(return_lse=True))
    for answer in problem.outputs.values():
        answer.fill_(torch.nan)
    return problem


def test_equal_codes_have_one_variant_and_each_part_counts() -> None:
    (call, *_) = launch.forward_calls([problem_of()])
    code = call.code

    def variant(**changed: object) -> object:
        about = {"kernel": code.kernel, "tile": code.tile, "device": code.device, "constants": code.constants} | changed
        return Code(**about).variant  # type: ignore[arg-type]

    assert variant() == code.variant
    others = [
        variant(tile=replace(code.tile, num_warps=2 * code.tile.num_warps)),
        variant(tile=replace(code.tile, num_stages=code.tile.num_stages + 1)),
        variant(constants=replace(code.constants, PACKED=not code.constants.PACKED)),
        variant(constants=Constants()),
        variant(kernel=launch.attention_delta),
    ]
    assert len({code.variant, *others}) == 1 + len(others)


def test_calls_run_in_order_and_those_without_programs_are_left_out() -> None:
    problem = problem_of()
    calls = [*launch.forward_calls([problem])]
    assert len([call for call in calls if call.programs]) == 2, "the parts of the keys, then their merge"

    def unused() -> tuple[object, ...]:
        raise AssertionError("a call without programs has no arguments")

    run_calls([Call(calls[0].code, 0, unused), *calls, Call(calls[0].code, 0, unused)])
    assert all(x.isfinite().all() for x in problem.outputs.values())
    run_calls([])
    expected = problem_of()
    launch.forward([expected])
    assert all(torch.equal(problem.outputs[name], x) for name, x in expected.outputs.items())
    assert problem.outputs["o"].device.type == DEVICE


def test_what_a_compilation_raises_comes_out_of_its_future() -> None:
    calls = [*launch.forward_calls([problem_of()])]

    def broken() -> Iterator[Call]:
        yield calls[0]
        raise OSError("no space left")

    assert start_compiling(lambda: calls).result(60) is None
    with pytest.raises(OSError, match="no space left"):
        start_compiling(broken).result(60)
