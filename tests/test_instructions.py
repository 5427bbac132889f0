"""What records say: every format, what is no conversation, and rows whose labels are right."""
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import chat
import data
import instructions
from config import UserError
from instructions import Unusable, conversation_of
from tokenizer import load_tokenizer


def chatml():
    return chat.with_chatml(load_tokenizer("byte"))


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def system(content):
    return {"role": "system", "content": content}


PAIR = [user("ask"), assistant("say")]


@pytest.mark.parametrize("record, format, messages", [
    ({"messages": PAIR}, "messages", PAIR),
    ({"messages": json.dumps(PAIR)}, "messages", PAIR),
    ({"messages": [system("be"), *PAIR, user("more"), assistant("less")]}, "messages",
     [system("be"), *PAIR, user("more"), assistant("less")]),
    ({"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "say"}]}, "sharegpt",
     PAIR),
    ({"conversations": [{"from": "system", "value": "be"}, {"from": "human", "value": "ask"},
                        {"from": "tool", "value": "7"}, {"from": "gpt", "value": "say"}]}, "sharegpt",
     [system("be"), user("ask"), {"role": "tool", "content": "7"}, assistant("say")]),
    ({"instruction": "ask", "input": "", "output": "say"}, "alpaca", PAIR),
    ({"instruction": "ask", "input": "this", "output": "say"}, "alpaca",
     [user("ask\n\nthis"), assistant("say")]),
    ({"instruction": "ask", "context": "this", "response": "say"}, "alpaca",
     [user("ask\n\nthis"), assistant("say")]),
    ({"instruction": "ask", "output": "say", "system": "be"}, "alpaca", [system("be"), *PAIR]),
    ({"prompt": "ask", "completion": "say"}, "prompt-completion", PAIR),
    ({"prompt": [user("ask")], "completion": [assistant("say")]}, "prompt-completion", PAIR),
    ({"prompt": "ask", "response": "say"}, "prompt-response", PAIR),
    ({"question": "ask", "answer": "say", "id": 7, "source": "x"}, "question-answer", PAIR),
    ({"question": "ask", "answer": 4}, "question-answer", [user("ask"), assistant("4")]),
    ({"question": 1.5, "context": "this", "answer": "say"}, "question-answer",
     [user("1.5\n\nthis"), assistant("say")]),
    ({"messages": [user([{"type": "text", "text": "as"}, {"type": "text", "text": "k"}]), assistant("say")]},
     "messages", PAIR),
    ({"messages": [*PAIR, user("and?")]}, "messages", PAIR),
    ({"messages": [{"role": "human", "content": "ask"}, {"role": "Model", "content": "say"}]}, "messages",
     PAIR),
    ({"text": "all of it"}, "text", [{"role": "text", "content": "all of it"}]),
])
def test_a_record_says_what_it_is(record, format, messages):
    found = conversation_of(record)
    assert (found.format, found.messages) == (format, messages)


@pytest.mark.parametrize("record, reason", [
    ({"story": "once"}, "no known format .keys: story"),
    ({}, "no known format"),
    ({"messages": []}, "no answer"),
    ({"messages": [user("ask")]}, "no answer"),
    ({"messages": "not json"}, "no list of objects"),
    ({"messages": [user(None), assistant("say")]}, "null"),
    ({"messages": [user("ask"), assistant("  ")]}, "an empty answer"),
    ({"messages": [{"role": "alien", "content": "x"}, assistant("say")]}, "role that is none"),
    ({"messages": [{"content": "x"}, assistant("say")]}, "role that is none"),
    ({"messages": [user([{"type": "image_url", "image_url": "x"}]), assistant("say")]}, "an image"),
    ({"messages": [user("ask"), {"role": "assistant", "content": None, "tool_calls": [{}]}]},
     "call of a tool"),
    ({"question": "ask", "answer": None}, "null"),
    ({"question": "ask", "answer": True}, "true/false"),
    ({"question": "ask", "answer": ""}, "an empty answer"),
    ({"question": "ask", "answer": {"text": "say"}}, "neither text nor a list"),
    ({"text": " \n"}, "an empty text"), ({"text": None}, "null"),
])
def test_what_is_no_conversation_has_a_reason(record, reason):
    with pytest.raises(Unusable, match=reason):
        conversation_of(record)


def test_a_forced_format_takes_no_other():
    record = {"question": "ask", "answer": "say", "text": "all of it"}
    assert conversation_of(record).format == "question-answer"
    assert conversation_of(record, "text").messages[0]["content"] == "all of it"
    with pytest.raises(Unusable, match="not of the format alpaca"):
        conversation_of(record, "alpaca")


# ---- the folder -------------------------------------------------------------------------------------------

def write(path: str, records: list) -> str:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def quiet(text):
    pass


MIXED = [{"messages": PAIR}, {"question": "q", "answer": "a"}, {"text": "plain"}, "{broken", {"story": 1},
         {"question": "q", "answer": None}, {"instruction": "do", "output": 3}, {"messages": [user("x")]}]


def test_each_record_is_counted_under_its_format_or_its_reason():
    said = []
    folder = instructions.ensure(write("mixed.jsonl", MIXED), chatml(), say=said.append)
    meta = data.read_json(folder + "/meta.json")
    assert meta["formats"] == {"messages": 1, "question-answer": 1, "text": 1, "alpaca": 1}
    assert sum(meta["left_out"].values()) == 4 and meta["noted"] == {"a number as a text": 1}
    text = "\n".join(said)
    for word in ("4 records", "of 1 texts all tokens are trained", "1 x broken JSON line",
                 "mixed.jsonl line 4", "1 x no answer of the assistant", "1 x no known format (keys: story)"):
        assert word in text, word
    again = []
    assert instructions.ensure("mixed.jsonl", chatml(), say=again.append) == folder
    assert "1 x broken JSON line" in "\n".join(again)          # what is left out is said each time


def test_no_usable_record_is_refused_with_the_reasons():
    with pytest.raises(UserError, match="no record that can be trained on.*no known format"):
        instructions.ensure(write("bad.jsonl", [{"story": 1}, {"tale": 2}]), chatml(), say=quiet)
    with pytest.raises(UserError, match="does not exist"):
        instructions.ensure("nothing.jsonl", chatml(), say=quiet)
    with pytest.raises(UserError, match="not of the format alpaca"):
        instructions.ensure(write("good.jsonl", [{"question": "q", "answer": "a"}]), chatml(), "alpaca",
                            say=quiet)
    with pytest.raises(UserError, match="no record that can be trained on.*no known format"):
        instructions.ensure("bad.jsonl", "auto", say=quiet)


def test_another_template_format_or_file_is_another_folder():
    path, tokenizer = write("in.jsonl", [{"question": "q", "answer": "a"}]), chatml()
    folders = {instructions.ensure(path, tokenizer, say=quiet)}
    folders.add(instructions.ensure(path, tokenizer, "question-answer", say=quiet))
    tokenizer.chat_template = chat.CHATML.replace("'\\n' }}{% endfor", "' ' }}{% endfor")
    folders.add(instructions.ensure(path, tokenizer, say=quiet))
    write("in.jsonl", [{"question": "q", "answer": "another"}])
    folders.add(instructions.ensure(path, tokenizer, say=quiet))
    assert len(folders) == 4


# ---- rows -------------------------------------------------------------------------------------------------

def packed(records: list, T: int = 64, name: str = "rows.jsonl", **options) -> data.Rows:
    return data.pack_sft(write(name, records), chatml(), T, say=options.pop("say", quiet), **options)


def test_labels_are_the_next_tokens_and_only_those_of_answers():
    rows = packed([{"messages": [user("ab"), assistant("cd"), user("e"), assistant("f")]}], T=64)
    ids, labels, documents, positions = rows.row(rows.train, 0)
    text = b"\1user\nab\2\n\1assistant\ncd\2\n\1user\ne\2\n\1assistant\nf\2\n"
    wanted = [{1: 257, 2: 258}.get(byte, byte) for byte in text]
    n = len(wanted) - 1
    assert ids[:n].tolist() == wanted[:-1]
    trained = {i: wanted[i + 1] for i in range(n) if labels[i] != -100}
    first, last = text.index(b"cd"), text.index(b"f\2")
    assert trained == {first - 1: ord("c"), first: ord("d"), first + 1: 258, last - 1: ord("f"), last: 258}
    assert all(labels[i] == label for i, label in trained.items())
    assert (labels[n:] == -100).all() and (documents[:n] == 0).all() and (documents[n:] == 1).all()
    assert positions[:n].tolist() == list(range(n))
    every = packed([{"messages": [user("ab"), assistant("cd"), user("e"), assistant("f")]}], mask_input=False)
    assert every.row(every.train, 0)[1][:n].tolist() == wanted[1:] and every.train.trained == n


def many(n: int = 60, seed: int = 0) -> list[dict]:
    random = np.random.default_rng(seed)
    return [{"question": "q" * int(random.integers(1, 20)),
             "answer": chr(97 + i % 26) * int(random.integers(1, 30))} for i in range(n)]


def test_every_sample_is_in_one_row_once_whole_and_rows_are_well_filled():
    rows = packed(many(), T=128)
    found = Counter(piece for row in rows.train.rows for piece in row)
    assert set(found.values()) == {1} and len(found) == 60
    assert rows.train.used / (len(rows.train) * 128) > 0.9
    for number in range(len(rows.train)):
        ids, labels, documents, positions = rows.row(rows.train, number)
        begins = [0, *(1 + np.flatnonzero(np.diff(documents)))]
        for begin, piece in zip(begins, rows.train.rows[number]):
            sample, trained = rows.samples.tokens(int(rows.train.pieces[piece, 0]))
            n = len(sample) - 1
            assert ids[begin:begin + n].tolist() == sample[:-1].tolist()
            assert labels[begin:begin + n].tolist() == np.where(trained[1:], sample[1:], -100).tolist()
            assert positions[begin:begin + n].tolist() == list(range(n))
        assert (labels != -100).sum() == rows.train.labels[number]
    alone = packed(many(), T=128, packing=False)
    assert len(alone.train) == 60 and alone.train.trained == rows.train.trained
    batch = next(alone.step(0, 4, 1, 0, 1))                    # no wider than its longest
    numbers = alone.order(np.arange(4))
    assert batch.shape == (4, 4, alone.train.pieces[numbers, 2].max()) and batch.shape[2] < 128
    assert int((batch[:, 1] != -100).sum()) == alone.train.labels[numbers].sum()


def test_what_is_too_long_is_cut_dropped_or_refused_and_counted():
    long = [{"question": "q", "answer": "a" * 100}, {"question": "q" * 100, "answer": "a"},
            {"question": "q", "answer": "a"}]
    said = []
    cut = packed(long, T=64, say=said.append)
    assert len(cut.train.pieces) == 2 and cut.train.pieces[:, 2].max() == 64   # the long question is dropped
    assert "2 records have more than the 65 tokens of a row: 1 were cut" in "\n".join(said)
    assert all((cut.row(cut.train, n)[1] != -100).any() for n in range(len(cut.train)))
    dropped = packed(long, T=64, overlong="drop")
    assert len(dropped.train.pieces) == 1
    with pytest.raises(UserError, match="2 of 3 records have more than.*longest, number 1"):
        packed(long, T=64, overlong="error")
    with pytest.raises(UserError, match="no record is left"):
        packed([long[1]], T=64)


def test_split_texts_lose_no_token():
    rows = packed([{"text": "".join(map(str, range(100)))}, {"text": "short"}], T=32, overlong="split",
                  mask_input=False)
    total = int(np.diff(rows.samples.starts).sum())
    assert rows.train.trained == total - 2                     # all but the first token of each text
    labels = np.concatenate([rows.row(rows.train, n)[1] for n in range(len(rows.train))])
    assert (labels != -100).sum() == total - 2


def test_the_order_is_a_permutation_in_each_epoch_and_the_same_on_any_number_of_ranks():
    rows = packed(many(), T=128, seed=3)
    n = len(rows.train)
    orders = [rows.order(np.arange(e * n, (e + 1) * n)).tolist() for e in range(3)]
    assert all(sorted(order) == list(range(n)) for order in orders) and orders[0] != orders[1]
    one = torch.cat(list(rows.step(4, 4, 2, 0, 1)))
    two = [torch.cat(list(rows.step(4, 2, 2, rank, 2))) for rank in (0, 1)]
    assert sorted(map(str, one.tolist())) == sorted(str(row) for part in two for row in part.tolist())


def test_tokens_are_those_that_are_trained():
    rows = packed(many(), T=128)
    n, total = len(rows.train), rows.train.trained
    assert rows.labels_before(0) == 0 and rows.labels_before(2 * n) == 2 * total
    for tokens in (1, total // 3, total, total + 1, 2 * total + 5):
        needed = rows.samples_for(tokens)
        assert rows.labels_before(needed - 1) < tokens <= rows.labels_before(needed)


def test_held_out_records_are_not_trained_and_evaluated_once_on_any_number_of_ranks():
    rows = packed(many(), T=128, val_fraction=0.2)
    train, val = set(rows.train.pieces[:, 0].tolist()), set(rows.val.pieces[:, 0].tolist())
    assert len(val) == 12 and not train & val and len(train | val) == 60
    for ranks in (1, 2, 3):
        batches = [list(rows.evaluation(2, rank, ranks)) for rank in range(ranks)]
        assert len({len(batch) for batch in batches}) == 1
        labels = sum(int((rows[:, 1] != -100).sum()) for batch in batches for rows in batch)
        assert labels == rows.val.trained
    twice = packed([*many(30), *many(30)], T=128, val_fraction=0.2, name="twice.jsonl")
    questions = [{bytes(twice.samples.tokens(i)[0].astype(np.uint8)) for i in split.pieces[:, 0]}
                 for split in (twice.train, twice.val)]
    assert questions[1] and not questions[0] & questions[1]    # equal records stay together
    said = []
    few = packed(many(5), T=128, val_fraction=0.02, say=said.append, name="few.jsonl")
    assert not few.val_tokens and "too few to hold one out" in "\n".join(said)


def test_evaluating_a_part_takes_about_as_many_tokens():
    rows = packed(many(200), T=128, val_fraction=0.5)
    labels = sum(int((b[:, 1] != -100).sum()) for b in rows.evaluation(1, 0, 1, rows.val.trained // 4))
    assert 0.2 < labels / rows.val.trained < 0.35


def test_best_fit_fills_rows_no_worse_than_a_simple_search():
    random = np.random.default_rng(1)
    lengths = random.integers(1, 100, 500)
    rows = data.fill_rows(lengths, 128)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(lengths[row].sum() <= 128 for row in rows)
    free: list[int] = []                                       # first fit decreasing, the textbook's
    for length in sorted(lengths.tolist(), reverse=True):
        fits = next((i for i, room in enumerate(free) if room >= length), None)
        if fits is None:
            free.append(128 - length)
        else:
            free[fits] -= length
    assert len(rows) <= len(free) + 1
