"""Timing cases and grids as plain data, without torch, and the work of an algorithm for a case.

The floating-point operations of an algorithm, and the bytes that it must move, follow from the shapes. P is the number
of (query, key) pairs over all batch entries and query heads. A matrix product over them is 2·P·D or 2·P·Dv operations.
As in all papers, only products count (not softmax, masks and scaling). Each tensor of an algorithm is read or written
once, in addition to the algorithm's passes over the Sq × Sk matrix. This is the minimum, so the bytes per second are a
lower bound for the memory's true rate, and the arithmetic intensity is an upper bound.

The standard count, with which papers compare, is the same for all algorithms: 4·B·Hq·Sq·Sk·D for the forward, half of
it if causal, and 2.5 times that for the backward, however much is recomputed (for D ≠ Dv, 2·(D + Dv) instead of 4·D).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from flashpoint_contract.options import ProblemError
from flashpoint_contract.tensors import ITEMSIZE, MAX_HEAD_DIM

CaseDirection = Literal["forward", "backward", "both"]
DIRECTIONS = ("forward", "backward", "both")
DTYPES = ("float16", "bfloat16", "float32")

# Implementations that cases can name: our backends, the written-out formula, torch's own, and optional packages.
TIMED = (
    "naive", "naive_explicit", "triton", "cpu", "torch", "tiled", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient",
    "sdpa_math", "flex", "flash_attn", "flash_attn_3", "flashinfer", "xformers",
)  # fmt: skip

OWN = "kernel"  # `backend` of a case that times a function of the caller; HTTP requests cannot use it

ROW_FIELDS = (
    "backend", "version", "device", "direction", "dtype", "causal", "batch", "q_heads", "kv_heads", "q_len", "kv_len",
    "head_dim", "value_dim", "ms", "ms_p20", "ms_p80", "repeats", "threads", "ms_by_threads", "waited", "busy",
    "tflops", "tflops_standard", "flops", "flops_standard", "bytes", "gb_per_s", "arithmetic_intensity",
    "roofline_percent", "peak_bytes", "peak_bytes_low", "speedup_over_naive", "longest_slice_ms", "skipped",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One implementation on one problem with standard normal q, k, v and do in layout bhsd. Raises ProblemError.

    `direction`: "forward"; "backward", without the forward that precedes it; "both", one after the other. A causal
    diagonal is aligned bottom right. `kv_heads`, `kv_len` and `value_dim` of 0 mean those of q.
    """

    backend: str
    batch: int
    q_heads: int
    q_len: int
    head_dim: int
    kv_heads: int = 0
    kv_len: int = 0
    value_dim: int = 0
    dtype: str = "bfloat16"
    causal: bool = False
    direction: CaseDirection = "forward"

    def __post_init__(self) -> None:
        for name, same in (("kv_heads", self.q_heads), ("kv_len", self.q_len), ("value_dim", self.head_dim)):
            object.__setattr__(self, name, getattr(self, name) or same)
        allowed = {"backend": TIMED, "dtype": DTYPES, "direction": DIRECTIONS}
        errors = [
            (name, f"{getattr(self, name)!r} is not one of {', '.join(choices)}")
            for name, choices in allowed.items()
            if getattr(self, name) not in choices and (name, getattr(self, name)) != ("backend", OWN)
        ]
        sizes = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")
        errors += [(name, "must be at least 1") for name in sizes if getattr(self, name) < 1]
        errors += [
            (name, f"must be at most {MAX_HEAD_DIM}")
            for name in ("head_dim", "value_dim")
            if getattr(self, name) > MAX_HEAD_DIM
        ]
        if not errors and self.q_heads % self.kv_heads:
            errors.append(("kv_heads", f"must divide q_heads, {self.q_heads}, not {self.kv_heads}"))
        if errors:
            raise ProblemError(errors)

    @property
    def problem(self) -> tuple[Any, ...]:
        """All fields except `backend`, as a key: it is equal for cases that differ only in their implementation."""
        return (
            self.batch, self.q_heads, self.kv_heads, self.q_len, self.kv_len, self.head_dim, self.value_dim,
            self.dtype, self.causal, self.direction,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long to measure. Raises ProblemError.

    After a first call and `warmup_ms` of further calls, calls are repeated until the median is known to `precision`:
    half the width of its 95% confidence interval, divided by the median. Measuring ends at the latest after
    `max_seconds` of work, but never before `min_repeats` calls.
    """

    precision: float = 0.01
    max_seconds: float = 3.0
    min_repeats: int = 3
    max_repeats: int = 1000  # enough for a precision of 1%, unless something else runs
    warmup_ms: float = 50.0  # enough for the clock and thread pool of a CPU and the clock of a GPU to settle
    slice_ms: float = 20.0

    def __post_init__(self) -> None:
        errors = [
            (name, "must be above 0")
            for name in ("precision", "max_seconds", "slice_ms")
            if not getattr(self, name) > 0
        ]
        if not self.warmup_ms >= 0:
            errors.append(("warmup_ms", "must not be negative"))
        if not 1 <= self.min_repeats <= self.max_repeats:
            errors.append(("min_repeats", "must be at least 1, and at most max_repeats"))
        if errors:
            raise ProblemError(errors)


# The backends that a preset times on each kind of device. Those only under "cuda" need a GPU, except `flex`, which on a
# CPU has a forward but no backward.
_BACKENDS = {
    "cpu": ("naive", "naive_explicit", "tiled", "cpu", "sdpa_flash"),
    "cuda": (
        "naive",
        "naive_explicit",
        "triton",
        "torch",
        "tiled",
        "sdpa_flash",
        "sdpa_cudnn",
        "sdpa_efficient",
        "flex",
    ),
}
_PASSES: tuple[CaseDirection, ...] = ("forward", "backward")


def grid(
    shapes: Iterable[Mapping[str, int]],
    *,
    backends: Iterable[str],
    dtypes: Iterable[str] = ("bfloat16",),
    causal: Iterable[bool] = (False,),
    directions: Iterable[CaseDirection] = ("forward",),
) -> list[Case]:
    """Return a case for each combination of the arguments' items; backends vary fastest. Raises ProblemError.

    A shape maps names of `Case`'s size fields to numbers.
    """
    return [
        Case(**shape, dtype=dtype, causal=masked, direction=direction, backend=backend)
        for shape, dtype, masked, direction, backend in product(
            list(shapes), list(dtypes), list(causal), list(directions), list(backends)
        )
    ]


def _papers(kind: str) -> list[Case]:
    """Return the cases, forward and backward, of the tables in the papers that this project follows.

    They are: N 512, D 32 in float32 with one head; B 1, H 8, N 2048, D 64 in float16, causal, for a table of memory;
    B 4, H 8, D 64 in bfloat16 with N from 128 to 4096. On the CPU all are float32: without half-precision hardware,
    torch's 16-bit products run at 1/20 of the speed, and naive attention would look slower than it is.
    """
    float16, bfloat16 = ("float32", "float32") if kind == "cpu" else ("float16", "bfloat16")
    small = {"batch": 1, "q_heads": 1, "q_len": 512, "head_dim": 32}
    memory = {"batch": 1, "q_heads": 8, "q_len": 2048, "head_dim": 64}
    lengths = [{"batch": 4, "q_heads": 8, "q_len": 128 << n, "head_dim": 64} for n in range(6)]
    backends = _BACKENDS[kind]
    return [
        *grid([small], dtypes=["float32"], directions=_PASSES, backends=backends),
        *grid([memory], dtypes=[float16], causal=[True], directions=_PASSES, backends=backends),
        *grid(lengths, dtypes=[bfloat16], directions=_PASSES, backends=backends),
    ]


def _h100(kind: str) -> list[Case]:
    """Return the grid of FlashAttention 2 and 3: batch·seq 16k, heads·D 2048, seq 512 to 16k, causal or not."""
    tokens, width = 16384, 2048
    shapes = [
        {"batch": tokens // seq, "q_heads": width // dim, "q_len": seq, "head_dim": dim}
        for dim, seq in product((64, 128, 256), (512 << n for n in range(6)))
    ]
    return grid(shapes, causal=[False, True], directions=_PASSES, backends=_BACKENDS[kind])


def useful(cases: Iterable[Case]) -> list[Case]:
    """Return the cases without those that every device skips: the forward of `naive_explicit` is that of `naive`."""
    return [case for case in cases if (case.backend, case.direction) != ("naive_explicit", "forward")]


PRESETS: dict[str, Callable[[str], list[Case]]] = {"papers": _papers, "h100": _h100, "seeds": _papers}


def preset(name: str, device: str = "cpu") -> list[Case]:
    """Return the cases of the preset `name`, with the implementations for `device` ("cpu", "cuda", "cuda:1").

    Raises ProblemError, for the field `preset`, if there is no preset `name`.
    """
    if name not in PRESETS:
        raise ProblemError([("preset", f"{name!r} is not one of {', '.join(PRESETS)}")])
    return useful(PRESETS[name]("cpu" if device.startswith("cpu") else "cuda"))


_LSE_BYTES = 4  # bytes of an element of lse, which is float32 for all dtypes


@dataclass(frozen=True)
class Algorithm:
    """The work of one of the `ALGORITHMS`, which `does` describes.

    `d_products` and `dv_products` are its numbers of matrix products of 2·P·D and 2·P·Dv operations (see the module).
    """

    does: str
    d_products: int
    dv_products: int
    skips_hidden: bool  # whether it omits the pairs that a causal mask hides
    tensors: tuple[str, ...]  # each is read or written once; a name may appear twice
    matrix_passes: int = 0  # number of times that the Sq × Sk matrix is read or written, in the inputs' dtype
    causal_passes: int = 0  # additional passes over this matrix with a causal mask


_GRADIENT = ("q", "k", "v", "do", "dq", "dk", "dv")
ALGORITHMS = {
    "flash_forward": Algorithm(
        "S = QKᵀ, O = PV, a tile at a time (FlashAttention-2, Dao 2023, Algorithm 1)",
        1, 1, True, ("q", "k", "v", "o", "lse"),
    ),
    "naive_forward": Algorithm(
        "write S, scale it, softmax, read P for O; a mask over S when causal",
        1, 1, False, ("q", "k", "v", "o"), 6, 2,
    ),
    "naive_backward": Algorithm(
        "autograd's, from P: dV = PᵀdO, dP = dOVᵀ, back through softmax, mask and scale, dQ = dSK, dK = dSᵀQ",
        2, 2, False, _GRADIENT, 9, 2,
    ),
    "explicit_backward": Algorithm(
        "written out, from P: dV, dP, dS = P∘(dP − delta), dQ, dK",
        2, 2, False, (*_GRADIENT, "o"), 9,
    ),
    "fused_backward": Algorithm(
        "S again, dV, dP, dQ, dK in one walk (FlashAttention-2, Algorithm 2), dQ added up over tiles of keys",
        3, 2, True, (*_GRADIENT, "o", "lse"),
    ),
    "two_pass_backward": Algorithm(
        "a walk for dK and dV and one for dQ: S and dP once more, and nothing added up in memory",
        4, 3, True, (*_GRADIENT, "o", "lse", "q", "k", "v", "do", "lse"),
    ),
}  # fmt: skip


def pairs(case: Case, *, seen: bool = False) -> int:
    """Return P, the number of (query, key) pairs of all batch entries and query heads.

    With `seen`, pairs that the causal mask hides do not count.
    """
    rows, keys = case.q_len, case.kv_len
    count = rows * keys
    if seen and case.causal:
        # The diagonal is aligned bottom right: row i sees keys 0 … i + offset, so each of the last min(rows, keys) rows
        # sees one key more than the row before.
        seeing = min(rows, keys)
        count = seeing * (2 * keys - seeing + 1) // 2
    return case.batch * case.q_heads * count


def flops(algorithm: str, case: Case) -> int:
    """Return the floating-point operations of one run of `algorithm`, a name in `ALGORITHMS`."""
    a = ALGORITHMS[algorithm]
    per_pair = 2 * (a.d_products * case.head_dim + a.dv_products * case.value_dim)
    return per_pair * pairs(case, seen=a.skips_hidden)


def moved_bytes(algorithm: str, case: Case) -> int:
    """Return the minimum of bytes that one run of `algorithm` reads and writes."""
    a = ALGORITHMS[algorithm]
    passes = a.matrix_passes + (a.causal_passes if case.causal else 0)
    return passes * pairs(case) * ITEMSIZE[case.dtype] + sum(_nbytes(name, case) for name in a.tensors)


def held_bytes(algorithms: Sequence[str], case: Case) -> int:
    """Return the minimum peak memory in bytes of a call of `algorithms`, without its inputs.

    A forward holds its outputs, and the Sq × Sk matrix if the algorithm writes one. A backward's memory includes its
    forward's.
    """
    written = ("o", "lse", "dq", "dk", "dv")
    matrices = [name for name in algorithms if ALGORITHMS[name].matrix_passes]
    tensors = {name for each in algorithms for name in ALGORITHMS[each].tensors if name in written}
    return sum(_nbytes(name, case) for name in tensors) + bool(matrices) * pairs(case) * ITEMSIZE[case.dtype]


def standard_flops(case: Case) -> int:
    """Return the number of operations by the papers' convention. A causal case counts half, also if Sq ≠ Sk."""
    forward = 2 * pairs(case) * (case.head_dim + case.value_dim) // (2 if case.causal else 1)
    return {"forward": 2 * forward, "backward": 5 * forward, "both": 7 * forward}[case.direction] // 2


def _nbytes(name: str, case: Case) -> int:
    if name == "lse":
        return case.batch * case.q_heads * case.q_len * _LSE_BYTES
    of_keys = name in ("k", "v", "dk", "dv")
    rows = case.kv_heads * case.kv_len if of_keys else case.q_heads * case.q_len
    dim = case.value_dim if name in ("v", "dv", "o", "do") else case.head_dim
    return case.batch * rows * dim * ITEMSIZE[case.dtype]
