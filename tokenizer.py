r"""
Text to token ids and back: one `Tokenizer`, whatever it was made from.

    tokenizer = load_tokenizer("byte")               256 bytes and <|endoftext|>: always there
    tokenizer = load_tokenizer("gpt2")               tiktoken's: gpt2, cl100k_base, o200k_base, ...
    tokenizer = load_tokenizer("out/my-model")       a directory with tokenizer.json (model or corpus)
    tokenizer = load_tokenizer("org/name")           the Hugging Face Hub, with huggingface_hub and a network
    tokenizer = train_bpe(texts, vocab_size=4096)    our own
    ids = tokenizer.encode("def f(x):"); text = tokenizer.decode(ids); tokenizer.save("directory")

Every one of them is byte-level BPE: a regular expression cuts the text into pieces, and inside a piece
neighbouring tokens merge, the pair of the lowest rank first. tiktoken runs it; the ids are those of Hugging
Face `tokenizers` on the same tokenizer.json, and a file with a part that we do not know is refused rather
than approximated.

Layout of our own vocabularies: byte b has id b, special tokens follow from 256, then the merges in the
order in which they were learned. So <|endoftext|> is always 256, and data tokenized with "byte" fits every
vocabulary that we train.
"""
import codecs
import hashlib
import heapq
import json
import os
import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import numpy as np
import regex
import tiktoken

from config import UserError

END = "<|endoftext|>"
UNKNOWN = "\ufffd".encode()      # what an id without a token decodes to: padding, or a gap of the vocabulary

# ---- how text is cut into pieces ------------------------------------------------------------------------

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = {**_BYTES, "use_regex": True}
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"      # a word takes the character before it along
_CAMEL = f"{_WORD}{_UPPER}*{_LOWER}+{_SHORT}?|{_WORD}{_UPPER}+{_LOWER}*{_SHORT}?"


