"""One request, normalised: its spec, its table of sequences, and canonical views of its tensors.

Every backend takes a list of `Problem`s and writes into their outputs. Canonical views have one shape whatever the
layout and rank of the user's tensors (N is B, or 1 in the ragged layout):

    q, o, do, dq  (N, Hq, Sq, D|Dv)      lse, dlse  (N, Hq, Sq)          sinks         (Hq,)   float32
    k, v, dk, dv  (N, Hk, Sk, D|Dv)      attn_mask  (B, Hq, Sq, Sk)      alibi_slopes  (B, Hq) float32

Views share the user's memory; a broadcast dimension of the mask has stride 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flashpoint_kernels.spec import (
    INDEX_TENSORS,
    Direction,
    Options,
    ProblemError,
    Row,
    Spec,
    TensorInfo,
    mask_shape,
    plan,
)

DTYPES = {
    "bool": torch.bool,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensor_info(name: str, tensor: Tensor) -> TensorInfo:
    if not isinstance(tensor, Tensor):
        raise ProblemError([(name, f"must be a torch tensor, not {type(tensor).__name__}")])
    if tensor.dtype not in _NAMES:
        raise ProblemError([(name, f"dtype {tensor.dtype} is not served")])
    return TensorInfo(_NAMES[tensor.dtype], tuple(tensor.shape))


@dataclass(eq=False)
class Problem:
    """See the module. `tensors` are the user's, `outputs` the answers, both by their names in the contract."""

    spec: Spec
    rows: tuple[Row, ...]
    seed: int | None
    device: torch.device
    tensors: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    cut_of: int = 0  # key/value heads of the request that this is a part of, see `heads`; 0 for a whole one
    first_head: int = 0  # which query head of that request is its first
    threads: int = 0  # that it may have beyond `reproducible.thread_count`, for they do not change its bits; 0: none

    @classmethod
    def create(
        cls,
        tensors: Mapping[str, Tensor],
        options: Options,
        direction: Direction = "forward",
        *,
        spec: Spec | None = None,
        outputs: Mapping[str, Tensor] | None = None,
    ) -> Problem:
        """Check `tensors` against the contract, read the index tensors, and make room for the answers.

        `spec` is taken as it is when the caller has planned already; `outputs` are buffers to write into (contiguous,
        of the shapes and dtypes of `Spec.outputs`), else they are allocated. Raises ProblemError.
        """
        spec = spec or plan({name: tensor_info(name, t) for name, t in tensors.items()}, options, direction)
        device = tensors["q"].device
        for name, t in tensors.items():
            if t.device != device and name not in INDEX_TENSORS:
                raise ProblemError([(name, f"is on {t.device} where q is on {device}")])
        rows = spec.rows({name: tensors[name].tolist() for name in INDEX_TENSORS if name in tensors})
        seed = options.dropout_seed
        if options.dropout_p and seed is None:
            seed = int(torch.randint(1 << 53, ()).item())
        given = outputs or {}
        made = {
            name: given[name] if name in given else torch.empty(info.shape, dtype=DTYPES[info.dtype], device=device)
            for name, info in spec.outputs.items()
        }
        return cls(spec, rows, seed, device, dict(tensors), made)

    def view(self, name: str) -> Tensor:
        """The canonical view of an input or output tensor (see the module)."""
        tensor = self.tensors[name] if name in self.tensors else self.outputs[name]
        return self.canonical(name, tensor)

    def canonical(self, name: str, t: Tensor) -> Tensor:
        """The canonical view of `t`, which has the shape that the contract gives to `name`."""
        spec = self.spec
        if name == "sinks":
            return t.float()
        if name == "alibi_slopes":
            return t.float().expand(spec.batch, spec.q_heads)
        if name in ("attn_mask", "dattn_mask"):
            t = t.reshape((1,) * (spec.rank - t.ndim) + tuple(t.shape)).expand(mask_shape(spec))
            return _one_head(t, 4)
        if name in ("lse", "dlse"):
            return t[None] if spec.ragged else _one_head(t, 3)
        if spec.ragged:
            return t.transpose(0, 1)[None]
        if t.ndim == 4:
            return t if spec.options.layout == "bhsd" else t.transpose(1, 2)
        return _one_head(t, 4)

    def mask_part(self, t: Tensor, row: Row) -> Tensor:
        """What `row` uses of `t`, which has `attn_mask`'s own shape: (Hq|1, sq|1, sk|1), 1 where broadcast."""
        t = _one_head(t.reshape((1,) * (self.spec.rank - t.ndim) + tuple(t.shape)), 4)
        batch = row.batch if t.shape[0] > 1 else 0
        return t[batch, :, : row.q_len if t.shape[2] > 1 else 1, : row.kv_len if t.shape[3] > 1 else 1]

    def empty_like_output(self, name: str) -> Tensor:
        """Fresh memory of the shape, layout and dtype of `o` or `lse`, for a forward whose answer is not asked."""
        spec = self.spec
        if name == "lse":
            return torch.empty(spec.lse_shape, dtype=torch.float32, device=self.device)
        shape = (*self.tensors["q"].shape[:-1], spec.value_dim)
        return torch.empty(shape, dtype=DTYPES[spec.dtype], device=self.device)

    def batches(self, most: int = 1) -> Iterator[tuple[Row, dict[str, Tensor]]]:
        """Each sequence as a batch of one, with views of its own valid rows: q (1,Hq,sq,D), mask (1,Hq,sq,sk)…

        Inputs and outputs alike, by name; `sinks` (Hq,) and `alibi_slopes` (1,Hq). Padding is not in the views: a
        backend that writes through them first calls `clear_outputs`. Up to `most` neighbours of equal lengths come as
        one batch of a padded layout, with the first one's row: q (n,Hq,sq,D).
        """
        views = {name: self.canonical(name, t) for named in (self.tensors, self.outputs) for name, t in named.items()
                 if name not in _NOT_OF_ROWS}  # fmt: skip
        for row, count in self._alike(most):
            yield row, {name: _own(name, view, row, count) for name, view in views.items()}

    def _alike(self, most: int) -> Iterator[tuple[Row, int]]:
        for _, same in itertools.groupby(self.rows, lambda row: (row.q_len, row.kv_len)):
            while some := tuple(itertools.islice(same, most)):
                yield some[0], len(some)

    def sequences(self) -> Iterator[tuple[Row, dict[str, Tensor]]]:
        """As `batches`, without the dimension of the batch: q (Hq,sq,D), lse (Hq,sq), alibi_slopes (Hq,)…"""
        for row, x in self.batches():
            yield row, {name: t if name == "sinks" else t[0] for name, t in x.items()}

    @property
    def query_heads(self) -> range:
        """Its query heads, as the request that it is, or is a part of, counts them."""
        return range(self.first_head, self.first_head + self.spec.q_heads)

    @property
    def flops(self) -> int:
        """As `Spec.flops`, of the sequences' own lengths."""
        if not (pairs := self.spec.q_len * self.spec.kv_len * (1 if self.spec.ragged else self.spec.batch)):
            return 0
        return self.spec.flops * sum(row.q_len * row.kv_len for row in self.rows) // pairs

    def heads(self, start: int, stop: int) -> Problem:
        """The problem of key/value heads [start, stop) and their query heads alone, over the same memory.

        Heads share nothing but a mask, a seed and what is summed over them: not for the gradient of a mask that they
        share, nor for tensors of one head without its dimension.
        """
        spec = self.spec
        group = spec.q_heads // spec.kv_heads

        def part(name: str, t: Tensor) -> Tensor:
            of_mask = name in ("attn_mask", "dattn_mask")
            if name in INDEX_TENSORS or (of_mask and shared_by_heads(t.shape)):
                return t
            if name in ("sinks", "dsinks", "alibi_slopes"):
                dim = t.ndim - 1
            elif name in ("lse", "dlse"):
                dim = t.ndim - 2
            else:
                dim = t.ndim - (3 if of_mask or spec.options.layout == "bhsd" else 2)
            first, last = (start, stop) if name in _KEY_ROWS else (start * group, stop * group)
            return t.narrow(dim, first, last - first)

        tensors = {name: part(name, t) for name, t in self.tensors.items()}
        infos = {name: TensorInfo(info.dtype, tuple(tensors[name].shape)) for name, info in spec.tensors.items()}
        own = replace(spec, tensors=infos, q_heads=(stop - start) * group, kv_heads=stop - start)
        outputs = {name: part(name, t) for name, t in self.outputs.items()}
        first_head = self.first_head + start * group
        return replace(self, spec=own, tensors=tensors, outputs=outputs, cut_of=spec.kv_heads, first_head=first_head)

    def clear_outputs(self) -> None:
        """Write the answer of a row that attends to nothing wherever a sequence's own rows may not cover an output.

        That is 0, and −inf for `lse`.
        """
        if all(0 < row.q_len == row.q_rows and 0 < row.kv_len == row.kv_rows for row in self.rows):
            return
        for name, t in self.outputs.items():
            t.fill_(float("-inf") if name == "lse" else 0.0)


