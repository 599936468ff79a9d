"""The measurements of each stage of `make gpu`, in order. This module is plain data and does not need torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

from flashpoint_kernels.timing.case import Case, CaseDirection, preset
from flashpoint_kernels.triton_backend.host.configurations import HOPPER, STORED

# The fields of the environment that a row's figures depend on: one list for tasks of other packages, one for our tasks.
OF_PEERS = ("device", "torch", "measuring")
OF_OURS = (*OF_PEERS, "triton", "sources")
# The folders that the fields `sources`, `measuring` and `tests` of the environment have hashes of.
SOURCES = ("contract", "kernels/flashpoint_kernels")
MEASURING = ("kernels/flashpoint_kernels/timing", "benchmarks/gpu_day")
TESTS = ("tests/kernels", "tests/support/kernels")

OURS = ("triton", "torch", "tiled")
PASSES: tuple[CaseDirection, ...] = ("forward", "backward")
# The packages that the stage `table` times beside ours, in this order: first those that `gpu_report.levels` needs.
DECISIVE = ("sdpa_flash", "sdpa_cudnn")
OTHERS = ("flash_attn", "flash_attn_3", "flashinfer", "xformers", "sdpa_efficient", "sdpa_math")
DECODERS = ("triton", "sdpa_flash", "sdpa_cudnn", "flash_attn", "flash_attn_3")
PAGED = ("triton", "flashinfer", "flash_attn", "flash_attn_3")
MARKS = ("deterministic", "hopper", "stored", "two_sets")  # the fields of `Timed` that choose a mode or a path
WIDEST_HOPPER_BACKWARD = 128  # for larger head dimensions the path for Hopper has gradients only with stored dS
FLEX_SECONDS = 150.0  # time limit of a task with FlexAttention, which compiles for up to a minute

# Tiles (queries, keys) of the stage `sweep`; each runs with several numbers of warps and stages.
SWEEP = {
    "forward": ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32)),
    "forward_hopper": ((128, 128), (128, 64)),
    "backward_kv": ((64, 128), (64, 64), (32, 128), (128, 64), (32, 64)),
    "backward_kv_hopper": ((64, 128), (32, 128)),
    "backward_q": ((128, 64), (128, 128), (64, 64), (128, 32), (64, 32)),
    "backward_q_hopper": ((128, 128), (128, 64)),
    "backward_kv_storing": ((64, 128), (64, 64), (32, 128), (32, 64)),
    "backward_q_stored": ((128, 64), (128, 128), (64, 128), (64, 64), (128, 32)),
    "backward_kv_storing_hopper": ((64, 128), (32, 128)),
    "backward_v_storing_hopper": ((32, 128),),
    "backward_k_stored_hopper": ((64, 128), (32, 128)),
    "backward_q_stored_hopper": ((256, 128), (128, 128)),
}
# Promising tiles, which the stage `sweep` times right after the shipped tile. With these tiles of the forward, two
# programs fit on a multiprocessor, and one computes products while the other computes its softmax. The tile 64 × 128
# of dK and dV spills registers, but takes a quarter fewer instructions per score.
EAGER = {
    ("forward", 64): ((128, 64, 4, 3), (128, 64, 4, 2), (64, 128, 4, 2)),
    ("forward", 128): ((64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 2)),
    ("backward_kv", 128): ((64, 128, 8, 2), (64, 128, 4, 2)),
    ("backward_kv_hopper", 128): ((64, 128, 4, 2), (64, 128, 4, 3)),
}


def papers_cases() -> list[Case]:
    """Return the cases of the preset `papers`, without those of FlexAttention and of our backend `torch`."""
    return [case for case in preset("papers", "cuda") if case.backend not in ("flex", "torch")]


@dataclass(frozen=True)
class Sizes:
    """The measured shapes. The tests of this procedure use small ones."""

    tokens: int = 16384  # batch·seq, as in the papers of FlashAttention 2 and 3
    width: int = 2048  # heads·D, as in these papers
    dims: tuple[int, ...] = (128, 64, 256)
    seqs: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    first: tuple[int, ...] = (4096, 16384)  # lengths of the stage `first`, with head dimension dims[0]
    sweep: int = 4096
    math: int = 4096  # largest length for SDPA's math backend; the scores of longer sequences do not fit in memory
    smoke: tuple[int, int, int, int] = (200, 333, 4099, 128)  # queries, keys, keys of split checks, head dimension
    repeats: int = 50  # number of runs in smoke tests that compare bits
    decode: tuple[tuple[int, int], ...] = ((1, 4096), (64, 4096), (8, 16384), (64, 16384), (1, 65536))  # batch, keys
    decode_heads: tuple[tuple[int, int], ...] = ((32, 8), (64, 8), (32, 32))  # number of query heads, and of key heads
    pages: tuple[int, ...] = (16, 256)
    papers: Callable[[], list[Case]] = papers_cases


def check_of_stored(hopper: bool, dim: int) -> str:
    """Return the smoke test of gradients that store dS, by the kernels for Hopper or by the general ones."""
    if not hopper:
        return "backward_stored"
    return "backward_stored_hopper" if dim <= WIDEST_HOPPER_BACKWARD else "backward_wide_hopper"


class Task:
    """A measurement, whose row is named `key`. `backend` is the measured implementation.

    `limit` is the longest time in seconds. `needs` names the smoke tests that must pass before it is timed. `compiles`
    is the key of a compilation that several tasks share; None if the task compiles no kernel of ours.
    """

    key: str
    backend: str
    limit = 60.0
    needs: tuple[str, ...] = ()
    compiles: Any = None

    @property
    def ours(self) -> bool:
        return self.backend in OURS


@dataclass(frozen=True)
class Smoke(Task):
    """A small problem for one kernel, checked against float64. `name` is a key of smoke.CHECKS."""

    name: str
    backend = "triton"
    limit = 75.0

    @property
    def key(self) -> str:
        return f"smoke {self.name}"


@dataclass(frozen=True)
class Timed(Task):
    """Time one case.

    `deterministic` turns on torch's deterministic mode; `hopper` uses our kernels for Hopper; with `stored` our
    gradients store dS; with `two_sets` the forward for Hopper has two sets of descriptors.
    """

    case: Case
    deterministic: bool = False
    hopper: bool = False
    stored: bool = False
    two_sets: bool = False

    @property
    def key(self) -> str:
        c = self.case
        marks = [name for name in MARKS if getattr(self, name)]
        return " ".join([
            "timed", c.direction, c.dtype, f"b{c.batch}", f"h{c.q_heads}/{c.kv_heads}", f"s{c.q_len}/{c.kv_len}",
            f"d{c.head_dim}/{c.value_dim}", "causal" if c.causal else "full", c.backend, *marks,
        ])  # fmt: skip

    @property
    def backend(self) -> str:
        return self.case.backend

    @property
    def limit(self) -> float:
        return FLEX_SECONDS if self.backend == "flex" else Task.limit

    @property
    def needs(self) -> tuple[str, ...]:
        if self.backend != "triton":
            return ()
        forward = "forward" + "_two_sets" * self.two_sets + "_hopper" * self.hopper
        if self.case.direction == "forward":
            return (forward,)
        if self.stored:
            return (forward, check_of_stored(self.hopper, self.case.head_dim))
        return (forward, *(kernel + "_hopper" * self.hopper for kernel in ("backward_kv", "backward_q")))

    @property
    def compiles(self) -> Any:
        shared = self.case.direction, self.case.dtype, self.case.head_dim, self.hopper, self.stored, self.two_sets
        return shared if self.backend == "triton" else None


@dataclass(frozen=True)
class Trial(Task):
    """One kernel with one tile (queries, keys, warps, stages; None: the shipped tile) on a causal bfloat16 problem."""

    kernel: str  # the kernel: a key of SWEEP
    shape: tuple[int, int, int, int]  # B, H, S, D
    tile: tuple[int, int, int, int] | None = None
    backend = "triton"
    limit = 45.0

    @property
    def key(self) -> str:
        tile = "x".join(map(str, self.tile)) if self.tile else "shipped"
        return f"trial {self.kernel} d{self.shape[-1]} s{self.shape[2]} {tile}"

    compiles = key

    @property
    def hopper(self) -> bool:
        return self.kernel.endswith("_hopper")

    @property
    def name(self) -> str:
        """Return the field of `Config` that has this kernel's tile."""
        return self.kernel.removesuffix("_hopper")

    @property
    def stored(self) -> bool:
        """Return whether the kernel stores dS or reads it."""
        return self.name.endswith(("_storing", "_stored"))

    @property
    def needs(self) -> tuple[str, ...]:
        return (check_of_stored(self.hopper, self.shape[-1]) if self.stored else self.kernel,)


