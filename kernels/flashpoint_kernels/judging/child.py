"""Run functions on tensors that another process sends. This module is the program of that process: see `process`.

It imports torch alone. `process` sends its source to a new interpreter, so that a function finds no module, object or
argument by which it could tell its caller from another program. A function may replace what it likes in torch: this
program has bound what it needs as local names, and it reads answers from memory, not through operators.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import functools
import gc
import importlib
import inspect
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

_SIMPLE = (bool, int, float, str, type(None))
_ADVICE = "\nSearch for `cuda"  # torch adds the same advice to each error of CUDA
_LIBRARIES = ("/torch/", "/triton/", "/concurrent/futures/", "/multiprocessing/", "<frozen ")  # may keep threads
_SUBREAPER, _DROP, _END_WITH_PARENT = 36, 24, 1  # options of prctl
_POWERS = (19, 21)  # the capabilities SYS_PTRACE and SYS_ADMIN, with which root reads the memory of other processes
_SWITCH = 1e-5  # seconds after which Python runs another thread, so that calls at once take turns in short steps
_KEPT = 4  # number of earlier calls whose answers are read again


def found(name: str) -> Any:
    """Import and return MODULE:FUNCTION; FUNCTION may be an attribute of a class. Raises LookupError, as JSON."""
    module, _, path = name.partition(":")
    try:
        target = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise LookupError(json.dumps(["", error.name, []])) from None
    for part in path.split("."):
        if not hasattr(target, part):
            near = difflib.get_close_matches(part, [each for each in dir(target) if each[:1] != "_"], 8)
            raise LookupError(json.dumps([module, part, near])) from None
        target = getattr(target, part)
    if not callable(target):
        raise LookupError(json.dumps([name, type(target).__name__, None]))
    return target


def described(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the function's name and its parameters, if Python can find them."""
    import torch

    owner = getattr(function, "__self__", None)
    applied = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    try:
        of: Any = owner.forward if applied else function  # type: ignore[union-attr]
        of = function.forward if isinstance(function, torch.nn.Module) else of
        parameters = list(inspect.signature(of).parameters.values())[1 if applied else 0 :]
        known = True
    except Exception:  # an attribute or a method of the caller's object may raise any exception
        parameters, known = [], False
    empty, many = inspect.Parameter.empty, ("VAR_POSITIONAL", "VAR_KEYWORD")
    listed: Any = [
        {
            "name": p.name, "kind": "POSITIONAL_ONLY" if applied else p.kind.name,
            "required": p.default is empty and p.kind.name not in many,
            "default": p.default if isinstance(p.default, _SIMPLE) else "pair" * isinstance(p.default, (tuple, list)),
        }
        for p in parameters
    ]  # fmt: skip
    module = getattr(function, "__module__", None) or ""
    name = getattr(function, "__name__", type(function).__name__)
    interpreted = any(type(each).__name__ == "InterpretedFunction" for each in gc.get_objects())
    return {
        "name": name, "module": module, "parameters": listed if known else None, "interpreted": interpreted,
    }  # fmt: skip


def told(error: BaseException) -> dict[str, Any]:
    """Return an exception as data."""
    kind = type(error).__name__
    try:
        text = str(error).partition(_ADVICE)[0].strip().encode(errors="replace").decode() or kind
    except BaseException:  # even `str` of the function's own exception class may fail
        text = kind
    full = isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "allocate memory" in text
    return {"type": kind, "text": text[:600], "clear": isinstance(error, Exception), "memory": full}


