"""The pydantic model of the attention options, made from the contract's table (`flashpoint_contract.options`)."""

from __future__ import annotations

from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from flashpoint_contract.options import (
    LARGEST_FLOAT32,
    LEAST_NORMAL_FLOAT32,
    OPTIONS,
    Flag,
    Integer,
    Kind,
    Names,
    Number,
    OneOf,
    Pair,
)
from flashpoint_contract.wording.docstrings import section_of_options


def _off_or_normal(number: float) -> float:
    if 0 < number < LEAST_NORMAL_FLOAT32:
        raise ValueError("must be 0 (off) or within float32's normal range")
    return number


def _named_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("names a gradient twice")
    return names


def annotation(kind: Kind) -> Any:
    """Return the pydantic type of an option, with its bounds."""
    match kind:
        case Flag():
            return bool
        case OneOf(values):
            return Literal[values]
        case Names(values):
            unique = Field(strict=False, min_length=1, max_length=len(values), json_schema_extra={"uniqueItems": True})
            return Annotated[tuple[Literal[values], ...], unique, AfterValidator(_named_once)]  # type: ignore[valid-type]
        case Pair():
            step = {"multiple_of": kind.step} if kind.step > 1 else {}
            each = Annotated[int, Field(ge=kind.least, le=kind.most, **step)]
            return Annotated[tuple[each, each], Field(strict=False)]
        case Integer():
            bounded: Any = Annotated[int, Field(ge=kind.least, lt=kind.most + 1)]
        case Number():
            bounds: Any = {"lt": kind.below} if kind.below is not None else {"le": LARGEST_FLOAT32}
            checks = (AfterValidator(_off_or_normal),) if kind.normal else ()
            bounded = Annotated[float, Field(ge=kind.least, **bounds), *checks]
    return bounded | None if kind.optional else bounded


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


if TYPE_CHECKING:
    _Made: Any = _Strict
else:
    _Made = create_model(
        "_Made",
        __base__=_Strict,
        **{
            name: (annotation(option.kind), Field(default=option.default, description=option.text))
            for name, option in OPTIONS.items()
        },
    )


class AttentionOptions(_Made):  # type: ignore[misc]
    """Options of an attention call; the names, ranges and defaults of the public contract.

    Strict: nothing is coerced (`"true"` is no bool, `true` is no int), but an integer is taken where a number is, and a
    list where a tuple is. An unknown name is an error, so that a misspelt option never runs silently.
    """


if AttentionOptions.__doc__:  # python -OO removes docstrings
    AttentionOptions.__doc__ = f"{cleandoc(AttentionOptions.__doc__)}\n\n{section_of_options(OPTIONS)}"
