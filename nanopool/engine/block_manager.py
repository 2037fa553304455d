"""Who owns which KV block, and which blocks hold a known prefix. Chapter 08."""

from collections import OrderedDict
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from nanopool.engine.sequence import Sequence

ROOT = 0  # the content number before a first block

Key = tuple[int, bytes]  # (content number of the block before, tokens)
Entry = tuple[int, int]  # (block, content number)


@dataclass
class Block:
    """One page of the KV pool: who holds it, and the prefix it is known by. Chapter 08."""

    ref_count: int = 0
    key: Key | None = None


class BlockManager:
    """Free blocks in LRU order, reference counts, and a prefix cache without hashes.

    Owned by the Scheduler; chapter 08.

    A full block is known by (content number of the block before it, its tokens). Numbers are never
    reused, so an entry can neither be stale nor collide. vLLM and nano-vllm chain hashes instead.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached: dict[Key, Entry] = {}
        self.last_content = ROOT

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens; none in the empty pool of an encoder."""
        return -(-num_tokens // self.block_size) if self.blocks else 0

    def find_prefix(self, seq: Sequence) -> list[Entry]:
        """The blocks of the longest cached prefix; at least one token is left to compute."""
        hits: list[Entry] = []
        if not (self.enable_prefix_caching and seq.request.reads_prefix_cache):
            return hits
        content = ROOT
        for index in range((seq.num_tokens - 1) // self.block_size):
            entry = self.cached.get(self._key(seq, index, content))
            if entry is None:
                break
            hits.append(entry)
            content = entry[1]
        return hits

    def allocate(self, seq: Sequence, num_tokens: int, hits: Sequences[Entry] = ()) -> bool:
        """Give a sequence room up to num_tokens; a waiting one takes its cached blocks first.

        False (nothing changed) if the pool has too few blocks.
        """
        needed = self.num_blocks_for(num_tokens) - len(seq.block_table) - len(hits)
        idle_hits = sum(self.blocks[block].ref_count == 0 for block, _ in hits)
        if needed > len(self.free) - idle_hits:
            return False
        for block, content in hits:
            self.free.pop(block, None)  # it was free, unless another holds it
            self.blocks[block].ref_count += 1
            seq.block_table.append(block)
            seq.contents.append(content)
        seq.num_computed_tokens += len(hits) * self.block_size
        self._append_blocks(seq, needed)
        self._publish(seq, num_tokens)
        return True

    def _publish(self, seq: Sequence, num_tokens: int) -> None:
        """Enter the blocks that this step fills into the cache, as soon as it is scheduled.

        Every layer stores all rows of a step before any attends, so a neighbour in the same step
        may read them. Of two equal blocks the first is published; both sequences go on under its
        content number.
        """
        if not self.enable_prefix_caching:
            return
        for index in range(len(seq.contents), num_tokens // self.block_size):
            key = self._key(seq, index, seq.contents[-1] if seq.contents else ROOT)
            if key not in self.cached:
                self.last_content += 1
                self.cached[key] = (seq.block_table[index], self.last_content)
                self.blocks[seq.block_table[index]].key = key
            seq.contents.append(self.cached[key][1])

    def release(self, seq: Sequence) -> None:
        """Take its blocks back, the last first: the end of a prefix is reused before its start."""
        for block in reversed(seq.block_table):
            self.blocks[block].ref_count -= 1
            if self.blocks[block].ref_count == 0:
                self.free[block] = None
        seq.block_table.clear()
        seq.contents.clear()

    def forget(self) -> None:
        """Empty the prefix cache: after a failed step nobody knows what the blocks hold."""
        for block, _ in self.cached.values():
            self.blocks[block].key = None
        self.cached.clear()

    def _key(self, seq: Sequence, index: int, parent: int) -> Key:
        start = index * self.block_size
        return parent, seq.token_ids[start : start + self.block_size].tobytes()

    def _append_blocks(self, seq: Sequence, count: int) -> None:
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            if self.blocks[block].key is not None:
                del self.cached[self.blocks[block].key]
            self.blocks[block] = Block(ref_count=1)
            seq.block_table.append(block)
