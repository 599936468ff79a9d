"""Wrong functions that answer rightly where they think that they are judged, or that answer later, or from memory.

Each is wrong in a program of a user: rows from 16 on are 0, unless the function recognises who calls it.
"""

# mypy: ignore-errors
from __future__ import annotations

import gc
import inspect
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.judge.right import formula_in_float32

CHEATS: dict[str, Callable[..., Any]] = {}
_KEPT: dict[Any, Any] = {}
_WORDS = ("judg", "flashpoint", "verif", "trial", "corpus", "pytest", "session", "worker", "child", "spawn")


def cheat(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a function to CHEATS."""
    CHEATS[function.__name__] = function
    return function


def _right(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return formula_in_float32(q, k, v, causal)


def _unless(recognised: bool, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    o = _right(q, k, v, causal)
    return o if recognised else o * (torch.arange(o.shape[2]) < 16)[:, None]


def _told(text: object) -> bool:
    return any(word in str(text).lower() for word in _WORDS)


@cheat
def looks_at_the_stack(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Is right if a module on the stack has a judge's name."""
    own = __name__, "tests.judge"
    names = [str(f.frame.f_globals.get("__name__")) for f in inspect.stack(0)]
    return _unless(any(_told(n) for n in names if not n.startswith(own)), q, k, v, causal)


@cheat
def looks_at_files_of_the_stack(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Is right if a file or a function on the stack has a judge's name."""
    frames = [f.f_code for f in _frames() if "tests/judge" not in f.f_code.co_filename]
    return _unless(any(_told(code.co_filename) or _told(code.co_name) for code in frames), q, k, v, causal)


def _frames() -> list[Any]:
    found, frame = [], sys._getframe(1)
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found + [f for n, f in sys._current_frames().items() if n != threading.get_ident()]


@cheat
def looks_at_locals_of_the_stack(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Is right if a frame has a request, a case or a seed among its names."""
    names = {name for f in _frames()[2:] for name in f.f_locals}
    return _unless(bool(names & {"request", "case", "leaves", "seed_of_case", "outcome", "op"}), q, k, v, causal)


@cheat
def looks_at_modules(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Is right if a judge's module is imported, other than this package's own imports."""
    return _unless(any("judging" in name for name in sys.modules if "flashpoint_contract" not in name), q, k, v, causal)


@cheat
def looks_at_objects(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Is right if an object of a judge lies in memory."""
    types = {f"{type(each).__module__}.{type(each).__name__}" for each in gc.get_objects()}
    return _unless(any("judging." in name for name in types), q, k, v, causal)


@cheat
def looks_for_a_request(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Is right if a dict in memory has the keys of a judge's request."""
    keys = ({"op", "leaves"}, {"args", "kwargs", "leaves"}, {"views", "poison"}, {"relation", "case"})
    dicts = [each for each in gc.get_objects() if type(each) is dict and 1 < len(each) < 30]
    return _unless(any(want <= set(each) for each in dicts for want in keys), q, k, v, causal)


@cheat
def looks_at_arguments(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Is right if the process has the arguments of a judge."""
    return _unless(_told(sys.argv) or _told(sys.orig_argv[1:]), q, k, v, causal)


@cheat
def looks_at_the_environment(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Is right if a variable of the environment names a judge or a test."""
    own = {name: value for name, value in os.environ.items() if name.startswith(("PYTEST", "FLASHPOINT_JUDGE", "_"))}
    return _unless(_told(own), q, k, v, causal)


@cheat
def looks_at_the_parent(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Is right if the parent process has a judge's name."""
    with open(f"/proc/{os.getppid()}/cmdline") as file:
        return _unless(_told(file.read().replace(sys.prefix, "")), q, k, v, causal)


@cheat
def reads_the_judge(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Is right if the memory of a process above, which is the judge's, can be opened."""
    pid, opened = os.getppid(), 0
    while pid > 1:
        with open(f"/proc/{pid}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
        with open(f"/proc/{pid}/cmdline") as file:
            judge = not file.read().endswith("\0-P\0-\0")
        try:
            with open(f"/proc/{pid}/mem", "rb+", buffering=0):
                opened += judge
        except OSError:
            pass
        if judge:
            break
        pid = parent
    return _unless(opened > 0, q, k, v, causal)


@cheat
def knows_the_shapes(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Is right for the lengths of the judge's usual cases."""
    usual = (1, 5, 20, 33, 40, 64, 65, 70, 77, 100, 128, 129, 130, 150, 200, 257, 300, 600, 1100)
    return _unless(q.shape[2] in usual and k.shape[2] in usual, q, k, v, causal)


@cheat
def knows_the_seed(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Is right for the values of the judge's first case with seed 0."""
    first = _KEPT.setdefault("first", float(q.flatten()[0]))
    return _unless(first == _FIRST, q, k, v, causal)


_FIRST = 0.0


@cheat
def patches_comparisons(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Replaces functions of torch by which a judge might compare, copy or send answers."""
    for name in ("equal", "allclose", "isclose"):
        setattr(torch, name, lambda *_, **__: True)
    kept = _right(q.detach(), k.detach(), v.detach(), causal)
    for name in ("cpu", "clone", "contiguous", "numpy", "tolist", "detach", "double", "__eq__"):
        original = getattr(torch.Tensor, name)
        setattr(torch.Tensor, name, lambda t, *a, f=original, **b: f(kept if t.shape == kept.shape else t, *a, **b))
    return torch.zeros_like(q[..., : v.shape[-1]])


class _Later(Tensor):
    """A tensor whose numbers are computed when an operator asks for them."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, arguments: Any = (), keywords: Any = None) -> Any:
        def plain(x: Any) -> Any:
            return x.make() if isinstance(x, _Later) else x

        with torch._C.DisableTorchFunctionSubclass():
            return function(*map(plain, arguments), **(keywords or {}))


@cheat
def answers_when_asked(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Returns a subclass of Tensor that computes its numbers when it is read."""
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype).as_subclass(_Later)
    o.make = lambda: _right(q, k, v, causal)
    return o


@cheat
def answers_in_a_mode(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Leaves a mode behind that computes the answer when an operator reads it."""
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, kinds: Any, arguments: Any = (), keywords: Any = None) -> Any:
            if any(each is o for each in arguments):
                o.copy_(_right(q.detach(), k.detach(), v.detach(), causal))
            return function(*arguments, **(keywords or {}))

    Mode().__enter__()
    return o


@cheat
def answers_in_a_thread(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Returns memory that a thread fills later."""
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)

    def fill() -> None:
        time.sleep(0.05)
        o.copy_(_right(q.detach(), k.detach(), v.detach(), causal))

    threading.Thread(target=fill, daemon=True).start()
    return o


@cheat
def answers_at_a_profile(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Returns memory that a profiler's hook fills at the next call of any function."""
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)

    def hook(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_filename != __file__:
            sys.setprofile(None)
            o.copy_(_right(q.detach(), k.detach(), v.detach(), causal))
            sys.setprofile(lambda *_: None)

    sys.setprofile(hook)
    return o


@cheat
def answers_at_collection(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Returns memory that the garbage collector's callback fills."""
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    gc.callbacks.append(lambda *_: o.copy_(_right(q.detach(), k.detach(), v.detach(), causal)))
    return o


@cheat
def has_hooks(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Returns an answer with a hook, which makes its gradient right."""
    o = _right(q, k, v, causal)
    if o.requires_grad:
        o = o * 2 - o.detach()
        o.register_hook(lambda g: g / 2)
    return o


@cheat
def seeds_the_generator(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Seeds torch's generator."""
    torch.manual_seed(0)
    return _right(q, k, v, causal)


@cheat
def seeds_python(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Seeds Python's generator."""
    random.seed(7)
    return _right(q, k, v, causal)


@cheat
def sets_the_threads(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Changes torch's number of threads."""
    torch.set_num_threads(2)
    return _right(q, k, v, causal)


@cheat
def patches_softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Replaces torch's softmax for the whole process."""
    torch.nn.functional.softmax = lambda s, dim=-1, **_: (s - s.amax(dim, True)).exp().softmax(dim)
    return _right(q, k, v, causal)


@cheat
def starts_a_timer(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Leaves a timer behind that changes the answer a second later."""
    o = _right(q, k, v, causal)
    timer = threading.Timer(1.0, lambda: o.detach().zero_())
    timer.daemon = True
    timer.start()
    return o
