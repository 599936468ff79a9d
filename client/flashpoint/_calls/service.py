"""Build the requests of the service's calls, and parse the answers. This module does no I/O."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from flashpoint._calls.arrays import Array, pack, unpack
from flashpoint.errors import CacheError, FlashpointError, InvalidInputError, ProtocolError, all_invalid, invalid
from flashpoint.meta import Meta
from flashpoint_contract import wire
from flashpoint_contract.caches import CACHE_OPTIONS, CacheOptions
from flashpoint_contract.options import NAME, OPTIONS, Direction, Pair, ProblemError
from flashpoint_contract.saved import TAKEN_BESIDE, refused_beside
from flashpoint_contract.schemas import jsonwire
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.schemas.validation import OF_ATTENTION, field_problems
from flashpoint_contract.tensors import ANSWERS, FLOATS, INPUT_TENSORS, REQUIRED, TAKEN, refusals

Model = TypeVar("Model", bound=BaseModel)
P = ParamSpec("P")
R = TypeVar("R")

_PAIRS = {name for name, option in OPTIONS.items() if isinstance(option.kind, Pair)}
_OF_CALLS = ("timeout", "priority", "request_id", "with_meta")  # keywords that do not describe the problem
DEFAULT: Any = object()  # stands for the client's own timeout, because None means no timeout


def asynchronous(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Return an async version of `method`, which must return the result of a client's `_call`.

    `AsyncClient._call` returns a coroutine, which the async version awaits.
    """

    @wraps(method)
    async def run(self: Any, /, *arguments: P.args, **keywords: P.kwargs) -> R:
        result: R = await cast(Any, method(self, *arguments, **keywords))
        return result

    return run


class CallSender(Protocol):
    """The method of a blocking client that its results, such as `Cache` and `BenchmarkRun`, use to send calls."""

    def _call(self, call: Call[R], /) -> R: ...


class AsyncCallSender(Protocol):
    """The method of an asyncio client that its results, such as `AsyncCache`, use to send calls."""

    async def _call(self, call: Call[R], /) -> R: ...


class Affinity:
    """The replica that holds caches: the value of the header X-Flashpoint-Replica; "" while it is unknown."""

    def __init__(self, replica: str = "") -> None:
        self.replica = replica


class HeldCache:
    """A KV cache on a server: the attributes that calls need."""

    id: str
    lengths: list[int]  # of the layers, from the latest answers
    affinity: Affinity  # shared with caches that were made together, and with forks


@dataclass(frozen=True)
class SavedAttention:
    """The answer of `attention` with `save=True`, which `attention_grad` takes as `saved`.

    Args:
        o: Output, (B, Hq, Sq, Dv).
        lse: Log-sum-exp, float32 (B, Hq, Sq), with `return_lse`; else None.
        saved: The forward's id at the server. None where the server had no memory to save it: then send all tensors to
            `attention_grad`.
        replica: Value of X-Flashpoint-Replica that leads a balancer to that server.
    """

    o: Any
    lse: Any
    saved: str | None
    replica: str = ""


@dataclass(frozen=True)
class Answer:
    """A received message: its head, the buffer with all its tensors, and the metadata from the HTTP headers."""

    head: wire.Head
    buffer: NDArray[np.uint8]
    meta: Meta


class Reader(Protocol):
    """Parses an answer while its bytes arrive."""

    def space(self) -> memoryview: ...  # memory for the next bytes

    def filled(self, count: int) -> None: ...  # parses the first `count` bytes of `space`

    def finish(self) -> Any: ...  # returns the parsed answer


