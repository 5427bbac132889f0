"""
Any text -> token shards, the form that train.py reads.

    python prepare.py --data=stdlib                         the sources of this Python: the built-in corpus
    python prepare.py --data=book.txt --out_dir=data/book --val_fraction=0.1
    python prepare.py --data=stories.jsonl --tokenizer=gpt2 --workers=8
    python prepare.py --data='src/**/*.py,docs' --dedup     a folder of code and one of texts
    python prepare.py --data=dumps/ --text_key=body         .csv, .jsonl.zst, .parquet, ...: see records.py
    python prepare.py --data=org/name:config --max_tokens=100M    a Hugging Face data set, streamed
    zcat dump.gz | python prepare.py --data=- --out_dir=data/dump
    python prepare.py --data=stories.txt --document_separator='\\n<|endoftext|>\\n'
    python prepare.py --data=stories.jsonl --train_tokenizer=8192 --out_dir=out/tokenizer
    python prepare.py --inspect=data/book                   what is in there, and is it intact?

On several machines, each makes a part (the task number of a SLURM array, say), then one merges them into
the corpus that a single machine would have made:

    python prepare.py --data=dumps/ --tokenizer=gpt2 --out_dir=data/dump --part=3/16
    python prepare.py --out_dir=data/dump --merge

Each document is followed by the tokenizer's end-of-text id; text that spells a special token stays text.
Which documents are for validation is decided by a hash of their text, so it does not change when others
are added, removed or reordered.

Nothing is trained on that was not text: documents that are empty, not UTF-8, or hold NUL characters are left
out and counted. A byte order mark is removed, CRLF line ends are kept as they are; both are counted.

The result depends on the input and the options, not on --workers. A killed run goes on where it was when
the same command is given again, and meta.json is written last: where it stands, the corpus is complete. One
that --max_tokens has cut short is extended by a higher one. Memory: a few MB per worker and the longest
document, where that is no text file of its own (and --dedup: about 100 bytes per document; a stretch of
text without any place to cut, as of spaces or ideographs alone: about 60 bytes per character).

train.py --data=stories.jsonl does all this by itself, into data/stories-<key>, like this script without
--out_dir.
"""
import contextlib
import glob
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

import config
import launch
from config import UserError
from data import BLOCK, FORMAT, Shards, Source, describe_shard, mix_of
from files import LOCK, announced, digest, exclusive, read_json, wait_for, writing, write_json
from records import LargeText, Records, read_records, spool_stdin
from tokenizer import BPE_SAMPLE, Tokenizer, load_tokenizer, train_bpe, vocab_size_for

CHUNK = 2**19                  # characters that a worker encodes at a time
WINDOW = 1025                  # tokens that validation should have at least: one window of a common length
UNFINISHED = "unfinished.json"


@dataclass
class Config:
    # what to read
    data: str = ""                           # files, folders, patterns (a,b), "stdlib", "-", or a data set id
    text_key: str = "text"                   # the key or column that holds the text
    split: str = "train"                     # of a Hugging Face data set
    document_separator: str | None = None    # divides a text file into documents; \n and \t are understood
    dedup: bool = False                      # leave out documents that are equal to an earlier one
    max_documents: int | None = None         # stop after so many
    max_tokens: int | None = None            # stop at so many, training and validation; more extend it later
    # what to make of it
    out_dir: str | None = None               # None = data/<name>-<key>, where train.py looks for it
    tokenizer: str = "auto"                  # "auto" = a BPE trained on the text; or "byte", "gpt2", a path
    val_fraction: float = 0.01               # of the documents, for validation; 0 = none
    shard_tokens: int = 100_000_000          # tokens in a file
    # how
    workers: int | None = None               # processes that encode; None = one per CPU core
    part: str | None = None                  # "3/16": read only the third of 16 slices (needs a tokenizer)
    # something else instead
    merge: bool = False                      # make one corpus of the parts in out_dir
    train_tokenizer: int | None = None       # only train a BPE with so many entries, into out_dir
    inspect: str | None = None               # a corpus to look into and to check


# what changes the result
OPTIONS = ("text_key", "split", "document_separator", "dedup", "max_documents", "val_fraction",
           "shard_tokens")


def main(cfg: Config) -> dict | None:
    if cfg.inspect:
        return inspect(cfg.inspect)
    if cfg.merge:
        if not cfg.out_dir:
            raise UserError("--merge needs the --out_dir that the parts were made for")
        return merge(cfg.out_dir)
    if not cfg.data:
        raise UserError("--data is missing: python prepare.py --data=my.jsonl, or --data=stdlib")
    options = {key: getattr(cfg, key) for key in OPTIONS}
    if cfg.document_separator:
        options["document_separator"] = cfg.document_separator.replace("\\n", "\n").replace("\\t", "\t")
    if cfg.train_tokenizer:
        return only_tokenizer(cfg.data, cfg.train_tokenizer, cfg.out_dir, options)
    if cfg.out_dir is None and (cfg.part or cfg.data == "-"):
        raise UserError(f"{'--part' if cfg.part else '--data=-'} needs an --out_dir")
    tokenizer = cfg.tokenizer if cfg.tokenizer == "auto" else load_tokenizer(cfg.tokenizer)
    out_dir = cfg.out_dir or target(open_records(cfg.data, options), tokenizer, options)
    try:
        return prepare(cfg.data, out_dir, tokenizer, max_tokens=cfg.max_tokens, part=cfg.part,
                       workers=cfg.workers or launch.available_cores(), **options)
    except KeyboardInterrupt:
        print(f"stopped: the same command goes on with {out_dir}", file=sys.stderr)
        raise SystemExit(130) from None


