"""The id of a saved forward contains its problem (shapes, options, sizes), signed for its owner."""

from flashpoint_contract.options import Options
from flashpoint_contract.saved import ID_LENGTH, plan_saved
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels.problems.cost import Extent
from flashpoint_server.access.cache_ids import CacheIds
from flashpoint_server.access.saved_ids import SavedIds
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.counts import WorkerGroup

SECRET = "one secret, as long as it has to be, or longer"
INFO = TensorInfo("bfloat16", (2, 4, 24, 16))
FORWARD = plan_saved(dict.fromkeys("qkv", INFO), Options(causal=True, scale=0.3))
EXTENT = Extent(2, 24, 30, 500)


def ids(replica="a", secret=SECRET):
    return SavedIds(CacheIds(Settings(cache_secret=secret, replica=replica), WorkerGroup()))


def test_an_id_has_the_problem_of_its_forward():
    head = SavedIds.head(FORWARD, None, EXTENT)
    here = ids()
    one = here.make("alice", 7, 3, head)
    assert one == here.make("alice", 7, 3, head)
    assert len(one) <= ID_LENGTH
    read = ids("b").read("alice", one)
    assert read == ("a", 7, 3, FORWARD, EXTENT)
    assert read.forward.options == FORWARD.options
    assert ids().read("alice", here.make("alice", 7, 3, SavedIds.head(FORWARD, None, None))).extent is None


def test_other_owners_secrets_and_texts_are_not_read():
    here = ids()
    one = here.make("alice", 7, 3, SavedIds.head(FORWARD, None, EXTENT))
    assert here.read("bob", one) is None
    assert ids(secret="and another one, which is no shorter").read("alice", one) is None
    for text in ("", "s", "c" + one[1:], one[:-1], one + "A", one[:20] + "ä", "s" * (ID_LENGTH + 1)):
        assert here.read("alice", text) is None, text