@dataclass(frozen=True)
class Call(Generic[R]):
    """A call of an HTTP endpoint: its request, how to read its answer, and when to repeat it."""

    method: str
    path: str
    expected: str  # media type of the answer
    headers: Mapping[str, str]
    body: tuple[memoryview, ...]  # parts, in order
    timeout: Any
    read: Callable[[Any], R]  # returns the result of an `Answer`, or of a JSON object if `expected` is JSON
    success: int = 200  # HTTP status
    repeatable: bool = True  # whether to send the call again after the connection broke
    affinity: Affinity | None = None  # of the caches that the call uses
    instead: Callable[[FlashpointError], Call[R] | None] = lambda _: None  # the call to send at once after this error
    ignored: Callable[[FlashpointError], bool] = lambda _: False  # whether the result is None after this error
    reader: Callable[[], Reader] | None = None  # for an answer that is neither JSON nor safetensors

    @property
    def size(self) -> int:
        return sum(part.nbytes for part in self.body)


def _only(direction: Direction) -> set[str]:
    """Return the options and tensors that only the forward, or only the gradient call, accepts."""
    options = {name for name, option in OPTIONS.items() if option.direction == direction}
    other: Direction = "backward" if direction == "forward" else "forward"
    return options | (set(TAKEN[direction]) - set(TAKEN[other]))


_NO_MEMORY = ("cache_memory", "key_limit", "work_too_large")  # error codes if a forward cannot be saved
_FORWARD_ONLY, _BACKWARD_ONLY = _only("forward"), _only("backward")


def forward(q: Array, k: Array | None, v: Array | None, keywords: Mapping[str, Any]) -> Call[Any]:
    """Return the call that returns `o`, or (o, lse). Raises InvalidInputError."""
    _refuse(keywords, _BACKWARD_ONLY | {"saved"})
    rest = dict(keywords)
    if type(save := rest.pop("save", False)) is not bool:
        raise invalid("save", "must be True or False")
    if save and rest.get("return_key_weights"):
        raise invalid("return_key_weights", OPTIONS["return_key_weights"].refused["saved"])
    if rest.get("caches") is not None:
        if save:
            raise invalid("save", "cannot be combined with caches, which have no gradients")
        return _cached(q, k, v, rest)
    if taken := [name for name in CACHE_OPTIONS if rest.get(name) is not None]:
        raise invalid(taken[0], "is taken only with caches")
    tensors = {"q": q, "k": k, "v": v}
    whole = {**tensors, **{name: value for name, value in rest.items() if name not in CACHE_OPTIONS}}
    return _saving(whole) if save else _call("/attention", whole)


def _saving(keywords: Mapping[str, Any]) -> Call[Any]:
    """Return the call for a SavedAttention. If the server has no memory to save it, the forward runs without saving."""
    with_meta, affinity = bool(keywords.get("with_meta")), Affinity()
    options: dict[str, Any] = {"return_lse": False, **keywords, "with_meta": True}

    def made(call: Call[Any]) -> Call[Any]:
        def read(answer: Answer) -> Any:
            result, meta = call.read(answer)
            o, lse = result if isinstance(result, tuple) else (result, None)
            result = SavedAttention(o, lse, meta.saved, affinity.replica)
            return (result, meta) if with_meta else result

        return replace(call, read=read)

    def instead(error: FlashpointError) -> Call[Any] | None:
        return made(_call("/attention", dict(options))) if error.code in _NO_MEMORY else None

    call = made(_call("/attention", dict(options), {"save": True}))
    return replace(call, affinity=affinity, instead=instead)


def _cached(q: Array, k: Array | None, v: Array | None, keywords: dict[str, Any]) -> Call[Any]:
    """Return the call for attention over caches. A write has an idempotency key, so that it may be sent again."""
    given = keywords.pop("caches")
    if isinstance(given, str | HeldCache) or not isinstance(given, Iterable):
        raise invalid("caches", "must be a list, with one cache for each sequence of q")
    given = list(given)
    layer, at = keywords.pop("layer", 0), keywords.pop("at", None)
    ids = [cache.id if isinstance(cache, HeldCache) else cache for cache in given]
    try:
        over = CacheOptions.read({"caches": ids, "layer": plain(layer), "at": plain(at)})
    except ProblemError as error:
        raise all_invalid(error.errors) from None
    options = {"caches": list(over.caches), "layer": over.layer} | ({} if over.at is None else {"at": list(over.at)})
    affinity = next((cache.affinity for cache in given if isinstance(cache, HeldCache)), None) or Affinity()
    call = replace(_call("/attention", {"q": q, "k": k, "v": v, **keywords}, options, needed=("q",)), affinity=affinity)
    if k is None:
        return call

    def read(answer: Answer) -> Any:
        for cache, length in zip(given, answer.meta.lengths or (), strict=False):
            if isinstance(cache, HeldCache):
                cache.lengths[over.layer] = length
        return call.read(answer)

    return replace(call, headers={**call.headers, **idempotent()}, read=read)