def _one_head(t: Tensor, rank: int) -> Tensor:
    """(S, …) and (B, S, …) as (B, 1, S, …) of `rank` dimensions; a tensor of that rank as it is."""
    if t.ndim == rank:
        return t
    return t.unsqueeze(1) if t.ndim == rank - 1 else t[None, None]


def shared_by_heads(mask: Sequence[int]) -> bool:
    """Whether a mask of that shape is the same for all heads."""
    return len(mask) < 3 or mask[-3] == 1


_KEY_ROWS = {"k", "v", "dk", "dv"}
_NOT_OF_ROWS = {*INDEX_TENSORS, "dattn_mask", "dsinks"}


def _own(name: str, view: Tensor, row: Row, count: int) -> Tensor:
    if name == "sinks":
        return view
    own = view if view.shape[0] == 1 else view.narrow(0, row.index if name == "alibi_slopes" else row.batch, count)
    if name == "alibi_slopes":
        return own
    if name == "attn_mask":
        return own[:, :, : row.q_len, : row.kv_len]
    start, length = (row.kv_start, row.kv_len) if name in _KEY_ROWS else (row.q_start, row.q_len)
    return own if length == own.shape[2] else own.narrow(2, start, length)


def narrowed(t: Tensor) -> Tensor:
    """A float64 mask in float32: a number below float32's range becomes its least value, not −inf."""
    narrow = t.float()
    return torch.where(narrow.isneginf() & ~t.isneginf(), torch.finfo(torch.float32).min, narrow)
