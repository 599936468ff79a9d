"""Record what each process of the server passes through, for request_path.py, which puts this folder into its path.

After a SIGUSR2, and while the folder TRACE_FOLDER has a file `on`, each process appends to a file of its own: a line
for each call of a function of the project (the file of its code), and for each object of a class of the server that a
function gets, makes or returns (its class, and a number). The text of `on` names the window, and comes first in each
line. The records (named tuples and structs) in the attributes of such an object have lines too, which end with the
object's class. Work of the server without a request, such as its report every second, is left out.
"""

import enum
import os
import signal
import sys
import threading
from collections import deque
from itertools import islice
from pathlib import Path

FOLDER = os.environ.get("TRACE_FOLDER")
PACKAGES = ("/flashpoint_server/", "/flashpoint_kernels/", "/flashpoint_contract/", "/client/flashpoint/")
GENERATED = "<string>"  # the file of generated code, such as a dataclass's __init__ and a named tuple's __new__
LOOKED_AT = 8  # maximum items of a container that are looked at
BESIDE = {"keep_reporting", "keep_timing", "on_tick"}  # functions that run without a request

_names: dict[str, str] = {}
_numbers: dict[int, tuple[int, object]] = {}  # by id; the objects are kept, so that no id is used again
_written: set[tuple[str, int, str]] = set()
_busy = threading.local()


def short(path: str) -> str:
    """Return the path of a file of the project from its package on; "" for other files."""
    if (name := _names.get(path)) is None:
        starts = [path.find(package) for package in PACKAGES if package in path and "site-packages" not in path]
        name = _names[path] = path[min(starts) + 1 :].removeprefix("client/") if starts else ""
    return name


def objects(value: object, deep: bool = True) -> list[object]:
    """Return the objects of the server's classes in `value`: itself, its fields if it is a record, or its items."""
    kind = type(value)
    found: list[object] = []
    if kind.__module__.startswith("flashpoint_server.") and not issubclass(kind, type | enum.Enum):
        found.append(value)
        if fields := getattr(kind, "__struct_fields__", ()):
            for name in fields:
                found += objects(getattr(value, name))
    if isinstance(value, tuple) or (deep and isinstance(value, list | deque)):
        for item in islice(value, LOOKED_AT):
            found += objects(item, deep=False)
    elif deep and isinstance(value, dict):
        for item in islice(list(value.values()), LOOKED_AT):
            found += objects(item, deep=False)
    return found


def is_beside(frame: object) -> bool:
    """Return whether a function runs without a request, or for the log."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in BESIDE or code.co_filename.endswith("/observability/lines.py"):
            return True
        frame = frame.f_back
    return False


def lines(window: str, frame: object, event: str, argument: object) -> list[str]:
    """Return the lines for a call of a function, or for its return."""
    path, here = frame.f_code.co_filename, frame.f_locals
    if path == GENERATED:
        values, made = [here.get("self")], here.get("_cls")
        if isinstance(made, type) and made.__module__.startswith("flashpoint_server.") and event == "call":
            return [f"{window}\t@\t{made.__module__}\t{made.__qualname__}\t-1\t\n"]  # its instance does not exist yet
    elif name := short(path):
        values = [*here.values(), argument]
    else:
        return []
    made_lines = [f"{window}\t{name}\n"] if path != GENERATED and event == "call" else []
    for one in [found for value in values for found in objects(value)]:
        made_lines += line(window, one)
        for held in getattr(one, "__dict__", {}).values():
            if isinstance(held, tuple) or hasattr(type(held), "__struct_fields__"):
                for record in objects(held):
                    made_lines += line(window, record, type(one).__qualname__)
    return made_lines


def line(window: str, one: object, holder: str = "") -> list[str]:
    """Return the line of an object, unless the window has it. `holder` is the class of the object that has it."""
    number, _ = _numbers.setdefault(id(one), (len(_numbers), one))
    if (window, number, holder) in _written:
        return []
    _written.add((window, number, holder))
    return [f"{window}\t@\t{type(one).__module__}\t{type(one).__qualname__}\t{number}\t{holder}\n"]


def profile(frame: object, event: str, argument: object) -> None:
    """Write the lines of a call or return, if tracing is on."""
    path = frame.f_code.co_filename
    if event not in ("call", "return") or not (path == GENERATED or short(path)) or getattr(_busy, "now", False):
        return
    _busy.now = True
    try:
        with open(os.path.join(FOLDER, "on")) as on:
            window = on.read()
        if not is_beside(frame) and (made := lines(window, frame, event, argument)):
            with open(os.path.join(FOLDER, f"{os.getpid()}.txt"), "a") as file:
                file.writelines(made)
    except FileNotFoundError:
        pass
    finally:
        _busy.now = False


def begin(*_: object) -> None:
    """Trace the main thread from now on, so that tracing does not slow the start."""
    sys.setprofile(profile)
    Path(FOLDER, f"{os.getpid()}.begun").touch()


if FOLDER:
    signal.signal(signal.SIGUSR2, begin)
    threading.setprofile(profile)
