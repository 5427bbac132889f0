"""
Byte-pair merges: learned from text, recovered from a table of ranks, and checked against one.

    learn(words, wanted=4096, min_frequency=2)     pairs of symbols, those of Hugging Face's trainer
    merges_of(ranks)                               the pair that makes each token
    surely_made(left, right, result, singles)      which of some merges come about

A table gives each token, as bytes, its rank. The encoder merges neighbours whose bytes together are a token,
the lowest rank first.
"""
import heapq
from collections import Counter
from collections.abc import Iterable

import numpy as np

# GPT-2 wrote each byte as one printable character: the visible ones of Latin-1 stand for themselves, the
# others are moved to U+0100 and up, in order. A vocabulary sorts bytes by these characters.
BYTE_ORDER = [b for b in range(256) if chr(b).isprintable() and b != 32]
BYTE_ORDER += [b for b in range(256) if b not in BYTE_ORDER]


# ---- a table and its merges -----------------------------------------------------------------------------

def last_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that the encoder joins to this one at last; None if its bytes become something else."""
    parts = [token[i:i + 1] for i in range(len(token))]
    rank = [ranks.get(token[i:i + 2]) for i in range(len(token) - 1)]         # of each part with the next
    while len(parts) > 2:
        best = min((r for r in rank if r is not None), default=None)
        if best is None:
            return None
        at = rank.index(best)
        parts[at:at + 2] = [parts[at] + parts[at + 1]]
        del rank[at]
        if at:
            rank[at - 1] = ranks.get(parts[at - 1] + parts[at])
        if at < len(rank):
            rank[at] = ranks.get(parts[at] + parts[at + 1])
    return (parts[0], parts[1]) if rank and rank[0] is not None else None


def merges_of(ranks: dict[bytes, int]) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """The pair that makes each token, by rank, and the tokens of several bytes that no pair makes."""
    long = sorted((token for token in ranks if len(token) > 1), key=ranks.get)
    splits = [(token[:at], token[at:]) for token in long for at in range(1, len(token))
              if token[:at] in ranks and token[at:] in ranks]
    ids = np.array([(ranks[left], ranks[right], ranks[left + right]) for left, right in splits], np.int64)
    singles = [i for token, i in ranks.items() if len(token) == 1]
    sure = surely_made(*ids.reshape(-1, 3).T, singles)
    pairs = {left + right: (left, right) for (left, right), yes in zip(splits, sure.tolist()) if yes}
    pairs = {token: pairs.get(token) or last_pair(token, ranks) for token in long}
    return [pair for pair in pairs.values() if pair], [token for token, pair in pairs.items() if not pair]


def surely_made(left: np.ndarray, right: np.ndarray, result: np.ndarray, singles: list[int]) -> np.ndarray:
    """
    For merges of ids (`left` + `right` -> `result`, which is also its rank): bool, whether the bytes of the
    result, alone, are surely joined by this pair at last. Where several are given for one result the right
    one is found by trying, from the pair that is ready first. singles: the ids of bytes.
    """
    if not len(result):
        return np.zeros(0, bool)
    size = int(max(left.max(), right.max(), result.max(), max(singles, default=0))) + 1
    one_of = np.lexsort((np.maximum(left, right), result))[::-1]          # the last written is the pair taken
    halves, rank = np.full((2, size), -1), np.arange(size)
    halves[:, result[one_of]] = left[one_of], right[one_of]
    rank[np.array(singles, int)] = -1                         # bytes are there from the beginning
    order = np.argsort((left << 32) + right)
    pairs = ((left << 32) + right)[order], result[order]
    for _ in range(4):
        holds = _seams_hold(left, right, halves, rank, *pairs)
        taken = (halves[0, result] == left) & (halves[1, result] == right)
        fails = np.zeros(size, bool)
        fails[result[taken & ~holds]] = True
        other = holds & fails[result]
        if other.sum() <= len(result) // 100:                 # few enough for last_pair()
            break
        halves[:, result[other]] = left[other], right[other]
    sure = holds & taken
    while True:                                               # both halves have to be made as well
        made = rank < 0
        made[result[sure]] = True
        whole = sure & made[left] & made[right]
        if whole.sum() == sure.sum():
            return sure
        sure = whole


def _seams_hold(left: np.ndarray, right: np.ndarray, halves: np.ndarray, rank: np.ndarray,
                pairs: np.ndarray, results: np.ndarray) -> np.ndarray:
    """
    bool for each merge: going back from its pair, merge by merge (`halves` of each id), the two tokens at the
    seam shrink to bytes; does none of the pairs that lie side by side there on the way merge before the next
    one that was made? `pairs`: all that merge, in order, and their `results`.
    """
    holds = np.ones(len(left), bool)
    at, u, v = np.arange(len(left)), left, right
    while len(at):
        open_ = np.maximum(rank[u], rank[v]) >= 0
        at, u, v = at[open_], u[open_], v[open_]
        later = rank[u] > rank[v]                             # which was made last; the right one on a tie
        limit = np.where(later, rank[u], rank[v] + 1)
        u, v = np.where(later, halves[1, u], u), np.where(later, v, halves[0, v])
        pair = (u << 32) + v
        place = np.minimum(np.searchsorted(pairs, pair), len(pairs) - 1)
        wrong = (pairs[place] == pair) & (results[place] < limit) | (u < 0) | (v < 0)     # -1: made by none
        holds[at[wrong]] = False
        at, u, v = at[~wrong], u[~wrong], v[~wrong]
    return holds


# ---- learned from text ----------------------------------------------------------------------------------

def learn(words: Counter[str], wanted: int, min_frequency: int) -> list[tuple[int, int]]:
    """
    The merges as pairs of symbols: 0-255 are the bytes in BYTE_ORDER, 256 + i is the result of merge i.

    All different words lie one behind the other in `symbol`, as doubly linked lists (`before`, `after`;
    both ends of a word have the neighbour `end`). A merge looks only at the places of its pair and corrects
    the counts of the pairs beside them. Every new pair contains the newest symbol, so all its places are
    known when it appears: `places[pair]` is written once, and those that other merges took since are
    filtered out when its turn comes. Counts only fall, so the queue may hold older, higher ones; they are
    put right when they come up.
    """
    symbol, weight, after, before = _lay_out(words)
    first = np.flatnonzero((symbol >= 0) & (symbol[after] >= 0))
    counts, places = {}, {}
    for pair, count, where in _by_pair(_pair(symbol[first], symbol[after[first]]), first, weight):
        counts[pair], places[pair] = count, where
    queue = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(queue)
    merges = []
    while queue and len(merges) < wanted:
        count, pair = heapq.heappop(queue)
        if counts[pair] != -count:
            heapq.heappush(queue, (-counts[pair], pair))
            continue
        if -count < max(min_frequency, 1):
            break
        left, right = pair >> 32, pair & 0xffffffff
        merges.append((left, right))
        new = 255 + len(merges)
        at = places.pop(pair)
        at = at[(symbol[at] == left) & (symbol[after[at]] == right)]
        if left == right:              # in a run "aaa" the leftmost pair merges
            at = _every_other(at, after)
        # the pairs that go: one between two merging places is counted once, as the left one of the second
        gone = after[at]
        neighbour = after[gone]
        old_left, old_right = symbol[before[at]], symbol[neighbour]
        symbol[at], symbol[gone] = new, -1
        has_left, has_right = old_left >= 0, (old_right >= 0) & (symbol[neighbour] != new)
        keys = np.concatenate([_pair(old_left[has_left], left), _pair(right, old_right[has_right])])
        beside = np.concatenate([at[has_left], at[has_right]])
        for key, lost, _ in _by_pair(keys, beside, weight, split=False):
            counts[key] -= lost
        # the pairs that come
        after[at], before[neighbour] = neighbour, at
        previous = before[at]
        has_left = symbol[previous] >= 0
        keys = np.concatenate([_pair(symbol[previous[has_left]], new),
                               _pair(new, symbol[neighbour[has_right]])])
        beside = np.concatenate([previous[has_left], at[has_right]])
        for key, found, where in _by_pair(keys, beside, weight):
            counts[key], places[key] = found, where
            heapq.heappush(queue, (-found, key))
    return merges


def _lay_out(words: Counter[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """symbol, weight (how often its word occurs), after, before: one of each per byte, and -1 as `end`."""
    encoded = [word.encode() for word in words]
    lengths = np.array([len(word) for word in encoded], np.int64)
    end = int(lengths.sum())
    order = np.argsort(np.array(BYTE_ORDER))                               # byte -> symbol
    symbol = np.append(order[np.frombuffer(b"".join(encoded), np.uint8)], -1)
    weight = np.append(np.repeat(np.fromiter(words.values(), np.int64, len(words)), lengths), 0)
    after, before = np.append(np.arange(1, end + 1), end), np.arange(-1, end)
    last = np.cumsum(lengths) - 1
    after[last], before[last - lengths + 1] = end, end
    return symbol, weight, after, before


def _pair(left: np.ndarray | int, right: np.ndarray | int) -> np.ndarray:
    """Two symbols as one number that sorts like the tuple."""
    return (left << 32) + right


def _by_pair(pairs: np.ndarray, places: np.ndarray, weight: np.ndarray,
             split: bool = True) -> Iterable[tuple]:
    """(pair, sum of the weights of its places, its places in ascending order) for each different pair."""
    if not len(pairs):
        return []
    order = np.argsort(pairs, kind="stable")
    pairs, places = pairs[order], places[order]
    starts = np.flatnonzero(np.append(True, pairs[1:] != pairs[:-1]))
    sums = np.add.reduceat(weight[places], starts).tolist()
    return zip(pairs[starts].tolist(), sums, np.split(places, starts[1:]) if split else sums)


def _every_other(at: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Of places that follow one another directly the first, third, fifth, ..."""
    index = np.arange(len(at))
    opens = np.append(True, after[at[:-1]] != at[1:])
    return at[(index - np.maximum.accumulate(np.where(opens, index, 0))) % 2 == 0]
