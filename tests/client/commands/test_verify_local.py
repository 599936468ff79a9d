"""`flashpoint verify` without a server: it judges random problems, and problems from files, on this machine."""

import json

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")
import flashpoint
from flashpoint_contract import wire

GRID = ("--q-len", "64", "--head-dim", "16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("benchmark", *GRID, "--backend", "nope"), "'nope' is not one of naive"),
        (("verify", "--q-len", "8", "--head-dim", "600", "--backend", "tiled"), "head dimension above 576"),
        (("verify", "--q-len", "8", "--head-dim", "4", "--extras", "bool_mask,float_mask"), "one mask"),
        (("verify", "--q-len", "8", "--head-dim", "4", "--window", "1"), "window"),
    ],
)
def test_what_the_kernels_refuse_ends_with_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def saved(path, tensors, options):
    head = wire.build_head([(name, t.dtype.name, t.shape) for name, t in tensors.items()], wire.encode_options(options))
    path.write_bytes(head + b"".join(t.tobytes() for t in tensors.values()))
    return path


def problem(dtype):
    """Return q, k, v and their causal attention, computed in float64."""
    q, k, v = (t.astype(dtype).astype(np.float64) for t in np.random.default_rng(0).standard_normal((3, 2, 9, 16)))
    s = np.where(np.tri(9, dtype=bool), q @ k.swapaxes(-1, -2) / 4, -np.inf)
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    return {name: t.astype(dtype) for name, t in (("q", q), ("k", k), ("v", v), ("o", p @ v))}


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(ml_dtypes.bfloat16, marks=pytest.mark.slow)])
def test_a_kernel_of_the_callers_own_is_judged_from_a_file(run, tmp_path, dtype):
    tensors = problem(dtype)
    code, out, _ = run("verify", saved(tmp_path / "right", tensors, {"causal": True, "format": "pt"}))
    assert (code, "given" in out, "lse" in out) == (0, True, False)
    assert "judged: the file's own o\n" in out
    tensors["o"][1, 4, 7] += 0.25
    wrong = saved(tmp_path / "wrong", tensors, {"causal": True})
    code, out, _ = run("verify", wrong, "--json", tmp_path / "report.json", "--plot", tmp_path / "errors.svg")
    assert code == 1
    assert "1,4,7" in out
    report = flashpoint.VerifyReport.model_validate_json((tmp_path / "report.json").read_text())
    assert (report.backend, report.ok, report.tensors[0].worst_index) == ("given", False, (1, 4, 7))
    assert run("verify", wrong, "--no-causal")[0] == 1  # a flag overrides the file


def test_a_files_inputs_alone_are_run_on_a_backend(run, tmp_path):
    tensors = problem(np.float32)
    del tensors["o"]
    code, out, _ = run("verify", saved(tmp_path / "inputs", tensors, {}), "--backend", "tiled")
    assert (code, "tiled" in out, "lse" in out) == (0, True, True)
    assert "judged: backend tiled, for the file has no answers\n" in out


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("out", "did you mean o?"),
        ("O", "did you mean o?"),
        ("grad_query", "did you mean dq?"),
        ("attn_maks", "did you mean attn_mask?"),
        ("mine", "known are q, k, v, attn_mask,"),
    ],
)
def test_a_tensor_of_the_file_that_has_an_unknown_name_is_refused(run, tmp_path, name, hint):
    tensors = problem(np.float32)
    tensors[name] = tensors.pop("o")
    code, out, err = run("verify", saved(tmp_path / "mine", tensors, {}))
    assert (code, out) == (2, "")
    assert err.startswith(f"flashpoint verify: {name}: unknown tensor; {hint}")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("verify", "--q-len", "8", "--head-dim", "16", "--backend", "tiled"), "PASS"),
        (("verify", "--kernel", "torch.nn.functional:scaled_dot_product_attention", "--case", "{}"), "PASS: right"),
        (("benchmark", "--q-len", "8", "--head-dim", "16", "--backend", "naive", "--max-seconds", "0.01"), "naive"),
        (("info",), "tiled"),
    ],
)
def test_a_result_is_shown_before_its_file_cannot_be_written(run, command, shown):
    if "--case" in command:
        command = (*command[:-1], json.dumps({"q_len": 9, "kv_len": 9, "seed": 1, "values": "normal"}))
    code, out, err = run(*command, "--json", "/dev/full")
    assert (code, shown in out) == (1, True), out
    assert err.endswith(f"flashpoint {command[0]}: --json: /dev/full cannot be written: no space left on device\n")


@pytest.mark.parametrize("body", [b"", b"nonsense", b"\x08\0\0\0\0\0\0\0{}      ", b"\x02\0\0\0\0\0\0\0{}more"])
def test_a_file_that_is_no_problem_is_refused(run, tmp_path, body):
    (tmp_path / "file").write_bytes(body)
    code, out, err = run("verify", tmp_path / "file")
    assert (code, out) == (2, "")
    assert err.startswith("flashpoint verify: file: ")


def test_a_text_is_no_safetensors_file_and_is_told_so(run, tmp_path):
    (tmp_path / "README.md").write_text("# Flashpoint\n\nFlash attention")
    code, _, err = run("verify", tmp_path / "README.md")
    assert code == 2
    assert err.endswith(
        "is over the limit of 1048576: is this a safetensors file? its first 8 bytes are its head's length\n"
    )


def test_sizes_are_not_taken_beside_a_file(run, tmp_path):
    code, _, err = run("verify", saved(tmp_path / "f", problem(np.float32), {}), "--q-len", "9")
    assert (code, err) == (2, "flashpoint verify: shape: cannot be combined with tensors\n")


@pytest.mark.parametrize(
    ("flags", "judged"),
    [
        (("--dtype", "float64", "--backend", "reference"), ["o", "lse", "dq", "dk", "dv"]),
        (("--layout", "thd", "--batch", "2"), ["o", "lse", "dq", "dk", "dv"]),
        (("--layout", "bshd", "--direction", "backward", "--grads", "dk"), ["dk"]),
        (("--direction", "forward", "--dropout-p", "0.5", "--q-heads", "4", "--kv-heads", "2"), ["o", "lse"]),
        (
            ("--extras", "float_mask,sinks,alibi_slopes", "--grads", "dq,dattn_mask,dsinks"),
            ["o", "lse", "dq", "dattn_mask", "dsinks"],
        ),
        (("--extras", "bool_mask,q_lengths,kv_lengths", "--batch", "3"), ["o", "lse", "dq", "dk", "dv"]),
    ],
)
def test_a_problem_is_drawn_and_judged_here(run, tmp_path, flags, judged):
    shape = ("--q-len", "24", "--kv-len", "31", "--head-dim", "8", "--value-dim", "12", "--backend", "tiled")
    code, out, _ = run("verify", *shape, *flags, "--seed", "5", "--json", tmp_path / "report.json")
    report = flashpoint.VerifyReport.model_validate_json((tmp_path / "report.json").read_text())
    assert (code, report.ok, [t.name for t in report.tensors]) == (0, True, judged), out
    assert (report.seed, report.backend) == (5, "reference" if "float64" in flags else "tiled")
    run("verify", *shape, *flags, "--seed", "5", "--json", tmp_path / "again.json")
    again = flashpoint.VerifyReport.model_validate_json((tmp_path / "again.json").read_text())
    if "--dropout-p" not in flags:  # with dropout, each run draws a new `dropout_seed`
        assert again.tensors == report.tensors