def _split(pattern: str) -> dict:
    """The pre-tokenizer of a tokenizer.json that cuts at the matches of one regular expression."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTES]}


# name: (the pattern that tiktoken runs, the `pre_tokenizer` of tokenizer.json that cuts the same way). The
# possessive forms (++) cut as the plain ones do, without keeping a way back for every character of a long
# run. None looks behind, and each covers every character: tiktoken silently drops what no alternative
# matches.
PATTERNS = {
    "gpt2": (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s", _GPT2),
    # SmolLM2: as GPT-2, but a digit stands alone, and space before one is cut as if the text ended there
    "smollm": (r"'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?![^\s\p{N}])|\s",
               {"type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2]}),
    # GPT-4 and Llama 3
    "cl100k": (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
               r"\s++$|\s*[\r\n]|\s+(?!\S)|\s",
               _split(_SHORT + "|" + _WORD + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES)),
    # Qwen 2, 2.5 and 3: as cl100k with single digits
    "qwen2": (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
              r"\s++$|\s*[\r\n]|\s+(?!\S)|\s",
              _split(_SHORT + "|" + _WORD + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES)),
    # GPT-4o and GPT-OSS: words also end where lower case meets upper case
    "o200k": (_CAMEL + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s++$|\s*[\r\n]+|\s+(?!\S)|\s",
              _split(_CAMEL + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES)),
}
# For the vocabularies that we train: a line break and the indentation after it are one piece ("\n        "
# becomes one token, which is what source code needs), and numbers are spelled digit by digit, so equal
# digits are equal tokens.
OWN_PATTERN = "smollm"

# The regular expressions need memory for every character of a run and fail after a million of them, so a
# long text is cut where every pattern above cuts anyway and none looks across: before a space that ends a
# word, after the break of a line that ends with text, and before some punctuation after an ASCII letter or
# digit (minified files have little else). Python's \S is narrower than tiktoken's, which only makes us cut
# more rarely.
PART = 1 << 16         # characters; a part ends at the first cut from here on
LONGEST = 1 << 18      # a longer part (no cut was found) is split by `regex`: slower, without that limit
_CUT = re.compile(r"(?<=\S)(?= )|(?<=\S\n)(?=[^\s/])|(?<=[A-Za-z0-9])(?=[\"(),:;<>=\[\]{}])")


def parts(text: str) -> Iterator[str]:
    """The text in parts of about PART characters whose ids, one after another, are those of the whole."""
    begin = 0
    while len(text) - begin > PART:
        cut = _CUT.search(text, begin + PART)
        if cut is None:
            break
        yield text[begin:cut.start()]
        begin = cut.start()
    yield text[begin:] if begin else text


def _without_surrogates(text: str) -> str:
    """Pairs of surrogates become the character that they spell, lone ones U+FFFD: UTF-8 has neither."""
    try:
        text.isascii() or text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ---- bytes as tokenizer.json spells them ----------------------------------------------------------------

# GPT-2 wrote each byte as one printable character: the visible ones of Latin-1 stand for themselves, the
# others are moved to U+0100 and up, in order. A vocabulary sorts bytes by these characters.
BYTE_ORDER = [b for b in range(256) if chr(b).isprintable() and b != 32]
BYTE_ORDER += [b for b in range(256) if b not in BYTE_ORDER]
_SPELLED = {b: chr(b) if i < 188 else chr(256 + i - 188) for i, b in enumerate(BYTE_ORDER)}
_BYTE = {character: b for b, character in _SPELLED.items()}
_IN_UTF8 = [b for b in range(256) if b not in (0xC0, 0xC1) and b < 0xF5]


def _spell(token: bytes) -> str:
    return "".join([_SPELLED[b] for b in token])


def _unspell(entry: str) -> bytes:
    return bytes([_BYTE[character] for character in entry])    # KeyError: the vocabulary is not byte-level


# ---- the tokenizer --------------------------------------------------------------------------------------

class Tokenizer:
    """
    ranks: bytes of a token -> its id, which is also its merge priority. special: spelling -> id; text never
    becomes one of these, whatever it spells. decode_only: entries that a vocabulary holds but no text
    reaches. pattern: a key of PATTERNS. nfc: text is normalised to NFC first (the Qwen families). source:
    the tokenizer.json that it was read from, which `save` writes back unchanged.
    """

    def __init__(self, name: str, ranks: dict[bytes, int], special: dict[str, int], eos_id: int,
                 bos_id: int | None = None, pad_id: int | None = None, *, pattern: str = OWN_PATTERN,
                 decode_only: dict[bytes, int] | None = None, nfc: bool = False,
                 chat_template: str | None = None, source: bytes | None = None):
        self.name, self.ranks, self.special, self.pattern, self.nfc = name, ranks, special, pattern, nfc
        self.eos_id, self.bos_id, self.pad_id = eos_id, bos_id, pad_id
        self.chat_template, self.source = chat_template, source
        table = {i: token for token, i in [*ranks.items(), *(decode_only or {}).items()]}
        table |= {i: spelling.encode() for spelling, i in special.items()}
        self.vocab_size = max(table) + 1
        self._table = [table.get(i) for i in range(self.vocab_size)]     # None where no token has this id
        self._missing = bytes(b for b in range(256) if bytes([b]) not in ranks)
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        self._encoding = tiktoken.Encoding(f"{name} (lignite)", pat_str=PATTERNS[pattern][0],
                                           mergeable_ranks=ranks, special_tokens=special)

    def __repr__(self) -> str:
        return f"<Tokenizer {self.name!r}, {self.vocab_size:,} ids>"

    def normalize(self, text: str) -> str:
        """
        What `decode(encode(text))` gives back. That is the text itself, except that lone surrogates become
        U+FFFD, that some vocabularies want the NFC form, and that bytes without a token vanish, as they do
        in Hugging Face (SmolLM2 has none for six control characters and two bytes of unassigned planes).
        """
        text = self._canonical(text)
        data = text.encode()
        return data.translate(None, self._missing).decode("utf-8", "replace") if self._lacks(data) else text

    def _canonical(self, text: str) -> str:
        text = _without_surrogates(text)
        return unicodedata.normalize("NFC", text) if self.nfc else text

    def _lacks(self, data: bytes) -> bool:
        return bool(self._missing) and len(data.translate(None, self._missing)) < len(data)

    def encode(self, text: str) -> list[int]:
        """The ids of plain text, without bos or eos. Text that spells a special token stays text."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """As `encode`; uint16 where every id of the vocabulary fits, else uint32. Text of any length."""
        ids = [self._encode_part(part) for part in parts(self._canonical(text))]
        return (ids[0] if len(ids) == 1 else np.concatenate(ids)).astype(self._dtype)

    def _encode_part(self, part: str) -> np.ndarray:
        core = self._encoding._core_bpe
        if len(part) <= LONGEST and not (self._missing and self._lacks(part.encode())):
            return np.frombuffer(core.encode_to_tiktoken_buffer(part, set()), np.uint32)
        ids = []
        for piece in regex.finditer(PATTERNS[self.pattern][0], part):
            data = piece.group().encode().translate(None, self._missing)
            ids += core.encode_single_piece(data) if data else []
        return np.array(ids, np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, special tokens spelled out; U+FFFD for unknown ids and broken UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the ids; those of U+FFFD for an id that the vocabulary does not have."""
        table, size = self._table, self.vocab_size
        return b"".join([UNKNOWN if not 0 <= i < size or table[i] is None else table[i] for i in ids])

    @cached_property
    def token_lengths(self) -> np.ndarray:
        """int32 [vocab_size]: bytes of text per id, 0 for special tokens and gaps (for bits per byte)."""
        lengths = np.array([len(token or b"") for token in self._table], np.int32)
        lengths[list(self.special.values())] = 0
        return lengths

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the table id -> bytes (special tokens as spelled): equal when all ids mean the same."""
        digest = hashlib.sha256()
        for i, token in enumerate(self._table):
            if token is not None:
                digest.update(b"%d %d " % (i, len(token)) + token)
        return digest.hexdigest()[:16]

    def contains(self, other: "Tokenizer") -> bool:
        """Whether every id of the other means the same here, so that its data can train this one's model."""
        return other.vocab_size <= self.vocab_size and all(
            theirs in (None, ours) for theirs, ours in zip(other._table, self._table))

    def save(self, directory: str) -> None:
        """Writes tokenizer.json and tokenizer_config.json, with which transformers gives the same ids."""
        os.makedirs(directory, exist_ok=True)
        names = {"eos_token": self.eos_id, "bos_token": self.bos_id, "pad_token": self.pad_id}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings |= {key: self.decode([i]) for key, i in names.items() if i is not None}
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        _replace(os.path.join(directory, "tokenizer.json"), self.source or _to_json(self))
        _replace(os.path.join(directory, "tokenizer_config.json"), json.dumps(settings, indent=2).encode())