def is_gone(error: FlashpointError) -> bool:
    """Return whether an error says that a cache or saved forward is gone, not that another replica holds it."""
    return isinstance(error, CacheError) and error.code != "cache_elsewhere"


def idempotent() -> dict[str, str]:
    """Return the header by which a server recognises a repeated write."""
    return {"Idempotency-Key": uuid.uuid4().hex}


def backward(do: Array, q: Array | None, k: Array | None, v: Array | None, keywords: Mapping[str, Any]) -> Call[Any]:
    """Return the call for the gradients that `grads` names, in that order. Raises InvalidInputError."""
    _refuse(keywords, _FORWARD_ONLY | {"save"})
    rest = dict(keywords)
    saved, affinity = named(rest.pop("saved", None))
    given = {"do": do, "q": q, "k": k, "v": v, **rest}
    if saved is None:
        return _call("/attention/grad", given)
    others = {name: value for name, value in given.items() if value is not None and name not in _OF_CALLS}
    if refused := refused_beside((), others):
        raise all_invalid(refused)
    # Send an option that the caller gave, even if its value is the default.
    options = {name: plain(given[name]) for name in TAKEN_BESIDE[1] if name in given}
    return replace(_call("/attention/grad", given, {**options, "saved": saved}, needed=("do",)), affinity=affinity)


def named(saved: SavedAttention | str | None) -> tuple[str | None, Affinity]:
    """Return the id of a saved forward, and the affinity to its replica. Raises InvalidInputError."""
    if isinstance(saved, SavedAttention):
        if saved.saved is None:
            raise invalid("saved", "the server had no memory to save this forward: send all tensors")
        return saved.saved, Affinity(saved.replica)
    if not isinstance(saved, str | None):
        raise invalid("saved", "must be the result of attention with save=True, or the id of a saved forward")
    return saved, Affinity()


def lookup(
    path: str, read: Callable[[Any], Any] = lambda document: document, method: str = "GET", **more: Any
) -> Call[Any]:
    """Return the call without a body for the JSON object at `path`. `more`: further fields of the call."""
    return Call(method, path, jsonwire.MEDIA_TYPE, {"Accept": jsonwire.MEDIA_TYPE}, (), DEFAULT, read, **more)


def _refuse(keywords: Mapping[str, Any], names: set[str]) -> None:
    for name in sorted(names & keywords.keys()):
        raise invalid(name, "is not taken by this call")


def _call(
    path: str, keywords: dict[str, Any], references: Mapping[str, Any] | None = None,
    needed: Iterable[str] = REQUIRED["forward"],
) -> Call[Any]:  # fmt: skip
    timeout = keywords.pop("timeout", DEFAULT)
    with_meta = keywords.pop("with_meta", False)
    headers = {"Content-Type": wire.MEDIA_TYPE, "Accept": wire.MEDIA_TYPE, **call_headers(keywords)}
    given = {name: keywords.pop(name, None) for name in INPUT_TENSORS}
    options = checked(AttentionOptions, keywords)
    like = given["do"] if given["q"] is None else given["q"]
    names: tuple[str, ...] = options.grads
    if path == "/attention":
        names = ("o", *(name for name in ANSWERS["forward"] if getattr(options, f"return_{name}", False)))

    def read(answer: Answer) -> Any:
        specs = {spec.name: spec for spec in answer.head.tensors}
        if missing := [name for name in names if name not in specs]:
            raise ProtocolError(f"the answer has no {missing[0]}", request_id=answer.meta.request_id)
        tensors = unpack(answer.buffer, {name: specs[name] for name in names}, like)
        result = tensors["o"] if names == ("o",) else tuple(tensors[name] for name in names)
        return (result, answer.meta) if with_meta else result

    return Call("POST", path, wire.MEDIA_TYPE, headers, message(given, options, references, needed), timeout, read)


