"""The kernel judge's kit works: cases in files, a caller's functions, known mistakes, and the pytest fixture."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

import torch

import flashpoint
from flashpoint.cases import read_case
from flashpoint_contract.options import Options
from flashpoint_kernels import attention, verification

KERNELS = """
import torch

def plain(q, k, v, *, is_causal=False, softmax_scale=None):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=softmax_scale)

def peeking(q, k, v, causal=False):
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        seen = torch.ones_like(s, dtype=torch.bool).tril(1 + k.shape[2] - q.shape[2])
        s = s.masked_fill(~seen, float("-inf"))
    return s.softmax(-1) @ v

def takes_no_mask(q, k, v):
    return plain(q, k, v)

def returns_q(q, k, v):
    return q

def returns_a_number(q, k, v):
    return 3

def constant(q, k, v):
    raise NotImplementedError("not yet")

def forward_alone(q, k, v, *, is_causal=False):
    with torch.no_grad():
        return plain(q, k, v, is_causal=is_causal)

number = 3
"""
SMALL = ("--q-len", "20", "--head-dim", "16")


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    (tmp_path / "my_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_kernels", raising=False)
    return tmp_path


def test_a_case_is_saved_and_judged_with_its_options(run, tmp_path):
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    o, lse = attention(q, k, v, causal=True, scale=0.2, return_lse=True)
    path = flashpoint.save_case(tmp_path / "c.safetensors", q=q, k=k, v=v, o=o, lse=lse, causal=True, scale=0.2)
    tensors, options = read_case(path)
    assert options == {"causal": True, "scale": 0.2}
    assert np.array_equal(tensors["o"], o.numpy())
    code, out, _ = run("verify", path)
    assert code == 0
    assert "options: causal=true, scale=0.2; not given, so the default: layout=bhsd" in out
    assert out.endswith("PASS\n")


def test_a_default_that_is_named_is_saved_too(tmp_path):
    x = np.zeros((2, 4), np.float32)
    path = flashpoint.save_case(tmp_path / "c", q=x, k=x, v=x, causal=False, window=(-1, 3))
    assert read_case(path)[1] == {"causal": False, "window": [-1, 3]}


def test_an_unknown_name_of_a_case_gets_a_hint(tmp_path):
    x = np.zeros((2, 4), np.float32)
    with pytest.raises(
        flashpoint.InvalidInputError, match=r"is_causal: unknown option or tensor; did you mean causal\?"
    ):
        flashpoint.save_case(tmp_path / "c", q=x, k=x, v=x, is_causal=True)
    assert not (tmp_path / "c").exists()


def test_a_wrong_case_says_where_and_why(run, tmp_path):
    q, k, v = (torch.randn(2, 3, 20, 16) for _ in range(3))
    o, lse = attention(q, k, v, scale=1.0, return_lse=True)
    o = attention(q, k, v)
    o[1, 2, 7, 5] += 1
    path = flashpoint.save_case(tmp_path / "c", q=q, k=k, v=v, o=o, lse=lse)
    code, out, _ = run("verify", path)
    assert code == 1
    assert "o is off by 1.0e+00, over the bound of" in out
    assert "at batch 1, head 2, row 7, column 5: " in out
    assert "  wrong: 1 of 1920 elements; sequence 1 (the last) of 2; head 2 (the last) of 3; row 7 of 20" in out
    assert "cause: the scale is missing [scale-missing, confirmed]\n  hint: multiply q·k by the scale once" in out
    assert out.endswith("FAIL\n")


def test_lse_in_base_two_is_recognised():
    problem = tensors()
    _, lse = attention(**problem, return_lse=True)
    assert causes(problem, Options(), lse=lse / math.log(2)) == "lse-base-2: lse is in base 2"


def causes(tensors, options, **answers):
    """Return codes and texts of the causes of these wrong answers."""
    report = verification.verify(tensors, options, answers=answers)
    assert not report.ok
    return " | ".join(f"{cause.code}: {cause.text}" for cause in report.causes)


def tensors(q_heads=4, kv_heads=2, q_len=20, kv_len=28, dtype=torch.float32):
    sizes = ((q_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return {name: torch.randn(2, h, n, 16, dtype=dtype) for name, (h, n) in zip("qkv", sizes, strict=True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("requested", "applied", "message"),
    [
        ({"causal": True}, {"window": (-1, 1)}, "shifted by one: a query sees one key too many"),
        ({"causal": True}, {}, "the causal mask is missing"),
        ({}, {"causal": True}, "a causal mask is used, but not requested"),
        ({"causal": True}, {"causal": True, "causal_alignment": "top_left"}, "aligned to the other corner"),
        ({}, {"scale": 1.0}, "the scale is missing"),
        ({}, {"scale": 1 / 16}, "scale"),
        ({"scale": 0.7}, {"scale": 0.49}, "twice"),
        ({"scale": 0.7}, {}, "scale"),
        ({"softcap": 0.5}, {}, "the softcap is ignored"),
        ({"window": (4, 0)}, {"window": (5, 0)}, "window"),
        ({"window": (4, 0)}, {"window": (3, 0)}, "window"),
        ({"window": (4, 0)}, {"window": (-1, 0)}, "window"),
    ],
)
def test_an_option_that_was_mistaken_is_recognised(requested, applied, message, dtype):
    problem = tensors(dtype=dtype)
    assert message in causes(problem, Options(**requested), o=attention(**problem, **applied))


def test_a_query_that_does_not_see_its_own_key_is_recognised():
    problem = tensors()
    seen = torch.ones(20, 28, dtype=torch.bool).tril(7)
    texts = causes(problem, Options(causal=True), o=attention(**problem, attn_mask=seen))
    assert "a query does not see its own key" in texts


def test_heads_in_another_order_are_recognised():
    problem = tensors()
    right = attention(**problem)
    transposed = right.transpose(1, 2).contiguous().view(right.shape)
    assert "heads and rows are transposed in memory" in causes(problem, Options(), o=transposed)
    reordered = {**problem, **{name: problem[name][:, [0, 1, 0, 1]] for name in "kv"}}
    assert "h % " in causes(problem, Options(), o=attention(**reordered))


def test_what_was_done_to_a_mask_is_recognised():
    problem = tensors()
    mask = torch.rand(20, 28) < 0.6
    masked = problem | {"attn_mask": mask}
    assert "inverted" in causes(masked, Options(), o=attention(**problem, attn_mask=~mask))
    assert "attn_mask is ignored" in causes(masked, Options(), o=attention(**problem))
    slopes = problem | {"alibi_slopes": torch.rand(4)}
    negated = attention(**problem, alibi_slopes=-slopes["alibi_slopes"])
    assert "is added" in causes(slopes, Options(), o=negated)
    lengths = problem | {"kv_lengths": torch.tensor([28, 11])}
    assert causes(lengths, Options(), o=attention(**problem)) == "input-ignored: kv_lengths is ignored"


def test_a_gradient_without_its_scale_is_recognised_and_noise_is_not():
    problem = tensors()
    q = problem["q"].requires_grad_()
    do = torch.randn(2, 4, 20, 16)
    (dq,) = torch.autograd.grad(attention(**problem, scale=0.25), q, do)
    problem = {name: t.detach() for name, t in problem.items()} | {"do": do}
    assert "the scale is missing in dq" in causes(problem, Options(scale=0.25), dq=4 * dq)
    assert causes(problem, Options(), dq=torch.randn_like(dq)) == ""


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


@pytest.mark.parametrize("layout", ["sbhd", "shd"])
def test_a_layout_of_the_judge_alone_is_taken_with_a_function(run, kernels, layout):
    flags = (*SMALL, "--dtype", "float32", "--layout", layout)
    code, out, err = run("verify", "--kernel", "my_kernels:plain", *flags)
    assert (code, err) == (1, "")  # plain takes bhsd
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


TEST = """
from my_kernels import constant, peeking, plain

