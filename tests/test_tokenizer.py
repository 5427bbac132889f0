"""tokenizer.py: ids and merges against Hugging Face `tokenizers`, files against transformers, long texts."""
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import sysconfig
import time
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import regex

import patterns
import tokenizer as ours
from config import UserError
from tokenizer import (PATTERNS, HuggingFaceTokenizer, StreamDecoder, Tokenizer, load_tokenizer,
                       train_bpe)

hf = pytest.importorskip("tokenizers", reason="pip install -r requirements-dev.txt")
REPO = Path(__file__).resolve().parent.parent

PLAIN = [
    "", " ", "\n", "a", "Hello, world! It's 3 o'clock; they'll say WE'RE late, won't you?",
    "foo_bar __init__ a__b _", "x = 1234567890 + 0x1F\n\n\n    if x:\n\t\treturn  x   \n",
    "  lead and trail  ", "\r\n\r\n mixed \r \n\t ends", "1 22  333   4444",
    "it's end.\n/x" * 20, "naïve café e\u0301 a\u0308\u0323 ﬁ ſ K I'ſ I'K",
    "Привет, мир! Ещё раз.", "你好，世界。今天天气很好。\n第二行", "こんにちは、ゲーム・センター゠ー",
    "안녕하세요 세계", "مرحبا بالعالم ١٢٣", "नमस्ते दुनिया १२३", "สวัสดีชาวโลก", "שָׁלוֹם",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 e😀é", "½ ² Ⅷ ① 𝟘𝟙", "\u3000\u00a0\u2028\u2029\x85 \u200b",
    "\x00\x01\x04\x06\x13\x14\x16\x1c\x1d\x1f\x7f", "<|endoftext|><|im_start|>user",
    "http://a.b/c?d=e&f=g//h/\n/i", "…—–“”‘’ ''''s's'll", "HTTPServer camelCase ABCdef iPhone's IT'S",
    "\U000f0000 \U0010ffff \U00040000", "a\u0558b \U00011de0 1\u20c1\u0b53c",       # newer than some tables
    "a" * 300, " " * 300 + "x", "\n" * 300 + "x",
]


