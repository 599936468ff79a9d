"""Outputs and gradients over HTTP agree with float64 autograd, for every option that a CPU backend supports."""

import functools
import itertools
import json
import math

import numpy as np
import pytest
import torch

from flashpoint_contract.options import Options
from flashpoint_contract.spec import plan
from flashpoint_contract.tensors import FORWARD_TENSORS, TensorInfo
from flashpoint_kernels.dispatching import support
from tests.support.messages import JSON, SAFETENSORS, message, normal, post

CPU_BACKENDS = ("cpu", "tiled", "reference")


def philox_keep(seed, p, shape):
    """Return which weights dropout keeps, (B, H, Sq, Sk), by an independent NumPy version of the documented Philox."""
    batch, heads, sq, sk = shape
    i = [
        np.arange(-(-sk // 4)),
        np.arange(sq)[:, None],
        np.arange(heads)[:, None, None],
        np.arange(batch).reshape(-1, 1, 1, 1),
    ]
    c = [x.astype(np.uint64) for x in np.broadcast_arrays(*i)]
    k = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ k[0], b & low, (a >> np.uint64(32)) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    words = np.stack(c, -1).reshape(batch, heads, sq, -1)[..., :sk]
    return torch.from_numpy(words / 2.0**32 >= p)


def dense(t, dtype, *, causal=False, causal_alignment="bottom_right", window=(-1, -1), scale=None, softcap=0.0,
          dropout_p=0.0, dropout_seed=0, **_):  # fmt: skip
    """Return (o, lse) by the definition of attention, computed in `dtype`.

    Tensors have layout bhsd and rank 4, and every query sees at least one key.
    """
    q, k, v = (t[name].to(dtype) for name in "qkv")
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    (sq, d), sk = q.shape[2:], k.shape[2]
    s = q @ k.transpose(-1, -2) * (d**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(sq)[:, None] + (sk - sq if causal_alignment == "bottom_right" else 0) - torch.arange(sk)
    if "alibi_slopes" in t:
        s = s - t["alibi_slopes"].to(dtype).reshape(-1, q.shape[1], 1, 1) * distance.abs()
    seen = torch.ones(1, 1, sq, sk, dtype=torch.bool)
    if "attn_mask" in t:
        if t["attn_mask"].dtype == torch.bool:
            seen = seen & t["attn_mask"]
        else:
            s = s + t["attn_mask"].to(dtype)
    left, right = window
    seen = seen & ((distance <= left) if left >= 0 else True) & ((distance >= -right) if right >= 0 else True)
    seen = seen & ((distance >= 0) if causal else True)
    s = s.masked_fill(~seen, -math.inf)
    logits = s
    if "sinks" in t:
        logits = torch.cat([s, t["sinks"].to(dtype).view(1, -1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    p = logits.softmax(-1)[..., :sk]
    if dropout_p:
        p = p * philox_keep(dropout_seed, dropout_p, s.shape) / (1 - dropout_p)
    return p @ v, logits.logsumexp(-1)


SOURCES = {"dq": "q", "dk": "k", "dv": "v", "dattn_mask": "attn_mask", "dsinks": "sinks"}


def truth(t, options, dtype=torch.float64):
    """Return {name: tensor} of o, lse and the gradients that `options` names, by autograd in `dtype`."""
    grads = options.get("grads", ["dq", "dk", "dv"])
    leaves = {SOURCES[g]: t[SOURCES[g]].to(dtype).requires_grad_() for g in grads}
    o, lse = dense({**t, **leaves}, dtype, **options)
    dlse = t["dlse"].to(dtype) if "dlse" in t else torch.zeros_like(lse)
    actual = torch.autograd.grad([o, lse], list(leaves.values()), [t["do"].to(dtype), dlse])
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(grads, actual, strict=True))}


def case(extra=None, heads=4, kv_heads=4, value_dim=32, batch=1, length=512, dtype=torch.float32, **options):
    """Return (tensors, options) of a problem whose q, k, v and do are normally distributed."""
    shapes = {
        "q": (batch, heads, length, 32), "k": (batch, kv_heads, length, 32),
        "v": (batch, kv_heads, length, value_dim), "do": (batch, heads, length, value_dim),
    }  # fmt: skip
    tensors = {name: normal(*shape, seed=n, dtype=dtype) for n, (name, shape) in enumerate(shapes.items())}
    return {**tensors, **(extra or {})}, options


def problems(length):
    """Return {name: (tensors, options)} with a problem for each kind of tensor and option."""
    diagonal = torch.eye(length, dtype=torch.bool)  # every row sees at least one key

    def made(extra=None, **how):
        return case(extra, length=length, **how)

    return {
        "plain": made(),
        "causal": made(causal=True),
        "causal top left": made(causal=True, causal_alignment="top_left"),
        "window": made(window=[40, 8]),
        "causal window": made(causal=True, window=[70, -1]),
        "gqa": made(kv_heads=2, causal=True),
        "mqa": made(kv_heads=1),
        "small scale": made(scale=0.1),
        "large scale": made(scale=0.37),
        "softcap": made(softcap=1.5, causal=True),
        "value dim": made(value_dim=48),
        "bool mask": made({"attn_mask": (normal(1, 4, length, length, seed=9) > 0) | diagonal}),
        "broadcast bool mask": made({"attn_mask": (normal(length, length, seed=9) > 0) | diagonal}),
        "float mask": made({"attn_mask": normal(1, 1, length, length, seed=9)}),
        "float mask and its gradient": made({"attn_mask": normal(1, 4, length, length, seed=9)}, grads=["dattn_mask"]),
        "broadcast mask's gradient": made({"attn_mask": normal(4, 1, length, seed=9)}, grads=["dattn_mask", "dq"]),
        "alibi": made({"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}, causal=True),
        "sinks and their gradient": made({"sinks": normal(4, seed=9)}, grads=["dsinks", "dq", "dk", "dv"]),
        "gradient of lse": made({"dlse": normal(1, 4, length, seed=9)}),
        "dropout": made(dropout_p=0.3, dropout_seed=(5 << 40) + 12345),
        "batch": made(batch=2, causal=True),
    }


OPTIONS = problems(512)
SHORT = problems(96)  # for half types, which are slow in torch on a CPU, and for the backend `reference`


def spec_of(tensors, options, direction):
    infos = {n: TensorInfo(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
    if direction == "forward":
        infos = {n: info for n, info in infos.items() if n in FORWARD_TENSORS}
        options = {n: value for n, value in options.items() if n != "grads"}
    return plan(infos, Options(**options), direction)


def claims(backend, name, dtype=torch.float32):
    tensors, options = OPTIONS[name]
    cast = {n: t.to(dtype) if n in ("q", "k", "v", "do") else t for n, t in tensors.items()}
    return not support.unsupported(backend, spec_of(cast, options, "backward"))


CLAIMED = [(backend, name) for backend in CPU_BACKENDS for name in OPTIONS if claims(backend, name)]
HALVES = (torch.float16, torch.bfloat16)


def test_the_list_of_claims_is_worth_testing():
    count = {backend: sum(b == backend for b, _ in CLAIMED) for backend in CPU_BACKENDS}
    assert count["tiled"] == count["reference"] == len(OPTIONS)
    assert count["cpu"] >= 8


def ask(server, tensors, options, backend, **headers):
    """Send the forward and then the gradients to the server; return both answers."""
    forward = {n: t for n, t in tensors.items() if n in FORWARD_TENSORS}
    one = post(server, "/attention", message(forward, **options, backend=backend, return_lse=True), **headers)
    assert one.status == 200, one.body
    two = post(server, "/attention/grad", message(tensors, **options, backend=backend), **headers)
    assert two.status == 200, two.body
    return one, two


def error(actual, expected):
    assert actual.shape == expected.shape
    return (actual.double() - expected.double()).abs().max().item()


@functools.cache
def gold(name, length):
    """Return the float64 solution of a problem, cached for the comparison with each backend."""
    return truth(*{512: OPTIONS, 96: SHORT}[length][name])


@pytest.mark.parametrize(("backend", "name"), CLAIMED)
def test_float32_is_within_2e_6_of_float64(server, backend, name):
    # The backend "reference" computes the same formula as `truth`, so a short problem is enough for it.
    length = 96 if backend == "reference" else 512
    tensors, options = {512: OPTIONS, 96: SHORT}[length][name]
    expected = gold(name, length)
    one, two = ask(server, tensors, options, backend)
    assert one.headers["x-backend"] == two.headers["x-backend"] == backend
    actual = {**one.tensors, **two.tensors}
    assert actual.keys() == expected.keys()
    for tensor in expected:
        assert actual[tensor].dtype == torch.float32
        # The problem "large scale" has a sharp softmax and larger errors, so its bound is 5e-6 instead of 2e-6.
        bound = (5e-6 if name == "large scale" else 2e-6) * expected[tensor].abs().max().item()
        assert error(actual[tensor], expected[tensor]) <= bound, tensor


def half_cases():
    """Yield a test parameter for each problem in each half type. For one of the two types, it is marked as slow."""
    cases = [(backend, name) for backend, name in CLAIMED if backend != "reference"]
    cases = [(backend, name) for backend, name in cases if claims(backend, name, torch.float16)]
    for (n, (backend, name)), (i, dtype) in itertools.product(enumerate(cases), enumerate(HALVES)):
        marks = [] if n % 2 == i else pytest.mark.slow
        yield pytest.param(backend, name, dtype, marks=marks, id=f"{backend}-{name}-{dtype}")


@pytest.mark.parametrize(("backend", "name", "dtype"), [*half_cases()])
def test_half_types_are_as_near_as_torchs_own_arithmetic(server, backend, name, dtype):
    """Outputs satisfy max|out − exact| ≤ 2 × max|torch in the half type − exact| + 1e-5; for gradients it is 3 ×."""
    tensors, options = SHORT[name]
    tensors = {n: t.to(dtype) if n in ("q", "k", "v", "do") else t for n, t in tensors.items()}
    exact, plain = truth(tensors, options), truth(tensors, options, dtype)
    one, two = ask(server, tensors, options, backend)
    actual = {**one.tensors, **two.tensors}
    for tensor in exact:
        allowed = (2 if tensor in ("o", "lse") else 3) * error(plain[tensor], exact[tensor]) + 1e-5
        assert error(actual[tensor], exact[tensor]) <= allowed, tensor


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_layouts_and_ranks_are_the_same_problem(server, backend):
    tensors, options = case(batch=2, length=40, causal=True)
    expected = truth(tensors, options)
    transposed = {n: t.transpose(1, 2) for n, t in tensors.items()}
    one, two = ask(server, transposed, {**options, "layout": "bshd"}, backend)
    for name, t in {**one.tensors, **two.tensors}.items():
        assert error(t if name == "lse" else t.transpose(1, 2), expected[name]) <= 5e-6 * expected[name].abs().max()
    for index, shape in (((0, 0), (40,)), ((slice(None), 0), (2, 40))):
        one, two = ask(server, {n: t[index] for n, t in tensors.items()}, options, backend)
        assert one.tensors["lse"].shape == shape
        for name, t in {**one.tensors, **two.tensors}.items():
            assert error(t, expected[name][index]) <= 5e-6 * expected[name].abs().max()


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_ragged_and_padded_sequences_are_each_as_alone(server, backend):
    lengths = [5, 0, 31]
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    packed = {n: normal(36, 2, 16, seed=i) for i, n in enumerate(["q", "k", "v", "do"])}
    padded = {n: torch.zeros(3, 2, 31, 16) for n in packed}
    expected = {}
    for b, (a, z) in enumerate(itertools.pairwise(starts.tolist())):
        alone = {n: t[a:z].transpose(0, 1)[None] for n, t in packed.items()}
        for n in packed:
            padded[n][b, :, : z - a] = alone[n][0]
        if z > a:
            expected[b] = truth(alone, {"causal": True})
    cu = {"cu_seqlens_q": starts, "cu_seqlens_k": starts.int()}
    ragged = ask(server, {**packed, **cu}, {"causal": True, "layout": "thd"}, backend)
    counts = {"q_lengths": torch.tensor(lengths), "kv_lengths": torch.tensor(lengths, dtype=torch.int32)}
    for n in packed:
        padded[n][0, :, 5:] = math.nan  # padding is never read
    batched = ask(server, {**padded, **counts}, {"causal": True}, backend)
    for name in ("o", "lse", "dq", "dk", "dv"):
        r = {**ragged[0].tensors, **ragged[1].tensors}[name]
        p = {**batched[0].tensors, **batched[1].tensors}[name]
        for b, n in enumerate(lengths):
            a = starts[b]
            if n:
                bound = 5e-6 * expected[b][name].abs().max().item()
                one = r[:, a : a + n] if name == "lse" else r[a : a + n].transpose(0, 1)
                assert error(one[None], expected[b][name]) <= bound
                assert error(p[b : b + 1, :, :n], expected[b][name]) <= bound
            assert (p[b, :, n:] == (-math.inf if name == "lse" else 0)).all()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_closed_forms(server, backend):
    v = normal(1, 2, 7, 16, seed=1)
    zeros = {"q": torch.zeros(1, 2, 5, 16), "k": torch.zeros(1, 2, 7, 16), "v": v}
    one = post(server, "/attention", message(zeros, backend=backend, return_lse=True)).tensors
    torch.testing.assert_close(one["o"], v.mean(2, keepdim=True).expand(1, 2, 5, 16), rtol=0, atol=1e-6)
    torch.testing.assert_close(one["lse"], torch.full((1, 2, 5), math.log(7)), rtol=0, atol=1e-6)
    single = {"q": normal(1, 2, 5, 16), "k": normal(1, 2, 1, 16), "v": normal(1, 2, 1, 16), "do": normal(1, 2, 5, 16)}
    one, two = ask(server, single, {}, backend)
    torch.testing.assert_close(one.tensors["o"], single["v"].expand(1, 2, 5, 16), rtol=0, atol=1e-6)
    torch.testing.assert_close(two.tensors["dv"], single["do"].sum(2, keepdim=True), rtol=0, atol=2e-6)
    assert two.tensors["dq"].abs().max() <= 1e-6
    assert two.tensors["dk"].abs().max() <= 1e-6


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_rows_without_a_key_are_0_and_never_nan(server, backend):
    t = {n: normal(2, 2, 6, 16, seed=i) for i, n in enumerate(["q", "k", "v", "do"])}
    hidden = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    hidden[0, :, 2] = hidden[1] = False
    for extra, rows in (({"attn_mask": hidden}, hidden.any(-1)[:, 0]), ({"kv_lengths": torch.tensor([6, 0])}, None)):
        one, two = ask(server, {**t, **extra}, {}, backend)
        blind = ~rows if rows is not None else torch.tensor([[False] * 6, [True] * 6])
        o, lse, dq = one.tensors["o"], one.tensors["lse"], two.tensors["dq"]
        for b, i in blind.nonzero().tolist():
            assert (o[b, :, i] == 0).all()
            assert (lse[b, :, i] == -math.inf).all()
            assert (dq[b, :, i] == 0).all()
        for name, actual in {**one.tensors, **two.tensors}.items():
            assert not actual.isnan().any(), name
        assert (two.tensors["dk"][1] == 0).all()
        assert (two.tensors["dv"][1] == 0).all()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("batch", "sq", "sk"), [(0, 3, 3), (2, 3, 0), (2, 0, 3), (1, 0, 0)])
def test_empty_dimensions(server, backend, batch, sq, sk):
    shapes = {"q": (batch, 2, sq, 8), "k": (batch, 2, sk, 8), "v": (batch, 2, sk, 8), "do": (batch, 2, sq, 8)}
    t = {name: torch.ones(shape) for name, shape in shapes.items()}
    one, two = ask(server, t, {}, backend)
    assert {n: tuple(x.shape) for n, x in two.tensors.items()} == {"d" + n: shapes[n] for n in "qkv"}
    assert one.tensors["o"].shape == shapes["q"]
    assert (one.tensors["o"] == (1 if sk else 0)).all()
    assert one.tensors["lse"].shape == (batch, 2, sq)
    if not sk:
        assert (one.tensors["lse"] == -math.inf).all()
        assert (two.tensors["dq"] == 0).all()
    flat = {name: {"shape": list(x.shape), "data": x.flatten().tolist()} for name, x in t.items() if name != "do"}
    as_json = post(server, "/attention", json.dumps({**flat, "backend": backend}).encode(), JSON).json
    if batch and sq:
        assert torch.tensor(as_json["o"]).shape == shapes["q"]
    else:
        assert as_json["o"] == {"shape": list(shapes["q"]), "data": []}


def test_nan_and_infinity_are_answered(server):
    """NaN and infinity in the inputs cause no error, and reach no other element of the batch."""
    t = {n: normal(2, 1, 4, 8, seed=i) for i, n in enumerate("qkv")}
    clean = post(server, "/attention", message(t, backend="tiled")).tensors["o"]
    t["q"][0, 0, 1, 0] = math.nan
    dirty = post(server, "/attention", message(t, backend="tiled")).tensors["o"]
    assert dirty[0, 0, 1].isnan().all()
    assert torch.equal(dirty[1], clean[1])
    body = {"q": [["NaN", 1.0]], "k": [[1.0, 1.0]], "v": [["Infinity", "-Infinity"]]}
    assert post(server, "/attention", json.dumps(body).encode(), JSON).json["o"] == [["NaN", "NaN"]]


def test_json_gives_the_same_bits_as_safetensors(server):
    tensors, _ = case(length=17, causal=True)
    options = {"causal": True, "return_lse": True, "backend": "tiled"}
    q, k, v = (tensors[n] for n in "qkv")
    binary = post(server, "/attention", message({"q": q, "k": k, "v": v}, **options)).tensors
    body = json.dumps({"q": q.tolist(), "k": k.tolist(), "v": v.tolist(), **options}).encode()
    as_json = post(server, "/attention", body, JSON)
    assert as_json.headers["content-type"] == JSON
    assert (as_json.json["dtype"], as_json.json["backend"]) == ("float32", "tiled")
    for name, t in binary.items():
        assert torch.equal(torch.tensor(as_json.json[name]), t)
    crossed = post(server, "/attention", body, JSON, accept=SAFETENSORS)
    assert torch.equal(crossed.tensors["o"], binary["o"])
    to_json = post(server, "/attention", message({"q": q, "k": k, "v": v}, **options), accept=JSON)
    assert to_json.headers["content-type"] == JSON
    assert to_json.json == as_json.json
    grad = {**{n: t.tolist() for n, t in tensors.items()}, "dtype": "bfloat16", "causal": True}
    answer = post(server, "/attention/grad", json.dumps(grad).encode(), JSON).json
    assert answer["dtype"] == "bfloat16"
    dq = torch.tensor(answer["dq"])
    assert torch.equal(dq, dq.bfloat16().float())


def test_what_an_answer_says_beside_its_tensors(server):
    t = {n: normal(3, 8, seed=i) for i, n in enumerate("qkv")}
    answer = post(server, "/attention", message(t, dropout_p=0.5))
    seed = int(answer.metadata["dropout_seed"])
    assert 0 <= seed < 1 << 53
    assert answer.metadata["backend"] == answer.headers["x-backend"] == "cpu"
    again = post(server, "/attention", message(t, dropout_p=0.5, dropout_seed=seed))
    assert torch.equal(again.tensors["o"], answer.tensors["o"])
    assert answer.headers["x-batch-size"] == "1"
    parts = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    assert list(parts) == ["decode", "queue", "compute", "encode"]
    assert all(float(ms) >= 0 for ms in parts.values())
    octets = post(server, "/attention", message(t), "application/octet-stream")
    assert octets.headers["content-type"] == SAFETENSORS


def test_gradients_from_a_brought_forward_are_those_of_a_forward_run_again(server):
    tensors, options = SHORT["causal"]
    for backend in ("cpu", "tiled"):
        one, two = ask(server, tensors, options, backend)
        brought = post(server, "/attention/grad", message({**tensors, **one.tensors}, **options, backend=backend))
        for name, t in brought.tensors.items():
            assert torch.equal(t, two.tensors[name])


TRITON = {
    "plain": ((1, 2, 64, 40), (1, 2, 33, 40), {}),
    "causal gqa": ((1, 4, 37, 16), (1, 2, 53, 16), {"causal": True}),
    "top left": ((2, 2, 33, 64), (2, 2, 20, 64), {"causal": True, "causal_alignment": "top_left"}),
}


@pytest.fixture(scope="module")
def interpreted(start_server):
    """Start a server that runs our Triton kernels on the CPU, under Triton's interpreter."""
    return start_server(interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRITON)
def test_the_triton_kernels_answer_exactly_under_the_interpreter(interpreted, name):
    q, k, options = TRITON[name]
    t = {n: normal(*shape, seed=i) for i, (n, shape) in enumerate({"q": q, "k": k, "v": k, "do": q}.items())}
    expected = truth(t, options)
    one, two = ask(interpreted, t, options, "triton")
    assert one.headers["x-backend"] == two.headers["x-backend"] == "triton"
    for tensor, actual in {**one.tensors, **two.tensors}.items():
        assert error(actual, expected[tensor]) <= 5e-6 * expected[tensor].abs().max().item(), tensor