def test_plain(judge_attention):
    judge_attention(plain, {"q_len": 20, "head_dim": 16}, dtype="float32")

def test_peeking(judge_attention):
    judge_attention(peeking, {"q_len": 20, "head_dim": 16}, causal=True, direction="forward")

def test_constant(judge_attention):
    judge_attention(constant, {"q_len": 20, "head_dim": 16})
"""


TIMED = ("--max-seconds", "0.01", "--warmup-ms", "0")


def timed(run, tmp_path, kernel, *flags):
    """Return the exit code, both outputs, and the rows of the function and of the others."""
    flags = (*SMALL, *TIMED, *flags, "--backend", "naive", "--json", tmp_path / "rows.json")
    code, out, err = run("benchmark", "--kernel", f"my_kernels:{kernel}", *flags)
    job = flashpoint.BenchmarkJob.model_validate_json((tmp_path / "rows.json").read_text())
    assert job.environment["kernel"] == f"my_kernels:{kernel}"  # pictures name it
    rows = job.rows
    assert {row.backend for row in rows} == {"naive", "kernel"}
    return code, out, err, [row for row in rows if row.backend == "kernel"]


def test_a_function_is_timed_beside_the_backends(run, kernels, tmp_path):
    flags = ("--direction", "forward,backward", "--causal", "both", "--q-heads", "4", "--kv-heads", "2")
    code, out, err, rows = timed(run, tmp_path, "plain", *flags)
    assert code == 0, err
    assert len(rows) == 4
    assert all(row.ms > 0 and row.speedup_over_naive > 0 and row.skipped is None for row in rows)
    assert "plain is my_kernels:plain; `flashpoint verify --kernel my_kernels:plain` judges its answers" in out
    lines = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert (lines.count("plain"), lines.count("kernel")) == (5, 0)  # four rows, and the line above
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


@pytest.mark.slow
def test_the_fixture_fails_a_test_with_what_is_wrong(kernels):
    (kernels / "test_mine.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += ["-p", "no:schemathesis", "-p", "no:flashpoint", "-p", "flashpoint.pytest_plugin", "test_mine.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=kernels, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 1 passed" in done.stdout
    assert "the causal mask is shifted by one: a query sees one key too many" in done.stdout
    assert "no case could be judged" in done.stdout
