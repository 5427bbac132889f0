"""prepare.py: the shards hold exactly the accepted documents, however often it is killed."""
import errno
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import config
import data
import files
import prepare as module
from config import UserError
from prepare import ensure, prepare
from tokenizer import load_tokenizer

REPO = Path(module.__file__).parent
WORDS = "the sea was calm and old stones lay under grey water while nobody spoke of home".split()


def story(seed, words=200):
    pick = random.Random(seed)
    return " ".join(pick.choice(WORDS) for _ in range(words)) + f" {seed}.\n"


def write_jsonl(path, texts):
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return str(path)


def quiet(text):
    pass


def ids_of(out_dir, split):
    meta = data.read_json(f"{out_dir}/meta.json")
    parts = [np.fromfile(f"{out_dir}/{shard['file']}", meta["dtype"]) for shard in meta[split]["shards"]]
    return np.concatenate([np.zeros(0, meta["dtype"]), *parts])


def texts_of(out_dir, splits=("train", "val")):
    """The documents of the shards: what lies between two end-of-text ids. The last one must have its own."""
    ids = np.concatenate([ids_of(out_dir, split) for split in splits])
    tokenizer = load_tokenizer(str(out_dir))
    ends = np.flatnonzero(ids == tokenizer.eos_id)
    assert len(ids) == 0 or ends[-1] == len(ids) - 1
    return [tokenizer.decode(part[:-1]) for part in np.split(ids, ends + 1)[:-1]]


def contents(out_dir):
    return {path.name: path.read_bytes() for path in Path(out_dir).iterdir() if path.name != ".lock"}


# ---- documents in, shards out -----------------------------------------------------------------------------
@pytest.mark.parametrize("tokenizer", ["byte", "auto"])
def test_the_shards_decode_to_exactly_the_documents(tokenizer):
    texts = ["Zwölf Boxkämpfer 🥊\r\n\t", "text that spells <|endoftext|> stays text", "\ufeffx"]
    texts += [story(i) for i in range(60)]
    source = write_jsonl("in.jsonl", texts)
    meta = prepare(source, "out", tokenizer, val_fraction=0.2, shard_tokens=1000, say=quiet)
    assert sorted(texts_of("out")) == sorted(texts)
    assert meta["documents"] == len(texts) == meta["train"]["documents"] + meta["val"]["documents"]
    assert meta["bytes"] == sum(len(text.encode()) for text in texts)
    assert meta["tokens"] == len(ids_of("out", "train")) + len(ids_of("out", "val"))
    assert len(meta["train"]["shards"]) > 2 and len(texts_of("out", ["val"])) > 3
    assert {shard["tokens"] for shard in meta["train"]["shards"][:-1]} == {1000}
    assert meta == data.read_json("out/meta.json")
    assert not os.path.exists("out/unfinished.json")
    corpus = data.open_corpus("out", 16)          # the reader checks sizes, ids and the tokenizer
    assert corpus.tokenizer.fingerprint == meta["tokenizer"]["fingerprint"]


def test_training_keeps_the_order_of_the_input():
    texts = [story(i) for i in range(40)]
    prepare(write_jsonl("in.jsonl", texts), "out", "byte", val_fraction=0, say=quiet)
    assert texts_of("out", ["train"]) == texts and data.open_corpus("out", 16).val_tokens == 0


def test_a_long_document_is_cut_for_the_workers_and_has_one_end(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2**16)
    text = story(0, 60_000)
    Path("book.txt").write_text(text, encoding="utf-8", newline="")
    prepare("book.txt", "out", "byte", say=quiet)
    assert texts_of("out") == [text]
    assert list(ids_of("out", "train")) + list(ids_of("out", "val")) == [*text.encode(), 256]


def test_any_number_of_workers_makes_the_same_bytes(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 5000)
    source = write_jsonl("in.jsonl", [story(i) for i in range(100)])
    for workers in (1, 2, 3):
        prepare(source, f"out{workers}", val_fraction=0.1, workers=workers, shard_tokens=3000, say=quiet)
    assert contents("out1") == contents("out2") == contents("out3")


def test_workers_start_without_fork(monkeypatch):
    """As on Windows and macOS, where a worker begins as a fresh interpreter."""
    import multiprocessing
    monkeypatch.setattr(module, "CHUNK", 5000)
    spawn = multiprocessing.get_context("spawn")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: spawn)
    source = write_jsonl("in.jsonl", [story(i) for i in range(30)])
    for workers in (1, 2):
        prepare(source, f"out{workers}", "byte", workers=workers, say=quiet)
    assert contents("out1") == contents("out2")


def test_a_separator_makes_documents_of_a_text_file():
    Path("in.txt").write_text("one\n###\ntwo\n###\n", encoding="utf-8", newline="")
    flags = ["--data=in.txt", "--out_dir=out", "--tokenizer=byte", "--val_fraction=0"]
    module.main(config.load(module.Config, [*flags, r"--document_separator=\n###\n"]))
    assert texts_of("out") == ["one", "two"]


