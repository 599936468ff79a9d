"""Common types of the schemas of /verify and /benchmark: a problem's sizes, and floats with NaN and infinities."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema, model_validator

from flashpoint_contract.strictjson import WORDS, written

Dtype = Literal["float16", "bfloat16", "float32", "float64"]
Direction = Literal["forward", "backward", "both"]

NUMBER_SCHEMA = {"anyOf": [{"type": "number"}, {"enum": list(WORDS)}]}


def _read(value: Any) -> Any:
    return WORDS.get(value, value) if isinstance(value, str) else value


# A float. In JSON, NaN and infinities are the strings "NaN", "Infinity" and "-Infinity".
Number = Annotated[
    float,
    Field(strict=True),
    BeforeValidator(_read),
    PlainSerializer(written, when_used="json"),
    WithJsonSchema(NUMBER_SCHEMA),
]
Size = Annotated[int, Field(ge=0, le=1 << 31)]
Count = Annotated[int, Field(ge=1, le=1 << 31)]


class Answer(BaseModel):
    """Part of an answer. It is not strict: for example, text is read as a time."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Asked(BaseModel):
    """Part of a request. Strict: nothing is coerced, and an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Shape(Asked):
    """The sizes of an attention problem in any layout. By default, sizes of k and v equal those of q."""

    batch: Size = Field(default=1, description="sequences, B")
    q_heads: Count = Field(default=1, description="query heads, Hq")
    kv_heads: Count = Field(
        default_factory=lambda data: data.get("q_heads", 1),
        description="key/value heads, Hk, of which q_heads is a multiple; q_heads if not given",
    )
    q_len: Size = Field(description="queries of a sequence, Sq")
    kv_len: Size = Field(
        default_factory=lambda data: data.get("q_len", 0), description="keys of a sequence, Sk; q_len if not given"
    )
    head_dim: Count = Field(description="columns of q and k, D")
    value_dim: Count = Field(
        default_factory=lambda data: data.get("head_dim", 1),
        description="columns of v and o, Dv; head_dim if not given",
    )

    @model_validator(mode="after")
    def _shared_evenly(self) -> Self:
        if self.q_heads % self.kv_heads:
            raise ValueError(f"q_heads {self.q_heads} is not a multiple of kv_heads {self.kv_heads}")
        return self
