"""The gradient kernels for Hopper load tiles during products; launches of over PROGRAMS_OF_HOPPER are split."""

import pytest
import torch

from flashpoint_kernels import Options, Problem, run
from flashpoint_kernels.problems.problem import with_forwards
from flashpoint_kernels.triton_backend.host import launch
from flashpoint_kernels.triton_backend.host.launch import backward_calls
from flashpoint_kernels.triton_backend.kernels.interpret import INTERPRETED
from tests.support.kernels import gluon_interpreter
from tests.support.kernels.hopper import HALF, ON_SM_90, TILES, backward_kernels
from tests.support.kernels.triton_cases import options_of, tensors_of

pytestmark = ON_SM_90


@pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter counts copies")
@pytest.mark.usefixtures("hopper_path")
def test_dq_loads_a_tile_of_keys_while_it_uses_two() -> None:
    """A step of dQ multiplies with its tile of keys and the one before, while the copy of a later tile is under way."""
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
    assert copies[groups * 4] >= 1, copies  # only 4 products of a group, at its last tile, have no copy beside them


@pytest.mark.slow
@pytest.mark.usefixtures("hopper_path")
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