def work(file: int, start: Callable[[], Callable[..., Any]], place: str) -> None:
    """Run the calls that come over the socket `file` until it is closed. `process.Worker.ask` describes them."""
    import torch

    device, cuda = torch.device(place), place.startswith("cuda")
    read, write, loads, dumps, clock = os.readv, os.writev, json.loads, json.dumps, time.perf_counter
    inner: Any = torch._C
    base, memories, drawer, char = inner.TensorBase, inner.StorageBase, inner.Generator, ctypes.c_char
    address, strides, sizes, widths = base.data_ptr, base.stride, base.size, base.element_size
    storage, nbytes, start_of = base.untyped_storage, memories.nbytes, memories.data_ptr
    to_cpu, set_memory, wants, copy, contiguous = base.cpu, base.set_, base.requires_grad_, base.copy_, base.contiguous
    negated, solved, zero = base.is_neg, base.resolve_neg, base.zero_
    empty, byte, plain, usual_types = torch.empty, torch.uint8, torch.Tensor, (torch.Tensor, torch.nn.Parameter)
    types = {str(t)[6:]: t for t in vars(torch).values() if type(t) is torch.dtype}
    backward: Any = torch.autograd.Variable._execution_engine.run_backward
    synchronize, compiler = torch.cuda.synchronize, torch.compile
    thread_of, barrier_of = threading.Thread, threading.Barrier
    switch_interval, set_switch_interval = sys.getswitchinterval, sys.setswitchinterval
    generator, state_of, seed_of, seed = (
        torch.default_generator,
        drawer.get_state,
        drawer.initial_seed,
        drawer.manual_seed,
    )
    frames, seed_python, drawn = sys._current_frames, random.seed, random.getstate
    profiled, traced, collected, timer = sys.getprofile, sys.gettrace, gc.callbacks, signal.getitimer
    hashed, text_of = hash, told
    spaces = [(vars(each), [*vars(each)]) for each in (torch, torch.Tensor, torch.nn.functional, torch.autograd)]
    known = [tuple(map(space.get, names)) for space, names in spaces]
    fill = functools.partial(torch.use_deterministic_algorithms, warn_only=True)  # torch.empty then gives NaN
    changes: dict[str, Any] = {
        "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "num_threads": (torch.get_num_threads, torch.set_num_threads),
        "filled": (torch.are_deterministic_algorithms_enabled, fill),
    }
    blocks: list[Any] = []
    earlier: list[list[Any]] = []
    compiled: list[Any] = []

    def wait() -> None:
        return synchronize() if cuda else None

    def view_of(at: int, count: int) -> Any:
        return (char * count).from_address(at) if count else b""

    def receive(room: Any) -> Any:
        view = memoryview(room).cast("B")
        while len(view):
            if not (count := read(file, [view])):
                raise EOFError
            view = view[count:]
        return room

    def message() -> Any:
        return loads(receive(bytearray(int.from_bytes(receive(bytearray(8)), "little"))))

    def reply(header: Any, data: Any = b"") -> None:
        text = dumps(header).encode()
        for part in (len(text).to_bytes(8, "little") + text, data):
            view = memoryview(part).cast("B")
            while len(view):
                view = view[write(file, [view]) :]

    def show(kind: list[Any], t: Any) -> None:
        """Send how a tensor lies in memory, and the bytes from its first to its last element."""
        where, dtype = [start_of(storage(t)), nbytes(storage(t))], str(t.dtype)[6:]
        t = to_cpu(solved(t) if negated(t) else t)
        if all(sizes(t)) and 4 * t.numel() < nbytes(storage(t)) // widths(t) and min(strides(t), default=1):
            t = contiguous(t)
        count = 0
        if all(sizes(t)):
            count = (1 + sum((n - 1) * s for n, s in zip(sizes(t), strides(t), strict=True))) * widths(t)
        reply([*kind, dtype, [*sizes(t)], [*strides(t)], *where, count], view_of(address(t), count))

    def form(answer: Any) -> list[Any]:
        """Return what kind of object an answer is."""
        if not isinstance(answer, plain):
            return [type(answer).__name__]
        about = [str(answer.layout)[6:], answer.is_nested, answer.device.type, str(answer.dtype)[6:]]
        own = type(answer) in usual_types and not answer._backward_hooks
        return [type(answer).__name__, own, *about, answer.requires_grad, answer.ndim]

    def replaced(space: Any, before: Any) -> int:
        """Return how many entries of a module were replaced, but by torch itself, as its compiler does."""
        (entries, names), now = space, tuple(map(space[0].get, space[1]))
        if now == before:
            return 0
        other = [entries.get(name) for name, old in zip(names, before, strict=True) if entries.get(name) is not old]
        return sum(not str(getattr(each, "__module__", "")).startswith("torch") for each in other)

    def settings() -> list[str]:
        """Return what a function may change for the whole process."""
        tiny = torch.tensor(1e-39, dtype=torch.float32, device="cpu") * 1
        listed = [
            torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled(), float(tiny) == 0, torch.is_inference_mode_enabled(), torch.get_num_threads(),
            (inner._len_torch_function_stack(), inner._len_torch_dispatch_stack()),
            sum(map(replaced, spaces, known)),
            (profiled(), traced()), len(collected), [timer(n)[0] > 0 for n in range(3)],
            sum(not any(part in f.f_code.co_filename for part in _LIBRARIES) for f in frames().values()),
        ]  # fmt: skip
        return [str(each) for each in listed]

    def generators() -> list[Any]:
        numpy, seen = sys.modules.get("numpy"), state_of(generator)
        other = hashed(str(numpy.random.get_state()[1:3])) if numpy is not None else 0
        return [hashed(bytes(view_of(address(seen), seen.numel()))), seed_of(generator), hashed(drawn()), other]

    def put(spans: list[int], listed: list[list[Any]], again: bool) -> dict[str, Any]:
        """Receive the bytes of storages, `again` into those of the call before, and return the tensors in them."""
        fresh = [empty(max(n, 1), dtype=byte, device="cpu") for n in spans]
        for block, n in zip(fresh, spans, strict=True):
            receive(view_of(address(block), n))
        if again and [b.numel() for b in blocks] == [b.numel() for b in fresh]:
            for block, new in zip(blocks, fresh, strict=True):
                copy(block, new)
        else:
            blocks[:] = [block.to(device) for block in fresh] if cuda else fresh
        made = {}
        for name, block, dtype, shape, stride, at, wanted in listed:
            t = set_memory(empty(0, dtype=types[dtype], device=device), storage(blocks[block]), at, shape, stride)
            made[name] = wants(t, True) if wanted else t
        return made

    def contexts(modes: Mapping[str, Any]) -> Any:
        stack = contextlib.ExitStack()
        for name in {"no_grad", "inference_mode"} & modes.keys():
            stack.enter_context(getattr(torch, name)())
        if "autocast" in modes:
            stack.enter_context(torch.autocast(device.type, types[modes["autocast"]]))
        for name, (now, change) in changes.items():
            if name in modes:
                stack.callback(change, now())
                change(types.get(modes[name], modes[name]))
        if "stream" in modes and cuda:
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    def forward(call: Any, modes: Any, positional: Any, named: Any, got: list[Any]) -> None:
        try:
            with contexts(modes):
                del modes
                got += [call(*positional, **named)]
        except BaseException as error:
            got += [None, error]

    def at_once(wait_for_all: Callable[[], Any], *job: Any) -> None:
        wait_for_all()
        forward(*job)

    def back(n: int, outputs: dict[str, Any], given: dict[str, Any], wanted: Any, ups: Any, more: Any) -> list[Any]:
        """Run a backward, and return the gradients; send them."""
        pairs = [(outputs[o], given[up]) for o, up in ups if o in outputs and outputs[o].requires_grad]
        if sizes(pairs[0][0]) != sizes(pairs[0][1]):
            raise ValueError(f"o has shape {[*sizes(pairs[0][0])]}, not {[*sizes(pairs[0][1])]}")
        of, made = tuple(given[name] for name in wanted), list[Any]()
        outs, tops = (tuple(each) for each in zip(*pairs, strict=True))
        twice, second = "twice" in more, "second" in more
        for turn in range(1 + twice):
            with contexts({name: more[name] for name in ("filled", "stream") if name in more}):
                got = backward(outs, tops, twice or second, second, of, True, accumulate_grad=False)
            wait()
            reply(["fact", n, "unused", [name for name, g in zip(wanted, got, strict=True) if g is None]])
            listed = [(f"d{name}", g) for name, g in zip(wanted, got, strict=True) if g is not None]
            for name, g in listed:
                show(["answer", n, f"first {name}" if twice and not turn else name], g)
            for name, g in made if turn else ():
                show(["answer", n, f"again {name}"], g)
            made = listed
        if second:
            inside = [(name, g) for name, g in made if g.requires_grad]
            reply(["fact", n, "second", bool(inside)])
            if inside:
                tops = tuple(given[more["second"][name]] for name, _ in inside)
                got = backward(tuple(g for _, g in inside), tops, False, False, of, True, accumulate_grad=False)
                for name, g in zip(wanted, got, strict=True):
                    if g is not None:
                        show(["answer", n, f"dd{name}"], g)
        return [g for _, g in made]

    def turn(calls: Any, given: dict[str, Any], modes: Any) -> list[Any]:
        """Run calls, and then their backwards; send and return the answers."""

        def value(x: Any) -> Any:
            return given[x["tensor"]] if type(x) is dict else tuple(x) if type(x) is list else x

        if "compile" in modes and not compiled:
            compiled.append(compiler(function, backend="aot_eager"))
        call = compiled[0] if "compile" in modes else function
        got: list[list[Any]] = [[] for _ in calls]
        jobs = [
            (call, modes, [value(x) for x in each[0]], {name: value(x) for name, x in each[1].items()}, got[n])
            for n, each in enumerate(calls)
        ]
        if "threads" in modes:
            wait_for_all, usual = barrier_of(len(jobs)).wait, switch_interval()
            threads = [thread_of(target=at_once, args=(wait_for_all, *job)) for job in jobs]
            set_switch_interval(_SWITCH)
            list(map(thread_of.start, threads))
            list(map(thread_of.join, threads))
            set_switch_interval(usual)
        for job in () if "threads" in modes else jobs:
            forward(*job)
        wait()
        answers, outputs = list[Any](), list[dict[str, Any]]()
        for n, result in enumerate(got):
            if len(result) > 1:
                reply(["fact", n, "error", text_of(result[1])])
                outputs.append({})
                continue
            parts = [*result[0]] if isinstance(result[0], (tuple, list)) else [result[0]]
            forms = [form(part) for part in parts[:2]]
            reply(["fact", n, "form", forms])
            fit = [f[1:5] == [True, "strided", False, device.type] and f[5] in types for f in forms]
            listed = {name: part for name, part, fits in zip(("o", "lse"), parts, fit, strict=False) if fits}
            outputs.append(listed if "o" in listed else {})
            for name, part in outputs[-1].items():
                show(["answer", n, name], part)
                answers.append(part)
        for n, (_, _, wanted, ups, more) in enumerate(calls):
            if not wanted or "o" not in outputs[n] or not outputs[n]["o"].requires_grad:
                continue
            for name in wanted if "zeroed" in more else ():
                zero(given[name].detach())
            try:
                answers += back(n, outputs[n], given, wanted, ups, more)
            except BaseException as error:
                reply(["fact", n, "grad_error", text_of(error)])
        return answers

    try:
        function = start()
    except BaseException as error:
        reply({"failed": told(error)})
        return
    del start
    reply(described(function))
    reply(settings())
    while True:
        try:
            spans, listed, again, number, modes, times, within, keep, calls = message()
        except (EOFError, OSError):
            return
        given = put(spans, listed, again)
        seed(generator, number)
        seed_python(number)
        before = generators()
        began = clock()
        try:
            while True:
                answers = turn(calls, given, modes)
                times -= 1
                reply(["turn"])
                if times < 1 or clock() - began > within:
                    break
        except BaseException as error:  # after such an error, torch or this process may be unusable
            answers = []
            reply(["fact", 0, "error", text_of(error) | {"clear": False}])
        try:
            reply(["process", clock() - began, settings(), before, generators()])
            for n, block in enumerate(blocks):
                show(["input", n], block)
            for n, kept in enumerate(earlier):
                for i, t in enumerate(kept):
                    show(["earlier", n, i], t)
            held = [answers] if keep and answers else []
            earlier[:] = [*earlier, *held][-_KEPT:]
            reply(["end", bool(held)])
        except BaseException as error:
            reply(["failed", text_of(error)])
            reply(["end", False])


