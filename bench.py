"""
Ours against the programs that people use: the same work, on this machine, in one run.

    python bench.py prepare                                  text to token ids; learning a vocabulary
    python bench.py prepare --data=stories.jsonl --workers=8 --rounds=5
    python bench.py prepare --megabytes=1000 --rounds=1 --no-peers      how much memory 1 GB takes
    python bench.py prepare --json > numbers.json

Every contestant runs in a process of its own, in turns (A B C A B C ...). Imports and loading a vocabulary
or a model are not timed. A ratio is taken within a round, since whatever else the machine does slows a whole
round down; the median over the rounds is printed, and the smallest and the largest.

The results must be equal (the ids, the merges); where they are not, the table says so and the exit code is
1. A peer that is not installed, or that fails, is named and left out.
"""
import glob
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import tiktoken

import config
from config import HERE, UserError
from patterns import OWN_PATTERN, PATTERNS
from tokenizer import END, load_tokenizer, train_bpe

BPE_BYTES, BPE_MERGES = 3_700_000, 4096        # what a vocabulary is learned from, and how large


@dataclass
class Config:
    command: Literal["prepare"] = "prepare"    # what to measure
    rounds: int = 3                            # each contestant runs once in each
    peers: bool = True                         # --no-peers: ours alone
    json: bool = False                         # print the numbers as JSON instead of tables
    # prepare
    data: str | None = None                    # text as prepare.py reads it; None = made, alike every time
    text_key: str = "text"                     # of the records in data
    megabytes: float = 40                      # size of the text that is made
    tokenizer: str = "auto"                    # auto = GPT-2's, or a BPE trained on the text without network
    workers: int = 2                           # processes that encode


def main(cfg: Config) -> dict:
    verbs = {"prepare": prepare}               # a word of Config.command: (cfg, folder) -> races
    found = {"command": cfg.command, "machine": machine()}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        found["races"] = verbs[cfg.command](cfg, folder)
    print(json.dumps(found, indent=1) if cfg.json else show(found))
    if not all(row["equal"] for race in found["races"] for row in race["rows"]):
        raise SystemExit(1)
    return found


# ---- races ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Contestant:
    name: str                                  # as the table calls it
    run: Callable                              # (clock, out, **arguments) -> what must be equal to ours
    needs: tuple[str, ...] = ()                # packages


def run_race(title: str, contestants: list[Contestant], cfg: Config, folder: str, amount: float, unit: str,
         **arguments) -> dict:
    """Runs all in turns, the first is ours. `amount`: of the work, so that amount / seconds is in `unit`."""
    left_out, runs = {}, {}
    for one in contestants[:None if cfg.peers else 1]:
        absent = [package for package in one.needs if importlib.util.find_spec(package) is None]
        if absent:
            left_out[one.name] = f"pip install {' '.join(absent)}"
        else:
            runs[one] = []
    for number in range(1, cfg.rounds + 1):
        for one in list(runs):
            try:
                runs[one].append(alone(one, folder, arguments))
                print(f"round {number} of {cfg.rounds}: {one.name} {runs[one][-1]['seconds']:.2f} s",
                      file=sys.stderr, flush=True)
            except UserError as error:
                if one is contestants[0]:
                    raise
                left_out[one.name] = str(error)
                del runs[one]
    return {"title": title, "unit": unit, "left_out": left_out,
            "rows": [compare(one.name, mine, runs[contestants[0]], amount) for one, mine in runs.items()]}


def compare(name: str, runs: list[dict], ours: list[dict], amount: float) -> dict:
    """A row of the table. `ratio`: how many times as fast ours is."""
    ratios = [run["seconds"] / our["seconds"] for run, our in zip(runs, ours)]
    return {"name": name, "rate": statistics.median(amount / run["seconds"] for run in runs),
            "ratio": statistics.median(ratios), "ratios": ratios, "seconds": [run["seconds"] for run in runs],
            "cpu_seconds": statistics.median(run["cpu_seconds"] for run in runs),
            "peak_memory": max(run["peak_memory"] for run in runs),
            "peak_memory_of_a_worker": max(run["peak_memory_of_a_worker"] for run in runs),
            "equal": all(run["result"] == ours[0]["result"] for run in runs)}


