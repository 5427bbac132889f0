"""
Data: windows of token ids, in an order that any number of machines agrees on.

A corpus is a directory that prepare.py wrote: `meta.json` (what the tokens are), the tokenizer, and raw
token shards (`train-00000.bin`, `val-00000.bin`; uint16 or uint32) with the end-of-text id exactly once
after each document. The shards of a split are one long stream. Window i of it is tokens[i*T : i*T + T + 1]:
neighbours share one id, so every token but the first is predicted exactly once. nanoGPT's directories
(`train.bin`, `val.bin`, bare uint16) work too. (Files of text are read by records.py.)

    corpus = open_corpus("data/books:0.7,data/code:0.3", sequence_length=512, seed=0)
    for rows in corpus.step(samples=0, micro_batch_size=8, accumulation=2, rank=0, replicas=4):
        ...                                            # rows: [8, 513], twice

The order has no state. Sample number s (counted from the start of the run, over all replicas) is always
the same window: which one is computed from (seed, s) by a permutation that takes no memory. A resumed run
needs to know one number, and replicas, meshes and gradient accumulation can change without changing what
an optimizer step sees. A corpus that was extended consists of segments: an epoch visits them one after the
other, each in its own order, so that what was trained before the extension stays what it was.
"""
import functools
import hashlib
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import torch

import instructions
from config import UserError
from files import digest, read_json, write_json
from records import nearest, read_records    # noqa: F401 (read_records is also found here)

FORMAT = 2                     # of meta.json; a reader refuses what it does not know


# ---- the order: a permutation without a table -------------------------------------------------------------
ROUNDS = 6                     # 4 look random already, and a batch costs microseconds


@functools.lru_cache(maxsize=64)
def round_keys(*seeds: int) -> list[int]:
    return np.random.SeedSequence(seeds).generate_state(ROUNDS, np.uint64).tolist()


