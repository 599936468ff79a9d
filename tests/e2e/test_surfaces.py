"""Every tensor and option of the contract's tables works through every interface that accepts it.

A test sends a small problem with one tensor or option (the entry) through an interface (the surface): HTTP, the SDK or
an integration. The answer must equal that of the kernel library in this process. If the entry's row names the interface
in `refused`, the error must name the entry. Entries come from the tables, so a new row is tested without new code.
"""

import asyncio
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
import torch

import flashpoint
from flashpoint import cli, sharded
from flashpoint_contract.caches import CACHE_OPTIONS
from flashpoint_contract.options import OPTIONS, Pair
from flashpoint_contract.saved import CALLS, SAVED_OPTIONS
from flashpoint_contract.tensors import ANSWERS, FEATURES, INPUT_TENSORS, SCALES, TAKEN, TENSORS
from flashpoint_kernels import Options, Problem, quantize, run
from flashpoint_kernels.dispatching.support import SUPPORT
from tests.support.messages import JSON, ask, message, normal, post
from tests.support.oip.grpc_calls import Caller, port_of
from tests.support.oip.grpc_calls import request as rpc_request
from tests.support.oip.message import DATATYPES, NAMES, infer

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"B": 2, "B+1": 3, "Hq": 4, "Hk": 2, "Sq": 6, "Sk": 8, "D": 16, "Dv": 16}
PACKED = SIZES | {"Sq": 12, "Sk": 16}
BLOCKS = SIZES | {"Sq": 20, "Sk": 40, "q_blocks": 2, "k_blocks": 2}  # sizes that fit the example of block_size
PAGED = SIZES | {"pool": 5, "pages": 2, "page_size": 4}
TABLE = torch.tensor([[4, 1], [0, 4]], dtype=torch.int32)
# entry: the options that its test sets beside it, so that it has an effect, or (dropout_p) that the answer is fixed.
BESIDE = {
    "causal_alignment": {"causal": True}, "dropout_seed": {"dropout_p": 0.5}, "dropout_p": {"dropout_seed": 3},
    "block_mask": {"block_size": OPTIONS["block_size"].example},
}  # fmt: skip
ENTRIES = [*INPUT_TENSORS, *OPTIONS]
BESIDE_TENSORS = {"block_table": ["kv_lengths"], "block_size": ["block_mask"], **dict.fromkeys(SCALES, SCALES)}


