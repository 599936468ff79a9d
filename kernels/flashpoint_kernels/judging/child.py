"""The process in which a judged function runs: it receives calls, runs them, and returns answers and observations.

`main` is the parent of such processes: it imports torch once, and forks a process for each session, so that a session
starts in milliseconds and imports the function's module anew. The judge sends each call over a socket: a header in
JSON, then the bytes of the tensors that the header names. Nothing is unpickled.

A session does not compare answers with exact ones. It keeps earlier answers to detect that a later call overwrites
them, and copies of inputs to detect that a call changes them. It returns such observations as `facts`, a dict.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from flashpoint_contract.wording.hints import meant
from flashpoint_kernels.problems.problem import DTYPE_NAMES, DTYPES

_KEPT = 4  # number of earlier answers that are checked for changes
_DIFFERENT = 4  # number of differing answers that a repeated call returns
_SIMPLE = (bool, int, float, str, type(None))
_ADVICE = "\nSearch for `cuda"  # torch adds the same advice to each error of CUDA
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def send(connection: Connection, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Send a JSON header and tensors over a socket."""
    contiguous = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    listed = [[name, DTYPE_NAMES.get(t.dtype, str(t.dtype)), list(t.shape)] for name, t in contiguous.items()]
    connection.send_bytes(json.dumps({**header, "tensors": listed}).encode())
    for t in contiguous.values():
        connection.send_bytes(ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()) if t.numel() else b"")


def receive(connection: Connection) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Receive and return a JSON header and tensors. Raises EOFError, OSError and ValueError."""
    header = json.loads(connection.recv_bytes())
    tensors = {}
    for name, dtype, shape in header.pop("tensors"):
        data = bytearray(connection.recv_bytes())
        to = DTYPES[dtype]
        tensors[name] = (torch.frombuffer(data, dtype=to) if data else torch.empty(0, dtype=to, device="cpu")).reshape(
            shape
        )
    return header, tensors


class NotFoundError(Exception):
    """The named function does not exist."""


def load(name: str) -> Any:
    """Import and return MODULE:FUNCTION; FUNCTION may be an attribute of a class. Raises NotFoundError."""
    module, _, path = name.partition(":")
    try:
        target = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise NotFoundError(f"there is no module {error.name}: run it in the folder of the module") from None
    for part in path.split("."):
        if not hasattr(target, part):
            near = meant(part, [each for each in dir(target) if not each.startswith("_")])
            raise NotFoundError(f"{module} has no {part}" + (f"; did you mean {near}?" if near else ""))
        target = getattr(target, part)
    if not callable(target):
        raise NotFoundError(f"{name} must be a function, not {type(target).__name__}")
    return target


def described(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the function's name and its parameters, if Python can find them."""
    owner = getattr(function, "__self__", None)
    applied = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    try:
        of: Any = owner.forward if applied else function  # type: ignore[union-attr]
        of = function.forward if isinstance(function, torch.nn.Module) else of
        parameters = list(inspect.signature(of).parameters.values())[1 if applied else 0 :]
        known = True
    except Exception:  # an attribute or a method of the caller's object may raise any exception
        parameters, known = [], False
    listed: Any = [
        {
            "name": each.name,
            "kind": "POSITIONAL_ONLY" if applied else each.kind.name,
            "required": each.default is inspect.Parameter.empty
            and each.kind.name not in ("VAR_POSITIONAL", "VAR_KEYWORD"),
            "default": each.default
            if isinstance(each.default, _SIMPLE)
            else "pair"
            if isinstance(each.default, (tuple, list))
            else "",
        }
        for each in parameters
    ]
    module = getattr(function, "__module__", None) or ""
    name = getattr(function, "__name__", type(function).__name__)
    return {"name": name, "module": module, "parameters": listed if known else None}


