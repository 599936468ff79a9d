"""Batched launches are right and survive injected faults, with real processes and interpreted Triton kernels."""

import concurrent.futures
import contextlib
import os
import signal

import psutil
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

from flashpoint_contract.options import Options
from flashpoint_contract.spec import plan
from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.access.admission import FEW
from tests.support.gated import GatedServer
from tests.support.messages import message, normal, post, problem, read_metrics, refused_by_protocol
from tests.support.servers import wait_for
from tests.support.sockets import nothing_inside, segments


def forward_tensors(seed, length=5, heads=2):
    return {
        n: normal(1, heads, length + extra, 16, seed=seed * 9 + extra) for n, extra in (("q", 0), ("k", 3), ("v", 3))
    }


def forward(seed, length=5, heads=2, **options):
    return message(forward_tensors(seed, length, heads), backend="triton", **options)


def gradient(seed, length=4):
    names = ("q", "k", "v", "do")
    return message({n: normal(1, 1, length, 16, seed=seed * 9 + i) for i, n in enumerate(names)}, backend="triton")


HELD = forward(99)  # keeps the engine busy while a gate is closed


@pytest.fixture
def mortal(start_server, tmp_path):
    """Return a function that starts a server for this test alone. The test may end the server or its engine."""
    return lambda **settings: GatedServer(start_server, tmp_path, interpret=True, **settings)


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        yield pool


@pytest.mark.parametrize(("path", "make"), [("/attention", forward), ("/attention/grad", gradient)])
def test_eight_mixed_requests_run_in_one_launch_and_each_has_the_bits_it_has_alone(gated, pool, path, make):
    bodies = [make(seed, length) for seed, length in enumerate((1, 2, 3, 5, 8, 13, 17, 21))]
    alone = [post(gated.server, path, body) for body in bodies]
    assert {answer.headers["x-batch-size"] for answer in alone} == {"1"}
    before = read_metrics(gated.server)
    with gated.busy(pool, HELD) as blocked:
        queued = [gated.post(pool, "mate", body, path) for body in bodies]
    batched = [answer.result() for answer in queued]
    assert blocked.result().status == 200
    assert {answer.headers["x-batch-size"] for answer in batched} == {"8"}
    assert {answer.headers["x-backend"] for answer in batched} == {"triton"}
    assert [answer.body for answer in batched] == [answer.body for answer in alone]
    after = read_metrics(gated.server)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["flashpoint_batch_size_count"] == 2.0  # two launches: the blocked request, and the batch of eight
    assert grown["flashpoint_batch_size_sum"] == 9.0
    assert grown["flashpoint_padding_saved_flops_total"] > 0
    assert after["flashpoint_kernel_tflops"] > 0


def test_the_triton_kernels_agree_with_the_reference(gated):
    """The interpreted kernels agree with the backend `reference`; test_http_exact.py has more cases."""
    tensors = {"q": normal(1, 4, 37, 16, seed=1), "k": normal(1, 2, 53, 16, seed=2), "v": normal(1, 2, 53, 16, seed=3)}
    for path, sent in (("/attention", tensors), ("/attention/grad", {**tensors, "do": normal(1, 4, 37, 16, seed=4)})):
        actual, expected = (
            post(gated.server, path, message(sent, causal=True, backend=backend)).tensors
            for backend in ("triton", "reference")
        )
        for name, tensor in expected.items():
            assert (actual[name] - tensor).abs().max() <= 5e-6 * tensor.abs().max(), name


def test_who_leaves_or_is_late_is_not_in_the_batch_and_its_mates_are(gated, pool):
    expected = post(gated.server, "/attention", forward(1)).body
    with gated.busy(pool, HELD):
        # With the blocked and the late request, these are FEW requests, admitted whatever their predicted wait is.
        mates = [gated.post(pool, "stays", forward(1)) for _ in range(FEW - 2)]
        late = gated.post(pool, "late", forward(1), x_timeout_ms=50)
        problem(late.result(), 504, "deadline_exceeded")
        with gated.client(forward(1)) as left:
            pass
        gated.wait_dropped(left)
    for mate in mates:
        assert (mate.result().body, mate.result().headers["x-batch-size"]) == (expected, str(len(mates)))
    assert not gated.begun(late.name)
    assert not gated.begun(left)


