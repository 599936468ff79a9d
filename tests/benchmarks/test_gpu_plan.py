"""The plan of `make gpu` has the right tasks in each stage, in the right order."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.gpu_day import plan, suites
from benchmarks.gpu_day.plan import Decode, Sizes, Timed, Trial
from flashpoint_kernels.timing.case import Case

SIZES = Sizes()
HERE = {"capability": "9.0", "absent": [], "checks": ["forward", "forward_hopper"]}
ELSEWHERE = HERE | {"capability": "8.0"}


def tasks(stage: str, environment: dict[str, Any] = HERE) -> list[Any]:
    return [task for group in plan.groups(stage, SIZES, environment) for task in group.tasks]


@pytest.mark.parametrize("environment", [HERE, ELSEWHERE], ids=["hopper", "ampere"])
@pytest.mark.parametrize("stage", plan.TIMED_STAGES)
def test_a_stage_plans_each_row_once(stage: str, environment: dict[str, Any]) -> None:
    keys = Counter(task.key for task in tasks(stage, environment))
    assert set(keys.values()) == {1}
    assert all("hopper" not in key for key in keys) or environment is HERE


def test_the_first_stage_has_smoke_tests_then_what_matters_most() -> None:
    smoke, timed = plan.groups("first", SIZES, HERE)
    assert smoke.apart
    assert not timed.apart
    assert [task.key for task in smoke.tasks] == ["smoke forward", "smoke forward_hopper"]
    cases = [task.case for task in timed.tasks]
    assert {(c.dtype, c.head_dim, c.q_len) for c in cases} == {("bfloat16", 128, 4096), ("bfloat16", 128, 16384)}
    points = list(dict.fromkeys((c.direction, c.causal, c.q_len) for c in cases))
    assert points == [(d, c, n) for d in ("forward", "backward") for c in (False, True) for n in (4096, 16384)]
    beside = [report_name(task) for task in timed.tasks if (task.case.direction, task.case.q_len) == ("backward", 4096)]
    forward = [report_name(task) for task in timed.tasks if (task.case.direction, task.case.q_len) == ("forward", 4096)]
    assert forward[:3] == ["triton", "triton hopper", "triton hopper two_sets"]
    assert beside[:8] == [
        "triton", "triton hopper", "triton hopper stored", "triton stored", "sdpa_cudnn", "sdpa_flash",
        "sdpa_efficient", "sdpa_flash deterministic",
    ]  # fmt: skip


def report_name(task: Timed) -> str:
    marks = [name for name in ("deterministic", "hopper", "stored", "two_sets") if getattr(task, name)]
    return " ".join([task.case.backend, *marks])


def test_the_table_has_every_point_and_fits_a_gpu() -> None:
    cases = [task.case for task in tasks("table")]
    ours = {c for c in cases if c.backend == "triton"}
    points = {(c.direction, c.head_dim, c.causal, c.q_len, c.kv_heads < c.q_heads) for c in ours}
    assert len(points) == 2 * 2 * 6 * (3 + 1)
    for case in cases:
        assert case.batch * case.q_len == SIZES.tokens
        assert case.q_heads * case.head_dim == SIZES.width
        scores = 2 * case.batch * case.q_heads * case.q_len * case.kv_len
        assert case.backend != "sdpa_math" or scores <= 8 << 30
    first = {task.key for group in plan.groups("first", SIZES, HERE)[1:] for task in group.tasks}
    assert first <= {task.key for task in tasks("table")}, "no point of the first stage is measured twice"


def test_the_path_of_hopper_is_timed_where_it_has_kernels() -> None:
    timed = [task for stage in ("table", "papers") for task in tasks(stage) if task.hopper]
    assert {(t.case.direction, t.case.head_dim) for t in timed} >= {("forward", 256), ("backward", 128)}
    assert all(t.case.head_dim <= 128 or t.case.direction == "forward" or t.stored for t in timed)
    assert all(t.case.backend == "triton" and t.case.dtype != "float32" for t in timed)


@pytest.mark.parametrize(
    ("capability", "dims", "of_hopper"),
    [("9.0", {64, 128, 256}, {64, 128, 256}), ("8.0", {64, 128, 256}, set()), ("8.9", {256}, set())],
)
def test_gradients_with_stored_ds_are_timed_and_swept_where_they_have_kernels(
    capability: str, dims: set[int], of_hopper: set[int]
) -> None:
    environment = HERE | {"capability": capability}
    timed = [task for task in tasks("table", environment) if task.stored]
    assert {t.case.direction for t in timed} == {"backward"}
    assert {t.case.head_dim for t in timed if not t.hopper} == dims
    assert {t.case.head_dim for t in timed if t.hopper} == of_hopper
    swept = {(t.kernel, t.shape[-1]) for t in tasks("sweep", environment)}
    for name in ("backward_kv_storing", "backward_q_stored"):
        assert {dim for kernel, dim in swept if kernel == name} == dims
    assert {dim for kernel, dim in swept if kernel == "backward_q_stored_hopper"} == of_hopper
    assert {dim for kernel, dim in swept if kernel == "backward_v_storing_hopper"} == of_hopper & {256}


def test_the_sweep_tries_two_programs_a_multiprocessor_and_large_blocks_of_keys() -> None:
    trials = [task for task in tasks("sweep") if isinstance(task, Trial)]
    tiles = {(t.kernel, t.shape[-1], t.tile) for t in trials}
    assert ("forward", 64, (128, 64, 4, 3)) in tiles
    assert ("forward", 128, (64, 64, 4, 3)) in tiles
    assert ("backward_kv", 128, (64, 128, 8, 2)) in tiles
    assert ("backward_kv_hopper", 128, (64, 128, 4, 2)) in tiles
    assert not any(kernel in ("backward_kv_hopper", "backward_q_hopper") and d > 128 for kernel, d, _ in tiles)
    for group in plan.groups("sweep", SIZES, HERE):
        assert group.tasks[0].tile is None, "the shipped tile comes first, as the reference for the others"


def test_the_papers_tables_have_their_shapes() -> None:
    cases = [task.case for task in tasks("papers")]
    shapes = {(c.batch, c.q_heads, c.q_len, c.head_dim, c.dtype) for c in cases}
    assert (1, 8, 2048, 64, "float16") in shapes
    assert {(4, 8, n, 64, "bfloat16") for n in (128, 256, 512, 1024, 2048, 4096)} <= shapes
    assert {"naive", "triton", "sdpa_flash"} <= {c.backend for c in cases}


def test_flex_is_timed_at_eight_points_alone() -> None:
    assert len(tasks("flex")) == 8
    assert not any(t.case.backend == "flex" for stage in ("first", "table", "papers") for t in tasks(stage)[2:])


def test_a_package_that_is_absent_has_one_row_which_says_so() -> None:
    absent = HERE | {"absent": ["flash_attn", "flashinfer"]}
    for stage in ("table", "decode"):
        backends = Counter(t.case.backend if isinstance(t, Timed) else t.backend for t in tasks(stage, absent))
        assert backends["flash_attn"] == backends["flashinfer"] == 1
        assert backends["flash_attn_3"] > 1


def test_a_time_needs_the_smoke_tests_of_its_kernels() -> None:
    case = Case(backend="triton", batch=1, q_heads=1, q_len=8, head_dim=8, direction="backward")
    assert Timed(case).needs == ("forward", "backward_kv", "backward_q")
    assert Timed(case, hopper=True).needs == ("forward_hopper", "backward_kv_hopper", "backward_q_hopper")
    assert Timed(Case(backend="sdpa_flash", batch=1, q_heads=1, q_len=8, head_dim=8)).needs == ()
    assert Timed(case, stored=True).needs == ("forward", "backward_stored")
    assert Timed(case, hopper=True, stored=True).needs == ("forward_hopper", "backward_stored_hopper")
    two_sets = Timed(replace(case, direction="forward"), hopper=True, two_sets=True)
    assert two_sets.needs == ("forward_two_sets_hopper",)
    assert two_sets.compiles != Timed(two_sets.case, hopper=True).compiles
    assert Trial("backward_q_hopper", (1, 1, 8, 8)).needs == ("backward_q_hopper",)
    assert Trial("backward_q_stored", (1, 1, 8, 8)).needs == ("backward_stored",)
    assert Trial("backward_k_stored_hopper", (1, 1, 8, 256)).needs == ("backward_wide_hopper",)
    assert Decode("triton", 1, 1, 1, 8, 8).needs == ("forward", "merge")


def test_tests_of_the_path_for_hopper_run_first_and_under_the_race_detector() -> None:
    hopper, general, serving, backends = plan.SUITES["tests"]
    files = suites.files(hopper)
    assert files[0] == "tests/kernels/test_triton_hopper.py"
    assert files.count(files[0]) == 1
    assert set(files) == set(suites.files(general))
    assert {"test_triton_device.py", "test_nano.py"} < {name.rpartition("/")[2] for name in files}
    assert (hopper.environment["FLASHPOINT_HOPPER"], general.environment["FLASHPOINT_HOPPER"]) == ("1", "0")
    assert len(suites.files(backends)) == len(plan.BACKENDS_TESTS)
    assert len(suites.files(serving)) == len(plan.SERVING_TESTS)
    for judge, hopper_path in zip(plan.SUITES["judge"], ("0", "1"), strict=True):
        assert suites.files(judge) == ["tests/kernels/test_judged.py"]
        assert (judge.environment["FLASHPOINT_HOPPER"], judge.seconds) == (hopper_path, 300)
    for direction, races in zip(plan.PASSES, plan.SUITES["races"], strict=True):
        assert races.environment["TRITON_INSTRUMENTATION_MODE"] == "consan"
        assert suites.files(races) == ["tests/kernels/test_hopper_races.py"]
        assert (races.select, races.seconds) == (direction, 300)  # seconds; one compilation takes over 60 s