def prepare(source: str | Iterable, out_dir: str, tokenizer="auto", *, max_tokens: int | None = None,
            part: str | None = None, workers: int | None = None, say: Callable[[str], object] = print,
            content: str | None = None, **options) -> dict:
    """
    Tokenizes `source` into the corpus directory `out_dir` and returns the content of its meta.json; at once
    when it has been done before. `source`: what read_records takes. `tokenizer`: "auto", or what
    load_tokenizer takes. `content`: what tells the source from another, instead of its path and time.
    `options`: those of OPTIONS, by name. UserError: bad input.
    """
    options = with_defaults(options)
    tokenizer = tokenizer if tokenizer == "auto" else load_tokenizer(tokenizer)
    if source == "-":
        with spooled(out_dir, say) as (file, content):
            return prepare(file, out_dir, tokenizer, max_tokens=max_tokens, part=part, workers=workers,
                           say=say, content=content, **options)
    records = open_records(source, options)
    title = "standard input" if content else source if isinstance(source, str) else records.name
    title = title.encode(errors="backslashreplace").decode()
    key, began = key_of(content or records.identity(), tokenizer, options), time.monotonic()
    if part:
        part = slice_of(part, tokenizer, options, max_tokens)
        if meta := finished(out_dir, key):
            say(f"{out_dir} is there already, merged from all parts")
            return meta
        records = open_records(source, options, part)
        out_dir = os.path.join(out_dir, "part-{:05d}-of-{:05d}".format(*part))
    if (meta := finished(out_dir, key, max_tokens)) and reaches(meta, max_tokens):
        say(f"{out_dir} is there already, made from the same input with the same options")
        return meta
    texts = Texts(records, options)
    if not part:
        texts.refuse_none(title)
    with writing(out_dir), exclusive(out_dir, say):
        if (meta := finished(out_dir, key, max_tokens)) and reaches(meta, max_tokens):
            return meta                              # by the process that we waited for
        journal = open_journal(out_dir, key, title, meta)
        tokenizer = choose_tokenizer(tokenizer, texts, out_dir, journal, say)
        train, val = (Shards(out_dir, name, tokenizer, options["shard_tokens"],
                             first=len(meta[name]["shards"]) if meta else 0) for name in ("train", "val"))
        room = None if max_tokens is None else max_tokens - (meta["tokens"] if meta else 0)
        complete, found = encode_all(texts, tokenizer, [train, val], out_dir, journal, room, workers, say)
        if not os.path.isfile(os.path.join(out_dir, "tokenizer_config.json")):
            tokenizer.save(out_dir)
        torn = [split.name for split in (train, val) if split.name in journal["torn"] and not split.tokens]
        if not part and not (meta and meta["tokens"]):
            torn = balance(train, val, tokenizer, options["val_fraction"], say)
        found |= {"complete": complete, "part": part, "cursor": None if complete else journal["cursor"],
                  "torn": [] if complete else torn}
        made = {"key": key, "source": title, "options": options, "tokenizer": journal["tokenizer"]}
        meta = meta_of(made, tokenizer, [train, val], found, before=meta)
        publish(out_dir, meta)
    say(summary(out_dir, meta, records, time.monotonic() - began))
    return meta


def with_defaults(options: dict) -> dict:
    cfg = config.make(Config, options)               # checks them
    return {key: getattr(cfg, key) for key in OPTIONS}


def open_records(source, options: dict, part: tuple | None = None) -> Records:
    return read_records(source, options["document_separator"], split=options["split"],
                        columns=[options["text_key"]], part=part, lazy=True)


# ---- documents --------------------------------------------------------------------------------------------
class Texts:
    """The documents of some records, checked and counted; iterate as often as needed, counts start anew."""

    def __init__(self, records: Records, options: dict):
        self.records, self.options = records, options

    def __iter__(self) -> Iterator[tuple[str | LargeText, bool]]:
        """(text, whether it is for validation)"""
        key, documents, seen = self.options["text_key"], 0, set()
        for record in self.records:
            if documents == self.options["max_documents"]:
                return
            place = self.check(record, seen)
            if place is not None:
                documents += 1
                yield record[key], place < self.options["val_fraction"]

    def refuse_none(self, source: str):
        """UserError, with what was met instead, where there is no document at all."""
        if next(iter(self), None) is None:
            found = tally(self.records, self.records.left_out) or "no file to read"
            raise UserError(f"{source} holds no document to train on: {found}")

    def check(self, record: dict, seen: set) -> float | None:
        """
        A hash of the text as a number in [0, 1), which decides its split; None, and a count under its
        reason, for what is no text or was `seen` before.
        """
        records, key = self.records, self.options["text_key"]
        if key not in record:
            return records.leave_out(f"without the key {key!r}", f" has {', '.join(record) or 'no keys'}")
        text = record[key]
        if not isinstance(text, (str, LargeText)):
            shown = json.dumps(text, default=str)[:40]
            return records.leave_out(f"{key!r} is not a text", f" has {shown}")
        place, whole = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=16)
        blank, dos = True, False
        try:
            for piece in [text] if isinstance(text, str) else text.pieces():
                if "\0" in piece:
                    return records.leave_out("NUL characters (not a text)")
                raw = piece.encode()
                place.update(raw)
                if self.options["dedup"]:
                    whole.update(raw)
                blank, dos = blank and (not piece or piece.isspace()), dos or "\r\n" in piece
        except UnicodeEncodeError:                   # no character, and UTF-8 has no bytes for it
            return records.leave_out("half a surrogate pair")
        except (UnicodeDecodeError, OSError) as error:
            return records.give_up(error)
        if blank:
            return records.leave_out("empty document")
        if self.options["dedup"]:
            if whole.digest() in seen:
                return records.leave_out("copy of an earlier document")
            seen.add(whole.digest())
        if dos:
            records.note("CRLF line ends (kept)")
        return int.from_bytes(place.digest(), "big") / 2**64