@dataclass(frozen=True)
class Decode(Task):
    """Time one query per sequence over all its keys, in pages of `page` keys; 0: the keys are contiguous."""

    backend: str
    batch: int
    q_heads: int
    kv_heads: int
    kv_len: int
    head_dim: int
    page: int = 0

    @property
    def key(self) -> str:
        shape = f"b{self.batch} h{self.q_heads}/{self.kv_heads} s{self.kv_len} d{self.head_dim}"
        return f"decode {shape} {f'page{self.page}' if self.page else 'whole'} {self.backend}"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("forward", "merge") if self.ours else ()

    @property
    def compiles(self) -> Any:
        return ("decode", self.head_dim, bool(self.page)) if self.ours else None


class Group(NamedTuple):
    """Tasks of a stage. `apart`: each task runs in its own process, in parallel, because none is timed."""

    tasks: Sequence[Task]
    apart: bool = False


class Suite(NamedTuple):
    """Tests that run on the device: files of tests/kernels, and environment variables of their processes.

    `select` is an expression for pytest's -k. `seconds` is the time limit of one test, with its compilations.
    """

    name: str
    patterns: tuple[str, ...]
    environment: dict[str, str]
    select: str = ""
    seconds: int = 120


# The files of tests/kernels that run on FLASHPOINT_TEST_DEVICE; they import only torch, triton, numpy and pytest.
TRITON_TESTS = (
    "test_triton_*.py", "test_nano.py", "problems/test_dropout.py", "problems/test_readings.py",
    *(f"triton_backend/host/test_{name}.py" for name in ("grouped", "launch", "route", "sharing")),
    *(f"triton_backend/kernels/test_{name}.py" for name in ("backward", "cascade", "forward", "stored", "tiles")),
    "triton_backend/kernels/test_backward_inputs.py",
    "triton_backend/hopper/test_*.py",
)  # fmt: skip
BACKENDS_TESTS = (
    *(f"test_{name}.py" for name in ("edges", "extremes", "backends", "functional", "verification")),
    *(f"judging/{name}.py" for name in ("test_captured", "exact/test_bounds")),
    "operators/test_ops.py", "torch_backend/test_fused.py",
)  # fmt: skip
SERVING_TESTS = (
    *(f"test_{name}.py" for name in ("wide_heads", "quantization", "pages", "block_masks")),
    "triton_backend/kernels/test_blocks.py",
)
# An expression for pytest's -k that selects the serving tests that run kernels. The others check refusals, costs and
# functions that make masks.
KERNELS_OF_SERVING = (
    "(answers or 8_bit_keys or first_columns or each_form or every_pair or one_head or stand_for or among_others or "
    "not_read or without_a_block or neighbours or those_of_the_keys or share_a_call or runs_again or no_page) "
    "and not in_tiles"
)
_HOPPER_FIRST = ("test_triton_hopper.py", *TRITON_TESTS)
_CONSAN = {"FLASHPOINT_HOPPER": "1", "TRITON_INSTRUMENTATION_MODE": "consan"}
# The suites of each stage. Suites whose names begin with "hopper" run only on sm_90.
SUITES = {
    "tests": (
        Suite("hopper", _HOPPER_FIRST, {"FLASHPOINT_HOPPER": "1"}),
        Suite("general", TRITON_TESTS, {"FLASHPOINT_HOPPER": "0"}),
        Suite("serving", SERVING_TESTS, {"FLASHPOINT_HOPPER": "0"}, KERNELS_OF_SERVING),
        Suite("backends", BACKENDS_TESTS, {"FLASHPOINT_HOPPER": "0"}),
    ),
    # Run the judge of `flashpoint verify` on our kernels, on torch's, and on those of other installed packages.
    "judge": (
        Suite("judge", ("test_judged.py",), {"FLASHPOINT_HOPPER": "0"}, seconds=300),
        Suite("judge_hopper", ("test_judged.py",), {"FLASHPOINT_HOPPER": "1"}, "ours or our_kernels", seconds=300),
    ),
    # The long limit is for compilation: at D 64, the instrumented kernels compile for 46 s (forward), and for 60 s and
    # 22 s (gradients).
    "races": tuple(
        Suite(f"hopper_races_{direction}", ("test_hopper_races.py",), _CONSAN, direction, seconds=300)
        for direction in PASSES
    ),
}