class StreamDecoder:
    """Text from ids that come one by one, never half a character; all pieces + finish() are decode(ids)."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this id completes; "" while one is still open."""
        return self._utf8.decode(self._tokenizer.decode_bytes([token_id]))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed. The decoder then starts afresh."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def _replace(path: str, content: bytes) -> None:
    with open(path + ".tmp", "wb") as file:
        file.write(content)
    os.replace(path + ".tmp", path)            # readers see the old file or the new one, never a half


# ---- loading --------------------------------------------------------------------------------------------

_TIKTOKEN_URL = "https://openaipublic.blob.core.windows.net/"
_TIKTOKEN = {                      # name: (key of PATTERNS, the files that tiktoken fetches)
    "gpt2": ("gpt2", ["gpt-2/encodings/main/vocab.bpe", "gpt-2/encodings/main/encoder.json"]),
    "r50k_base": ("gpt2", ["encodings/r50k_base.tiktoken"]),
    "p50k_base": ("gpt2", ["encodings/p50k_base.tiktoken"]),
    "cl100k_base": ("cl100k", ["encodings/cl100k_base.tiktoken"]),
    "o200k_base": ("o200k", ["encodings/o200k_base.tiktoken"]),
    "o200k_harmony": ("o200k", ["encodings/o200k_base.tiktoken"]),
}


def load_tokenizer(source: str | os.PathLike | Tokenizer) -> Tokenizer:
    """
    "byte" (or "bundled"), a name of tiktoken, a directory with tokenizer.json, the path of such a file, or
    a Hub id; a Tokenizer is given back as it is. Nothing is trained or guessed: UserError where the source
    lacks what is needed.
    """
    if isinstance(source, Tokenizer):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise UserError(f"A tokenizer is given by name or path, not as {type(source).__name__}: save it as "
                        "tokenizer.json and pass its directory.")
    source = os.fspath(source)
    if source in ("byte", "bundled"):
        return Tokenizer("byte", {bytes([b]): b for b in range(256)}, {END: 256}, eos_id=256, pad_id=256)
    if source in _TIKTOKEN:
        return _from_tiktoken(source)
    if os.path.isdir(source):
        return _from_directory(source)
    if os.path.isfile(source):
        return _from_file(source)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        return _from_hub(source)
    raise UserError(f"No tokenizer {source!r}: it is neither a file nor a directory here, nor one of byte, "
                    f"{', '.join(_TIKTOKEN)}.")


