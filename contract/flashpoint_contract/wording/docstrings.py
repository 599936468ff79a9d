"""Complete docstrings of calls at import, so that each parameter is described only once in the source.

The descriptions of options are the `Args:` of `Options`, those of tensors are here, and those of other
keywords are the `Args:` of the TypedDict that a call unpacks. An editor reads the source: it shows types, and the
docstring without the added entries.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from flashpoint_contract.options import Options

F = TypeVar("F", bound=Callable[..., Any])

_TENSORS = """Tensors.

    Args:
        q: Queries, (B, Hq, Sq, D) in layout `bhsd`.
        k: Keys, (B, Hk, Sk, D).
        v: Values, (B, Hk, Sk, Dv).
        do: Gradient of o, (B, Hq, Sq, Dv).
        attn_mask: Mask, broadcastable to (B, Hq, Sq, Sk): bool (true: attend) or float (added to the scaled scores).
            Not in layout `thd`.
        block_mask: Mask of blocks, bool, (B or 1, Hq or 1, ceil(Sq/Mq), ceil(Sk/Mk)): blocks of `block_size` that are
            false are skipped. Blocks count from each sequence's first row. Not in layout `thd`.
            `flashpoint_kernels.create_block_mask` makes one.
        alibi_slopes: Slopes, float, (Hq,) or (B, Hq): slope·|i + offset − j| is subtracted from the score of query i
            and key j (ALiBi, Press et al. 2022). Not differentiable.
        sinks: Logits, float, (Hq,): one more per head in the softmax's denominator, without a value (gpt-oss).
        q_lengths: Number of valid queries of each padded sequence, int32 or int64, (B,). Rows beyond are not read;
            their o is 0 and their lse −∞. Not in layout `thd`.
        kv_lengths: Number of valid keys of each padded sequence, int32 or int64, (B,). Rows beyond are not read. Not in
            layout `thd`.
        offset: Key at which query 0 is: a number, or int32 or int64, (B,), from −2^29 to 2^29. Query i is at key i +
            offset, for `causal`, `window` and `alibi_slopes`. By default `causal_alignment` says it. It is data, like
            the lengths: another number needs no other kernel. In layout `thd` B is the number of sequences.
        cu_seqlens_q: Rows of q where the n sequences of layout `thd` start, and then Tq: int32 or int64, (n + 1,).
        cu_seqlens_k: Rows of k where the n sequences of layout `thd` start, and then Tk: int32 or int64, (n + 1,).
        k_scale: Scale of an 8-bit k, which stands for k·k_scale: a number, a float tensor (B, Hk) or (1, Hk), or one of
            k's shape without D. Finite. `flashpoint_kernels.quantize` makes it. Forward only.
        v_scale: Scale of an 8-bit v, which stands for v·v_scale: as `k_scale`.
    """


def documented(function: F, raises: str = "") -> F:
    """Add an entry to a function's docstring for each parameter and keyword that the docstring does not describe.

    `raises` are the function's errors, used if the docstring names none.
    """
    if function.__doc__ is None:  # python -OO removes docstrings
        return function
    text = inspect.cleandoc(function.__doc__)
    before, *sections = re.split(r"\n\n(?=(?:Args|Returns|Raises):\n)", text)
    code, described = function.__code__, entries(text)
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    known = _shared() | described
    taken = [known[name] for name in arguments if name in known]
    behind = [section for section in sections if not section.startswith("Args:")]
    if raises and not (behind and behind[-1].startswith("Raises:")):
        behind.append(f"Raises:\n    {raises}")
    unpacked = re.search(r"Unpack\[(\w+)\]", str(function.__annotations__))
    keywords = _of_keywords(function.__globals__[unpacked[1]]) if unpacked else {}
    added = [
        "\n".join([f"{head}:", *lines])
        for head, lines in (("Args", taken), ("Keyword Args", keywords.values()))
        if lines
    ]
    function.__doc__ = "\n\n".join([before, *added, *behind])
    return function


def twin_of(source: Any) -> Callable[[F], F]:
    """Return a decorator that copies whole docstrings from `source`, a function or a class, to its asyncio twin.

    For a class, each method gets the docstring of the method with the same name. A docstring is replaced only if it
    equals the first line of the docstring in `source`.
    """

    def fill(twin: F) -> F:
        pairs = [(twin, source)]
        if isinstance(twin, type):
            pairs = [(each, getattr(source, name, None)) for name, each in vars(twin).items()]
        for each, like in pairs:
            whole = like.__doc__ if inspect.isfunction(each) and like else None
            if whole and each.__doc__ == whole.partition("\n")[0]:
                each.__doc__ = whole
        return twin

    return fill


def section_of_options(names: Any) -> str:
    """Return the `Args:` section of these options, for the docstring of a class with these fields."""
    known = _shared()
    return "\n".join(["Args:", *(known[name] for name in names if name in known)])


def entries(docstring: str | None) -> dict[str, str]:
    """Return the lines of each entry of the `Args:` of a docstring, by its parameter's name."""
    _, _, after = inspect.cleandoc(docstring or "").partition("\n\nArgs:\n")
    lines = re.split(r"\n(?=    \S)", after.partition("\n\n")[0])
    return {line.partition(":")[0].strip(): line for line in lines if line}


@cache
def _shared() -> dict[str, str]:
    return entries(_TENSORS) | entries(Options.__doc__)


@cache
def _of_keywords(kind: type) -> dict[str, str]:
    """Return the `Args:` entry of each field of a TypedDict: first its own fields, then those of its base classes."""
    inherited: dict[str, str] = {}
    for base in getattr(kind, "__orig_bases__", ()):
        if isinstance(base, type):
            inherited |= {name: entry for name, entry in _of_keywords(base).items() if name not in inherited}
    known = _shared() | entries(kind.__doc__)
    return {name: known[name] for name in kind.__annotations__ if name not in inherited} | inherited
