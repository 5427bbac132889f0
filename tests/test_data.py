"""data.py: what a step sees, what evaluation reads, what is refused, what records hold."""
import io
import json
import math
import os

import numpy as np
import pytest
import torch

import data
from config import UserError
from tokenizer import load_tokenizer

T = 8                          # sequence_length


def write_corpus(directory, train, val=(), shard=1000, vocab_size=257, eos_id=256, ends=()):
    """A corpus as prepare.py lays it out, from lists of ids; a segment of `train` ends at each of `ends`."""
    directory.mkdir(parents=True)
    tokenizer = load_tokenizer("byte")
    tokenizer.save(str(directory))
    meta = {"format": data.FORMAT, "vocab_size": vocab_size, "eos_id": eos_id, "dtype": "uint16",
            "tokenizer": {"name": "byte", "fingerprint": tokenizer.fingerprint, "portable": True},
            "complete": True}
    train, val = np.array(train, np.uint16), np.array(val, np.uint16)
    for name, segments in (("train", np.split(train, ends)), ("val", [val])):
        meta[name] = {"shards": []}
        for segment, ids in enumerate(segments):
            for start in range(0, len(ids), shard):
                file = directory / f"{name}-{len(meta[name]['shards']):05d}.bin"
                ids[start:start + shard].tofile(file)
                facts = data.describe_shard(str(file), np.dtype(np.uint16))
                meta[name]["shards"].append({"file": file.name, "segment": segment, **facts})
    data.write_json(str(directory / "meta.json"), meta)
    return str(directory)