def _limit_memory(device: str) -> None:
    """Let the system end this process first if memory runs out; on the CPU, let it use two thirds of what there is."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
        if device == "cpu":
            with open("/proc/self/statm") as size:
                now = int(size.read().split()[0]) * resource.getpagesize()
            limit = now + available * 2 // 3
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _prctl(*arguments: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(*arguments, *[0] * (5 - len(arguments)))


def _renounce() -> None:
    """Give up the capabilities to read or trace other processes, which root may have (Linux)."""
    for power in _POWERS:
        _prctl(_DROP, power)
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        if libc.capget(header, sets) == 0:
            for power in _POWERS:
                for at in range(3):  # effective, permitted, inheritable
                    sets[at] &= ~(1 << power)
            libc.capset(header, sets)


def import_for_gradients() -> None:
    """Import what torch imports at a first gradient: otherwise each fork spends 0.4 s on it."""
    importlib.import_module("torch.fx.experimental.symbolic_shapes")


def _end_children(but: set[int]) -> None:
    """End all children but some, and what they leave behind, which becomes this process's children (Linux)."""
    for _ in range(400):
        left = []
        for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid() and int(name) not in but:
                    left.append(int(name))
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if not left:
            return


def processes(control: socket.socket, function: Callable[..., Any] | None = None) -> None:
    """Fork a process for each request on `control`; send its pid, and later its exit status. End with `control`.

    Whatever a process has started ends with it, in sessions of their own, too: it becomes a child of this process.
    """
    _prctl(_SUBREAPER, 1)
    _renounce()
    running: set[int] = set()
    ended, wake = os.pipe()  # a byte in it: a child has ended
    for each in (ended, wake):
        os.set_blocking(each, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.register(ended, select.POLLIN)
        ready = {each for each, _ in poll.poll()}
        if ended in ready:
            os.read(ended, 1 << 12)
            for pid in sorted(running):
                if (end := os.waitpid(pid, os.WNOHANG))[0]:
                    running.remove(pid)
                    _end_children(running)
                    status = {"pid": pid, "status": os.waitstatus_to_exitcode(end[1])}
                    control.sendall(json.dumps(status).encode() + b"\n")
        if control.fileno() not in ready:
            continue
        text, files, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not text:
            _end_children(set())
            return
        what = json.loads(text)
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (control.detach(), ended, wake):
                    os.close(each)
                os.setsid()
                _prctl(_END_WITH_PARENT, signal.SIGKILL)
                _begin(files, function, *what)
            finally:
                os._exit(0)
        for each in files:
            os.close(each)
        running.add(pid)
        control.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def _begin(
    files: list[int], function: Callable[..., Any] | None, target: str, device: str, path: list[str], folder: str
) -> None:
    import torch

    for stream in (1, 2):
        os.dup2(files[1], stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stdin = open(os.devnull)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = path
    importlib.invalidate_caches()
    os.chdir(folder)
    torch.set_num_threads(1)
    _limit_memory(device)
    work(files[0], (lambda: function) if function is not None else (lambda: found(target)), device)


def main() -> None:
    """Serve as the program of a new interpreter: standard output is the socket for `processes`."""
    control = socket.socket(fileno=os.dup(1))
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv, sys.orig_argv = [""], [sys.executable]
    text = b""
    while not text.endswith(b"\n"):
        text += control.recv(1)
    sys.path[:] = json.loads(text)
    import_for_gradients()
    processes(control)


if __name__ == "__main__":
    main()