@dataclass
class Chunk:
    """What a worker encodes at a time, about CHUNK characters."""
    parts: list                # (part of a document, for validation?, does the document end here?)
    read: int                  # bytes of input up to here
    left_out: dict             # and what was met in them
    noted: dict


def chunks(texts: Texts, tokenizer: Tokenizer) -> Iterator[Chunk]:
    """
    Long documents are cut where their ids cannot change, so that one large file keeps every worker busy.
    Where the chunks end depends on nothing but the documents.
    """
    records, chunk, characters, before = texts.records, [], 0, 0

    def ready(read):
        return Chunk(chunk, read, dict(records.left_out), dict(records.noted))

    for text, val in texts:
        inside = before
        for part, ends in parts_of(text, tokenizer):
            chunk.append((part, val, ends))
            characters += len(part) + 1
            inside += len(part)
            if characters >= CHUNK:
                yield ready(min(inside, records.bytes_read if isinstance(text, str) else before + text.size))
                chunk, characters = [], 0
        before = records.bytes_read
    yield ready(records.bytes_read)


def parts_of(text: str | LargeText, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """(part, whether it is the last): parts whose ids, one after another, are those of the whole text."""
    held, coming = "", []
    for piece in [text] if isinstance(text, str) else text.pieces():
        coming.append(piece)
        if sum(map(len, coming)) >= len(held):       # a text without a place to cut is not copied each time
            *done, held = tokenizer.parts("".join([held, *coming]))
            yield from ((part, False) for part in done)
            coming = []
    *done, held = tokenizer.parts("".join([held, *coming]))
    yield from ((part, False) for part in done)
    yield held, True


# ---- encoding ---------------------------------------------------------------------------------------------
def adopt(tokenizer):
    """Runs first in each worker, which ends with its parent, even a killed one, and leaves Ctrl-C to it."""
    global worker_tokenizer                          # too large to be sent with every chunk
    worker_tokenizer = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode(chunk: list, tokenizer=None) -> tuple[np.ndarray, list[int], list[bool]]:
    """
    The ids of some parts of documents, one after another; of each part, how many it has and whether the
    tokenizer's normalisation changes it.
    """
    tokenizer = tokenizer or worker_tokenizer
    ids, lengths, changed = [np.zeros(0, np.uint16)], [], []
    end = np.array([tokenizer.eos_id], np.uint32)
    for text, _, ends in chunk:
        ids.append(tokenizer.encode_array(text))
        lengths.append(len(ids[-1]) + ends)
        changed.append(tokenizer.normalize(text) != text)
        if ends:
            ids.append(end.astype(ids[-1].dtype))
    return np.concatenate(ids), lengths, changed


def save_tokenizer(out_dir: str):
    worker_tokenizer.save(out_dir)


def encoded(wanted: Iterable[Chunk], tokenizer, workers: int, out_dir: str) -> Iterator[tuple]:
    """
    (what encode() makes of it, chunk) in the order of the chunks; with several workers, a few ahead. One of
    them also saves the tokenizer, which can take a second.
    """
    if workers == 1:
        yield from ((encode(chunk.parts, tokenizer), chunk) for chunk in wanted)
        return
    # Linux forks, which takes milliseconds and works in a notebook; elsewhere the script is imported again.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(workers, context, adopt, (tokenizer,)) as pool:
        ahead = deque()
        pool.submit(save_tokenizer, out_dir)
        for chunk in wanted:
            ahead.append((pool.submit(encode, chunk.parts), chunk))
            if len(ahead) > 2 * workers:
                future, chunk = ahead.popleft()
                yield future.result(), chunk
        for future, chunk in ahead:
            yield future.result(), chunk


def encode_all(texts: Texts, tokenizer, splits: list, out_dir: str, journal: dict, room: int | None,
               workers: int | None, say) -> tuple[bool, dict]:
    """
    Writes the shards, with at most `room` tokens. The journal says which chunks are on disk, and how many
    tokens of the next one; a second start skips those. Returns whether the text ended first, and what was
    left out and noted on the way.
    """
    if not all(split.holds(journal["splits"][split.name]) for split in splits):
        journal.update(cursor=journal["began"], splits=NOTHING)     # killed while the splits were balanced
    for split in splits:
        split.restore(journal["splits"][split.name])
    tokens, saved = sum(split.tokens for split in splits), time.monotonic()
    if room is not None and tokens > room:
        raise UserError(f"{out_dir} holds {tokens - room:,} tokens more than max_tokens already, of a run "
                        f"that was stopped: give a larger one, or delete {out_dir}")
    if room == 0:
        return False, {"left_out": {}, "noted": {}}
    if tokens:
        say(f"going on with {out_dir} after {tokens:,} tokens")
    total, size = texts.records.total_bytes, texts.records.text_bytes
    if size is not None and size < 2 * CHUNK:
        workers = 1
    elif workers is None:                            # without fork, only a guarded __main__ can have workers
        workers = launch.available_cores() if sys.platform == "linux" else 1
    for split in splits:
        if split.name in journal["torn"] and not split.tokens and tokens != room:      # each half has its end
            split.append(np.array([tokenizer.eos_id]))
            tokens += 1
    progress, complete, found = Progress(total, room), True, None
    wanted = itertools.islice(chunks(texts, tokenizer), journal["cursor"]["chunks"], None)
    try:
        with contextlib.closing(encoded(wanted, tokenizer, workers, out_dir)) as results:
            for (ids, lengths, changed), chunk in results:
                taken, found = journal["cursor"]["tokens"], chunk
                val = np.repeat(np.array([val for _, val, _ in chunk.parts], bool), lengths)[taken:]
                ids = ids[taken:]
                complete = room is None or len(ids) <= room - tokens
                if not complete:
                    ids, val = ids[:room - tokens], val[:room - tokens]
                full = [split.append(ids[val == which]) for which, split in enumerate(splits)]
                tokens += len(ids)
                journal["cursor"] = advance(journal["cursor"], chunk, changed) if complete else {
                    **journal["cursor"], "tokens": taken + len(ids)}
                progress.show(chunk.read, tokens)
                if any(full) or time.monotonic() - saved > 5:
                    save_journal(out_dir, journal, splits)
                    saved = time.monotonic()
                if not complete:
                    break
    except BrokenProcessPool:
        raise UserError(f"a worker process was killed, probably for want of memory: give the same command "
                        f"with less than --workers={workers}; what is done is kept in {out_dir}") from None
    finally:
        progress.clear()
    save_journal(out_dir, journal, splits)
    found = texts.records if complete else found
    noted = dict(found.noted)
    if changed := journal["cursor"]["changed"]:
        noted["changed by the tokenizer's normalisation"] = changed
    return complete, {"left_out": dict(found.left_out), "noted": noted}


def advance(cursor: dict, chunk: Chunk, changed: list[bool]) -> dict:
    """The cursor behind a chunk; it counts the documents that normalisation changed, in whatever part."""
    count, inside = cursor["changed"], cursor["inside"]
    for (_, _, ends), here in zip(chunk.parts, changed):
        inside |= here
        if ends:
            count, inside = count + inside, False
    return {"chunks": cursor["chunks"] + 1, "tokens": 0, "changed": count, "inside": inside}


def balance(train: Shards, val: Shards, tokenizer, val_fraction: float, say) -> list[str]:
    """
    The hash shares out whole documents, but there may be few, or one that outweighs the rest: a single book
    is either here or there. Where validation got less than half of its share or not one window, or training
    less than half of its own, the line is drawn by tokens: of training and then validation, the last ones
    are for validation, and the document on the line is cut in two. Returns the names of the splits that end
    inside a document because of it.
    """
    total = train.tokens + val.tokens
    documents, size = train.documents + val.documents, train.bytes + val.bytes
    share = round(val_fraction * total)
    least = max(share // 2, min(WINDOW, total // 20))
    if val_fraction == 0 or (val.tokens >= least and train.tokens >= (total - share) // 2):
        return []
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
    val.tokens, val.documents, val.bytes, val.full = tail.tokens, tail.documents, tail.bytes, tail.full
    train.documents, train.bytes = documents - val.documents, size - val.bytes
    return [split.name for split in (train, val)
            if split.tokens and next(split.blocks(split.tokens - 1, split.tokens))[0] != split.eos_id]


# ---- the tokenizer ----------------------------------------------------------------------------------------
def choose_tokenizer(tokenizer, texts: Texts, out_dir: str, journal: dict, say) -> Tokenizer:
    """The one that was asked for, or a BPE trained on the text, which is saved at once."""
    if journal["tokenizer"] and tokenizer == "auto":       # trained before the run was killed, or extended
        return load_tokenizer(out_dir)
    if tokenizer == "auto":
        tokenizer = trained_on(texts, None, say)
        tokenizer.save(out_dir)
    journal["tokenizer"] = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint,
                            "portable": tokenizer.portable}
    write_json(os.path.join(out_dir, UNFINISHED), journal)
    return tokenizer


def trained_on(texts: Texts, vocab_size: int | None, say) -> Tokenizer:
    """A BPE of BPE_SAMPLE bytes of the text; as large as the text allows where no size is given."""
    size, megabytes, streamed = texts.records.text_bytes, f"{BPE_SAMPLE / 1e6:.0f} MB", texts.records.streamed
    if size is None:                                 # objects in memory; a stream is taken to be long
        size = 2**26 if streamed else sum(len(text) for text, _ in texts)
    vocab_size = vocab_size or vocab_size_for(size)
    which = f" (its first {megabytes})" if streamed else \
        f" (evenly spaced parts of it, {megabytes})" if size > BPE_SAMPLE else ""
    say(f"training a BPE tokenizer with {vocab_size:,} entries on the text{which}")
    return train_bpe(sample(texts, None if streamed else size), vocab_size, say=say)


def sample(texts: Texts, size: int | None) -> Iterator[str]:
    """About BPE_SAMPLE of `size` bytes: one block of so many, over the whole length; a stream's first."""
    every, number, block, taken = -(-(size or 1) // BPE_SAMPLE), 0, 2**14, 0
    for text, _ in texts:
        for piece in [text] if isinstance(text, str) else text.pieces():
            for start in range(0, len(piece), block):
                if number % every == 0:
                    yield (drawn := piece[start:start + block])
                    taken += len(drawn)
                number += 1
                if size is None and taken >= BPE_SAMPLE:
                    return


def only_tokenizer(source: str, vocab_size: int, out_dir: str | None, options: dict) -> None:
    if out_dir is None:
        raise UserError("--train_tokenizer needs an --out_dir to write to")
    if taken := [name for name in ("tokenizer.json", "meta.json") if os.path.exists(f"{out_dir}/{name}")]:
        raise UserError(f"{out_dir} holds {taken[0]} already: choose another --out_dir")
    with spooled(out_dir, print) if source == "-" else contextlib.nullcontext((source, None)) as (file, _):
        texts = Texts(open_records(file, options), options)
        texts.refuse_none(source)
        tokenizer = trained_on(texts, vocab_size, print)
    with writing(out_dir):
        tokenizer.save(out_dir)
    print(f"{out_dir}: {tokenizer.vocab_size:,} entries; use it by --tokenizer={out_dir}")


# ---- the directory ----------------------------------------------------------------------------------------
NOTHING = {name: {"tokens": 0, "documents": 0, "bytes": 0, "full": []} for name in ("train", "val")}


def key_of(source, tokenizer, options: dict) -> str:
    """Changes when the result would: the input (files by path, size and time), the tokenizer, an option."""
    by = "auto" if tokenizer == "auto" else [tokenizer.fingerprint, tokenizer.eos_id]
    return digest([FORMAT, source, by, options])


def target(records: Records, tokenizer, options: dict) -> str:
    """data/<name>-<key>: where a corpus goes that was given no place."""
    name = re.sub(r"[^\w.-]+", "-", records.name)
    return os.path.join("data", f"{name}-{key_of(records.identity(), tokenizer, options)[:8]}")


def finished(out_dir: str, key: str, max_tokens: int | None = None) -> dict | None:
    """meta.json of a corpus that is there; UserError when it is another one, or more than was asked for."""
    path = os.path.join(out_dir, "meta.json")
    if not os.path.isfile(path):
        return None
    meta = read_json(path)
    if meta.get("key") != key:
        raise UserError(f"{out_dir} holds a corpus already, made from {meta.get('source')} (other input, "
                        f"tokenizer or options): choose another --out_dir, or delete it")
    if max_tokens is not None and meta["tokens"] > max_tokens:
        raise UserError(f"{out_dir} holds {meta['tokens']:,} tokens of this text already, more than "
                        f"max_tokens={max_tokens:,}: choose another --out_dir, or delete it")
    return meta


def reaches(meta: dict, max_tokens: int | None) -> bool:
    """Whether there is no more to prepare: all of the text, or as much as was asked for."""
    return meta["complete"] or (max_tokens is not None and meta["tokens"] >= max_tokens)


def open_journal(out_dir: str, key: str, source: str, meta: dict | None) -> dict:
    """What an earlier run of the same command finished; nothing, when there was none. `meta`: to extend."""
    path = os.path.join(out_dir, UNFINISHED)
    had = meta["tokens"] if meta else 0
    if os.path.isfile(path):
        journal = read_json(path)
        if journal.get("key") != key:
            raise UserError(f"{out_dir} holds an unfinished corpus, made from {journal.get('source')} (other "
                            f"input, tokenizer or options): choose another --out_dir, or delete it")
        if journal["had"] == had:                    # else of a run that was killed when it had finished
            return journal
    if not meta:
        ours = re.compile(r"(train|val)(-\d+)?\.bin|tokenizer(_config)?\.json")
        if found := [name for name in sorted(os.listdir(out_dir)) if ours.fullmatch(name)]:
            raise UserError(f"{out_dir} holds {', '.join(found[:5])}, which would be overwritten: choose "
                            f"another --out_dir")
    began = meta["cursor"] if meta else {"chunks": 0, "tokens": 0, "changed": 0, "inside": False}
    journal = {"key": key, "source": source, "tokenizer": meta and meta["tokenizer"], "had": had,
               "began": began, "cursor": began, "splits": NOTHING, "torn": meta["torn"] if meta else []}
    write_json(path, journal)
    return journal


def save_journal(out_dir: str, journal: dict, splits: list):
    journal.update(splits={split.name: split.sync() for split in splits})
    write_json(os.path.join(out_dir, UNFINISHED), journal)


def meta_of(made: dict, tokenizer: Tokenizer, splits: list, found: dict, before: dict | None = None) -> dict:
    """
    The content of meta.json: what it was `made` of, the splits, added to what was there `before`, and what
    was `found` on the way (counted from the beginning of the text).
    """
    meta = {"format": FORMAT, **made, "vocab_size": tokenizer.vocab_size, "eos_id": tokenizer.eos_id,
            "dtype": splits[0].dtype.name}
    old = before or {split.name: {"documents": 0, "tokens": 0, "bytes": 0, "shards": []} for split in splits}
    shards = [shard for split in splits for shard in old[split.name]["shards"]]
    segment = 1 + max((shard["segment"] for shard in shards), default=-1)
    for split in splits:
        was = old[split.name]
        meta[split.name] = {"documents": was["documents"] + split.documents,
                            "tokens": was["tokens"] + split.tokens, "bytes": was["bytes"] + split.bytes,
                            "shards": was["shards"] + split.describe(segment)}
    for number in ("documents", "tokens", "bytes"):
        meta[number] = sum(meta[split.name][number] for split in splits)
    return meta | found


def publish(out_dir: str, meta: dict):
    write_json(os.path.join(out_dir, "meta.json"), meta)
    for rest in (UNFINISHED, LOCK):
        with contextlib.suppress(OSError):           # Windows keeps a file that is open
            os.remove(os.path.join(out_dir, rest))


@contextlib.contextmanager
def spooled(out_dir: str, say):
    """A file with what comes from standard input, which is read more than once, and a hash of its content."""
    with writing(out_dir):
        path = spool_stdin(os.path.join(out_dir, f".stdin-{os.getpid()}"))
    try:
        with open(path, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        say(f"standard input: {os.path.getsize(path):,} bytes, read as {os.path.splitext(path)[1]}")
        yield path, content + os.path.splitext(path)[1]
    finally:
        os.remove(path)


# ---- parts, made on several machines ----------------------------------------------------------------------
def slice_of(part: str, tokenizer, options: dict, max_tokens: int | None) -> tuple[int, int]:
    """"3/16" -> (3, 16); UserError where the parts would not make the corpus of one machine."""
    number = re.fullmatch(r"(\d+)/(\d+)", part)
    k, n = (int(number[1]), int(number[2])) if number else (0, 0)
    if not 1 <= k <= n:
        raise UserError(f"--part={part} is no slice: 1/16 is the first of sixteen, 16/16 the last")
    asked = {"dedup": options["dedup"], "max_tokens": max_tokens, "max_documents": options["max_documents"]}
    if given := [f"--{key}" for key, value in asked.items() if value]:
        raise UserError(f"{' and '.join(given)} cannot go with --part: a slice does not know what the others "
                        f"hold")
    if tokenizer == "auto" or not tokenizer.portable:
        raise UserError("--part needs a --tokenizer that all slices share, a name or a path (python "
                        "prepare.py --train_tokenizer=8192 --data=... --out_dir=out/tokenizer makes one)")
    return k, n


def merge(out_dir: str, say: Callable[[str], object] = print) -> dict:
    """Makes the corpus out_dir of its parts, which are then deleted; returns the content of meta.json."""
    names = sorted(glob.glob("part-*-of-*", root_dir=out_dir))
    totals = {name[-5:] for name in names}
    if not names:
        if os.path.isfile(os.path.join(out_dir, "meta.json")):
            return read_json(os.path.join(out_dir, "meta.json"))
        raise UserError(f"{out_dir} holds no parts: python prepare.py --out_dir={out_dir} --part=1/16 ... "
                        f"makes the first of sixteen")
    if os.path.isfile(os.path.join(out_dir, "meta.json")):       # killed while it deleted the parts
        meta = read_json(os.path.join(out_dir, "meta.json"))
        theirs = [os.path.join(out_dir, name, "meta.json") for name in names]
        if any(read_json(path).get("key") != meta["key"] for path in theirs if os.path.isfile(path)):
            raise UserError(f"{out_dir} holds a corpus and parts of another one: delete what is not wanted")
        for name in names:
            shutil.rmtree(os.path.join(out_dir, name))
        return meta
    if len(totals) > 1:
        raise UserError(f"{out_dir} holds parts of several divisions ({', '.join(sorted(totals))}): delete "
                        f"the wrong ones")
    folders = [os.path.join(out_dir, f"part-{k + 1:05d}-of-{total}")
               for total in totals for k in range(int(total))]
    if missing := [folder for folder in folders if not os.path.isfile(os.path.join(folder, "meta.json"))]:
        raise UserError(f"{len(missing)} of {len(folders)} parts are missing or not finished: "
                        f"{', '.join(map(os.path.basename, missing[:5]))}")
    metas = [read_json(os.path.join(folder, "meta.json")) for folder in folders]
    if len({meta["key"] for meta in metas}) > 1:
        raise UserError(f"the parts in {out_dir} were not made from the same input with the same tokenizer "
                        f"and options: make them again")
    first, began = metas[0], time.monotonic()
    with writing(out_dir), exclusive(out_dir, say):
        if not (meta := finished(out_dir, first["key"])):
            for folder, meta in zip(folders, metas):
                check_shards(folder, meta)
            open_journal(out_dir, first["key"], first["source"], None)
            meta = join(folders, metas, out_dir, say)
            publish(out_dir, meta)
    for folder in folders:
        shutil.rmtree(folder)
    say(summary(out_dir, meta, None, time.monotonic() - began))
    return meta


def join(folders: list[str], metas: list[dict], out_dir: str, say) -> dict:
    tokenizer, options = load_tokenizer(folders[0]), metas[0]["options"]
    tokenizer.save(out_dir)
    train, val = (Shards(out_dir, name, tokenizer, options["shard_tokens"]) for name in ("train", "val"))
    for split in (train, val):
        split.shorten(0)                             # of a run that was killed here
        for folder in folders:
            stream = getattr(Source(folder), split.name)
            for start in range(0, len(stream), 2**22):
                split.append(stream.read(start, 2**22))
    if not train.tokens + val.tokens:
        raise UserError(f"none of the {len(folders)} parts in {out_dir} holds a document")
    balance(train, val, tokenizer, options["val_fraction"], say)
    found = {key: dict(sum((Counter(meta[key]) for meta in metas), Counter()))
             for key in ("left_out", "noted")}
    made = {key: metas[0][key] for key in ("key", "source", "options", "tokenizer")}
    found |= {"complete": True, "part": None, "cursor": None, "torn": []}
    return meta_of(made, tokenizer, [train, val], found)


# ---- a look inside ----------------------------------------------------------------------------------------
def inspect(path: str, say: Callable[[str], object] = print) -> dict:
    """Counts, extreme documents and some windows of a corpus; UserError where a shard is damaged."""
    source = Source(path)
    if source.eos_id is None:
        say(f"{path}: bare .bin files, which do not say what their ids mean: {len(source.train):,} tokens "
            f"for training, {len(source.val):,} for validation, ids below {source.vocab_size:,}")
        return {}
    meta, tokenizer = read_json(os.path.join(path, "meta.json")), source.tokenizer
    say(summary(path, meta, None, None))
    say(f"  all {check_shards(path, meta)} shards hold what was written (SHA-256)")
    if tokenizer is None:
        say("  its tokenizer is a Python object, so the ids are not decoded here")
        return meta
    for name in ("train", "val"):
        stream = getattr(source, name)
        for which, (length, start) in extremes(stream, source.eos_id).items():
            text = tokenizer.decode(stream.read(start, min(length, 40)).tolist())
            say(f"  {name}: the {which} document has {length:,} tokens: {text!r}{'...' * (length > 40)}")
        for k in range(min(3, len(stream) // 64)):
            start = k * (len(stream) - 64) // 2
            say(f"  {name}: tokens {start:,} to {start + 64:,}:\n{shown(stream.read(start, 64), tokenizer)}")
    return meta


def check_shards(path: str, meta: dict) -> int:
    """How many there are; UserError where they do not hold what was written."""
    damaged = [shard["file"] for name in ("train", "val") for shard in meta[name]["shards"]
               if describe_shard(os.path.join(path, shard["file"]), np.dtype(meta["dtype"]))["sha256"]
               != shard["sha256"]]
    shards = sum(len(meta[name]["shards"]) for name in ("train", "val"))
    if damaged:
        raise UserError(f"{len(damaged)} of {shards} shards of {path} do not hold what was written: "
                        f"{', '.join(damaged[:5])}; copy them again, or prepare the corpus again")
    return shards


def extremes(stream, eos_id: int) -> dict:
    """{"shortest": (tokens without its end, place), "longest": ...} of the documents of a stream."""
    shortest = longest = None
    begin, block = 0, 2**22
    for start in range(0, len(stream), block):
        for end in (start + np.flatnonzero(stream.read(start, block) == eos_id)).tolist():
            here, begin = (end - begin, begin), end + 1
            shortest = here if shortest is None or here[0] < shortest[0] else shortest
            longest = here if longest is None or here[0] > longest[0] else longest
    return {"shortest": shortest, "longest": longest} if shortest else {}


def shown(ids, tokenizer: Tokenizer) -> str:
    """Their text, indented, with the separators standing out from text that is spelled like them."""
    ends = np.flatnonzero(ids == tokenizer.eos_id)
    separator = f"\n======== {tokenizer.decode([tokenizer.eos_id])} ========\n"
    documents = [tokenizer.decode(ids[begin:end].tolist())
                 for begin, end in zip([0, *(ends + 1)], [*ends, len(ids)])]
    return "\n".join(f"    | {line}" for line in separator.join(documents).splitlines())


# ---- what to say ----------------------------------------------------------------------------------------
class Progress:
    """One line that is rewritten, on a terminal; nothing in a file or a pipe."""

    def __init__(self, total_bytes: int | None, room: int | None):
        self.ends = (total_bytes, room)              # what comes first ends it
        self.first, self.began, self.shown = None, 0.0, 0.0
        self.terminal = sys.stderr is not None and sys.stderr.isatty()

    def show(self, *at):
        """at: bytes read, tokens written"""
        now = time.monotonic()
        if self.first is None:                       # a resumed run has read on to here in no time
            self.first, self.began = at, now
        elif self.terminal and now - self.shown > 0.2 and now - self.began > 0.5:
            seconds = now - self.began
            gone = [number - first for number, first in zip(at, self.first)]
            line = f"{gone[0] / seconds / 1e6:.1f} MB/s | {at[1]:,} tokens"
            known = [(number / end, (end - number) * seconds / max(1, since))
                     for number, since, end in zip(at, gone, self.ends) if end]
            if known:
                minutes, left = divmod(int(min(rest for _, rest in known)), 60)
                line = f"{max(share for share, _ in known):4.0%} | {line} | ETA {minutes}:{left:02d}"
            print(f"\r{line}\033[K", end="", file=sys.stderr, flush=True)
            self.shown = now

    def clear(self):
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def tally(records: Records | None, counts: dict) -> str:
    example = records.example if records else {}
    return ", ".join(f"{count:,} x {reason}" + (f" (first: {example[reason]})" if reason in example else "")
                     for reason, count in sorted(counts.items()))


def summary(out_dir: str, meta: dict, records: Records | None, seconds: float | None) -> str:
    per_token = meta["bytes"] / max(1, meta["tokens"] - meta["documents"])
    lines = [f"{out_dir}: {meta['documents']:,} documents, {meta['bytes']:,} bytes, {meta['tokens']:,} "
             f"tokens ({per_token:.2f} bytes per token, vocabulary {meta['vocab_size']:,})"
             + (f", {seconds:.1f} s" if seconds is not None else "")]
    for name in ("train", "val"):
        split = meta[name]
        lines.append(f"  {name:5}  {split['tokens']:,} tokens, {split['documents']:,} documents, "
                     f"{len(split['shards'])} files")
    if not meta["complete"]:
        inside = ", inside a document" if meta["cursor"]["tokens"] else ""
        lines.append(f"  stopped at {meta['tokens']:,} tokens{inside}: the text goes on, and a larger "
                     f"max_tokens extends the corpus")
    for what, counts in (("left out", meta["left_out"]), ("noted", meta["noted"])):
        if counts:
            lines.append(f"  {what}: {tally(records, counts)}")
    return "\n".join(lines)


# ---- for the training scripts -----------------------------------------------------------------------------
def ensure(data: str, tokenizer="auto", rank: int = 0, world: int = 1, say: Callable[[str], object] = print,
           tokens: int | None = None, **options) -> str:
    """
    `data` with every raw part ("stdlib", files, a data set id) replaced by its corpus in data/<name>-<key>,
    which is prepared when it is missing: by rank 0, while the others wait. Every rank calls this, before
    the process group exists (preparing may take longer than its timeout). Of a data set that is streamed,
    as much as gives the run `tokens` training tokens (None: all of it), which a later call may extend; files
    are prepared whole. `options` are prepare()'s.
    """
    say = say if rank == 0 else lambda text: None
    mix, named = [], mix_of(data)
    if tokenizer == "auto" and len(named) > 1:       # all parts need the same one
        made = [path for path, _ in named if os.path.isfile(os.path.join(path, "tokenizer.json"))]
        if not made:
            raise UserError(f"the texts of a mix need one tokenizer for all of them: give --tokenizer=<name "
                            f"or path> (python prepare.py --train_tokenizer=8192 --data={named[0][0]} "
                            f"--out_dir=out/tokenizer makes one)")
        tokenizer = made[0] if len(made) < len(named) else tokenizer
    for path, weight in named:
        share = tokens and math.ceil(tokens * min(1, weight + 1 / BLOCK))     # weights are rounded by so much
        mix.append((corpus_of(path, tokenizer, rank, world, say, share, options), weight))
    return mix[0][0] if len(mix) == 1 else ",".join(f"{path}:{weight!r}" for path, weight in mix)


def corpus_of(path: str, tokenizer, rank: int, world: int, say, tokens: int | None, options: dict) -> str:
    if any(os.path.isfile(os.path.join(path, name)) for name in ("meta.json", "train.bin")):
        if tokenizer not in (None, "auto") and os.path.isfile(os.path.join(path, "tokenizer.json")):
            theirs = load_tokenizer(path)
            if not load_tokenizer(tokenizer).contains(theirs):
                raise UserError(f"{path} was prepared with another tokenizer ({theirs.vocab_size:,} "
                                f"entries) than {tokenizer}: prepare the text again with that one")
        return path
    if os.path.isfile(os.path.join(path, UNFINISHED)) or glob.glob("part-*-of-*", root_dir=path):
        raise UserError(f"{path} is not finished: give the prepare.py command that began it once more (or "
                        f"--merge, when its parts are all there)")
    if path == "-":
        raise UserError("standard input is read by prepare.py only: python prepare.py --data=- "
                        "--out_dir=data/mine, then --data=data/mine here")
    if made := [part for part in path.split(",") if os.path.isfile(os.path.join(part, "meta.json"))]:
        raise UserError(f"{made[0]} is a prepared corpus: write a mix with weights, like "
                        f"{made[0]}:0.7,other:0.3")
    options = with_defaults(options)
    records = open_records(path, options)
    if tokenizer is None:
        raise UserError(f"{path} is raw text, and the model that it is for has no tokenizer: give "
                        f"--tokenizer=<its name or path>")
    tokenizer = tokenizer if tokenizer == "auto" else load_tokenizer(tokenizer)
    out_dir = target(records, tokenizer, options)
    tokens = tokens if records.streamed else None

    def enough() -> bool:
        path = os.path.join(out_dir, "meta.json")
        meta = read_json(path) if os.path.isfile(path) else None
        return bool(meta) and (meta["complete"] or (tokens is not None and meta["train"]["tokens"] >= tokens))

    if enough():
        say(f"{path} was prepared before: {out_dir}")
    elif rank == 0:
        say(f"{path} is raw text: preparing it in {out_dir}")
        note = announced(out_dir + ".note.json") if world > 1 else contextlib.nullcontext()
        with writing(os.path.dirname(out_dir)), note:
            limit = tokens and math.ceil(tokens / (1 - options["val_fraction"])) + WINDOW
            while not enough():                      # once more, where validation got more than its share
                meta = prepare(path, out_dir, tokenizer, max_tokens=limit, say=say, **options)
                limit = limit and meta["tokens"] + max(tokens - meta["train"]["tokens"], tokens // 100)
    else:
        wait_for(out_dir, out_dir + ".note.json", enough)
    return out_dir


if __name__ == "__main__":
    config.run(main, Config)
