"""The infer routes give the same bits as the other routes, with the same options, API keys, limits and deadlines."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from tests.support.messages import message
from tests.support.oip.grpc_calls import HANG, request
from tests.support.oip.held import ALL
from tests.support.oip.message import LENGTH, call, entry, infer, raw, wanted
from tests.support.oip.problem import GRAD, B, D, H, S, near, problem, truth

SMALL = problem()


def test_options_change_the_answer(url):
    parameters = {"window_left": 3, "window_right": 0, "scale": 0.5, "softcap": 2.0, "binary_data_output": True}
    actual = infer(url, "attention", SMALL, parameters=parameters).tensors["o"]
    q, k, v = (SMALL[n].double() for n in "qkv")
    distance = torch.arange(S)[:, None] - torch.arange(S)
    s = 2 * torch.tanh(0.5 * q @ k.transpose(-1, -2) / 2)
    near(actual, s.masked_fill((distance > 3) | (distance < 0), -torch.inf).softmax(-1) @ v, 5e-6)


def test_every_kind_of_optional_input(url):
    mask = (torch.arange(S)[:, None] + torch.arange(S)) % 3 > 0
    with_mask = infer(url, "attention", {**SMALL, "attn_mask": mask}, parameters={"binary_data_output": True})
    near(with_mask.tensors["o"], truth(SMALL, mask=torch.zeros(S, S).masked_fill(~mask, -torch.inf))["o"], 2e-6)
    more = {
        "sinks": torch.tensor([0.5, -1.0]),
        "alibi_slopes": torch.tensor([0.5, 0.25]),
        "q_lengths": torch.tensor([9]),
    }
    padded = infer(url, "attention", {**SMALL, **more}, parameters={"binary_data_output": True})
    assert (padded.tensors["o"][:, :, 9:] == 0).all()
    starts = torch.tensor([0, 7, S])
    packed = {n: t[0].transpose(0, 1).contiguous() for n, t in SMALL.items()}
    cu = {"cu_seqlens_q": starts, "cu_seqlens_k": starts.int()}
    ragged = infer(url, "attention", {**packed, **cu}, parameters={"layout": "thd", "binary_data_output": True})
    alone = infer(url, "attention", {n: t[:, :, :7] for n, t in SMALL.items()}, parameters={"binary_data_output": True})
    near(ragged.tensors["o"][:7].transpose(0, 1)[None], alone.tensors["o"].double(), 1e-6)


def test_empty_tensors(url):
    none = {**SMALL, "k": SMALL["k"][:, :, :0], "v": SMALL["v"][:, :, :0]}
    parameters = {"binary_data_output": True, "return_lse": True}
    for how in ({"parameters": parameters}, {"numbers": "qkv", "parameters": {"return_lse": True}}):
        actual = infer(url, "attention", none, **how).tensors
        assert (actual["o"] == 0).all()
        assert (actual["lse"] == -torch.inf).all()
    nobody = infer(url, "attention", {**SMALL, "q": SMALL["q"][:, :, :0]}, parameters=parameters).tensors
    assert nobody["o"].shape == (B, H, 0, D)


def test_the_id_comes_back(url):
    assert infer(url, "attention", SMALL, id="a request, ünîcode").head["id"] == "a request, ünîcode"
    assert "id" not in infer(url, "attention", SMALL).head
    answer = infer(url, "attention", SMALL).head
    assert (answer["model_name"], answer["model_version"]) == ("attention", "1")


def test_a_deadline_and_a_priority(url):
    late = infer(url, "attention", SMALL, parameters={"timeout": 1})
    assert late.status != 200
    assert "deadline" in late.error
    for priority in (0, 1, 10):
        assert infer(url, "attention", SMALL, parameters={"timeout": 60_000_000, "priority": priority}).status == 200


Q = entry("q", SMALL["q"])


SIZE = Q["parameters"]["binary_data_size"]


def broken(**changes):
    """Return the head of a request whose first input has these fields changed. None removes a field."""
    first = {name: value for name, value in {**Q, **changes}.items() if value is not None}
    return json.dumps({"inputs": [first, entry("k", SMALL["k"]), entry("v", SMALL["v"])]}).encode()


INVALID = {
    "a datatype nobody knows": ("q", {"datatype": "FP31"}, {}),
    "a datatype that is not served": ("q", {"datatype": "INT8", "parameters": {"binary_data_size": SIZE // 4}}, {}),
    "strings": ("q", {"datatype": "BYTES"}, {}),
    "an unknown input": ("w", {"name": "w"}, {}),
    "an unknown parameter": ("casual", {}, {"parameters": {"casual": True}}),
    "an unknown parameter of an input": ("q", {"parameters": {"binary_data_size": SIZE, "offset": 0}}, {}),
    "a negative dimension": ("q", {"shape": [-1, -1, S, D]}, {}),
    "a shape of floats": ("q", {"shape": [1.0, H, S, D]}, {}),
    "a shape that overflows": ("q", {"shape": [1 << 40, 1 << 40, 0, D], "parameters": {"binary_data_size": 0}}, {}),
    "too many dimensions": ("q", {"shape": [1] * 17, "parameters": {"binary_data_size": 4}}, {}),
    "an input twice": ("k", {"name": "k"}, {}),
    "an output twice": ("o", {}, {"outputs": [wanted("o"), wanted("o")]}),
    "a parameter that is a list": ("window", {}, {"parameters": {"window": [1, 2]}}),
    "gradients that are no names": ("grads", {}, {"parameters": {"grads": True}}),
    "a parameter of another type": ("causal", {}, {"parameters": {"causal": "yes"}}),
    "a window by another name, too": ("window", {}, {"parameters": {"window": "1", "window_left": 1}}),
    "a window of words": ("window", {}, {"parameters": {"window_left": "wide"}}),
    "a gradient that is none": ("dw", {}, {"outputs": [wanted("dw")]}),
    "an output that is left out": ("lse", {}, {"outputs": [wanted("lse")], "parameters": {"return_lse": False}}),
    "classification": ("o", {}, {"outputs": [wanted("o", classification=1)]}),
    "binary_data of a number": ("binary_data", {}, {"outputs": [wanted("o", binary_data=1)]}),
    "a negative timeout": ("timeout", {}, {"parameters": {"timeout": -1}}),
    "a timeout of words": ("timeout", {}, {"parameters": {"timeout": "soon"}}),
    "a priority beyond the last": ("priority", {}, {"parameters": {"priority": 11}}),
    "a sequence": ("sequence_id", {}, {"parameters": {"sequence_id": 7}}),
    "numbers of another shape": ("q", {"parameters": None, "data": [0.0]}, {}),
    "numbers that are words": ("q", {"shape": [1], "parameters": None, "data": ["nought"]}, {}),
    "numbers beyond the datatype": ("q", {"shape": [1], "datatype": "FP16", "parameters": None, "data": [1e9]}, {}),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_request_is_422_and_names_what_is_wrong(url, name):
    field, changes, more = INVALID[name]
    document = json.loads(broken(**changes)) | more
    size = sum(i.get("parameters", {}).get("binary_data_size", 0) for i in document["inputs"])
    head = json.dumps(document).encode()
    reply = call(url, "POST", "/v2/models/attention/infer", head + bytes(size), **{LENGTH: len(head)})
    assert reply.status == 422, reply.body
    assert field in reply.error


PATH = "/v2/models/attention/infer"


KEY = {"authorization": "Bearer all"}


@pytest.mark.parametrize(("path", "model", "names"), [("", "attention", "qkv"), ("/grad", "attention_grad", GRAD)])
def test_an_answer_is_bit_for_bit_that_of_the_other_encoding(locked, path, model, names):
    tensors = problem(names=names)
    body = message(tensors, causal=True, window=[7, -1])
    ours = call(locked.url, "POST", "/attention" + path, body, content_type="application/vnd.safetensors", **KEY)
    assert ours.status == 200, ours.body
    parameters = {"causal": True, "window_left": 7, "binary_data_output": True}
    theirs = infer(locked.url, model, tensors, parameters=parameters, headers=KEY)
    data = b"".join(raw(t) for t in theirs.tensors.values())
    assert ours.body.endswith(data)
    assert theirs.headers["x-backend"] == theirs.head["parameters"]["backend"] == ours.headers["x-backend"]
    assert theirs.headers["server-timing"].startswith("decode;dur=")


def test_a_key_is_needed_and_its_right(locked):
    for headers, status in (({}, 401), ({"authorization": "Bearer looks"}, 403)):
        refused = infer(locked.url, "attention", SMALL, headers=headers)
        assert refused.status == status
        assert "key" in refused.error
    for path, right in (("", "looks"), ("/models/attention", "looks"), ("/models/attention/stats", "counts")):
        assert call(locked.url, "GET", "/v2" + path).status == 401
        assert call(locked.url, "GET", "/v2" + path, authorization="Bearer asks").status == 403
        assert call(locked.url, "GET", "/v2" + path, authorization=f"Bearer {right}").status == 200
    assert infer(locked.url, "attention", SMALL, headers={"authorization": "Bearer asks"}).status == 200
    for path in ("/health/live", "/health/ready", "/models/attention/ready"):
        assert call(locked.url, "GET", "/v2" + path).status == 200


@pytest.mark.parametrize(("ms", "us"), [(60_000, 1), (1, 60_000_000)])
def test_the_sooner_deadline_counts(held, ms, us):
    with held.shut() as name:
        headers = {**KEY, "x-request-id": name, "x-timeout-ms": ms}
        parameters = {"timeout": us, "backend": "reference"}
        late = infer(held.server.url, "attention", SMALL, headers=headers, parameters=parameters)
    assert late.status == 504
    assert "deadline" in late.error


def ask_with_priority(held, pool, surface, name, level):
    """Ask for a launch of its own in the background, with Triton's priority `level`; 1 is the first."""
    name = f"{name}-{surface.replace(' ', '-')}"
    urgent = {"x-priority": str(10 - level)} if "header" in surface else {}
    parameters = {"backend": "reference"} | ({} if urgent else {"priority": level})
    if surface.startswith("gRPC"):
        metadata = (*ALL, ("x-request-id", name), *urgent.items())
        answer = held.caller.begin(request(SMALL, **parameters), metadata=metadata)
    else:
        headers = {**KEY, "x-request-id": name, **urgent}
        answer = pool.submit(infer, held.server.url, "attention", SMALL, headers=headers, parameters=parameters)
    held.wait_queued(name)
    return name, answer


