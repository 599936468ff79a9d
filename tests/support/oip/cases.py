"""Requests that real clients of the Open Inference Protocol send in tests.

Each client runs in a separate process, because one process cannot load two definitions of one protobuf package.
A client program reads `cases.json` and `tensors.npz` from a directory and writes `answers.npz` and `report.json` there.
"""

import json
import subprocess

import numpy as np
import torch

from tests.support.oip.message import DATATYPES
from tests.support.oip.problem import BOUNDS, GRAD, S, near, problem, truth

SINKS = torch.tensor([0.5, -1.0])
MASK = ((torch.arange(S)[:, None] + torch.arange(S)) % 3 > 0) | torch.eye(S, dtype=torch.bool)
FLOAT_MASK = torch.zeros(S, S).masked_fill(~MASK, -torch.inf)
TENSORS = {
    **{
        f"{name}.{datatype}": t
        for datatype in ("FP16", "BF16", "FP32")
        for name, t in problem(DATATYPES[datatype], GRAD).items()
    },
    "mask": MASK,
    "sinks": SINKS,
    "lengths": torch.tensor([S]),
    "offset": torch.tensor([2]),
    **{f"{n}.packed": t[0].transpose(0, 1).contiguous() for n, t in problem().items()},
    "starts": torch.tensor([0, S]),
}
OPTIONAL = {"attn_mask": ("mask", "BOOL"), "sinks": ("sinks", "FP32"), "kv_lengths": ("lengths", "INT32"),
            "offset": ("offset", "INT64"),
            "cu_seqlens_q": ("starts", "INT64"), "cu_seqlens_k": ("starts", "INT32")}  # fmt: skip


def case(
    name,
    model="attention",
    datatype="FP32",
    *,
    tensors=None,
    optional=(),
    outputs=(),
    binary=True,
    arguments=None,
    **parameters,
):
    """Return the description of one request; `arguments` are further arguments of the client's `infer`."""
    names = tensors or (GRAD if model == "attention_grad" else "qkv")
    inputs = {
        n.partition(".")[0]: {"tensor": n if "." in n else f"{n}.{datatype}", "datatype": datatype} for n in names
    }
    for tensor in optional:
        key, kind = OPTIONAL[tensor] if isinstance(tensor, str) else tensor
        inputs[tensor] = {"tensor": key, "datatype": kind}
    return {
        "name": name, "model": model, "inputs": inputs, "outputs": list(outputs), "binary": binary,
        "parameters": parameters, "arguments": arguments or {},
    }  # fmt: skip


PACKED = ("q.packed", "k.packed", "v.packed")
CASES = [
    *(
        case(f"{model} {datatype}", model, datatype, causal=True)
        for model in ("attention", "attention_grad")
        for datatype in ("FP16", "BF16", "FP32")
    ),
    case("lse alone", outputs=["lse"]),
    case("lse before o", outputs=["lse", "o"], causal=True),
    case("one gradient", "attention_grad", outputs=["dk"], causal=True),
    case("grads", "attention_grad", grads="dv,dq", causal=True),
    case("numbers", outputs=["o", "lse"], binary=False, causal=True),
    case("mask", optional=["attn_mask"]),
    case("lengths", optional=["kv_lengths"], causal=True),
    case("offset", optional=["offset"], causal=True),
    case("packed", tensors=PACKED, optional=["cu_seqlens_q", "cu_seqlens_k"], layout="thd", causal=True),
    case("window", window_left=S, window_right=0),
    case("priority", causal=True, arguments={"priority": 1, "timeout": 60_000_000}),
    case("misspelt", casual=True),
    case("missing", tensors=("q", "k")),
    case("nothing", model="nothing"),
    case("late", arguments={"timeout": 1}),
]
COMPRESSED = [
    case(
        f"{there} {back}",
        causal=True,
        arguments={"request_compression_algorithm": there, "response_compression_algorithm": back},
    )
    for there, back in (("gzip", "deflate"), ("deflate", "gzip"), ("gzip", None), (None, "gzip"))
]
REFUSED = {
    "misspelt": ("422", "casual"),
    "missing": ("422", "v"),
    "nothing": ("404", "nothing"),
    "late": ("504", "deadline"),
}


def ask(command, home, url, cases):
    """Run a client program and return (its report, its answers)."""
    (home / "cases.json").write_text(json.dumps(cases))
    # numpy has no bfloat16; float32 can hold each bfloat16 value.
    np.savez(
        home / "tensors.npz", **{n: (t.float() if t.is_floating_point() else t).numpy() for n, t in TENSORS.items()}
    )
    address = url.removeprefix("http://")
    done = subprocess.run([*command, address, str(home)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads((home / "report.json").read_text()), dict(np.load(home / "answers.npz"))


def judge(report, answers, cases, refused=REFUSED):
    """Check that each case got a correct answer with the id of its request, or the error that `refused` names."""
    expected = {}
    for one in cases:
        name = one["name"]
        if name in refused:
            status, word = refused[name]
            assert report[name][0] == status, report[name]
            assert word in report[name][1]
            continue
        assert report[name] == name
        datatype = one["inputs"]["q"]["datatype"]
        tensors = problem(DATATYPES[datatype], GRAD)
        causal = bool(one["parameters"].get("causal")) or name == "window"
        mask, offset = FLOAT_MASK if name == "mask" else None, 2 if name == "offset" else 0
        exact = truth(tensors, causal=causal, mask=mask, offset=offset)
        if name == "packed":
            exact["o"] = exact["o"][0].transpose(0, 1)
        names = one["outputs"] or one["parameters"].get("grads", "").split(",")
        if names == [""]:
            names = ["dq", "dk", "dv"] if one["model"] == "attention_grad" else ["o"]
        for output in names:
            expected[f"{name}/{output}"] = exact[output], 2 * BOUNDS[DATATYPES[datatype]]
    assert answers.keys() == expected.keys()
    for name, (exact, bound) in expected.items():
        near(torch.from_numpy(answers[name]), exact, bound)
