"""The gRPC methods other than ModelInfer: health, shared memory, and errors for calls that are not served."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import grpc
import grpc.aio
import torch

from tests.support.oip.grpc_calls import HANG, METHOD, refused, request


def test_cuda_shared_memory_is_off(caller):
    """CUDA shared memory is not served, but unregistering it succeeds: Triton's clients do this first."""
    caller.ask("CudaSharedMemoryUnregister")
    caller.ask("CudaSharedMemoryUnregister", name="any")
    assert not caller.ask("CudaSharedMemoryStatus").regions


def test_a_call_without_a_message_and_one_that_is_not_served_are_refused(caller):
    with refused("INVALID_ARGUMENT", "the call has no message"):
        caller.channel.stream_unary(METHOD)(iter(()), timeout=HANG)
    with refused("UNIMPLEMENTED"):
        caller.method("ModelStreamInfer")(b"", timeout=HANG)
    with refused("UNIMPLEMENTED"):  # a compressed message is refused, because its size is unknown
        caller.infer(request({name: torch.ones(64, 64) for name in "qkv"}), compression=grpc.Compression.Gzip)
    with refused("NOT_FOUND", "nothing"):
        caller.ask("ModelReady", name="nothing")


def test_health(caller):
    health = "grpc.health.v1.Health"
    for service in ("", "inference.GRPCInferenceService"):
        assert caller.ask("Check", health, service=service).status == 1  # SERVING
    with refused("NOT_FOUND", "other"):
        caller.ask("Check", health, service="other")
