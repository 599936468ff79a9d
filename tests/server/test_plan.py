"""A call has one plan, whatever its format and its varying parts; each served call has its own dropout seed."""

import asyncio
import json
from functools import cache

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from flashpoint_contract.caches import LayerShape
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels.problems.cost import NOMINAL
from flashpoint_server import plan as plans
from flashpoint_server.config.settings import Settings
from flashpoint_server.formats.json import JsonMessage
from flashpoint_server.formats.safetensors import SAFETENSORS
from flashpoint_server.http.request import Request
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.regions import Regions
from flashpoint_server.oip import head as oip_head
from flashpoint_server.oip.infer import HttpMessage
from flashpoint_server.plan import MessageHead, Plans
from flashpoint_server.refusal import Refusal
from tests.fuzz.targets import CODECS, SETTINGS, body_of
from tests.support.messages import message, normal, post

SHAPE = (1, 2, 3, 4)
QKV = tuple((name, TensorInfo("float32", SHAPE)) for name in "qkv")
WIDE_V = "v", TensorInfo("float32", (1, 2, 3, 5))
LAYER = LayerShape(2, 4, 4, "float32")


def device(*backends):
    return DeviceInfo("cpu", "a test", 1 << 30, backends or ("cpu", "tiled", "reference"), 1e9, NOMINAL)


DEVICE = device()


def checked(options, direction="forward", tensors=QKV, surface="json"):
    one = MessageHead()
    one.inputs, one.options, one.surface = tensors, options, surface
    one.check(direction)
    return one


def planned(made, options, direction="forward", tensors=QKV, beside=None, surface="json"):
    return made.of(checked(options, direction, tensors, surface), DEVICE, beside)


@cache  # the safetensors library writes the options in any order
def written(names):
    return message({name: torch.zeros(SHAPE, dtype=torch.float32) for name in names}, causal=True, scale=1)


def read_safetensors(names, direction="forward"):
    request = Request("POST", "/attention", {}, "id")
    request.body = body_of(written(names))
    return asyncio.run(SAFETENSORS.read(request, SETTINGS, CODECS, direction))


def of_safetensors(made, names):
    return made.of(read_safetensors(names), DEVICE)


def of_json(made):
    arrays = {name: torch.zeros(SHAPE, dtype=torch.float32).numpy() for name in "vqk"}
    read = JsonMessage(arrays, {"scale": 1.0, "causal": True, "window": [-1, -1]})
    read.check("forward")
    return made.of(read, DEVICE)


def of_inference(made):
    inputs = [{"name": n, "shape": SHAPE, "datatype": "FP32", "parameters": {"binary_data_size": 96}} for n in "qkv"]
    head = oip_head.parse(json.dumps({"inputs": inputs, "parameters": {"causal": True, "scale": 1}}).encode())
    return made.of(HttpMessage(head, Regions(0, None), "", "forward"), DEVICE)


def test_the_same_call_in_each_format_has_one_plan():
    made = Plans(Settings())
    first = of_safetensors(made, "qkv")
    assert first.spec.options.causal
    assert of_safetensors(made, "vkq") is first
    assert of_json(made) is first
    assert of_inference(made) is first


def test_parts_that_vary_from_call_to_call_make_no_new_plan():
    made = Plans(Settings())
    drops = {"dropout_p": 0.5, "dropout_seed": 1}
    assert planned(made, drops) is planned(made, drops | {"dropout_seed": (1 << 64) - 1})
    calls = [{"caches": ["a"]}, {"caches": ["b"], "layer": 3}, {"caches": ["a"], "at": [7]}]
    one, *others = (planned(made, call, beside=LAYER) for call in calls)
    assert all(other is one for other in others)


def test_what_changes_a_call_makes_another_plan():
    made = Plans(Settings())
    calls = [
        planned(made, {}), planned(made, {"causal": True}), planned(made, {"dropout_p": 0.5}),
        planned(made, {"dropout_p": 0.5, "dropout_seed": 0}), planned(made, {"backend": "reference"}),
        planned(made, {"save": True}), planned(made, {}, tensors=(*QKV[:2], WIDE_V)),
        planned(made, {"caches": ["a"]}, beside=LAYER),
        planned(made, {"caches": ["a"]}, beside=LAYER._replace(dtype="int8")),
        planned(made, {}, "backward", tensors=(*QKV, ("do", QKV[0][1]))),
    ]  # fmt: skip
    assert len({id(one) for one in calls}) == len(calls)


def test_the_outputs_of_a_saved_forward_are_those_that_the_caller_wants():
    made = Plans(Settings())
    assert list(planned(made, {"save": True}).answers) == ["o"]
    assert list(planned(made, {"save": True, "return_lse": True}).answers) == ["o", "lse"]
    assert [t.name for t in planned(made, {"save": True}).outputs] == ["o", "lse"]


def test_an_engine_that_starts_again_has_new_plans():
    made = Plans(Settings())
    call = checked({})
    assert made.of(call, DEVICE).backend == "cpu"
    assert made.of(call, device("tiled")).backend == "tiled"
    with pytest.raises(Refusal, match="cpu"):
        made.of(checked({"backend": "cpu"}), device("tiled"))


def test_messages_with_the_same_head_are_one_and_know_their_plan():
    made = Plans(Settings())
    one, other = read_safetensors("qkv"), read_safetensors("qkv")
    assert one is other
    first = made.of(one, DEVICE)
    assert first is one.plan is made.of(other, DEVICE)
    again = device("tiled")
    assert made.of(one, again) is one.plan is not first
    over_caches = checked({"caches": ["a"]})
    of_layer = made.of(over_caches, DEVICE, LAYER)
    assert (
        made.of(over_caches, DEVICE, LAYER._replace(dtype="int8"))
        is not of_layer
        is made.of(over_caches, DEVICE, LAYER)
    )
    with pytest.raises(Refusal, match="do: missing"):
        made.of(read_safetensors("qkv", "backward"), DEVICE)
    assert read_safetensors("qkv").direction == "forward"


def test_the_plans_used_last_are_kept(monkeypatch):
    monkeypatch.setattr(plans, "KEPT", 2)
    made = Plans(Settings())
    first, second = planned(made, {}), planned(made, {"causal": True})
    assert planned(made, {}) is first
    planned(made, {"scale": 2.0})
    assert planned(made, {}) is first
    assert planned(made, {"causal": True}) is not second


def test_a_surface_refuses_by_name_what_another_has_planned():
    made = Plans(Settings())
    tensors = (*QKV[:1], *((n, TensorInfo("int8", SHAPE)) for n in "kv"), ("k_scale", TensorInfo("float32", ())),
               ("v_scale", TensorInfo("float32", ())))  # fmt: skip
    planned(made, {}, tensors=tensors, surface="safetensors")
    with pytest.raises(Refusal) as refused:
        planned(made, {}, tensors=tensors)
    assert [field for field, _ in refused.value.errors] == ["k_scale", "v_scale"]


def test_calls_with_one_plan_have_their_own_dropout_seeds(server):
    tensors = {name: normal(*SHAPE, seed=seed) for seed, name in enumerate("qkv")}

    def dropped(seed):
        answer = post(server, "/attention", message(tensors, dropout_p=0.5, dropout_seed=seed))
        assert json.loads(answer.metadata["dropout_seed"]) == seed
        return answer.tensors["o"].tolist()

    first, second = dropped(1), dropped(2)
    assert first != second
    assert dropped(1) == first
    assert dropped(0) not in (first, second)
