"""Batches and survival: real processes, Triton's kernels under its interpreter, faults on demand."""

import concurrent.futures
import contextlib
import os
import re
import signal

import psutil
import pytest
import torch

from flashpoint_server.admission import FEW
from tests.support.messages import message, normal, post, problem, read_metrics
from tests.support.servers import wait_for
from tests.support.sockets import segments, send

PROGRAM = ("-m", "tests.support.faulty.server")


def forward(seed, length=5, heads=2, **options):
    q, k, v = (normal(1, heads, length + extra, 16, seed=seed * 9 + extra) for extra in (0, 3, 3))
    return message({"q": q, "k": k, "v": v}, backend="triton", **options)


def gradient(seed, length=4):
    names = ("q", "k", "v", "do")
    return message({n: normal(2, 1, length, 16, seed=seed * 9 + i) for i, n in enumerate(names)}, backend="triton")


class Faulty:
    """A server whose engine fails on demand, and the gates behind which its launches wait."""

    def __init__(self, start, gates, **settings):
        self.gates = gates / "open"
        self.names = []
        self.server = start(
            program=PROGRAM,
            interpret=True,
            log_level="debug",
            environment={"FLASHPOINT_TEST_GATE": str(self.gates)},
            **settings,
        )

    @contextlib.contextmanager
    def busy(self, pool, which="gate"):
        """Inside, a launch runs, and its answer is to come."""
        gate = self.gates.with_suffix(f".{which}")
        gate.unlink(missing_ok=True)
        try:
            answer = self.post(pool, f"{which}-{os.urandom(4).hex()}", forward(99))
            if which == "gate":
                self.wait_begun(which)
            yield answer
        finally:
            gate.touch()

    def wait_begun(self, which):
        """Until the last request so named is computed."""
        name = [line for line in self.names if line.startswith(which)][-1]
        self.server.wait_for_line(lambda line: line["event"] == "begin" and line["request_id"] == name)

    def post(self, pool, name, body, path="/attention", **headers):
        """Post in the background; returns once the request is inside."""
        before = self.inside()
        self.names.append(name)
        future = pool.submit(post, self.server, path, body, x_request_id=name, **headers)
        wait_for(lambda: self.inside() > before or future.done(), lambda: f"{name} never got in")
        return future

    def inside(self):
        return self.server.get("/info")[1]["load"]["requests"]


@pytest.fixture(scope="module")
def faulty(start_server, tmp_path_factory):
    # What a gate holds up counts as a hang, too: 32 requests must come in meanwhile, on a busy machine as well.
    return Faulty(start_server, tmp_path_factory.mktemp("gates"), hang_timeout=10)


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        yield pool


@pytest.mark.parametrize(("path", "make"), [("/attention", forward), ("/attention/grad", gradient)])
def test_eight_mixed_requests_run_in_one_launch_and_each_has_the_bits_it_has_alone(faulty, pool, path, make):
    bodies = [make(seed, length) for seed, length in enumerate((1, 2, 3, 5, 8, 13, 17, 21))]
    alone = [post(faulty.server, path, body) for body in bodies]
    assert {answer.headers["x-batch-size"] for answer in alone} == {"1"}
    before = read_metrics(faulty.server)
    with faulty.busy(pool) as gate:
        queued = [faulty.post(pool, f"mate-{n}", body, path) for n, body in enumerate(bodies)]
    together = [answer.result() for answer in queued]
    assert gate.result().status == 200
    assert {answer.headers["x-batch-size"] for answer in together} == {"8"}
    assert {answer.headers["x-backend"] for answer in together} == {"triton"}
    assert [answer.body for answer in together] == [answer.body for answer in alone]
    after = read_metrics(faulty.server)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["flashpoint_batch_size_count"] == 2.0  # the gate's and this one
    assert grown["flashpoint_batch_size_sum"] == 9.0
    assert grown["flashpoint_padding_saved_flops_total"] > 0
    assert after["flashpoint_kernel_tflops"] > 0


