"""Saved forwards: the inputs, o and lse of forward passes, from which an engine computes gradients later.

ledger.py counts the memory of each owner. States of a saved forward:

reserved (its memory is counted before it runs) → saved (it has its tensors) → deleted or expired
reserved → dropped (the call failed)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from flashpoint_server.engine.state.ledger import Ledger, Owned
from flashpoint_server.ipc.bodies import Save, SavedCall
from flashpoint_server.ipc.messages import MOST_LISTED, SavedRecord
from flashpoint_server.refusal import Refusal


@dataclass(eq=False, kw_only=True)
class SavedForward(Owned):
    """A saved forward. `tensors` is empty until it has run. HTTP processes make its id from `head` (saved_ids.py)."""

    kind: ClassVar[str] = "saved forward"
    word: ClassVar[str] = "saved"
    head: bytes
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def free(self) -> int:
        """Drop the tensors, and return their bytes. A running gradient call has its own references to them."""
        self.tensors = {}
        return self.nbytes


class SavedStore:
    """The saved forwards of an engine. `ttl` is in seconds of the ledger's clock."""

    def __init__(self, ledger: Ledger, ttl: float) -> None:
        self.ledger = ledger
        self._ttl = ttl

    def reserve(self, save: Save) -> SavedForward:
        """Reserve memory for a forward before it runs. Raises Refusal 413 and 429."""
        ledger = self.ledger
        with ledger.lock:
            ledger.sweep()
            ledger.check_number(save.owner, save.most, 1)
            ledger.check(save.owner, save.quota, save.nbytes, save.nbytes, save.nbytes, SavedForward.kind)
            expires = ledger.clock() + self._ttl
            saved = SavedForward(
                serial=ledger.serial(), owner=save.owner, ttl=self._ttl, expires=expires, head=save.head
            )
            ledger.add(saved, save.nbytes, save.nbytes)
            ledger.enter([saved.serial])
            return saved

    def keep(self, saved: SavedForward, tensors: Mapping[str, Tensor]) -> None:
        """Store the tensors of a forward that has run; its time to live starts."""
        saved.tensors = tensors
        self.ledger.leave([saved.serial], used=True)

    def drop(self, serial: int) -> None:
        """Free a forward, if it still exists. Called if it has failed, or if no caller has received its id."""
        with self.ledger.lock:
            if (saved := self.ledger.get(SavedForward, serial)) is not None:
                self.ledger.end(saved)

    def tensors(self, owner: str, serial: int) -> Mapping[str, Tensor]:
        """Return the tensors of a forward. Raises Refusal 404 and 410."""
        with self.ledger.lock:
            return self._find(owner, serial).tensors

    def execute(self, call: SavedCall) -> list[SavedRecord]:
        """Execute a call that lists, describes or deletes saved forwards. Raises Refusal 404 and 410."""
        with self.ledger.lock:
            if call.operation == "list":
                listed = self.ledger.listed(SavedForward, call.owner)
                records = [self._record(one) for one in listed if one.tensors and one.serial > call.after]
                return records[:MOST_LISTED]
            forwards = [self._find(call.owner, serial) for serial in call.forwards]
            if call.operation == "delete":
                for saved in forwards:
                    self.ledger.end(saved)
                return []
            return [self._record(one) for one in forwards]

    def _find(self, owner: str, serial: int) -> SavedForward:
        result = self.ledger.find(SavedForward, owner, serial)
        if isinstance(result, tuple):
            raise Refusal(*result)
        return result

    def _record(self, saved: SavedForward) -> SavedRecord:
        expires_in = max(0.0, saved.expires - self.ledger.clock())
        return SavedRecord(saved.serial, saved.head, saved.nbytes, saved.ttl, expires_in)
