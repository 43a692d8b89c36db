"""The eviction suite over every policy that `make_policy` knows."""

from __future__ import annotations

import pytest

from kvstore.errors import ConfigurationError
from kvstore.node.eviction import make_policy, policy_names
from tests.contract.eviction_suite import EvictionSuite


class TestEveryPolicy(EvictionSuite):
    @pytest.fixture(params=policy_names())
    def name(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


def test_the_policies_of_the_documents_are_there() -> None:
    assert policy_names() == ("lru", "s3fifo", "sieve", "arc", "gdsf")


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="'fifo'; known: arc, gdsf, lru, s3fifo, sieve"):
        make_policy("fifo")