def _from_tiktoken(name: str) -> Tokenizer:
    pattern, files = _TIKTOKEN[name]
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:     # no network (an exception of requests), a full disk, a wrong hash
        cache = (os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
                 or os.path.join(tempfile.gettempdir(), "data-gym-cache"))
        urls = [_TIKTOKEN_URL + file for file in files]
        needs = " and ".join(f"{url} as {hashlib.sha1(url.encode()).hexdigest()}" for url in urls)
        raise UserError(f"The vocabulary of {name!r} is not here and could not be fetched "
                        f"({type(error).__name__}): put {needs} into {cache} (the environment variable "
                        "TIKTOKEN_CACHE_DIR names another directory), or pass the path of a "
                        "tokenizer.json.") from error
    special = encoding._special_tokens
    return Tokenizer(name, encoding._mergeable_ranks, special, special[END], pad_id=special[END],
                     pattern=pattern)


def _from_hub(repo: str) -> Tokenizer:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"No directory {repo!r} here; to read it from the Hugging Face Hub: "
                        "pip install huggingface_hub.") from None
    try:
        directory = snapshot_download(repo, allow_patterns=["tokenizer.json", "*config.json", "*.jinja"])
    except Exception as error:     # many kinds: no network, no such repository, no permission
        raise UserError(f"No directory {repo!r} here, and the Hugging Face Hub did not give it "
                        f"({type(error).__name__}): download its tokenizer.json and tokenizer_config.json "
                        "elsewhere and pass their directory.") from error
    return _from_directory(directory, name=repo)


def _from_directory(directory: str, name: str | None = None) -> Tokenizer:
    path = os.path.join(directory, "tokenizer.json")
    if not os.path.isfile(path):
        others = [n for n in ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
                  if os.path.isfile(os.path.join(directory, n))]
        hint = f" (it has {', '.join(others)}; transformers' save_pretrained writes tokenizer.json)"
        raise UserError(f"No tokenizer in {directory}: tokenizer.json is missing{hint if others else ''}.")
    return _from_file(path, name or os.path.basename(os.path.abspath(directory)))


def _read_json(path: str) -> dict:
    """A JSON object; {} where there is no such file."""
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read())
    except (ValueError, OSError) as error:         # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise UserError(f"Cannot read {path} as JSON: {error}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a JSON {type(content).__name__} where an object is needed.")
    return content


def _from_file(path: str, name: str | None = None) -> Tokenizer:
    """tokenizer.json, with what the files beside it say about eos, bos, pad and the chat template."""
    spec = _read_json(path)
    try:
        nfc, pattern, ranks, decode_only, special = _read_spec(spec, path)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a tokenizer.json that we can read "
                        f"({type(error).__name__}: {error}).") from error
    directory = os.path.dirname(os.path.abspath(path))
    settings = _read_json(os.path.join(directory, "tokenizer_config.json"))
    ids = _named_ids(settings, directory, special, {**ranks, **decode_only})
    if ids["eos"] is None and len(special) == 1:
        ids["eos"] = next(iter(special.values()))      # the only special token there is
    if ids["eos"] is None:
        raise UserError(f"{path} does not say which token ends a text: name one as \"eos_token\" in "
                        "tokenizer_config.json beside it (its special tokens: "
                        f"{', '.join(list(special)[:20]) or 'none'}).")
    with open(path, "rb") as file:
        source = file.read()
    return Tokenizer(name or path, ranks, special, ids["eos"], ids["bos"], ids["pad"], pattern=pattern,
                     decode_only=decode_only, nfc=nfc, chat_template=_chat_template(settings, directory),
                     source=source)


def _named_ids(settings: dict, directory: str, special: dict[str, int],
               ranks: dict[bytes, int]) -> dict[str, int | None]:
    """eos, bos, pad: as tokenizer_config.json spells them, else the ids of (generation_)config.json."""
    known = set(special.values()) | set(ranks.values())
    models = [_read_json(os.path.join(directory, n)) for n in ("generation_config.json", "config.json")]
    ids: dict[str, int | None] = {}
    for name in ("eos", "bos", "pad"):
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            ids[name] = special.get(token, ranks.get(token.encode()))
            if ids[name] is None:
                raise UserError(f"tokenizer_config.json in {directory} names {token!r} as {name}_token, "
                                "which tokenizer.json does not have.")
            if name == "eos" and token not in special:
                raise UserError(f"tokenizer_config.json in {directory} names {token!r} as eos_token, which "
                                "is ordinary text: add it to the added_tokens of tokenizer.json.")
            continue
        found = [model[f"{name}_token_id"] for model in models if model.get(f"{name}_token_id") is not None]
        found = found[0] if found and isinstance(found[0], list) else found        # some name several
        ids[name] = found[0] if found and found[0] in known else None
    return ids