def test_what_is_no_text_is_left_out_counted_and_reported():
    Path("in").mkdir()
    files = {"a.txt": b"\xef\xbb\xbfwith a mark", "b.txt": b"\xff\xfenot UTF-8", "c.txt": b"",
             "d.txt": b" \n\t", "e.md": b"nul\0", "f.txt": b"dos\r\nlines\r\n", "g.bin": b"?",
             "h.jsonl": b'{"text": 5}\n{"body": "x"}\n{"text": "\\ud800"}\n{"text"'}
    for name, content in files.items():
        (Path("in") / name).write_bytes(content)
    said = []
    meta = prepare("in", "out", "byte", val_fraction=0, say=said.append)
    assert texts_of("out") == ["with a mark", "dos\r\nlines\r\n"]
    assert meta["left_out"] == {"not UTF-8": 1, "empty document": 2, "NUL characters (not a text)": 1,
                                "'text' is not a text": 1, "without the key 'text'": 1,
                                "half a surrogate pair": 1, "broken JSON line": 1,
                                "file of another format (.bin)": 1}
    assert meta["noted"] == {"byte order mark (removed)": 1, "CRLF line ends (kept)": 1}
    for reported in ("2 documents", "2 x empty document (first: in/c.txt)", "h.jsonl line 2 has body",
                     "1 x CRLF line ends (kept)"):
        assert reported in said[-1].replace(os.sep, "/")


def test_no_document_at_all_is_an_error_that_says_what_was_found():
    Path("in").mkdir()
    Path("in/x.png").write_bytes(b"?")
    write_jsonl("in/x.jsonl", ["", "\n"])
    with pytest.raises(UserError, match=r"in holds no document .*: 2 x empty document .*, 1 x .*\(.png\)"):
        prepare("in", "out", "byte", say=quiet)
    assert not os.path.exists("out")
    with pytest.raises(UserError, match="no document to train on: 2 x without the key 'body' .* has text"):
        prepare("in/x.jsonl", "out", "byte", text_key="body", say=quiet)


# ---- the split --------------------------------------------------------------------------------------------
def test_a_document_stays_in_its_split_when_others_come_and_go():
    texts = [story(i) for i in range(200)]
    first = prepare(write_jsonl("a.jsonl", texts), "a", "byte", val_fraction=0.2, say=quiet)
    random.Random(0).shuffle(texts)
    others = texts[:150] + [story(i) for i in range(200, 230)]
    prepare(write_jsonl("b.jsonl", others), "b", "byte", val_fraction=0.2, say=quiet)
    a, b = (set(texts_of(out, ["val"])) for out in "ab")
    assert 20 < first["val"]["documents"] < 60
    assert a & set(texts[:150]) == b & set(texts[:150])


