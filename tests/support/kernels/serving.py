"""Problems of a server for language models: keys in pages, 8-bit keys, and block masks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flashpoint_kernels import quantize
from tests.conftest import DEVICE

FORMS = ("number", "head", "sequence", "row")
DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}


def in_pages(
    tensors: Mapping[str, Tensor], layout: str, page_size: int, *, seed: int = 0, spare: int = 3, strided: bool = False
) -> dict[str, Tensor]:
    """Return the same problem with keys in pages of a pool, in random order, with `spare` more pages than needed.

    Memory of the pool outside the sequences is NaN (in int8 -1, in scales 1e30), and page numbers that no key needs are
    outside the pool. With `strided`, there is unused memory between pages. In `thd`, cu_seqlens_k becomes kv_lengths.
    """
    paged = dict(tensors)
    if layout == "thd":
        lengths = paged.pop("cu_seqlens_k").diff().tolist()
        max_length = max(lengths)
    else:
        batch, max_length = tensors["k"].shape[0], tensors["k"].shape[1 if layout == "bshd" else 2]
        lengths = tensors["kv_lengths"].tolist() if "kv_lengths" in tensors else [max_length] * batch
    pages = -(-max_length // page_size)
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts) + spare, generator=torch.Generator().manual_seed(seed)).tolist()
    pool, table = len(order), torch.full((len(lengths), pages), 2**31 - 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    rowwise = [n for n in ("k_scale", "v_scale") if n in tensors and is_of_rows(tensors, n)]
    for name in ("k", "v", *rowwise):
        paged[name] = _pooled(tensors[name], layout, table, lengths, (pool, page_size), strided, name in rowwise)
    return paged | {"block_table": table.to(tensors["k"].device), "kv_lengths": torch.tensor(lengths)}


def is_of_rows(tensors: Mapping[str, Tensor], scale: str) -> bool:
    return tensors[scale].shape == tensors[scale[0]].shape[:-1]


def _pooled(
    t: Tensor, layout: str, table: Tensor, lengths: list[int], pool: tuple[int, int], strided: bool, of_scale: bool
) -> Tensor:
    """Return a pool with the rows of `t` in pages. Copy row by row, without any function that the tests check."""
    if layout == "bhsd":
        t = t.transpose(1, 2)  # rows before heads, as in the other layouts
    number, size = pool
    wide = t.new_empty(number, 2 if strided else 1, size, *t.shape[(1 if layout == "thd" else 2) :])
    wide.view(torch.uint8 if t.itemsize == 1 else wide.dtype).fill_(255 if t.itemsize == 1 else torch.nan)
    if of_scale:
        wide.fill_(1e30)  # large but finite: a scale must be finite
    pages, start = wide[:, 0], 0
    for sequence, length in enumerate(lengths):
        sequence_rows = t[start : start + length] if layout == "thd" else t[sequence, :length]
        for j in range(length):
            pages[int(table[sequence, j // size]), j % size] = sequence_rows[j]
        start += length
    return pages.transpose(1, 2) if layout == "bhsd" else pages


def of_eight_bits(
    tensors: Mapping[str, Tensor], layout: str, dtype: str = "int8", form: str = "row", *, sequences: int = 2
) -> dict[str, Tensor]:
    """Return the problem with 8-bit k and v, and with scales in one of FORMS."""
    quantized, heads = dict(tensors), tensors["k"].shape[1 if layout == "bhsd" else -2]
    for n, name in enumerate("kv"):
        values, scale = quantize(tensors[name], DTYPES[dtype])
        if form != "row":
            shape = {"number": (), "head": (1, heads), "sequence": (sequences, heads)}[form]
            generator = torch.Generator().manual_seed(n)
            mean = float(scale.mean()) if scale.numel() else 1.0  # of no keys, a mean would be NaN
            scale = (mean * (0.5 + torch.rand(shape, generator=generator))).to(values.device)
        quantized |= {name: values, f"{name}_scale": scale}
    return quantized


def drawn_blocks(*shape: int, seed: int = 0, share: float = 0.4) -> Tensor:
    """Return a random block mask on the device under test; `share` is the expected fraction of visible blocks."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share).to(DEVICE)


def dense_mask(blocks: Tensor, size: tuple[int, int], q_len: int, kv_len: int) -> Tensor:
    """Return the dense mask that equals a block mask."""
    return blocks.repeat_interleave(size[0], -2).repeat_interleave(size[1], -1)[..., :q_len, :kv_len]
