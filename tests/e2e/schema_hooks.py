"""Hooks for schemathesis, which tests a server against its /openapi.json.

They draw safetensors messages and check the answers. The command `schemathesis` loads this file: see schemathesis.toml.
"""

import json

import numpy as np
import schemathesis
from hypothesis import strategies as st

SAFETENSORS = "application/vnd.safetensors"
CODES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "bool": "BOOL", "int64": "I64"}
MISSPELT = {"casual": "true", "window_left": "3"}


@st.composite
def messages(draw):
    """Draw a safetensors message with or without `do`. One in ten has an unknown option; the others are valid."""
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"]))
    batch, q_len, kv_len, dim, value_dim = (draw(st.integers(minimum, 5)) for minimum in (1, 0, 1, 1, 1))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    sizes = {
        "q": (batch, kv_heads * group, q_len, dim),
        "k": (batch, kv_heads, kv_len, dim),
        "v": (batch, kv_heads, kv_len, value_dim),
        "do": (batch, kv_heads * group, q_len, value_dim),
    }
    if draw(st.booleans()):
        del sizes["do"]
    tensors = {name: (dtype, rng.standard_normal(size)) for name, size in sizes.items()}
    optional = {
        "attn_mask": lambda: ("bool", rng.random((q_len, kv_len)) < 0.7),
        "alibi_slopes": lambda: ("float32", rng.random(kv_heads * group)),
        "sinks": lambda: (dtype, rng.standard_normal(kv_heads * group)),
        "kv_lengths": lambda: ("int64", rng.integers(0, kv_len + 1, batch)),
        "offset": lambda: ("int64", rng.integers(-3, 7, batch)),
    }
    for name in draw(st.sets(st.sampled_from([*optional]))):
        tensors[name] = optional[name]()
    other = "bottom_right" if "offset" in tensors else "top_left"
    options = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "causal": st.sampled_from(["true", "false"]),
                "causal_alignment": st.sampled_from([other, '"bottom_right"']),
                "window": st.sampled_from(["[-1, -1]", "[0, 2]", "[1073741824, 0]"]),
                "scale": st.floats(-4, 4).map(json.dumps),
                "softcap": st.sampled_from(["0", "0.5", "30"]),
                "dropout_seed": st.integers(0, (1 << 64) - 1).map(str),
                "return_lse": st.just("true"),
                "format": st.just("pt"),
            },
        )
    )
    if "dropout_seed" in options:
        options["dropout_p"] = draw(st.sampled_from(["0", "0.5"]))
    if draw(st.integers(0, 9)) == 9:
        name = draw(st.sampled_from([*MISSPELT]))
        options[name] = MISSPELT[name]
    return written(tensors, options)


def written(tensors, options):
    head, parts, end = {"__metadata__": options}, [], 0
    for name, (dtype, values) in tensors.items():
        part = encoded(values, dtype)
        head[name] = {"dtype": CODES[dtype], "shape": values.shape, "data_offsets": [end, end + len(part)]}
        parts.append(part)
        end += len(part)
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def encoded(values, dtype):
    if dtype == "bfloat16":  # a bfloat16 is the upper half of a float32
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype(dtype).tobytes()


def head_of(message):
    return json.loads(message[8 : 8 + int.from_bytes(message[:8], "little")])


schemathesis.openapi.media_type(SAFETENSORS, messages(), aliases=["application/octet-stream"])


@schemathesis.hook
def filter_case(context, case):
    """Return whether to send a case. Skip those that expect an error for an unknown header, which HTTP allows."""
    return "x-schemathesis-unknown-property" not in case.headers


@schemathesis.check
def messages_get_what_they_ask(ctx, response, case):
    """Check that a valid safetensors message gets 200, and an invalid one 422 with the name of its wrong field."""
    if not (isinstance(case.body, bytes) and case.meta.generation.mode.is_positive) or response.status_code == 504:
        return
    if case.path.startswith("/caches/"):  # a random id names no cache; tests/server/routes/tensors/ has real ids
        return
    head = head_of(case.body)
    wrong = {name for name in MISSPELT if name in head["__metadata__"]}
    if not wrong and case.path == "/attention":
        wrong = {"do"} & head.keys()
    if not wrong and case.path == "/attention/grad":
        wrong = {"do"} - head.keys()
    if wrong:
        assert response.status_code == 422, response.status_code
        fields = {error["loc"][0] for error in response.json()["errors"]}
        assert wrong <= fields, (wrong, fields)
        return
    assert response.status_code == 200, response.text
    if case.path != "/verify":
        assert response.headers["content-type"][0] in (SAFETENSORS, "application/octet-stream")
        answer = head_of(response.content)
        assert answer["__metadata__"]["backend"] == response.headers["x-backend"][0]
        typed_as = {"o": "q"} if case.path == "/attention" else {"dq": "q", "dk": "k", "dv": "v"}
        for name, like in typed_as.items():
            assert answer[name]["dtype"] == head[like]["dtype"]


@schemathesis.check
def a_refusal_names_its_fields(ctx, response, case):
    """Check that every answer with status 422 names a wrong field, unless the whole call is the mistake."""
    if response.status_code == 422 and case.path.startswith("/v2/"):
        assert response.json()["error"].partition(":")[0], response.text
    elif response.status_code == 422 and response.json()["code"] != "idempotency_key_reused":
        errors = response.json()["errors"]
        assert errors, response.text
        assert all(error["loc"] and error["loc"][0] and error["msg"] for error in errors), errors


@schemathesis.check
class EveryCallIsReached:
    """Check that each path but those of a cache succeeded at least once in each encoding (JSON, binary) sent to it."""

    def __init__(self):
        self.asked, self.answered = set(), set()

    def after_response(self, ctx, response, case):
        if case.media_type is not None and not case.path.startswith("/caches/"):
            what = (case.path, "JSON" if case.media_type == "application/json" else "binary")
            self.asked.add(what)
            if response.status_code < 300:
                self.answered.add(what)

    def after_run(self, ctx):
        assert self.asked
        assert not self.asked - self.answered, f"never answered: {self.asked - self.answered}"
