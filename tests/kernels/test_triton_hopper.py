"""The Hopper path (descriptors, roles of warps) gives the answers of the general path; which problems take it."""

import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from flashpoint_kernels import Options, Problem, run, verify
from flashpoint_kernels.problems.problem import with_forwards
from flashpoint_kernels.triton_backend.host import config, launch
from flashpoint_kernels.triton_backend.host.launch import backward_calls, forward_calls
from flashpoint_kernels.triton_backend.kernels.interpret import INTERPRETED
from tests.conftest import DEVICE
from tests.support.kernels import gluon_interpreter
from tests.support.kernels.triton_cases import PLAIN, name_of, options_of, tensors_of

pytestmark = pytest.mark.skipif(config.chip_of(torch.device(DEVICE)).arch != 90, reason="the path of sm_90")
TILES = config.config_for(torch.device(DEVICE), "float16", 16, 16, 0, True)
THD = max(70, 3 * TILES.few_queries + 3)  # two of three sequences have queries, too many for packed blocks
HALF = PLAIN | {"dtype": "float16"}
CASES = [
    (HALF, 70, 90),
    (HALF, 130, 96),  # only whole tiles
    (HALF | {"dtype": "bfloat16", "band": "causal", "group": 2}, 70, 130),
    (HALF | {"band": "top_left", "layout": "bshd", "dims": (24, 40), "dlse": True}, 70, 45),
    (HALF | {"layout": "bshd", "group": 2, "dtype": "bfloat16"}, 70, 33),
    (HALF | {"dims": (160, 160)}, 70, 70),
    (HALF | {"band": "causal", "lengths": True, "dims": (64, 64)}, 66, 99),
    (HALF | {"band": "causal", "layout": "thd", "dtype": "bfloat16", "group": 2}, THD, 66),
]
FAST = (0, 7)


@pytest.fixture
def _asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_HOPPER", "1")


def kernels(tensors: dict[str, torch.Tensor], options: Options) -> list[str]:
    """Return the forward kernels that would run for a problem."""
    problem = Problem.create({n: t for n, t in tensors.items() if n not in ("do", "dlse")}, options)
    return [call.kernel.__name__ for call in forward_calls([problem]) if call.programs]


def backward_kernels(tensors: dict[str, torch.Tensor], options: Options) -> list[str]:
    problem = Problem.create(tensors, options, "backward")
    _, whole = with_forwards([problem])
    return [call.kernel.__name__ for call in backward_calls(whole, [{}]) if call.programs]


@pytest.mark.usefixtures("_asked")
@pytest.mark.parametrize(
    ("case", "q_len", "kv_len"),
    [pytest.param(*case, marks=[] if n in FAST else pytest.mark.slow) for n, case in enumerate(CASES)],
    ids=lambda x: name_of(x) if isinstance(x, dict) else None,
)
def test_answers(case: dict[str, Any], q_len: int, kv_len: int) -> None:
    tensors = tensors_of(case, q_len, kv_len)
    assert kernels(tensors, options_of(case)) == ["attention_forward_hopper"]
    of_hopper = "" if case["dims"] == (160, 160) else "_hopper"  # no registers for its gradients
    assert backward_kernels(tensors, options_of(case)) == [
        "attention_delta", f"attention_backward_kv{of_hopper}", f"attention_backward_q{of_hopper}",
    ]  # fmt: skip
    report = verify(tensors, options_of(case))
    assert report.ok, "\n".join(str(t) for t in report.tensors if not t.ok)


@pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter counts copies")
@pytest.mark.usefixtures("_asked")
def test_dq_loads_a_tile_of_keys_while_it_uses_two() -> None:
    """A step of dQ uses two tiles of keys, and loads a third during all three products of each group of warps."""
    tile = TILES.backward_q
    tiles = 7
    tensors = tensors_of(HALF, tile.block_m + 6, tiles * tile.block_n, batch=1)
    problem = Problem.create(tensors, Options(grads=("dq",)), "backward")
    run([problem], "triton")
    (whole,) = with_forwards([problem])[1]
    calls = {call.kernel.__name__: call for call in backward_calls([whole], [{}]) if call.programs}
    gluon_interpreter.observed.clear()
    calls["attention_backward_q_hopper"].run()
    copies = sorted(gluon_interpreter.observed)
    groups = 2 * calls["attention_backward_q_hopper"].programs
    assert len(copies) == groups * (3 * tiles + 1)
    assert copies[groups * 4] >= 1, copies  # the last step of a group has nothing left to load


@pytest.mark.slow
@pytest.mark.usefixtures("_asked")
def test_heads_that_a_sequence_has_not_and_sequences_that_see_nothing() -> None:
    """Beside problems of more heads each has the bits that it has alone; without keys o is 0 and lse −∞."""
    g = torch.Generator().manual_seed(3)
    problems: dict[str, list[Problem]] = {"forward": [], "backward": []}
    for heads, q_len, kv_len in ((1, 70, 33), (3, 33, 40), (2, 40, 0)):
        tensors = {
            name: torch.randn((1, heads, n, 16), generator=g).half().to(DEVICE)
            for name, n in (("q", q_len), ("k", kv_len), ("v", kv_len), ("do", q_len))
        }
        problems["backward"].append(Problem.create(tensors, Options(causal=True), "backward"))
        del tensors["do"]
        problems["forward"].append(Problem.create(tensors, Options(causal=True, return_lse=True)))
    grouped = {}
    for direction, each in problems.items():
        for problem in each:
            for t in problem.outputs.values():
                t.fill_(float("nan"))
        run(each, "triton")
        grouped[direction] = [{name: t.clone() for name, t in problem.outputs.items()} for problem in each]
        for problem, answer in zip(each, grouped[direction], strict=True):
            run([problem], "triton")
            assert all(torch.equal(problem.outputs[name], t) for name, t in answer.items())
            assert not any(t.isnan().any() for t in answer.values())
    assert grouped["forward"][2]["o"].abs().max() == 0
    assert (grouped["forward"][2]["lse"] == float("-inf")).all()
    assert grouped["backward"][2]["dq"].abs().max() == 0


