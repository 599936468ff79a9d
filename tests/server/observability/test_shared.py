"""HTTP processes count in shared memory; a process goes on with the counts of the former one of its number."""

import subprocess
import sys

from flashpoint_server.ipc.counts import WorkerGroup
from flashpoint_server.ipc.memory import NamedMemory
from flashpoint_server.observability import shared

WORKER = """
import sys
from flashpoint_server.ipc.counts import WorkerGroup
from flashpoint_server.ipc.memory import NamedMemory
from flashpoint_server.observability.metrics import Metrics
fd, number, requests = map(int, sys.argv[1:])
metrics = Metrics(WorkerGroup(NamedMemory(fd), number, 2))
for n in range(requests):
    metrics._count_ended("/r\\"é" + "x" * 200, "200", "ok", "alice", 0.003 * (n + 1), 10, 20)
metrics.queue(requests=number + 1, oldest_seconds=number)
metrics.process(f"http-{number}", 1000 + number)
print(metrics.exposition(None).decode())
"""


def counted(memory, number, requests):
    command = [sys.executable, "-c", WORKER, *map(str, (memory.fd, number, requests))]
    ran = subprocess.run(command, pass_fds=[memory.fd], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = (line.rsplit(" ", 1) for line in ran.stdout.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines if "process_" not in name or "flashpoint_" in name}


def test_counts_of_all_processes_are_summed_also_after_their_deaths():
    memory = NamedMemory()
    assert counted(memory, 0, 3)["flashpoint_received_bytes_total"] == 30
    both = counted(memory, 1, 4)
    assert both["flashpoint_received_bytes_total"] == 70
    assert both["flashpoint_queue_requests"] == 3  # a sum
    assert both["flashpoint_queue_oldest_seconds"] == 1  # a maximum
    (requests,) = [value for name, value in both.items() if name.startswith("flashpoint_requests_total")]
    assert requests == 7
    buckets = [value for name, value in both.items() if name.startswith("flashpoint_request_seconds_bucket")]
    assert (buckets == sorted(buckets), buckets[-1]) == (True, 7)
    shared.forget(memory, 1)
    again = counted(memory, 0, 2)  # the successor of the first one
    assert again["flashpoint_received_bytes_total"] == 90
    assert again["flashpoint_queue_requests"] == 1


def test_many_series_take_several_chunks():
    memory = NamedMemory()
    WorkerGroup(memory)
    values = shared._Values(memory, "counter", 0)
    keys = [f'["m", "m_total", {{"n": "{n}"}}, "help"]' for n in range(5000)]
    for n, key in enumerate(keys):
        chunk, at = values.place(key)
        shared._PAIR.pack_into(chunk, at + 8, n, 0.0)
    assert len(memory.names()) > 3
    (metric,) = shared.SharedCollector(memory).collect()
    assert sorted(sample.value for sample in metric.samples) == list(range(5000))
    again = shared._Values(memory, "counter", 0)
    assert [again.place(key)[1] for key in keys] == [values.place(key)[1] for key in keys]
