"""The schemas of `/benchmark`: a grid to time, the job that times it, its rows and its events.

The events of a job determine its state: `BenchmarkJob.after(event)` returns the job after one more event.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, Field, NonNegativeInt, PositiveInt, TypeAdapter, model_validator

from flashpoint_contract.schemas.shapes import Answer, Asked, Direction, Number, Shape
from flashpoint_contract.timing import is_noisy

TimedDtype = Literal["float16", "bfloat16", "float32"]
Preset = Literal["papers", "h100", "seeds"]  # `seeds` is the old name of `papers`
State = Literal["queued", "running", "done", "failed", "cancelled"]
PlotKind = Literal["time", "tflops", "speedup", "memory", "roofline"]  # pictures of a benchmark
PlotTheme = Literal["light", "dark"]
ENDED: tuple[State, ...] = ("done", "failed", "cancelled")

_GRID = ("shapes", "dtypes", "causal", "directions")


class BenchmarkRequest(Asked):
    """A grid to time: every shape in every dtype, mask and direction on every backend; or a preset's own cases."""

    preset: Preset | None = Field(
        default=None,
        description="papers (or seeds): three small tables; h100: batch·length 16k, heads·D 2048. Instead of a grid",
    )
    shapes: Annotated[tuple[Shape, ...], Field(strict=False)] = Field(default=(), description="the sizes to time")
    dtypes: Annotated[tuple[TimedDtype, ...], Field(strict=False, min_length=1)] = Field(
        default=("float32",), description="data types of q, k, v, o and the gradients"
    )
    causal: Annotated[tuple[bool, ...], Field(strict=False, min_length=1)] = Field(
        default=(False,), description="causal mask: true, false, or both"
    )
    directions: Annotated[tuple[Direction, ...], Field(strict=False, min_length=1)] = Field(
        default=("forward",), description="forward; backward from saved o and lse; both, as in training"
    )
    backends: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(), description="implementations to time, in this order; default: all that the device supports"
    )
    relative_precision: float = Field(
        default=0.01, gt=0, le=1, description="target precision of the median, as a part of it, with 95% confidence"
    )
    max_seconds: float = Field(default=3.0, gt=0, le=600, description="maximum seconds of repeats for a case")
    warmup_ms: float = Field(default=50.0, ge=0, le=60_000, description="warm-up in milliseconds")

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.preset is None and not self.shapes:
            raise ValueError("name a preset, or shapes to time")
        if any(0 in (shape.batch, shape.q_len, shape.kv_len) for shape in self.shapes):
            raise ValueError("a shape without queries or keys leaves nothing to time")
        fields = type(self).model_fields
        if self.preset and (given := [name for name in _GRID if getattr(self, name) != fields[name].default]):
            raise ValueError(f"the preset has its own {', '.join(given)}")
        return self


def _figure(description: str) -> Any:
    return Field(default=None, description=description)


class BenchmarkRow(Answer):
    """One case on one backend. An unmeasured figure is None; if the case could not run, `skipped` says why."""

    backend: str = Field(description="implementation")
    version: str | None = Field(description="version of its package")
    device: str = Field(description="device")
    direction: Direction = Field(description="forward, backward, or both")
    dtype: TimedDtype = Field(description="data type of q, k, v, o and the gradients")
    causal: bool = Field(description="causal mask")
    batch: int = Field(description="sequences, B")
    q_heads: int = Field(description="query heads, Hq")
    kv_heads: int = Field(description="key/value heads, Hk")
    q_len: int = Field(description="queries of a sequence, Sq")
    kv_len: int = Field(description="keys of a sequence, Sk")
    head_dim: int = Field(description="columns of q and k, D")
    value_dim: int = Field(description="columns of v and o, Dv")
    ms: Number | None = _figure("median milliseconds of a call")
    ms_p20: Number | None = _figure("20th percentile of the milliseconds")
    ms_p80: Number | None = _figure("80th percentile of the milliseconds")
    repeats: int | None = _figure("number of timed calls")
    threads: int | None = _figure(
        "threads of the CPU with which ms is measured: all, or fewer if they are faster by more than noise"
    )
    ms_by_threads: dict[str, Number] | None = _figure("median milliseconds with each number of threads that was tried")
    waited: Number | None = _figure("share of the time for which threads waited for a core that other programs used")
    busy: bool | None = _figure("other programs disturbed ms: measure again when the machine is quiet")
    tflops: Number | None = _figure("10^12 FLOPs a second, by the algorithm's count")
    tflops_standard: Number | None = _figure("10^12 FLOPs a second, by the papers' count")
    flops: Number | None = _figure("FLOPs that the algorithm computes")
    flops_standard: Number | None = _figure("4·B·Hq·Sq·Sk·D forward, half where causal; backward 2.5 times")
    bytes: Number | None = _figure("minimum traffic in bytes: each input read once, each output written once")
    gb_per_s: Number | None = _figure("minimum traffic in 10^9 bytes a second")
    arithmetic_intensity: Number | None = _figure("the algorithm's FLOPs a byte")
    roofline_percent: Number | None = _figure("percent of the roofline at that intensity")
    peak_bytes: Number | None = _figure("peak memory of a call beside its inputs")
    peak_bytes_low: bool | None = _figure(
        "peak_bytes is below what the algorithm must hold, also after further attempts"
    )
    speedup_over_naive: Number | None = _figure("naive's median time over this row's")
    longest_slice_ms: Number | None = _figure("longest time slice in milliseconds")
    skipped: str | None = _figure("reason for missing figures")

    @property
    def noisy(self) -> bool:
        """Return whether the times of the calls differ so much that the median says little."""
        return is_noisy(self.ms, self.ms_p20, self.ms_p80)

    @property
    def marks(self) -> str:
        """Return the marks of `ms`: `~` if it is noisy, `*` if other programs disturbed it."""
        return f"{'~' if self.noisy else ''}{'*' if self.busy else ''}"

    @property
    def above_roof(self) -> bool:
        """Return whether the case was faster than the measured peaks allow.

        Then its data stayed in processor caches, or the measured peaks are too low.
        """
        return (self.roofline_percent or 0) > 100