@pytest.fixture(scope="session")
def sources() -> list[str]:
    """Some modules of the standard library: about 1 MB of real text."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))[:60]]


@pytest.fixture(scope="session")
def texts(sources) -> list[str]:
    """What ids are compared on: many languages, code, fuzz of characters that patterns treat differently."""
    dice = random.Random(0)
    alphabet = list("aB'sſ1²٣ \t\n\r  \n/._-!?{<|\"\u3000\x1c\x85é漢かー۳م😀\u200d") + ["e\u0301", "ll", "'re"]
    fuzz = ["".join(dice.choices(alphabet, k=dice.randint(1, 30))) for _ in range(2000)]
    code = [source[at:at + 1500] for source in sources for at in range(0, len(source), 15_000)]
    return PLAIN + code + fuzz


@pytest.fixture(scope="session", params=list(PATTERNS))
def trained(request, sources) -> Tokenizer:
    """A small vocabulary for each known way of cutting text."""
    return train_bpe(sources[:8] + PLAIN * 3, 1200, pattern=request.param)


@pytest.fixture(scope="session")
def own(sources) -> Tokenizer:
    return train_bpe(sources[:8] + PLAIN * 3, 1200)


def judge_of(tokenizer: Tokenizer, directory) -> "hf.Tokenizer":
    tokenizer.save(directory)
    judge = hf.Tokenizer.from_file(os.path.join(directory, "tokenizer.json"))
    judge.encode_special_tokens = True                # special tokens typed in text stay text, as ours do
    return judge


def assert_same_ids(tokenizer: Tokenizer, judge: "hf.Tokenizer", texts: list[str]) -> None:
    expected = [encoded.ids for encoded in judge.encode_batch(texts, add_special_tokens=False)]
    wrong = [text for text, ids in zip(texts, expected) if tokenizer.encode(text) != ids]
    assert not wrong, f"{len(wrong)} of {len(texts)} texts, first {wrong[0]!r}"


def entries(tokenizer: Tokenizer) -> list[str]:
    """Every vocabulary entry that is text by itself."""
    return [text for i in range(tokenizer.vocab_size) if i not in tokenizer.special.values()
            and "\ufffd" not in (text := tokenizer.decode([i]))]


# ---- ids and text ---------------------------------------------------------------------------------------

def test_every_known_pattern_gives_the_ids_of_hugging_face(trained, texts, tmp_path):
    judge = judge_of(trained, tmp_path)
    assert_same_ids(trained, judge, texts)
    assert_same_ids(trained, judge, entries(trained))


def test_text_survives(trained, texts):
    for text in texts:
        assert trained.decode(trained.encode(text)) == text == trained.normalize(text)


def test_bytes_are_their_own_ids():
    tokenizer = load_tokenizer("byte")
    assert tokenizer.encode("aé\n") == [97, 0xC3, 0xA9, 10]
    assert load_tokenizer("bundled").fingerprint == tokenizer.fingerprint
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (257, 256, None)
    assert tokenizer.encode_array("").dtype == np.uint16 and tokenizer.encode("") == []


def test_text_that_spells_a_special_token_stays_text(trained):
    ids = trained.encode("a<|endoftext|>b")
    assert trained.eos_id not in ids and trained.decode(ids) == "a<|endoftext|>b"
    assert trained.decode([trained.eos_id]) == "<|endoftext|>"


def test_surrogates_become_what_utf8_can_hold():
    tokenizer = load_tokenizer("byte")
    for text, expected in [("a\ud800b", "a\ufffdb"), ("\udfff", "\ufffd"), ("\ud83d\ude00!", "😀!")]:
        assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.normalize(text) == expected
    assert train_bpe(["\ud800 abab" * 9], 300, say=str).decode(tokenizer.encode("ab")) == "ab"


def test_unknown_ids_decode_to_the_replacement_character():
    tokenizer = load_tokenizer("byte")
    assert tokenizer.decode([72, 999, -1, 105, 257]) == "H\ufffd\ufffdi\ufffd"
    assert tokenizer.decode(np.array([72, 105], np.uint16)) == "Hi"
    assert tokenizer.decode([0xC3, 0x41]) == "\ufffdA"


def test_nfc_vocabularies_normalise_as_hugging_face_does(sources, texts, tmp_path):
    base = train_bpe(sources[:4] + PLAIN * 3, 800, pattern="qwen2")
    tokenizer = Tokenizer("nfc", base.ranks, base.special, 256, pattern="qwen2", nfc=True)
    assert_same_ids(tokenizer, judge_of(tokenizer, tmp_path), texts)
    assert load_tokenizer(tmp_path).nfc and tokenizer.normalize("e\u0301") == "é"
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


def test_bytes_without_a_token_vanish_as_in_hugging_face(sources, texts, tmp_path):
    """As SmolLM2 lacks some: they are dropped inside a piece, and their neighbours may merge."""
    full = train_bpe(sources[:4] + ["!!!" * 9], 700)
    ranks = {token: i for token, i in full.ranks.items() if token not in (b"\x04", b"\x13", b"\xf1")}
    tokenizer = Tokenizer("gaps", ranks, full.special, 256)
    hard = texts + ["!\x04!!", "\x04", "a\x13b \x04\x04 c", " \x04", "\U00040000"]
    assert_same_ids(tokenizer, judge_of(tokenizer, tmp_path), hard)
    assert all(tokenizer.decode(tokenizer.encode(text)) == tokenizer.normalize(text) for text in hard)
    assert tokenizer.normalize("!\x04!") == "!!"


def pieces_of_hugging_face(pre_tokenizer: dict):
    """A function that cuts a text as this part of a tokenizer.json does, without spelling its bytes."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    plain = [step for step in steps if step["type"] != "ByteLevel" or step["use_regex"]]
    spec = json.loads(hf.Tokenizer(hf.models.BPE()).to_str())
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": plain}
    cut = hf.Tokenizer.from_str(json.dumps(spec)).pre_tokenizer.pre_tokenize_str
    return lambda text: [text[begin:end] for _, (begin, end) in cut(text)]


