"""`flashpoint verify --kernel` judges the caller's function, and says if the module or function does not exist."""

import json

import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")


SMALL = ("--q-len", "20", "--head-dim", "16")


def test_a_wrong_function_fails_with_its_cause_and_a_case_to_repeat(run, kernels, tmp_path):
    files = ("--json", tmp_path / "all.json", "--save", tmp_path / "case.safetensors")
    code, out, _ = run("verify", "--kernel", "my_kernels:peeking", *SMALL, "--dtype", "float32", "--causal", *files)
    assert code == 1
    assert "the causal mask is shifted by one: a query sees one key too many [causal-by-one, confirmed" in out
    assert "repeat it: flashpoint verify --kernel my_kernels:peeking --case" in out
    report = json.loads((tmp_path / "all.json").read_text())
    assert (report["verdict"], report["causes"][0]["code"]) == ("wrong", "causal-by-one")
    assert run("verify", tmp_path / "case.safetensors")[0] == 1
    case = json.dumps(report["smallest"]["case"])
    assert run("verify", "--kernel", "my_kernels:peeking", "--case", case)[0] == 1


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("my_kernels", "must be MODULE:FUNCTION, not 'my_kernels'"),
        ("no_such:f", "there is no module no_such"),
        ("my_kernels:plan", "my_kernels has no plan; did you mean plain?"),
        ("my_kernels:number", "my_kernels:number must be a function, not int"),
    ],
)
def test_a_function_that_is_not_there_is_named(run, kernels, kernel, message):
    code, out, err = run("verify", "--kernel", kernel)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("layout", ["sbhd", pytest.param("shd", marks=pytest.mark.slow)])
def test_a_layout_of_the_judge_alone_is_taken_with_a_function(run, kernels, layout):
    flags = (*SMALL, "--dtype", "float32", "--layout", layout)
    code, out, err = run("verify", "--kernel", "my_kernels:plain", *flags)
    assert (code, err) == (1, "")  # the function `plain` expects bhsd
    assert f"my_kernels:plain · {layout} · " in out


def test_a_function_without_a_gradient_is_judged_by_its_forward_alone_and_says_so(run, kernels):
    code, out, _ = run("verify", "--kernel", "my_kernels:forward_alone", *SMALL, "--dtype", "float32")
    assert code == 0
    assert "hint: call your backward from a torch.autograd.Function" in out
    assert "PASS: right" in out


def test_a_function_that_does_nothing_yet_does_not_pass(run, kernels):
    code, out, _ = run("verify", "--kernel", "my_kernels:constant", *SMALL, "--dtype", "float32")
    assert (code, "not yet" in out) == (1, True)
    assert out.endswith("FAIL: not judged: no case could be judged\n")
