"""The tables of the documentation, by the names that stand in its marks: each a function that makes its markdown."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flashpoint_kernels.triton_backend.host.configurations import TABLES as TILES

from .calls import calls, fields, headers
from .code import (
    algorithms,
    cache_options,
    commands,
    data_sheets,
    errors,
    extremes,
    nano,
    options,
    saved_options,
    support,
    tensors,
)
from .decoding import break_even, gemma, lora
from .judging import judge_corpus, judge_seeds
from .kernels import (
    benchmarks,
    compiled,
    compiled_all,
    cpu_calls,
    decode,
    each_option,
    launch_overhead,
    library_errors,
    library_errors_each,
    loops,
    loops_beside,
    one_row,
    reproduced,
    suites,
    suites_reasons,
)
from .markdown import targets_by_machine
from .metrics import labels, metrics
from .service import (
    beside,
    cached_decode,
    capacity,
    capacity_ratio,
    fairness,
    forks,
    ray,
    rpc,
    serving,
    sharded_cache,
    throughput,
    train_saved,
)
from .settings import limits, settings
from .trust import each_fault, faults, fuzz, gpu_image, install, load, load_steps, steady

TABLES: dict[str, Callable[[], str]] = {
    "algorithms": algorithms,
    "benchmarks": benchmarks,
    "beside": beside,
    "break-even": break_even,
    "judge-corpus": judge_corpus,
    "judge-seeds": judge_seeds,
    "calls": calls,
    "capacity": capacity,
    "capacity-ratio": capacity_ratio,
    "data-sheets": data_sheets,
    "compiled": compiled_all,
    "decode": decode,
    "each-fault": each_fault,
    "each-option": each_option,
    "cache_options": cache_options,
    "cached-decode": cached_decode,
    "commands": commands,
    "errors": errors,
    "extremes": extremes,
    "fairness": fairness,
    "faults": faults,
    "fields": fields,
    "fuzz": fuzz,
    "forks": forks,
    "gemma": gemma,
    "gpu-image": gpu_image,
    "headers": headers,
    "install": install,
    "load": load,
    "load-steps": load_steps,
    "labels": labels,
    "cpu-calls": cpu_calls,
    "launch-overhead": launch_overhead,
    "library-errors": library_errors,
    "library-errors-each": library_errors_each,
    "one-row": one_row,
    "suites": suites,
    "suites-reasons": suites_reasons,
    "limits": limits,
    "loops": loops,
    "loops-beside": loops_beside,
    "lora": lora,
    "metrics": metrics,
    "nano": nano,
    "options": options,
    "ray": ray,
    "reproduced": reproduced,
    "rpc": rpc,
    "saved_options": saved_options,
    "settings": settings,
    "sharded_cache": sharded_cache,
    "support": support,
    "tensors": tensors,
    "throughput": throughput,
    "train-saved": train_saved,
    **{what: partial(serving, what) for what in ("protocol", "serving")},
    **{what: partial(steady, what) for what in ("overload", "soak")},
    **{
        f"{what}-targets": partial(targets_by_machine, what)
        for what in ("beside", "cached-decode", "fairness", "options", "serving", "throughput")
    },
    **{f"compile-sm{arch}": partial(compiled, arch) for arch in TILES},
}