def test_a_deadline_that_passes_during_the_compute_is_504_before_the_compute_ends(gated, pool):
    nothing_inside(gated.server)
    gate = gated.gate("gate")
    gate.unlink(missing_ok=True)
    try:
        late = post(gated.server, "/attention", forward(1), x_request_id="gate-late", x_timeout_ms=300)
    finally:
        gate.touch()
    problem(late, 504, "deadline_exceeded")
    assert post(gated.server, "/attention", forward(1)).status == 200


def test_who_leaves_a_running_batch_costs_its_mates_nothing(gated, pool):
    expected = post(gated.server, "/attention", forward(1)).body
    with contextlib.ExitStack() as first:
        first.enter_context(gated.busy(pool, HELD))
        with gated.busy(pool, forward(99), "wait") as shared:
            mates = [gated.post(pool, "mate", forward(1)) for _ in range(2)]
            with gated.client(forward(1)) as left:
                first.close()
                gated.wait_begun(left)
    assert {mate.result().body for mate in mates} == {expected}
    assert {answer.result().headers["x-batch-size"] for answer in (shared, *mates)} == {"4"}


def test_sequences_that_meet_nobody_are_answered(gated):
    """One packed sequence has no keys, so its output is 0; one has no queries. Padding would need much memory."""
    q = torch.zeros(16384, 1, 64, dtype=torch.float16)
    ends = {"cu_seqlens_q": torch.tensor([0, 16384, 16384]), "cu_seqlens_k": torch.tensor([0, 0, 16384])}
    answer = post(gated.server, "/attention", message({"q": q, "k": q, "v": q, **ends}, layout="thd", backend="cpu"))
    assert not answer.tensors["o"].any()


def test_poison_harms_nobody_else(gated, pool):
    """NaN in one request of a launch does not change the answers of the other requests."""
    poison = {name: torch.full((1, 2, 5, 16), float("nan")) for name in "qkv"}
    expected = [post(gated.server, "/attention", forward(seed)).body for seed in range(3)]
    with gated.busy(pool, HELD):
        mates = [gated.post(pool, "healthy", forward(seed)) for seed in range(2)]
        sick = gated.post(pool, "sick", message(poison, backend="triton"))
        mates.append(gated.post(pool, "healthy", forward(2)))
    assert bool(sick.result().tensors["o"].isnan().all())
    assert [mate.result().body for mate in mates] == expected
    assert {mate.result().headers["x-batch-size"] for mate in mates} == {"4"}


CULPRITS = [
    ("oom", 503, "out_of_memory"),
    ("bug", 500, "internal_error"),
    pytest.param("once", 200, None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "status", "code"), CULPRITS)
def test_the_culprit_alone_pays(gated, pool, name, status, code):
    """If a batch fails, its halves are retried, until only the request that causes the failure is refused."""
    expected = [post(gated.server, "/attention", forward(seed)).body for seed in range(4)]
    splits = read_metrics(gated.server)["flashpoint_out_of_memory_splits_total"]
    with gated.busy(pool, HELD):
        mates = [gated.post(pool, "mate", forward(seed)) for seed in range(2)]
        culprit = gated.post(pool, name, forward(7))
        mates += [gated.post(pool, "mate", forward(seed)) for seed in (2, 3)]
    assert [mate.result().body for mate in mates] == expected
    answer = culprit.result()
    assert answer.status == status
    if code:
        problem(answer, status, code)
    if status == 503:
        assert answer.headers["retry-after"]
        assert read_metrics(gated.server)["flashpoint_out_of_memory_splits_total"] > splits


def test_only_those_wait_whose_kernel_is_being_compiled(gated, pool):
    narrow = {name: normal(1, 1, 3, 8, seed=seed) for seed, name in enumerate("qkv")}
    late = message(narrow, backend="triton", window=[1, 1])  # no other test in this file has this launch key
    waiting = [gated.post(pool, "late", late) for _ in range(2)]
    with gated.client(late) as left:
        pass
    gated.wait_dropped(left)
    assert post(gated.server, "/attention", forward(1)).status == 200
    assert not any(answer.done() for answer in waiting)
    gated.gate("compiled").touch()
    assert {answer.result().headers["x-batch-size"] for answer in waiting} == {"2"}
    assert post(gated.server, "/attention", late, x_request_id="late-known").status == 200