def message(
    tensors: Mapping[str, Any], options: AttentionOptions, references: Mapping[str, Any] | None = None,
    needed: Iterable[str] = REQUIRED["forward"],
) -> tuple[memoryview, ...]:  # fmt: skip
    """Return the parts of a safetensors message with the tensors that are not None. Raises InvalidInputError.

    The tensors `needed` must not be None. `references`: further options, which name caches or a saved forward.
    """
    chosen = (name for name, option in OPTIONS.items() if getattr(options, name) != option.default)
    if refused := refusals("sdk", [*(name for name, t in tensors.items() if t is not None), *chosen]):
        raise all_invalid(refused)
    packed = {name: pack(name, t) for name, t in tensors.items() if t is not None or name in needed}
    if other := list(_beside_float64(tensors, {name: p.dtype for name, p in packed.items()})):
        raise all_invalid(other)
    head = wire.build_head(
        [(name, p.dtype, p.shape) for name, p in packed.items()],
        wire.encode_options({**options.model_dump(exclude_defaults=True), **(references or {})}),
    )
    return (memoryview(head), *(p.data for p in packed.values()))


def _beside_float64(tensors: Mapping[str, Any], dtypes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (name, error text) for k and for v, if exactly one of its dtype and q's is float64, numpy's default."""
    q = dtypes.get("q", "")
    for name in ("k", "v"):
        dtype = dtypes.get(name, q)
        if dtype != q and "float64" in (dtype, q) and {dtype, q} <= set(FLOATS):
            wide, narrow = ("q", dtype) if q == "float64" else (name, q)
            numpy = isinstance(tensors[wide], (np.ndarray, np.generic)) and narrow != "bfloat16"
            cast = f"{wide}.astype(np.{narrow})" if numpy else f"{wide} in {narrow}"
            yield name, f"dtype {dtype} must be q's, {q}: send {cast}"


def call_headers(keywords: dict[str, Any]) -> dict[str, str]:
    """Remove `priority` and `request_id` from `keywords`, and return their headers."""
    headers = {}
    if (priority := keywords.pop("priority", None)) is not None:
        if type(priority) is not int or not 0 <= priority <= 9:
            raise invalid("priority", "must be an integer from 0 to 9")
        headers["X-Priority"] = str(priority)
    if (name := keywords.pop("request_id", None)) is not None:
        if not isinstance(name, str) or not NAME.fullmatch(name):  # the server would replace it
            raise invalid("request_id", "must be up to 128 letters, digits and ._:/+=@~-")
        headers["X-Request-Id"] = name
    return headers


def checked(model: type[Model], keywords: Mapping[str, Any]) -> Model:
    """Return `model` made from `keywords`, which may hold NumPy numbers. Raises InvalidInputError with each field."""
    # For an option that is a pair of numbers, None means the default.
    given = {n: value for n, value in keywords.items() if value is not None or n not in _PAIRS}
    try:
        return model.model_validate(plain(given))
    except ValidationError as error:
        problems = field_problems(error, OF_ATTENTION if model is AttentionOptions else model.model_fields)
        text = "; ".join(f"{field}: {message}" if field else message for field, message in problems)
        raise InvalidInputError(text, errors=problems) from None


def plain(value: Any) -> Any:
    """Convert numbers and arrays of NumPy, torch and JAX to Python numbers and lists, also inside containers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value
