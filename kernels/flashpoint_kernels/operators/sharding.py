"""Attention of torch's DTensors that are sharded over the batch or the heads.

Each process computes the heads and sequences that it holds, without communication, and with the bits of a call with the
whole tensors. Other inputs are moved to where q's parts need them, as torch's own attention does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from flashpoint_contract.options import Options, ProblemError
from flashpoint_contract.tensors import TENSORS

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement  # its import takes seconds

_HANDLES = frozenset(
    ("q", "k", "v", "attn_mask", "block_mask", "alibi_slopes", "sinks", "q_lengths", "kv_lengths", "offset")
)
_PARTS = {"B": "batch", "Hq": "heads", "Hk": "heads"}  # the axes that may be sharded
Answers = tuple[Tensor, Tensor]


def used(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(t, module.DTensor) for t in tensors)


def refuse(call: str, tensors: Iterable[Tensor | None]) -> None:
    """Raise ProblemError for a DTensor, of which `call` does not compute the parts."""
    if used(tensors):
        raise ProblemError([("q", f"is a DTensor, which {call} does not take: pass to_local() of each tensor")])


def attention(
    call: Callable[[Mapping[str, Tensor | None], Options], Answers],
    tensors: Mapping[str, Tensor | None],
    options: Options,
) -> Answers:
    """Return o and lse as DTensors, from `call` with the parts of this process."""
    from torch.distributed.tensor import DTensor

    given = _checked(tensors, options)
    q, mesh = given["q"], given["q"].device_mesh
    split = _split(given, options.layout)
    parts: dict[str, Tensor | None] = dict.fromkeys(tensors)
    for name, t in given.items():
        placements, gradient = _placements(_axes(name, t, options.layout, q.ndim), t.shape, split)
        parts[name] = t.redistribute(mesh, placements).to_local(grad_placements=gradient)
    answers = []
    for name, part in zip(("o", "lse"), call(parts, options), strict=True):
        axes = TENSORS[name].axes_in(options.layout, q.ndim)
        whole = [q.shape[0] if axis == "B" else 2 for axis in axes]
        answers.append(DTensor.from_local(part, mesh, _placements(axes, whole, split)[0], run_check=False))
    return answers[0], answers[1]


def _checked(tensors: Mapping[str, Tensor | None], options: Options) -> dict[str, DTensor]:
    """Return the tensors of a call that can be sharded. Raises ProblemError for others."""
    from torch.distributed.tensor import DTensor

    given = {name: t for name, t in tensors.items() if t is not None}
    if options.dropout_p:
        raise ProblemError([("dropout_p", "must be 0 for DTensors: all parts would drop the same weights")])
    if options.layout == "thd":
        raise ProblemError([("layout", "must be bhsd or bshd for DTensors: packed sequences have no batch axis")])
    errors = [(name, "is not for DTensors: pass to_local() of each tensor") for name in given if name not in _HANDLES]
    errors += [
        (name, "must be a DTensor, as the others are: use torch.distributed.tensor.distribute_tensor")
        for name, t in given.items()
        if name in _HANDLES and not isinstance(t, DTensor)
    ]
    sharded = {name: t for name, t in given.items() if isinstance(t, DTensor)}
    if not errors:
        mesh = sharded["q"].device_mesh
        errors = [(name, "is on another mesh than q") for name, t in sharded.items() if t.device_mesh != mesh]
    if errors:
        raise ProblemError(errors)
    return sharded


def _split(given: Mapping[str, DTensor], layout: str) -> list[str]:
    """Return for each axis of the mesh what it splits: "batch", "heads", or "" where all processes compute the same.

    It is what q's placement says, if k's heads or the sequences can be divided equally; the groups of heads then stay
    together.
    """
    from torch.distributed.tensor import Shard

    q, k = given["q"], given["k"]
    axes = _axes("q", q, layout, q.ndim)
    sizes = {_PARTS[axis]: n for axis, n in zip(_axes("k", k, layout, q.ndim), k.shape, strict=True) if axis in _PARTS}
    split = []
    for count, placement in zip(q.device_mesh.shape, q.placements, strict=True):
        # A strided shard, a subclass, is in another order.
        part = _PARTS.get(axes[placement.dim], "") if type(placement) is Shard else ""
        if part and sizes[part] % count == 0:
            sizes[part] //= count
        else:
            part = ""
        split.append(part)
    return split


def _axes(name: str, t: Tensor, layout: str, rank: int) -> tuple[str, ...]:
    """Return the axes of an input, which may lack the first ones."""
    axes = TENSORS[name].axes_in(layout, rank)
    return axes[len(axes) - t.ndim :]


def _placements(
    axes: Sequence[str], shape: Sequence[int], split: Sequence[str]
) -> tuple[list[Placement], list[Placement]]:
    """Return the placements of a tensor, and those of its gradient, of which each process has a term where it is whole.

    An axis of size 1 is broadcast, and so whole in each process.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    own = {_PARTS[axis]: n for n, axis in enumerate(axes) if axis in _PARTS and shape[n] > 1}
    placements: list[Placement] = [Shard(own[part]) if part in own else Replicate() for part in split]
    gradient: list[Placement] = [
        Partial() if part and part not in own else placement for part, placement in zip(split, placements, strict=True)
    ]
    return placements, gradient