def counting(n):
    """Ids that tell which window they are from: token i is i // T, so that window i begins with id i."""
    return np.repeat(np.arange(-(-n // T)), T)[:n]


def seen(corpus, samples, G, replicas, accumulation):
    """{replica: [micro-batch, ...]} of one step, each the list of the windows in it."""
    micro = G // replicas // accumulation
    return [[rows[:, 0].tolist() for rows in corpus.step(samples, micro, accumulation, r, replicas)]
            for r in range(replicas)]


# ---- the order --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 1000, 4097])
def test_permutation_reaches_every_position_once(n):
    assert sorted(data.permute(np.arange(n), n, 0, 5)) == list(range(n))


def test_permutation_depends_on_every_seed_and_looks_random():
    orders = {tuple(data.permute(np.arange(4), 4, seed, epoch)) for seed in range(15) for epoch in range(15)}
    assert len(orders) == math.factorial(4)
    order = data.permute(np.arange(10_000), 10_000, 0)
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05


def test_permutation_of_a_huge_range_needs_no_memory():
    some = data.permute(np.arange(1000), 10**13 + 1, 3)
    assert len(set(some.tolist())) == 1000 and 0 <= some.min() and some.max() <= 10**13


def test_row_map_is_the_documented_formula(tmp_path):
    corpus = data.open_corpus(write_corpus(tmp_path / "c", counting(200 * T + 1)), T, seed=7)
    n, mbs, dp, accumulation = 40, 3, 4, 2
    for r in range(dp):
        rows = torch.cat(list(corpus.step(n, mbs, accumulation, r, dp)))[:, 0]
        wanted = [n + r * mbs + (k // mbs) * (mbs * dp) + k % mbs for k in range(mbs * accumulation)]
        assert rows.tolist() == corpus.locate(np.array(wanted))[1].tolist()


def test_every_world_size_and_accumulation_sees_the_same_windows_in_the_same_step(tmp_path):
    corpus = data.open_corpus(write_corpus(tmp_path / "c", counting(250 * T + 1)), T, seed=1)
    G = 48
    for samples in (0, 48, 240):                               # the last one crosses into the second epoch
        alone = sorted(seen(corpus, samples, G, 1, 1)[0][0])
        for replicas in (1, 2, 3, 4, 6):
            for accumulation in (1, 2, 4):
                parts = seen(corpus, samples, G, replicas, accumulation)
                assert sorted(window for part in parts for micro in part for window in micro) == alone
                assert all(len(part) == accumulation for part in parts)


def test_an_epoch_is_every_window_once_and_the_next_is_in_another_order(tmp_path):
    corpus = data.open_corpus(write_corpus(tmp_path / "c", counting(250 * T + 1)), T, seed=1)
    assert corpus.windows == 250
    epochs = [corpus.locate(np.arange(epoch * 250, (epoch + 1) * 250))[1].tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(250)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = data.open_corpus(str(tmp_path / "c"), T, seed=2)
    assert other.locate(np.arange(250))[1].tolist() != epochs[0]


def test_windows_cross_shards_and_predict_every_token_once(tmp_path):
    ids = np.random.default_rng(0).integers(0, 256, 5 * T + 1)
    corpus = data.open_corpus(write_corpus(tmp_path / "c", ids, shard=3), T)
    assert corpus.train_tokens == len(ids) and corpus.windows == 5
    rows = torch.cat(list(corpus.step(0, 5, 1, 0, 1)))
    assert rows.dtype == torch.long and rows.shape == (5, T + 1)
    order = corpus.locate(np.arange(5))[1]
    assert torch.equal(rows[np.argsort(order), 1:].flatten(), torch.from_numpy(ids[1:]))
    assert torch.equal(rows[np.argsort(order), :-1].flatten(), torch.from_numpy(ids[:-1]))


# ---- mixes ------------------------------------------------------------------------------------------------
def test_an_extension_leaves_the_order_of_what_was_there(tmp_path):
    """Windows that a run has trained are not trained again, nor left out, because their corpus grew."""
    ids = counting(90 * T + 1)
    short = data.open_corpus(write_corpus(tmp_path / "a", ids[:50 * T + 3]), T)
    grown = data.open_corpus(write_corpus(tmp_path / "b", ids, ends=[50 * T + 3]), T)
    again = data.open_corpus(write_corpus(tmp_path / "c", ids, ends=[50 * T + 3, 70 * T]), T)
    def order(corpus, samples):
        return corpus.locate(np.arange(samples))[1].tolist()
    assert (short.windows, grown.windows, again.windows) == (50, 90, 90)
    assert order(grown, 90)[:50] == order(short, 50) and sorted(order(grown, 90)[50:]) == list(range(50, 90))
    assert order(again, 90)[:50] == order(short, 50) and sorted(order(again, 69)) == list(range(69))
    assert sorted(order(again, 180)[90:]) == list(range(90)) and order(again, 180)[90:140] != order(short, 50)
    assert grown.continues(short.fingerprint) and not short.continues(grown.fingerprint)
    other = write_corpus(tmp_path / "d", np.append(ids[:50 * T + 2], 7))
    assert not grown.continues(data.open_corpus(other, T).fingerprint)
    assert not grown.continues(data.open_corpus(f"{tmp_path}/b:1,{tmp_path}/c:1", T).fingerprint)


def test_a_mix_keeps_its_weights_in_every_block_and_each_source_its_epochs(tmp_path):
    a = write_corpus(tmp_path / "a", counting(90 * T + 1))
    b = write_corpus(tmp_path / "b", counting(200 * T + 1))
    corpus = data.open_corpus(f"{a}:0.6,{b}:0.2", T, seed=3)
    which, windows = corpus.locate(np.arange(3000))
    for block in range(3):
        assert (which[block * 1000:(block + 1) * 1000] == 0).sum() == 750
    for source, available in ((0, 90), (1, 200)):
        own = windows[which == source]
        assert sorted(own[:available]) == list(range(available))
    shuffled = np.random.default_rng(0).permutation(3000)      # no matter who asks, and when
    assert (corpus.locate(shuffled)[1] == windows[shuffled]).all()
    assert corpus.fingerprint != data.open_corpus(f"{a}:0.5,{b}:0.5", T).fingerprint


def test_thirds_add_up_and_a_vanishing_weight_is_refused(tmp_path):
    assert data.largest_remainder([1, 1, 1], 1000) == (334, 333, 333)
    a, b = (write_corpus(tmp_path / name, counting(T + 1)) for name in "ab")
    with pytest.raises(UserError, match="less than 1/1000 of the weight"):
        data.open_corpus(f"{a}:1,{b}:0.0001", T)


def test_paths_with_colons_and_commas_are_not_mixes(tmp_path):
    assert data.mix_of(r"C:\text") == [(r"C:\text", 1.0)]
    assert data.mix_of(r"C:\a:3, D:\b:1") == [(r"C:\a", 0.75), (r"D:\b", 0.25)]
    (tmp_path / "a,b:1").mkdir()
    assert data.mix_of(str(tmp_path / "a,b:1")) == [(str(tmp_path / "a,b:1"), 1.0)]
    assert data.mix_of("a.txt,b") == [("a.txt,b", 1.0)]        # several inputs, which make one corpus
    assert data.mix_of("org/name:2024") == [("org/name:2024", 1.0)]
    for bad in ("a:1,b", "a:-1,b:2", "a:0,b:1", "a:nan,b:1", ":1,b:1"):
        with pytest.raises(UserError, match="path:weight"):
            data.mix_of(bad)


def test_bare_files_do_not_mix_with_corpora_that_know_their_tokenizer(tmp_path):
    a = write_corpus(tmp_path / "a", counting(T + 1))
    (tmp_path / "b").mkdir()
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "b" / "train.bin")
    with pytest.raises(UserError, match="cannot be mixed"):
        data.open_corpus(f"{a}:1,{tmp_path / 'b'}:1", T)


# ---- evaluation -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("val_tokens", [2, 8, 9, 10, 123])
def test_every_validation_token_is_a_label_exactly_once(tmp_path, val_tokens):
    val = np.arange(val_tokens)
    corpus = data.open_corpus(write_corpus(tmp_path / "c", counting(T + 1), val), T)
    for replicas in (1, 2, 3, 4, 6):
        for micro in (1, 3):
            batches = [list(corpus.evaluation(micro, r, replicas)) for r in range(replicas)]
            assert len({len(own) for own in batches}) == 1
            labels = torch.cat([labels for own in batches for _, labels in own])
            ids = torch.cat([ids for own in batches for ids, _ in own])
            assert labels.shape[1] == T and sorted(labels[labels >= 0].tolist()) == val[1:].tolist()
            assert torch.equal(ids[labels >= 0] + 1, labels[labels >= 0])       # shifted here, by one


def test_evaluation_of_a_mix_reads_each_validation_split(tmp_path):
    a = write_corpus(tmp_path / "a", counting(T + 1), range(0, 20))
    b = write_corpus(tmp_path / "b", counting(T + 1), range(100, 111))
    corpus = data.open_corpus(f"{a}:1,{b}:1", T)
    labels = torch.cat([labels for r in (0, 1) for _, labels in corpus.evaluation(2, r, 2)])
    assert sorted(labels[labels >= 0].tolist()) == [*range(1, 20), *range(101, 111)]


def test_eval_tokens_is_a_fixed_evenly_spaced_part(tmp_path):
    corpus = data.open_corpus(write_corpus(tmp_path / "c", counting(T + 1), counting(100 * T + 1)), T)
    def windows(replicas):
        batches = [batch for r in range(replicas) for batch in corpus.evaluation(2, r, replicas, 80)]
        return sorted(ids[k, 0].item() for ids, labels in batches for k in range(2) if labels[k, 0] >= 0)

    assert windows(1) == windows(3) == list(range(0, 100, 10))


def test_a_corpus_without_validation_has_nothing_to_evaluate(tmp_path):
    corpus = data.open_corpus(write_corpus(tmp_path / "c", counting(T + 1)), T)
    corpus.check(1, 1)
    assert corpus.val_tokens == 0 and list(corpus.evaluation(2, 0, 1)) == []


# ---- what a corpus says of itself -------------------------------------------------------------------------
def test_tokenizer_vocabulary_and_end_of_text_come_with_the_corpus(tmp_path):
    path = write_corpus(tmp_path / "c", counting(T + 1))
    corpus = data.open_corpus(path, T)
    assert corpus.tokenizer.decode([104, 105]) == "hi" and (corpus.vocab_size, corpus.eos_id) == (257, 256)
    meta = json.loads((tmp_path / "c" / "meta.json").read_text(encoding="utf-8"))
    meta["tokenizer"]["fingerprint"] = "another"
    data.write_json(path + "/meta.json", meta)
    with pytest.raises(UserError, match="not the tokenizer that this corpus was made with"):
        data.open_corpus(path, T).tokenizer


def test_unigram_entropy_is_that_of_the_token_counts(tmp_path):
    corpus = data.open_corpus(write_corpus(tmp_path / "c", [5] * 50 + [6] * 25 + [7] * 25), T)
    assert corpus.unigram_entropy() == pytest.approx(1.5 * math.log(2))


def test_fingerprint_is_that_of_the_tokens_wherever_they_lie(tmp_path):
    prints = [data.open_corpus(write_corpus(tmp_path / name, ids), T).fingerprint
              for name, ids in (("a", [1] * 20), ("b", [1] * 20), ("c", [1] * 19 + [2]))]
    assert prints[0] == prints[1] != prints[2]


def test_documents_end_with_their_end_of_text():
    ids = torch.tensor([[1, 9, 2, 3, 9, 9, 4], [9, 1, 1, 1, 1, 1, 9]])
    assert data.documents(ids, 9).tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]


# ---- what is refused --------------------------------------------------------------------------------------
def test_too_many_samples_for_max_epochs_is_an_error_with_the_numbers(tmp_path):
    corpus = data.open_corpus(write_corpus(tmp_path / "c", counting(10 * T + 1)), T)
    corpus.check(20, 4, max_epochs=2, max_steps=5)
    corpus.check(10**6, 4)                                     # epochs without end
    with pytest.raises(UserError) as error:
        corpus.check(24, 4, max_epochs=2, max_steps=6)
    assert str(error.value) == (
        "Dataset is too small for this run: available-samples=20, required-samples=24 (max_steps=6 x "
        "global_batch_size=4). Tokenize more data, or lower max_steps or global_batch_size.")


def test_in_a_mix_the_source_that_runs_out_is_named(tmp_path):
    a = write_corpus(tmp_path / "a", counting(10 * T + 1))
    b = write_corpus(tmp_path / "b", counting(100 * T + 1))
    corpus = data.open_corpus(f"{a}:1,{b}:1", T)
    used = int((corpus.locate(np.arange(40))[0] == 0).sum())
    with pytest.raises(UserError, match=rf"of .*a=10, required-samples={used} "):
        corpus.check(40, 4, max_epochs=1, max_steps=10)


@pytest.mark.parametrize("train, val, named", [(T, 50, "training split .* has 8 tokens"),
                                               (50, T, "validation split .* has 8 tokens")])
def test_a_split_shorter_than_one_window_is_an_error_with_the_numbers(tmp_path, train, val, named):
    corpus = data.open_corpus(write_corpus(tmp_path / "c", [1] * train, [1] * val), T)
    with pytest.raises(UserError, match=f"too small for this run: the {named}, .*sequence_length=8 needs 9"):
        corpus.check(1, 1)


def test_damaged_and_missing_corpora_are_refused(tmp_path):
    path = write_corpus(tmp_path / "books", [1] * 50)
    with pytest.raises(UserError, match=r"bokks is not a directory \(near it: .*books\): .*prepare.py"):
        data.open_corpus(str(tmp_path / "bokks"), T)
    with pytest.raises(UserError, match="neither meta.json nor train.bin"):
        data.open_corpus(str(tmp_path), T)
    os.truncate(path + "/train-00000.bin", 40)
    with pytest.raises(UserError, match="has 40 bytes where meta.json says 100"):
        data.open_corpus(path, T)
    with pytest.raises(UserError, match="holds the id 300, outside its vocabulary of 257"):
        data.open_corpus(write_corpus(tmp_path / "ids", [300] * 50), T)


# ---- nanoGPT's files --------------------------------------------------------------------------------------
def test_bare_uint16_files_train_and_are_scanned_once(tmp_path, monkeypatch):
    np.array([*range(60), 50256], np.uint16).tofile(tmp_path / "train.bin")
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "val.bin")
    (tmp_path / "meta.pkl").write_bytes(b"not a pickle, and nobody looks")
    corpus = data.open_corpus(str(tmp_path), T)
    assert (corpus.vocab_size, corpus.tokenizer, corpus.eos_id) == (50257, None, None)
    assert (corpus.train_tokens, corpus.val_tokens) == (61, 20)
    monkeypatch.setattr(data, "describe_shard", lambda *_: pytest.fail("scanned a second time"))
    assert data.open_corpus(str(tmp_path), T).fingerprint == corpus.fingerprint
    monkeypatch.undo()
    np.array([*range(60), 7], np.uint16).tofile(tmp_path / "train.bin")
    os.utime(tmp_path / "train.bin", (1, 1))                   # whatever the clock's resolution
    assert data.open_corpus(str(tmp_path), T).vocab_size == 60


def test_bare_files_in_a_directory_of_somebody_else(tmp_path, monkeypatch):
    np.arange(60, dtype=np.uint16).tofile(tmp_path / "train.bin")
    monkeypatch.setattr(data, "write_json", lambda *_: (_ for _ in ()).throw(PermissionError()))
    corpus = data.open_corpus(str(tmp_path), T)                # no val.bin either
    assert corpus.vocab_size == 60 and corpus.val_tokens == 0
    (tmp_path / "train.bin").write_bytes(b"abc")
    with pytest.raises(UserError, match="odd number"):
        data.open_corpus(str(tmp_path), T)
