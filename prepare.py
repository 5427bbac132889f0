"""
Any text -> token shards, the form that train.py reads.

    python prepare.py --data=stdlib                         the sources of this Python: the built-in corpus
    python prepare.py --data=book.txt --out_dir=data/book --val_fraction=0.1
    python prepare.py --data=stories.jsonl --tokenizer=gpt2 --workers=8
    python prepare.py --data=stories.txt --document_separator='\\n<|endoftext|>\\n'

--data is a .txt, .md or .jsonl file, or a directory of them. A text file is one document (or one between
each two separators), a line {"text": ...} of jsonl is one. Each is followed by the tokenizer's end-of-text
id; text that spells a special token stays text. Which documents are for validation is decided by a hash of
their text, so it does not change when others are added, removed or reordered.

Nothing is trained on that was not text: documents that are empty, not UTF-8, or hold NUL characters are left
out and counted. A byte order mark is removed, CRLF line ends are kept as they are; both are counted.

The result depends on the input and the options, not on --workers. A killed run goes on where it was when
the same command is given again, and meta.json is written last: where it stands, the corpus is complete.
Memory: a few MB per worker and the longest document.

train.py --data=stories.jsonl does all this by itself, into data/stories-<key>, like this script without
--out_dir.
"""
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import platform
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

import config
import launch
from config import UserError
from data import (FORMAT, Records, describe_shard, digest, find_files, mix_of, nearest, read_json,
                  read_records, write_json)
from tokenizer import Tokenizer, load_tokenizer, parts, train_bpe

CHUNK = 2**19                  # characters that a worker encodes at a time
BPE_SAMPLE = 8_000_000         # bytes to learn a vocabulary from: it hardly changes with more
WINDOW = 1025                  # tokens that validation should have at least: one window of a common length
PATIENCE = 30                  # seconds that a rank gives rank 0 to begin
STARTED = time.time()          # of this process, nearly
UNFINISHED, LOCK = "unfinished.json", ".lock"


@dataclass
class Config:
    data: str = ""                           # .txt, .md or .jsonl file, a directory of them, or "stdlib"
    out_dir: str | None = None               # None = data/<name>-<key>, where train.py looks for it
    tokenizer: str = "auto"                  # "auto" = a BPE trained on the text; or "byte", "gpt2", a path
    val_fraction: float = 0.01               # of the documents, for validation; 0 = none
    document_separator: str | None = None    # divides a text file into documents; \n and \t are understood
    text_key: str = "text"                   # of jsonl
    shard_tokens: int = 100_000_000          # tokens in a file
    workers: int | None = None               # processes that encode; None = one per CPU core


OPTIONS = ("val_fraction", "document_separator", "text_key", "shard_tokens")     # what changes the result


def main(cfg: Config) -> dict:
    if not cfg.data:
        raise UserError("--data is missing: python prepare.py --data=my.jsonl, or --data=stdlib")
    options = {key: getattr(cfg, key) for key in OPTIONS}
    if cfg.document_separator:
        options["document_separator"] = cfg.document_separator.replace("\\n", "\n").replace("\\t", "\t")
    out_dir = cfg.out_dir or target(cfg.data, cfg.tokenizer, options)
    try:
        return prepare(cfg.data, out_dir, cfg.tokenizer, workers=cfg.workers or cores(), **options)
    except KeyboardInterrupt:
        print(f"stopped: the same command goes on with {out_dir}", file=sys.stderr)
        raise SystemExit(130) from None


