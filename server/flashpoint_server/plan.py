"""Plans: what the head of a message means, decided once for all messages that mean the same.

`read_call` checks the options of a message in any format. `Plans.of` checks names, dtypes and shapes, chooses the
backend, predicts the cost and lays out the memory. A plan has nothing that varies from call to call (the values of
tensors, the dropout seed, ids, positions, the deadline) and nothing that belongs to a caller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from msgspec import structs
from pydantic import ValidationError

from flashpoint_contract import caches, saved, wire
from flashpoint_contract.caches import CACHE_OPTIONS, CacheOptions, LayerShape, plan_cached
from flashpoint_contract.options import Direction, Options, ProblemError
from flashpoint_contract.schemas.jsonwire import FieldError
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.schemas.validation import OF_ATTENTION, field_problems
from flashpoint_contract.spec import Spec, plan
from flashpoint_contract.tensors import TensorInfo, refusals
from flashpoint_kernels.dispatching.support import choose_backend
from flashpoint_kernels.problems.workspace import workspace_of
from flashpoint_server.access.admission import check_size
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.bodies import PlannedCall, encode, read_planned
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.price import CachedRates, Price, price_of
from flashpoint_server.ipc.staging import Layout
from flashpoint_server.refusal import Refusal, invalid, of_problem

# A plain call needs nothing but its tensors. The other kinds read KV caches, save the forward, or use a saved forward.
Kind = Literal["plain", "caches", "save", "saved"]
Named = tuple[tuple[str, TensorInfo], ...]  # tensors by name

KEPT = 1024  # maximum number of plans, of a few KiB each
_NEVER_PLAIN = frozenset((*CACHE_OPTIONS, *saved.SAVED_OPTIONS))  # options of calls with caches or saved forwards


class CheckedCall(NamedTuple):
    """The checked options of a call.

    `options` has the dropout seed 0 in the place of any other, so that calls that differ in `seed` alone share a plan.
    """

    kind: Kind
    direction: Direction
    options: Options
    seed: int | None = None
    caches: CacheOptions | None = None

    def seeded(self, seed: int) -> CheckedCall:
        """Return the call with this dropout seed."""
        return self._replace(options=replace(self.options, dropout_seed=0), seed=seed)

    @classmethod
    def of(
        cls, kind: Kind, direction: Direction, options: Options, of_caches: CacheOptions | None = None
    ) -> CheckedCall:
        """Return the call with these options, which may have a seed."""
        call = cls(kind, direction, options, None, of_caches)
        return call if options.dropout_seed is None else call.seeded(options.dropout_seed)


class Plan(NamedTuple):
    """The meaning of a head on one device: a checked problem, its backend, its cost, and the memory of its tensors.

    `answers` are the outputs that the caller gets. A call over caches has `rates`, which give its cost for the caches'
    lengths; `price` is then that of empty caches. `left` is as in `CacheRef`. `heads` are those of its answers in
    safetensors, by the kernel in C that computed them ("" for none), once they have been written.
    """

    spec: Spec
    backend: str
    packed: bytes  # a `PlannedCall`, encoded for the engine
    layout: Layout
    price: Price
    answers: Mapping[str, TensorInfo]
    heads: dict[str, bytes]
    rates: CachedRates | None = None
    left: int = -1

    def placed(self, layout: Layout) -> Plan:
        """Return the plan with its tensors at the places of another layout."""
        call = structs.replace(read_planned(self.packed), inputs=layout.inputs, outputs=layout.outputs)
        return self._replace(layout=layout, packed=encode(call))


class Plans:
    """The plans of an HTTP process: those used last, for the device of the engines that are ready."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._device: DeviceInfo | None = None
        self._made: OrderedDict[Hashable, Plan] = OrderedDict()

    def of(
        self, tensors: Named, call: CheckedCall, device: DeviceInfo, beside: LayerShape | Named | None = None
    ) -> Plan:
        """Return the plan of a call. Raises Refusal 413 and 422.

        `beside` is the shape of the caches' layer, or has the tensors of the saved forward.
        """
        if device is not self._device:  # an engine has started, perhaps with other backends
            self._made.clear()
            self._device = device
        count = 0 if call.caches is None else len(call.caches.caches)
        key = frozenset(tensors), call.kind, call.direction, call.options, beside, count
        if (made := self._made.get(key)) is not None:
            self._made.move_to_end(key)
            return made
        with refuse_invalid():
            made = self._made[key] = _planned(dict(tensors), call, device, beside, count, self._settings)
        if len(self._made) > KEPT:
            self._made.popitem(last=False)
        return made