def alone(one: Contestant, folder: str, arguments: dict) -> dict:
    """One run in a fresh process; what it writes goes with it."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        home = "bench" if one.run.__module__ == "__main__" else one.run.__module__
        program = (f"import sys; sys.path[:] = {[HERE, *sys.path]!r}; import bench, {home}; "
                   f"bench.perform({home}.{one.run.__name__}, {place!r}, **{arguments!r})")
        child = subprocess.run([sys.executable, "-c", program], cwd=place, capture_output=True,
                               encoding="utf-8", errors="replace")
        if child.returncode:
            last = (child.stderr.strip() or f"exit code {child.returncode}").splitlines()[-1]
            raise UserError(f"{one.name} failed: {last}")
        with open(os.path.join(place, "measured.json"), encoding="utf-8") as file:
            return json.load(file)


def perform(run: Callable, place: str, **arguments) -> None:
    """In the fresh process: runs it, and writes what it took to measured.json."""
    out, clock = os.path.join(place, "out"), Clock()
    os.mkdir(out)
    result = run(clock, out, **arguments)
    assert clock.seconds, f"{run.__name__} did not start the clock"
    peak, of_a_worker = peak_memory()
    with open(os.path.join(place, "measured.json"), "w", encoding="utf-8", newline="\n") as file:
        json.dump({"seconds": clock.seconds, "cpu_seconds": clock.cpu_seconds, "peak_memory": peak,
                   "peak_memory_of_a_worker": of_a_worker, "result": result}, file)


class Clock:
    """`with clock:` stands around the work that is timed. `cpu_seconds`: of its workers, too."""
    seconds = cpu_seconds = 0.0

    def __enter__(self):
        self.began, self.had = time.perf_counter(), sum(os.times()[:4])

    def __exit__(self, *error):
        self.seconds += time.perf_counter() - self.began
        if sys.platform != "win32":            # which does not tell those of the workers
            self.cpu_seconds += sum(os.times()[:4]) - self.had


def peak_memory() -> tuple[int, int]:
    """Bytes: of this process, and of the largest that it started and that has ended; 0 where not known."""
    try:
        import resource                        # not on Windows
    except ImportError:
        return 0, 0
    unit = 1 if sys.platform == "darwin" else 1024
    mine, workers = (resource.getrusage(who).ru_maxrss * unit
                     for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    if os.path.exists("/proc/self/status"):    # Linux counts in what the parent held when it started us
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            mine = next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM")), mine)
    return mine, workers


# ---- what to say ------------------------------------------------------------------------------------------
def machine() -> dict:
    import launch                              # imports torch, which would count in every contestant's memory
    versions = {}
    for package in ("torch", "numpy", "tiktoken", "tokenizers", "datasets"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return {"cpu": cpu_model(), "cores": launch.available_cores(), "system": platform.platform(),
            "python": platform.python_version(), "lignite": config.__version__, "versions": versions,
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None}


def cpu_model() -> str:
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, encoding="utf-8").stdout.strip()
    return platform.processor() or platform.machine()


def show(found: dict) -> str:
    facts = found["machine"]
    load = "" if facts["load"] is None else f", load at the start {facts['load']:.1f}"
    versions = "".join(f", {name} {version}" for name, version in facts["versions"].items())
    lines = [f"{facts['cpu']}, {facts['cores']} cores{load}", f"Python {facts['python']}{versions}"]
    for race in found["races"]:
        width = max(len(name) for name in [*(row["name"] for row in race["rows"]), *race["left_out"]])
        lines += ["", race["title"],
                  f"{'':{width}}  {race['unit']:>8}  ours / its (smallest to largest)  CPU sec  peak memory"]
        for row in race["rows"]:
            low, high, ours = min(row["ratios"]), max(row["ratios"]), row is race["rows"][0]
            ratio = "" if ours else f"{row['ratio']:10.2f}  ({low:.2f} to {high:.2f})"
            memory = f"{row['peak_memory'] / 1e6:,.0f} MB" if row["peak_memory"] else "not known"
            if row["peak_memory_of_a_worker"]:
                memory += f", a worker {row['peak_memory_of_a_worker'] / 1e6:,.0f} MB"
            cpu = f"{row['cpu_seconds']:.1f}" if row["cpu_seconds"] else ""
            lines.append(f"{row['name']:{width}}  {row['rate']:8.2f}  {ratio:32}  {cpu:>7}  {memory}"
                         f"{'' if row['equal'] else ', ITS RESULT IS NOT OURS'}")
        lines += [f"{name:{width}}  left out: {reason}" for name, reason in race["left_out"].items()]
    return "\n".join(lines)


# ---- prepare ----------------------------------------------------------------------------------------------
def prepare(cfg: Config, folder: str) -> list[dict]:
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


def documents_of(cfg: Config) -> Iterator[str]:
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


if __name__ == "__main__":
    config.run(main, Config)
