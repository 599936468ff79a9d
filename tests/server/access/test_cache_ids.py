"""A cache id contains the cache's shape, signed for its owner. Only replicas with the same secret accept it."""

import pytest

from flashpoint_contract.caches import ID_LENGTH
from flashpoint_server.access.cache_ids import CacheIds
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.bodies import CacheShape
from flashpoint_server.ipc.counts import WorkerGroup
from flashpoint_server.ipc.memory import NamedMemory

SECRET, OTHER = ("one secret, as long as it has to be, or longer", "and another one, which is no shorter")
SHAPE = CacheShape((8, 2), (64, 128), (64, 64), "bfloat16")


def ids(memory=None, **settings):
    return CacheIds(Settings(**settings), WorkerGroup(memory))


def test_a_replica_reads_the_ids_of_another_with_the_same_secret():
    here, there = ids(cache_secret=SECRET, replica="a"), ids(cache_secret=SECRET, replica="b")
    one = here.make("alice", 7, 3, SHAPE)
    assert there.read("alice", one) == here.read("alice", one) == ("a", 7, 3, SHAPE)
    assert there.read("bob", one) is None
    assert ids(cache_secret=OTHER, replica="a").read("alice", one) is None
    assert ids().read("alice", one) is None


def test_replicas_draw_names_and_secrets_and_their_processes_share_both():
    memory = NamedMemory()
    first, second, other = ids(memory), ids(NamedMemory(memory.fd)), ids(NamedMemory())
    assert first.replica == second.replica != other.replica
    one = first.make("alice", 7, 3, SHAPE)
    assert second.read("alice", one).replica == first.replica
    assert other.read("alice", one) is None


def test_the_longest_id_is_one_that_is_read():
    long = ids(replica="x" * 63)
    layers = tuple(2**16 - n % 16 for n in range(512))
    one = long.make("alice", 2**63 - 1, 2**40, CacheShape(layers, layers, layers, "float8_e4m3fn"))
    assert len(one) <= ID_LENGTH
    assert long.read("alice", one).replica == "x" * 63


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cache_secret", "short", "32 or more random characters"),
        ("replica", "two words", "letters"),
        ("replica", "x" * 64, "63"),
    ],
)
def test_settings_that_cannot_work_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{name: value})