def first(sizes: Sizes, arch: int) -> list[Group]:
    """Return the tasks that time forward, then backward, of our kernels and three SDPA backends of torch.

    They use the first head dimension and two lengths.
    """
    peers = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
    return [Group([task for point in _first_points(sizes) for task in _beside(sizes, arch, peers, *point)])]


def sweep(sizes: Sizes, arch: int) -> list[Group]:
    """Return a group for each kernel and head dimension; its first task has the shipped tile, the reference."""
    groups = []
    for dim, kernel in product(sizes.dims, SWEEP):
        of_hopper = kernel.endswith("_hopper")
        if not _has(arch, kernel, dim):
            continue
        shape = (max(sizes.tokens // sizes.sweep, 1), max(sizes.width // dim, 1), sizes.sweep, dim)
        warps, stages = ((4,), (2, 3, 4)) if of_hopper else ((4, 8), (1, 2, 3))
        every = [(m, n, w, s) for (m, n), w, s in product(SWEEP[kernel], warps, stages)]
        tiles = dict.fromkeys([None, *EAGER.get((kernel, dim), ()), *every])
        groups.append(Group([Trial(kernel, shape, tile) for tile in tiles]))
    return groups


def table(sizes: Sizes, arch: int) -> list[Group]:
    """Return tasks for all head dimensions and lengths, causal or not, forward and backward.

    Only the first head dimension is also timed with grouped heads.
    """
    points = [
        (direction, dim, causal, group, seq)
        for dim, direction, causal, group, seq in product(sizes.dims, PASSES, (False, True), (1, 8), sizes.seqs)
        if (group == 1 or dim == sizes.dims[0]) and sizes.width // dim >= group
    ]
    tasks = [task for point in points for task in _beside(sizes, arch, DECISIVE, *point)]
    tasks += [
        Timed(_case(sizes, name, *point))
        for name, point in product(OTHERS, points)
        if name != "sdpa_math" or point[-1] <= sizes.math
    ]
    return [Group(tasks)]


def papers(sizes: Sizes, arch: int) -> list[Group]:
    """Return tasks for the tables of the FlashAttention papers. Our kernels run by each of their paths."""
    return [Group([task for case in sizes.papers() for task in _paths(case, arch)])]


def decode(sizes: Sizes, _arch: int) -> list[Group]:
    tasks = []
    for (batch, keys), (heads, kv_heads) in product(sizes.decode, sizes.decode_heads):
        shape = (batch, heads, kv_heads, keys, sizes.dims[0])
        tasks += [Decode(name, *shape) for name in DECODERS]
        tasks += [Decode(name, *shape, page) for page, name in product(sizes.pages, PAGED)]
    return [Group(tasks)]


def flex(sizes: Sizes, _arch: int) -> list[Group]:
    """Return tasks that time FlexAttention at the eight points of the stage `first`. It compiles for each point."""
    return [Group([Timed(_case(sizes, "flex", *point)) for point in _first_points(sizes)])]


# The stages that contain timings, by name; SUITES has the other stages.
TIMED_STAGES: dict[str, Callable[[Sizes, int], list[Group]]] = {
    stage.__name__: stage for stage in (first, sweep, table, papers, decode, flex)
}
STAGES = ("first", "tests", "judge", "races", "sweep", "table", "papers", "decode", "flex")  # stages run in this order


def groups(stage: str, sizes: Sizes, environment: dict[str, Any]) -> list[Group]:
    """Return the groups of tasks of a stage for the device that `environment` describes."""
    arch = int(environment["capability"].replace(".", ""))
    timed = [Group(_without(group.tasks, environment["absent"])) for group in TIMED_STAGES[stage](sizes, arch)]
    if stage != "first":
        return timed
    checks = [Smoke(name) for name in environment["checks"] if arch == 90 or not name.endswith("_hopper")]
    return [Group(checks, apart=True), *timed]


def parameters(task: Task) -> dict[str, Any]:
    """Return a task as plain data, the row's `task`."""
    return {"kind": type(task).__name__.lower(), **asdict(task)}


def _first_points(sizes: Sizes) -> Iterable[tuple[CaseDirection, int, bool, int, int]]:
    return product(PASSES, sizes.dims[:1], (False, True), (1,), sizes.first)


def _case(sizes: Sizes, backend: str, direction: CaseDirection, dim: int, causal: bool, group: int, seq: int) -> Case:
    heads = max(sizes.width // dim, 1)
    return Case(
        backend=backend, batch=max(sizes.tokens // seq, 1), q_heads=heads, kv_heads=max(heads // group, 1), q_len=seq,
        head_dim=dim, causal=causal, direction=direction,
    )  # fmt: skip


def _beside(sizes: Sizes, arch: int, peers: Sequence[str], direction: CaseDirection, *point: Any) -> list[Timed]:
    """Return tasks for our kernels and `peers` at `point` (head dimension, causal, group, length).

    For gradients, also return one for SDPA's flash backend in torch's deterministic mode.
    """
    tasks = [task for name in ("triton", *peers) for task in _paths(_case(sizes, name, direction, *point), arch)]
    if direction == "backward":
        tasks.append(Timed(_case(sizes, "sdpa_flash", direction, *point), deterministic=True))
    return tasks


def _paths(case: Case, arch: int) -> list[Timed]:
    """Return a task for the case and, if it is ours, one for each further path of our kernels that supports it."""
    paths = [Timed(case)]
    if case.backend != "triton" or case.dtype == "float32":
        return paths
    forward = case.direction == "forward"
    if arch == 90 and (forward or case.head_dim <= WIDEST_HOPPER_BACKWARD):
        paths.append(Timed(case, hopper=True))
    if forward and arch == 90:
        paths.append(Timed(case, hopper=True, two_sets=True))
    if not forward and arch == 90 and case.head_dim <= max(HOPPER):
        paths.append(Timed(case, hopper=True, stored=True))
    if not forward and case.head_dim in STORED.get(arch, {}):
        paths.append(Timed(case, stored=True))
    return paths


def _has(arch: int, kernel: str, dim: int) -> bool:
    """Return whether sm_`arch` has the kernel of a sweep for a head dimension."""
    if not kernel.endswith("_hopper"):
        return not kernel.endswith(("_storing", "_stored")) or dim in STORED.get(arch, {})
    name = kernel.removesuffix("_hopper")
    return arch == 90 and name in HOPPER[min(of for of in HOPPER if dim <= of)]


def _without(tasks: Iterable[Task], absent: Collection[str]) -> list[Task]:
    """Remove tasks of absent packages, except one for each package, whose row records that the package is absent."""
    represented: set[str] = set()
    remaining = []
    for task in tasks:
        if task.backend not in represented:
            remaining.append(task)
        if task.backend in absent:
            represented.add(task.backend)
    return remaining
