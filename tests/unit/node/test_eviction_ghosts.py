from __future__ import annotations

from kvstore.node.eviction.ghosts import GhostList


def test_the_oldest_ghost_is_forgotten_first() -> None:
    ghosts = GhostList(2)
    for key in (b"a", b"b", b"a", b"c"):
        ghosts.add(key)
    assert (b"a" in ghosts, b"b" in ghosts, b"c" in ghosts, len(ghosts)) == (True, False, True, 2)


def test_a_ghost_comes_back_once() -> None:
    ghosts = GhostList(1)
    ghosts.add(b"a")
    assert ghosts.take(b"a")
    assert not ghosts.take(b"a")
    assert not len(ghosts)


def test_a_smaller_limit_forgets_at_once() -> None:
    ghosts = GhostList(3)
    for key in (b"a", b"b", b"c"):
        ghosts.add(key)
    ghosts.resize(1)
    assert (b"b" in ghosts, b"c" in ghosts) == (False, True)
    ghosts.resize(0)
    ghosts.add(b"d")
    assert not len(ghosts)
