"""The tests notice a broken line: see mutations.py."""

import mutations
import pytest


@pytest.mark.slow
def test_every_mutant_is_noticed():
    assert mutations.survivors() == []