def _planned(
    infos: dict[str, TensorInfo], call: CheckedCall, device: DeviceInfo, beside: Any, count: int, settings: Settings
) -> Plan:
    """Return the plan of a call. `count` is its number of caches. Raises ProblemError, and Refusal 413."""
    options, left = call.options, -1
    match call.kind:
        case "plain":
            spec = plan(infos, options, call.direction)
        case "save":
            spec = saved.plan_saved(infos, options)
        case "saved":
            spec = plan({**dict(beside), **infos}, options, "backward")
        case "caches":
            spec = plan_cached(infos, options, beside, count)
            options, left = _for_single_queries(spec)
            if options.return_key_weights:  # the engine computes them from lse
                options = replace(options, return_lse=True)
            spec = plan_cached(infos, options, beside, count)
    backend = choose_backend(spec, device.choices)
    stores_ds = settings.store_ds and backend == "triton"
    workspace = workspace_of(spec, settings.workspace_bytes) if stores_ds else 0
    check_size(spec, device.memory, settings.sequence_limit, workspace)
    rates = CachedRates.of(spec, backend, device, beside) if call.kind == "caches" else None
    price = rates.price((), 0) if rates is not None else price_of(spec, backend, device)
    answers = {name: info for name, info in spec.outputs.items() if name != "lse" or call.options.return_lse}
    layout = Layout.of(infos.items(), spec.outputs)
    packed = encode(
        PlannedCall(
            spec.direction, spec.options, backend, layout.inputs, layout.outputs,
            layer=beside if call.kind == "caches" else None, caches=count,
            recalled=beside if call.kind == "saved" else (),
        )
    )  # fmt: skip
    return Plan(spec, backend, packed, layout, price, answers, {}, rates, left)


def _for_single_queries(spec: Spec) -> tuple[Options, int]:
    """Return the options for the backend, and the number of earlier keys that each query attends to; −1 for all.

    If each sequence has one query, a window is a range of keys. The engine then passes only these keys to the backend,
    so the returned options have no window and are not causal. For other calls, return their own options, and −1.
    """
    options = spec.options
    one = not spec.ragged and spec.q_len == 1 and options.causal_alignment == "bottom_right"
    if not one or options.dropout_p or spec.has("attn_mask") or spec.has("block_mask"):
        return options, -1
    return replace(options, window=(-1, -1), causal=False), options.window[0]


def kind_of(options: Mapping[str, Any], direction: Direction) -> Kind:
    """Return the kind of a call from its options, which are not yet checked."""
    if direction == "forward":
        return "save" if options.get("save") is True else "caches" if "caches" in options else "plain"
    return "plain" if options.get("saved") is None else "saved"


def read_call(
    tensors: Iterable[str], options: Mapping[str, Any], direction: Direction, kind: Kind, surface: str
) -> CheckedCall:
    """Return the checked call of a message with these tensors in the format `surface`. Raises Refusal 422.

    A call of the kind "saved" takes its options from the saved forward: saved_forward.py reads it.
    """
    with refuse_invalid():
        match kind:
            case "caches":
                of_caches = CacheOptions.read(options)
                if refused := saved.refused(options):
                    raise invalid(refused)
                plain = {name: value for name, value in options.items() if name not in CACHE_OPTIONS}
                return CheckedCall.of(kind, direction, _options(saved.plain(plain)), of_caches)
            case "save":
                if options.get("caches") is not None:
                    raise invalid([("save", "cannot be combined with caches, which have no gradients")])
                if options.get("saved") is not None:
                    raise invalid([("saved", "is only for POST /attention/grad")])
                return CheckedCall.of(kind, direction, _options(saved.plain(options)))
        if not _NEVER_PLAIN.isdisjoint(options):
            if refused := [*caches.refused(options), *saved.refused(options)]:
                raise invalid(refused)
            options = saved.plain(options)
        read = _options(options)
        if refused := refusals(surface, [*tensors, *read.given]):
            raise invalid(refused)
        return CheckedCall.of("plain", direction, read)


def _options(options: Mapping[str, Any]) -> Options:
    """Return the checked options of a call. Raises ValidationError and ProblemError."""
    return Options(**AttentionOptions.model_validate(dict(options)).model_dump())


@contextmanager
def refuse_invalid(known: Iterable[str] = OF_ATTENTION) -> Iterator[None]:
    """Turn the contract's and pydantic's errors about a caller's input into Refusal 400 and 422.

    `known` are the names that the input may have.
    """
    try:
        yield
    except ValidationError as error:
        raise invalid(field_problems(error, known)) from None
    except ProblemError as error:
        raise of_problem(error) from None
    except FieldError as error:
        raise invalid([(error.field, error.message)]) from None
    except wire.WireError as error:
        raise Refusal("malformed_body", str(error)) from None
