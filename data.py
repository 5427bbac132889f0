"""
Data: records from files, and windows of token ids in an order that any number of machines agrees on.

A corpus is a directory that prepare.py wrote: `meta.json` (what the tokens are), the tokenizer, and raw
token shards (`train-00000.bin`, `val-00000.bin`; uint16 or uint32) with the end-of-text id exactly once
after each document. The shards of a split are one long stream. Window i of it is tokens[i*T : i*T + T + 1]:
neighbours share one id, so every token but the first is predicted exactly once. nanoGPT's directories
(`train.bin`, `val.bin`, bare uint16) work too.

    corpus = open_corpus("data/books:0.7,data/code:0.3", sequence_length=512, seed=0)
    for rows in corpus.step(samples=0, micro_batch_size=8, accumulation=2, rank=0, replicas=4):
        ...                                            # rows: [8, 513], twice

The order has no state. Sample number s (counted from the start of the run, over all replicas) is always
the same window: which one is computed from (seed, s) by a permutation that takes no memory. A resumed run
needs to know one number, and replicas, meshes and gradient accumulation can change without changing what
an optimizer step sees.
"""
import difflib
import functools
import hashlib
import json
import math
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from config import UserError

FORMAT = 1                     # of meta.json; a reader refuses what it does not know


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


class Source:
    """One corpus directory: its two streams, and what its ids mean."""

    def __init__(self, path: str):
        self.path = path
        if os.path.isfile(os.path.join(path, "meta.json")):
            self.open_prepared(read_json(os.path.join(path, "meta.json")))
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
        self.train, self.val = (self.open_split(meta[split]["shards"], np.dtype(meta["dtype"]))
                                for split in ("train", "val"))
        self.fingerprint = digest([[shard["sha256"] for shard in meta[split]["shards"]]
                                   for split in ("train", "val")])

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
        self.train, self.val = (Stream([(file, f["tokens"])], np.uint16) for file, f in zip(files, facts))
        self.fingerprint = digest([[f["sha256"]] for f in facts])

    @functools.cached_property
    def tokenizer(self):
        if self.tokenizer_fingerprint is None:
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


def digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def read_json(path: str) -> dict:
    with open(path, encoding="utf-8", newline="\n") as file:
        try:
            return json.load(file)
        except ValueError as error:
            raise UserError(f"{path} is not valid JSON ({error}): delete it and make it again") from None


def write_json(path: str, value) -> None:
    """Whole or not at all: a reader never sees half a file."""
    part = f"{path}.{os.getpid()}.tmp"
    with open(part, "w", encoding="utf-8", newline="\n") as file:
        json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


# ---- the corpus -------------------------------------------------------------------------------------------
def mix_of(spec: str) -> list[tuple[str, float]]:
    """"a:7,b:3" -> [("a", 0.7), ("b", 0.3)]. A path alone has weight 1, whatever it is spelled like."""
    if os.path.exists(spec) or ("," not in spec and weight_of(spec)[1] is None):
        return [(spec, 1.0)]
    parts = [weight_of(part.strip()) for part in spec.split(",")]
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
        self.windows_of = [max(0, len(source.train) - 1) // sequence_length for source in sources]
        self.windows = sum(self.windows_of)                                # an epoch, in samples
        self.quotas = largest_remainder(weights, BLOCK)
        self.fingerprint = digest([[source.fingerprint, quota]
                                   for source, quota in zip(sources, self.quotas)])
        self.refuse_what_does_not_mix()

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
                if not self.tokenizer.contains(source.tokenizer):
                    raise UserError(f"{source.path} was made with another tokenizer "
                                    f"({source.tokenizer.name}) than the rest ({self.tokenizer.name}): "
                                    f"prepare all with the same one")

    @functools.cached_property
    def tokenizer(self):
        """What the ids belong to: in a mix, the one of the largest vocabulary. None for bare .bin files."""
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
            available = self.windows_of[source]
            epochs = number // available
            for epoch in np.unique(epochs[which == source]):       # each has its own order
                here = (which == source) & (epochs == epoch)
                order = self.seed, 2, int(source), int(epoch)
                window[here] = permute(number[here] % available, available, *order)
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


# ---- records ----------------------------------------------------------------------------------------------
SUFFIXES = (".txt", ".md", ".jsonl")
NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}


def read_records(source: str, document_separator: str | None = None) -> "Records":
    """
    The records (dicts) of a .txt, .md or .jsonl file, of a directory of them (recursive, sorted, hidden
    files skipped), or of "stdlib", the sources of the running Python. A text file is one record
    {"text": ...}, or one between each two separators; a line of jsonl is one. What cannot be read is left
    out and counted.
    """
    return Records(source, document_separator)