def prepare(source: str, out_dir: str, tokenizer="auto", val_fraction: float = Config.val_fraction,
            workers: int | None = None, document_separator: str | None = Config.document_separator,
            text_key: str = Config.text_key, shard_tokens: int = Config.shard_tokens,
            say: Callable[[str], object] = print) -> dict:
    """
    Tokenizes `source` into the corpus directory `out_dir` and returns the content of its meta.json; at once
    when it has been done before. `tokenizer`: "auto", or what load_tokenizer takes. UserError: bad input.
    """
    options = {"val_fraction": val_fraction, "document_separator": document_separator, "text_key": text_key,
               "shard_tokens": shard_tokens}
    tokenizer = tokenizer if tokenizer == "auto" else load_tokenizer(tokenizer)
    key, began = key_of(source, tokenizer, options), time.monotonic()
    if meta := finished(out_dir, key):
        say(f"{out_dir} is there already, made from the same input with the same options")
        return meta
    texts = Texts(read_records(source, document_separator), text_key, val_fraction)
    if next(iter(texts), None) is None:
        found = tally(texts.records, texts.records.left_out) or "no file to read"
        raise UserError(f"{source} holds no document to train on: {found}")
    make_directory(out_dir)
    with exclusive(out_dir, say):
        if meta := finished(out_dir, key):           # by the process that we waited for
            return meta
        journal = open_journal(out_dir, key, source)
        tokenizer = choose_tokenizer(tokenizer, texts, out_dir, journal, say)
        train, val = (Shards(out_dir, name, tokenizer, shard_tokens) for name in ("train", "val"))
        encode_all(texts, tokenizer, [train, val], out_dir, journal, workers, say)
        balance(train, val, tokenizer, val_fraction, say)
        meta = {"format": FORMAT, "key": key, "source": source, "options": options,
                "tokenizer": journal["tokenizer"], "vocab_size": tokenizer.vocab_size,
                "eos_id": tokenizer.eos_id, "dtype": train.dtype.name, "documents": texts.documents,
                "bytes": texts.bytes, "tokens": train.tokens + val.tokens, "train": train.describe(),
                "val": val.describe(), "left_out": dict(texts.records.left_out),
                "noted": dict(texts.records.noted)}
        write_json(os.path.join(out_dir, "meta.json"), meta)
        for rest in (UNFINISHED, LOCK):
            with contextlib.suppress(OSError):       # Windows keeps a file that is open
                os.remove(os.path.join(out_dir, rest))
    say(summary(out_dir, meta, texts.records, time.monotonic() - began))
    return meta


# ---- documents --------------------------------------------------------------------------------------------
class Texts:
    """The documents of some records, checked and counted; iterate as often as needed, counts start anew."""

    def __init__(self, records: Records, text_key: str, val_fraction: float):
        self.records, self.text_key, self.val_fraction = records, text_key, val_fraction

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        """(text, whether it is for validation)"""
        self.documents = self.bytes = 0
        for record in self.records:
            raw = self.check(record)
            if raw is not None:
                self.documents, self.bytes = self.documents + 1, self.bytes + len(raw)
                place = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") / 2**64
                del raw                              # a long document is enough once
                yield record[self.text_key], place < self.val_fraction

    def check(self, record: dict) -> bytes | None:
        """The text in UTF-8; None, and a count under its reason, for what is no text."""
        records, text = self.records, record.get(self.text_key)
        if self.text_key not in record:
            return records.leave_out(f"without the key {self.text_key!r}",
                                     f" has {', '.join(record) or 'no keys'}")
        if not isinstance(text, str):
            return records.leave_out(f"{self.text_key!r} is not a text", f" has {json.dumps(text)[:40]}")
        if not text or text.isspace():
            return records.leave_out("empty document")
        if "\0" in text:
            return records.leave_out("NUL characters (not a text)")
        try:
            raw = text.encode()
        except UnicodeEncodeError:                   # no character, and UTF-8 has no bytes for it
            return records.leave_out("half a surrogate pair")
        if "\r\n" in text:
            records.note("CRLF line ends (kept)")
        return raw


