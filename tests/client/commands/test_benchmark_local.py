"""Without a server, `flashpoint benchmark` times kernels and the caller's function; `info` describes this machine."""

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import flashpoint

GRID = ("--q-len", "64", "--head-dim", "16")


def test_a_benchmark_here_times_real_kernels(run, tmp_path):
    code, out, _ = run(
        "benchmark", *GRID, "--backend", "naive,tiled,cpu", "--max-seconds", "0.05", "--warmup-ms", "0",
        "--direction", "forward,backward", "--json", tmp_path / "all.json",
    )  # fmt: skip
    assert code == 0
    assert out.count("tiled") == out.count("cpu") == 2
    job = flashpoint.BenchmarkJob.model_validate_json((tmp_path / "all.json").read_text())
    assert (job.state, job.done, job.total) == ("done", 6, 6)
    assert all(row.ms > 0 and row.repeats >= 3 and row.roofline_percent > 0 for row in job.rows)
    assert job.environment["peaks"]["float32"]["tflops"] > 0


def test_this_machine_is_described(run):
    code, out, _ = run("info")
    assert code == 0
    assert "cpu" in out
    assert "alibi_slopes" in out


SMALL = ("--q-len", "20", "--head-dim", "16")
TIMED = ("--max-seconds", "0.01", "--warmup-ms", "0")


def timed(run, tmp_path, kernel, *flags):
    """Time a function of `my_kernels`; return (exit code, stdout, stderr, the rows of this function)."""
    flags = (*SMALL, *TIMED, *flags, "--backend", "naive", "--json", tmp_path / "rows.json")
    code, out, err = run("benchmark", "--kernel", f"my_kernels:{kernel}", *flags)
    job = flashpoint.BenchmarkJob.model_validate_json((tmp_path / "rows.json").read_text())
    assert job.environment["kernel"] == f"my_kernels:{kernel}"  # plots use this name for the backend "kernel"
    rows = job.rows
    assert {row.backend for row in rows} == {"naive", "kernel"}
    return code, out, err, [row for row in rows if row.backend == "kernel"]


def test_a_function_is_timed_beside_the_backends(run, kernels, tmp_path):
    flags = ("--direction", "forward,backward", "--causal", "both", "--q-heads", "4", "--kv-heads", "2")
    code, out, err, rows = timed(run, tmp_path, "plain", *flags)
    assert code == 0, err
    assert len(rows) == 4
    assert all(row.ms > 0 and row.speedup_over_naive > 0 and row.skipped is None for row in rows)
    assert "plain is my_kernels:plain; `flashpoint verify --kernel my_kernels:plain` judges it in all cases" in out
    lines = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert (lines.count("plain"), lines.count("kernel")) == (5, 0)  # in four rows, and in the line asserted above
    assert "naive writes the matrix of scores, so its limit is low" in " ".join(out.split())


@pytest.mark.parametrize(
    ("kernel", "flags", "message"),
    [
        ("forward_alone", ("--direction", "backward"), "has no gradient: autograd finds none on its o"),
        ("constant", (), "not yet"),
        ("takes_no_mask", ("--causal", "yes"), "it has no parameter causal"),
        ("returns_q", ("--value-dim", "8"), "returned o of [1, 1, 20, 16], not [1, 1, 20, 8]"),
        ("returns_a_number", (), "returned int, not a tensor or a tuple that begins with one"),
        ("plain", ("--causal", "yes", "--kv-len", "24"), "its causal mask is aligned top left, and the lengths differ"),
    ],
)
def test_a_function_that_cannot_be_timed_says_why(run, kernels, tmp_path, kernel, flags, message):
    code, out, err, rows = timed(run, tmp_path, kernel, *flags)
    assert (code, [row.skipped for row in rows]) == (1, [message])
    assert f"{kernel} skipped: {message}" in " ".join(out.split())
    assert f"my_kernels:{kernel} ran no case; the table has the reasons" in err


def test_a_function_with_wrong_answers_has_no_figure_and_fails(run, kernels, tmp_path):
    code, _, err, rows = timed(run, tmp_path, "peeking", "--causal", "yes")
    assert (code, [row.ms for row in rows]) == (1, [None])
    assert rows[0].skipped.startswith("wrong: o of a timed call is ")
    assert "flashpoint benchmark: FAIL: my_kernels:peeking: wrong: o of a timed call is " in err
