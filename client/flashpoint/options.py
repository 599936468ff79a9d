"""The one model of the attention options, for every endpoint, both encodings and the client."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Grad = Literal["dq", "dk", "dv", "dattn_mask", "dsinks"]
Layout = Literal["bhsd", "bshd", "thd"]
CausalAlignment = Literal["bottom_right", "top_left"]
Precision = Literal["ieee", "tf32"]
Backend = Literal["auto", "triton", "torch", "tiled", "reference"]

WindowSide = Annotated[int, Field(ge=-1, le=1 << 30)]

LARGEST_FLOAT32, LEAST_NORMAL_FLOAT32 = 3.4028234663852886e38, 1.1754943508222875e-38


def _off_or_normal(softcap: float) -> float:
    if 0 < softcap < LEAST_NORMAL_FLOAT32:
        raise ValueError("must be 0 (off) or within float32's normal range")
    return softcap


def _named_once(grads: tuple[Grad, ...]) -> tuple[Grad, ...]:
    if len(set(grads)) < len(grads):
        raise ValueError("names a gradient twice")
    return grads


class AttentionOptions(BaseModel):
    """Options of an attention call; the names, ranges and defaults of the public contract.

    Strict: nothing is coerced (`"true"` is no bool, `true` is no int), but an integer is taken where a number is, and a
    list where a tuple is. An unknown name is an error, so that a misspelt option never runs silently.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    layout: Layout = Field("bhsd", description="bhsd (B,H,S,D), bshd (B,S,H,D), or thd: ragged, packed, (T,H,D)")
    causal: bool = Field(False, description="query i sees key j only if j <= i + offset")
    causal_alignment: CausalAlignment = Field(
        "bottom_right", description="offset of the diagonal: bottom_right Sk - Sq, top_left 0; the window uses it too"
    )
    window: Annotated[tuple[WindowSide, WindowSide], Field(strict=False)] = Field(
        (-1, -1), description="[left, right] keys visible either side of the diagonal; -1 is no bound"
    )
    scale: float | None = Field(
        None, ge=-LARGEST_FLOAT32, le=LARGEST_FLOAT32, description="multiplies q·k; 1/sqrt(D) when not given"
    )
    softcap: Annotated[float, AfterValidator(_off_or_normal)] = Field(
        0.0, ge=0, le=LARGEST_FLOAT32, description="s = softcap·tanh(s/softcap), before mask and bias; 0 is off"
    )
    dropout_p: float = Field(0.0, ge=0, lt=1, description="probability with which an attention weight is dropped")
    dropout_seed: int | None = Field(
        None, ge=0, lt=1 << 64, description="Philox key; one that the server picks is below 2^53 and is returned"
    )
    precision: Precision = Field("ieee", description="float32 matrix products: ieee or tf32")
    return_lse: bool = Field(False, description="also answer lse, the natural log of the softmax's denominator")
    grads: Annotated[tuple[Grad, ...], Field(strict=False, min_length=1), AfterValidator(_named_once)] = Field(
        ("dq", "dk", "dv"), description="which gradients to answer", json_schema_extra={"uniqueItems": True}
    )
    deterministic: bool = Field(True, description="gradients bitwise equal from run to run")
    backend: Backend = Field("auto", description="a backend asked for by name is never substituted")
