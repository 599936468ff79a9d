"""Plans: what the head of a message means, decided once for all messages that mean the same.

`MessageHead.check` checks the options of a message in any format. `Plans.of` checks names, dtypes and shapes, chooses
the backend, predicts the cost and lays out the memory. A plan has nothing that varies from call to call (the values of
tensors, the dropout seed, ids, positions, the deadline) and nothing that belongs to a caller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

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
from flashpoint_contract.wording.sizes import in_bytes
from flashpoint_kernels.dispatching.support import choose_backend
from flashpoint_kernels.problems.workspace import workspace_of
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.bodies import PlannedCall, encode
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.price import CachedRates, Price, price_of
from flashpoint_server.ipc.staging import Layout
from flashpoint_server.refusal import Refusal, invalid, of_problem

# A plain call needs nothing but its tensors. The other kinds read KV caches, save the forward, or use a saved forward.
Kind = Literal["plain", "caches", "save", "saved"]
Named = tuple[tuple[str, TensorInfo], ...]  # tensors by name
Beside = LayerShape | Named | None  # the shape of the caches' layer, or the tensors of the saved forward

KEPT = 1024  # maximum number of plans, of a few KiB each
_NEVER_PLAIN = frozenset((*CACHE_OPTIONS, *saved.SAVED_OPTIONS))  # options of calls with caches or saved forwards


@dataclass(frozen=True, eq=False)
class Plan(Layout):
    """The meaning of a head on one device: a checked problem, its backend, its cost, and the memory of its tensors.

    `answers` are the outputs that the caller gets. `beside` is as in `Plans.of`. A call over caches has `rates`, which
    give its cost for the caches' lengths; `price` is then that of empty caches. `left` is as in `CacheRef`. `heads` are
    those of its answers in safetensors, by the kernel in C that computed them ("" for none), once they have been
    written.
    """

    spec: Spec
    backend: str
    device: DeviceInfo
    call: PlannedCall  # for the engine
    packed: bytes  # `call`, encoded
    price: Price
    answers: Mapping[str, TensorInfo]
    heads: dict[str, bytes]
    beside: Beside
    rates: CachedRates | None
    left: int

    def placed(self, layout: Layout) -> Plan:
        """Return the plan with its tensors at the places of another layout."""
        call = structs.replace(self.call, inputs=layout.inputs, outputs=layout.outputs)
        return replace(self, **vars(layout), call=call, packed=encode(call))


class MessageHead:
    """The content of a head: options, and the names, dtypes and shapes of tensors, which may not have arrived yet.

    Requests with equal heads may share a message, so nothing in it may vary from call to call, or belong to a caller.
    """

    surface = "safetensors"  # the format's name in the contract's `Tensor.refused`, which says why a tensor is refused
    inputs: Named  # the tensors by name, in the order of their bytes
    options: Mapping[str, Any]  # not checked
    # A call of attention or its gradients has a direction, and once it is checked, what follows.
    direction: Direction = "forward"
    kind: Kind = "plain"
    checked: Options  # unless its kind is "saved"; with the dropout seed 0 in the place of any other
    seed: int | None = None  # the dropout seed
    caches: CacheOptions | None = None
    plan: Plan | None = None  # the last one that `Plans.of` has returned for it

    def check(self, direction: Direction) -> None:
        """Check the options of a call of attention or its gradients. Raises Refusal 422.

        A call of the kind "saved" takes its options from the saved forward: saved_forward.py checks it.
        """
        self.direction, self.kind = direction, kind_of(self.options, direction)
        if self.kind != "saved":
            names = [name for name, _ in self.inputs]
            options, self.caches = checked_options(names, self.options, direction, self.kind, self.surface)
            self.checked, self.seed = apart(options)


class Plans:
    """The plans of an HTTP process: those used last, for the device of the engines that are ready."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._device: DeviceInfo | None = None
        self._made: OrderedDict[Hashable, Plan] = OrderedDict()

    def of(
        self, message: MessageHead, device: DeviceInfo, beside: Beside = None, options: Options | None = None
    ) -> Plan:
        """Return the plan of a checked message. Raises Refusal 413 and 422.

        `options`, without a seed, replace those of the message.
        """
        known = message.plan
        if options is None and known is not None and known.device is device and known.beside == beside:
            return known
        if device is not self._device:  # an engine has started, perhaps with other backends
            self._made.clear()
            self._device = device
        chosen = message.checked if options is None else options
        count = 0 if message.caches is None else len(message.caches.caches)
        key = frozenset(message.inputs), message.kind, message.direction, chosen, beside, count
        if (made := self._made.get(key)) is None:
            with refuse_invalid():
                made = self._made[key] = _planned(message, chosen, device, beside, count, self._settings)
            if len(self._made) > KEPT:
                self._made.popitem(last=False)
        else:
            self._made.move_to_end(key)
        if options is None:
            message.plan = made
        return made