def test_what_fails_on_its_way_into_the_queue_fails_alone(gated):
    """Two requests fail before they are queued, when the engine looks up their kernels.

    They get errors, and their HTTP process stays connected to the engine.
    """
    engine, line_count, t = gated.server.engine_pid, len(gated.server.lines), normal(5, 2, 24)
    unfit = message({name: normal(1, 1, 4, 40) for name in "qkv"}, backend="triton")
    problem(post(gated.server, "/attention", unfit, x_request_id="unfit-1"), 500, "internal_error")
    ends = torch.tensor([0, 9, 5], dtype=torch.int32)  # a decrease is invalid
    ragged = {"q": t, "k": t, "v": t, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    body = message(ragged, layout="thd", backend="triton")
    document = problem(post(gated.server, "/attention", body, x_request_id="late-ends"), 422, "invalid_request")
    assert document["errors"][0]["loc"] == ["cu_seqlens_q"]
    assert post(gated.server, "/attention", forward(1)).status == 200
    assert gated.server.engine_pid == engine
    assert not [line for line in gated.server.lines[line_count:] if line["event"] in ("peer dropped", "engine lost")]


def test_the_books_balance_when_nothing_is_inside(gated, pool):
    """After three answers, an error and a client that left, all requests count as ended and their memory as free."""
    server = gated.server
    nothing_inside(server)
    before = read_metrics(server)
    with gated.busy(pool, HELD):
        answered = [gated.post(pool, "stays", forward(seed)) for seed in range(2)]
        refused = gated.post(pool, "oom", forward(3))
        with gated.client(forward(4)):
            pass
    assert {answer.result().status for answer in answered} == {200}
    assert refused.result().status == 503
    nothing_inside(server)
    metrics = read_metrics(server)
    ended = {how: f'flashpoint_ended_total{{how="{how}"}}' for how in ("answered", "refused", "cancelled")}
    grown = {how: metrics[name] - before.get(name, 0.0) for how, name in ended.items()}
    assert grown == {"answered": 3.0, "refused": 1.0, "cancelled": 1.0}
    assert metrics["flashpoint_accepted_total"] == sum(metrics[name] for name in ended.values())
    assert metrics["flashpoint_queue_requests"] == metrics["flashpoint_queue_bytes"] == 0
    for stage in ("decode", "queue", "compute", "encode"):
        count = f'flashpoint_stage_seconds_count{{stage="{stage}"}}'
        assert metrics[count] - before.get(count, 0.0) == 3.0
    assert metrics["flashpoint_device_memory_bytes"] > 1 << 20
    below = psutil.Process(server.pid).children(recursive=True)
    assert [child.pid for child in below if child.status() == psutil.STATUS_ZOMBIE] == []
    assert len(segments(server.engine_pid)) <= len(segments(server.pid))


def flops(tensors):
    """Return the FLOPs that the server counts for a forward with these tensors."""
    return plan({n: TensorInfo("float32", tuple(t.shape)) for n, t in tensors.items()}, Options(), "forward").flops


@pytest.mark.slow
def test_a_full_queue_and_sigterm_under_load_lose_no_answer(mortal, pool):
    """Requests over a queue limit (count, bytes, FLOPs) are refused; all admitted ones are answered, despite SIGTERM.

    With the configured delay and budget, a launch waits for two requests, or for one of their total size.
    """
    queue = {"queue_limit": 17, "queue_bytes": 128 << 10, "queue_flops": 1 << 20}
    batch = {"max_queue_delay": 60, "batch_flops": 2 * flops(forward_tensors(1))}
    faulty = mortal(**queue, **batch, shutdown_timeout=3600)
    server = faulty.server
    first = faulty.post(pool, "first", forward(1))
    assert not faulty.begun(first.name)
    second = faulty.post(pool, "second", forward(1))
    assert {answer.result().headers["x-batch-size"] for answer in (first, second)} == {"2"}
    expected = first.result().body
    many_bytes = {"q": normal(1, 1, 1, 16), "k": normal(1, 1, 1200, 16), "v": normal(1, 1, 1200, 16)}
    many_flops = {name: normal(1, 1, 300, 4) for name in "qkv"}

    def refused(tensors, why):
        answer = post(server, "/attention", message(tensors, backend="triton"))
        assert why in problem(answer, 429, "queue_full")["detail"]
        assert int(answer.headers["retry-after"]) >= 1

    with faulty.busy(pool, forward(99, 40)) as blocked:
        waiting = [faulty.post(pool, "waits", forward(1))]
        refused(many_bytes, "bytes")
        refused(many_flops, "FLOPs")
        waiting += [faulty.post(pool, "waits", forward(1)) for _ in range(1, 16)]
        refused({name: normal(1, 1, 1, 1) for name in "qkv"}, "17 requests")
        assert server.get("/health/ready")[0] == 200
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line(lambda line: line["event"] == "draining")
        status, document = server.get("/health/ready")
        assert (status, document["code"]) == (503, "draining")
        assert server.get("/health/live")[0] == 200
        answer = post(server, "/attention", forward(2))
        problem(answer, 503, "draining")
        assert answer.headers["retry-after"]
        refused_by_protocol(server)
        assert not any(answer.done() for answer in (blocked, *waiting))
    assert blocked.result().status == 200
    assert {answer.result().body for answer in waiting} == {expected}
    assert server.wait_exit() == 0


@pytest.mark.slow
def test_an_engine_killed_in_the_middle_of_a_batch_with_32_waiting(gated, pool):
    """If the engine is killed, the requests of the running launch get 503, and the next engine answers all others."""
    server, engine = gated.server, gated.server.engine_pid
    restarts = read_metrics(server)["flashpoint_engine_restarts_total"]
    expected = [post(server, "/attention", forward(seed)).body for seed in range(4)]
    with gated.busy(pool, HELD) as blocked:
        waiting = [gated.post(pool, "waits", forward(n % 4)) for n in range(32)]
        gated.gate("closed").touch()
        os.kill(engine, signal.SIGKILL)
        problem(blocked.result(), 503, "engine_lost")
        assert blocked.result().headers["retry-after"]
        wait_for(lambda: server.get("/health/ready")[0] == 503, lambda: "ready without an engine")
        problem(post(server, "/attention", forward(1)), 503, "not_ready")
        gated.gate("closed").unlink()
    assert [answer.result().body for answer in waiting] == [expected[n % 4] for n in range(32)]
    server.wait_ready()
    assert server.engine_pid != engine
    assert not psutil.pid_exists(engine)  # not even as a zombie
    assert read_metrics(server)["flashpoint_engine_restarts_total"] == restarts + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gone", "hang"])
def test_a_lost_device_and_a_hang_end_the_engine_and_nothing_else(request, mortal, pool, name):
    faulty = mortal(hang_timeout=0.5) if name == "hang" else request.getfixturevalue("gated")
    server, engine = faulty.server, faulty.server.engine_pid
    culprit = faulty.post(pool, name, gradient(8), "/attention/grad")
    problem(culprit.result(), 503, "engine_lost")
    wait_for(lambda: not psutil.pid_exists(engine), lambda: "the engine that lost its device goes on")
    server.wait_ready()
    assert server.engine_pid != engine
    if name == "gone":  # with a short timeout, a slow launch on a busy machine would look like a hang
        assert post(server, "/attention", forward(1)).status == 200


@pytest.mark.slow
def test_an_engine_is_started_again_with_too_little_memory_and_not_with_another_device(mortal, tmp_path):
    """An engine whose start fails for lack of memory is started again.

    If it would then use another device than before, the server ends. If it went on, `--device auto` would serve from
    the CPU and hide the loss of a GPU. Also, a lone request is computed after max_queue_delay.
    """
    (tmp_path / "open.short").touch()
    faulty = mortal(max_queue_delay=0.2)
    assert post(faulty.server, "/attention", forward(1)).headers["x-batch-size"] == "1"
    assert (tmp_path / "open.left").exists()
    assert [line["starts"] for line in faulty.server.lines if line["event"] == "started"] == [1, 2]

    (tmp_path / "open.moved").touch()
    os.kill(faulty.server.engine_pid, signal.SIGKILL)
    assert faulty.server.wait_exit() == 1
    (failure,) = [line for line in faulty.server.lines if line["event"] == "failed"]
    assert "from cpu to cuda:7" in failure["reason"]