def value(name, layout, entry):
    """Return a valid value of the tensor `name` for this layout, in a problem that tests `entry`."""
    row = TENSORS[name]
    if name == "block_table":
        return TABLE
    of_blocks = entry in ("block_mask", "block_size")
    sizes = PAGED if entry == "block_table" else PACKED if layout == "thd" else BLOCKS if of_blocks else SIZES
    shape = row.shape(sizes, layout, 3 if layout == "thd" else 4)
    if name == "block_mask":
        return normal(*shape, seed=ENTRIES.index(name)) > 0
    if not row.is_index:
        return normal(*shape, seed=ENTRIES.index(name))
    longest = sizes["Sk" if "k" in name else "Sq"]
    if row.axes == ("B+1",):
        return torch.tensor([0, longest // 3, longest])
    return torch.tensor([longest - 2, longest - 1])


def problem(entry):
    """Return (tensors, options, direction) of a problem that contains the entry and all that the entry needs."""
    rows, options = TENSORS, dict(BESIDE.get(entry, {}))
    direction = (OPTIONS[entry].direction if entry in OPTIONS else rows[entry].direction) or "forward"
    if entry in OPTIONS:
        options |= {entry: OPTIONS[entry].example}
    layout = options.get("layout", "bhsd")
    if entry in rows and layout not in rows[entry].layouts:
        layout = options["layout"] = rows[entry].layouts[0]
    entries = [entry, *BESIDE_TENSORS.get(entry, [])]
    names = [n for n in TAKEN[direction] if rows[n].required or n in entries or rows[n].layouts == (layout,)]
    tensors = {name: value(name, layout, entry) for name in names}
    if entry in SCALES:
        tensors |= eight_bit(tensors, torch.int8)
    if entry in ("o", "lse"):  # a gradient takes both `o` and `lse` of the forward
        tensors |= solve({n: tensors[n] for n in "qkv"}, {**options, "return_lse": True}, "forward")
    return tensors, options, direction


def eight_bit(tensors, dtype):
    """Return k and v quantized to the 8-bit `dtype`, and k_scale and v_scale with a scale for each row."""
    (k, k_scale), (v, v_scale) = (quantize(tensors[name], dtype) for name in "kv")
    return {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}


def solve(tensors, options, direction):
    """Return {name: output tensor} of the kernel library in this process."""
    backend = options.get("backend", "tiled")
    made = Problem.create(tensors, Options(**{**options, "backend": backend}), direction)
    run([made], backend)
    return made.outputs


@pytest.fixture(scope="module")
def services(rpc_server):
    with contextlib.ExitStack() as stack:
        caller = stack.enter_context(contextlib.closing(Caller(port_of(rpc_server))))
        client, other = (stack.enter_context(flashpoint.Client(rpc_server.url)) for _ in range(2))
        yield SimpleNamespace(server=rpc_server, caller=caller, client=client, clients=[client, other])


class RefusedError(Exception):
    """Raised if an interface refuses a request; the text is the interface's error message."""


def by_json(services, tensors, options, direction):
    fields = {n: t.tolist() for n, t in tensors.items()}
    body = json.dumps({**fields, **options}).encode()
    answer = post(services.server, PATHS[direction], body, JSON)
    if answer.status != 200:
        raise RefusedError(answer.body.decode())
    return {n: torch.tensor(t) for n, t in answer.json.items() if n in TENSORS}


def by_safetensors(services, tensors, options, direction):
    answer = post(services.server, PATHS[direction], message(tensors, **options))
    if answer.status != 200:
        raise RefusedError(answer.body.decode())
    return answer.tensors


def parameters(options):
    """Return the options as parameters of the Open Inference Protocol, which has no pairs and no lists."""
    results = {}
    for name, given in options.items():
        if name in OPTIONS and isinstance(OPTIONS[name].kind, Pair):
            results |= {f"{name}_{side}": n for side, n in zip(OPTIONS[name].kind.sides, given, strict=True)}
        else:
            results[name] = ",".join(given) if isinstance(given, tuple) else given
    return results


def by_oip(services, tensors, options, direction):
    settings = {**parameters(options), "binary_data_output": True}
    answer = infer(services.server.url, MODELS[direction], tensors, parameters=settings)
    if answer.status != 200:
        raise RefusedError(answer.error)
    return answer.tensors


def by_grpc(services, tensors, options, direction):
    try:
        answer = services.caller.infer(rpc_request(tensors, model=MODELS[direction], **parameters(options)))
    except grpc.RpcError as error:
        raise RefusedError(error.details()) from None
    shapes = {o.name: (DATATYPES[o.datatype], list(o.shape)) for o in answer.message.outputs}
    return {
        n: torch.frombuffer(bytearray(bits), dtype=shapes[n][0]).reshape(shapes[n][1])
        for n, bits in answer.bits.items()
    }


def called(forward, backward, tensors, options, direction):
    """Call `forward` or `backward`, by `direction`; return {name: output tensor}. Raises RefusedError."""
    first = ("q", "k", "v") if direction == "forward" else ("do", "q", "k", "v")
    keywords = {n: t for n, t in tensors.items() if n not in first} | options
    try:
        actual = (forward if direction == "forward" else backward)(*(tensors[n] for n in first), **keywords)
    except (flashpoint.InvalidInputError, ValueError, TypeError) as error:
        raise RefusedError(str(error)) from None
    names = options.get("grads", OPTIONS["grads"].default)
    if direction == "forward":
        names = ["o", *(name for name in ANSWERS["forward"] if options.get(f"return_{name}"))]
    return dict(zip(names, actual if isinstance(actual, tuple) else (actual,), strict=True))


def by_sdk(services, *request):
    return called(services.client.attention, services.client.attention_grad, *request)


def by_async_sdk(services, *request):
    def wait(name):
        async def call(*tensors, **keywords):
            async with flashpoint.AsyncClient(services.server.url) as client:
                return await getattr(client, name)(*tensors, **keywords)

        return lambda *tensors, **keywords: asyncio.run(call(*tensors, **keywords))

    return called(wait("attention"), wait("attention_grad"), *request)


def by_kernels(services, *request):
    from flashpoint_kernels import attention, attention_backward

    return called(attention, attention_backward, *request)


def by_shards(services, *request):
    clients = services.clients
    return called(
        lambda *t, **k: sharded.attention(clients, *t, **k), lambda *t, **k: sharded.attention_grad(clients, *t, **k),
        *request,
    )  # fmt: skip


def by_torch(services, tensors, options, direction):
    from flashpoint.torch import attention

    return called(lambda *t, **k: attention(*t, client=services.client, **k), None, tensors, options, direction)


def by_jax(services, tensors, options, direction):
    jax = pytest.importorskip("jax")
    from flashpoint.jax import attention

    def call(*given, **keywords):
        arrays = [jax.numpy.asarray(t.numpy()) for t in given]
        named = {n: jax.numpy.asarray(x.numpy()) if torch.is_tensor(x) else x for n, x in keywords.items()}
        actual = attention(*arrays, client=services.client, **named)
        actual = actual if isinstance(actual, tuple) else (actual,)
        return tuple(torch.from_numpy(np.array(t)) for t in actual)

    return called(call, None, tensors, options, direction)


PATHS = {"forward": "/attention", "backward": "/attention/grad"}
MODELS = {"forward": "attention", "backward": "attention_grad"}
SURFACES = {
    "json": by_json,
    "safetensors": by_safetensors,
    "oip": by_oip,
    "grpc": by_grpc,
    "sdk": by_sdk,
    "async": by_async_sdk,
    "kernels": by_kernels,
    "sharded": by_shards,
    "torch": by_torch,
    "jax": by_jax,
}


AUTOGRAD = ("torch", "jax")  # here autograd makes the gradient call, so a caller cannot pass it arguments


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("surface", SURFACES)
def test_an_entry_goes_through_a_surface_or_is_refused_by_name(services, surface, entry):
    row = OPTIONS.get(entry) or TENSORS[entry]
    tensors, options, direction = problem(entry)
    if surface in row.refused:
        if surface in AUTOGRAD:
            tensors = {n: t for n, t in tensors.items() if TENSORS[n].direction == "forward" or n == entry}
            direction = "forward"
        with pytest.raises(RefusedError, match=rf"\b{entry}\b"):
            SURFACES[surface](services, tensors, options, direction)
        return
    actual = SURFACES[surface](services, tensors, options, direction)
    expected = solve(tensors, options, direction)
    assert actual.keys() == expected.keys()
    for name, t in expected.items():
        torch.testing.assert_close(actual[name], t, rtol=1e-4, atol=1e-5)


def judged(entry):
    """Return (tensors, options) to verify: a problem with the entry, and its outputs, which depend on the entry."""
    tensors, options, direction = problem(entry)
    return {**tensors, **solve(tensors, options, direction)}, options


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_verification_takes_an_entry(services, entry):
    tensors, options = judged(entry)
    if "verify" in (OPTIONS.get(entry) or TENSORS[entry]).refused or "key_weights" in tensors:
        tensors.pop("key_weights", None)
        with pytest.raises(flashpoint.FlashpointError, match=rf"\b{entry}\b"):
            services.client.verify(**tensors, **options)
        return
    if entry in INPUT_TENSORS and "sdk" in TENSORS[entry].refused:
        with pytest.raises(flashpoint.InvalidInputError, match=rf"\b{entry}\b"):
            services.client.verify(**tensors, **options)
        return
    report = services.client.verify(**tensors, **options)
    assert report.ok
    assert report.backend == "given"


def flag_of(name, given):
    flag = f"--{name.replace('_', '-')}"
    if isinstance(given, bool):
        return [flag if given else f"--no-{flag[2:]}"]
    return [flag, ",".join(map(str, given)) if isinstance(given, tuple) else str(given)]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_command_line_takes_an_entry(tmp_path, capsys, entry):
    tensors, options = judged(entry)
    refused = "cli" in (OPTIONS.get(entry) or TENSORS[entry]).refused
    (tmp_path / "case").write_bytes(message(tensors))
    flags = [word for name, given in options.items() for word in flag_of(name, given)]
    code = cli.main(["verify", *flags, str(tmp_path / "case")])
    captured = capsys.readouterr()
    if refused:
        assert code == 2
        assert (flag_of(entry, True)[0] if entry in OPTIONS else entry) in captured.err
    else:
        assert code == 0, captured


def test_openapi_and_the_documentation_name_every_entry(server):
    schemas = ask(server, "/openapi.json").json["components"]["schemas"]
    text = "".join((ROOT / "docs" / page).read_text() for page in ("http.md", "reference/options.md"))
    forward, backward = (schemas[f"{name}Request"]["properties"] for name in ("Attention", "AttentionGrad"))
    for entry in ENTRIES:
        row = OPTIONS.get(entry) or TENSORS[entry]
        if "json" in row.refused:
            assert entry not in forward | backward
        else:
            if row.direction != "backward":
                assert row.text in forward[entry]["description"]
            assert row.text in backward[entry]["description"]
        assert f"`{entry}`" in text, entry


def test_every_feature_of_the_table_is_somebodys():
    assert set().union(*SUPPORT.values()) == FEATURES.keys()


@pytest.mark.parametrize("entry", CACHE_OPTIONS)
@pytest.mark.parametrize("surface", [*AUTOGRAD, "oip", "grpc", "sharded", "kernels"])
def test_caches_are_refused_by_name_where_they_are_not_taken(services, surface, entry):
    tensors, _, direction = problem("q")
    given = {"caches": "an-id", "layer": 1, "at": 3}[entry]
    with pytest.raises(RefusedError, match=rf"\b{entry}\b"):
        SURFACES[surface](services, tensors, {entry: given}, direction)


TAKEN_BY = {
    "save": ("json", "safetensors", "sdk", "async", "torch", "jax"),
    "saved": ("json", "safetensors", "sdk", "async"),
}


@pytest.mark.parametrize("entry", SAVED_OPTIONS)
@pytest.mark.parametrize("surface", SURFACES)
def test_saving_is_refused_by_name_where_it_is_not_taken(services, surface, entry):
    tensors, _, direction = problem("do" if CALLS[entry] == "backward" else "q")
    given = {"save": True, "saved": "an-id"}[entry]
    if surface in AUTOGRAD:
        tensors, direction = {n: tensors[n] for n in "qkv"}, "forward"
    if surface not in TAKEN_BY[entry]:
        with pytest.raises(RefusedError, match=rf"\b{entry}\b"):
            SURFACES[surface](services, tensors, {entry: given}, direction)
    elif entry == "saved":
        with pytest.raises(RefusedError, match="part of the saved forward"):
            SURFACES[surface](services, tensors, {entry: given}, direction)
    elif surface not in ("sdk", "async"):  # with `save`, these return an object instead of tensors
        actual = SURFACES[surface](services, tensors, {entry: given}, direction)
        torch.testing.assert_close(actual["o"], solve(tensors, {}, direction)["o"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("entry", SAVED_OPTIONS)
def test_a_verification_refuses_saving_by_name(services, entry):
    with pytest.raises(flashpoint.InvalidInputError, match=rf"\b{entry}\b"):
        services.client.verify(*(problem("q")[0][n] for n in "qkv"), **{entry: True})


# Tests of 8-bit keys and values


OF_FLOAT8 = [name for name in SURFACES if name not in ("json", "oip", "grpc", "jax")]
FORMS = ("number", "0-d", "per head", "per head and sequence", "per row")


def scales(form, layout="bhsd"):
    """Return k_scale and v_scale in a form of FORMS, for tensors with SIZES, or with PACKED if the layout is thd."""
    if form == "number":
        return {"k_scale": 0.25, "v_scale": 0.5}
    sizes, rank = (PACKED, 3) if layout == "thd" else (SIZES, 4)
    shapes = {"0-d": (), "per head": (1, 2), "per head and sequence": (2, 2)}
    shape = shapes[form] if form in shapes else TENSORS["k_scale"].shape(sizes, layout, rank)
    return {name: 0.1 + normal(*shape, seed=n).abs() for n, name in enumerate(SCALES)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("surface", OF_FLOAT8)
def test_float8_goes_through_a_surface_with_scales_of_every_form(services, surface, form):
    for layout in ("bhsd", "bshd", "thd"):
        tensors, options, direction = problem("cu_seqlens_q" if layout == "thd" else "k_scale")
        if layout == "bshd":
            tensors |= {n: tensors[n].transpose(1, 2).contiguous() for n in "qkv"}
            options = {"layout": layout}
        tensors |= {n: tensors[n].float().clamp(-8, 8).to(torch.float8_e4m3fn) for n in "kv"}
        tensors |= {n: t.contiguous() if torch.is_tensor(t) else t for n, t in scales(form, layout).items()}
        as_tensors = {n: t if torch.is_tensor(t) else torch.tensor(t) for n, t in tensors.items()}
        actual = SURFACES[surface](services, as_tensors if surface == "safetensors" else tensors, options, direction)
        torch.testing.assert_close(actual["o"], solve(as_tensors, options, direction)["o"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_scales_are_cut_among_servers_with_their_keys(services, layout):
    for form in FORMS:
        tensors = problem("cu_seqlens_q")[0] if layout == "thd" else problem("kv_lengths")[0]
        if layout == "bshd":
            tensors |= {n: tensors[n].transpose(1, 2).contiguous() for n in "qkv"}
        tensors |= {n: tensors[n].mul(20).to(torch.int8) for n in "kv"} | scales(form, layout)
        as_tensors = {n: t if torch.is_tensor(t) else torch.tensor(t) for n, t in tensors.items()}
        q, k, v = (tensors.pop(n) for n in "qkv")
        actual = sharded.attention(services.clients, q, k, v, layout=layout, causal=True, parts=(2, 3), **tensors)
        expected = solve(as_tensors, {"layout": layout, "causal": True}, "forward")["o"]
        # Values are large, and the terms of their sums cancel: float32's error is relative to the largest term.
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("surface", ["oip", "grpc"])
def test_a_protocol_without_float8_refuses_it_by_name(services, surface, monkeypatch):
    monkeypatch.setitem(NAMES, torch.float8_e4m3fn, "FP8")
    tensors, options, direction = problem("k_scale")
    tensors |= {n: tensors[n].to(torch.float8_e4m3fn) for n in "kv"}
    with pytest.raises(RefusedError, match=r"\bk\b.*FP8"):
        SURFACES[surface](services, tensors, options, direction)


@pytest.mark.parametrize("surface", ["safetensors", "sdk", "async", "kernels", "sharded", "torch"])
def test_a_gradient_refuses_pages_and_8_bits_by_name(services, surface):
    tensors, options, _ = problem("k_scale")
    tensors["do"] = normal(2, 4, 6, 16)
    if surface == "torch":  # its forward succeeds, and its backward raises
        tensors.pop("do")
        actual = SURFACES[surface](services, tensors | {"q": tensors["q"].requires_grad_()}, options, "forward")
        with pytest.raises(flashpoint.InvalidInputError, match=r"\bk_scale\b"):
            actual["o"].sum().backward()
        return
    with pytest.raises(RefusedError, match=r"\bk_scale\b"):
        SURFACES[surface](services, tensors, options, "backward")


def test_a_scale_that_is_not_finite_is_refused_by_name_each_time(services):
    """A scale that is not finite is refused each time, even if the server has already planned an equal problem."""
    tensors, options, direction = problem("k_scale")
    for bad in (torch.nan, torch.inf, None, -torch.inf):
        given = tensors | ({"v_scale": tensors["v_scale"].clone()})
        if bad is None:
            by_safetensors(services, given, options, direction)
            continue
        given["v_scale"][0, 0, 3] = bad
        with pytest.raises(RefusedError, match=r"v_scale.*finite"):
            by_safetensors(services, given, options, direction)
