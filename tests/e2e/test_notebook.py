"""examples/attention.ipynb runs from its first cell to the served call, and prints its stored outputs."""

import json
import os

import pytest

pytest.importorskip("matplotlib")
import torch

from tests.support.programs import load


@pytest.fixture(scope="module")
def runner():
    return load("docs/run_notebook.py")


def outputs(notebook):
    return [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_it_runs_to_the_served_call_and_prints_what_it_did(runner, server, monkeypatch):
    monkeypatch.setitem(os.environ, "FLASHPOINT_URL", "")  # the run overwrites it; monkeypatch restores it
    stored = json.loads(runner.NOTEBOOK.read_text(encoding="utf-8"))
    random = torch.random.get_rng_state()
    executed = runner.executed(stored, server.url)
    torch.random.set_rng_state(random)
    for before, after in zip(outputs(stored), outputs(executed), strict=True):
        assert [out["output_type"] for out in before] == [out["output_type"] for out in after]
        assert [out.get("text") for out in before] == [out.get("text") for out in after]
    assert "NOT THE SAME" not in json.dumps(outputs(executed))
    assert sum(out["output_type"] == "display_data" for cell in outputs(executed) for out in cell) == 1
    assert "o: within 1e-5 and lse: within 1e-5\n" in outputs(executed)[-2][0]["text"]


def test_without_a_server_it_says_how_to_start_one(runner, monkeypatch):
    monkeypatch.setitem(os.environ, "FLASHPOINT_URL", "")
    random = torch.random.get_rng_state()
    executed = runner.executed(json.loads(runner.NOTEBOOK.read_text(encoding="utf-8")), "http://127.0.0.1:9")
    torch.random.set_rng_state(random)
    *_, call, operation = (cell[0]["text"] for cell in outputs(executed) if cell)
    assert call == [
        "No server answers at http://127.0.0.1:9: run make serve in another terminal, and then this cell again.\n"
    ]
    assert operation == ["This cell needs the served call above.\n"]


def test_the_kernel_has_no_marks_for_linters(runner):
    notebook = json.loads(runner.NOTEBOOK.read_text(encoding="utf-8"))
    shown = json.dumps(outputs(notebook))
    assert "@triton.jit" in shown
    assert "noqa" not in shown
    assert "fmt:" not in shown


def test_jupyter_can_open_it(runner):
    notebook = json.loads(runner.NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert {cell["cell_type"] for cell in notebook["cells"]} == {"markdown", "code"}
    assert not any(line.startswith(("%", "!")) for cell in notebook["cells"] for line in cell["source"])