def scramble(x):
    """The finaliser of splitmix64: every bit of the result depends on every bit of x (uint64 array)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def permute(positions, n: int, *seeds: int):
    """
    What stands at `positions` (integers in [0, n)) when [0, n) is shuffled by `seeds`: int64, O(1) memory.

    A Feistel network on the smallest square of side x side cells that holds [0, n): each round adds a hash
    of the right half to the left half and swaps them, which can be undone, so nothing collides. The few
    results that fall into the square but not into [0, n) go round again until they do (cycle walking).
    """
    side = math.isqrt(n - 1) + 1
    keys = round_keys(*seeds)

    def shuffle(x):
        left, right = x // side, x % side
        for key in keys:
            left, right = right, (left + scramble(right ^ key) % side) % side
        return left * side + right

    x = shuffle(np.asarray(positions).astype(np.uint64))
    while (outside := x >= n).any():
        x[outside] = shuffle(x[outside])
    return x.astype(np.int64)


# ---- token streams ----------------------------------------------------------------------------------------
class Stream:
    """Token shards, read as one long array."""

    def __init__(self, shards: list[tuple[str, int]], dtype):
        self.paths = [path for path, tokens in shards if tokens]
        self.starts = np.cumsum([0] + [tokens for _, tokens in shards if tokens])     # last: the length
        # A large corpus has more shards than a process may hold files open: keep the recent ones mapped.
        self.shard = functools.lru_cache(maxsize=256)(
            lambda index: np.memmap(self.paths[index], dtype, mode="r"))

    def __len__(self):
        return int(self.starts[-1])

    def read(self, start: int, count: int):
        """Tokens [start, start + count) as int64, across as many shards as it takes; fewer at the end."""
        stop, parts = min(start + count, len(self)), []
        while start < stop:
            index = int(np.searchsorted(self.starts, start, side="right")) - 1
            begin, end = self.starts[index], min(stop, int(self.starts[index + 1]))
            parts.append(self.shard(index)[start - begin:end - begin])
            start = end
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

    def counts(self, vocab_size: int, limit: int = 2**26):
        """How often each id occurs; beyond `limit` tokens, in an evenly spaced part of them."""
        block, every = 2**20, -(-len(self) // limit)
        total = np.zeros(vocab_size, np.int64)
        for start in range(0, len(self), block * max(1, every)):
            total += np.bincount(self.read(start, block), minlength=vocab_size)
        return total


class Shards:
    """
    The token files of a split while they are written: <name>-00000.bin, ..., of shard_tokens each. `first`:
    the number of the first one, where a corpus is extended.
    """

    def __init__(self, out_dir: str, name: str, tokenizer, shard_tokens: int, first: int = 0):
        self.out_dir, self.name, self.shard_tokens, self.first = out_dir, name, shard_tokens, first
        self.eos_id, self.token_lengths = tokenizer.eos_id, tokenizer.token_lengths
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
        self.tokens = self.documents = self.bytes = 0        # a document is where its end is
        self.full = []                               # the facts of each shard that is complete
        self.synced = 0                              # how many of these are on disk for good

    def path(self, index: int) -> str:
        return os.path.join(self.out_dir, f"{self.name}-{self.first + index:05d}.bin")

    def append(self, ids) -> bool:
        """Whether a shard became full."""
        ids, before = ids.astype(self.dtype, copy=False), len(self.full)
        self.documents += int((ids == self.eos_id).sum())
        self.bytes += int(self.token_lengths[ids].sum(dtype=np.int64))
        while len(ids):
            index, inside = divmod(self.tokens, self.shard_tokens)
            now, ids = np.split(ids, [self.shard_tokens - inside])
            with open(self.path(index), "ab") as file:
                file.write(now.data)
            self.tokens += len(now)
            if self.tokens % self.shard_tokens == 0:
                self.full.append(describe_shard(self.path(index), self.dtype))
        return len(self.full) > before

    def describe(self, segment: int) -> list[dict]:
        """The shards, as meta.json lists them."""
        last = len(self.full)
        rest = [describe_shard(self.path(last), self.dtype)] if self.tokens % self.shard_tokens else []
        held = sum(facts["tokens"] for facts in self.full + rest)
        assert held == self.tokens, f"{self.name}: {held:,} tokens on disk, {self.tokens:,} were written"
        return [{"file": os.path.basename(self.path(index)), "segment": segment, **facts}
                for index, facts in enumerate(self.full + rest)]

    def sync(self) -> dict:
        """All that was appended is on disk; returns what restore() needs."""
        for index in range(self.synced, len(self.full) + 1):
            if os.path.exists(path := self.path(index)):
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
        self.synced = len(self.full)
        return {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes, "full": self.full}

    def holds(self, state: dict) -> bool:
        """Whether the files still have at least what sync() returned."""
        ends = range(0, state["tokens"], self.shard_tokens)
        sizes = [min(self.shard_tokens, state["tokens"] - start) * self.dtype.itemsize for start in ends]
        return all(os.path.exists(self.path(index)) and os.path.getsize(self.path(index)) >= size
                   for index, size in enumerate(sizes))

    def restore(self, state: dict):
        """Back to what sync() returned: what was appended later goes."""
        self.documents, self.bytes, self.full = state["documents"], state["bytes"], list(state["full"])
        self.shorten(state["tokens"])

    def shorten(self, tokens: int):
        """Drops everything behind the first `tokens` tokens (documents, bytes: the caller's to count)."""
        self.tokens = tokens
        index, inside = divmod(tokens, self.shard_tokens)
        del self.full[index:]
        self.synced = min(self.synced, index)
        if inside:
            os.truncate(self.path(index), inside * self.dtype.itemsize)
            index += 1
        # highest first, and whatever stands there: a kill may have left a gap
        for name in sorted(os.listdir(self.out_dir), reverse=True):
            number = re.fullmatch(self.name + r"-(\d{5,})\.bin", name)
            if number and int(number[1]) >= self.first + index:
                os.remove(os.path.join(self.out_dir, name))

    def blocks(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """The tokens [start, stop), some MB at a time."""
        while start < stop:
            index, inside = divmod(start, self.shard_tokens)
            count = min(stop - start, self.shard_tokens - inside, 2**22)
            yield np.fromfile(self.path(index), self.dtype, count, offset=inside * self.dtype.itemsize)
            start += count


class Source:
    """
    One corpus directory: its two streams, and what its ids mean. `segments`: training tokens up to the end
    of each segment; `fingerprints`: a hash of each segment's tokens; `complete`: the text went no further.
    """

    def __init__(self, path: str):
        self.path = path
        if os.path.isfile(os.path.join(path, "meta.json")):
            try:
                self.open_prepared(read_json(os.path.join(path, "meta.json")))
            except (KeyError, TypeError) as error:
                raise UserError(f"{path}/meta.json is not one of prepare.py's ({error} is missing or wrong): "
                                f"prepare the corpus again") from None
        elif os.path.isfile(os.path.join(path, "train.bin")):
            self.open_bare()
        else:
            why = "has neither meta.json nor train.bin" if os.path.isdir(path) else "is not a directory"
            raise UserError(f"{path} {why}{nearest(path)}: make a corpus of text there with "
                            f"python prepare.py --data=<text> --out_dir={path}")

    def open_prepared(self, meta):
        if meta.get("format") != FORMAT:
            raise UserError(f"{self.path}/meta.json has format {meta.get('format')}, this version reads "
                            f"{FORMAT}: prepare the corpus again")
        self.vocab_size, self.eos_id = meta["vocab_size"], meta["eos_id"]
        self.tokenizer_fingerprint = meta["tokenizer"]["fingerprint"]
        self.carries_tokenizer = meta["tokenizer"]["portable"]
        self.complete = meta["complete"]
        train, val = meta["train"]["shards"], meta["val"]["shards"]
        self.train, self.val = (self.open_split(shards, np.dtype(meta["dtype"])) for shards in (train, val))
        number = 1 + max((shard["segment"] for shard in train + val), default=0)
        self.segments = [sum(shard["tokens"] for shard in train if shard["segment"] <= last)
                         for last in range(number)]
        self.fingerprints = [digest([[shard["sha256"] for shard in shards if shard["segment"] == segment]
                                     for shards in (train, val)]) for segment in range(number)]

    def open_split(self, shards: list[dict], dtype) -> Stream:
        for shard in shards:
            file = os.path.join(self.path, shard["file"])
            size = os.path.getsize(file) if os.path.isfile(file) else 0
            wanted = shard["tokens"] * dtype.itemsize
            if size != wanted:
                raise UserError(f"{file} has {size:,} bytes where meta.json says {wanted:,}: copy it again, "
                                f"or delete {self.path} and prepare it again")
            if shard["largest_id"] >= self.vocab_size:
                raise UserError(f"{file} holds the id {shard['largest_id']}, outside its vocabulary of "
                                f"{self.vocab_size}: prepare {self.path} again")
        return Stream([(os.path.join(self.path, shard["file"]), shard["tokens"]) for shard in shards], dtype)

    def open_bare(self):
        """nanoGPT's layout. Nothing says what the ids mean (meta.pkl is a pickle, and stays closed)."""
        files = [os.path.join(self.path, name) for name in ("train.bin", "val.bin")]
        facts = [scan(file) for file in files]
        self.vocab_size = 1 + max(f["largest_id"] for f in facts)
        self.eos_id = self.tokenizer_fingerprint = None
        self.carries_tokenizer = False
        self.train, self.val = (Stream([(file, f["tokens"])], np.uint16) for file, f in zip(files, facts))
        self.complete, self.segments = True, [len(self.train)]
        self.fingerprints = [digest([[f["sha256"]] for f in facts])]

    @functools.cached_property
    def tokenizer(self):
        """None where the ids are those of bare files, or of a Python object that cannot be saved."""
        if not self.carries_tokenizer:
            return None
        from tokenizer import load_tokenizer
        tokenizer = load_tokenizer(self.path)
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise UserError(f"{self.path}/tokenizer.json is not the tokenizer that this corpus was made "
                            f"with: its fingerprint is {tokenizer.fingerprint} instead of "
                            f"{self.tokenizer_fingerprint}")
        return tokenizer


def scan(path: str) -> dict:
    """{tokens, largest_id, sha256} of a bare uint16 file; kept in <path>.json where that can be written."""
    if not os.path.isfile(path):                   # a directory without val.bin
        return {"tokens": 0, "largest_id": 0, "sha256": ""}
    facts = os.stat(path)
    if facts.st_size % 2:
        raise UserError(f"{path} has {facts.st_size:,} bytes, an odd number: it holds no uint16 token ids")
    stamp = {"bytes": facts.st_size, "modified": facts.st_mtime_ns}
    try:
        known = read_json(path + ".json")
        if {key: known.get(key) for key in stamp} == stamp:
            return known
    except (OSError, UserError):
        pass
    found = {**stamp, **describe_shard(path, np.dtype(np.uint16))}
    try:
        write_json(path + ".json", found)
    except OSError:                                # somebody else's directory: look again next time
        pass
    return found


def describe_shard(path: str, dtype) -> dict:
    """{tokens, largest_id, sha256} of a token file, read once, in blocks."""
    tokens, largest, sha = 0, 0, hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**24):
            ids = np.frombuffer(block, dtype)
            tokens, largest = tokens + len(ids), max(largest, int(ids.max()))
            sha.update(block)
    return {"tokens": tokens, "largest_id": largest, "sha256": sha.hexdigest()}


# ---- the corpus -------------------------------------------------------------------------------------------
def mix_of(spec: str) -> list[tuple[str, float]]:
    """
    "a:7,b:3" -> [("a", 0.7), ("b", 0.3)]. What exists under the whole name has weight 1, whatever it is
    spelled like, and so have several inputs without weights, "a,b": they are one.
    """
    parts = [weight_of(part.strip()) for part in spec.split(",")]
    alone = len(parts) == 1 and not os.path.exists(parts[0][0])     # the config of a data set: "org/a:2024"
    if os.path.exists(spec) or alone or all(weight is None for _, weight in parts):
        return [(spec, 1.0)]
    for path, weight in parts:
        if not path or weight is None or not 0 < weight < math.inf:
            raise UserError(f"{spec!r} is no path and no mix: write path:weight,path:weight with weights "
                            f"above 0, like books:0.7,code:0.3")
    total = sum(weight for _, weight in parts)
    return [(path, weight / total) for path, weight in parts]


def weight_of(part: str) -> tuple[str, float | None]:
    path, colon, weight = part.rpartition(":")
    try:
        return (path, float(weight)) if colon else (part, None)
    except ValueError:                             # the colon of a drive letter
        return part, None


def open_corpus(spec: str, sequence_length: int, seed: int = 0) -> "Corpus":
    """The corpus directory, or the mix of them, that `spec` names. UserError: missing, damaged."""
    mix = mix_of(spec)
    return Corpus([Source(path) for path, _ in mix], [weight for _, weight in mix], sequence_length, seed)


BLOCK = 1000                   # samples; each block holds every source of a mix by its weight, to the sample


@functools.lru_cache(maxsize=8)
def mixed_block(quotas: tuple, seed: int, block: int):
    """For the samples of a block: the source of each, and how many of that source came before in the run."""
    slots = permute(np.arange(BLOCK), BLOCK, seed, 1, block)
    which = np.searchsorted(np.cumsum(quotas), slots, side="right")
    number = np.empty(BLOCK, np.int64)
    for source, quota in enumerate(quotas):
        number[which == source] = block * quota + np.arange(quota)
    return which, number


class Corpus:
    """One or several sources in fixed proportions, as windows of `sequence_length` tokens."""

    def __init__(self, sources: list[Source], weights: list[float], sequence_length: int, seed: int):
        self.sources, self.weights, self.sequence_length, self.seed = sources, weights, sequence_length, seed
        self.vocab_size = max(source.vocab_size for source in sources)     # every id is below it
        self.eos_id = sources[0].eos_id                                    # None for bare .bin files
        self.train_tokens = sum(len(source.train) for source in sources)
        self.val_tokens = sum(len(source.val) for source in sources)
        # by source: the first window of each segment, and last the number of windows
        self.segments_of = [[0] + [max(0, tokens - 1) // sequence_length for tokens in source.segments]
                            for source in sources]
        self.windows_of = [segments[-1] for segments in self.segments_of]
        self.windows = sum(self.windows_of)                                # an epoch, in samples
        self.quotas = largest_remainder(weights, BLOCK)
        self.complete = all(source.complete for source in sources)
        self.fingerprint = [[quota, source.fingerprints] for source, quota in zip(sources, self.quotas)]
        self.refuse_what_does_not_mix()

    def continues(self, fingerprint: list) -> bool:
        """Whether this is the corpus of that fingerprint, or one that only grew since by more segments."""
        return len(fingerprint) == len(self.fingerprint) and all(
            quota == before[0] and segments[:len(before[1])] == before[1]
            for (quota, segments), before in zip(self.fingerprint, fingerprint))

    def refuse_what_does_not_mix(self):
        first = self.sources[0]
        for source, quota in zip(self.sources, self.quotas):
            if quota == 0:
                raise UserError(f"{source.path} has less than 1/{BLOCK} of the weight: raise it, or "
                                f"leave it out")
            if (source.eos_id is None) != (first.eos_id is None):
                raise UserError(f"{first.path} and {source.path} cannot be mixed: bare .bin files do not "
                                f"say which tokenizer made them; prepare both from text")
            if source.eos_id != first.eos_id:
                raise UserError(f"{first.path} ends documents with the id {first.eos_id}, {source.path} "
                                f"with {source.eos_id}: prepare both with the same tokenizer")
        if len({source.tokenizer_fingerprint for source in self.sources}) > 1:
            for source in self.sources:
                if not source.carries_tokenizer:
                    raise UserError(f"{source.path} was made with a tokenizer that it does not hold, a "
                                    f"Python object: it mixes only with what was made with the same one")
                if not self.tokenizer.contains(source.tokenizer):
                    raise UserError(f"{source.path} was made with another tokenizer "
                                    f"({source.tokenizer.name}) than the rest ({self.tokenizer.name}): "
                                    f"prepare all with the same one")

    @functools.cached_property
    def tokenizer(self):
        """What the ids belong to: in a mix, the one of the largest vocabulary. None: see Source."""
        return max(self.sources, key=lambda source: source.vocab_size).tokenizer

    def unigram_entropy(self) -> float:
        """Nats per training token for a model that knows how often each token occurs, and nothing else."""
        share = np.zeros(self.vocab_size)
        for source, weight in zip(self.sources, self.weights):
            counts = source.train.counts(self.vocab_size)
            share += weight * counts / max(1, counts.sum())
        share = share[share > 0]
        return float(-(share * np.log(share)).sum())

    def check(self, needed_samples: int, global_batch_size: int, max_epochs: int | None = None,
              max_steps: int | None = None) -> None:
        """UserError where a split is shorter than a window, or the run needs more than max_epochs gives."""
        T, too_small = self.sequence_length, "Dataset is too small for this run"
        blocks, rest = divmod(needed_samples, BLOCK)
        in_rest = mixed_block(self.quotas, self.seed, blocks)[0][:rest]
        for index, (source, quota) in enumerate(zip(self.sources, self.quotas)):
            required = blocks * quota + int((in_rest == index).sum())
            for split, tokens, used in (("training", len(source.train), required > 0),
                                        ("validation", len(source.val), len(source.val) > 0)):
                if used and tokens <= T:
                    raise UserError(f"{too_small}: the {split} split of {source.path} has {tokens:,} "
                                    f"tokens, one window of sequence_length={T} needs {T + 1:,}. Tokenize "
                                    f"more data, or lower sequence_length.")
            available = required if max_epochs is None else max_epochs * self.windows_of[index]
            if required > available:
                of = f" of {source.path}" if len(self.sources) > 1 else ""
                max_steps = max_steps or needed_samples // global_batch_size
                raise UserError(f"{too_small}: available-samples{of}={available}, "
                                f"required-samples={required} (max_steps={max_steps} x global_batch_size="
                                f"{global_batch_size}). Tokenize more data, or lower max_steps or "
                                f"global_batch_size.")

    # ---- training ----
    def locate(self, samples):
        """(source, window of that source) of sample numbers, as arrays: a pure function of the seed."""
        blocks, positions = np.divmod(samples, BLOCK)
        which, number, window = (np.empty_like(samples) for _ in range(3))
        for block in np.unique(blocks):
            here = blocks == block
            sources, numbers = mixed_block(self.quotas, self.seed, int(block))
            which[here], number[here] = sources[positions[here]], numbers[positions[here]]
        for source in np.unique(which):
            segments, available = np.array(self.segments_of[source]), self.windows_of[source]
            epochs, position = np.divmod(number, available)
            segment = np.searchsorted(segments, position, side="right") - 1
            for epoch, part in np.unique(np.stack([epochs, segment])[:, which == source], axis=1).T:
                here = (which == source) & (epochs == epoch) & (segment == part)
                begin, size = segments[part], int(segments[part + 1] - segments[part])
                order = self.seed, 2, int(source), int(epoch), int(part)       # each has its own order
                window[here] = begin + permute(position[here] - begin, size, *order)
        return which, window

    def step(self, samples: int, micro_batch_size: int, accumulation: int, rank: int, replicas: int
             ) -> Iterator[torch.Tensor]:
        """
        One replica's rows for the optimizer step that begins after `samples` samples: LongTensors
        [micro_batch_size, T+1], `accumulation` of them. All replicas together see samples ... samples+G-1, G
        being the global batch.
        """
        T = self.sequence_length
        for k in range(accumulation):
            first = samples + (k * replicas + rank) * micro_batch_size
            which, windows = self.locate(np.arange(first, first + micro_batch_size))
            yield torch.from_numpy(np.stack([self.sources[source].train.read(window * T, T + 1)
                                             for source, window in zip(which, windows)]))

    # ---- evaluation ----
    def evaluation(self, micro_batch_size: int, rank: int, replicas: int, eval_tokens: int | None = None
                   ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """
        (ids, labels), LongTensors [micro_batch_size, T], of the validation split. Over all replicas, every
        token but the first of each source is a label exactly once; -100 fills up the last rows, so that
        every replica yields as many batches. `eval_tokens`: about so many, in evenly spaced windows that are
        always the same.
        """
        T = self.sequence_length
        ends = np.cumsum([-(-max(0, len(source.val) - 1) // T) for source in self.sources])
        total = int(ends[-1])                          # windows; the last of each source may be short
        count = total if eval_tokens is None else min(total, -(-eval_tokens // T))
        for first in range(0, count, micro_batch_size * replicas):
            ids = torch.zeros(micro_batch_size, T, dtype=torch.long)
            labels = torch.full_like(ids, -100)
            mine = first + rank * micro_batch_size
            for row, number in enumerate(range(mine, min(mine + micro_batch_size, count))):
                place = number * total // count
                source = int(np.searchsorted(ends, place, side="right"))
                window = place - (int(ends[source - 1]) if source else 0)
                tokens = torch.from_numpy(self.sources[source].val.read(window * T, T + 1))
                ids[row, :len(tokens) - 1], labels[row, :len(tokens) - 1] = tokens[:-1], tokens[1:]
            yield ids, labels


# ---- conversations ----------------------------------------------------------------------------------------
def pack_sft(source: str, tokenizer, sequence_length: int, *, mask_input: bool = True, packing: bool = True,
             overlong: str = "truncate", format: str | None = None, val_fraction: float = 0.0, seed: int = 0,
             rank: int = 0, world: int = 1, say=print) -> "Rows":
    """
    The records of `source` as packed rows of a fixed length. Every rank calls this, before the process
    group exists; rank 0 encodes what was not encoded before. See Rows, and instructions.py for the rest.
    """
    folder = instructions.ensure(source, tokenizer, format, rank, world, say)
    return Rows(instructions.Samples(folder), sequence_length, mask_input, packing, overlong, val_fraction,
                seed, say if rank == 0 else lambda text: None)


class Rows:
    """
    Samples in rows of `sequence_length` places. A sample of n tokens takes n - 1 of them: each shows a token
    and has the next one as its label (-100 where that is not trained), so nothing is shifted later, and no
    label crosses from one sample into another. `documents` numbers the samples of a row, `positions` begins
    at 0 in each. What is left of a row is padding: label -100, a document of its own.

    A sample that is longer is cut behind the row ("truncate"; dropped where no trained token is left),
    dropped ("drop"), refused ("error"), or goes on in another row ("split").
    """
    def __init__(self, samples: instructions.Samples, sequence_length: int, mask_input: bool, packing: bool,
                 overlong: str, val_fraction: float, seed: int, say=print):
        self.samples, self.sequence_length = samples, sequence_length
        self.mask_input, self.packing, self.seed = mask_input, packing, seed
        self.fingerprint = samples.meta["content"]
        pieces = self.pieces(overlong, say)                # int64 [n, 3]: sample, first token, places
        held_out = self.held_out(val_fraction, say)[pieces[:, 0]]
        self.train, self.val = (Packed(pieces[which], self.labels(pieces[which]), sequence_length, packing)
                                for which in (~held_out, held_out))
        self.val_tokens = self.val.trained

    def pieces(self, overlong: str, say) -> np.ndarray:
        T, places = self.sequence_length, np.diff(self.samples.starts) - 1
        long = places > T
        if long.any() and overlong == "error":
            worst = int(places.argmax())
            raise UserError(f"{int(long.sum()):,} of {len(places):,} records have more than the "
                            f"sequence_length={T:,} + 1 tokens of a row (the longest, number {worst + 1:,}, "
                            f"has {places[worst] + 1:,}): raise sequence_length, or give overlong=truncate "
                            f"or drop")
        which = np.arange(len(places))
        if overlong == "split":
            parts = -(-places // T)
            which = np.repeat(which, parts)
            begins = T * (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts))
            return np.stack([which, begins, np.minimum(T, places[which] - begins)], 1)
        empty = (self.samples.first > T) if self.mask_input else np.zeros_like(long)
        keep = ~long if overlong == "drop" else ~empty
        if long.any():
            lost = int((places - T)[long & keep].sum())
            say(f"  {int(long.sum()):,} records have more than the {T + 1:,} tokens of a row: "
                f"{int((long & keep).sum()):,} were cut ({lost:,} tokens lost), "
                f"{int((~keep).sum()):,} were dropped (overlong={overlong})")
        if not keep.any():
            raise UserError(f"no record is left: none has a trained token within its first {T + 1:,} tokens: "
                            f"raise sequence_length")
        return np.stack([which, np.zeros_like(which), np.minimum(places, T)], 1)[keep]

    def held_out(self, val_fraction: float, say) -> np.ndarray:
        """bool [samples]: the share with the smallest hashes, so that equal records stay together."""
        place = self.samples.place
        count = round(val_fraction * len(place)) or int(val_fraction > 0 and len(place) >= 20)
        if val_fraction and not count:
            say(f"  {len(place):,} records are too few to hold one out: there will be no validation loss")
        chosen = place <= np.partition(place, count - 1)[count - 1] if count else np.zeros(len(place), bool)
        return chosen if not chosen.all() else np.zeros(len(place), bool)

    def check(self, needed: int, max_epochs: int | None) -> None:
        """UserError where the run needs more rows than max_epochs gives, or there is none."""
        if not len(self.train):
            raise UserError("no record is left to train on: all were held out or dropped; lower "
                            "val_fraction, or add records")
        if max_epochs is not None and needed > max_epochs * len(self.train):
            raise UserError(f"Dataset is too small for this run: available-samples="
                            f"{max_epochs * len(self.train)}, required-samples={needed}. Add records, or "
                            f"raise max_epochs={max_epochs}.")

    def labels(self, pieces: np.ndarray) -> np.ndarray:
        """int64 [n]: how many labels each piece has."""
        if not self.mask_input:
            return pieces[:, 2]
        whole = pieces[:, 2] == np.diff(self.samples.starts)[pieces[:, 0]] - 1
        counts = self.samples.trained[pieces[:, 0]].copy()
        for i in np.flatnonzero(~whole).tolist():
            index, begin, places = pieces[i].tolist()
            counts[i] = self.samples.tokens(index)[1][begin + 1:begin + places + 1].sum()
        return counts

    def row(self, packed: "Packed", number: int) -> np.ndarray:
        """int64 [4, T]: ids, labels, documents, positions."""
        mine, filled = packed.rows[number], 0
        out = self.blank()
        out[2] = len(mine)
        for document, piece in enumerate(mine):
            index, begin, places = packed.pieces[piece].tolist()
            ids, trained = self.samples.tokens(index)
            here, ids = slice(filled, filled + places), ids[begin:begin + places + 1]
            trained = trained[begin + 1:begin + places + 1] if self.mask_input else True
            out[0, here], out[1, here] = ids[:-1], np.where(trained, ids[1:], -100)
            out[2, here], out[3, here] = document, np.arange(places)
            filled = here.stop
        return out

    def blank(self) -> np.ndarray:
        """A row of padding."""
        T = self.sequence_length
        return np.stack([np.zeros(T, np.int64), np.full(T, -100), np.ones(T, np.int64), np.arange(T)])

    def batch(self, rows: list[np.ndarray]) -> torch.Tensor:
        """[n, 4, T]; without packing only as wide as the longest sample, which is document 0 of its row."""
        batch = np.stack(rows)
        width = self.sequence_length if self.packing else max(1, int((batch[:, 2] == 0).sum(1).max()))
        return torch.from_numpy(batch[:, :, :width])

    def order(self, samples) -> np.ndarray:
        """Which rows have the numbers `samples` in the run, which are counted through all epochs."""
        epochs, places = np.divmod(samples, len(self.train))
        rows = np.empty_like(samples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = permute(places[here], len(self.train), self.seed, 3, int(epoch))
        return rows

    def labels_before(self, samples: int) -> int:
        """Trained tokens of the first `samples` rows of the run."""
        epochs, rest = divmod(samples, len(self.train))
        last = self.order(np.arange(samples - rest, samples))
        return epochs * self.train.trained + int(self.train.labels[last].sum())

    def samples_for(self, tokens: int) -> int:
        """How many rows of the run it takes to train so many tokens."""
        epochs, rest = divmod(tokens, self.train.trained)
        first = epochs * len(self.train)
        sums = np.cumsum(self.train.labels[self.order(np.arange(first, first + len(self.train)))])
        return first + (int(np.searchsorted(sums, rest)) + 1 if rest else 0)

    def step(self, samples: int, micro_batch_size: int, accumulation: int, rank: int, replicas: int
             ) -> Iterator[torch.Tensor]:
        """
        One replica's rows for the optimizer step that begins after `samples` rows: LongTensors
        [micro_batch_size, 4, T], `accumulation` of them, in an order like that of Corpus. (Without packing
        they are cut to their longest sample.)
        """
        for k in range(accumulation):
            first = samples + (k * replicas + rank) * micro_batch_size
            rows = self.order(np.arange(first, first + micro_batch_size))
            yield self.batch([self.row(self.train, int(number)) for number in rows])

    def evaluation(self, micro_batch_size: int, rank: int, replicas: int, eval_tokens: int | None = None
                   ) -> Iterator[torch.Tensor]:
        """
        LongTensors [micro_batch_size, 4, T]: over all replicas each row that was held out, once, then blank
        ones, so that every replica yields as many. `eval_tokens`: evenly spaced rows with about so many
        labels.
        """
        total = len(self.val)
        count = total
        if eval_tokens is not None and self.val.trained:
            count = min(total, -(-eval_tokens * total // self.val.trained))
        for first in range(0, count, micro_batch_size * replicas):
            mine = first + rank * micro_batch_size
            rows = [self.row(self.val, number * total // count)
                    for number in range(mine, min(mine + micro_batch_size, count))]
            yield self.batch(rows + [self.blank()] * (micro_batch_size - len(rows)))


class Packed:
    """Which pieces share a row. `labels`: trained tokens by row; `used`: places that are no padding."""
    def __init__(self, pieces: np.ndarray, labels: np.ndarray, sequence_length: int, packing: bool):
        self.pieces, places = pieces, pieces[:, 2]
        self.rows = fill_rows(places, sequence_length) if packing else [[i] for i in range(len(places))]
        self.labels = np.array([labels[row].sum() for row in self.rows], np.int64)
        self.trained, self.used = int(labels.sum()), int(places.sum())

    def __len__(self) -> int:
        return len(self.rows)


def fill_rows(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """
    Which of some lengths share a row of `capacity`: the longest first, each into the fullest row that still
    takes it (best fit decreasing).
    """
    rows, open_rows, roomy = [], defaultdict(list), 0          # room -> rows; a bit for each room there is
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        if fits := roomy >> length:
            room = length + (fits & -fits).bit_length() - 1    # the least that is enough
            row = open_rows[room].pop()
            if not open_rows[room]:
                roomy &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if room > length:
            open_rows[room - length].append(row)
            roomy |= 1 << (room - length)
    return rows


def largest_remainder(weights: list[float], total: int) -> tuple[int, ...]:
    """Whole numbers that add up to `total`: rounded down, then one more for the largest remainders."""
    exact = [weight * total / sum(weights) for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[:total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def documents(ids: torch.Tensor, eos_id: int) -> torch.Tensor:
    """The document of each token of ids [B, T], numbered from 0 in each row; eos is its document's last."""
    ends = (ids == eos_id).long()
    return ends.cumsum(1) - ends