def _planned(
    message: MessageHead, chosen: Options, device: DeviceInfo, beside: Any, count: int, settings: Settings
) -> Plan:
    """Return the plan of a message with the options `chosen`, over `count` caches. Raises ProblemError, Refusal 413."""
    infos, options, left = dict(message.inputs), chosen, -1
    match message.kind:
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
        case _:
            spec = plan(infos, options, message.direction)
    backend = choose_backend(spec, device.choices)
    stores_ds = settings.store_ds and backend == "triton"
    workspace = workspace_of(spec, settings.workspace_bytes) if stores_ds else 0
    check_size(spec, device.memory, settings.sequence_limit, workspace)
    rates = CachedRates.of(spec, backend, device, beside) if message.kind == "caches" else None
    price = rates.price((), 0) if rates is not None else price_of(spec, backend, device)
    answers = {name: info for name, info in spec.outputs.items() if name != "lse" or chosen.return_lse}
    layout = Layout.of(infos.items(), spec.outputs)
    call = PlannedCall(
        spec.direction, spec.options, backend, layout.inputs, layout.outputs,
        layer=beside if message.kind == "caches" else None, caches=count,
        recalled=beside if message.kind == "saved" else (),
    )  # fmt: skip
    return Plan(
        **vars(layout), spec=spec, backend=backend, device=device, call=call, packed=encode(call), price=price,
        answers=answers, heads={}, beside=beside, rates=rates, left=left,
    )  # fmt: skip


def check_size(spec: Spec, memory: int, sequence_limit: int, workspace: int = 0) -> None:
    """Raise Refusal 413 if a request could never run on a device with `memory` bytes, as far as its head shows.

    `workspace` is the memory that its backend needs beside the tensors.
    """
    if spec.batch > sequence_limit:
        raise Refusal("work_too_large", f"{spec.batch} sequences exceed the limit of {sequence_limit}")
    if (needed := spec.footprint + workspace) > memory:
        raise Refusal(
            "work_too_large", f"the request needs at least {in_bytes(needed)}, and the device has {in_bytes(memory)}"
        )


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


def apart(options: Options) -> tuple[Options, int | None]:
    """Return options without their dropout seed, and the seed. Calls that differ in the seed alone share a plan.

    The seed 0 is in the place of any other.
    """
    seed = options.dropout_seed
    return (options if seed is None else replace(options, dropout_seed=0)), seed


def checked_options(
    tensors: Iterable[str], options: Mapping[str, Any], direction: Direction, kind: Kind, surface: str
) -> tuple[Options, CacheOptions | None]:
    """Return the checked options of a call with these tensors in the format `surface`. Raises Refusal 422."""
    with refuse_invalid():
        match kind:
            case "caches":
                of_caches = CacheOptions.read(options)
                if refused := saved.refused(options):
                    raise invalid(refused)
                plain = {name: value for name, value in options.items() if name not in CACHE_OPTIONS}
                return _options(saved.plain(plain)), of_caches
            case "save":
                if options.get("caches") is not None:
                    raise invalid([("save", "cannot be combined with caches, which have no gradients")])
                if options.get("saved") is not None:
                    raise invalid([("saved", "is only for POST /attention/grad")])
                return _options(saved.plain(options)), None
        if not _NEVER_PLAIN.isdisjoint(options):
            if refused := [*caches.refused(options), *saved.refused(options)]:
                raise invalid(refused)
            options = saved.plain(options)
        read = _options(options)
        if refused := refusals(surface, [*tensors, *read.given]):
            raise invalid(refused)
        return read, None


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
