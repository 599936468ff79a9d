"""Tables of the server's settings, and of its limits, which are settings or constants in the code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flashpoint_contract.caches import MOST_CACHES
from flashpoint_contract.tensors import MAX_HEAD_DIM
from flashpoint_contract.wire import METADATA_LIMIT, RANK_LIMIT, TENSOR_LIMIT
from flashpoint_server.access.cache_ids import MOST_LAYERS
from flashpoint_server.cli.flags import GROUPS
from flashpoint_server.config.settings import Settings
from flashpoint_server.http.heads import HEAD_BYTES, HEAD_FIELDS
from flashpoint_server.http.protocol import PARSED_AT_ONCE
from flashpoint_server.ipc.regions import MOST as REGIONS
from flashpoint_server.routes.pipeline import KEY_LENGTH
from flashpoint_server.routes.tensors.caches import MOST_MADE

from .markdown import named, table

_OF_BYTES = ("body_limit", "json_limit", "head_limit")
_OF_SECONDS = ("_timeout", "_seconds", "_ttl", "keep_alive", "benchmark_keep", "queue_delay")


@named
def settings() -> str:
    """Return every setting, in a table for each group of `flashpoint serve --help`."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    rows: list[tuple[str, ...]] = []
    for name, field in Settings.model_fields.items():
        rows = groups.setdefault(GROUPS[name], []) if name in GROUPS else rows
        default = f"`{field.default}`" if field.default not in ((), None, "") else "none"
        amount = _amount(name)
        default += f" ({amount})" if amount and f"`{amount}`" != default else ""
        rows.append((f"`--{_flag(name)}`", f"`FLASHPOINT_{name.upper()}`", default, field.description or ""))
    head = ["flag", "variable", "default", "meaning"]
    return "".join(f"\n### {group}\n\n{table(head, rows)}" for group, rows in groups.items())


class Bound(NamedTuple):
    """One limit of the server, `what`. `most` is its value as text, or the names of the settings that determine it.

    `beyond` is what the server does beyond the limit. `tests` are items FILE#TEST, with FILE below tests/.
    """

    what: str
    most: str | tuple[str, ...]
    beyond: str
    tests: tuple[str, ...] = ()


@named
def limits() -> str:
    """Return every limit of the server: its default, its setting, the server's reaction beyond it, and its test."""
    parts = []
    for group, bounds in _bounds().items():
        rows = list(_rows(bounds))
        parts.append(f"\n## {group}\n\n{table(['bound', 'default', 'setting', 'beyond it', 'test'], rows)}")
    return "".join(parts)


def _rows(bounds: tuple[Bound, ...]) -> Iterator[tuple[str, ...]]:
    for bound in bounds:
        named = isinstance(bound.most, tuple)
        default = ", ".join(map(_default, bound.most)) if named else bound.most
        flags = ", ".join(f"`--{_flag(name)}`" for name in bound.most) if named else "fixed"
        tests = ", ".join(f"[test](../../tests/{test})" for test in bound.tests)
        yield bound.what, str(default), flags, bound.beyond, tests


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _default(name: str) -> str:
    value = Settings.model_fields[name].default
    return _amount(name) or (f"{value:,}" if value else "none")


def _amount(name: str) -> str:
    """Return the default of a setting with its unit. Empty if it has no unit, or is 0 or None."""
    value = Settings.model_fields[name].default
    if name == "body_rate":
        return f"{_size(value)}/s"
    if name.endswith("_bytes") or name in _OF_BYTES:
        return _size(value)
    if name.endswith("_flops"):
        return f"{value:.1e} FLOPs".replace("e+", "e")
    if name.endswith("_ms"):
        return f"{value / 1000:g} s" if value else ""
    return f"{value:g} s" if name.endswith(_OF_SECONDS) and value else ""


def _size(value: int) -> str:
    for bits, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << bits:
            return f"{value / (1 << bits):g} {unit}"
    return f"{value} B" if value else ""