@pytest.mark.parametrize("surface", ["HTTP parameter", "HTTP header", "gRPC parameter", "gRPC header"])
def test_the_more_urgent_request_runs_first(held, surface):
    with ThreadPoolExecutor() as pool, held.busy():
        asked = [ask_with_priority(held, pool, surface, f"level-{level}", level) for level in (10, 6, 1)]
    for _, answer in asked:
        answer.result(HANG)
    for name, _ in asked:
        held.wait_begun(name)
    begun = [line["request_id"] for line in list(held.server.lines) if line["event"] == "begin"]
    assert sorted((name for name, _ in asked), key=begun.index) == [name for name, _ in reversed(asked)]


def test_the_headers_of_the_other_routes_are_checked(locked):
    bad = infer(locked.url, "attention", SMALL, headers={**KEY, "x-priority": 12}, parameters={"priority": 1})
    assert bad.status == 422
    assert "X-Priority" in bad.error


def test_each_request_has_its_log_line(locked):
    actual = infer(locked.url, "attention", SMALL, headers={**KEY, "x-request-id": "one-of-v2"})
    assert actual.headers["x-request-id"] == "one-of-v2"
    line = locked.wait_for_request("one-of-v2")
    assert line["route"] == PATH
    assert line["status"] == 200
    assert line["backend"] == "cpu"
    assert line["shapes"] == {name: [1, 2, 24, 16] for name in "qkv"}
