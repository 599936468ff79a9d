"""`flashpoint benchmark` shows, writes and draws a benchmark of a server, and cancels it after Ctrl-C."""

import pytest

import flashpoint
from tests.support.verify_answers import EVENTS, JOB, ROW, says, streams

GRID = ("--q-len", "64", "--head-dim", "16")
MEASURED = ROW | {
    "ms": 1.25, "ms_p20": 1.0, "ms_p80": 2.0, "tflops": 0.5, "speedup_over_naive": 3.5, "peak_bytes": 2e6,
    "flops": 33_554_432, "bytes": 999_600, "roofline_percent": 407.0, "threads": 1, "busy": True,
    "peak_bytes_low": True, "ms_by_threads": {"1": 1.25, "2": 24.3}, "waited": 0.6,
}  # fmt: skip


def test_a_benchmark_of_a_server_is_shown_written_and_drawn(run, scripted, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHPOINT_API_KEY", "secret")
    events = [*EVENTS[:2], {"id": 3, "kind": "row", "done": 1, "total": 2, "row": MEASURED}, *EVENTS[3:]]
    scripted.script.extend([says(JOB, 202), says(JOB | {"rows": [MEASURED]}), streams(events)])
    code, out, err = run(
        "benchmark", *GRID, "--causal", "both", "--backend", "tiled,naive", "--url", scripted.url,
        "--json", tmp_path / "all.json", "--plot", tmp_path / "some.svg", "--kind", "all", "--theme", "dark",
    )  # fmt: skip
    assert (code, err.count("no picture of")) == (0, 2)
    assert "forward · float32 · B 1 H 2/1 N 128 D 64" in out
    assert "~*1.25  1.00 – 2.00        1      500" in out
    assert "<1.91 MiB" in out
    assert "* busy: other programs used the cores" in out
    assert "< memory below what the algorithm must hold" in out
    assert "33.6 M" in out
    assert "!407" in out
    assert "~ noisy: p20 and p80" in out
    assert "! above the measured roof" in out
    assert "tiled skipped: too large" in out
    assert err.startswith("1/2 forward · float32 · B 1 H 2/1 N 128 D 64 · tiled\n2/2 ")
    job = flashpoint.BenchmarkJob.model_validate_json((tmp_path / "all.json").read_text())
    assert [row.skipped for row in job.rows] == [None, "too large"]
    assert (job.rows[0].busy, job.rows[0].peak_bytes_low) == (True, True)
    assert job.rows[0].ms_by_threads == {"1": 1.25, "2": 24.3}
    pictures = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert pictures == ["some-memory.svg", "some-speedup.svg", "some-time.svg"]
    sent = flashpoint.BenchmarkRequest.model_validate_json(scripted.requests[0][3])
    assert (sent.causal, sent.backends, sent.shapes[0].q_len) == ((False, True), ("tiled", "naive"), 64)
    assert {headers["Authorization"] for _, _, headers, _ in scripted.requests} == {"Bearer secret"}


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_benchmark_that_did_not_end_well_ends_with_1(run, scripted, state):
    last = EVENTS[4] | {"state": state, "error": "no memory"}
    scripted.script.extend([says(JOB, 202), says(JOB), streams([*EVENTS[:3], last])])
    code, out, err = run("benchmark", *GRID, "--url", scripted.url)
    assert code == 1
    assert "N 128" in out
    assert f"no memory\nflashpoint benchmark: {state} after 1 of 2 cases" in err


def test_ctrl_c_cancels_at_the_server_and_keeps_what_there_is(run, scripted, monkeypatch):
    def interrupt(job, event):
        raise KeyboardInterrupt

    scripted.script.extend([says(JOB, 202), says(JOB), streams(EVENTS), says(JOB | {"state": "cancelled"})])
    from flashpoint.commands import benchmark

    monkeypatch.setattr(benchmark, "_progress", lambda: _Given(interrupt))
    assert run("benchmark", *GRID, "--url", scripted.url)[0] == 130
    assert scripted.requests[-1][:2] == ("DELETE", "/benchmark/j1")


class _Given:
    def __init__(self, value):
        self.value = value

    def __enter__(self):
        return self.value

    def __exit__(self, *_):
        return False
