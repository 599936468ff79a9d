"""On a CPU the kernels in C are the backend `cpu`; `torch`, their earlier name, is refused with the new one."""

import contextlib
import json
import warnings
from pathlib import Path

import pytest
import torch

import flashpoint
from flashpoint import errors
from flashpoint_contract.schemas.benchmark import BenchmarkJob
from flashpoint_kernels import Options, ProblemError, attention, attention_backward, native, verify
from flashpoint_kernels.dispatching import dispatch
from tests.support.messages import JSON, SAFETENSORS, ask, message, normal, post, problem
from tests.support.oip.grpc_calls import Caller, port_of, refused, request
from tests.support.oip.message import infer
from tests.support.servers import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU, torch is a backend")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SENTENCE = "the backend that earlier versions called torch is cpu: use cpu or auto"
T = {name: normal(1, 2, 3, 8, seed=n) for n, name in enumerate(("do", "q", "k", "v"))}
INPUTS = {name: T[name] for name in "qkv"}


def test_every_call_names_the_new_name(server):
    small = {"q": [[1, 0]], "k": [[1, 0]], "v": [[1, 2]], "backend": "torch"}
    shape = {"batch": 1, "q_heads": 1, "q_len": 8, "head_dim": 8}
    grid = {"shapes": [{"q_len": 8, "head_dim": 8}], "backends": ["torch"]}
    with flashpoint.Client(server.url) as client, client.cache(layers=1, kv_heads=2, head_dim=8) as cache:
        calls = [
            ("/attention", message(INPUTS, backend="torch"), SAFETENSORS),
            ("/attention/grad", message(T, backend="torch"), SAFETENSORS),
            ("/attention", json.dumps(small).encode(), JSON),
            ("/attention", message(INPUTS, backend="torch", save=True), SAFETENSORS),
            ("/attention", message(INPUTS, backend="torch", caches=[cache.id]), SAFETENSORS),
            ("/verify", json.dumps({"shape": shape, "backend": "torch"}).encode(), JSON),
            ("/benchmark", json.dumps(grid).encode(), JSON),
        ]
        for path, body, media in calls:
            assert SENTENCE in problem(post(server, path, body, media), 422, "backend_renamed")["detail"], path
        with pytest.raises(errors.InvalidInputError, match=SENTENCE) as raised:
            client.attention(*INPUTS.values(), backend="torch")
        assert raised.value.code == "backend_renamed"
    assert ask(server, "/info").json["backends"][0] == "cpu"


def test_the_open_inference_protocol_names_the_new_name(rpc_server):
    answer = infer(rpc_server.url, "attention", INPUTS, parameters={"backend": "torch"})
    assert answer.status == 422
    assert SENTENCE in answer.error
    with (
        contextlib.closing(Caller(port_of(rpc_server))) as caller,
        refused("INVALID_ARGUMENT", SENTENCE),
    ):
        caller.infer(request(INPUTS, backend="torch"))


def test_the_library_names_the_new_name():
    for call in (
        lambda: attention(**INPUTS, backend="torch"),
        lambda: attention_backward(**T, backend="torch"),
        lambda: verify(T, Options(backend="torch")),
    ):
        with pytest.raises(ProblemError, match=SENTENCE):
            call()


def test_auto_says_once_that_it_takes_tiles(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(dispatch, "available_backends", dispatch.available_backends.__wrapped__)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for length in (5, 6, 7):
            mask = torch.ones(length, length, dtype=torch.bool)
            attention(*normal(3, 1, 2, length, 8).unbind(), attn_mask=mask)
    assert [str(each.message).partition(":")[0] for each in told] == ["auto takes the backend tiled, which is slower"]


def test_records_of_earlier_versions_are_read_as_cpu():
    record = (RESULTS / "benchmark-amd-epyc.json").read_text()
    assert '"backend": "torch"' in record
    backends = {row.backend for row in BenchmarkJob.model_validate_json(record).rows}
    assert "cpu" in backends
    assert "torch" not in backends


def test_the_error_of_a_server_of_an_earlier_version_says_what_to_do():
    said = "must be one of auto, triton, torch, tiled, reference"
    document = {"detail": f"backend: {said}", "code": "invalid_request", "errors": [{"loc": ["backend"], "msg": said}]}
    assert "is of an earlier version, which calls the backend cpu torch: upgrade it" in str(
        errors.from_problem(422, document)
    )