def test_who_leaves_or_is_late_is_not_in_the_batch_and_its_mates_are(faulty, pool):
    expected = post(faulty.server, "/attention", forward(1)).body
    with faulty.busy(pool):
        # With the gate and who is late they are as few as are let in whatever speed the engine was seen to have.
        mates = [faulty.post(pool, f"stays-{n}", forward(1)) for n in range(FEW - 2)]
        late = faulty.post(pool, "late", forward(1), x_timeout_ms=50)
        problem(late.result(), 504, "deadline_exceeded")
        before = faulty.inside()
        with send(faulty.server, forward(1)):
            wait_for(lambda: faulty.inside() == before + 1, lambda: "it never got in")
        wait_for(lambda: faulty.inside() == before, lambda: "it never left")
    for mate in mates:
        assert (mate.result().body, mate.result().headers["x-batch-size"]) == (expected, str(len(mates)))


def test_who_leaves_a_running_batch_costs_its_mates_nothing(faulty, pool):
    expected = post(faulty.server, "/attention", forward(1)).body
    with contextlib.ExitStack() as first:
        first.enter_context(faulty.busy(pool))
        with faulty.busy(pool, "wait") as shared:
            mates = [faulty.post(pool, f"mate-{n}", forward(1)) for n in range(2)]
            before = faulty.inside()
            with send(faulty.server, forward(1)):
                wait_for(lambda: faulty.inside() == before + 1, lambda: "it never got in")
                first.close()
                faulty.wait_begun("wait")
            wait_for(lambda: faulty.inside() == before - 1, lambda: "it never left")
    assert {mate.result().body for mate in mates} == {expected}
    assert {answer.result().headers["x-batch-size"] for answer in (shared, *mates)} == {"4"}


def test_sequences_that_meet_nobody_are_answered(faulty):
    """Packed so that no query has a key: no pair, and padding that would be astronomical."""
    q = torch.zeros(16384, 1, 64, dtype=torch.float16)
    ends = {"cu_seqlens_q": torch.tensor([0, 16384, 16384]), "cu_seqlens_k": torch.tensor([0, 0, 16384])}
    answer = post(faulty.server, "/attention", message({"q": q, "k": q, "v": q, **ends}, layout="thd", backend="torch"))
    assert not answer.tensors["o"].any()


def test_poison_harms_nobody_else(faulty, pool):
    poison = {name: torch.full((1, 2, 5, 16), float("nan")) for name in "qkv"}
    expected = [post(faulty.server, "/attention", forward(seed)).body for seed in range(3)]
    with faulty.busy(pool):
        mates = [faulty.post(pool, f"healthy-{seed}", forward(seed)) for seed in range(2)]
        sick = faulty.post(pool, "sick", message(poison, backend="triton"))
        mates.append(faulty.post(pool, "healthy-2", forward(2)))
    assert bool(sick.result().tensors["o"].isnan().all())
    assert [mate.result().body for mate in mates] == expected
    assert {mate.result().headers["x-batch-size"] for mate in mates} == {"4"}


CULPRITS = [("oom-1", 503, "out_of_memory"), ("bug-1", 500, "internal_error"), ("once-1", 200, None)]


@pytest.mark.parametrize(("name", "status", "code"), CULPRITS)
def test_the_culprit_alone_pays(faulty, pool, name, status, code):
    """No memory for one of a batch: the batch is cut in two, tried again, and only that one is refused."""
    expected = [post(faulty.server, "/attention", forward(seed)).body for seed in range(4)]
    with faulty.busy(pool):
        mates = [faulty.post(pool, f"mate-{seed}", forward(seed)) for seed in range(2)]
        culprit = faulty.post(pool, name, forward(7))
        mates += [faulty.post(pool, f"mate-{seed}", forward(seed)) for seed in (2, 3)]
    assert [mate.result().body for mate in mates] == expected
    answer = culprit.result()
    assert answer.status == status
    if code:
        problem(answer, status, code)
    if status == 503:
        assert answer.headers["retry-after"]
        assert read_metrics(faulty.server)["flashpoint_out_of_memory_splits_total"] > 0