def _bounds() -> dict[str, tuple[Bound, ...]]:
    e2e = "e2e/test_"
    held = "server/cli/test_supervisor.py#test_limits_hold_over_all_workers_and_a_dead_one_has_nothing_inside"
    inside = "server/access/test_admission.py#test_requests_and_bytes_are_counted_while_they_are_inside"
    too_late = ("server/http/test_body.py#test_an_answer_that_nobody_takes_is_dropped_after_a_while",)
    grpc = (
        "server/oip/grpc/test_memory.py#test_messages_that_wait_and_messages_that_were_read_hold_no_more_than_the_limit",
        "server/oip/grpc/test_arrivals.py#test_a_key_has_half_of_the_memory_at_most",
        "server/oip/grpc/test_server.py#test_silent_calls_make_way",
    )
    quota = "server/routes/tensors/test_caches.py#test_a_key_that_uses_up_its_quota_is_refused_alone"
    return {
        "Head and body": (
            Bound(
                "request line and header fields",
                f"{_size(HEAD_BYTES)}, up to {_size(PARSED_AT_ONCE)} more in the last read; {HEAD_FIELDS} fields",
                "431 `head_too_large`, closed",
                (f"{e2e}security.py#test_a_large_head_is_taken_and_one_too_large_is_431",),
            ),
            Bound(
                "blank lines, chunk extensions, trailers",
                "the same",
                "closed",
                (f"{e2e}security.py#test_what_never_ends_is_cut_off_in_bounded_bytes",),
            ),
            Bound(
                "`Host`, `Transfer-Encoding`",
                "one valid host; `chunked`",
                "400 `malformed_head`, 501 `transfer_encoding`, closed",
                ("server/http/test_heads.py#test_a_request_has_one_valid_host",),
            ),
            Bound(
                "options of a call; values of one option, other than `caches` and `at`",
                "64; 64",
                "422 `invalid_request`",
            ),
            Bound("`Idempotency-Key`", f"{KEY_LENGTH} characters", "422 `invalid_request`"),
            Bound(
                "body",
                ("body_limit",),
                "413 `body_too_large`",
                ("server/http/test_body.py#test_an_early_refusal_is_read_by_every_client",),
            ),
            Bound("JSON body; tensors of a JSON answer", ("json_limit",), "413 `body_too_large`; 413 `work_too_large`"),
            Bound(
                "safetensors head, checked before memory is allocated",
                ("head_limit",),
                "400 `malformed_body`",
                ("server/formats/test_safetensors.py#test_a_malformed_body_is_400_and_the_server_goes_on",),
            ),
            Bound(
                "tensors of a message; dimensions of a tensor; entries of `__metadata__`",
                f"{TENSOR_LIMIT}; {RANK_LIMIT}; {METADATA_LIMIT}",
                "400 `malformed_body`",
            ),
            Bound(
                "any other bytes",
                "–",
                "the server answers as before",
                (f"{e2e}http_fuzz.py#test_whatever_is_sent_the_server_answers_as_before",),
            ),
        ),
        "Work of a request": (
            Bound("sequences (batch size)", ("sequence_limit",), "413 `work_too_large`"),
            Bound(
                "memory of the tensors",
                "the device's memory",
                "413 `work_too_large`",
                ("server/access/test_admission.py#test_an_empty_tensor_hides_no_cost",),
            ),
            Bound(
                "[stored dS](../kernels.md#stored-ds) of a launch, with `--store-ds`; at least one key head",
                ("workspace_bytes",),
                "it is computed in chunks; 413 `work_too_large` if one does not fit beside the tensors",
                (
                    "server/access/test_admission.py#test_stored_ds_counts_while_it_is_on",
                    "kernels/problems/test_workspace.py#test_no_launch_needs_more_than_was_predicted",
                ),
            ),
            Bound("D and Dv", f"{MAX_HEAD_DIM}, with [exceptions](../kernels.md#backends)", "422 `invalid_request`"),
            Bound("`window`; `dropout_seed`", "2³⁰; below 2⁶⁴", "422 `invalid_request`"),
            Bound("a verification", ("verify_flops",), "413 `work_too_large`"),
            Bound(
                "a benchmark: cases; repeats of all; predicted time of one call",
                ("benchmark_cases", "benchmark_seconds", "benchmark_call_seconds"),
                "422 `invalid_request`",
            ),
            Bound("benchmarks that wait or run; half of them for a caller", ("benchmark_jobs",), "429 `queue_full`"),
        ),
        "Admitted requests, over all HTTP processes": (
            Bound("requests", ("queue_limit",), "429 `queue_full`", (inside, held)),
            Bound("bytes of tensors", ("queue_bytes",), "429 `queue_full`; one alone is always admitted", (inside,)),
            Bound("floating-point operations", ("queue_flops",), "429 `queue_full`; one alone is always admitted"),
            Bound("predicted compute time", ("queue_seconds",), "429 `queue_full`; one alone is always admitted"),
            Bound("one launch", ("batch_flops", "batch_bytes"), "a larger request runs alone"),
        ),
        "Memory": (
            Bound("bodies and answers", ("staging_bytes",), "429 `queue_full`; 413 `work_too_large` if it never fits"),
            Bound(
                "[gRPC messages and answers](../oip.md#grpcs-memory); half of it for a key",
                ("grpc_bytes",),
                "`RESOURCE_EXHAUSTED`, `DEADLINE_EXCEEDED`",
                grpc,
            ),
            Bound(
                "caches and saved forwards of an engine",
                ("cache_bytes",),
                "429 `cache_memory`; 413 `work_too_large` if it never fits",
            ),
            Bound("number of caches and saved forwards of an engine", ("cache_count",), "429 `cache_memory`"),
            Bound("the same of one key", "`cache_count` of the [key](../security.md#keys)", "429 `key_limit`"),
            Bound("caches in an answer of `GET /caches`", "100, at most 1,000", "`next` is the next page's `after`"),
            Bound("bytes of one key", "`cache_bytes` of the [key](../security.md#keys)", "429 `key_limit`", (quota,)),
            Bound(
                "caches of a call; layers of a cache; layers of all caches that a call makes",
                f"{MOST_CACHES:,}; {MOST_LAYERS}; {MOST_MADE:,}",
                "422 `invalid_request`",
                ("server/routes/tensors/test_cache_schema.py#test_absurd_sizes_are_refused_before_memory_is_taken",),
            ),
            Bound(
                f"shared memory that callers register; at most {REGIONS} regions",
                ("shared_memory_bytes",),
                "413 `work_too_large`",
                ("server/oip/test_memory_routes.py#test_what_is_registered_is_bounded",),
            ),
        ),
        "Time": (
            Bound(
                "arrival of a head",
                ("header_timeout",),
                "closed",
                ("server/http/test_heads.py#test_a_slow_head_is_closed_in_bounded_time",),
            ),
            Bound("pause in a body; its average rate", ("body_timeout", "body_rate"), "408 `body_timeout`"),
            Bound("pause of an answer's reader; its average rate", ("body_timeout", "body_rate"), "closed", too_late),
            Bound("idle connection", ("keep_alive",), "closed"),
            Bound("deadline of a request without `X-Timeout-Ms`", ("default_timeout_ms",), "504 `deadline_exceeded`"),
            Bound("longest `X-Timeout-Ms`", ("max_timeout_ms",), "reduced to it"),
            Bound("a launch", ("hang_timeout",), "503 `engine_lost`; the engine is restarted"),
            Bound(
                "one part of a request on the CPU, before others run",
                "about 3 ms",
                "–",
                ("server/engine/test_loop.py#test_a_small_request_is_answered_between_the_parts_of_a_large_one",),
            ),
            Bound("unused cache; unused saved forward", ("cache_ttl", "saved_ttl"), "410 `cache_lost`, `saved_lost`"),
            Bound("admitted work after SIGTERM", ("shutdown_timeout",), "cut off"),
        ),
    }
