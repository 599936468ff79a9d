"""`OwnerLru` forgets old entries; at its limit, the owner with the most entries loses the oldest one."""

from flashpoint_server.engine.state.owner_lru import OwnerLru


def test_the_owner_with_the_most_loses_the_oldest():
    remembered = OwnerLru(6)
    remembered.put("bob", "only", 1)
    for number in range(20):
        remembered.put("alice", number, number)
    assert remembered.get("bob", "only") == 1
    assert [n for n in range(20) if remembered.get("alice", n) is not None] == [15, 16, 17, 18, 19]
    assert remembered.get("carol", 19) is None


def test_weights_count():
    remembered = OwnerLru(6)
    remembered.put("bob", "a", 1, 2)
    remembered.put("alice", "b", 2, 4)
    remembered.put("alice", "c", 3, 1)
    assert [remembered.get("alice", key) for key in "bc"] == [None, 3]
    assert remembered.get("bob", "a") == 1


def test_what_is_old_is_forgotten():
    remembered = OwnerLru(10)
    for number in range(4):
        remembered.put("alice", number, number)
        remembered.put("bob", number, number + 2)
    remembered.drop_while(lambda value: value < 3)
    assert [remembered.get("alice", n) for n in range(4)] == [None, None, None, 3]
    assert [remembered.get("bob", n) for n in range(4)] == [None, 3, 4, 5]
    remembered.drop_while(lambda value: True)
    remembered.put("alice", 9, 9)
    assert remembered.get("alice", 9) == 9
