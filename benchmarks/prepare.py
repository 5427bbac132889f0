"""
Text to token ids, and learning a vocabulary: prepare.py beside a tiktoken loop, a pool of them, and nanoGPT's
`datasets.map`; train_bpe beside Hugging Face's trainer. The ids and the merges must be equal.
"""
import glob
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
import tiktoken

from benchmarks.race import Contestant, run_race
from config import UserError
from patterns import OWN_PATTERN, PATTERNS
from tokenizer import END, load_tokenizer, train_bpe

BPE_BYTES, BPE_MERGES = 3_700_000, 4096        # what a vocabulary is learned from, and how large


def races(cfg, folder: str) -> list[dict]:
    text = os.path.join(folder, "text.jsonl")
    documents, size = write_jsonl(text, documents_of(cfg))
    vocabulary, entries = choose_vocabulary(cfg.tokenizer, text, folder)
    encoders = [
        Contestant(f"prepare.py, {cfg.workers} workers", ours_prepare),
        Contestant("a tiktoken loop", tiktoken_loop),
        Contestant(f"the same in a pool of {cfg.workers}", tiktoken_pool),
        Contestant(f"nanoGPT's way: datasets.map with {cfg.workers}", datasets_map, ("datasets",)),
    ]
    learners = [
        Contestant("train_bpe, one thread", ours_bpe),
        Contestant(f"Hugging Face's BpeTrainer, {cfg.workers} threads", hugging_face_bpe, ("tokenizers",)),
    ]
    megabytes, sample = size / 1e6, min(size, BPE_BYTES) / 1e6
    return [
        run_race(f"{megabytes:,.1f} MB of text in {documents:,} documents to token ids on disk, {entries}",
                 encoders, cfg, folder, megabytes, "MB/s",
                 text=text, vocabulary=vocabulary, workers=cfg.workers),
        run_race(f"learning {BPE_MERGES:,} merges from {sample:.1f} MB",
                 learners, cfg, folder, sample, "MB/s", text=text, workers=cfg.workers)]


def documents_of(cfg) -> Iterator[str]:
    """The documents: of --data, or the sources of the standard library, up to half, then prose."""
    from data import read_records              # imports torch, too
    limit = cfg.megabytes * 1e6 if cfg.data is None else float("inf")
    texts = (record.get(cfg.text_key) for record in read_records(cfg.data or "stdlib"))
    texts = (text for text in texts if isinstance(text, str) and text.strip() and "\0" not in text)
    if cfg.data is None:
        texts = itertools.chain(up_to(limit / 2, texts), prose())
    return up_to(limit, texts)