class Records:
    """
    Iterable, as often as needed. Meanwhile and afterwards: `bytes_read` (of `total_bytes`); `left_out` and
    `noted`, how many by reason; `example`, where a reason was first met; `where`, the place of the record.
    """

    def __init__(self, source: str, document_separator: str | None):
        self.separator = document_separator.encode() if document_separator else None
        self.files, self.other_files = find_files(source)
        self.sizes = {path: os.path.getsize(path) for path in self.files}
        self.total_bytes = sum(self.sizes.values())
        self.start()

    def start(self):
        self.left_out, self.noted, self.example = Counter(self.other_files), Counter(), {}
        self.bytes_read, self.path, self.line = 0, "", 0

    @property
    def where(self) -> str:
        return f"{self.path} line {self.line}" if self.line else self.path

    def leave_out(self, reason: str, detail: str = ""):
        self.left_out[reason] += 1
        self.example.setdefault(reason, self.where + detail)

    def note(self, what: str):
        self.noted[what] += 1
        self.example.setdefault(what, self.where)

    def __iter__(self) -> Iterator[dict]:
        self.start()
        for self.path in self.files:
            self.line, end = 0, self.bytes_read + self.sizes[self.path]
            try:
                with open(self.path, "rb") as file:
                    yield from self.lines(file) if self.path.lower().endswith(".jsonl") else self.texts(file)
            except OSError as error:
                self.leave_out("unreadable file", f" ({error.strerror})")
            self.bytes_read = end

    def lines(self, file):
        for self.line, raw in enumerate(file, 1):
            self.bytes_read += len(raw)
            text = self.decode(raw, first=self.line == 1)
            if text is None:
                continue
            if not text.strip():
                self.leave_out("empty line")
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError):
                self.leave_out("broken JSON line")
                continue
            if isinstance(record, dict):
                yield record
            else:
                self.leave_out("JSON line that is no object")

    def texts(self, file):
        for number, raw in enumerate(split_file(file, self.separator)):
            self.bytes_read += len(raw)
            text = self.decode(raw, first=number == 0)
            if text is not None:
                yield {"text": text}

    def decode(self, raw: bytes, first: bool) -> str | None:
        if first and raw.startswith(b"\xef\xbb\xbf"):
            self.note("byte order mark (removed)")
            raw = raw[3:]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.leave_out("not UTF-8", f", byte {error.start:,}")


def split_file(file, separator: bytes | None) -> Iterator[bytes]:
    """The parts of a binary file between separators, one at a time. Mere space after the last is no part."""
    if not separator:
        yield file.read()
        return
    held, parts = bytearray(), 0
    while block := file.read(2**20):
        seen = max(0, len(held) - len(separator) + 1)      # what came before holds no separator
        held += block
        while (at := held.find(separator, seen)) >= 0:
            yield bytes(held[:at])
            del held[:at + len(separator)]
            seen, parts = 0, parts + 1
    if not parts or held.strip():
        yield bytes(held)


def find_files(source: str) -> tuple[list[str], Counter]:
    """The files to read, in an order that depends on their names alone, and how many others were there."""
    if source == "stdlib":
        top, suffixes, skipped = sysconfig.get_paths()["stdlib"], (".py",), NOT_LIBRARY
    elif os.path.isdir(source):
        top, suffixes, skipped = source, SUFFIXES, ()
    elif not os.path.isfile(source):
        raise UserError(f"{source} does not exist{nearest(source)}")
    elif not source.lower().endswith(SUFFIXES):
        raise UserError(f"{source} is in none of the formats that are read here: {', '.join(SUFFIXES)}")
    else:
        return [source], Counter()
    found, other = [], Counter()
    seen = set()

    def unreadable(error):
        other["folder that cannot be read"] += 1

    for folder, folders, names in os.walk(top, followlinks=True, onerror=unreadable):
        if os.path.realpath(folder) in seen:                           # a link that leads back
            other["folder that was read already (a link)"] += 1
            folders.clear()
            continue
        seen.add(os.path.realpath(folder))
        folders[:] = [name for name in folders if name not in skipped and not name.startswith((".", "__py"))]
        for name in names:
            path = os.path.join(folder, name)
            if name.lower().endswith(suffixes) and not name.startswith(".") and os.path.isfile(path):
                found.append(path)
            elif source != "stdlib" and not name.startswith("."):
                other[f"file of another format ({os.path.splitext(name)[1] or 'no suffix'})"] += 1
    return sorted(found, key=lambda path: os.path.relpath(path, top).split(os.sep)), other


def nearest(path: str) -> str:
    """What stands near a path that does not exist, for its error message."""
    folder = os.path.dirname(path) or "."
    while not os.path.isdir(folder):
        path, folder = folder, os.path.dirname(folder) or "."
    names = difflib.get_close_matches(os.path.basename(path), os.listdir(folder), n=3)
    near = ", ".join(os.path.normpath(os.path.join(folder, name)) for name in names)
    return f" (near it: {near})" if near else ""