def _chat_template(settings: dict, directory: str) -> str | None:
    path = os.path.join(directory, "chat_template.jinja")
    if os.path.isfile(path):
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    template = settings.get("chat_template")
    if isinstance(template, list):                 # several by name: the one that transformers takes unasked
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


# ---- tokenizer.json, read and written -------------------------------------------------------------------

def _read_spec(spec: dict, path: str) -> tuple[bool, str, dict, dict, dict]:
    """(nfc, pattern, ranks, decode_only, special) of a file; UserError names a part that we do not know."""
    def refuse(part: str, value: object):
        text = json.dumps(value, ensure_ascii=False)
        raise UserError(f"{path} has a {part} that we do not know, and approximating it would give other "
                        f"ids: {text[:300]}{'...' if len(text) > 300 else ''}.")

    normalizer, model, cut = spec.get("normalizer"), spec["model"], _plain(spec.get("pre_tokenizer"))
    if normalizer not in (None, {"type": "NFC"}):
        refuse("normalizer", normalizer)
    pattern = next((name for name, (_, known) in PATTERNS.items() if _plain(known) == cut), None)
    if pattern is None:
        refuse("pre_tokenizer", cut)
    if model.get("type", "BPE") != "BPE":
        refuse("model", model["type"])
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            refuse(f"model.{key}", model[key])
    added = spec.get("added_tokens") or []
    special = {token["content"]: token["id"] for token in added}
    # Hugging Face finds these in plain text; markup is for templates to insert, anything else is text
    in_text = [token["content"] for token in added
               if not token.get("special") and not re.fullmatch(r"<\S+>", token["content"])]
    if in_text:
        refuse("added token that is no special one", in_text[:5])
    vocab = {_unspell(entry): i for entry, i in model["vocab"].items() if entry not in special}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if model.get("unk_token") and any(bytes([b]) not in vocab for b in _IN_UTF8):
        refuse("model.unk_token that stands for bytes without an entry", model["unk_token"])
    made = [vocab.get(_unspell(left) + _unspell(right)) for left, right in merges]
    # tiktoken merges by id: the lowest id of all pairs that make a token
    for i, (merge, result) in enumerate(zip(merges, made)):
        if result is None:
            refuse("merge whose result is not in the vocabulary", merge)
        if i and result < made[i - 1]:
            refuse("merge whose result has a lower id than the one before", merge)
    if model.get("ignore_merges"):
        return bool(normalizer), pattern, vocab, {}, special
    # tiktoken looks a whole piece up before it merges; here Hugging Face does not, so an entry that no
    # merge makes must not be found
    made = set(made)
    ranks = {token: i for token, i in vocab.items() if len(token) == 1 or i in made}
    decode_only = {token: i for token, i in vocab.items() if token not in ranks}
    lost = _not_rebuilt(ranks)
    if lost:
        refuse(f"set of merges that does not build {len(lost)} entries", [_spell(t) for t in lost[:5]])
    # tiktoken merges any pair that makes a token, Hugging Face only the pairs that are listed
    listed = {(_unspell(left), _unspell(right)) for left, right in merges}
    other = [pair for pair in _merges(ranks)[0] if pair not in listed]
    if other:
        refuse(f"set of merges without the pairs that make {len(other)} entries first",
               [[_spell(left), _spell(right)] for left, right in other[:5]])
    return bool(normalizer), pattern, ranks, decode_only, special


def _plain(part: object) -> object:
    """A pre-tokenizer without what cannot change ids, and with the default that older files leave out."""
    if isinstance(part, dict):
        part = {"use_regex": True, **part} if part.get("type") == "ByteLevel" else part
        return {key: _plain(value) for key, value in part.items() if key != "trim_offsets"}
    return [_plain(value) for value in part] if isinstance(part, list) else part


