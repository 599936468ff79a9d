"""Answers of /verify and /benchmark for a `ScriptedServer`."""

import json

JSON = "application/json"

ROW = {
    "backend": "tiled", "version": "0.1.0", "device": "a CPU", "direction": "forward", "dtype": "float32",
    "causal": False, "batch": 1, "q_heads": 2, "kv_heads": 1, "q_len": 128, "kv_len": 128, "head_dim": 64,
    "value_dim": 64,
}  # fmt: skip
SIZES = ("--q-len", "8", "--head-dim", "4")  # command-line flags of a small problem
ROW_FIGURES = {
    "ms": 1.25, "ms_p20": 1.0, "ms_p80": 2.0, "tflops": 0.5, "tflops_standard": 0.5, "speedup_over_naive": 3.5,
    "peak_bytes": 2e6, "flops": 33_554_432, "bytes": 999_600, "roofline_percent": 407.0, "gb_per_s": 0.8,
    "arithmetic_intensity": 33.6,
}  # fmt: skip
FIGURES = dict.fromkeys(("max_abs", "max_rel", "rms"), 1e-7) | {
    "cosine": 1.0, "worst_index": [0, 1], "worst_value": 0.5, "worst_expected": 0.5,
}  # fmt: skip
JUDGED = {
    **FIGURES, "name": "o", "bound": 1e-6, "rule": "r", "ok": True, "torch": FIGURES,
    "histogram": [{"exponent": -7, "count": 24}], "cosine": "NaN",
}  # fmt: skip
REPORT = {"ok": True, "backend": "tiled", "device": "cpu", "dtype": "float32", "seconds": 0.5, "tensors": [JUDGED]}
SHAPES = [{"q_len": 128, "head_dim": 64}]
JOB = {"id": "j1", "created": "2026-01-01T00:00:00Z", "request": {"shapes": SHAPES}, "total": 2}
STATE = {"kind": "state", "at": "2026-01-01T00:00:00Z"}
AT = {"kind": "progress", "total": 9, "stage": "float64", "direction": "forward"}
EVENTS = [
    {"id": 1, "state": "running", **STATE},
    {"id": 2, "kind": "progress", "done": 0, "total": 2, "backend": "naive"},
    {"id": 3, "kind": "row", "done": 1, "total": 2, "row": ROW},
    {"id": 4, "kind": "row", "done": 2, "total": 2, "row": ROW | {"skipped": "too large"}},
    {"id": 5, "state": "done", **STATE},
]


def says(document, status=200):
    return lambda h: h.answer(status, json.dumps(document).encode(), JSON)


def frames(events):
    """Return events as the bytes of an event stream. Events of a verification have no id."""
    ids = [f"id: {e['id']}\n" if "id" in e else "" for e in events]
    return "".join(
        f"{n}event: {e['kind']}\ndata: {json.dumps(e)}\n\n" for n, e in zip(ids, events, strict=True)
    ).encode()


def streams(events, end=lambda handler: handler.end_chunks()):
    def step(handler):
        handler.begin_chunks()
        for event in events:
            handler.chunk(b": still here\n\n" + frames([event]))
        end(handler)

    return step