def chunks(texts: Texts, tokenizer: Tokenizer) -> Iterator[tuple[list, int]]:
    """
    ([(part of a document, for validation?, does the document end here?), ...], bytes of input read so far):
    what a worker encodes at a time, about CHUNK characters. Long documents are cut where their ids cannot
    change, so that one large file keeps every worker busy.
    """
    chunk, characters, before = [], 0, 0
    for text, val in texts:
        read = texts.records.bytes_read - before     # by this document
        if tokenizer.normalize(text) != text:
            texts.records.note("changed by the tokenizer's normalisation")
        left = len(text)
        for part in parts(text):
            left -= len(part)
            chunk.append((part, val, left == 0))
            characters += len(part) + 1
            if characters >= CHUNK:
                yield chunk, before + read * (len(text) - left) // len(text)
                chunk, characters = [], 0
        before += read
    yield chunk, texts.records.bytes_read


# ---- encoding ---------------------------------------------------------------------------------------------
def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def adopt(tokenizer):
    """Runs first in each worker, which ends with its parent, even a killed one, and leaves Ctrl-C to it."""
    global worker_tokenizer                          # too large to be sent with every chunk
    worker_tokenizer = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode(chunk: list, tokenizer=None) -> list[np.ndarray]:
    """The ids of a chunk: [for training, for validation]."""
    tokenizer = tokenizer or worker_tokenizer
    ids = [[np.zeros(0, np.uint16)], [np.zeros(0, np.uint16)]]
    for text, val, ends in chunk:
        ids[val].append(tokenizer.encode_array(text))
        if ends:
            ids[val].append(np.array([tokenizer.eos_id], ids[val][-1].dtype))
    return [np.concatenate(parts) for parts in ids]


def encoded(wanted: Iterator[tuple[list, int]], tokenizer, workers: int) -> Iterator[tuple[list, int]]:
    """(ids of a chunk, bytes read) in the order of the chunks; with several workers, a few chunks ahead."""
    if workers == 1:
        yield from ((encode(chunk, tokenizer), read) for chunk, read in wanted)
        return
    # Linux forks, which takes milliseconds and works in a notebook; elsewhere the script is imported again.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(workers, context, adopt, (tokenizer,)) as pool:
        ahead = deque()
        for chunk, read in wanted:
            ahead.append((pool.submit(encode, chunk), read))
            if len(ahead) > 2 * workers:
                future, read = ahead.popleft()
                yield future.result(), read
        for future, read in ahead:
            yield future.result(), read


def encode_all(texts: Texts, tokenizer, splits: list, out_dir: str, journal: dict, workers: int | None, say):
    """Writes the shards. The journal counts the chunks that are on disk; a second start skips those."""
    if not all(split.holds(journal["splits"][split.name]) for split in splits):
        journal.update(chunks=0, splits=NOTHING)     # killed while the splits were balanced
    for split in splits:
        split.restore(journal["splits"][split.name])
    done, saved = journal["chunks"], time.monotonic()
    if done:
        say(f"going on with {out_dir} after {sum(split.tokens for split in splits):,} tokens")
    if texts.records.total_bytes < 2 * CHUNK:
        workers = 1
    elif workers is None:                            # without fork, only a guarded __main__ can have workers
        workers = cores() if sys.platform == "linux" else 1
    wanted = itertools.islice(chunks(texts, tokenizer), done, None)
    progress = Progress(texts.records.total_bytes)
    try:
        for ids, read in encoded(wanted, tokenizer, workers):
            full = [split.append(more) for split, more in zip(splits, ids)]
            done += 1
            progress.show(read, sum(split.tokens for split in splits))
            if any(full) or time.monotonic() - saved > 5:
                save_journal(out_dir, journal, done, splits)
                saved = time.monotonic()
    except BrokenProcessPool:
        raise UserError(f"a worker process was killed, probably for want of memory: give the same command "
                        f"with less than --workers={workers}; what is done is kept in {out_dir}") from None
    finally:
        progress.clear()
    save_journal(out_dir, journal, done, splits)


