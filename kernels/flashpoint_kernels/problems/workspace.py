"""The memory for dS, which gradients store when FLASHPOINT_STORE_DS is set (triton_backend/host/stored.py).

dS is the gradient of the scaled scores. It is stored in 16 bits, in whole tiles of KEYS keys for each block of QUERIES
queries. The heads of a launch are computed in chunks, which use the same workspace one after another. A chunk holds
whole key heads with all query heads that share them. This module does not import torch: HTTP processes count the
workspace of a request from its head.
"""

from __future__ import annotations

import os
import re
from typing import Any

from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import MAX_FUSED_HEAD_DIM

STORE, BYTES = "FLASHPOINT_STORE_DS", "FLASHPOINT_WORKSPACE_BYTES"
KEYS, QUERIES = 128, 256
ITEM = 2  # bytes of a number of dS
DEFAULT = 1 << 30
# The dS of a key head has at most this many bytes; the gradients of longer sequences compute the scores twice. This
# number chooses the path of a sequence, and so its bits. It is no setting: bits must not depend on settings.
MOST = 2 << 30

_SIZE = re.compile(r"([1-9]\d*) ?(KiB|MiB|GiB)")
_WORDS = dict.fromkeys(("", "0", "false", "no", "off"), False) | dict.fromkeys(("1", "true", "yes", "on"), True)


def parse_size(text: str) -> int:
    """Return a size such as `4GiB` or `4096` as a number of bytes. Raises ValueError for any other text."""
    if text.isascii() and text.isdigit():
        return int(text)
    if (size := _SIZE.fullmatch(text)) is None:
        raise ValueError("must be bytes, such as 4294967296 or 4GiB")
    return int(size[1]) << {"KiB": 10, "MiB": 20, "GiB": 30}[size[2]]


def stores_ds() -> bool:
    """Return whether FLASHPOINT_STORE_DS is set. Raises ValueError if it is neither true nor false."""
    value = os.environ.get(STORE, "")
    if (chosen := _WORDS.get(value.strip().lower())) is None:
        raise ValueError(f"{STORE} must be 0 or 1, not {value!r}")
    return chosen


def limit() -> int:
    """Return the bytes of FLASHPOINT_WORKSPACE_BYTES. Raises ValueError if it is no size of at least 1."""
    value = os.environ.get(BYTES, "").strip()
    try:
        size = parse_size(value) if value else DEFAULT
    except ValueError as error:
        raise ValueError(f"{BYTES} {error}, not {value!r}") from None
    if not size:
        raise ValueError(f"{BYTES} must be at least 1, not {value!r}")
    return size


def ds_elements(q_len: Any, kv_len: Any) -> Any:
    """Return the numbers in the stored dS of a query head. The arguments are numbers or arrays."""
    return -(-q_len // QUERIES) * QUERIES * (-(-kv_len // KEYS) * KEYS)


def workspace_of(spec: Spec, most: int) -> int:
    """Return an upper bound of the bytes of the workspace that a problem needs on a GPU, if the setting is `most`.

    A chunk holds at least one key head, so a workspace may exceed the setting, up to MOST.
    """
    wide = max(spec.head_dim, spec.value_dim) > MAX_FUSED_HEAD_DIM
    if spec.direction == "forward" or spec.dtype == "float32" or wide or spec.level or spec.has("block_mask"):
        return 0
    of_key_head = ITEM * spec.q_heads // spec.kv_heads
    head = ds_elements(spec.q_len, spec.kv_len) * of_key_head
    total = head * spec.kv_heads * spec.batch
    if spec.ragged:  # the sequences are parts of one; each may end with a block that is not full
        total = ds_elements(spec.q_len + (spec.batch - 1) * QUERIES, spec.kv_len) * of_key_head * spec.kv_heads
    elif head > MOST and not (spec.has("q_lengths") or spec.has("kv_lengths")):
        return 0
    return int(min(total, max(most, min(head, MOST))))
