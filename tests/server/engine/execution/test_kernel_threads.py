"""`KernelThreads.run` blocks its caller until all calls have run, raises their errors, and keeps no tensors alive."""

import threading
import weakref
from functools import partial

import pytest

from flashpoint_server.engine.execution.kernel_threads import KernelThreads


@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_call_has_run_when_run_returns(count):
    threads, ran = KernelThreads(count), []

    def ask(caller):
        for number in range(50):
            threads.run(partial(ran.append, (caller, number)))
            assert (caller, number) in ran

    callers = [threading.Thread(target=ask, args=(caller,)) for caller in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(ran) == 200
    for caller in range(4):
        assert [number for name, number in ran if name == caller] == list(range(50))


@pytest.mark.parametrize(("count", "elsewhere"), [(0, False), (2, True)])
def test_calls_run_on_other_threads_if_there_are_any(count, elsewhere):
    names = []
    KernelThreads(count).run(lambda: names.append(threading.get_ident()))
    assert (names[0] != threading.get_ident()) == elsewhere


@pytest.mark.parametrize("count", [0, 1])
def test_the_caller_gets_the_error_and_the_thread_goes_on(count):
    threads, ran = KernelThreads(count), []

    def fail():
        raise MemoryError("no memory")

    for _ in range(2):
        with pytest.raises(MemoryError, match="no memory"):
            threads.run(fail)
    threads.run(lambda: ran.append(1))
    assert ran == [1]


def test_a_call_is_not_kept_alive():
    """The threads keep no reference to a finished call, whose tensors may be cache memory that must be freed later."""

    class Held:
        def run(self):
            pass

    threads, call = KernelThreads(1), Held()
    freed = threading.Event()
    weakref.finalize(call, freed.set)
    threads.run(call.run)
    del call
    assert freed.wait(10)