class _Event(Answer):
    id: PositiveInt = Field(description="increases from event to event of a job")


class StateEvent(_Event):
    """The job has entered `state`; `error` says why it failed."""

    kind: Literal["state"] = "state"
    state: State
    at: AwareDatetime
    error: str | None = None


class DeviceEvent(_Event):
    """The job has started on a device: its name and its peaks."""

    kind: Literal["device"] = "device"
    device: str
    environment: dict[str, Any]


class ProgressEvent(_Event):
    """`done` of `total` cases are finished. `backend` is timed now; null while the device's peaks are measured."""

    kind: Literal["progress"] = "progress"
    done: NonNegativeInt
    total: NonNegativeInt
    backend: str | None = None


class RowEvent(_Event):
    """Case number `done` of `total` is finished, and `row` is its result."""

    kind: Literal["row"] = "row"
    done: PositiveInt
    total: PositiveInt
    row: BenchmarkRow


BenchmarkEvent = StateEvent | DeviceEvent | ProgressEvent | RowEvent
EVENT: TypeAdapter[BenchmarkEvent] = TypeAdapter(Annotated[BenchmarkEvent, Field(discriminator="kind")])


class BenchmarkJob(Answer):
    """The state of a benchmark, its request, and the rows that are finished."""

    id: str = Field(description="name of the job at the server")
    state: State = Field(default="queued", description="queued, running, or how it ended: done, failed, cancelled")
    done: NonNegativeInt = Field(default=0, description="number of finished cases")
    total: NonNegativeInt = Field(default=0, description="number of cases")
    created: AwareDatetime = Field(description="time of the request")
    started: AwareDatetime | None = Field(default=None, description="time of the first measurement")
    ended: AwareDatetime | None = Field(default=None, description="time of the end")
    device: str | None = Field(default=None, description="device, known once it runs")
    environment: dict[str, Any] = Field(
        default_factory=dict, description="versions, commit, and peaks of the device by dtype"
    )
    request: BenchmarkRequest = Field(description="grid that is timed")
    rows: tuple[BenchmarkRow, ...] = Field(default=(), description="finished cases, in their order")
    errors: tuple[str, ...] = Field(default=(), description="reasons of a failed job")

    @model_validator(mode="after")
    def _name_cpu(self) -> Self:
        """Call the kernels in C `cpu`. Earlier versions called them `torch`."""
        if self.environment.get("kind") == "cpu":
            rows = (r.model_copy(update={"backend": "cpu"}) if r.backend == "torch" else r for r in self.rows)
            object.__setattr__(self, "rows", tuple(rows))
        return self

    def after(self, event: BenchmarkEvent) -> Self:
        """Return the job as it is after `event`, one event of its stream."""
        changed: dict[str, Any]
        if isinstance(event, DeviceEvent):
            changed = {"device": event.device, "environment": event.environment}
        elif not isinstance(event, StateEvent):
            changed = {"done": event.done, "total": event.total}
            if isinstance(event, RowEvent):
                changed["rows"] = (*self.rows, event.row)
        else:
            changed = {"state": event.state, "errors": (*self.errors, *([event.error] if event.error else []))}
            if event.state != "queued":
                changed["started" if event.state == "running" else "ended"] = event.at
        return self.model_copy(update=changed)
