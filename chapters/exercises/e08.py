"""Exercises of chapter 08. Replace a `raise NotImplementedError`, then run its test."""

from collections.abc import Callable, Sequence


def chained_hashes(
    ids: Sequence[int], block_size: int, hash_function: Callable[[object], bytes]
) -> list[bytes]:
    """One hash for each full block: of the pair (hash of the block before, tuple of its ids).

    The hash before the first block is None.
    """
    raise NotImplementedError


def blocks_to_add(stored: int, n: int, block_size: int) -> int:
    """New blocks that a sequence with `stored` tokens in the cache needs for its next n tokens."""
    raise NotImplementedError


class PrefixTree:
    """Token sequences that are in the cache."""

    def insert(self, ids: Sequence[int]) -> None:
        """Remember a sequence."""
        raise NotImplementedError

    def match(self, ids: Sequence[int]) -> int:
        """How many leading tokens of a prompt are cached; one token is always left to compute."""
        raise NotImplementedError


def check_1(chained_hashes) -> None:
    def name(pair) -> bytes:
        return repr(pair).encode()

    assert chained_hashes([1, 2, 3], 4, name) == []
    first, second = chained_hashes([1, 2, 3, 4, 5], 2, name)
    assert first == name((None, (1, 2))) and second == name((first, (3, 4)))
    other = chained_hashes([9, 2, 3, 4], 2, name)
    assert second not in other, "equal tokens after another prefix are another content"


def check_2(blocks_to_add) -> None:
    assert [blocks_to_add(stored, 1, 4) for stored in (2, 3, 4, 5)] == [0, 0, 1, 0]
    assert blocks_to_add(0, 5, 4) == 2
    assert blocks_to_add(4, 4, 4) == 1
    assert blocks_to_add(6, 0, 4) == 0


def check_3(PrefixTree) -> None:
    tree = PrefixTree()
    tree.insert([1, 2, 3, 4, 5])
    tree.insert([1, 2, 9])
    assert tree.match([1, 2, 3, 7]) == 3
    assert tree.match([1, 2, 9, 9]) == 3
    assert tree.match([1, 2, 3, 4, 5]) == 4, "the last token is computed"
    assert tree.match([7, 1, 2]) == 0


EXERCISES = [(chained_hashes, check_1), (blocks_to_add, check_2), (PrefixTree, check_3)]
