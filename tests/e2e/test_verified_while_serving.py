"""An idle engine computes a share of its own answers again in float64 (--verify-rate), and counts the results."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flashpoint import Client
from flashpoint_contract.tensors import SCALES
from tests.support.gated import PROGRAM, GatedServer
from tests.support.messages import ask, message, normal, post, problem, read_metrics
from tests.support.servers import DEVICE, wait_for

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the servers' engine computes on the CPU")
SAMPLE = re.compile(r'flashpoint_verified_total\{backend="(\w+)",direction="(\w+)",dtype="(\w+)",result="(\w+)"\}')


class Verified:
    """A server that verifies answers, and whose kernels are wrong while `wrong` is set."""

    def __init__(self, start_server, folder, **settings):
        self.bug = folder / "bug"
        self.wrong(False)
        environment = {"FLASHPOINT_TEST_BUG": str(self.bug), "FLASHPOINT_TEST_GATE": str(folder / "gate")}
        self.server = start_server(program=PROGRAM, environment=environment, **settings)
        self.url = self.server.url

    def wrong(self, on):
        self.bug.write_text("wrong" if on else "")

    def counts(self):
        """Return the number of samples by backend, direction, dtype and result."""
        found = {SAMPLE.fullmatch(name): n for name, n in read_metrics(self.server).items() if SAMPLE.fullmatch(name)}
        return {match.groups(): int(n) for match, n in found.items()}

    def results(self):
        totals = {}
        for (*_, result), n in self.counts().items():
            totals[result] = totals.get(result, 0) + n
        return totals

    def after(self, calls, want=1):
        """Make calls, wait until each has `want` results, and return how many results of each kind came."""
        before, count = self.results(), 0
        for call in calls:
            call()
            count += 1
        total = sum(before.values()) + want * count
        wait_for(lambda: sum(self.results().values()) >= total, lambda: f"{self.results()} of {total}")
        now = self.results()
        return {name: n - before.get(name, 0) for name, n in now.items() if n > before.get(name, 0)}


@pytest.fixture(scope="module")
def every(start_server, tmp_path_factory):
    """A server that verifies every answer."""
    return Verified(start_server, tmp_path_factory.mktemp("every"), verify_rate=1, log_level="info")


def tensors(dtype, *, batch=2, heads=4, kv_heads=2, q_len=37, kv_len=53, dim=16):
    shapes = {"q": (heads, q_len), "k": (kv_heads, kv_len), "v": (kv_heads, kv_len), "do": (heads, q_len)}
    return {n: normal(batch, *s, dim, seed=i).to(dtype) for i, (n, s) in enumerate(shapes.items())}


def sender(verified, sent, **options):
    path = "/attention/grad" if "do" in sent else "/attention"

    def call():
        assert post(verified.server, path, message(sent, **options)).status == 200

    return call


def forward_and_gradient(verified, t, **options):
    more = {} if "dropout_seed" in options else {"return_lse": True}
    yield sender(verified, {n: x for n, x in t.items() if n != "do"}, **options, **more)
    yield sender(verified, t, **options)


def plain_calls(verified):
    """Yield calls of every kind of request that needs no cache."""
    lengths = {"q_lengths": torch.tensor([37, 20]), "kv_lengths": torch.tensor([53, 9])}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        t = tensors(dtype)
        for options in (
            {}, {"causal": True}, {"window": [7, 3], "softcap": 5.0, "backend": "tiled"},
            {"dropout_p": 0.3, "dropout_seed": 11, "causal": True}, {"causal": True, "causal_alignment": "top_left"},
        ):  # fmt: skip
            yield from forward_and_gradient(verified, t, **options)
        turned = {n: x.transpose(1, 2).contiguous() for n, x in t.items()}
        yield from forward_and_gradient(verified, turned, layout="bshd", window=[9, -1])
        yield from forward_and_gradient(verified, {**t, **lengths}, causal=True)
        extra = {
            "attn_mask": normal(4, 37, 53, seed=9).to(dtype), "alibi_slopes": normal(4, seed=8).abs(),
            "sinks": normal(4, seed=7),
        }  # fmt: skip
        yield from forward_and_gradient(verified, {**t, **extra})
        blocks = {"block_mask": torch.rand(1, 4, 3, 2, generator=torch.Generator().manual_seed(1)) < 0.7}
        yield from forward_and_gradient(verified, {**t, **blocks}, block_size=[16, 32], window=[20, 5])
        mask = {"attn_mask": torch.rand(37, 53, generator=torch.Generator().manual_seed(2)) < 0.5}
        yield from forward_and_gradient(verified, {**t, **mask}, causal=True)
        packed = {n: x.transpose(1, 2).flatten(0, 1) for n, x in t.items()}
        packed |= {"cu_seqlens_q": torch.tensor([0, 5, 5, 74]), "cu_seqlens_k": torch.tensor([0, 50, 60, 106])}
        yield from forward_and_gradient(verified, packed, layout="thd", causal=True)
        eight = {n: t[n] for n in "q"} | {n: torch.ones_like(t[n], dtype=torch.int8) for n in "kv"}
        yield sender(verified, {**eight, **{name: torch.rand(2, 2, 53) for name in SCALES}})
    yield from forward_and_gradient(verified, tensors(torch.float64), backend="reference")


def cached_calls(verified, client):
    for dtype in ("float32", "bfloat16", "int8"):
        of_q = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        for options in ({}, {"window": (30, 0)}, {"dropout_p": 0.2, "dropout_seed": 3}, {"softcap": 8.0}):
            cache = client.cache(kv_heads=2, head_dim=16, dtype=dtype)
            t = tensors(of_q, batch=1, q_len=40, kv_len=40)
            for first, last in ((0, 33), (33, 34), (34, 40)):
                part = [t[n][:, :, first:last].contiguous() for n in "qkv"]
                yield lambda part=part, cache=cache, options=options: cache.attention(*part, causal=True, **options)
            mask = {"attn_mask": normal(2, 40, seed=4).to(of_q)}
            yield lambda q=t["q"], cache=cache, mask=mask: cache.attention(q[:, :, :2].contiguous(), **mask)


def test_right_answers_of_every_kind_are_right(every):
    found = every.after(plain_calls(every))
    assert found.keys() <= {"right", "imprecise"}, f"{found} {wrong_lines(every)[:1]}"
    assert found["right"] > 60
    with Client(every.url) as client:
        found = every.after(cached_calls(every, client))
    assert found.keys() <= {"right", "imprecise"}, f"{found} {wrong_lines(every)}"
    assert found["right"] > 35
    assert {labels[:3] for labels in every.counts()} >= {
        (backend, direction, dtype)
        for backend, dtypes in (("cpu", ("float32", "float16", "bfloat16")), ("reference", ("float64",)))
        for dtype in dtypes
        for direction in ("forward", "backward")
    }


def wrong_lines(verified):
    return [line for line in verified.server.lines if line["event"] in ("wrong answer", "verification failed")]


def test_wrong_answers_of_every_kind_are_counted_and_logged_without_values(every):
    before = len(wrong_lines(every))
    every.wrong(True)
    try:
        with Client(every.url) as client:
            found = every.after([*plain_calls(every), *cached_calls(every, client)])
    finally:
        every.wrong(False)
    assert found.get("wrong", 0) > 0.9 * sum(found.values()), found
    lines = wrong_lines(every)[before:]
    assert len(lines) == found["wrong"]
    for line in lines:
        assert line["level"] == "error"
        assert {"shapes", "options", "seed", "kernel", "processor", "index", "tensor", "elements"} <= line.keys()
        assert line["kernel"] in (None, *every.server.get("/info")[1]["kernels"].values())
    assert any(line["seed"] == 11 and line["options"]["dropout_p"] == 0.3 for line in lines)
    assert ask(every.server, "/health/ready").status == 200  # the action is `log`


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 1e30, 3e38, 1e-40, 65504.0])
@pytest.mark.parametrize("name", ["q", "k", "v", "do", "all"])
def test_hostile_inputs_raise_no_alarm(every, name, value):
    calls = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        t = tensors(dtype, kv_len=40)
        for other in t if name == "all" else (name,):
            t[other] = t[other].clone()
            t[other][..., 3:9, :] = value
        calls += forward_and_gradient(every, t, causal=True)
        calls += forward_and_gradient(every, {n: x[:, :, :1].contiguous() for n, x in t.items()})
    assert "wrong" not in every.after(calls), wrong_lines(every)


@pytest.mark.slow
def test_a_wrong_kernel_is_noticed_within_1000_requests_at_rate_one_in_a_hundred(start_server, tmp_path):
    """Each hundred answers have a sample, so that the third hundred has one at the latest."""
    verified = Verified(start_server, tmp_path, verify_rate=0.01, log_level="info")
    t = {n: x for n, x in tensors(torch.bfloat16, batch=1, q_len=8, kv_len=8).items() if n != "do"}
    with Client(verified.url) as client:
        for _ in range(200):
            client.attention(**t)
        wait_for(lambda: verified.results().get("right", 0) >= 1, verified.results)
        assert set(verified.results()) == {"right"}
        verified.wrong(True)
        for _ in range(1000):
            client.attention(**t)
        wait_for(lambda: verified.results().get("wrong", 0) >= 8, verified.results)
    assert verified.results()["wrong"] <= 11


def test_the_second_wrong_answer_withdraws_the_server(start_server, tmp_path):
    verified = Verified(start_server, tmp_path, verify_rate=1, verify_action="drain", log_level="info")
    call = sender(verified, {n: x for n, x in tensors(torch.float32).items() if n != "do"})
    assert verified.after([call, call]) == {"right": 2}
    verified.wrong(True)
    assert verified.after([call]) == {"wrong": 1}
    assert ask(verified.server, "/health/ready").status == 200
    call()
    assert verified.server.wait_for_line(lambda line: line["event"] == "withdrawn")["level"] == "error"
    problem(ask(verified.server, "/health/ready"), 503, "draining")
    sent = message({n: x for n, x in tensors(torch.float32).items() if n != "do"})
    assert "wrong answers" in problem(post(verified.server, "/attention", sent), 503, "draining")["detail"]
    assert ask(verified.server, "/health/live").status == 200


class Held:
    """A server that verifies every answer, whose engine is busy with a request at a gate."""

    def __init__(self, start_server, folder, pool, **how):
        self.gated = GatedServer(start_server, folder, verify_rate=1, **how)
        t = tensors(torch.float32, batch=1, heads=1, kv_heads=1, q_len=1)
        self.one = {n: x for n, x in t.items() if n != "do"}
        self.busy = pool.submit(post, self.gated.server, "/attention", self.message("reference"), x_request_id="gate-1")
        self.gated.wait_begun("gate-1")

    def message(self, backend):
        return message(self.one, backend=backend)

    def results(self):
        found = read_metrics(self.gated.server).items()
        return {SAMPLE.fullmatch(name)[4]: int(n) for name, n in found if SAMPLE.fullmatch(name) and "cpu" in name}

    def send(self, count):
        for _ in range(count):
            assert post(self.gated.server, "/attention", self.message("cpu")).status == 200

    def verified_one(self):
        """Send one call after another until one of them is verified: a slow machine may let some copies grow old."""

        for _ in range(20):
            before = sum(self.results().values())
            self.send(1)
            wait_for(lambda before=before: sum(self.results().values()) > before, self.results)
            if self.results().get("right"):
                return
        raise AssertionError(f"no copy was verified: {self.results()}")


# The bytes of a sample of `Held.one`: one row of q and o and 53 rows of k and v, 64 bytes each, and the offset.
SIZE = 2 * 64 * (1 + 53) + 8


def test_copies_stay_within_their_bytes_and_the_others_are_skipped(start_server, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        held = Held(start_server, tmp_path, pool, verify_bytes=3 * SIZE + SIZE // 2)
        held.send(8)
        wait_for(lambda: held.results() == {"skipped": 5}, held.results)
        held.gated.gate("gate").touch()
        assert held.busy.result().status == 200
        wait_for(lambda: held.results() == {"skipped": 5, "right": 3}, held.results)
        held.send(3)  # the checked copies have given their memory back
        wait_for(lambda: sum(held.results().values()) == 11, held.results)
        assert held.results() == {"skipped": 5, "right": 6}


def test_a_copy_that_is_too_old_is_skipped_though_the_engine_is_busy(start_server, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        soon = {"FLASHPOINT_TEST_HELD": "0.2"}
        held = Held(start_server, tmp_path, pool, environment=soon, verify_bytes=2 * SIZE + SIZE // 2)
        held.send(2)
        wait_for(lambda: held.results() == {"skipped": 2}, held.results)
        held.gated.gate("gate").touch()
        assert held.busy.result().status == 200
        held.verified_one()  # the old copies have given their memory back