def test_only_those_wait_whose_kernel_is_being_compiled(faulty, pool):
    narrow = {name: normal(1, 1, 3, 8, seed=seed) for seed, name in enumerate("qkv")}
    late = message(narrow, backend="triton", window=[1, 1])  # a launch key that nobody else here has
    held = [faulty.post(pool, f"late-{n}", late) for n in range(2)]
    with send(faulty.server, late):
        wait_for(lambda: faulty.inside() == 3, lambda: "it never got in")
    wait_for(lambda: faulty.inside() == 2, lambda: "it never left")
    assert post(faulty.server, "/attention", forward(1)).status == 200
    assert not any(answer.done() for answer in held)
    faulty.gates.with_suffix(".compiled").touch()
    assert {answer.result().headers["x-batch-size"] for answer in held} == {"2"}
    assert post(faulty.server, "/attention", late, x_request_id="late-known").status == 200


def test_what_fails_on_its_way_into_the_queue_fails_alone(faulty):
    """Before anything of it is computed, while its kernels are looked for: its HTTP process keeps its engine."""
    engine, t = faulty.server.engine_pid, normal(5, 2, 24)
    unfit = message({name: normal(1, 1, 4, 40) for name in "qkv"}, backend="triton")
    problem(post(faulty.server, "/attention", unfit, x_request_id="unfit-1"), 500, "internal_error")
    ends = torch.tensor([0, 9, 5], dtype=torch.int32)  # that fall
    ragged = {"q": t, "k": t, "v": t, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    body = message(ragged, layout="thd", backend="triton")
    document = problem(post(faulty.server, "/attention", body, x_request_id="late-ends"), 422, "invalid_request")
    assert document["errors"][0]["loc"] == ["cu_seqlens_q"]
    assert post(faulty.server, "/attention", forward(1)).status == 200
    assert faulty.server.engine_pid == engine
    assert not [line for line in faulty.server.lines if line["event"] in ("peer dropped", "engine lost")]


def die(faulty, pool, how):
    """Bring the engine down while a launch runs and 32 wait: that launch is refused, and the others are answered."""
    server, engine = faulty.server, faulty.server.engine_pid
    expected = [post(server, "/attention", forward(seed)).body for seed in range(4)]
    restarts = read_metrics(faulty.server)["flashpoint_engine_restarts_total"]
    with faulty.busy(pool) as gate:
        waiting = [faulty.post(pool, f"waits-{n}", forward(n % 4)) for n in range(32)]
        how(engine)
        problem(gate.result(), 503, "engine_lost")
        assert gate.result().headers["retry-after"]
        wait_for(lambda: server.get("/health/ready")[0] == 503, lambda: "ready without an engine")
        problem(post(server, "/attention", forward(1)), 503, "not_ready")
    assert [answer.result().body for answer in waiting] == [expected[n % 4] for n in range(32)]
    server.wait_ready()
    assert server.engine_pid != engine
    assert not psutil.pid_exists(engine)  # not even as a zombie
    assert read_metrics(faulty.server)["flashpoint_engine_restarts_total"] == restarts + 1


def test_an_engine_killed_in_the_middle_of_a_batch_with_32_waiting(faulty, pool):
    die(faulty, pool, lambda pid: os.kill(pid, signal.SIGKILL))


@pytest.mark.parametrize("name", ["gone-1", "hang-1"])
def test_a_lost_device_and_a_hang_end_the_engine_and_nothing_else(faulty, pool, name):
    server, engine = faulty.server, faulty.server.engine_pid
    expected = post(server, "/attention", forward(1)).body
    with faulty.busy(pool):
        culprit = faulty.post(pool, name, gradient(8), "/attention/grad")
        waiting = faulty.post(pool, "waits", forward(1))
    problem(culprit.result(), 503, "engine_lost")
    assert waiting.result().body == expected
    server.wait_ready()
    assert not psutil.pid_exists(engine)


def test_a_full_queue_and_sigterm_under_load_lose_no_answer(start_server, pool, tmp_path):
    """Full by count, by bytes and by FLOPs: what is inside is answered, then and when the server ends."""
    faulty = Faulty(start_server, tmp_path, queue_limit=17, queue_bytes=64 << 10, queue_flops=1 << 20)
    server, expected = faulty.server, post(faulty.server, "/attention", forward(1)).body
    many_bytes = {"q": normal(1, 1, 1, 16), "k": normal(1, 1, 600, 16), "v": normal(1, 1, 600, 16)}
    many_flops = {name: normal(1, 1, 300, 4) for name in "qkv"}

    def refused(tensors, why):
        answer = post(server, "/attention", message(tensors, backend="triton"))
        assert why in problem(answer, 429, "queue_full")["detail"]
        assert int(answer.headers["retry-after"]) >= 1

    with faulty.busy(pool) as gated:
        waiting = [faulty.post(pool, "waits-0", forward(1))]
        refused(many_bytes, "bytes")
        refused(many_flops, "FLOPs")
        waiting += [faulty.post(pool, f"waits-{n}", forward(1)) for n in range(1, 16)]
        refused({name: normal(1, 1, 1, 1) for name in "qkv"}, "17 requests")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line(lambda line: line["event"] == "draining")
        assert server.get("/health/ready")[0] == 503
        problem(post(server, "/attention", forward(2)), 503, "draining")
    assert gated.result().status == 200
    assert {answer.result().body for answer in waiting} == {expected}
    assert server.wait_exit() == 0


def test_a_batch_waits_for_company_as_long_as_it_is_told(start_server, pool):
    server = start_server(interpret=True, max_queue_delay=1.5)
    answers = [pool.submit(post, server, "/attention", forward(seed)) for seed in range(3)]
    assert {answer.result().headers["x-batch-size"] for answer in answers} == {"3"}
    alone = post(server, "/attention", forward(1))
    assert float(re.search(r"queue;dur=([\d.]+)", alone.headers["server-timing"])[1]) >= 1490
    assert alone.headers["x-batch-size"] == "1"


def test_after_all_of_it_nothing_is_left_and_the_books_balance(faulty):
    server = faulty.server
    wait_for(lambda: faulty.inside() == 0, lambda: "work that never ends")
    metrics = read_metrics(faulty.server)
    ended = sum(metrics[f'flashpoint_ended_total{{how="{how}"}}'] for how in ("answered", "refused", "cancelled"))
    assert metrics["flashpoint_accepted_total"] == ended > 50
    assert metrics["flashpoint_queue_requests"] == metrics["flashpoint_queue_bytes"] == 0
    for stage in ("decode", "queue", "compute", "encode"):
        assert metrics[f'flashpoint_stage_seconds_count{{stage="{stage}"}}'] > 50
    assert metrics["flashpoint_device_memory_bytes"] > 1 << 20
    below = psutil.Process(server.pid).children(recursive=True)
    assert [child.pid for child in below if child.status() == psutil.STATUS_ZOMBIE] == []
    assert len(segments(server.engine_pid)) <= len(segments(server.pid))


def test_an_engine_that_finds_too_little_memory_at_its_start_tries_again(start_server, tmp_path):
    (tmp_path / "open.short").touch()
    faulty = Faulty(start_server, tmp_path)
    assert post(faulty.server, "/attention", forward(1)).status == 200
    assert (tmp_path / "open.left").exists()
    assert [line["starts"] for line in faulty.server.lines if line["event"] == "started"] == [1, 2]


def test_an_engine_that_finds_another_device_when_it_is_started_again_ends_the_service(start_server, tmp_path):
    """Else `--device auto` would be the CPU, unawares, once its GPU is gone."""
    faulty = Faulty(start_server, tmp_path)
    (tmp_path / "open.moved").touch()
    os.kill(faulty.server.engine_pid, signal.SIGKILL)
    assert faulty.server.wait_exit() == 1
    (said,) = [line for line in faulty.server.lines if line["event"] == "failed"]
    assert "found cuda:7" in said["reason"]