class Shards:
    """The token files of a split while they are written: <name>-00000.bin, ..., of shard_tokens each."""

    def __init__(self, out_dir: str, name: str, tokenizer, shard_tokens: int):
        self.out_dir, self.name, self.shard_tokens = out_dir, name, shard_tokens
        self.eos_id = tokenizer.eos_id
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
        self.tokens = self.documents = 0             # a document is where its end is
        self.full = []                               # the facts of each shard that is complete

    def path(self, index: int) -> str:
        return os.path.join(self.out_dir, f"{self.name}-{index:05d}.bin")

    def append(self, ids) -> bool:
        """Whether a shard became full."""
        ids, before = ids.astype(self.dtype, copy=False), len(self.full)
        self.documents += int((ids == self.eos_id).sum())
        while len(ids):
            index, inside = divmod(self.tokens, self.shard_tokens)
            now, ids = np.split(ids, [self.shard_tokens - inside])
            with open(self.path(index), "ab") as file:
                now.tofile(file)
            self.tokens += len(now)
            if self.tokens % self.shard_tokens == 0:
                self.full.append(describe_shard(self.path(index), self.dtype))
        return len(self.full) > before

    def describe(self) -> dict:
        """This split's part of meta.json."""
        last = len(self.full)
        rest = [describe_shard(self.path(last), self.dtype)] if self.tokens % self.shard_tokens else []
        held = sum(facts["tokens"] for facts in self.full + rest)
        assert held == self.tokens, f"{self.name}: {held:,} tokens on disk, {self.tokens:,} were written"
        return {"documents": self.documents, "tokens": self.tokens,
                "shards": [{"file": os.path.basename(self.path(index)), **facts}
                           for index, facts in enumerate(self.full + rest)]}

    def sync(self) -> dict:
        """All that was appended is on disk; returns what restore() needs."""
        if os.path.exists(last := self.path(len(self.full))):
            with open(last, "rb+") as file:
                os.fsync(file.fileno())
        return {"tokens": self.tokens, "documents": self.documents, "full": self.full}

    def holds(self, state: dict) -> bool:
        """Whether the files still have at least what sync() returned."""
        ends = range(0, state["tokens"], self.shard_tokens)
        sizes = [min(self.shard_tokens, state["tokens"] - start) * self.dtype.itemsize for start in ends]
        return all(os.path.exists(self.path(index)) and os.path.getsize(self.path(index)) >= size
                   for index, size in enumerate(sizes))

    def restore(self, state: dict):
        """Back to what sync() returned: what was appended later goes."""
        self.documents, self.full = state["documents"], list(state["full"])
        self.shorten(state["tokens"])

    def shorten(self, tokens: int):
        """Drops everything behind the first `tokens` tokens."""
        self.tokens = tokens
        index, inside = divmod(tokens, self.shard_tokens)
        del self.full[index:]
        if inside:
            os.truncate(self.path(index), inside * self.dtype.itemsize)
            index += 1
        # highest first, and whatever stands there: a kill may have left a gap
        for name in sorted(os.listdir(self.out_dir), reverse=True):
            if re.fullmatch(self.name + r"-\d{5,}\.bin", name) and int(name[len(self.name) + 1:-4]) >= index:
                os.remove(os.path.join(self.out_dir, name))

    def blocks(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """The tokens [start, stop), some MB at a time."""
        while start < stop:
            index, inside = divmod(start, self.shard_tokens)
            count = min(stop - start, self.shard_tokens - inside, 2**22)
            yield np.fromfile(self.path(index), self.dtype, count, offset=inside * self.dtype.itemsize)
            start += count


def balance(train: Shards, val: Shards, tokenizer, val_fraction: float, say):
    """
    The hash shares out whole documents, but there may be few, or one that outweighs the rest: a single book
    is either here or there. Where validation got less than half of its share or not one window, or training
    less than half of everything, the line is drawn by tokens: of training and then validation, the last ones
    are for validation, and the document on the line is cut in two.
    """
    total, documents = train.tokens + val.tokens, train.documents + val.documents
    share = round(val_fraction * total)
    least = max(share // 2, min(WINDOW, total // 20))
    if val_fraction == 0 or least <= val.tokens <= max(2 * share, total // 2):
        return
    wanted = max(share, least)
    say(f"sharing out {documents:,} whole documents gave validation {val.tokens:,} of {total:,} tokens "
        f"instead of about {wanted:,}: the last {wanted:,} tokens are the validation split")
    line, had = total - wanted, train.tokens
    tail = Shards(val.out_dir, "tail", tokenizer, val.shard_tokens)
    tail.shorten(0)                                  # of a run that was killed here
    for block in itertools.chain(train.blocks(line, had), val.blocks(max(0, line - had), val.tokens)):
        tail.append(block)
    for block in val.blocks(0, line - had):
        train.append(block)
    train.shorten(line)
    val.shorten(0)
    for index in range(-(-tail.tokens // tail.shard_tokens)):
        os.replace(tail.path(index), val.path(index))
    val.tokens, val.documents, val.full = tail.tokens, tail.documents, tail.full
    train.documents = documents - val.documents


# ---- the tokenizer ----------------------------------------------------------------------------------------
def choose_tokenizer(tokenizer, texts: Texts, out_dir: str, journal: dict, say) -> Tokenizer:
    """The one that was asked for, or a BPE trained on the text; it is saved with the corpus."""
    if tokenizer == "auto":
        if journal["tokenizer"]:                     # trained before the run was killed
            return load_tokenizer(out_dir)
        vocab_size = vocab_size_for(texts.records.total_bytes)
        sampled = f" (evenly spaced parts of it, {BPE_SAMPLE / 1e6:.0f} MB)"
        say(f"training a BPE tokenizer with {vocab_size:,} entries on the text"
            f"{sampled if texts.records.total_bytes > BPE_SAMPLE else ''}")
        tokenizer = train_bpe(sample(texts), vocab_size, say=say)
    tokenizer.save(out_dir)
    journal["tokenizer"] = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}
    write_json(os.path.join(out_dir, UNFINISHED), journal)
    return tokenizer


def vocab_size_for(size: int) -> int:
    """The largest power of two that leaves 2,048 bytes of text for each entry, from 512 to 32,768."""
    return 2 ** min(max((size // 2048).bit_length() - 1, 9), 15)


def sample(texts: Texts) -> Iterator[str]:
    """About BPE_SAMPLE bytes of the text: one block of so many, over its whole length."""
    every, number = -(-texts.records.total_bytes // BPE_SAMPLE), 0
    for text, _ in texts:
        for start in range(0, len(text), 2**14):
            if number % every == 0:
                yield text[start:start + 2**14]
            number += 1


# ---- the directory ----------------------------------------------------------------------------------------
NOTHING = {name: {"tokens": 0, "documents": 0, "full": []} for name in ("train", "val")}


def key_of(source: str, tokenizer, options: dict) -> str:
    """Changes when the result would: the input (files by path, size and time), the tokenizer, an option."""
    if source == "stdlib":
        files = sys.version                          # not a look at each file: this is to take no time
    else:
        files = [(os.path.abspath(path), os.stat(path).st_size, os.stat(path).st_mtime_ns)
                 for path in find_files(source)[0]]
    by = "auto" if tokenizer == "auto" else [tokenizer.fingerprint, tokenizer.eos_id]
    return digest([FORMAT, files, by, options])


def target(source: str, tokenizer, options: dict) -> str:
    """data/<name>-<key>: where a corpus goes that was given no place."""
    tokenizer = tokenizer if tokenizer == "auto" else load_tokenizer(tokenizer)
    name = os.path.splitext(os.path.basename(os.path.abspath(source)))[0]
    name = re.sub(r"[^\w.-]+", "-", name)
    return os.path.join("data", f"{name}-{key_of(source, tokenizer, options)[:8]}")


def finished(out_dir: str, key: str) -> dict | None:
    """meta.json of a complete corpus; UserError when it is another one."""
    path = os.path.join(out_dir, "meta.json")
    if not os.path.isfile(path):
        return None
    meta = read_json(path)
    if meta.get("key") != key:
        raise UserError(f"{out_dir} holds a corpus already, made from {meta.get('source')} (other input, "
                        f"tokenizer or options): choose another --out_dir, or delete it")
    return meta


def open_journal(out_dir: str, key: str, source: str) -> dict:
    """What an earlier run of the same command finished; nothing, when there was none."""
    path = os.path.join(out_dir, UNFINISHED)
    if os.path.isfile(path):
        journal = read_json(path)
        if journal["key"] != key:
            raise UserError(f"{out_dir} holds an unfinished corpus, made from {journal['source']} (other "
                            f"input, tokenizer or options): choose another --out_dir, or delete it")
        return journal
    ours = re.compile(r"(train|val)(-\d+)?\.bin|tokenizer(_config)?\.json")
    if found := [name for name in sorted(os.listdir(out_dir)) if ours.fullmatch(name)]:
        raise UserError(f"{out_dir} holds {', '.join(found[:5])}, which would be overwritten: choose "
                        f"another --out_dir")
    journal = {"key": key, "source": source, "tokenizer": None, "chunks": 0, "splits": NOTHING}
    write_json(path, journal)
    return journal


def save_journal(out_dir: str, journal: dict, chunks_done: int, splits: list):
    journal.update(chunks=chunks_done, splits={split.name: split.sync() for split in splits})
    write_json(os.path.join(out_dir, UNFINISHED), journal)


def make_directory(path: str):
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be made ({error.strerror}): choose another --out_dir") from None


@contextlib.contextmanager
def exclusive(out_dir: str, say):
    """One process at a time; the system lifts the lock of one that dies."""
    with open(os.path.join(out_dir, LOCK), "ab") as file:
        if not launch.lock(file):
            say(f"waiting for another process that is preparing {out_dir}")
            while not launch.lock(file):
                time.sleep(0.2)
        yield


# ---- what to say ------------------------------------------------------------------------------------------
class Progress:
    """One line that is rewritten, on a terminal; nothing in a file or a pipe."""

    def __init__(self, total_bytes: int):
        self.total, self.first, self.began, self.shown = max(1, total_bytes), None, 0.0, 0.0
        self.terminal = sys.stderr is not None and sys.stderr.isatty()

    def show(self, read: int, tokens: int):
        now = time.monotonic()
        if self.first is None:                       # a resumed run has read on to here in no time
            self.first, self.began = read, now
        elif self.terminal and now - self.shown > 0.2 and now - self.began > 0.5:
            rate = (read - self.first) / (now - self.began)
            minutes, seconds = divmod(int((self.total - read) / max(1, rate)), 60)
            line = (f"{read / self.total:4.0%} of {self.total / 1e6:,.1f} MB | {rate / 1e6:.1f} MB/s | "
                    f"{tokens:,} tokens | ETA {minutes}:{seconds:02d}")
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
            self.shown = now

    def clear(self):
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def tally(records: Records, counts: dict) -> str:
    example = records.example
    return ", ".join(f"{count:,} x {reason}" + (f" (first: {example[reason]})" if reason in example else "")
                     for reason, count in sorted(counts.items()))


def summary(out_dir: str, meta: dict, records: Records, seconds: float) -> str:
    per_token = meta["bytes"] / max(1, meta["tokens"] - meta["documents"])
    lines = [f"{out_dir}: {meta['documents']:,} documents, {meta['bytes']:,} bytes, {meta['tokens']:,} "
             f"tokens ({per_token:.2f} bytes per token, vocabulary {meta['vocab_size']:,}), {seconds:.1f} s"]
    for name in ("train", "val"):
        split = meta[name]
        lines.append(f"  {name:5}  {split['tokens']:,} tokens, {split['documents']:,} documents, "
                     f"{len(split['shards'])} files")
    if records.left_out:
        lines.append(f"  left out: {tally(records, records.left_out)}")
    if records.noted:
        lines.append(f"  noted: {tally(records, records.noted)}")
    return "\n".join(lines)


# ---- for the training scripts -----------------------------------------------------------------------------
def ensure(data: str, tokenizer="auto", rank: int = 0, world: int = 1, say: Callable[[str], object] = print,
           **options) -> str:
    """
    `data` with every raw part ("stdlib", a file, a directory of text) replaced by its corpus in
    data/<name>-<key>, which is prepared when it is missing: by rank 0, while the others wait. Every rank
    calls this, before the process group exists (preparing may take longer than its timeout). `options` are
    prepare()'s.
    """
    say = say if rank == 0 else lambda text: None
    mix = [(corpus_of(path, tokenizer, rank, world, say, options), weight) for path, weight in mix_of(data)]
    return mix[0][0] if len(mix) == 1 else ",".join(f"{path}:{weight!r}" for path, weight in mix)


def corpus_of(path: str, tokenizer, rank: int, world: int, say, options: dict) -> str:
    if any(os.path.isfile(os.path.join(path, name)) for name in ("meta.json", "train.bin")):
        if tokenizer not in (None, "auto") and os.path.isfile(os.path.join(path, "tokenizer.json")):
            theirs = load_tokenizer(path)
            if not load_tokenizer(tokenizer).contains(theirs):
                raise UserError(f"{path} was prepared with another tokenizer ({theirs.vocab_size:,} "
                                f"entries) than {tokenizer}: prepare the text again with that one")
        return path
    if os.path.isfile(os.path.join(path, UNFINISHED)):
        raise UserError(f"{path} is not finished: give the prepare.py command that began it once more")
    if path != "stdlib" and not os.path.exists(path):
        raise UserError(f"{path} does not exist{nearest(path)}; python prepare.py --data=<text> "
                        f"--out_dir={path} makes a corpus there")
    if tokenizer is None:
        raise UserError(f"{path} is raw text, and the model that it is for has no tokenizer: give "
                        f"--tokenizer=<its name or path>")
    out_dir = target(path, tokenizer, {key: options.get(key, getattr(Config, key)) for key in OPTIONS})
    if os.path.isfile(os.path.join(out_dir, "meta.json")):
        say(f"{path} was prepared before: {out_dir}")
    elif rank == 0:
        say(f"{path} is raw text: preparing it in {out_dir}")
        make_directory(os.path.dirname(out_dir))
        with announced(out_dir + ".note.json") if world > 1 else contextlib.nullcontext():
            prepare(path, out_dir, tokenizer, say=say, **options)
    else:
        wait_for(out_dir, out_dir + ".note.json")
    return out_dir


@contextlib.contextmanager
def announced(path: str):
    """Rank 0 leaves a note beside the directory, so that the others learn that it works, or why not."""
    def write(error):
        write_json(path, {"host": platform.node(), "time": time.time(), "error": error})

    write(None)
    try:
        yield
    except BaseException as error:
        write(str(error) or type(error).__name__)
        raise
    os.remove(path)


def wait_for(out_dir: str, path: str):
    """
    Until rank 0's meta.json is there; UserError with its words when it failed. A note of an earlier run says
    nothing about this one: we believe one that changes while we look, or is younger than this process (which
    only the same machine's clock can tell), or has stood for so long that rank 0 would have replaced it.
    """
    def look():
        with contextlib.suppress(OSError, UserError):
            return read_json(path)

    began, first = time.monotonic(), look()
    while not os.path.isfile(os.path.join(out_dir, "meta.json")):
        note, waited = look(), time.monotonic() - began
        if note and note["error"]:
            ours = note["host"] == platform.node() and note["time"] >= STARTED
            if ours or note != first or waited > PATIENCE:
                raise UserError(note["error"])
        if note is None and waited > 2 * PATIENCE and not os.path.isdir(out_dir):
            raise UserError(f"rank 0 prepares {out_dir}, but {platform.node()} sees nothing of it after "
                            f"{waited:.0f} s: start on a disk that all machines share, or prepare the "
                            f"corpus on each of them first")
        time.sleep(0.1)


if __name__ == "__main__":
    config.run(main, Config)
