"""The table of options: each is a field of `Options`, with its values, its default and its meaning.

All lists of options are derived from `OPTIONS`: validation, the SDK's model, JSON and safetensors metadata, the Open
Inference Protocol, the command line, OpenAPI, torch's dispatcher and the documentation.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

from flashpoint_contract.surfaces import completed

Direction = Literal["forward", "backward"]
Layout = Literal["bhsd", "bshd", "thd"]
CausalAlignment = Literal["bottom_right", "top_left"]
Precision = Literal["ieee", "tf32"]
Backend = Literal["auto", "triton", "cpu", "torch", "tiled", "reference"]
Grad = Literal["dq", "dk", "dv", "dattn_mask", "dsinks"]

LAYOUTS: tuple[Layout, ...] = ("bhsd", "bshd", "thd")
BACKENDS = ("triton", "cpu", "torch", "tiled", "reference")
UNBOUNDED = 1 << 30  # means "no bound" in a window: larger than any length, and its sums fit into int32
FARTHEST_OFFSET = 1 << 29  # maximum of abs(`offset`): its sum with a bound of a window fits into int32
# Matches a request's id and a replica's name: both are safe in headers and in logs.
NAME = re.compile(r"[A-Za-z0-9._:/+=@~-]{1,128}")
LARGEST_FLOAT32, LEAST_NORMAL_FLOAT32 = 3.4028234663852886e38, 1.1754943508222875e-38


class FieldProblem(NamedTuple):
    """The error of one field: `field` is its name, such as `q` or `window`, `message` says what is wrong."""

    field: str
    message: str


class ProblemError(ValueError):
    """The tensors or options of an attention problem are not valid. `errors` has a `FieldProblem` for each error.

    `code` is the error code of a server's answer.
    """

    code = "invalid_request"

    def __init__(self, errors: Iterable[tuple[str, str]]) -> None:
        self.errors = tuple(FieldProblem(*each) for each in errors)
        super().__init__("; ".join(f"{field}: {message}" for field, message in self.errors))


class BackendRenamedError(ProblemError):
    """A call asks for `torch` on a CPU, where the kernels in C had this name in earlier versions."""

    code = "backend_renamed"

    def __init__(self, field: str = "backend") -> None:
        renamed = "on a CPU, the backend that earlier versions called torch is cpu: use cpu or auto; torch is for GPUs"
        super().__init__([(field, renamed)])


@dataclass(frozen=True)
class OneOf:
    """An option type: one of several words."""

    values: tuple[str, ...]

    def error(self, value: object) -> str | None:
        return None if value in self.values else f"must be one of {', '.join(self.values)}"


@dataclass(frozen=True)
class Flag:
    """An option type: true or false."""

    def error(self, value: object) -> str | None:
        return None if isinstance(value, bool) else "must be a bool"


@dataclass(frozen=True)
class Number:
    """An option type: a number in the range of float32; `optional` allows None."""

    least: float = -LARGEST_FLOAT32
    below: float | None = None  # exclusive upper bound
    normal: bool = False  # a nonzero number must be normal in float32
    optional: bool = False
    message: str = "must be a number within float32's range"

    def error(self, value: object) -> str | None:
        if value is None and self.optional:
            return None
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return self.message
        number = cast(float, value)  # NaN fails both comparisons; an int may have any size
        right = self.least <= number <= LARGEST_FLOAT32 and (self.below is None or number < self.below)
        return None if right and not (self.normal and 0 != number < LEAST_NORMAL_FLOAT32) else self.message


@dataclass(frozen=True)
class Integer:
    """An option type: an integer from `least` to `most`; `optional` allows None."""

    least: int
    most: int
    message: str
    optional: bool = False

    def error(self, value: object) -> str | None:
        right = value is None and self.optional
        right = right or (is_integer(value) and self.least <= cast(int, value) <= self.most)
        return None if right else self.message


@dataclass(frozen=True)
class Pair:
    """An option type: two integers from `least` to `most`, multiples of `step`. `sides` are the names of the two."""

    least: int
    most: int
    message: str
    step: int = 1
    sides: tuple[str, str] = ("left", "right")

    def error(self, value: object) -> str | None:
        right = isinstance(value, tuple) and len(value) == 2
        return None if right and all(map(self._has, cast(Any, value))) else self.message

    def _has(self, value: Any) -> bool:
        return is_integer(value) and self.least <= value <= self.most and value % self.step == 0


@dataclass(frozen=True)
class Names:
    """An option type: one or more of the words `values`, each at most once."""

    values: tuple[str, ...]

    def error(self, value: object) -> str | None:
        if not isinstance(value, tuple) or not value:
            return "must name at least one gradient"
        if unknown := [name for name in value if name not in self.values]:
            return f"{unknown[0]!r} is not one of {', '.join(self.values)}"
        return "names a gradient twice" if len(set(value)) < len(value) else None


Kind = OneOf | Flag | Number | Integer | Pair | Names


_PYTHONS = {bool, int, float, str, type(None)}


def number_of(value: Any) -> Any:
    """Return numbers of NumPy, torch or JAX as Python numbers or lists; return anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer, of Python or NumPy. True and False are not integers."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


