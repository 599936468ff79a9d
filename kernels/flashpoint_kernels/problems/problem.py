"""One attention problem in the form that all backends read: spec, table of sequences, canonical views of tensors.

Every backend takes a list of `Problem`s and writes into their outputs. Canonical views have the same shapes for all
layouts and ranks of the user's tensors (N is B, or 1 in the ragged layout):

    q, o, do, dq     (N, Hq, Sq, D|Dv)
    k, v, dk, dv     (N, Hk, Sk, D|Dv)
    lse, dlse        (N, Hq, Sq)
    masks            (B, Hq, Sq, Sk)
    block_mask       (B, Hq, ceil(Sq / Mq), ceil(Sk / Mk))
    numbers per head (Hq,) or (B, Hq), float32
    k_scale, v_scale (N, Hk, Sk) if each row has a number (`Spec.per_row`), else (1, Hk, 1), or (B, Hk, 1) indexed
                     by `Row.index`; in their own dtypes

Views share the user's memory. A broadcast dimension of a mask has stride 0; so has Hk of a scale that is one number.

If k and v are pages (`Spec.paged`), their canonical views are the pool in all layouts: k and v (pool, Hk, page_size,
D|Dv), and scales for each row (pool, Hk, page_size). Key j of the sequence `Row.index` is at [number, :, j % page_size]
for number = block_table[Row.index, j // page_size]; `tensors["block_table"]` is (B, pages) int32 on the problem's
device. `batches` gathers a sequence's keys, so a backend that uses its views sees no pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashpoint_contract.options import Direction, Options, ProblemError
from flashpoint_contract.spec import Row, Spec, plan
from flashpoint_contract.tensors import FORWARD_TENSORS, INDEX_TENSORS, SCALES, TENSORS, TensorInfo
from flashpoint_kernels.problems import sequences
from flashpoint_kernels.problems.cost import flops_of
from flashpoint_kernels.problems.memory import in_memory
from flashpoint_kernels.problems.modes import traced
from flashpoint_kernels.problems.readings import readings
from flashpoint_kernels.problems.strides import empty_like

DTYPES = {
    "bool": torch.bool,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensor_info(name: str, tensor: Tensor) -> TensorInfo:
    if not isinstance(tensor, Tensor):
        raise ProblemError([(name, f"must be a torch tensor, not {type(tensor).__name__}")])
    if tensor.dtype not in DTYPE_NAMES:
        raise ProblemError([(name, f"dtype {tensor.dtype} is not supported")])
    return TensorInfo(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


@dataclass(eq=False)
class Problem:
    """One attention problem for a backend (see the module's docstring). `Problem.create` creates it.

    Args:
        spec: The shapes, the dtype, the options, the direction.
        rows: The table of sequences.
        seed: Seed of dropout; None without dropout.
        device: Device of the tensors.
        tensors: The caller's tensors, by their names.
        outputs: The answers, by their names.
        cut_of: If this problem is a part of a request (see `heads`), the request's number of key/value heads; else 0.
        first_head: Index in the request of this problem's first query head.
        threads: Number of threads that the kernels in C may use; 0 means one. It does not change any bits.
        pages: The page numbers in `block_table`, (B, pages) int32, if they are known and constant while the problem is
        used; else None. With them, Triton's kernels read a page that several sequences share only once.
        tangents: For a derivative along a direction: the tangents of the inputs, by the names of the inputs, as
        `tensors`; as `outputs`, those of o, lse and the gradients. The backends `tiled` and `reference` have it.
    """

    spec: Spec
    rows: tuple[Row, ...]
    seed: int | None
    device: torch.device
    tensors: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    cut_of: int = 0
    first_head: int = 0
    threads: int = 0
    pages: np.ndarray | None = None
    tangents: Problem | None = None
    # Functions with which a backend computes this problem again in the same memory. An engine may write other values
    # into that memory and run the problem again; the backend then need not make the views of a small call again. A
    # problem that `replace` returns has a new, empty list. The functions refer to tensors, never to the problem.
    calls: list[Callable[[], object]] = field(default_factory=list, init=False)

    @classmethod
    def create(
        cls,
        tensors: Mapping[str, Tensor],
        options: Options,
        direction: Direction = "forward",
        *,
        spec: Spec | None = None,
        outputs: Mapping[str, Tensor] | None = None,
        trusted: bool = False,
        fixed_pages: bool = False,
        seed: int | None = None,
    ) -> Problem:
        """Check tensors against the contract, read the index tensors, and allocate the answers.

        Args:
            tensors: Tensors by their names, as `attention` takes them.
            options: Options of the call.
            direction: `forward` or `backward`.
            spec: The result of `plan`, if the caller has it already.
            outputs: Buffers to write into, contiguous, of the shapes and dtypes of `Spec.outputs`. None allocates them,
                in the stride order of their inputs.
            trusted: Do not check the values of `block_table`, `k_scale` and `v_scale`.
            fixed_pages: The page numbers in `block_table` do not change while the problem is used. If `block_table` is
            on the CPU, Triton's kernels then read a page that several sequences share only once.
            seed: Seed of dropout, in place of that in `options`: calls that differ in their seeds alone share one
            `spec`.

        Raises:
            ProblemError: names each field that is not valid.
        """
        if traced():
            raise RuntimeError("torch.jit.trace cannot record a Problem: trace `attention`, which is an operator")
        spec = spec or plan({name: tensor_info(name, t) for name, t in tensors.items()}, options, direction)
        tensors = {name: in_memory(name, t) for name, t in tensors.items()}
        device = tensors["q"].device
        given = {name: t if t.device == device else _placed(name, t, device) for name, t in tensors.items()}
        rows = spec.rows({name: readings.numbers(tensors[name]) for name in INDEX_TENSORS if name in tensors})
        if spec.paged and not trusted:
            sequences.check_pages(spec, rows, tensors["block_table"])
        if spec.quantized and not trusted:
            check_scales(tensors)
        places = outputs or {}
        made = {
            name: places[name] if name in places else _memory(name, info, tensors)
            for name, info in spec.outputs.items()
        }
        known = spec.paged and fixed_pages and tensors["block_table"].device.type == "cpu"
        return cls(
            spec, rows, drawn_seed(options) if seed is None else seed, device, given, made,
            pages=tensors["block_table"].numpy() if known else None,
        )  # fmt: skip

    def view(self, name: str) -> Tensor:
        """Return the canonical view of the input or output `name` (see the module)."""
        tensor = self.tensors[name] if name in self.tensors else self.outputs[name]
        return self.canonical(name, tensor)

    def canonical(self, name: str, t: Tensor) -> Tensor:
        """Return the canonical view of `t`, which has the shape that the contract gives to `name`."""
        spec, row = self.spec, TENSORS[name]
        if row.per_head:
            return t.float().expand(spec.shape_of(name))
        if row.broadcast:
            t = t.reshape((1,) * (spec.rank - t.ndim) + tuple(t.shape)).expand(spec.shape_of(name))
        if row.scale_of and not spec.per_row(name):
            return t.expand(1, spec.kv_heads)[..., None] if t.ndim == 0 else t[..., None]
        if row.name == "key_weights" and spec.paged and spec.ragged:
            return t
        if spec.options.layout != "bhsd" and row.in_layout:
            if t.ndim == len(row.axes):
                return t.transpose(1, 2)
            if spec.ragged:
                return t.transpose(0, 1)[None]
        if spec.ragged:
            return t[None]
        return t if t.ndim == len(row.axes) else _one_head(t, len(row.axes))

    def mask_part(self, t: Tensor, rows: Sequence[Row]) -> Tensor:
        """Return the part of a mask for `rows`, which have equal lengths: (n|1,Hq|1,sq|1,sk|1).

        `t` has the shape of `attn_mask` or of `own_part("dattn_mask")`. Broadcast dimensions have size 1. The part is a
        view if the rows are consecutive.
        """
        t, first = self._mask_sequences(t)
        row = rows[0]
        valid = t[:, :, : row.q_len if t.shape[2] > 1 else 1, : row.kv_len if t.shape[3] > 1 else 1]
        return sequences.of_mask(valid, rows, first)

    def block_part(self, rows: Sequence[Row]) -> Tensor:
        """Return the part of the block mask for `rows`: (n|1,Hq|1,ceil(sq/Mq),ceil(sk/Mk)). See `mask_part`."""
        t, first = self._mask_sequences(self.tensors["block_mask"])
        (queries, keys), row = self.spec.options.block_size, rows[0]
        return sequences.of_mask(t[:, :, : -(-row.q_len // queries), : -(-row.kv_len // keys)], rows, first)

    def put_mask_part(self, t: Tensor, rows: Sequence[Row], part: Tensor) -> None:
        """Write `part` of `rows` back into `t` if `mask_part` returned a copy; a view is up to date already."""
        if part.shape[0] > 1 and not sequences.consecutive(rows):
            full, first = self._mask_sequences(t)
            valid = full[:, :, : part.shape[2], : part.shape[3]]
            valid.index_copy_(
                0, torch.tensor([row.batch - first for row in rows], dtype=torch.int64, device=t.device), part
            )

    def whole_mask(self, t: Tensor) -> Tensor:
        """Return the mask `t` with all four dimensions, each of which is 1 if it is broadcast."""
        return _one_head(t.reshape((1,) * (self.spec.rank - t.ndim) + tuple(t.shape)), 4)

    def _mask_sequences(self, t: Tensor) -> tuple[Tensor, int]:
        """Return a mask with all four dimensions, and the batch index of the first sequence in it."""
        t = self.whole_mask(t)
        return t, self.rows[0].batch if t.shape[0] == len(self.rows) else 0

    def empty_like_output(self, name: str) -> Tensor:
        """Return new memory for the output `name` (`o` or `lse`), which the caller did not request."""
        spec = self.spec
        if name == "lse":
            return torch.empty(spec.lse_shape, dtype=torch.float32, device=self.device)
        q = self.tensors["q"]
        return empty_like(q, (*q.shape[:-1], spec.value_dim))

    def batches(self, limit: Callable[[Row], int] | None = None) -> Iterator[tuple[tuple[Row, ...], dict[str, Tensor]]]:
        """Yield groups of sequences with equal lengths and offsets, and views of their valid rows, by name.

        The views are those of inputs and outputs, such as q (n,Hq,sq,D) and lse (n,Hq,sq). They exclude masks and their
        gradients (see `mask_part`), and gradients that all sequences add to; numbers per head are (Hq,) or (n,Hq).
        `limit`(row) returns the maximum number of sequences in a group with the lengths of `row`, 0 to omit them; by
        default it is 1. Views exclude padding, so a backend calls `clear_outputs` before it writes. Sequences that are
        not adjacent in memory are copied, and their outputs are copied back when the caller requests the next group.
        Keys and values in pages are also copied.

        8-bit k and v stay as they are; scales are (n,Hk,sk), or (n,Hk,1) if rows share a scale.
        """
        inputs = {name: self.canonical(name, t) for name, t in self.tensors.items() if name not in _NOT_OF_ROWS}
        outputs = {name: self.canonical(name, t) for name, t in self.outputs.items() if name not in _NOT_OF_ROWS}
        for rows in self._alike(limit):
            if sequences.consecutive(rows):
                views = {name: self._read(name, view, rows, sequences.viewed) for name, view in inputs.items()}
                yield rows, views | {name: sequences.viewed(name, view, rows) for name, view in outputs.items()}
                continue
            gathered = {name: self._read(name, view, rows, sequences.gathered) for name, view in inputs.items()}
            answers = {name: torch.empty_like(sequences.gathered(name, view, rows)) for name, view in outputs.items()}
            yield rows, gathered | answers
            for name, view in outputs.items():
                sequences.scatter(name, view, rows, answers[name])

    def _read(self, name: str, view: Tensor, rows: Sequence[Row], read: _Read) -> Tensor:
        """Return the part of an input for `rows`, which have equal lengths.

        `read` is used for tensors that consist of rows: it is `sequences.viewed` or `sequences.gathered`.
        """
        if TENSORS[name].scale_of and not self.spec.per_row(name):
            if view.shape[0] == 1:
                return view.expand(len(rows), -1, -1)
            return view.index_select(
                0, torch.tensor([row.index for row in rows], dtype=torch.int64, device=view.device)
            )
        if self.spec.paged and TENSORS[name].of_keys:
            return sequences.gathered_pages(self.spec, view, self.tensors["block_table"], rows)
        return read(name, view, rows)

    def _alike(self, limit: Callable[[Row], int] | None) -> Iterator[tuple[Row, ...]]:
        if limit is None:
            yield from ((row,) for row in self.rows)
            return
        if len(self.rows) == 1:
            if limit(self.rows[0]):
                yield self.rows
            return
        alike: dict[tuple[int, ...], list[Row]] = {}
        for row in self.rows:
            alike.setdefault((row[3], row[6], row[8]), []).append(row)  # by q_len, kv_len and offset
        for same in alike.values():
            if not (count := limit(same[0])):
                continue
            yield from (tuple(same[start : start + count]) for start in range(0, len(same), count))

    def sequences(self) -> Iterator[tuple[Row, dict[str, Tensor]]]:
        """Yield each sequence like `batches`, without the batch dimension: q (Hq,sq,D), lse (Hq,sq)…"""
        for (row,), x in self.batches():
            yield row, {name: t[0] if "B" in TENSORS[name].axes else t for name, t in x.items()}

    @property
    def query_heads(self) -> range:
        """The range of this problem's query heads, as indices in the whole request."""
        return range(self.first_head, self.first_head + self.spec.q_heads)

    @property
    def flops(self) -> int:
        """Like `Spec.flops`, but for the sequences' true lengths."""
        return flops_of(self.spec, sum(row.q_len * row.kv_len for row in self.rows))

    def heads(self, start: int, stop: int) -> Problem:
        """Return the problem of key/value heads [`start`, `stop`) and their query heads, over the same memory.

        This is not allowed for the gradient of a mask that heads share, or for tensors without a head dimension.
        """
        spec = self.spec
        group = spec.q_heads // spec.kv_heads

        def part(name: str, t: Tensor) -> Tensor:
            row = TENSORS[name]
            axis = row.head_axis(spec.options.layout)
            if row.scale_of and not spec.per_row(name):
                axis = -1 if t.ndim else None
            if axis is None or (row.broadcast and shared_by_heads(t.shape)):
                return t
            first, last = (start, stop) if row.of_keys else (start * group, stop * group)
            return t.narrow(t.ndim + axis, first, last - first)

        tensors = {name: part(name, t) for name, t in self.tensors.items()}
        infos = {
            name: TensorInfo(info.dtype, tuple(tensors[name].shape)) if name in tensors else info
            for name, info in spec.tensors.items()
        }
        part_spec = replace(spec, tensors=infos, q_heads=(stop - start) * group, kv_heads=stop - start)
        outputs = {name: part(name, t) for name, t in self.outputs.items()}
        first_head = self.first_head + start * group
        cut_of = self.cut_of or spec.kv_heads
        tangents = self.tangents and self.tangents.heads(start, stop)
        return replace(
            self, spec=part_spec, tensors=tensors, outputs=outputs, cut_of=cut_of, first_head=first_head,
            tangents=tangents,
        )  # fmt: skip

    def with_columns(self) -> Problem:
        """Return an equivalent problem in which each head dimension of 0 (D or Dv) is one column of zeros.

        Outputs without columns get new memory of this width; the other outputs are those of this problem.
        """
        spec = self.spec
        dims = {"D": max(1, spec.head_dim), "Dv": max(1, spec.value_dim)}

        def wide(name: str, t: Tensor) -> Tensor:
            row = TENSORS[name]
            return t if t.shape[-1:] != (0,) or not row.has_columns else t.new_zeros(*t.shape[:-1], dims[row.axes[-1]])

        tensors = {name: wide(name, t) for name, t in self.tensors.items()}
        infos = {
            name: TensorInfo(info.dtype, tuple(tensors[name].shape)) if name in tensors else info
            for name, info in spec.tensors.items()
        }
        wide_spec = replace(spec, tensors=infos, head_dim=dims["D"], value_dim=dims["Dv"])
        outputs, tangents = {n: wide(n, t) for n, t in self.outputs.items()}, self.tangents
        tangents = tangents and tangents.with_columns()
        return replace(self, spec=wide_spec, tensors=tensors, outputs=outputs, tangents=tangents)

    def of_rows(self, start: int, stop: int) -> Problem:
        """Return the problem of sequences [`start`, `stop`), over the same memory.

        This is not allowed if an output is a sum over sequences: dsinks, or the gradient of a mask that sequences
        share.
        """
        return replace(self, rows=self.rows[start:stop], tangents=self.tangents and self.tangents.of_rows(start, stop))

    @property
    def has_gaps(self) -> bool:
        """Whether there may be rows of the outputs that no sequence writes, such as padding."""
        return not all(0 < row.q_len == row.q_rows and 0 < row.kv_len == row.kv_rows for row in self.rows)

    def clear_outputs(self) -> None:
        """Fill output rows that no sequence may write with the answer of a row that sees no key.

        This is 0, and −inf for `lse`.
        """
        if not self.has_gaps:
            return
        for name in self.outputs:
            self.own_part(name).fill_(float("-inf") if name == "lse" else 0.0)

    def own_part(self, name: str) -> Tensor:
        """Return a view of the part of the output `name` that this problem's sequences write, in canonical dimensions.

        This is the whole output, unless this problem is a part of a larger one (`of_rows`), whose other parts may be
        written at the same time.
        """
        t = self.outputs[name]
        row = TENSORS[name]
        if not self.rows or row.per_head:
            return t
        first, last = self.rows[0], self.rows[-1]
        if row.broadcast:
            view, _ = self._mask_sequences(t)
            return view if view.shape[0] == 1 else view[first.batch : last.batch + 1]
        view = self.canonical(name, t)
        if not self.spec.ragged:
            return view[first.batch : last.batch + 1]
        if row.of_keys:
            return view[:, :, first.kv_start : last.kv_start + last.kv_rows]
        return view[:, :, first.q_start : last.q_start + last.q_rows]


def _memory(name: str, info: TensorInfo, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return new memory for an output: o with q's order of strides, a gradient with its input's."""
    like = tensors.get("q" if name == "o" else name[1:])
    if like is None:  # lse
        return torch.empty(info.shape, dtype=DTYPES[info.dtype], device=tensors["q"].device)
    return empty_like(like, info.shape, DTYPES[info.dtype])


def drawn_seed(options: Options) -> int | None:
    """Return the seed of dropout, drawn if the caller gives none; None without dropout."""
    if options.dropout_p and options.dropout_seed is None:
        return int(torch.randint(1 << 53, (), dtype=torch.int64, device="cpu").item())
    return options.dropout_seed


def launch_key(spec: Spec, backend: str, cached: str | None = None) -> tuple[Any, ...]:
    """Return the key that requests must share to run in one launch.

    Lengths, batch sizes, head counts, scalars, page and block sizes and the shapes of scales may differ. `cached` is
    the dtype of the pages that will replace k and v.
    """
    mask = spec.tensors["attn_mask"].dtype if "attn_mask" in spec.tensors else None
    dtypes = spec.dtype, cached or spec.tensors["k"].dtype, mask
    dims, paged = (spec.head_dim, spec.value_dim), spec.paged or cached is not None
    return backend, spec.direction, dtypes, dims, spec.options.precision, spec.level, paged, spec.has("block_mask")


def check_scales(tensors: Mapping[str, Tensor]) -> None:
    """Raise ProblemError for scales on the CPU that are not finite. Scales on other devices are not checked."""
    seen = [name for name in SCALES if name in tensors and tensors[name].device.type == "cpu"]
    if wrong := [name for name in seen if not tensors[name].isfinite().all()]:
        raise ProblemError((name, "contains a number that is not finite") for name in wrong)


def _placed(name: str, t: Tensor, device: torch.device) -> Tensor:
    """Return an input of another device on the problem's device; an index tensor may stay where it is.

    Page numbers and scalar scales are moved to the device. Other tensors that are not on it raise ProblemError.
    """
    if name in INDEX_TENSORS:
        return t
    if name == "block_table" or (name in SCALES and t.ndim == 0):
        return t.to(device)
    raise ProblemError([(name, f"is on {t.device}, but q is on {device}")])


def with_forwards(problems: Sequence[Problem]) -> tuple[list[Problem], Sequence[Problem]]:
    """Return forward problems for the gradient problems without `lse`, and all gradient problems.

    Among the latter, those without `lse` have the outputs of their forward problem as their inputs `o` and `lse`.
    """
    forwards = {id(p): forward_of(p) for p in problems if "lse" not in p.tensors}
    whole = [replace(p, tensors=p.tensors | forwards[id(p)].outputs) if id(p) in forwards else p for p in problems]
    return list(forwards.values()), whole


def forward_of(problem: Problem) -> Problem:
    """Return the forward problem of a gradient problem, with memory for its `o` and `lse`."""
    spec = problem.spec
    return replace(
        problem,
        spec=spec.forward,
        tensors={name: problem.tensors[name] for name in spec.forward.tensors},
        outputs={name: problem.empty_like_output(name) for name in ("o", "lse")},
    )


def _one_head(t: Tensor, rank: int) -> Tensor:
    """Return (S, …) or (B, S, …) as (B, 1, S, …) of `rank` dimensions, and a tensor of that rank unchanged."""
    if t.ndim == rank:
        return t
    return t.unsqueeze(1) if t.ndim == rank - 1 else t[None, None]


def shared_by_heads(mask: Sequence[int]) -> bool:
    """Return whether a mask of this shape is the same for all heads."""
    return len(mask) < 3 or mask[-3] == 1


_Read = Callable[[str, Tensor, Sequence[Row]], Tensor]

# Tensors that are not among the views of `batches`: index tensors, page numbers, masks (see `mask_part` and
# `block_part`), and gradients to which all sequences add.
_NOT_OF_ROWS = {
    name
    for name, row in TENSORS.items()
    if row.is_index or name == "block_table" or row.broadcast or (row.per_head and name not in FORWARD_TENSORS)
}


def narrowed(t: Tensor) -> Tensor:
    """Return a float64 mask in float32. Numbers below float32's range become its lowest finite number, not −inf."""
    narrow = t.float()
    return torch.where(narrow.isneginf() & ~t.isneginf(), torch.finfo(torch.float32).min, narrow)