class Session:
    """One function, and the data that is kept between its calls."""

    def __init__(self, function: Callable[..., Any], device: str) -> None:
        self.function, self.device = function, torch.device(device)
        self.earlier: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []  # (answers, copies of these answers)
        self.inputs: dict[str, Tensor] = {}
        self.stream: Any = None
        self.settings = _settings()

    def handle(self, request: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        inputs = self.placed(tensors, request.get("views", {}), request.get("reuse", False))
        if request["op"] == "repeat":
            return self.repeat(request, inputs)
        with self.mode(request):
            return self.call(request, inputs)

    def placed(self, tensors: Mapping[str, Tensor], views: Mapping[str, str], reuse: bool) -> dict[str, Tensor]:
        """Return the inputs on the device, in the memory form that `views` names.

        With `reuse`, write the inputs into the memory of the previous call's inputs.
        """
        placed = {}
        for name, t in tensors.items():
            sent = t.to(self.device)
            kept = self.inputs.get(name)
            if reuse and kept is not None and (kept.shape, kept.dtype) == (sent.shape, sent.dtype):
                kept.copy_(sent)
                placed[name] = kept
            else:
                placed[name] = viewed(sent, views.get(name, "plain"))
        self.inputs = placed
        return placed

    @contextlib.contextmanager
    def mode(self, request: Mapping[str, Any]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if request.get("poison"):
                stack.enter_context(_poisoned_memory())
            if request.get("stream") and self.device.type == "cuda":
                self.stream = self.stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self.stream.wait_stream(torch.cuda.current_stream())
                stack.enter_context(torch.cuda.stream(self.stream))
            yield

    def call(
        self, request: Mapping[str, Any], inputs: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        before = {name: t.clone() for name, t in inputs.items()}
        start = time.perf_counter()
        facts, answers = self.answers(request, inputs)
        self.wait()
        facts["seconds"] = time.perf_counter() - start
        ours = ("deterministic algorithms",) if request.get("poison") else ()
        now = {name: value for name, value in _settings().items() if name not in ours}
        facts["state"] = [name for name, value in now.items() if value != self.settings[name]]
        facts["changed"] = [name for name, t in inputs.items() if not _same(t, before[name])]
        facts["overwritten"] = sorted({
            name for made, copies in self.earlier for name, t in made.items() if not _same(t, copies[name])
        })  # fmt: skip
        facts["aliases"] = [
            [name, other] for name, t in answers.items() for other, u in inputs.items() if _overlap(t, u)
        ]
        for earlier_answers, _ in self.earlier:
            facts["aliases"] += [
                [n, "an earlier answer"] for n, t in answers.items() for u in earlier_answers.values() if _overlap(t, u)
            ]
        if answers and not request.get("poison"):
            kept = (dict(answers), {name: t.clone() for name, t in answers.items()})
            self.earlier = [*self.earlier[1 - _KEPT :], kept]
        return facts, answers

    def answers(
        self, request: Mapping[str, Any], inputs: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Run one call. Return `facts`, and o, lse and the gradients of the inputs that the request's `leaves` name."""
        leaves = request.get("leaves", [])
        given = {name: t.detach() for name, t in inputs.items()}
        for name in leaves:
            given[name] = given[name].requires_grad_()

        def value(each: Any) -> Any:
            return given[each["tensor"]] if isinstance(each, dict) else tuple(each) if isinstance(each, list) else each

        arguments = [value(each) for each in request["args"]]
        keywords = {name: value(each) for name, each in request["kwargs"].items()}
        facts: dict[str, Any] = {}
        try:
            with torch.no_grad() if request.get("no_grad") else contextlib.nullcontext():
                result = self.function(*arguments, **keywords)
            parts = list(result) if isinstance(result, (tuple, list)) else [result]
            if (bad := self.unusable(parts[0] if parts else None)) is not None:
                dense = bad.startswith("a ")
                must = "a dense tensor of q's type" if dense else "a tensor, or a tuple that begins with one"
                return {"bad": f"it returned {bad}, but must return {must}"}, {}
        except BaseException as error:
            return {"error": _told(error)}, {}
        answers = {"o": parts[0]}
        if len(parts) > 1 and self.unusable(parts[1]) is None and parts[1].ndim == parts[0].ndim - 1:
            answers["lse"] = parts[1]
        facts["lse_grad"] = "lse" in answers and answers["lse"].requires_grad
        facts["grad"] = parts[0].requires_grad
        if leaves and parts[0].requires_grad:
            try:
                grads = self.gradients(request, given, answers, leaves, facts)
            except BaseException as error:
                facts["grad_error"] = _told(error)
                grads = {}
            answers |= grads
        return facts, {name: t.detach() for name, t in answers.items()}

    def unusable(self, answer: Any) -> str | None:
        """Return why an answer cannot be judged, for example its type; None if it can be judged."""
        if not isinstance(answer, Tensor):
            return "nothing" if answer is None else type(answer).__name__
        if answer.is_nested or answer.layout != torch.strided:
            return "a nested tensor" if answer.is_nested else f"a tensor of layout {str(answer.layout)[6:]}"
        if answer.device.type != self.device.type:
            return f"a tensor on {answer.device.type}"
        return None if answer.dtype in DTYPE_NAMES else f"a tensor of {str(answer.dtype)[6:]}"

    def gradients(
        self,
        request: Mapping[str, Any],
        given: Mapping[str, Tensor],
        answers: Mapping[str, Tensor],
        leaves: Sequence[str],
        facts: dict[str, Any],
    ) -> dict[str, Tensor]:
        outputs, upstream = [answers["o"]], [given["do"]]
        if request.get("dlse") and facts["lse_grad"]:
            outputs.append(answers["lse"])
            upstream.append(given["dlse"])
        if upstream[0].shape != outputs[0].shape:
            raise ValueError(f"o has shape {list(outputs[0].shape)}, not {list(upstream[0].shape)}")
        of = [given[name] for name in leaves]
        twice = bool(request.get("twice"))
        grads = torch.autograd.grad(outputs, of, upstream, allow_unused=True, retain_graph=twice)
        facts["unused"] = [name for name, g in zip(leaves, grads, strict=True) if g is None]
        named_gradients = {f"d{n}": g for n, g in zip(leaves, grads, strict=True) if g is not None}
        if twice:
            kept = {name: g.clone() for name, g in named_gradients.items()}
            again = torch.autograd.grad(outputs, of, upstream, allow_unused=True)
            facts["overwritten_by_second"] = [name for name, g in named_gradients.items() if not _same(g, kept[name])]
            named_gradients = {f"d{n}": g for n, g in zip(leaves, again, strict=True) if g is not None}
        return named_gradients

    def repeat(
        self, request: Mapping[str, Any], inputs: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Repeat a call with the same inputs. Return how often the bits differed, and the first differing answers."""
        first: dict[str, Tensor] = {}
        facts: dict[str, Any] = {"calls": 0, "forward": 0, "gradient": 0, "other": []}
        answers: dict[str, Tensor] = {}
        start = time.perf_counter()
        while facts["calls"] < request["times"] and (
            facts["calls"] < 2 or time.perf_counter() - start < request["within"]
        ):
            facts_of_call, answers_of_call = self.answers(request, inputs)
            self.wait()
            facts["calls"] += 1
            if "error" in facts_of_call or "grad_error" in facts_of_call or "bad" in facts_of_call:
                return {**facts, **facts_of_call, "seconds": time.perf_counter() - start}, answers
            if not first:
                first = {name: t.clone() for name, t in answers_of_call.items()}
                answers |= {f"0.{name}": t for name, t in first.items()}
                continue
            other = [name for name, t in answers_of_call.items() if name not in first or not _same(t, first[name])]
            facts["forward"] += any(name in ("o", "lse") for name in other)
            facts["gradient"] += any(name.startswith("d") for name in other)
            if other and len(facts["other"]) < _DIFFERENT:
                facts["other"].append(facts["calls"])
                answers |= {f"{facts['calls']}.{name}": t.clone() for name, t in answers_of_call.items()}
        return {**facts, "seconds": time.perf_counter() - start}, answers

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _settings() -> dict[str, str]:
    """Return torch's global settings that a function must leave as they were."""
    facts: dict[str, Any] = {
        "default data type": torch.get_default_dtype(), "default device": torch.get_default_device(),
        "gradient mode": torch.is_grad_enabled(), "precision of float32 products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled(),
        "flush of denormal numbers": float(torch.tensor(1e-39, dtype=torch.float32, device="cpu") * 1) == 0,
    }  # fmt: skip
    return {name: str(value) for name, value in facts.items()}


def viewed(t: Tensor, view: str) -> Tensor:
    """Return a tensor with the same values in another memory form, surrounded by NaN or the largest integers."""
    filler = float("nan") if t.is_floating_point() else 1 if t.dtype == torch.bool else torch.iinfo(t.dtype).max
    if view == "transposed" and t.ndim >= 3:  # the strides that `view(B, S, H, D).transpose(1, 2)` gives
        return t.transpose(-3, -2).contiguous().transpose(-3, -2)
    if view == "strided":  # every second element of a last dimension of double size
        wide = t.new_full((*t.shape, 2), filler)
        wide[..., 0] = t
        return wide[..., 0]
    if view == "rows" and t.ndim >= 2:  # rows with a larger stride, as in a packed projection
        wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1] + 8), filler)
        wide[..., 8 : 8 + t.shape[-1]] = t
        return wide[..., 8 : 8 + t.shape[-1]]
    if view in ("offset", "misaligned"):
        ahead = 1 if view == "misaligned" else 64
        room = t.new_full((t.numel() + ahead + 64,), filler)
        part = room[ahead : ahead + t.numel()].view(t.shape)
        part.copy_(t)
        return part
    if view == "columns" and t.ndim >= 2:  # the last two dimensions are transposed in memory
        return t.mT.contiguous().mT
    if view == "expanded":  # all elements share one memory cell, like the gradient of a sum
        return t.reshape(-1)[:1].reshape((1,) * t.ndim).expand(t.shape) if t.numel() else t
    return t.clone()


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Make `torch.empty` return memory filled with NaN: torch does so in its deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _same(t: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit by bit."""
    if t.shape != other.shape or t.dtype != other.dtype:
        return False
    if t.is_floating_point():
        kind = _INTS[t.element_size()]
        return torch.equal(t.detach().contiguous().view(kind), other.detach().contiguous().view(kind))
    return torch.equal(t, other)


def _overlap(t: Tensor, other: Tensor) -> bool:
    return t.numel() > 0 and other.numel() > 0 and t.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _told(error: BaseException) -> dict[str, Any]:
    try:
        text = str(error).partition(_ADVICE)[0].strip().encode(errors="replace").decode() or type(error).__name__
        lines = traceback.format_exception(type(error), error, error.__traceback__)
    except BaseException:  # even `str` of the function's own exception class may fail
        text, lines = type(error).__name__, []
    return {
        "type": type(error).__name__, "text": text[:600], "clear": isinstance(error, Exception),
        "memory": isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in text,
        "trace": "".join(lines)[-3000:],
    }  # fmt: skip


def serve(connection: Connection, start: Callable[[], Callable[..., Any]], device: str, threads: int) -> None:
    """Answer the judge's calls until it closes the connection."""
    _limit_memory(device)
    if threads:
        torch.set_num_threads(threads)
    try:
        function = start()
    except BaseException as error:
        send(connection, {"failed": _told(error)}, {})
        return
    send(connection, described(function), {})
    session = Session(function, device)
    while True:
        try:
            request, tensors = receive(connection)
        except (EOFError, OSError):
            return
        try:
            facts, answers = session.handle(request, tensors)
        except BaseException as error:  # after such an error, torch or this process may be unusable
            facts, answers = {"error": _told(error) | {"clear": False}}, {}
        send(connection, facts, answers)


def _limit_memory(device: str) -> None:
    """Let this process fail before others do if memory runs out.

    The system's out-of-memory killer ends it first. On the CPU its address space may grow by two thirds of the
    available memory.
    """
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
        if device == "cpu":
            with open("/proc/self/statm") as size:
                now = int(size.read().split()[0]) * resource.getpagesize()
            limit = now + available * 2 // 3
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _end_with_parent() -> None:
    """End this process when its parent ends (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def import_for_gradients() -> None:
    """Import what torch imports at a first gradient, such as sympy. Otherwise each fork spends 0.4 s on it."""
    importlib.import_module("torch.fx.experimental.symbolic_shapes")


def spawner(control: socket.socket, function: Callable[..., Any] | None = None) -> None:
    """Fork a session for each request on `control`; send its pid, and later its exit status."""
    _end_with_parent()
    while True:
        text, files, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not text:
            return
        request = json.loads(text)
        pid = os.fork()
        if pid == 0:
            try:
                control.close()
                os.setsid()
                _end_with_parent()
                _redirect(files[1])
                sys.path[:] = request["path"]
                importlib.invalidate_caches()
                os.chdir(request["cwd"])
                start = (lambda: function) if function is not None else functools.partial(load, request["target"])
                serve(Connection(files[0]), start, request["device"], request["threads"])
            finally:
                os._exit(0)
        for file in files:
            os.close(file)
        control.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        _, status = os.waitpid(pid, 0)
        control.sendall(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode() + b"\n")


def _redirect(output: int) -> None:
    """Redirect stdout and stderr, to which the function prints, to the file `output`."""
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stdin = open(os.devnull)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> None:
    """Fork sessions; the argument is the number of the socket's file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_for_gradients()
    spawner(socket.socket(fileno=int(sys.argv[1])))
