"""Processes share named blocks of memory; where there is no memory for one, an error says so, and no signal kills."""

import subprocess
import sys
import threading

import pytest

from flashpoint_server.ipc.memory import NamedMemory

WRITER = """
import sys
from flashpoint_server.ipc.memory import NamedMemory
memory = NamedMemory(int(sys.argv[1]))
for n in range(int(sys.argv[2]), 200, 2):
    block, _ = memory.block(f"b{n // 2}", 5000)  # both writers want each block
    block[int(sys.argv[2])] = 1 + n % 250
"""


def test_blocks_have_one_place_for_all_processes():
    memory = NamedMemory()
    first, _ = memory.block("first", 10)
    first[:5] = b"hello"
    command = [sys.executable, "-c", WRITER, str(memory.fd)]
    writers = [subprocess.Popen([*command, str(n)], pass_fds=[memory.fd]) for n in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert set(memory.names()) == {"first", *(f"b{n}" for n in range(100))}
    for n in range(100):
        block, _ = memory.block(f"b{n}", 5000)
        assert list(block[:2]) == [1 + 2 * n % 250, 1 + (2 * n + 1) % 250]
    assert NamedMemory(memory.fd).block("first", 10)[0][:5] == b"hello"


def test_threads_of_a_process_make_a_block_once():
    memory, start, offsets = NamedMemory(), threading.Barrier(4), []

    def make():
        start.wait()
        offsets.append([memory.block(str(n), 1)[1] for n in range(50)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(tuple, offsets))) == 1


def test_a_lock_excludes_other_memories_of_the_same_file():
    one = NamedMemory()
    other = NamedMemory(one.fd)
    _, offset = one.block("a", 1)
    with one.locked(offset, 1):
        with pytest.raises(BlockingIOError), other.locked(offset, 1):
            pass
        with other.locked(other.block("b", 1)[1], 1):
            pass
    with other.locked(offset, 1):
        pass


FULL = """
import resource, signal, sys
from flashpoint_server.ipc.memory import NamedMemory
from flashpoint_server.observability.metrics import Metrics
from flashpoint_server.ipc.counts import WorkerGroup
memory = NamedMemory()
metrics = Metrics(WorkerGroup(memory, 0, 2))
resource.setrlimit(resource.RLIMIT_FSIZE, (memory.block("last", 1)[1] + 4096,) * 2)  # the file cannot grow any more
try:
    memory.block("more", 1 << 20)
except OSError as error:
    print("refused")
for n in range(2000):
    metrics._count_ended(f"/{n}", "200", "ok", "", 0.5, 1, 1)  # more series than there is room for
metrics.accepted()
text = metrics.exposition(None).decode()
print("flashpoint_accepted_total 1.0" in text, 'route="/0"' in text, 'route="/1999"' in text)
"""


def test_without_memory_new_metrics_are_not_counted_and_the_others_are():
    ran = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0] == "refused"
    assert ran.stdout.splitlines()[-1] == "True True False"
    assert ran.stdout.count("new metrics are not counted") + ran.stderr.count("new metrics are not counted") > 0
