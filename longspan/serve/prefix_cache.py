"""The prefix cache: states at chunk boundaries of prompts, in a radix tree of token sequences."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields

from torch import Tensor

from longspan.models.residual import StackState
from longspan.protocol import State

_SHARE = 4  # one prompt takes at most this fraction of the budget, so that a long one does not evict all others


@dataclass
class CacheStats:
    """Counters of a `PrefixCache`.

    Attributes:
        queries: Prompts looked up.
        hits: Prompts of which a prefix was found.
        query_tokens: Tokens of all prompts looked up.
        hit_tokens: Tokens that were not read again.
        bytes: Bytes held now.
        states: States held now.
        evictions: States dropped to stay within the budget.
    """

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    bytes: int = 0
    states: int = 0
    evictions: int = 0


@dataclass
class _Node:
    """A chunk boundary: the chunk before it, and the state after it unless that was evicted."""

    key: bytes
    parent: _Node | None
    depth: int  # chunks from the root
    children: int = 0
    segment: dict[str, Tensor] = field(default_factory=dict)  # keys and values of the chunk's tokens
    state: dict[str, Tensor] | None = None


class PrefixCache:
    """States at the chunk boundaries of prompts, found by the tokens before them.

    An edge of the tree is one chunk. A node is named by a digest of all tokens before it, so that looking up a prompt
    takes one hash per chunk. What a state holds of constant size is stored with its node and evicted when it was least
    recently used; keys and values that softmax layers hold for every token are stored once per chunk, as long as a
    later boundary needs them.

    Args:
        new_state: Returns an empty state of one sequence.
        chunk: Tokens per chunk.
        budget: The most bytes to hold.
        salt: What the digests begin with: what other states than these differ in, as the model's fingerprint.
    """

    def __init__(self, new_state: Callable[[], StackState], chunk: int, budget: int, salt: bytes = b"") -> None:
        self.stats, self.chunk, self.budget = CacheStats(), chunk, budget
        self._new_state, self._salt = new_state, hashlib.sha256(salt).digest()
        self._token_tensors = frozenset(token_tensors(new_state(), ""))
        self._nodes: dict[bytes, _Node] = {}
        self._recent: OrderedDict[bytes, _Node] = OrderedDict()  # nodes with a state, the least recently used first

    def keys(self, tokens: Tensor) -> list[bytes]:
        """Return the digest of each chunk boundary of a prompt (T,)."""
        data, size = tokens.numpy().tobytes(), 8 * self.chunk
        found, digest = [], self._salt
        for start in range(0, len(data) - size + 1, size):
            digest = hashlib.sha256(digest + data[start : start + size]).digest()
            found.append(digest)
        return found

    def find(self, keys: Sequence[bytes], after: int = 0) -> tuple[int, StackState | None]:
        """Return the last boundary with a state beyond the first `after` chunks: its number of chunks, and the state.

        The state is a copy. Without one, (after, None) is returned.
        """
        for depth in range(len(keys), after, -1):
            node = self._nodes.get(keys[depth - 1])
            if node is not None and node.state is not None:
                self._recent.move_to_end(node.key)
                return depth, self._restore(node)
        return after, None

    def has(self, key: bytes) -> bool:
        """Return whether there is a state at a boundary."""
        return key in self._recent

    def count(self, tokens: int, found: int) -> None:
        """Count a prompt of this many tokens, of which `found` were in the cache."""
        self.stats.queries += 1
        self.stats.hits += found > 0
        self.stats.query_tokens += tokens
        self.stats.hit_tokens += found

    def insert(self, keys: Sequence[bytes], depth: int, state: StackState, own: list[bytes]) -> None:
        """Store a copy of the state after `depth` chunks, if the chunks before it are there.

        Args:
            keys: What `keys` returned for the prompt.
            depth: Number of chunks that the state holds.
            state: The state of one sequence.
            own: The boundaries that this prompt has stored so far; updated. If they take too much of the budget, every
                second one is dropped.
        """
        parent = self._nodes.get(keys[depth - 2]) if depth > 1 else None
        if depth > 1 and parent is None and self._token_tensors:
            return
        node = self._nodes.get(keys[depth - 1])
        if node is not None and node.state is not None:
            self._recent.move_to_end(node.key)
            return
        if node is None:
            node = _Node(keys[depth - 1], parent, depth)
            start, stop = (depth - 1) * self.chunk, depth * self.chunk
            tensors = state.tensors()
            node.segment = {name: tensors[name][:, :, start:stop].clone() for name in self._token_tensors}
            self.stats.bytes += _bytes(node.segment)
            self._nodes[node.key] = node
            if parent is not None:
                parent.children += 1
        node.state = {name: x.clone() for name, x in state.tensors().items() if name not in self._token_tensors}
        self._recent[node.key] = node
        self.stats.states += 1
        self.stats.bytes += (size := _bytes(node.state))
        own.append(node.key)
        if len(own) * size > self.budget // _SHARE:
            own[:] = self._thin(own)
        while self.stats.bytes > self.budget and self._recent:
            self._evict(next(iter(self._recent.values())))

    def _thin(self, keys: Sequence[bytes]) -> list[bytes]:
        """Drop every second of these boundaries, but not the last one; return those that are left."""
        kept = []
        for i, key in enumerate(reversed(keys)):
            node = self._recent.get(key)
            if node is not None and i % 2:
                self._evict(node)
            elif node is not None:
                kept.append(key)
        return kept[::-1]

    def _restore(self, node: _Node) -> StackState:
        assert node.state is not None
        state = self._new_state()
        tensors = state.tensors()
        for name, x in node.state.items():
            tensors[name].copy_(x)
        at: _Node | None = node
        while at is not None and self._token_tensors:
            start, stop = (at.depth - 1) * self.chunk, at.depth * self.chunk
            for name, x in at.segment.items():
                tensors[name][:, :, start:stop].copy_(x)
            at = at.parent
        return state

    def _evict(self, node: _Node) -> None:
        assert node.state is not None
        self.stats.bytes -= _bytes(node.state)
        self.stats.states -= 1
        self.stats.evictions += 1
        node.state = None
        del self._recent[node.key]
        at: _Node | None = node
        while at is not None and at.state is None and not at.children:
            self.stats.bytes -= _bytes(at.segment)
            del self._nodes[at.key]
            at = at.parent
            if at is not None:
                at.children -= 1


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors.values())


def token_tensors(state: State, prefix: str) -> Iterator[str]:
    """Return the names, as in `State.tensors`, of the tensors that hold every token."""
    if getattr(state, "stride", 1) > 1:
        return  # Rows of a fold hold tokens of several chunks in one slot: they are stored whole.
    for item in fields(state):
        value = getattr(state, item.name)
        if isinstance(value, tuple):
            for i, part in enumerate(value):
                yield from token_tensors(part, f"{prefix}{item.name}.{i}.")
        elif isinstance(value, Tensor) and item.name in state.token_fields:
            yield prefix + item.name
