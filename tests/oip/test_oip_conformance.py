"""A server with the models `attention` and `attention_grad` meets the Open Inference Protocol's requirements.

FLASHPOINT_OIP_URL=http://host:port names the server to test; without it the suite starts our server.
"""

import json

import pytest
import torch

from tests.support.oip.message import LENGTH, PACK, UNPACK, call, entry, infer, request, wanted
from tests.support.oip.problem import BOUNDS, GRAD, B, D, H, S, near, problem, truth
from tests.support.servers import wait_for

MODELS = {"attention": ("o", "lse"), "attention_grad": ("dq", "dk", "dv", "dattn_mask", "dsinks")}
SMALL = problem()


def test_health_and_readiness(url):
    for path in ("/v2/health/live", "/v2/health/ready", *(f"/v2/models/{m}/ready" for m in MODELS)):
        reply = call(url, "GET", path)
        assert reply.status == 200, path
        assert reply.headers["content-type"] == "application/json"
    assert call(url, "GET", "/v2/health/live").head["live"] is True
    assert call(url, "GET", "/v2/health/ready").head["ready"] is True


def test_server_metadata(url):
    about = call(url, "GET", "/v2").head
    assert about["name"]
    assert about["version"]
    assert {"binary_tensor_data", "parameters", "statistics", "model_configuration"} <= set(about["extensions"])


@pytest.mark.parametrize("model", MODELS)
def test_model_metadata_and_configuration(url, model):
    about = call(url, "GET", f"/v2/models/{model}").head
    assert about["name"] == model
    assert call(url, "GET", f"/v2/models/{model}/versions/{about['versions'][0]}").head == about
    inputs = {tensor["name"]: tensor for tensor in about["inputs"]}
    assert {"q", "k", "v", "attn_mask", "kv_lengths", "cu_seqlens_q", "alibi_slopes", "sinks"} <= inputs.keys()
    assert ("do" in inputs) == (model == "attention_grad")
    assert inputs["q"]["shape"] == [-1, -1, -1, -1]
    assert inputs["q"]["datatype"] == "FP32"
    assert inputs["cu_seqlens_q"]["datatype"] in ("INT32", "INT64")
    assert {tensor["name"] for tensor in about["outputs"]} == set(MODELS[model])
    config = call(url, "GET", f"/v2/models/{model}/config").head
    assert config["name"] == model
    assert {tensor["name"]: tensor["dims"] for tensor in config["input"]} == {
        name: tensor["shape"] for name, tensor in inputs.items()
    }
    assert {tensor["name"] for tensor in config["input"] if not tensor["optional"]} == {
        *"qkv", *(["do"] if model == "attention_grad" else [])
    }  # fmt: skip


