"""Ask each backend and surface for `made_up_tensor` and `made_up_option`. Print whether each refuses it by name.

`test_surfaces.py` runs this with a contract that has the two rows. Calls of a server go to one that is started here.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import flashpoint
import flashpoint_kernels
import flashpoint_kernels.flash_attn
from flashpoint import cases, sharded
from flashpoint_contract import caches, saved
from flashpoint_contract.options import BACKENDS, OPTIONS, Options, ProblemError
from flashpoint_contract.tensors import TENSORS, TensorInfo
from flashpoint_kernels import Problem
from flashpoint_kernels.dispatching.support import unsupported
from tests.support.messages import JSON, message, post
from tests.support.servers import serve

assert "made_up_tensor" in TENSORS
assert "made_up_option" in OPTIONS
SHAPE = (1, 2, 4, 8)
SERVED = "served"
OF_A_SERVER = {
    "json", "safetensors", "oip", "grpc", "sdk", "async", "torch", "jax", "sharded", "caches of the server", "save",
}  # fmt: skip
QKV = [torch.randn(SHAPE, dtype=torch.float32, device="cpu") for _ in range(3)]
SLOPES = torch.ones(2, dtype=torch.float32, device="cpu")
ASKED: dict[str, dict[str, Any]] = {
    "made_up_tensor": {"made_up_tensor": SLOPES},
    "made_up_option": {"made_up_option": 3},
}


def tensors(entry: str) -> dict[str, torch.Tensor]:
    return dict(zip("qkv", QKV, strict=True)) | ({entry: SLOPES} if entry in TENSORS else {})


def options(entry: str) -> dict[str, Any]:
    return ASKED[entry] if entry in OPTIONS else {}


def infos(entry: str) -> dict[str, TensorInfo]:
    return {name: TensorInfo("float32", tuple(t.shape)) for name, t in tensors(entry).items()}


def asks(entry: str) -> dict[str, Callable[[Any], Any]]:
    """Return a function for each place, which makes a call with the entry."""
    found: dict[str, Callable[[Any], Any]] = {}
    for backend in BACKENDS:

        def run(_: Any, backend: str = backend) -> None:
            problem = Problem.create(tensors(entry), Options(**options(entry)), "forward")
            if errors := unsupported(backend, problem.spec):
                raise ProblemError(errors)
            flashpoint_kernels.run([problem], backend)

        def gradient(_: Any, backend: str = backend) -> None:
            given = tensors(entry) | {"do": QKV[0]}
            problem = Problem.create(given, Options(**options(entry)), "backward")
            if errors := unsupported(backend, problem.spec):
                raise ProblemError(errors)

        found |= {f"backend {backend}": run, f"gradient of {backend}": gradient}
    layer = caches.LayerShape(2, 8, 8, "float32")
    others = {
        "caches": lambda _: caches.plan_cached(infos(entry), Options(**options(entry)), layer, 1),
        "saved": lambda _: saved.plan_saved(infos(entry), Options(**options(entry))),
        "kernels": lambda _: flashpoint_kernels.attention(*QKV, **ASKED[entry]),
        "flash_attn": lambda _: flashpoint_kernels.flash_attn.flash_attn_func(*QKV, **ASKED[entry]),
        "sdpa": lambda _: flashpoint_kernels.scaled_dot_product_attention(*QKV, **ASKED[entry]),
        "flex": lambda _: flashpoint_kernels.flex_attention(*QKV, **ASKED[entry]),
        "block masks": lambda _: flashpoint_kernels.create_block_mask(lambda *_: True, 1, 2, 4, 4, **ASKED[entry]),
        "cli": lambda _: command_line(entry),
        "json": lambda server: http(server, json.dumps(
            {name: t.tolist() for name, t in tensors(entry).items()} | options(entry)).encode(), JSON),
        "safetensors": lambda server: http(server, message(tensors(entry), **options(entry))),
        "oip": lambda server: oip(server, entry),
        "grpc": lambda server: rpc(server, entry),
        "sdk": lambda server: with_client(server, lambda client: client.attention(*QKV, **ASKED[entry])),
        "async": lambda server: asyncio.run(asynchronous(server, entry)),
        "torch": lambda server: with_client(server, lambda client: of_torch(client, entry)),
        "jax": lambda server: with_client(server, lambda client: of_jax(client, entry)),
        "sharded": lambda server: with_client(
            server, lambda client: sharded.attention([client, client], *QKV, **ASKED[entry])),
        "caches of the server": lambda server: with_client(server, lambda client: over_caches(client, entry)),
        "save": lambda server: with_client(server, lambda client: client.attention(*QKV, save=True, **ASKED[entry])),
    }  # fmt: skip
    return found | others


def command_line(entry: str) -> None:
    from flashpoint import cli

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.safetensors"
        file.write_bytes(message(tensors(entry)))
        if entry in TENSORS:
            cases.read_case(file)
        elif "cli" not in OPTIONS[entry].refused or cli.main(["verify", "--made-up-option", "3", str(file)]) != 2:
            raise AssertionError("accepted")
        raise ValueError(entry)


def http(server: Any, body: bytes, *kind: Any) -> None:
    answer = post(server, "/attention", body, *kind)
    if answer.status != 200:
        raise ValueError(answer.body.decode())


def oip(server: Any, entry: str) -> None:
    from tests.support.oip.message import infer

    answer = infer(server.url, "attention", tensors(entry), parameters=options(entry) | {"binary_data_output": True})
    if answer.status != 200:
        raise ValueError(answer.error)


def rpc(server: Any, entry: str) -> None:
    import grpc

    from tests.support.oip.grpc_calls import Caller, port_of, request

    caller = Caller(port_of(server))
    try:
        caller.infer(request(tensors(entry), model="attention", **options(entry)))
    except grpc.RpcError as error:
        raise ValueError(error.details()) from None
    finally:
        caller.close()


def with_client(server: Any, call: Callable[[flashpoint.Client], Any]) -> None:
    with flashpoint.Client(server.url) as client:
        call(client)


async def asynchronous(server: Any, entry: str) -> None:
    async with flashpoint.AsyncClient(server.url) as client:
        await client.attention(*QKV, **ASKED[entry])


def of_torch(client: flashpoint.Client, entry: str) -> None:
    from flashpoint.torch import attention

    attention(*QKV, client=client, **ASKED[entry])


def of_jax(client: flashpoint.Client, entry: str) -> None:
    import jax

    from flashpoint.jax import attention

    attention(*(jax.numpy.asarray(t.numpy()) for t in QKV), client=client, **ASKED[entry])


def over_caches(client: flashpoint.Client, entry: str) -> None:
    made = client.caches(1, layers=1, kv_heads=2, head_dim=8, value_dim=8, dtype="float32")
    client.attention(*QKV, caches=made, layer=0, at=[0], **ASKED[entry])


def outcome(ask: Callable[[Any], Any], server: Any, entry: str) -> str:
    try:
        ask(server)
    except Exception as error:
        named = re.search(rf"\b{entry}\b", str(error))
        return "refused" if named else f"wrong: {type(error).__name__}: {error}"
    return "wrong: accepted"


def main() -> int:
    server = serve(grpc_port=0) if SERVED in sys.argv else None
    try:
        for entry in ASKED:
            for place, ask in asks(entry).items():
                if (place in OF_A_SERVER) == (server is not None):
                    print(f"{entry} at {place}: {outcome(ask, server, entry)}", flush=True)
    finally:
        if server is not None:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