def up_to(limit: float, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        if limit <= 0:
            return
        yield text
        limit -= len(text.encode(errors="replace"))


def prose() -> Iterator[str]:
    """Documents without end: each word is one that follows the word before it in the Python reference."""
    from pydoc_data.topics import topics
    words, follow, draw = " ".join(topics.values()).split(), defaultdict(list), random.Random(1).random
    for word, after in zip(words, words[1:] + words[:1]):
        follow[word].append(after)
    word = words[0]
    while True:
        paragraphs = []
        for _ in range(1 + int(draw() * 12)):
            paragraph = []
            for _ in range(20 + int(draw() * 80)):
                choices = follow[word]
                word = choices[int(draw() * len(choices))]
                paragraph.append(word)
            paragraphs.append(" ".join(paragraph))
        yield "\n\n".join(paragraphs) + "\n"


def write_jsonl(path: str, texts: Iterable[str]) -> tuple[int, int]:
    """As jsonl. (documents, their bytes)"""
    documents = size = 0
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for text in texts:
            try:
                size += len(text.encode())
            except UnicodeEncodeError:         # half a surrogate pair: no tokenizer takes it
                continue
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            documents += 1
    if not documents:
        raise UserError("there is no text to measure with: check --data and --text_key")
    return documents, size


def texts_of(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8", newline="\n") as file:
        for line in file:
            yield json.loads(line)["text"]


def choose_vocabulary(wanted: str, text: str, folder: str) -> tuple[str, str]:
    """(what load_tokenizer takes, what to call it)"""
    try:
        tokenizer = load_tokenizer("gpt2" if wanted == "auto" else wanted)
        source = "gpt2" if wanted == "auto" else os.path.abspath(wanted) if os.path.exists(wanted) else wanted
    except UserError:
        if wanted != "auto":
            raise
        source = os.path.join(folder, "vocabulary")
        tokenizer = train_bpe(up_to(8e6, texts_of(text)), 16384, say=lambda text: None)
        tokenizer.save(source)
    return source, f"{tokenizer.name} ({tokenizer.vocab_size:,} entries)"


def encoding_of(vocabulary: str) -> tuple[tiktoken.Encoding, int, type]:
    """For the peers: tiktoken's encoding, the id that ends a text, the type that ids fit in."""
    if vocabulary in tiktoken.list_encoding_names():
        encoding = tiktoken.get_encoding(vocabulary)
        end = encoding.eot_token
    else:
        ours = load_tokenizer(vocabulary)
        encoding = tiktoken.Encoding("ours", pat_str=PATTERNS[ours.pattern].regex, mergeable_ranks=ours.ranks,
                                     special_tokens=ours.special)
        end = ours.eos_id
    return encoding, end, np.uint16 if encoding.n_vocab <= 2**16 else np.uint32


def digest_of(*files: str) -> str:
    hashed = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            while block := file.read(2**20):
                hashed.update(block)
    return hashed.hexdigest()


def ours_prepare(clock, out: str, text: str, vocabulary: str, workers: int) -> str:
    from prepare import prepare
    tokenizer = load_tokenizer(vocabulary)
    with clock:
        prepare(text, out, tokenizer, val_fraction=0, workers=workers)
    return digest_of(*sorted(glob.glob(os.path.join(out, "train-*.bin"))))


def tiktoken_loop(clock, out: str, text: str, vocabulary: str, workers: int) -> str:
    encoding, end, dtype = encoding_of(vocabulary)
    with clock, open(os.path.join(out, "ids.bin"), "wb") as file:
        for document in texts_of(text):
            ids = encoding.encode_ordinary(document)
            ids.append(end)
            np.array(ids, dtype).tofile(file)
    return digest_of(file.name)


def tiktoken_pool(clock, out: str, text: str, vocabulary: str, workers: int) -> str:
    method = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    known = encoding_of(vocabulary)
    with clock, open(text, encoding="utf-8", newline="\n") as lines:
        with open(os.path.join(out, "ids.bin"), "wb") as file, method.Pool(workers, adopt, known) as pool:
            for ids in pool.imap(encode_line, lines, chunksize=32):
                file.write(ids)
            pool.close()
            pool.join()                        # only a worker that has ended tells its memory
    return digest_of(file.name)


def adopt(*known) -> None:
    """Runs first in each worker of the pool."""
    global adopted
    adopted = known


def encode_line(line: str) -> bytes:
    encoding, end, dtype = adopted
    return np.array([*encoding.encode_ordinary(json.loads(line)["text"]), end], dtype).tobytes()


def datasets_map(clock, out: str, text: str, vocabulary: str, workers: int) -> str:
    """What nanoGPT's data/openwebtext/prepare.py does, once the data set is there."""
    import datasets
    datasets.disable_progress_bars()
    encoding, end, dtype = encoding_of(vocabulary)
    data = datasets.load_dataset("json", data_files=text, split="train", cache_dir=out)

    def tokenize(example):
        ids = encoding.encode_ordinary(example["text"]) + [end]
        return {"ids": ids, "len": len(ids)}

    path = os.path.join(out, "ids.bin")
    with clock:
        data = data.map(tokenize, remove_columns=["text"], num_proc=workers)
        ids = np.memmap(path, dtype, "w+", shape=(int(np.sum(data["len"])),))
        pieces, start = min(1024, len(data)), 0
        for index in range(pieces):
            piece = data.shard(pieces, index, contiguous=True).with_format("numpy")
            piece = np.concatenate(piece["ids"])
            ids[start:start + len(piece)] = piece
            start += len(piece)
        ids.flush()
    return digest_of(path)


def ours_bpe(clock, out: str, text: str, workers: int) -> str:
    texts = list(up_to(BPE_BYTES, texts_of(text)))
    with clock:
        tokenizer = train_bpe(texts, 256 + 1 + BPE_MERGES)
    tokenizer.save(out)
    with open(os.path.join(out, "tokenizer.json"), encoding="utf-8") as file:
        return merges_of(file.read())


def hugging_face_bpe(clock, out: str, text: str, workers: int) -> str:
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    import tokenizers
    texts = list(up_to(BPE_BYTES, texts_of(text)))
    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    spec = json.dumps({**empty, "pre_tokenizer": PATTERNS[OWN_PATTERN].pre_tokenizer})
    tokenizer = tokenizers.Tokenizer.from_str(spec)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + 1 + BPE_MERGES, special_tokens=[END], min_frequency=2, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    with clock:
        tokenizer.train_from_iterator(texts, trainer)
    return merges_of(tokenizer.to_str())


def merges_of(tokenizer_json: str) -> str:
    """The number of merges and a digest of them; older files spell a pair as one text."""
    merges = [m if isinstance(m, str) else " ".join(m) for m in json.loads(tokenizer_json)["model"]["merges"]]
    return f"{len(merges)} {hashlib.sha256(json.dumps(merges).encode()).hexdigest()}"
