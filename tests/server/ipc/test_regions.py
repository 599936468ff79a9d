"""Each API key has its own regions of shared memory, and its own names for them."""

import os
import secrets
import shutil
from multiprocessing import shared_memory

import pytest

from flashpoint_contract.tensors import TensorInfo
from flashpoint_server.ipc.regions import Regions, RegionSlice, provide
from flashpoint_server.refusal import Refusal


@pytest.fixture
def key():
    block = shared_memory.SharedMemory("flashpoint-test-" + secrets.token_hex(8), create=True, size=4096)
    yield block.name
    block.close()
    block.unlink()


def test_a_region_is_its_keys_own(key):
    """An API key cannot see, use or remove a shared-memory region of another key, and may use the same names."""
    dropped = []
    regions = Regions(1 << 20, dropped.append)
    regions.register("alice", "mine", key, 0, 1024)
    tensor, place = TensorInfo("float32", (2, 2)), RegionSlice("mine", 0, 16)
    assert regions.read("alice", "q", tensor, place) == bytes(16)
    for call, status in (
        (lambda: regions.read("bob", "q", tensor, place), 422),
        (lambda: regions.locate("bob", "q", tensor, place), 422),
        (lambda: regions.find("bob", "mine"), 404),
    ):
        with pytest.raises(Refusal) as caught:
            call()
        assert caught.value.status == status
    assert regions.all("bob") == []
    regions.unregister("bob", "mine")  # this has no effect
    assert [region.name for region in regions.all("alice")] == ["mine"]
    regions.register("bob", "mine", key, 1024, 1024)
    assert regions.locate("alice", "q", tensor, place)[1] == 0
    assert regions.locate("bob", "q", tensor, place)[1] == 1024
    regions.unregister_all("bob")
    assert (len(dropped), len(regions.all("alice"))) == (1, 1)
    regions.close()
    assert (len(dropped), regions.all("alice")) == (2, [])


def test_an_object_for_which_there_is_no_memory_is_refused(key):
    """A full /dev/shm, or an object that was made larger than it, gets 503; writing there would kill the process."""
    os.truncate(f"/dev/shm/{key}", shutil.disk_usage("/dev/shm").total + (1 << 30))
    with pytest.raises(Refusal, match="has no memory") as caught:
        provide(key, os.path.getsize(f"/dev/shm/{key}"))
    assert (caught.value.status, caught.value.code) == (503, "out_of_memory")
    provide(key, 4096)
    with pytest.raises(Refusal, match="beyond the object's end"):
        provide(key, 1 << 60)