def _not_rebuilt(ranks: dict[bytes, int]) -> list[bytes]:
    """
    The tokens whose own bytes merge into something else. The byte 0xFF never occurs in UTF-8, so usually no
    token joins with it: behind a token it keeps tiktoken from looking the whole piece up.
    """
    if sum(b"\xff" in token for token in ranks) != 1:
        return []
    core = tiktoken.Encoding("probe", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={})._core_bpe
    end = ranks[b"\xff"]
    return [token for token, i in ranks.items()
            if token != b"\xff" and core.encode_single_piece(token + b"\xff") != [i, end]]


def _to_json(tokenizer: Tokenizer) -> bytes:
    merges, unmade = _merges(tokenizer.ranks)
    vocab = {_spell(token): i for token, i in tokenizer.ranks.items()} | tokenizer.special
    added = [{"id": i, "content": spelling, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True}
             for spelling, i in sorted(tokenizer.special.items(), key=lambda item: item[1])]
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "NFC"} if tokenizer.nfc else None,
        "pre_tokenizer": PATTERNS[tokenizer.pattern][1],
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": unmade,
                  "vocab": dict(sorted(vocab.items(), key=lambda item: item[1])),
                  "merges": [[_spell(left), _spell(right)] for left, right in merges]}}
    return json.dumps(spec, ensure_ascii=False, indent=1).encode()


def _merges(ranks: dict[bytes, int]) -> tuple[list[tuple[bytes, bytes]], bool]:
    """The pair that makes each token, by id, and whether some token is made by none (found whole only)."""
    merges, unmade = [], False
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:                      # merge as the encoder does, with the earlier tokens only
            best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
            if ranks.get(parts[best] + parts[best + 1], rank) >= rank:
                break
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2 and parts[0] in ranks and parts[1] in ranks:
            merges.append((parts[0], parts[1]))
        else:
            unmade = True
    return merges, unmade


# ---- training -------------------------------------------------------------------------------------------

def train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Iterable[str] = (END,), *,
              min_frequency: int = 2, pattern: str = OWN_PATTERN,
              say: Callable[[str], object] = print) -> Tokenizer:
    """
    A byte-level BPE vocabulary learned from the texts; the first special token ends a text and pads. Each
    step merges the most frequent pair of neighbouring tokens inside the pieces of `pattern`. On a tie the
    pair whose left token is the earliest wins, then the one whose right token is: bytes come in GPT-2's
    order (BYTE_ORDER: the printable ones of Latin-1, then the others), then merges as they were learned.
    These are the merges of Hugging Face's BpeTrainer. It stops at `vocab_size`, or where no pair occurs
    `min_frequency` times: then the vocabulary is smaller, and it says so.
    """
    special_tokens = list(special_tokens)
    smallest = 256 + len(special_tokens)
    if not special_tokens or vocab_size < smallest:
        raise UserError(f"vocab_size={vocab_size} with {len(special_tokens)} special tokens: at least one "
                        f"is needed, and with the 256 bytes that makes vocab_size >= {max(smallest, 257)}.")
    find = regex.compile(PATTERNS[pattern][0]).findall
    words: Counter[str] = Counter()
    for text in texts:
        for part in parts(_without_surrogates(text)):
            words.update(find(part))
    tokens = [bytes([b]) for b in BYTE_ORDER]
    for left, right in _learn(words, vocab_size - smallest, min_frequency):
        tokens.append(tokens[left] + tokens[right])
    learned = tokens[256:]
    ranks = {bytes([b]): b for b in range(256)} | {token: smallest + i for i, token in enumerate(learned)}
    clash = [token for token in special_tokens if token.encode() in ranks]
    if clash:
        raise UserError(f"The special token {clash[0]!r} is also a piece of the text: spell it unlike text, "
                        f"as {END}.")
    size = smallest + len(learned)
    if size < vocab_size:
        say(f"The text supports {len(learned):,} merges (no other pair occurs {min_frequency} times): "
            f"vocab_size is {size:,} instead of {vocab_size:,}.")
    special = {token: 256 + i for i, token in enumerate(special_tokens)}
    return Tokenizer(f"bpe-{size}", ranks, special, eos_id=256, pad_id=256, pattern=pattern)


