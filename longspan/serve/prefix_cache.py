"""The prefix cache: states at chunk boundaries of prompts, in a radix tree of token sequences."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from torch import Tensor

from longspan.protocol import State
from longspan.serve.disk_store import DiskStore
from longspan.serve.slots import StateLayout
from longspan.serve.state_codec import StateCodec

_SHARE = 4  # one prompt takes at most this fraction of the budget, so that a long one does not evict all others
_STATE, _SEGMENT = "state.", "segment."  # prefixes of names in a file
_PACKED = "packed"  # the name of a whole row of a `StateLayout`


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
        disk_hits: States loaded from disk.
        disk_bytes: Bytes held on disk now.
    """

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    bytes: int = 0
    states: int = 0
    evictions: int = 0
    disk_hits: int = 0
    disk_bytes: int = 0


@dataclass
class _Node:
    """A chunk boundary: the chunk before it, and the state after it unless that was evicted. Tensors are encoded."""

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
    later boundary needs them. Without such layers, and with exact states, the end of a prompt is a boundary too: the
    same prompt needs no reading at all.

    With a disk, the last boundary of each prompt and those that were hit are also written to files.

    Args:
        layout: The layout of single states.
        chunk: Tokens per chunk.
        budget: The most bytes to hold in memory.
        salt: What the digests begin with: what other states than these differ in, as the model's fingerprint.
        codec: How states are stored.
        disk: Files that outlive the process.
        vocab_size: Number of different tokens, if it is known: prompts of few are hashed in less time.
    """

    def __init__(
        self,
        layout: StateLayout,
        chunk: int,
        budget: int,
        salt: bytes = b"",
        *,
        vocab_size: int | None = None,
        codec: StateCodec | None = None,
        disk: DiskStore | None = None,
    ) -> None:
        self.stats, self.chunk, self.budget = CacheStats(), chunk, budget
        self.codec, self.disk = codec or StateCodec(), disk
        self._layout, self._salt = layout, hashlib.sha256(salt).digest()
        self._token_dtype = np.dtype(np.int32 if vocab_size is None else np.min_scalar_type(vocab_size - 1))
        self._token_tensors = frozenset(token_tensors(layout.view(layout.empty[None]), ""))
        self._whole = self.codec.kind == "exact" and not self._token_tensors  # states are stored as packed rows
        self._nodes: dict[bytes, _Node] = {}
        self._recent: OrderedDict[bytes, _Node] = OrderedDict()  # nodes with a state, the least recently used first

    def keys(self, tokens: Tensor) -> list[bytes]:
        """Return the digest of each boundary of a prompt (T,)."""
        data = tokens.numpy().astype(self._token_dtype).tobytes()
        size = self._token_dtype.itemsize * self.chunk
        found, digest = [], self._salt
        for start in range(0, len(data) if self._whole else len(data) - size + 1, size):
            digest = hashlib.sha256(digest + data[start : start + size]).digest()
            found.append(digest)
        return found

    def find(self, keys: Sequence[bytes]) -> tuple[int, Tensor | None]:
        """Return the last boundary with a state: its number of chunks, and a copy of the packed state; or (0, None)."""
        for depth in range(len(keys), 0, -1):
            node = self._nodes.get(keys[depth - 1])
            if node is None or node.state is None:
                node = self._load(keys[:depth])
            if node is not None:
                state = self._restore(node)
                self._recent.move_to_end(node.key)
                self.persist(node.key)
                self._shrink()
                return depth, state
        return 0, None

    def has(self, key: bytes) -> bool:
        """Return whether there is a state in memory at a boundary."""
        return key in self._recent

    def count(self, tokens: int, found: int) -> None:
        """Count a prompt of this many tokens, of which `found` were in the cache."""
        self.stats.queries += 1
        self.stats.hits += found > 0
        self.stats.query_tokens += tokens
        self.stats.hit_tokens += found

    def insert(self, keys: Sequence[bytes], depth: int, packed: Tensor, own: list[bytes]) -> None:
        """Store a copy of the state after `depth` chunks, if the chunks before it are there.

        Args:
            keys: What `keys` returned for the prompt.
            depth: Number of chunks that the state holds.
            packed: (size,), the packed state.
            own: The boundaries that this prompt has stored so far; updated. If they take too much of the budget, every
                second one is dropped.
        """
        parent = self._nodes.get(keys[depth - 2]) if depth > 1 else None
        if self.has(keys[depth - 1]):
            self._recent.move_to_end(keys[depth - 1])
            return
        if depth > 1 and parent is None and self._token_tensors:
            return
        tensors, start = self._tensors(packed), (depth - 1) * self.chunk
        segment = {name: tensors.pop(name)[:, :, start : start + self.chunk] for name in self._token_tensors}
        node = self._add(keys[depth - 1], parent, depth, self.codec.encode(segment), self.codec.encode(tensors))
        assert node.state is not None
        own.append(node.key)
        if len(own) * _bytes(node.state) > self.budget // _SHARE:
            own[:] = self._thin(own)
        self._shrink()

    def persist(self, key: bytes) -> None:
        """Write a boundary in memory to disk, with the segments before it; without a disk, do nothing."""
        node = self._nodes.get(key)
        if self.disk is None or node is None or node.state is None:
            return
        content = {_STATE + name: x for name, x in node.state.items()}
        at: _Node | None = node
        while at is not None and at.key not in self.disk:
            content |= {_SEGMENT + name: x for name, x in at.segment.items()}
            self.disk.write(at.key, content)
            content, at = {}, at.parent if self._token_tensors else None

    def close(self) -> None:
        """Wait until what is to be written is on disk."""
        if self.disk is not None:
            self.disk.close()

    def _add(
        self, key: bytes, parent: _Node | None, depth: int, segment: dict[str, Tensor], state: dict[str, Tensor] | None
    ) -> _Node:
        """Return the node of a boundary, with these contents where it lacks them."""
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = _Node(key, parent, depth, segment=segment)
            self.stats.bytes += _bytes(segment)
            if parent is not None:
                parent.children += 1
        if state is not None and node.state is None:
            node.state, self._recent[key] = state, node
            self.stats.states += 1
            self.stats.bytes += _bytes(state)
        return node

    def _load(self, keys: Sequence[bytes]) -> _Node | None:
        """Return the node of the last of these boundaries from disk, with the segments before it, if they are there."""
        if self.disk is None or keys[-1] not in self.disk:
            return None
        contents: list[tuple[int, dict[str, Tensor]]] = []
        for depth in range(len(keys), 0, -1):
            if keys[depth - 1] in self._nodes and contents:
                break
            content = self.disk.read(keys[depth - 1], self._layout.empty.device)
            if content is None or not self._fits(content, state=not contents):
                return None
            contents.append((depth, content))
            if not self._token_tensors:
                break
        node: _Node | None = None
        for depth, content in reversed(contents):
            parent = self._nodes.get(keys[depth - 2]) if depth > 1 else None
            segment = {name[len(_SEGMENT) :]: x for name, x in content.items() if name.startswith(_SEGMENT)}
            state = {name[len(_STATE) :]: x for name, x in content.items() if name.startswith(_STATE)}
            node = self._add(keys[depth - 1], parent, depth, segment, state or None)
        self.stats.disk_hits += 1
        return node

    def _fits(self, content: dict[str, Tensor], *, state: bool) -> bool:
        """Return whether a file holds what a node of this model holds; `state`: whether it needs a state."""
        expected = self._tensors(self._layout.empty)
        shapes = {name: x.shape for name, x in expected.items() if name not in self._token_tensors}
        decoded = self.codec.decode({name[len(_STATE) :]: x for name, x in content.items() if name.startswith(_STATE)})
        segment = {name for name in content if name.startswith(_SEGMENT)}
        whole = {_SEGMENT + name for name in self._token_tensors} <= segment
        return whole and (not (state or decoded) or {name: x.shape for name, x in decoded.items()} == shapes)

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

    def _shrink(self) -> None:
        while self.stats.bytes > self.budget and self._recent:
            self._evict(next(iter(self._recent.values())))

    def _restore(self, node: _Node) -> Tensor:
        """Return a copy of the packed state at a node."""
        assert node.state is not None
        packed = self._layout.empty.clone()
        tensors = self._tensors(packed)
        for name, x in self.codec.decode(node.state).items():
            tensors[name].copy_(x)
        at: _Node | None = node
        while at is not None and self._token_tensors:
            start, stop = (at.depth - 1) * self.chunk, at.depth * self.chunk
            for name, x in self.codec.decode(at.segment).items():
                tensors[name][:, :, start:stop].copy_(x)
            at = at.parent
        return packed

    def _tensors(self, packed: Tensor) -> dict[str, Tensor]:
        """Return what is stored of a state: all of it in one tensor, unless parts of it are stored in other ways."""
        if self._whole:
            return {_PACKED: packed}
        return self._layout.view(packed[None]).tensors()

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
