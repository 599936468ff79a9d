"""Record which tokens of a batch the server's caches hold. The model counts padding as tokens; the caches do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashpoint.errors import invalid


@dataclass(frozen=True, eq=False)
class Step:
    """The tokens that one forward adds to a batch."""

    count: int
    valid: Tensor | None = None  # (B, count), true for tokens that are not padding; None if all are
    gaps: bool = False  # padding lies between tokens, so their distances in the caches are smaller than the model's
    hides: bool = False  # the mask hides tokens that the caches hold

    @cached_property
    def lengths(self) -> Tensor | None:
        """Return the number of valid tokens of each sequence, (B,); None if all are valid."""
        return None if self.valid is None else self.valid.sum(1)

    @cached_property
    def order(self) -> Tensor | None:
        """Return the indices of each sequence's valid tokens, padded with other indices: (B, most valid tokens of a
        sequence). None if all tokens are valid.
        """
        return None if self.valid is None else _first(self.valid)

    def last(self, count: int) -> Step:
        if count == self.count:
            return self
        return replace(self, count=count, valid=None if self.valid is None else self.valid[:, -count:])


@dataclass(frozen=True, eq=False)
class History:
    """The tokens of a batch at `length` positions. `valid` (B, length) is true for those in the caches (None: all)."""

    length: int = 0
    valid: Tensor | None = None
    batch: int = 0

    def cached_lengths(self, batch: int) -> list[int]:
        """Return the number of tokens of each sequence that the caches hold."""
        lengths: list[int] = [self.length] * batch if self.valid is None else self.valid.sum(1).tolist()
        return lengths

    def step(self, mask: Tensor | None, count: int) -> Step:
        """Return the step of a forward over `count` tokens. `mask` is (B, length + count), false for padding.

        A shorter mask hides the missing positions. Raises InvalidInputError for tokens that the caches do not hold.
        """
        whole = self.length + count
        if mask is None or (mask.shape[1] >= whole and bool(mask[:, :whole].all())):
            if self.valid is not None:
                raise _shown()
            return Step(count)
        mask = pad(mask, (0, whole - mask.shape[1])) if mask.shape[1] < whole else mask
        before, new = mask[:, : self.length], mask[:, self.length : whole]
        in_caches = torch.ones_like(before) if self.valid is None else self.valid.to(mask.device)
        if bool((before & ~in_caches).any()):
            raise _shown()
        after = torch.cat((in_caches, new), 1)
        runs = after[:, :1].sum(1) + (after[:, 1:] & ~after[:, :-1]).sum(1)
        valid = None if bool(new.all()) else new
        return Step(count, valid, gaps=bool((runs > 1).any()), hides=not torch.equal(before, in_caches))

    def after(self, step: Step, batch: int) -> History:
        some = self.valid if step.valid is None else step.valid
        if some is None:
            return History(self.length + step.count, None, batch)
        before = some.new_ones(batch, self.length) if self.valid is None else self.valid.to(some.device)
        new = some.new_ones(batch, step.count) if step.valid is None else step.valid
        return History(self.length + step.count, torch.cat((before, new), 1), batch)

    def cut(self, length: int) -> History:
        return History(length, None if self.valid is None else _or_none(self.valid[:, :length]), self.batch)

    def take(self, rows: Sequence[int]) -> History:
        return History(self.length, None if self.valid is None else _or_none(self.valid[list(rows)]), len(rows))

    @cached_property
    def columns(self) -> Tensor | None:
        """Return the positions of each sequence's tokens that are in its cache, padded with other positions: (B, most
        tokens of a cache). None if the caches hold all tokens.
        """
        return None if self.valid is None else _first(self.valid)


@dataclass(frozen=True, eq=False)
class Forward:
    """One forward of the model over a batch: the tokens before it, and the tokens that it adds."""

    before: History
    step: Step
    at: list[int]  # position in each sequence's cache at which the forward writes

    @cached_property
    def after(self) -> History:
        return self.before.after(self.step, len(self.at))


def _first(valid: Tensor) -> Tensor:
    """Return the indices of each row's true elements, padded with other indices to the largest number in a row."""
    return valid.int().argsort(dim=1, descending=True, stable=True)[:, : int(valid.sum(1).max())]


def _or_none(valid: Tensor) -> Tensor | None:
    return None if bool(valid.all()) else valid


def _shown() -> Exception:
    return invalid(
        "attention_mask",
        "shows tokens that were padding when they were written, and which the server's cache does not hold. Give the "
        "mask of the whole batch at every call, or begin anew with cache.reset()",
    )