@pytest.mark.parametrize("pattern", [*PATTERNS])
def test_every_short_text_is_cut_into_the_pieces_of_hugging_face(pattern):
    """All texts of up to three characters, one of each kind that any pattern tells apart."""
    kinds = " \t\n/'sxSé\u1d00\u0301!\u3002\u30fb\u6f22\u30fc1\u0967\u2003\u3000\u2026\x01\u3040"
    theirs = pieces_of_hugging_face(PATTERNS[pattern].pre_tokenizer)
    find = regex.compile(PATTERNS[pattern].regex)
    for length in (1, 2, 3):
        for characters in itertools.product(kinds, repeat=length):
            text = "".join(characters)
            assert find.findall(text) == theirs(text), ascii(text)


# ---- long texts -----------------------------------------------------------------------------------------

def test_a_text_in_parts_has_the_ids_of_the_whole(trained, texts, monkeypatch):
    whole = "".join(texts)
    expected = trained._encoding.encode_ordinary(whole)
    for part, longest in [(1, 1 << 18), (20, 1 << 18), (30, 0), (1000, 500)]:  # 0: `regex` splits everything
        monkeypatch.setattr(patterns, "PART", part)
        monkeypatch.setattr(ours, "LONGEST", longest)
        assert "".join(ours.parts(whole)) == whole
        assert trained.encode(whole) == expected, f"PART={part}, LONGEST={longest}"
    monkeypatch.setattr(patterns, "PART", 1)
    assert len(list(ours.parts(whole))) > len(whole) / 200


def test_a_run_of_a_million_spaces_survives_every_pattern(trained):
    """tiktoken's own regular expressions give up here: a ValueError, or a PanicException."""
    run = " " * 1_000_000 + "x"
    with pytest.raises(BaseException, match="Regex error|regex error|Max stack"):
        trained._encoding.encode(run)
    assert trained.decode(trained.encode(run)) == run


@pytest.mark.parametrize("once, end", [("a", ""), (" ", ""), (" ", "1"), ("\n", "x")],
                         ids=["letters", "spaces", "spaces before a digit", "line breaks"])
def test_a_run_of_a_million_characters_survives(once, end, own, tmp_path):
    run = once * 1_000_000 + end
    ids = own.encode(run)
    assert own.decode(ids) == run
    assert ids == judge_of(own, tmp_path).encode(run, add_special_tokens=False).ids


