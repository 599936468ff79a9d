"""The message of an inference over HTTP or gRPC: the content of its head, and its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from flashpoint_contract.options import Direction
from flashpoint_contract.spec import Spec
from flashpoint_contract.tensors import INDEX_TENSORS, TensorInfo
from flashpoint_server.formats.json import bytes_of
from flashpoint_server.formats.message import TensorMessage
from flashpoint_server.http.body import copy
from flashpoint_server.ipc.regions import Region, Regions, check_apart
from flashpoint_server.oip.head import InferHead, Input
from flashpoint_server.plan import Plan


class InferMessage(TensorMessage):
    """An inference request whose head has been parsed.

    `owner` is the name of the caller's API key. A tensor in shared memory must be in a region that this key registered.
    """

    def __init__(self, head: InferHead, regions: Regions, owner: str, direction: Direction) -> None:
        self.head = head
        self.inputs = tuple((given.name, given.info) for given in head.inputs)
        self.options, self.direction = head.options, direction
        self._regions = regions
        self.in_regions = head.in_regions
        self._owner = owner
        self.kind = "plain"  # the head has no options of caches and saved forwards
        self.checked, self.seed = head.checked(direction)

    def numbers(self, plan: Plan) -> list[TensorInfo]:
        """Return the outputs that the answer contains as numbers, not as bytes. Raises Refusal 422."""
        return [plan.answers[o.name] for o in self.head.wanted(plan.answers) if not (o.binary or o.shared)]

    def elsewhere(self, spec: Spec) -> Mapping[str, tuple[Region, int]]:
        """Return (region, offset) of each tensor in the caller's shared memory, by name. Raises Refusal 422.

        Index tensors are left out: `fill` copies them, because their values are checked and must not change afterwards.
        """
        locate = partial(self._regions.locate, self._owner)
        inputs, wanted = self.head.inputs, self.head.wanted(spec.outputs)
        given = {i.name: locate(i.name, i.info, i.shared) for i in inputs if i.shared and i.name not in INDEX_TENSORS}
        outputs = {o.name: locate(o.name, spec.outputs[o.name], o.shared, spare=True) for o in wanted if o.shared}
        if outputs:
            check_apart(given, outputs, {**spec.tensors, **spec.outputs})
        return given | outputs

    @property
    def following(self) -> Iterable[Input]:
        """The inputs whose bytes follow the head, in order."""
        return (given for given in self.head.inputs if given.array is None and given.shared is None)

    async def fill(self, places: Mapping[str, memoryview]) -> None:
        """Copy into `places` the tensors that were sent as numbers, and the index tensors from shared memory."""
        for given in self.head.inputs:
            if given.array is not None:
                await copy(places[given.name], bytes_of(given.array))
            elif given.shared is not None and given.name in places:
                places[given.name][:] = self._regions.read(self._owner, given.name, given.info, given.shared)