class Feature(NamedTuple):
    """A feature that a problem may need from a backend."""

    name: str  # its name in `/info`
    said: str = ""  # its name in error texts
    level: int = 0  # the lowest kernel variant that supports it (see `Spec.level`)
    per_score: bool = False  # whether it takes time for each score, so that the predicted time depends on it


class Option(NamedTuple):
    """One row of the table `OPTIONS`."""

    kind: Kind
    text: str
    example: Any  # a value that is not the default
    feature: Feature | None = None  # needed by the value `when`, or if `when` is None, by each value but the default
    when: Any = None
    direction: Direction | None = None  # the only direction whose calls have this option; None means both
    refused: Mapping[str, str] = MappingProxyType({})  # reason, by surface that does not take it (`surfaces.TAKES`)
    name: str = ""
    default: Any = None

    def asks(self, value: Any) -> bool:
        """Return whether a problem with this value needs the feature."""
        return bool(value != self.default if self.when is None else value == self.when)


def _row(default: Any, kind: Kind, text: str, example: Any, **more: Any) -> Any:
    return field(default=default, metadata={"row": Option(kind, text, example, **more)})


_NO_PLACE = "has no place in the Open Inference Protocol's models: use POST /attention"
GRADS: tuple[Grad, ...] = ("dq", "dk", "dv", "dattn_mask", "dsinks")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of an attention call, checked. Raises ProblemError, which names each field that is not valid.

    Args:
        layout: `bhsd`: (B, H, S, D); `bshd`: (B, S, H, D); `thd`: (T, H, D), sequences one after another. Default:
            "bhsd".
        causal: Query i sees key j only if j <= i + offset. Default: False.
        causal_alignment: Offset of the diagonal, also for `window` and `alibi_slopes`, where `offset` does not give
            it. `bottom_right`: Sk − Sq; `top_left`: 0. Each sequence's own lengths count. Default: "bottom_right".
        window: [left, right]: query i sees key j only if i + offset − left <= j <= i + offset + right. −1 is no
            bound. Default: (-1, -1).
        block_size: (Mq, Mk): queries and keys of a block of `block_mask`, multiples of 16. Default: (128, 128).
        scale: Factor of q·k. None, the default, is 1/sqrt(D).
        softcap: Each scaled score s becomes softcap·tanh(s/softcap), before mask and bias (Gemma 2). 0 is off.
            Default: 0.0.
        dropout_p: Probability with which each attention weight is dropped, 0 <= p < 1. Default: 0.0.
        dropout_seed: Seed of dropout, 0 to 2^64 − 1. The dropped weights are a function of the seed alone, whatever
            the backend (Philox, Salmon et al. 2011). None, the default, draws a seed.
        precision: float32 matrix products: `ieee` (full float32) or `tf32`. Default: "ieee".
        return_lse: Also return lse, the natural logarithm of the softmax's denominator. Default: False.
        return_key_weights: Also return key_weights, (B, Hq, Sk) float32: the sum over the queries of each key's
            probability, before dropout; (Hq, Tk) in layout `thd`. Over KV caches (B, Hq, L), L the longest length,
            padded with zeros. It has no gradient. Default: False.
        grads: Gradients to return, in this order: some of `dq`, `dk`, `dv`, `dattn_mask` (of a float mask) and
            `dsinks`. Default: ("dq", "dk", "dv").
        deterministic: Gradients are bitwise equal from run to run. Default: True.
        backend: `auto`, or one of `triton`, `cpu`, `torch`, `tiled` and `reference`. A backend that is named is never
            replaced by another. Default: "auto".
    """

    layout: str = _row(
        "bhsd", OneOf(LAYOUTS), "bhsd (B,H,S,D), bshd (B,S,H,D), or thd (T,H,D): packed sequences of different lengths",
        "bshd", feature=Feature("thd", "thd"), when="thd",
    )  # fmt: skip
    causal: bool = _row(False, Flag(), "query i sees key j only if j <= i + offset", True, feature=Feature("causal"))
    causal_alignment: str = _row(
        "bottom_right", OneOf(("bottom_right", "top_left")),
        "offset of the diagonal: bottom_right Sk - Sq, top_left 0; the window uses it too", "top_left",
    )  # fmt: skip
    window: tuple[int, int] = _row(
        (-1, -1), Pair(-1, UNBOUNDED, "must be two integers [left, right], each -1 (no bound) or 0 to 2^30"),
        "[left, right]: number of keys visible on each side of the diagonal; -1 is no bound",
        (3, 0), feature=Feature("window", level=1),
    )  # fmt: skip
    block_size: tuple[int, int] = _row(
        (128, 128), Pair(16, UNBOUNDED, "must be two multiples of 16, [Mq, Mk], up to 2^30", 16, ("queries", "keys")),
        "[Mq, Mk]: numbers of queries and keys in one block of block_mask, multiples of 16", (16, 32),
        refused={"sharded": "is for block_mask"},
    )  # fmt: skip
    scale: float | None = _row(None, Number(optional=True), "factor of q·k; by default 1/sqrt(D)", 0.25)
    softcap: float = _row(
        0.0, Number(0.0, normal=True, message="must be 0 (off) or a positive number within float32's normal range"),
        "s = softcap·tanh(s/softcap), before mask and bias; 0 is off",
        1.0, feature=Feature("softcap", level=1, per_score=True),
    )  # fmt: skip
    dropout_p: float = _row(
        0.0, Number(0.0, below=1.0, message="must be a number with 0 <= dropout_p < 1"),
        "probability of dropping an attention weight",
        0.5, feature=Feature("dropout", "dropout", level=2, per_score=True),
        refused={"sharded": "needs positions in the whole sequence, which a shard does not know"},
    )  # fmt: skip
    dropout_seed: int | None = _row(
        None, Integer(0, (1 << 64) - 1, "must be an integer from 0 to 2^64 - 1", optional=True),
        "Philox key; without it, the server draws one below 2^53 and returns it", 7,
        refused={"sharded": "is for dropout"},
    )  # fmt: skip
    precision: str = _row(
        "ieee", OneOf(("ieee", "tf32")), "float32 matrix products: ieee or tf32",
        "tf32", feature=Feature("tf32", "tf32"),
    )  # fmt: skip
    return_lse: bool = _row(
        False, Flag(), "also return lse, the natural logarithm of the softmax's denominator",
        True, feature=Feature("lse", "lse"), direction="forward",
        refused={"cli": "flashpoint verify always checks lse"},
    )  # fmt: skip
    return_key_weights: bool = _row(
        False, Flag(), "also return key_weights, the sum over the queries of each key's probability before dropout",
        True, feature=Feature("key_weights", "key weights"), direction="forward",
        refused={
            "oip": _NO_PLACE, "grpc": _NO_PLACE, "jax": "has no gradient, but calls in JAX are differentiable",
            "sharded": "needs the softmax over all keys, which a shard does not have",
            "saved": "cannot be combined with save: key weights have no gradient",
            "cli": "flashpoint verify judges o, lse and gradients",
        },
    )  # fmt: skip
    grads: tuple[str, ...] = _row(
        GRADS[:3], Names(GRADS), "the gradients to return", ("dk",), direction="backward",
        refused={"torch": "autograd requests what it needs", "jax": "autodiff requests what it needs"},
    )  # fmt: skip
    deterministic: bool = _row(True, Flag(), "gradients bitwise equal from run to run", False)
    backend: str = _row(
        "auto", OneOf(("auto", *BACKENDS)), "backend to use; one chosen by name is never replaced", "reference"
    )  # fmt: skip

    def __post_init__(self) -> None:
        errors = []
        for name, option in OPTIONS.items():
            given = value = getattr(self, name)
            if isinstance(option.default, tuple):
                value = option.default if value is None and isinstance(option.kind, Pair) else number_of(value)
                if isinstance(value, Sequence) and not isinstance(value, str):
                    value = tuple(map(number_of, value))
            elif type(value) not in _PYTHONS:
                value = number_of(value)
            if value is not given:
                object.__setattr__(self, name, value)
            if (value is not option.default) and (error := option.kind.error(value)):
                errors.append((name, error))
        if errors:
            raise ProblemError(errors)

    @cached_property
    def given(self) -> frozenset[str]:
        """The names of the options whose values are not the default."""
        return frozenset([name for name, option in OPTIONS.items() if getattr(self, name) != option.default])

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # cached, because each request hashes its options, and hashing every field is slow
        return hash(tuple([getattr(self, name) for name in OPTIONS]))


OPTIONS: dict[str, Option] = {
    each.name: each.metadata["row"]._replace(
        name=each.name, default=each.default, refused=completed(each.name, each.metadata["row"].refused)
    )
    for each in fields(Options)
}
