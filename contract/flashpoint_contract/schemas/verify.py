"""The schemas of `/verify`: the errors of a backend's answers, or of the caller's own, against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from flashpoint_contract.options import Direction as Pass
from flashpoint_contract.schemas.options import AttentionOptions
from flashpoint_contract.schemas.shapes import Answer, Direction, Dtype, Number, Shape
from flashpoint_contract.tensors import EXTRAS

if TYPE_CHECKING:
    Extra = str
else:
    Extra = Literal[EXTRAS]


class VerifyRequest(AttentionOptions):
    """A problem drawn from a seed, and the options to run it with: the caller sends no tensors.

    To send your own tensors instead, send a message as to `/attention`: q, k, v and the other tensors of the problem;
    `do` if gradients are to be judged; and any answers (o, lse and gradients). The answers are then judged in place of
    those that a backend computes.
    """

    shape: Shape = Field(description="the sizes of the problem")
    dtype: Dtype = Field(default="float32", description="data type of q, k, v and do")
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="seed of the random tensors")
    direction: Direction = Field(default="both", description="judge o and lse, the gradients, or both")
    extras: Annotated[tuple[Extra, ...], Field(strict=False, max_length=len(EXTRAS))] = Field(
        default=(), description="optional inputs, drawn from the same seed"
    )


class TensorErrors(Answer):
    """How far one tensor is from float64. Where it and float64 are the same infinity, or both NaN, the error is 0."""

    max_abs: Number = Field(description="largest absolute error; infinite if one of the two values is not finite")
    max_rel: Number = Field(description="max_abs over the largest float64 value")
    rms: Number = Field(description="root mean square of the finite errors")
    cosine: Number = Field(description="cosine similarity to the float64 tensor")
    worst_index: tuple[int, ...] | None = Field(description="index of max_abs; null for an empty tensor")
    worst_value: Number | None = Field(description="the value there")
    worst_expected: Number | None = Field(description="float64's value there")


class Decade(Answer):
    """How many elements have an error in [10^exponent, 10^(exponent + 1)).

    `exponent` is null for errors of 0, and 309, which no float64 has, for infinite errors.
    """

    exponent: int | None
    count: int


class Judgement(TensorErrors):
    """One tensor's errors, their bound, and the errors of torch's own math in the same dtype."""

    name: str
    bound: Number = Field(description="limit of max_abs; of the caller's answers, if all errors grew alike")
    rule: str = Field(description="rule that gives the bound")
    ok: bool = Field(description="every error is within its bound")
    excess: Number = Field(default=0.0, description="largest error over its own bound; above 1 it is wrong")
    imprecise: bool = Field(
        default=False, description="right, but less exact than scores in float32, or than torch: of the caller's"
    )
    where: str = Field(default="", description="sequences, heads, rows and columns that are wrong, of the caller's")
    torch: TensorErrors = Field(description="plain materialised attention in the same dtype")
    histogram: tuple[Decade, ...] = Field(description="the errors by decade, smallest first")


class VerifyCause(Answer):
    """A known mistake that explains the caller's wrong answers: attention in float64 with this mistake gives them."""

    code: str = Field(description="short fixed name, such as causal-alignment")
    text: str = Field(description="the mistake in a sentence")
    advice: str = Field(description="what to do")
    confirmed: bool = Field(description="the mistake gave the wrong numbers")
    explains: int = Field(description="number of wrong answers that it explains")


class VerifyReport(Answer):
    """The errors of a backend, or of the caller's own answers, against float64, and the verdict `ok`."""

    ok: bool = Field(description="every tensor is within its bound")
    backend: str = Field(description="backend that computed the tensors; given if the caller sent them")
    device: str = Field(description="device of the backend")
    dtype: Dtype = Field(description="data type of q, k, v and o")
    seed: int | None = Field(default=None, description="seed of the tensors, if they were drawn")
    seconds: float = Field(description="total seconds, with the float64 reference")
    tensors: tuple[Judgement, ...] = Field(description="errors and verdict of each tensor")
    causes: tuple[VerifyCause, ...] = Field(
        default=(), description="known mistakes that explain the caller's wrong answers, up to a few million scores"
    )


class VerifyProgress(Answer):
    """How far a verification is: an event of its stream.

    A block is one call of the backend, or some queries of all heads of a sequence. The stages `rounding` and `causes`
    run only if an answer is beyond its bound, so `total` may grow.
    """

    kind: Literal["progress"] = Field(default="progress", description="kind of the event")
    done: int = Field(ge=0, description="blocks that are over")
    total: int = Field(ge=0, description="blocks in all, as far as is known")
    stage: Literal["backend", "float64", "torch", "rounding", "causes"] = Field(
        description="what the next block belongs to"
    )
    direction: Pass = Field(description="pass that is judged: forward or backward")


class ReportEvent(Answer):
    """The last event of a verification that was finished."""

    kind: Literal["report"] = "report"
    report: VerifyReport


class ProblemEvent(Answer):
    """The last event of a verification that failed once it had begun: an RFC 9457 problem document."""

    kind: Literal["problem"] = "problem"
    problem: dict[str, Any]


VerifyEvent = VerifyProgress | ReportEvent | ProblemEvent
VERIFY_EVENT: TypeAdapter[VerifyEvent] = TypeAdapter(Annotated[VerifyEvent, Field(discriminator="kind")])