def _learn(words: Counter[str], wanted: int, min_frequency: int) -> list[tuple[int, int]]:
    """
    The merges as pairs of symbols: 0-255 are the bytes in BYTE_ORDER, 256 + i is the result of merge i.

    All different words lie one behind the other in `symbol`, as doubly linked lists (`before`, `after`;
    both ends of a word have the neighbour `end`). A merge looks only at the places of its pair and corrects
    the counts of the pairs beside them. Every new pair contains the newest symbol, so all its places are
    known when it appears: `places[pair]` is written once, and those that other merges took since are
    filtered out when its turn comes. Counts only fall, so the queue may hold older, higher ones; they are
    put right when they come up.
    """
    symbol, weight, after, before = _lay_out(words)
    first = np.flatnonzero((symbol >= 0) & (symbol[after] >= 0))
    counts, places = {}, {}
    for pair, count, where in _by_pair(_pair(symbol[first], symbol[after[first]]), first, weight):
        counts[pair], places[pair] = count, where
    queue = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(queue)
    merges = []
    while queue and len(merges) < wanted:
        count, pair = heapq.heappop(queue)
        if counts[pair] != -count:
            heapq.heappush(queue, (-counts[pair], pair))
            continue
        if -count < max(min_frequency, 1):
            break
        left, right = pair >> 32, pair & 0xffffffff
        merges.append((left, right))
        new = 255 + len(merges)
        at = places.pop(pair)
        at = at[(symbol[at] == left) & (symbol[after[at]] == right)]
        if left == right:              # in a run "aaa" the leftmost pair merges
            at = _every_other(at, after)
        # the pairs that go: one between two merging places is counted once, as the left one of the second
        gone = after[at]
        neighbour = after[gone]
        old_left, old_right = symbol[before[at]], symbol[neighbour]
        symbol[at], symbol[gone] = new, -1
        has_left, has_right = old_left >= 0, (old_right >= 0) & (symbol[neighbour] != new)
        keys = np.concatenate([_pair(old_left[has_left], left), _pair(right, old_right[has_right])])
        beside = np.concatenate([at[has_left], at[has_right]])
        for key, lost, _ in _by_pair(keys, beside, weight, split=False):
            counts[key] -= lost
        # the pairs that come
        after[at], before[neighbour] = neighbour, at
        previous = before[at]
        has_left = symbol[previous] >= 0
        keys = np.concatenate([_pair(symbol[previous[has_left]], new),
                               _pair(new, symbol[neighbour[has_right]])])
        beside = np.concatenate([previous[has_left], at[has_right]])
        for key, found, where in _by_pair(keys, beside, weight):
            counts[key], places[key] = found, where
            heapq.heappush(queue, (-found, key))
    return merges


def _lay_out(words: Counter[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """symbol, weight (how often its word occurs), after, before: one of each per byte, and -1 as `end`."""
    encoded = [word.encode() for word in words]
    lengths = np.array([len(word) for word in encoded], np.int64)
    end = int(lengths.sum())
    order = np.argsort(np.array(BYTE_ORDER))                               # byte -> symbol
    symbol = np.append(order[np.frombuffer(b"".join(encoded), np.uint8)], -1)
    weight = np.append(np.repeat(np.fromiter(words.values(), np.int64, len(words)), lengths), 0)
    after, before = np.append(np.arange(1, end + 1), end), np.arange(-1, end)
    last = np.cumsum(lengths) - 1
    after[last], before[last - lengths + 1] = end, end
    return symbol, weight, after, before


def _pair(left: np.ndarray | int, right: np.ndarray | int) -> np.ndarray:
    """Two symbols as one number that sorts like the tuple."""
    return (left << 32) + right


def _by_pair(pairs: np.ndarray, places: np.ndarray, weight: np.ndarray,
             split: bool = True) -> Iterable[tuple]:
    """(pair, sum of the weights of its places, its places in ascending order) for each different pair."""
    if not len(pairs):
        return []
    order = np.argsort(pairs, kind="stable")
    pairs, places = pairs[order], places[order]
    starts = np.flatnonzero(np.append(True, pairs[1:] != pairs[:-1]))
    sums = np.add.reduceat(weight[places], starts).tolist()
    return zip(pairs[starts].tolist(), sums, np.split(places, starts[1:]) if split else sums)


def _every_other(at: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Of places that follow one another directly the first, third, fifth, ..."""
    index = np.arange(len(at))
    opens = np.append(True, after[at[:-1]] != at[1:])
    return at[(index - np.maximum.accumulate(np.where(opens, index, 0))) % 2 == 0]