@pytest.mark.parametrize("alphabet", ["abcXYZ0189+/", "漢字かな交じり文。"])
def test_a_megabyte_without_a_space_survives(alphabet, own):
    line = "".join(random.Random(1).choices(alphabet, k=1_000_000 * len(alphabet) // len(alphabet.encode())))
    assert own.decode(own.encode_array(line)) == line


# ---- streaming ------------------------------------------------------------------------------------------

def test_streamed_pieces_join_to_the_decoded_text_and_never_break_a_character(trained):
    dice = random.Random(2)
    texts = ["👩‍👩‍👧‍👦 漢字 é 🇩🇪!", "".join(PLAIN)]
    streams = [trained.encode(text) for text in texts]
    streams += [dice.choices(range(trained.vocab_size + 5), k=dice.randint(0, 40)) for _ in range(500)]
    decoder = StreamDecoder(trained)                   # finish() makes it new again
    for ids in streams:
        pieces = [decoder.push(i) for i in ids] + [decoder.finish()]
        assert "".join(pieces) == trained.decode(ids)
    pieces = [decoder.push(i) for i in streams[0]]
    assert "".join(pieces) == texts[0] and "\ufffd" not in "".join(pieces)


def test_a_character_appears_with_its_last_byte():
    decoder = StreamDecoder(load_tokenizer("byte"))
    assert [decoder.push(byte) for byte in "😀é".encode()] == ["", "", "", "😀", "", "é"]
    assert decoder.push(0xE6) == "" and decoder.push(65) == "\ufffdA"
    assert decoder.push(0xE6) == "" and decoder.finish() == "\ufffd" and decoder.push(66) == "B"


# ---- what data and training ask of it -------------------------------------------------------------------

def test_token_lengths_count_the_bytes_of_the_text(trained):
    text = "".join(PLAIN)
    lengths = trained.token_lengths
    assert lengths.dtype == np.int32 and lengths.shape == (trained.vocab_size,)
    assert lengths[trained.eos_id] == 0
    assert lengths[trained.encode_array(text)].sum() == len(text.encode())


def test_fingerprint_and_contains_compare_what_ids_mean(sources):
    small, large = train_bpe(sources[:3], 400), train_bpe(sources[:3], 600)
    other = train_bpe(sources[3:6], 600)
    assert small.fingerprint == train_bpe(iter(sources[:3]), 400).fingerprint
    assert len({small.fingerprint, large.fingerprint, other.fingerprint}) == 3
    assert large.contains(small) and not small.contains(large) and not large.contains(other)
    assert all(tokenizer.contains(load_tokenizer("byte")) for tokenizer in (small, large, other))
    renamed = Tokenizer("renamed", small.ranks, {"<eos>": 256}, 256)
    assert renamed.fingerprint != small.fingerprint and not renamed.contains(small)


def test_it_reaches_spawned_workers(trained):
    copy, text = pickle.loads(pickle.dumps(trained)), "x = [1, 2]\n    y"
    assert copy.encode(text) == trained.encode(text) and copy.fingerprint == trained.fingerprint


def test_importing_it_brings_no_torch():
    code = "import sys, tokenizer; print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=REPO, text=True) == "[]\n"


# ---- training -------------------------------------------------------------------------------------------

def hugging_face_merges(texts: list[str], merges: int, pattern: str, min_frequency: int) -> list[list[str]]:
    judge = hf.Tokenizer(hf.models.BPE())
    spec = json.loads(judge.to_str()) | {"pre_tokenizer": PATTERNS[pattern].pre_tokenizer}
    judge = hf.Tokenizer.from_str(json.dumps(spec))
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    judge.train_from_iterator(texts, hf.trainers.BpeTrainer(
        vocab_size=257 + merges, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet,
        min_frequency=min_frequency, show_progress=False))
    return [list(merge) for merge in json.loads(judge.to_str())["model"]["merges"]]


def our_merges(texts, merges: int, pattern: str, min_frequency: int) -> list[list[str]]:
    tokenizer = train_bpe(texts, 257 + merges, pattern=pattern, min_frequency=min_frequency, say=str)
    return json.loads(tokenizer.to_json())["model"]["merges"]


@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_merges_are_those_of_hugging_faces_trainer(pattern, sources):
    texts = sources[:12] + PLAIN * 2
    assert our_merges(texts, 1500, pattern, 2) == hugging_face_merges(texts, 1500, pattern, 2)


def test_ties_and_runs_merge_as_in_hugging_faces_trainer():
    """Tiny alphabets: nearly every step is a tie, and runs of one character overlap with themselves."""
    dice = random.Random(3)
    for trial in range(60):
        alphabet = ["a", "ab", "ab ", "aé\n ", "aaaab\x00漢 "][trial % 5]
        texts = ["".join(dice.choices(alphabet, k=dice.randint(0, 60))) for _ in range(dice.randint(1, 8))]
        least = dice.choice([0, 1, 2, 3])
        assert our_merges(texts, 40, "gpt2", least) == hugging_face_merges(texts, 40, "gpt2", least), texts


def test_a_text_that_supports_fewer_merges_says_so():
    said = []
    tokenizer = train_bpe(["abab abab"], 4096, say=said.append)
    assert tokenizer.vocab_size == 259 and len(tokenizer.encode("abab")) == 1
    assert said == ["The text supports 2 merges (no other pair occurs 2 times): "
                    "vocab_size is 259 instead of 4,096."]
    assert train_bpe([], 300, say=said.append).vocab_size == 257


def test_indentation_is_one_token_and_digits_are_single(sources):
    tokenizer = train_bpe(sources, 2000)
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("x:\n        return 2024")]
    assert pieces == ["x", ":", "\n       ", " return", " ", "2", "0", "2", "4"]


def test_special_tokens_follow_the_bytes():
    tokenizer = train_bpe(["abab " * 9], 280, special_tokens=["<|end|>", "<|user|>"], say=str)
    assert tokenizer.special == {"<|end|>": 256, "<|user|>": 257} and tokenizer.eos_id == 256
    assert min(i for token, i in tokenizer.ranks.items() if len(token) > 1) == 258
    with pytest.raises(UserError, match="vocab_size=256 with 1 special tokens.*>= 257"):
        train_bpe(["a"], 256)
    with pytest.raises(UserError, match="'abab' is also a piece"):
        train_bpe(["abab " * 9], 280, special_tokens=["abab"])


def test_four_thousand_merges_take_seconds(sources):
    texts = sources * 4
    began = time.process_time()
    train_bpe(texts, 4096)
    assert time.process_time() - began < 10


# ---- files ----------------------------------------------------------------------------------------------

def test_a_saved_tokenizer_comes_back_the_same(trained, texts, tmp_path):
    trained.chat_template = "{{ messages }}"
    trained.save(tmp_path / "a")
    for source in (tmp_path / "a", str(tmp_path / "a" / "tokenizer.json")):
        loaded = load_tokenizer(source)
        assert loaded.fingerprint == trained.fingerprint and loaded.pattern == trained.pattern
        assert (loaded.eos_id, loaded.bos_id, loaded.pad_id) == (256, None, 256)
        assert loaded.chat_template == "{{ messages }}"
        assert all(loaded.encode(text) == trained.encode(text) for text in texts)
    loaded.save(tmp_path / "b")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(os.listdir(tmp_path / "b")) == ["tokenizer.json", "tokenizer_config.json"]
    trained.chat_template = None


@pytest.mark.parametrize("model_type", [None, "llama", "qwen3", "gpt2"])
def test_transformers_reads_a_saved_directory_with_the_same_ids(model_type, sources, oracle, tmp_path):
    tokenizer = train_bpe(sources[:6] + PLAIN, 1000)
    tokenizer.save(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    (tmp_path / "texts.json").write_text(json.dumps(PLAIN), encoding="utf-8")
    answer = json.loads(oracle.run("""
import json
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(".")
texts = json.load(open("texts.json", encoding="utf-8"))
ids = [tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) for text in texts]
print(json.dumps({"ids": ids, "texts": [tokenizer.decode(row) for row in ids], "eos": tokenizer.eos_token_id,
                  "pad": tokenizer.pad_token_id, "bos": tokenizer.bos_token_id, "size": len(tokenizer),
                  "special": tokenizer.encode("a<|endoftext|>", add_special_tokens=False)[-1]}))
""", tmp_path))
    assert answer["ids"] == [tokenizer.encode(text) for text in PLAIN] and answer["texts"] == PLAIN
    assert (answer["eos"], answer["pad"], answer["size"], answer["special"]) == (256, 256, 1000, 256)


def write(directory: Path, spec: dict, **files: dict) -> Path:
    """A tokenizer directory: tokenizer.json and, by their stems, other JSON files."""
    directory.mkdir(exist_ok=True)
    for stem, content in {"tokenizer": spec, **files}.items():
        (directory / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


@pytest.fixture
def spec() -> dict:
    """A small tokenizer.json that we can read, to be spoilt."""
    special = ["<|endoftext|>", "<|user|>"]
    tokenizer = train_bpe(["the cat the hat " * 9], 270, special_tokens=special, say=str)
    return json.loads(tokenizer.to_json())


def test_eos_comes_from_the_files_beside_and_is_never_guessed(spec, tmp_path):
    def load(**files):
        return load_tokenizer(write(tmp_path / str(len(os.listdir(tmp_path))), spec, **files))
    assert load(tokenizer_config={"eos_token": "<|user|>"}).eos_id == 257
    user = {"content": "<|user|>", "lstrip": False}
    assert load(tokenizer_config={"eos_token": user}, config={"eos_token_id": 256}).eos_id == 257
    assert load(config={"eos_token_id": 257, "bos_token_id": 256}).bos_id == 256
    several = load(config={"eos_token_id": 256, "pad_token_id": None},
                   generation_config={"eos_token_id": [257, 256]})
    assert several.eos_id == 257 and several.pad_id is None
    with pytest.raises(UserError, match=r"which token ends a text.*<\|endoftext\|>, <\|user\|>"):
        load(tokenizer_config={})
    with pytest.raises(UserError, match="name 'nobody' as eos_token"):
        load(tokenizer_config={"eos_token": "nobody"})
    with pytest.raises(UserError, match="name 'the' as eos_token, which is ordinary text"):
        load(tokenizer_config={"eos_token": "the"})


def test_the_chat_template_is_found_in_either_file(spec, tmp_path):
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    settings = {"eos_token": "<|user|>", "chat_template": named}
    assert load_tokenizer(write(tmp_path, spec, tokenizer_config=settings)).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("{{ jinja }}\n", encoding="utf-8", newline="")
    assert load_tokenizer(tmp_path).chat_template == "{{ jinja }}\n"


def test_entries_that_no_merge_makes_are_decoded_but_not_found(spec, tmp_path):
    spec["model"]["vocab"]["zebra"] = 270
    texts = ["zebra", "a zebra", "the cat zebra the hat"]
    for ignore in (False, True):                # Hugging Face looks whole pieces up only with ignore_merges
        spec["model"]["ignore_merges"] = ignore
        directory = write(tmp_path, spec, tokenizer_config={"eos_token": "<|endoftext|>"})
        tokenizer = load_tokenizer(directory)
        judge = hf.Tokenizer.from_file(str(directory / "tokenizer.json"))
        assert_same_ids(tokenizer, judge, texts)
        assert (270 in tokenizer.encode("zebra")) == ignore and tokenizer.decode([270]) == "zebra"
        assert tokenizer.vocab_size == 271 and tokenizer.token_lengths[270] == 5


@pytest.fixture
def unknown(spec) -> list[tuple[dict, str]]:
    """Changes of a tokenizer.json that tiktoken cannot run with the same ids, and what is said of each."""
    metaspace = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}
    odd_split = {"type": "Split", "pattern": {"Regex": r"\w+|\W+"}, "behavior": "Isolated", "invert": False}
    gpt2 = PATTERNS["gpt2"].pre_tokenizer
    sequence = {"type": "Sequence", "pretokenizers": [odd_split, gpt2]}
    model, merges = spec["model"], spec["model"]["merges"]
    vocab = {entry: i for entry, i in model["vocab"].items() if i < 258}       # bytes and special tokens
    crossed = {"vocab": vocab | {"ab": 258, "bc": 259, "abc": 260},            # "abc" is found as ab + c
               "merges": [["a", "b"], ["b", "c"], ["a", "bc"]]}
    return [
        ({"pre_tokenizer": metaspace}, "pre_tokenizer that we do not know.*Metaspace"),
        ({"pre_tokenizer": sequence}, r"pre_tokenizer.*\\w\+"),
        ({"pre_tokenizer": {**gpt2, "add_prefix_space": True}}, "pre_tokenizer.*add_prefix_space"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer that we do not know.*Lowercase"),
        ({"model": {**model, "end_of_word_suffix": "</w>"}}, "model.end_of_word_suffix"),
        ({"model": {**model, "merges": merges[::-1]}}, "merge whose result has a lower id"),
        ({"model": {**model, "merges": merges[1:]}}, "without the pairs that make"),
        ({"model": {**model, **crossed}}, r"without the pairs that make 1 entries first.*\["),
        ({"model": {**model, **crossed, "ignore_merges": True}}, "without the pairs that make 1 entries"),
        ({"added_tokens": spec["added_tokens"] + [ADDED | {"id": 300, "content": "    "}]},
         "added token that is no special one.*    "),
    ]


ADDED = {"special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def test_an_entry_made_of_one_that_no_merge_makes_is_not_found(spec, tmp_path):
    spec["model"]["vocab"] |= {"zebra": 270, "zebras": 271, "azebra": 272}
    spec["model"]["merges"] += [["zebra", "s"], ["a", "zebra"]]
    tokenizer = load_tokenizer(write(tmp_path, spec, tokenizer_config={"eos_token": "<|endoftext|>"}))
    assert type(tokenizer) is Tokenizer and len(tokenizer.decode_only) == 3
    judge = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert_same_ids(tokenizer, judge, ["zebras", "azebra", "zebra zebras", "the azebras"])


def test_what_we_do_not_know_is_run_by_hugging_face_or_refused_by_name(spec, unknown, tmp_path, monkeypatch):
    texts = [*PLAIN[:-3], "the cat the hat", "abc abcabc", "a    b the", "THE cat"]
    eos = {"eos_token": "<|endoftext|>"}
    for i, (change, message) in enumerate(unknown):
        directory = write(tmp_path / str(i), spec | change, tokenizer_config=eos)
        tokenizer = load_tokenizer(directory)
        assert type(tokenizer) is HuggingFaceTokenizer, message
        judge = hf.Tokenizer.from_file(str(directory / "tokenizer.json"))
        judge.encode_special_tokens = True
        assert_same_ids(tokenizer, judge, texts)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for i, (_, message) in enumerate(unknown):
        with pytest.raises(UserError, match=f"{message}.*pip install tokenizers"):
            load_tokenizer(tmp_path / str(i))


def test_a_file_that_nobody_can_read_is_refused(spec, tmp_path):
    model, eos = spec["model"], {"eos_token": "<|endoftext|>"}
    for change, message in [
        ({"model": {"type": "BPE"}}, "not a tokenizer.json that we can read.*vocab"),
        ({"model": {**model, "merges": [*model["merges"], ["z", "z"]]}}, "not a tokenizer.json.*zz"),
        ({"model": {**model, "type": "Mine"}}, "not a tokenizer.json that we can read"),
    ]:
        with pytest.raises(UserError, match=message):
            load_tokenizer(write(tmp_path, spec | change, tokenizer_config=eos))


def test_markup_stays_text_even_where_it_is_no_special_token(spec, tmp_path):
    """Hugging Face finds such tokens in what a user typed; here only templates put them."""
    names = ["<think>", "</tool_call>", "<dsml:", "\uff5cDSML\uff5c"]
    spec["added_tokens"] += [ADDED | {"id": 300 + i, "content": name} for i, name in enumerate(names)]
    tokenizer = load_tokenizer(write(tmp_path, spec, tokenizer_config={"eos_token": "<|endoftext|>"}))
    assert type(tokenizer) is Tokenizer and [tokenizer.special[name] for name in names] == [*range(300, 304)]
    for text in names:
        assert max(tokenizer.encode(text)) < 270 and tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind, opens", [("template", [256, 257]), ("sequence", [256, 257]),
                                         ("bert", [257]), ("bytes", []), (None, [])])
def test_the_opening_is_what_the_file_puts_before_a_text(kind, opens, spec, tmp_path):
    tokens = {name: {"id": name, "ids": [i], "tokens": [name]}
              for name, i in [("<|endoftext|>", 256), ("<|user|>", 257)]}
    template = hf.processors.TemplateProcessing("<|endoftext|> <|user|> $A <|endoftext|>", special_tokens=[
        (name, token["ids"][0]) for name, token in tokens.items()])
    bytelevel = hf.processors.ByteLevel()
    processor = {"template": template, "sequence": hf.processors.Sequence([bytelevel, template]),
                 "bert": hf.processors.BertProcessing(("<|endoftext|>", 256), ("<|user|>", 257)),
                 "bytes": bytelevel, None: None}[kind]
    spec["post_processor"] = processor and json.loads(processor.__getstate__())
    settings = {"eos_token": "<|endoftext|>", "bos_token": "<|user|>"}         # naming one is not putting it
    tokenizer = load_tokenizer(write(tmp_path, spec, tokenizer_config=settings))
    judge = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.opening == opens
    assert judge.encode("the cat").ids[:len(opens) + 1] == [*opens, tokenizer.encode("the cat")[0]]
    ours_ = Tokenizer("again", tokenizer.ranks, tokenizer.special, 256, opening=opens)
    ours_.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").opening == opens


def test_an_older_file_without_use_regex_and_with_merges_as_strings_is_read(spec, tmp_path):
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    spec["model"]["merges"] = [" ".join(merge) for merge in spec["model"]["merges"]]
    tokenizer = load_tokenizer(write(tmp_path, spec, tokenizer_config={"eos_token": "<|endoftext|>"}))
    judge = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert_same_ids(tokenizer, judge, ["the hat 123", "cat\n\n  the"])


def test_any_small_set_of_merges_has_the_ids_of_hugging_face(tmp_path):
    """Ranks that no training would give: tiktoken's way and Hugging Face's agree, or theirs is run."""
    dice, kinds = random.Random(4), []
    base = json.loads(load_tokenizer("byte").to_json())
    for trial in range(300):
        tokens, merges = list("abc"), []
        while len(merges) < dice.randint(1, 12):
            pair = dice.choices(tokens, k=2)
            merges.append(pair) if pair not in merges else None
            tokens = list(dict.fromkeys([*tokens, "".join(pair)]))
        made = {token: 254 + i for i, token in enumerate(tokens) if len(token) > 1}
        vocab = {**base["model"]["vocab"], **made}
        if trial % 3 == 0:
            merges.sort(key=lambda pair: vocab["".join(pair)])
        if trial % 4 == 0:
            vocab["cab"] = vocab.get("cab", 300)
        model = {**base["model"], "vocab": vocab, "merges": merges, "ignore_merges": trial % 2 == 0}
        tokenizer = load_tokenizer(write(tmp_path, {**base, "model": model}))
        judge = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert_same_ids(tokenizer, judge, ["".join(dice.choices("abc", k=n)) for n in range(1, 30)])
        kinds.append(type(tokenizer))
    assert kinds.count(Tokenizer) > 100 and kinds.count(HuggingFaceTokenizer) > 50


def test_what_is_not_there_is_said_in_a_sentence(tmp_path, monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise ConnectionError("no network")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    (tmp_path / "empty").mkdir()
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "merges.txt").write_text("", encoding="utf-8")
    (tmp_path / "broken.json").write_text('{"model": ', encoding="utf-8")
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    for source, message in [
        ("nothing-here", "No tokenizer 'nothing-here': it is neither a file nor a directory here"),
        ("no/such/path", "No tokenizer 'no/such/path'"),
        ("some-org/some-model", "Hugging Face Hub did not give it .ConnectionError."),
        (tmp_path / "empty", "tokenizer.json is missing"),
        (tmp_path / "slow", "tokenizer.json is missing .it has merges.txt"),
        (tmp_path / "broken.json", "Cannot read .*broken.json as JSON"),
        (tmp_path / "list.json", "holds a JSON list"),
        (object(), "not as object"),
    ]:
        with pytest.raises(UserError, match=message):
            load_tokenizer(source)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        load_tokenizer("some-org/some-model")