def test_the_index_lists_both_models(url):
    assert {model["name"] for model in call(url, "POST", "/v2/repository/index", b"").head} >= set(MODELS)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_attention_in_every_datatype(url, dtype):
    reply = infer(url, "attention", problem(dtype), parameters={"causal": True, "binary_data_output": True})
    assert list(reply.tensors) == ["o"]
    assert reply.tensors["o"].dtype == dtype
    near(reply.tensors["o"], truth(problem(dtype), causal=True)["o"], BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_gradients_in_every_datatype(url, dtype):
    tensors = problem(dtype, GRAD)
    reply = infer(url, "attention_grad", tensors, parameters={"causal": True, "binary_data_output": True})
    expected = truth(tensors, causal=True)
    assert list(reply.tensors) == ["dq", "dk", "dv"]
    for name, t in reply.tensors.items():
        assert t.dtype == dtype
        near(t, expected[name], 2 * BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_numbers_in_json_both_ways_are_the_bytes(url, dtype):
    binary = infer(url, "attention", problem(dtype), outputs=[wanted("o", binary_data=True)])
    text = infer(url, "attention", problem(dtype), numbers="qkv")
    assert LENGTH not in text.headers
    assert text.headers["content-type"] == "application/json"
    assert torch.equal(text.tensors["o"], binary.tensors["o"])


def test_numbers_may_be_nested(url):
    tensors = {n: t[0, 0] for n, t in SMALL.items()}
    head = {"inputs": [{**entry(n, t, False), "data": t.tolist()} for n, t in tensors.items()]}
    nested = call(url, "POST", "/v2/models/attention/infer", json.dumps(head).encode())
    assert torch.equal(nested.tensors["o"], infer(url, "attention", tensors, numbers="qkv").tensors["o"])


@pytest.mark.parametrize("numbers", ["q", "k", "qv"])
def test_inputs_in_numbers_and_in_bytes_may_be_mixed(url, numbers):
    outputs = [wanted("lse", binary_data=False), wanted("o", binary_data=True)]
    mixed = infer(url, "attention", SMALL, numbers=numbers, outputs=outputs)
    plain = infer(url, "attention", SMALL, outputs=[wanted("o", binary_data=True), wanted("lse", binary_data=True)])
    assert list(mixed.tensors) == ["lse", "o"]
    assert torch.equal(mixed.tensors["o"], plain.tensors["o"])
    assert torch.equal(mixed.tensors["lse"], plain.tensors["lse"])


def test_numbers_that_are_not_finite(url):
    """Python's json writes them as literals that JSON lacks."""
    mask = torch.zeros(S, S).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    tensors = {**SMALL, "attn_mask": mask}
    head, data = request(tensors, numbers=["attn_mask"], parameters={"binary_data_output": True})
    assert b"-Infinity" in head
    path = "/v2/models/attention/infer"
    literal = call(url, "POST", path, head + data, **{LENGTH: len(head)})
    near(literal.tensors["o"], truth(SMALL, causal=True)["o"], BOUNDS[torch.float32])
    head = head.replace(b"-Infinity", b'"-Infinity"')
    assert torch.equal(call(url, "POST", path, head + data, **{LENGTH: len(head)}).tensors["o"], literal.tensors["o"])
    hidden = infer(
        url, "attention", {**SMALL, "kv_lengths": torch.zeros(B, dtype=torch.int32)}, outputs=[wanted("lse")]
    )
    assert hidden.head["outputs"][0]["data"] == ["-Infinity"] * (B * H * S)


@pytest.mark.parametrize(
    ("parameters", "outputs", "binary"),
    [
        (None, None, {"o": False}),
        ({"binary_data_output": True}, None, {"o": True}),
        ({"binary_data_output": True, "return_lse": True}, None, {"o": True, "lse": True}),
        ({"binary_data_output": True}, [wanted("o"), wanted("lse", binary_data=False)], {"o": True, "lse": False}),
        ({"binary_data_output": False}, [wanted("lse", binary_data=True)], {"lse": True}),
        ({"return_lse": True}, [wanted("o", binary_data=True)], {"o": True}),
    ],
)
def test_which_outputs_come_and_how(url, parameters, outputs, binary):
    reply = infer(url, "attention", SMALL, parameters=parameters, outputs=outputs)
    expected = truth(SMALL)
    assert list(reply.tensors) == list(binary)
    for output in reply.head["outputs"]:
        assert ("data" in output) != binary[output["name"]]
        assert ("binary_data_size" in output.get("parameters", {})) == binary[output["name"]]
        near(reply.tensors[output["name"]], expected[output["name"]], BOUNDS[torch.float32])
    if any(binary.values()):
        assert int(reply.headers[LENGTH]) % 64 == 0, "the tensors after the JSON are not aligned"


@pytest.mark.parametrize(
    ("parameters", "outputs", "names"),
    [
        ({"grads": "dv"}, None, ["dv"]),
        ({"grads": "dv, dq"}, None, ["dv", "dq"]),
        ({}, ["dk"], ["dk"]),
        ({}, ["dv", "dq"], ["dv", "dq"]),
        ({"grads": "dq,dk,dv"}, ["dk"], ["dk"]),
    ],
)
def test_which_gradients_come(url, parameters, outputs, names):
    tensors = problem(names=GRAD)
    requested = [wanted(name, binary_data=True) for name in outputs] if outputs else None
    reply = infer(url, "attention_grad", tensors, parameters=parameters, outputs=requested)
    expected = truth(tensors)
    assert list(reply.tensors) == names
    for name in names:
        near(reply.tensors[name], expected[name], 2 * BOUNDS[torch.float32])


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


def test_a_head_of_any_length_comes_before_bytes_of_any_alignment(url):
    plain = infer(url, "attention", SMALL, parameters={"binary_data_output": True}).tensors["o"]
    for pad in range(1, 4):
        head, data = request(SMALL, parameters={"binary_data_output": True}, id="x" * pad)
        reply = call(url, "POST", "/v2/models/attention/infer", head + data, **{LENGTH: len(head)})
        assert torch.equal(reply.tensors["o"], plain)


def test_a_chunked_body(url):
    head, data = request(SMALL, parameters={"binary_data_output": True})
    body = head + data
    pieces = iter([body[:7], body[7 : len(head) + 3], body[len(head) + 3 :]])
    reply = call(url, "POST", "/v2/models/attention/infer", pieces, **{LENGTH: len(head)})
    near(reply.tensors["o"], truth(SMALL)["o"], BOUNDS[torch.float32])


@pytest.mark.parametrize("coding", PACK)
def test_compressed_requests(url, coding):
    """The length in the header is that of the JSON before compression."""
    expected = truth(SMALL)["o"]
    parameters = {"binary_data_output": True}
    near(infer(url, "attention", SMALL, coding=coding, parameters=parameters).tensors["o"], expected, 2e-6)
    near(infer(url, "attention", SMALL, coding=coding, numbers="qkv").tensors["o"], expected, 2e-6)


@pytest.mark.parametrize("coding", PACK)
def test_an_answer_is_compressed_where_that_alone_is_accepted(url, coding):
    parameters = {"binary_data_output": True}
    reply = infer(url, "attention", SMALL, headers={"accept-encoding": coding}, parameters=parameters)
    assert reply.headers["content-encoding"] == coding
    reply.body = UNPACK[coding](reply.body)
    near(reply.tensors["o"], truth(SMALL)["o"], 2e-6)


@pytest.mark.parametrize("accepted", ["gzip, deflate, br", "gzip, deflate", "*", "identity", "br", "gzip;q=0"])
def test_nothing_else_is_compressed(url, accepted):
    """Clients that always accept every coding do not inflate JSON."""
    parameters = {"binary_data_output": True}
    reply = infer(url, "attention", SMALL, headers={"accept-encoding": accepted}, parameters=parameters)
    assert "content-encoding" not in reply.headers
    near(reply.tensors["o"], truth(SMALL)["o"], 2e-6)


@pytest.mark.parametrize("coding", PACK)
def test_metadata_and_errors_are_never_compressed(url, coding):
    assert call(url, "GET", "/v2/models/attention", accept_encoding=coding).head["name"] == "attention"
    assert infer(url, "attention", {"q": SMALL["q"]}, headers={"accept-encoding": coding}).error


def test_a_deadline_and_a_priority(url):
    late = infer(url, "attention", SMALL, parameters={"timeout": 1})
    assert late.status != 200
    assert "deadline" in late.error
    for priority in (0, 1, 10):
        assert infer(url, "attention", SMALL, parameters={"timeout": 60_000_000, "priority": priority}).status == 200


def test_statistics_count_what_is_served(url):
    def stats():
        (statistics,) = call(url, "GET", "/v2/models/attention_grad/stats").head["model_stats"]
        assert (statistics["name"], statistics["version"]) == ("attention_grad", "1")
        return statistics

    before = stats()
    for _ in range(3):
        assert infer(url, "attention_grad", problem(names=GRAD)).status == 200
    assert infer(url, "attention_grad", SMALL).status == 422

    def counted():
        """Return the statistics when they include the last call: a server may count it after it sends the answer."""
        now = stats()
        both = now["inference_stats"], before["inference_stats"]
        more = [now["fail"]["count"] + now["success"]["count"] for now in both]
        return now if more[0] - more[1] >= 4 else None

    after = wait_for(counted, lambda: f"{stats()} after {before}")
    count, spent = after["inference_stats"], before["inference_stats"]
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["execution_count"] - before["execution_count"] == 3
    assert count["success"]["count"] - spent["success"]["count"] == 3
    assert count["fail"]["count"] - spent["fail"]["count"] == 1
    for part in ("success", "queue", "compute_infer"):
        assert count[part]["count"] - spent[part]["count"] == 3
        assert count[part]["ns"] > spent[part]["ns"]
    assert count["success"]["ns"] >= count["queue"]["ns"] + count["compute_infer"]["ns"]
    assert after["last_inference"] > before["last_inference"]
    assert sum(batch["compute_infer"]["count"] for batch in after["batch_stats"]) == after["execution_count"]
    everything = call(url, "GET", "/v2/models/stats").head["model_stats"]
    assert {model["name"] for model in everything} >= set(MODELS)


def test_a_version_may_be_named(url):
    head, data = request(SMALL)
    reply = call(url, "POST", "/v2/models/attention/versions/1/infer", head + data, **{LENGTH: len(head)})
    assert reply.status == 200