@pytest.mark.parametrize("val_fraction", [0.01, 0.3, 0.5, 0.6, 0.9])
def test_whatever_the_fraction_both_splits_get_some_of_a_book(val_fraction):
    Path("book.txt").write_text(story(0, 5000), encoding="utf-8", newline="")
    meta = prepare("book.txt", "out", "byte", val_fraction=val_fraction, say=quiet)
    assert meta["val"]["tokens"] == max(round(val_fraction * meta["tokens"]), min(1025, meta["tokens"] // 20))
    assert meta["train"]["tokens"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_one_book_is_split_by_its_tokens_and_says_so(seed):
    text, said = story(seed, 10_000), []
    Path("shakespeare.txt").write_text(text, encoding="utf-8", newline="")
    meta = prepare("shakespeare.txt", "out", "byte", val_fraction=0.1, say=said.append)
    assert meta["val"]["tokens"] == round(0.1 * meta["tokens"]) and meta["train"]["documents"] == 0
    assert texts_of("out") == [text] and meta["val"]["documents"] == 1
    assert any("the validation split" in line for line in said)
    assert meta == prepare("shakespeare.txt", "out", "byte", val_fraction=0.1, say=quiet)
    corpus = data.open_corpus("out", 256)
    corpus.check(10, 1)


@pytest.mark.parametrize("val_fraction", [1e-9, 1 - 1e-9])     # the hash gives everything to one side
def test_the_splits_are_balanced_across_shards(val_fraction, monkeypatch):
    texts = [story(i, 50) for i in range(100)]
    monkeypatch.setattr(module.Texts, "__init__", texts_with(val_fraction))
    source = write_jsonl("in.jsonl", texts)
    meta = prepare(source, "out", "byte", val_fraction=0.3, shard_tokens=1500, say=quiet)
    assert texts_of("out") == texts
    assert meta["val"]["tokens"] == round(0.3 * meta["tokens"])
    assert meta["documents"] == meta["train"]["documents"] + meta["val"]["documents"] == 100
    for split in ("train", "val"):
        assert meta[split]["documents"] == (ids_of("out", split) == 256).sum()
        assert {shard["tokens"] for shard in meta[split]["shards"][:-1]} == {1500}
    assert not list(Path("out").glob("tail*"))
    data.open_corpus("out", 16)


def texts_with(val_fraction):
    def init(self, records, options):
        self.records, self.options = records, {**options, "val_fraction": val_fraction}
    return init


# ---- the tokenizer ----------------------------------------------------------------------------------------
def test_the_vocabulary_grows_with_the_text():
    sizes = {0: 512, 1_100_000: 512, 2**21: 1024, 11_000_000: 4096, 64 * 2**20: 32768, 10**12: 32768}
    assert {size: module.vocab_size_for(size) for size in sizes} == sizes


def test_the_tokenizer_is_trained_on_an_even_part_of_a_long_text(monkeypatch):
    monkeypatch.setattr(module, "BPE_SAMPLE", 100_000)
    texts = [story(i, 5000) for i in range(40)]
    found = module.Texts(data.read_records(write_jsonl("in.jsonl", texts)), module.with_defaults({}))
    parts = list(module.sample(found, found.records.text_bytes))
    assert 60_000 < sum(map(len, parts)) < 130_000
    origins = [next(i for i, text in enumerate(texts) if part in text) for part in parts]
    assert origins[0] < 5 and origins[-1] > 30 and len(set(origins)) == len(origins)


def test_wide_vocabularies_are_stored_in_four_bytes(monkeypatch):
    wide = load_tokenizer("byte")
    wide.vocab_size = 70_000                                   # most of whose ids do not occur
    meta = prepare(write_jsonl("in.jsonl", [story(i) for i in range(20)]), "out", wide, say=quiet)
    assert meta["dtype"] == "uint32" and meta["vocab_size"] == 70_000
    assert sorted(texts_of("out"))[0] in {story(i) for i in range(20)}


# ---- again, after a kill, next to others ------------------------------------------------------------------
def test_preparing_again_does_nothing_and_other_input_is_refused():
    source = write_jsonl("in.jsonl", [story(i) for i in range(20)])
    meta, before = prepare(source, "out", "byte", say=quiet), contents("out")
    assert prepare(source, "out", "byte", say=quiet) == meta
    for change in ({"tokenizer": "auto"}, {"val_fraction": 0.5}, {"text_key": "x"}, {"shard_tokens": 99}):
        with pytest.raises(UserError, match="out holds a corpus already, made from in.jsonl"):
            prepare(source, "out", **{"tokenizer": "byte", "say": quiet, **change})
    write_jsonl("in.jsonl", [story(i) for i in range(21)])
    with pytest.raises(UserError, match="choose another --out_dir, or delete it"):
        prepare(source, "out", "byte", say=quiet)
    assert contents("out") == before


def test_foreign_files_are_not_overwritten():
    source = write_jsonl("in.jsonl", [story(0)])
    Path("model").mkdir()
    Path("model/tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="model holds tokenizer.json, which would be overwritten"):
        prepare(source, "model", "byte", say=quiet)
    assert Path("model/tokenizer.json").read_text(encoding="utf-8") == "{}"


@pytest.mark.skipif(os.name == "nt", reason="kill -9")
def test_killed_at_any_moment_it_goes_on_and_makes_the_same_bytes(monkeypatch):
    source = write_jsonl("in.jsonl", [story(i, 2000) for i in range(150)])
    monkeypatch.setattr(module, "CHUNK", 50_000)
    prepare(source, "whole", "auto", val_fraction=0.1, workers=1, shard_tokens=50_000, say=quiet)
    slow = ("import time, prepare; encode = prepare.encode; prepare.CHUNK = 50_000\n"
            "def slowly(parts, tokenizer=None): time.sleep(0.02); return encode(parts, tokenizer)\n"
            "prepare.encode = slowly\n"
            "prepare.prepare('in.jsonl', 'torn', val_fraction=0.1, workers=2, shard_tokens=50_000)\n")
    def start():
        return subprocess.Popen([sys.executable, "-c", slow], stdout=subprocess.PIPE, text=True,
                                env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"})
    def chunks_done():
        journal = "torn/unfinished.json"
        return data.read_json(journal)["cursor"]["chunks"] if os.path.exists(journal) else 0
    done = 0
    for pause in (0.005, 0.03):                                # after a shard that this run finished
        process = start()
        while chunks_done() <= done:
            assert process.poll() is None, "finished before it could be killed"
            time.sleep(0.002)
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        assert process.wait() != 0 and not os.path.exists("torn/meta.json")
        assert chunks_done() > done
        done = chunks_done()
        with pytest.raises(UserError, match="torn is not finished"):
            ensure("torn", say=quiet)
    last = start()
    assert "going on with torn after" in last.communicate()[0] and last.returncode == 0
    assert contents("torn") == contents("whole")


def test_killed_while_the_splits_are_balanced_it_starts_over():
    Path("book.txt").write_text(story(0, 10_000), encoding="utf-8", newline="")
    prepare("book.txt", "whole", "byte", say=quiet)
    shorten = module.Shards.shorten
    for last in ("tail", "train", "val"):                      # the last split that was changed
        def dying(self, tokens):
            shorten(self, tokens)
            if self.name == last and os.path.exists(f"torn-{last}/unfinished.json") and (
                    data.read_json(f"torn-{last}/unfinished.json")["cursor"]["chunks"]):
                raise InterruptedError
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.Shards, "shorten", dying)
            with pytest.raises(InterruptedError):
                prepare("book.txt", f"torn-{last}", "byte", say=quiet)
        prepare("book.txt", f"torn-{last}", "byte", say=quiet)
        assert contents(f"torn-{last}") == contents("whole")


def test_two_processes_do_not_write_the_same_directory(monkeypatch):
    source = write_jsonl("in.jsonl", [story(i) for i in range(50)])
    encode, entered, said = module.encode, threading.Event(), []
    def slowly(parts, tokenizer=None):
        assert not entered.is_set(), "both are encoding"
        entered.set()
        time.sleep(0.5)
        return encode(parts, tokenizer)
    monkeypatch.setattr(module, "encode", slowly)
    threads = [threading.Thread(target=prepare, args=(source, "out", "byte"), kwargs={"say": said.append})
               for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any(line.startswith("waiting for another process") for line in said)
    assert sorted(texts_of("out")) == sorted(story(i) for i in range(50))


# ---- how much of it ---------------------------------------------------------------------------------------
def stream_of(out_dir, split="train"):
    return ids_of(out_dir, split).tolist()


def test_max_tokens_is_met_to_the_token_and_said():
    texts, said = [story(i) for i in range(60)], []
    source = write_jsonl("in.jsonl", texts)
    whole = prepare(source, "whole", "byte", val_fraction=0.2, say=quiet)
    meta = prepare(source, "some", "byte", val_fraction=0.2, max_tokens=20_000, say=said.append)
    assert meta["tokens"] == 20_000 < whole["tokens"] and not meta["complete"] and whole["complete"]
    for split in ("train", "val"):
        assert stream_of("some", split) == stream_of("whole", split)[:meta[split]["tokens"]]
    assert "stopped at 20,000 tokens, inside a document: the text goes on" in said[-1]
    assert prepare(source, "some", "byte", val_fraction=0.2, max_tokens=20_000, say=quiet) == meta
    with pytest.raises(UserError, match="some holds 20,000 tokens of this text already, more than max_t"):
        prepare(source, "some", "byte", val_fraction=0.2, max_tokens=10_000, say=quiet)


def test_one_large_document_is_cut_at_max_tokens():
    Path("book.txt").write_text(story(0, 10_000), encoding="utf-8", newline="")
    meta = prepare("book.txt", "out", "byte", max_tokens=5000, say=quiet)
    assert meta["tokens"] == 5000 and meta["val"]["tokens"] == 250 and meta["documents"] == 0
    assert bytes(stream_of("out") + stream_of("out", "val")).decode() == story(0, 10_000)[:5000]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_extended_corpus_is_the_one_that_would_have_been_made_at_once(workers, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 5000)
    source = write_jsonl("in.jsonl", [story(i) for i in range(90)] + [""] * 3)
    options = dict(val_fraction=0.2, workers=workers, shard_tokens=7000, say=quiet)
    whole = prepare(source, "whole", "byte", **options)
    for limit in (12_345, 12_346, 12_346, 50_000, None):
        meta = prepare(source, "grown", "byte", max_tokens=limit, **options)
        assert meta["tokens"] == (limit or whole["tokens"])
        for split in ("train", "val"):                         # no segment changes what stood before it
            assert stream_of("grown", split) == stream_of("whole", split)[:meta[split]["tokens"]]
    for same in ("documents", "bytes", "tokens", "left_out", "complete", "key"):
        assert meta[same] == whole[same], same
    assert {shard["segment"] for split in ("train", "val") for shard in meta[split]["shards"]} == {0, 1, 2, 3}
    data.open_corpus("grown", 16)
    with pytest.raises(UserError, match="more than max_tokens=100"):
        prepare(source, "grown", "byte", max_tokens=100, **options)


def test_an_extension_that_is_killed_goes_on_and_the_corpus_stays_usable(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 5000)
    source = write_jsonl("in.jsonl", [story(i) for i in range(90)])
    options = dict(val_fraction=0.2, workers=1, shard_tokens=3000, say=quiet)
    for out_dir in ("once", "torn"):
        prepare(source, out_dir, "byte", max_tokens=12_345, **options)
    prepare(source, "once", "byte", **options)
    append, count = data.Shards.append, [0]
    def dying(self, ids):
        count[0] += 1
        if count[0] > 12:
            raise InterruptedError
        return append(self, ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.Shards, "append", dying)
        with pytest.raises(InterruptedError):
            prepare(source, "torn", "byte", **options)
    assert data.open_corpus("torn", 16).train_tokens + data.open_corpus("torn", 16).val_tokens == 12_345
    said = []
    prepare(source, "torn", "byte", **{**options, "say": said.append})
    assert any("going on with torn after" in line for line in said)
    assert contents("torn") == contents("once")


def test_a_corpus_whose_documents_were_cut_for_validation_is_extended_to_the_token():
    Path("book.txt").write_text(story(0, 10_000), encoding="utf-8", newline="")
    for limit in (5001, 5002, 5003, 9000):
        meta = prepare("book.txt", "out", "byte", max_tokens=limit, say=quiet)
        assert meta["tokens"] == limit and not meta["complete"]
    prepare("book.txt", "out", "byte", say=quiet)
    pieces = texts_of("out", ["train"]) + texts_of("out", ["val"])
    assert len(pieces) == 3 and sum(map(len, pieces)) == len(story(0, 10_000))
    assert story(0, 10_000) == pieces[0] + pieces[2] + pieces[1]


def test_a_stopped_run_that_has_more_than_max_tokens_is_refused(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 5000)
    source = write_jsonl("in.jsonl", [story(i) for i in range(60)])
    options = dict(val_fraction=0, workers=1, say=quiet)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "publish", lambda *_: (_ for _ in ()).throw(InterruptedError()))
        with pytest.raises(InterruptedError):
            prepare(source, "out", "byte", max_tokens=30_000, **options)
    with pytest.raises(UserError, match="out holds 10,000 tokens more than max_tokens already"):
        prepare(source, "out", "byte", max_tokens=20_000, **options)
    assert prepare(source, "out", "byte", max_tokens=40_000, **options)["tokens"] == 40_000


def test_max_documents_counts_what_is_accepted():
    texts = [story(i) for i in range(30)]
    source = write_jsonl("in.jsonl", ["", *texts])
    meta = prepare(source, "out", "byte", val_fraction=0, max_documents=7, say=quiet)
    assert texts_of("out") == texts[:7] and meta["documents"] == 7


def test_copies_are_left_out_with_dedup_only():
    texts = [story(i % 20) for i in range(50)] + [story(3) + " "]
    source = write_jsonl("in.jsonl", texts)
    meta = prepare(source, "out", "byte", val_fraction=0, dedup=True, say=quiet)
    assert texts_of("out") == list(dict.fromkeys(texts)) and meta["documents"] == 21
    assert meta["left_out"] == {"copy of an earlier document": 30}
    assert prepare(source, "all", "byte", val_fraction=0, say=quiet)["documents"] == 51


# ---- on several machines ----------------------------------------------------------------------------------
@pytest.mark.parametrize("n, val_fraction", [(1, 0.1), (3, 0.1), (7, 0.001)])
def test_merged_parts_are_what_one_machine_makes(n, val_fraction):
    """To the byte, meta.json included; with val_fraction=0.001 the last tokens become validation."""
    Path("in").mkdir()
    texts = [story(i) for i in range(80)]
    write_jsonl("in/a.jsonl", ["", *texts[:60]])
    write_jsonl("in/b.jsonl", texts[60:70])
    for i in range(70, 80):
        Path(f"in/c{i}.txt").write_text(texts[i], encoding="utf-8", newline="")
    Path("in/x.png").write_bytes(b"?")
    options = dict(val_fraction=val_fraction, shard_tokens=5000, say=quiet)
    one = prepare("in", "one", "byte", **options)
    assert one["val"]["tokens"] > 0
    for k in range(n, 0, -1):
        with pytest.raises(UserError, match="of .* parts are missing|holds no parts"):
            module.merge("many", say=quiet)
        prepare("in", "many", "byte", part=f"{k}/{n}", **options)
    with pytest.raises(UserError, match="many is not finished"):
        ensure("many", say=quiet)
    assert module.merge("many", say=quiet) == one and contents("many") == contents("one")
    assert module.merge("many", say=quiet) == one
    assert prepare("in", "many", "byte", **options) == one     # the whole is there: nothing to do


def test_a_part_is_one_slice_and_the_parts_have_about_the_same_size():
    source = write_jsonl("in.jsonl", [story(i) for i in range(200)])
    metas = [prepare(source, "out", "byte", part=f"{k}/4", say=quiet) for k in range(1, 5)]
    assert sum(meta["documents"] for meta in metas) == 200
    assert all(40 < meta["documents"] < 60 for meta in metas)


@pytest.mark.parametrize("flags, named", [
    (["--part=0/4"], "1/16 is the first of sixteen"), (["--part=5/4"], "is no slice"),
    (["--part=x"], "is no slice"), (["--part=1/2", "--dedup"], "--dedup cannot go with --part"),
    (["--part=1/2", "--max_tokens=5"], "--max_tokens cannot"),
    (["--part=1/2", "--max_documents=5"], "--max_documents cannot"),
    (["--part=1/2", "--tokenizer=auto"], "--part needs a --tokenizer that all slices share")])
def test_what_slices_cannot_know_is_refused(flags, named):
    source = write_jsonl("in.jsonl", [story(0)])
    with pytest.raises(UserError, match=named):
        asked = [f"--data={source}", "--out_dir=out", "--tokenizer=byte", *flags]
        module.main(config.load(module.Config, asked))
    assert not os.path.exists("out")


def test_a_merge_that_is_killed_among_the_parts_and_a_late_part_leave_the_corpus(monkeypatch):
    source = write_jsonl("in.jsonl", [story(i) for i in range(40)])
    for k in (1, 2, 3):
        prepare(source, "many", "byte", part=f"{k}/3", say=quiet)
    removed, rmtree = [], module.shutil.rmtree
    with pytest.MonkeyPatch.context() as patch:
        def dying(path):
            if removed:
                raise InterruptedError
            removed.append(path)
            rmtree(path)
        patch.setattr(module.shutil, "rmtree", dying)
        with pytest.raises(InterruptedError):
            module.merge("many", say=quiet)
    before = Path("many/meta.json").read_bytes()
    assert module.merge("many", say=quiet)["documents"] == 40
    said = []
    prepare(source, "many", "byte", part="2/3", say=said.append)
    assert "merged from all parts" in said[0] and not list(Path("many").glob("part-*"))
    assert Path("many/meta.json").read_bytes() == before


def test_a_part_that_was_damaged_is_not_merged():
    source = write_jsonl("in.jsonl", [story(i) for i in range(40)])
    for k in (1, 2):
        prepare(source, "many", "byte", part=f"{k}/2", say=quiet)
    with open("many/part-00002-of-00002/train-00000.bin", "r+b") as file:
        file.write(b"\1")
    with pytest.raises(UserError, match="1 of . shards of .*part-00002-of-00002 do not hold what was"):
        module.merge("many", say=quiet)
    assert not os.path.exists("many/meta.json")


def test_a_merge_that_is_killed_starts_over(monkeypatch):
    source = write_jsonl("in.jsonl", [story(i) for i in range(40)])
    one = prepare(source, "one", "byte", say=quiet)
    for k in (1, 2):
        prepare(source, "many", "byte", part=f"{k}/2", say=quiet)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "publish", lambda *_: (_ for _ in ()).throw(InterruptedError()))
        with pytest.raises(InterruptedError):
            module.merge("many", say=quiet)
    assert module.merge("many", say=quiet) == one and contents("many") == contents("one")


# ---- a tokenizer alone, a look inside ---------------------------------------------------------------------
def test_a_tokenizer_alone_is_trained_and_not_overwritten():
    source = write_jsonl("in.jsonl", [story(i) for i in range(50)])
    flags = [f"--data={source}", "--train_tokenizer=300", "--out_dir=tok"]
    module.main(config.load(module.Config, flags))
    assert sorted(os.listdir("tok")) == ["tokenizer.json", "tokenizer_config.json"]
    assert load_tokenizer("tok").vocab_size == 300
    with pytest.raises(UserError, match="tok holds tokenizer.json already"):
        module.main(config.load(module.Config, flags))
    assert prepare(source, "out", "tok", say=quiet)["vocab_size"] == 300


def test_a_corpus_can_be_looked_into_and_a_changed_shard_is_found():
    texts = [story(99, 900), "short", "says <|endoftext|> itself"] + [story(i) for i in range(40)]
    source, said = write_jsonl("in.jsonl", texts), []
    meta = prepare(source, "out", val_fraction=0.1, shard_tokens=900, say=quiet)
    assert module.inspect("out", say=said.append) == meta
    found = "\n".join(said)
    ends = [len(load_tokenizer("out").encode(text)) for text in ("short", story(99, 900))]
    assert f"43 documents, {meta['bytes']:,} bytes, {meta['tokens']:,} tokens" in found
    assert f"the shortest document has {ends[0]} tokens: 'short'" in found
    assert f"the longest document has {ends[1]:,} tokens" in found
    assert "\n    | ======== <|endoftext|> ========" in found
    with open("out/train-00001.bin", "r+b") as file:
        file.write(b"\1")
    with pytest.raises(UserError, match=r"1 of \d+ shards of out do not hold .*: train-00001.bin"):
        module.inspect("out", say=quiet)


# ---- rough conditions -------------------------------------------------------------------------------------
@pytest.mark.parametrize("pieces", [2**10, 2**20])
def test_a_large_text_file_is_never_held_whole_and_gives_the_same_ids(pieces, monkeypatch):
    import records
    text = story(0, 40_000) + "x" * 300_000 + "\r\n" + "漢字 und Text " * 5000
    Path("book.txt").write_text("\ufeff" + text, encoding="utf-8", newline="")
    held = prepare("book.txt", "held", "byte", val_fraction=0, say=quiet)
    monkeypatch.setattr(records, "LARGE", 10_000)
    monkeypatch.setattr(records, "BLOCK", pieces)
    streamed = prepare("book.txt", "streamed", "byte", val_fraction=0, say=quiet)
    assert texts_of("streamed") == [text]
    assert {key: value for key, value in held.items()} == streamed
    assert held["noted"] == {"byte order mark (removed)": 1, "CRLF line ends (kept)": 1}
    for bad, reason in ((b"\xff", "not UTF-8"), (b"\0", "NUL characters (not a text)")):
        Path("bad.txt").write_bytes(text.encode() + bad)
        with pytest.raises(UserError, match=f"holds no document to train on: 1 x {re.escape(reason)}"):
            prepare("bad.txt", "bad", "byte", say=quiet)
    Path("torn.txt.gz").write_bytes(gzip.compress(text.encode())[:-9])
    meta = prepare("torn.txt.gz", "torn", "byte", say=quiet)  # as a small one is: read as far as it goes
    assert texts_of("torn")[0] in text and meta["left_out"] == {"damaged file (read as far as it goes)": 1}


def test_a_lock_that_was_removed_keeps_nobody_out_and_lets_no_two_in():
    """The one before removes the lock file while another waits for it: both must agree on a new one."""
    inside, most, order = [], [], []
    def work(number):
        with module.exclusive(".", quiet):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.05)
            order.append(number)
            inside.remove(number)
            os.remove(module.LOCK)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(order) == list(range(6)) and max(most) == 1


@pytest.mark.parametrize("out_dir", ["file", "file/below"])
def test_a_place_that_cannot_be_written_is_one_sentence(out_dir):
    Path("file").touch()
    source = write_jsonl("in.jsonl", [story(0)])
    with pytest.raises(UserError, match="file.* cannot be written .*: choose another --out_dir"):
        prepare(source, out_dir, "byte", say=quiet)
    with pytest.raises(UserError, match="file.* cannot be written"):
        module.only_tokenizer(source, 300, out_dir, module.with_defaults({}))


@pytest.mark.parametrize("option, value", [("shard_tokens", 0), ("val_fraction", 1.0), ("shards", 3)])
def test_options_from_python_are_checked_too(option, value):
    with pytest.raises(UserError, match=option):
        prepare(write_jsonl("in.jsonl", [story(0)]), "out", "byte", say=quiet, **{option: value})


def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 5000)
    source = write_jsonl("in.jsonl", [story(i) for i in range(60)])
    options = dict(workers=1, shard_tokens=8000, say=quiet)
    prepare(source, "whole", "byte", **options)
    append, count = data.Shards.append, [0]
    def full(self, ids):
        count[0] += 1
        if count[0] == 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(self, ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.Shards, "append", full)
        with pytest.raises(UserError, match="no space is left on the disk of out: make some"):
            prepare(source, "out", "byte", **options)
    said = []
    prepare(source, "out", "byte", **{**options, "say": said.append})
    assert "going on with out after" in said[0] and contents("out") == contents("whole")


def test_standard_input_is_read_like_a_file():
    texts = [story(i) for i in range(20)]
    write_jsonl("in.jsonl", texts)
    def command(content, out_dir):
        words = [sys.executable, str(REPO / "prepare.py"), "--data=-", f"--out_dir={out_dir}",
                 "--tokenizer=byte", "--val_fraction=0"]
        done = subprocess.run(words, input=content, capture_output=True)
        assert done.returncode == 0 and done.stderr == b"", done.stderr
        return done.stdout.decode()
    assert "read as .jsonl" in command(Path("in.jsonl").read_bytes(), "out")
    assert texts_of("out") == texts
    assert "is there already" in command(Path("in.jsonl").read_bytes(), "out")
    os.mkdir("text")
    Path("text/stdin.txt").write_text("somebody's", encoding="utf-8")
    assert "read as .txt" in command("Grüße\r\n".encode(), "text")
    assert texts_of("text") == ["Grüße\r\n"] and not list(Path("text").glob(".stdin*"))
    assert Path("text/stdin.txt").read_text(encoding="utf-8") == "somebody's"


# ---- ensure: for the training scripts ---------------------------------------------------------------------
def test_raw_text_is_prepared_once_and_a_corpus_is_left_alone():
    source, said = write_jsonl("my.jsonl", [story(i) for i in range(30)]), []
    path = ensure(source, "byte", say=said.append)
    assert path.startswith(os.path.join("data", "my-")) and len(path) == len("data/my-") + 8
    assert path in said[0] and sorted(texts_of(path)) == sorted(story(i) for i in range(30))
    before = contents(path)
    assert ensure(source, "byte", say=said.append) == path and contents(path) == before
    assert ensure(path, say=quiet) == path
    assert ensure(source, "byte", say=quiet, val_fraction=0.5) != path
    write_jsonl("my.jsonl", [story(i) for i in range(31)])
    assert ensure(source, "byte", say=quiet) != path


def test_the_parts_of_a_mix_are_prepared_and_keep_their_weights():
    a = write_jsonl("a.jsonl", [story(i) for i in range(30)])
    prepare(write_jsonl("b.jsonl", [story(i) for i in range(30, 60)]), "b", "byte", say=quiet)
    spec = ensure(f"{a}:3,b:1", "byte", say=quiet)
    corpus = data.open_corpus(spec, 16)
    assert corpus.quotas == (750, 250)
    assert [source.path for source in corpus.sources] == [spec.split(":")[0], "b"]


def test_in_a_mix_raw_text_takes_the_tokenizer_of_a_prepared_part():
    a = write_jsonl("a.jsonl", [story(i) for i in range(30)])
    prepare(write_jsonl("b.jsonl", [story(i) for i in range(30, 60)]), "b", "byte", say=quiet)
    corpus = data.open_corpus(ensure(f"{a}:3,b:1", say=quiet), 16)
    assert {source.tokenizer_fingerprint for source in corpus.sources} == {load_tokenizer("b").fingerprint}
    with pytest.raises(UserError, match="the texts of a mix need one tokenizer for all"):
        ensure(f"{a}:3,b.jsonl:1", say=quiet)
    with pytest.raises(UserError, match="standard input is read by prepare.py only"):
        ensure("-", say=quiet)
    with pytest.raises(UserError, match="b is a prepared corpus: write a mix with weights"):
        ensure(f"b,{a}", say=quiet)


def test_a_missing_path_names_its_neighbours_and_the_command():
    Path("stories.jsonl").touch()
    with pytest.raises(UserError, match="data/x does not exist"):
        ensure("data/x", say=quiet)
    with pytest.raises(UserError, match=r"storys.jsonl does not exist \(near it: stories.jsonl\)"):
        ensure("storys.jsonl", say=quiet)


def test_the_built_in_corpus_is_ready_at_once_the_second_time(monkeypatch, capfd):
    began = time.monotonic()
    path = ensure("stdlib")
    first = time.monotonic() - began
    monkeypatch.setattr(module, "Texts", lambda *_: pytest.fail("read the text again"))
    began = time.monotonic()
    assert ensure("stdlib") == path
    assert time.monotonic() - began < 0.1 and first < 30
    corpus = data.open_corpus(path, 256)
    corpus.check(100, 1)
    assert 2048 <= corpus.vocab_size <= 8192 and 3 < corpus.unigram_entropy() < 8
    assert "ETA" not in capfd.readouterr().err                 # no progress line into a pipe


def ranks(world, *args, **kwargs):
    """ensure() on `world` ranks, each a thread: [path or exception]."""
    results = [None] * world
    def call(rank):
        try:
            results[rank] = ensure(*args, rank=rank, world=world, say=quiet, **kwargs)
        except BaseException as error:
            results[rank] = error
    threads = [threading.Thread(target=call, args=(rank,)) for rank in reversed(range(world))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_one_rank_prepares_and_the_others_wait_for_it(monkeypatch):
    source, encode, calls = write_jsonl("in.jsonl", [story(i) for i in range(30)]), module.encode, []
    def slowly(parts, tokenizer=None):
        calls.append(threading.current_thread())
        time.sleep(0.7)
        return encode(parts, tokenizer)
    monkeypatch.setattr(module, "encode", slowly)
    found = ranks(3, source, "byte")
    assert found[0] == found[1] == found[2] and len(calls) == 1
    assert os.path.exists(found[0] + "/meta.json") and os.listdir("data") == [os.path.basename(found[0])]


def test_a_failure_of_rank_0_is_everybodys_at_once():
    began = time.monotonic()
    found = ranks(3, write_jsonl("in.jsonl", [""]), "byte")
    assert {type(error) for error in found} == {UserError} and len({str(error) for error in found}) == 1
    assert "holds no document" in str(found[0]) and time.monotonic() - began < 5


def test_the_failure_of_an_earlier_run_is_not_believed(monkeypatch):
    source = write_jsonl("in.jsonl", [story(i) for i in range(30)])
    options = module.with_defaults({})
    target = module.target(module.open_records(source, options), load_tokenizer("byte"), options)
    os.makedirs("data")
    for host in (files.platform.node(), "another-machine"):
        note = {"host": host, "time": files.STARTED - 1, "error": "old trouble"}
        data.write_json(target + ".note.json", note)
        late = threading.Timer(0.7, lambda: ensure(source, "byte", rank=0, world=2, say=quiet))
        late.start()                                           # rank 1 looks first, and finds the old note
        assert ensure(source, "byte", rank=1, world=2, say=quiet) == target
        late.join()
        for file in Path(target).iterdir():
            file.unlink()
        os.rmdir(target)
    monkeypatch.setattr(files, "PATIENCE", 0.3)               # with no rank 0 to replace it, it counts
    data.write_json(target + ".note.json", {"host": "another-machine", "time": 0, "error": "new trouble"})
    with pytest.raises(UserError, match="new trouble"):
        ensure(source, "byte", rank=1, world=2, say=quiet)
    os.remove(target + ".note.json")
    with pytest.raises(UserError, match="on a disk that all machines share"):
        ensure(source, "byte", rank=1, world=2, say=quiet)


# ---- data sets that are streamed --------------------------------------------------------------------------
def test_a_streamed_data_set_is_cut_at_the_budget_and_extended_later(hub):
    hub.texts = [story(i) for i in range(400)]
    first = ensure("org/stories", "byte", say=quiet, tokens=50_000)
    meta = data.read_json(f"{first}/meta.json")
    assert 50_000 <= meta["train"]["tokens"] < 60_000 and 100 < meta["val"]["tokens"] < 3000
    assert not meta["complete"]
    before = data.open_corpus(first, 64)
    order = before.locate(np.arange(before.windows))[1].tolist()
    opened = len(hub.opened)
    assert ensure("org/stories", "byte", say=quiet, tokens=40_000) == first
    assert len(hub.opened) == opened
    assert ensure("org/stories", "byte", say=quiet, tokens=150_000) == first
    after = data.open_corpus(first, 64)
    assert after.train_tokens >= 150_000 and after.continues(before.fingerprint)
    assert after.locate(np.arange(before.windows))[1].tolist() == order
    ensure("org/stories", "byte", say=quiet)                   # all of it
    meta = data.read_json(f"{first}/meta.json")
    assert meta["complete"] and meta["bytes"] == sum(map(len, hub.texts))
    # the tail of the first segment became validation: the documents at its two ends are in pieces
    assert len(set(texts_of(first)) & set(hub.texts)) >= 397 and meta["documents"] <= 403


def test_every_rank_waits_for_as_much_of_a_stream_as_the_run_needs(hub):
    hub.texts = [story(i) for i in range(400)]
    for tokens in (20_000, 60_000):
        found = ranks(3, "org/stories", "byte", tokens=tokens)
        assert found[0] == found[1] == found[2]
        assert data.open_corpus(found[0], 64).train_tokens >= tokens


# ---- the command ------------------------------------------------------------------------------------------
def recipes():
    """The lines of README that prepare the data sets whose layout is made below."""
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    return [line.split("#")[0].split() for line in re.findall(r"^python (prepare\.py .*)$", readme, re.M)
            if re.search("input.txt|data/dclm |fineweb/|my_project", line)]


def test_the_recipes_of_the_readme_work_on_the_layouts_they_are_for():
    pa, zstandard = pytest.importorskip("pyarrow"), pytest.importorskip("zstandard")
    from pyarrow import parquet
    texts = [story(i) for i in range(12)]
    def write(path, content):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)
    write("input.txt", "".join(texts).encode())
    for i in range(3):
        lines = "".join(json.dumps({"bff_contained_ngram_count": 1, "language_id": {"en": 0.9}, "text": text,
                                    "url": "http://x"}) + "\n" for text in texts[4 * i:4 * i + 4])
        write(f"dclm/global-shard_01_of_10/local-shard_{i}_of_10/shard_00000000_processed.jsonl.zst",
              zstandard.compress(lines.encode()))
        os.makedirs("fineweb/sample/10BT", exist_ok=True)
        rows = [{"text": text, "id": "x", "dump": "CC", "token_count": 5} for text in texts[4 * i:4 * i + 4]]
        parquet.write_table(pa.Table.from_pylist(rows), f"fineweb/sample/10BT/00{i}_00000.parquet")
        write(f"my_project/pkg/sub{i}/a.py", f"x = {i}\n".encode())
    write("my_project/README.md", b"# My project")
    write("my_project/logo.png", b"\x89PNG\0")
    found = {}
    for words in recipes():
        flags = [word.strip("'").replace("'", "").replace("=gpt2", "=byte") for word in words[1:]]
        found[words[1]] = module.main(config.load(module.Config, flags))["documents"]
    assert sorted(found.values()) == [1, 4, 12, 12], found


def test_the_command_prepares_reports_and_exits_with_2_for_what_the_user_got_wrong():
    write_jsonl("my.jsonl", [story(i) for i in range(30)])
    def command(*flags):
        words = [sys.executable, str(REPO / "prepare.py"), *flags]
        return subprocess.run(words, capture_output=True, text=True)
    good = command("--data=my.jsonl", "--tokenizer=byte", "--workers=2")
    assert good.returncode == 0 and good.stderr == ""
    assert "30 documents" in good.stdout and "bytes per token" in good.stdout
    assert ensure("my.jsonl", "byte", say=quiet) in good.stdout          # the place where train.py looks
    bad = command("--data=mine.jsonl")
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and "near it: my.jsonl" in bad.stderr


def test_shortening_removes_shards_behind_a_gap_that_a_kill_has_left():
    shards = module.Shards(".", "tail", load_tokenizer("byte"), 10)
    shards.append(np.arange(45))
    os.remove("tail-00001.bin")
    Path("train-00003.bin").write_bytes(b"another split's")
    shards.shorten(5)
    assert sorted(os.listdir(".")) == ["tail-00000.bin", "train-00003.bin"]
    assert os.path.getsize("tail-00000.bin") == 10