@pytest.mark.slow
@pytest.mark.usefixtures("_asked")
def test_more_programs_than_a_launch_has_descriptors_for_take_several(monkeypatch: pytest.MonkeyPatch) -> None:
    case = HALF | {"band": "causal", "group": 2}
    q_len, kv_len = TILES.backward_q.block_m + 6, TILES.backward_kv.block_n + 8
    tensors, options = tensors_of(case, q_len, kv_len, batch=1), options_of(case)
    alone = Problem.create(tensors, options, "backward")
    run([alone], "triton")
    monkeypatch.setattr(launch, "PROGRAMS_OF_HOPPER", 2)
    assert len(backward_kernels(tensors, options)) > 3
    cut = Problem.create(tensors, options, "backward")
    run([cut], "triton")
    assert all(torch.equal(cut.outputs[name], t) for name, t in alone.outputs.items())


@pytest.mark.usefixtures("_asked")
@pytest.mark.parametrize("multiprocessors", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 1000))])
def test_bits_do_not_depend_on_how_many_programs_share_out_the_blocks(
    multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some blocks between others see no key; with 1,000 multiprocessors each block has a separate program."""
    g = torch.Generator().manual_seed(5)

    def problem(heads: int, q_len: int, kv_len: int) -> Problem:
        lengths = {"q": q_len, "k": kv_len, "v": kv_len}
        tensors = {name: torch.randn((1, heads, n, 16), generator=g).half().to(DEVICE) for name, n in lengths.items()}
        return Problem.create(tensors, Options(causal=True, return_lse=True))

    problems = [problem(1, 150, 70), problem(3, 70, 130), problem(2, TILES.few_queries + 32, 0)]
    run(problems, "triton")
    expected = [{name: t.clone() for name, t in each.outputs.items()} for each in problems]
    chip = config.chip_of(torch.device(DEVICE))
    monkeypatch.setattr(config, "stand_in", replace(chip, multiprocessors=multiprocessors))
    blocks = sum(call.programs for call in forward_calls(problems))
    assert blocks == multiprocessors if multiprocessors < 1000 else 3 < blocks < 1000
    for each in problems:
        for t in each.outputs.values():
            t.fill_(float("nan"))
    run(problems, "triton")
    for each, answer in zip(problems, expected, strict=True):
        assert all(torch.equal(each.outputs[name], t) for name, t in answer.items())


@pytest.mark.usefixtures("_asked")
def test_what_the_copy_engine_cannot_take_goes_through_pointers() -> None:
    def one(*shape: int) -> torch.Tensor:
        return torch.randn(shape).half().to(DEVICE)

    fine = {"q": one(1, 2, 70, 16), "k": one(1, 2, 70, 16), "v": one(1, 2, 70, 16)}
    assert kernels(fine, Options()) == ["attention_forward_hopper"]
    assert kernels({**fine, "v": one(1, 1, 70, 16).expand(1, 2, 70, 16)}, Options()) == ["attention_forward_hopper"]
    for tensors, options in (
        ({**fine, "k": one(1, 2, 70, 20)[..., :16]}, Options()),  # rows 40 bytes apart
        ({**fine, "k": one(1, 2, 1, 16).expand(1, 2, 70, 16)}, Options()),  # all rows share memory
        ({**fine, "q": one(1, 1, 70, 16).expand(1, 2, 70, 16)}, Options()),  # all heads share memory
        (fine, Options(window=(5, 5))),  # level 1
        (fine, Options(scale=-1.0)),
        ({name: t.float() for name, t in fine.items()}, Options()),
    ):
        assert kernels(tensors, options) == ["attention_forward"]
    split = {"q": one(1, 2, 5, 16), "k": one(1, 2, 1100, 16), "v": one(1, 2, 1100, 16)}
    assert kernels(split, Options()) == ["attention_forward", "merge_parts"]


def test_it_is_on_unless_0_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.ones((1, 1, 70, 16), dtype=torch.float16, device=DEVICE) for name in "qkv"}
    for value, path in (
        ("", "attention_forward_hopper"),
        ("0", "attention_forward"),
        ("1", "attention_forward_hopper"),
    ):
        monkeypatch.setenv("FLASHPOINT_HOPPER", value)
        assert kernels(tensors, Options()) == [path]
    monkeypatch.setenv("FLASHPOINT_HOPPER", "yes")
    with pytest.raises(ValueError, match="FLASHPOINT_HOPPER must be 0 or 1, not 'yes'"):
        kernels(tensors, Options())


@pytest.mark.skipif(not INTERPRETED, reason="for Triton's interpreter")
@pytest.mark.usefixtures("_asked")
def test_without_the_tests_interpreter_of_gluon_the_path_is_not_taken_and_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = {name: torch.ones(1, 1, 70, 16, dtype=torch.float16) for name in "qkv"}
    assert kernels(tensors, Options()) == ["attention_forward_hopper"]
    monkeypatch.setattr(config, "stand_in", None)
    assert kernels(tensors, Options()) == ["attention_forward"]
    name = "flashpoint_kernels.triton_backend.hopper.gluon"
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RuntimeError, match="need a GPU of sm_90: Triton's interpreter does not run Gluon"):
        import_module(name)
