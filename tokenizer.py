r"""
Text to token ids and back: one `Tokenizer`, whatever it was made from.

    tokenizer = load_tokenizer("byte")               256 bytes and <|endoftext|>: always there
    tokenizer = load_tokenizer("gpt2")               tiktoken's: gpt2, cl100k_base, o200k_base, ...
    tokenizer = load_tokenizer("out/my-model")       a directory with tokenizer.json (model or corpus)
    tokenizer = load_tokenizer("qwen.tiktoken")      a file of ranks, where it is a published one
    tokenizer = load_tokenizer("org/name")           the Hugging Face Hub, with huggingface_hub and a network
    tokenizer = load_tokenizer(loaded)               an object of tokenizers, transformers, tiktoken, or yours
    tokenizer = train_bpe(texts, vocab_size=4096)    our own
    ids = tokenizer.encode("def f(x):"); text = tokenizer.decode(ids); tokenizer.save("directory")

Nearly all are byte-level BPE: a regular expression cuts the text into pieces (patterns.py), and inside a
piece neighbouring tokens merge, the pair of the lowest rank first (bpe.py). tiktoken runs it; the ids are
those of Hugging Face `tokenizers` on the same tokenizer.json. A file with a part that we do not know is run
by `tokenizers` itself, or refused where that is not installed: ids are never approximated.

Layout of our own vocabularies: byte b has id b, special tokens follow from 256, then the merges in the
order in which they were learned. So <|endoftext|> is always 256, and data tokenized with "byte" fits every
vocabulary that we train.
"""
import base64
import binascii
import codecs
import copy
import hashlib
import itertools
import json
import os
import random
import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property

import numpy as np
import regex
import tiktoken

import bpe
import chat
import tokenizer_json
from bpe import BYTE_ORDER
from config import UserError
from patterns import OWN_PATTERN, PATTERNS, known_pattern, parts

END = "<|endoftext|>"
UNKNOWN = "\ufffd".encode()      # what an id without a token decodes to: padding, or a gap of the vocabulary
BPE_SAMPLE = 8_000_000           # bytes to learn a vocabulary from: it hardly changes with more
LONGEST = 1 << 18                # characters; a longer part (no cut was found) is split by `regex`: slower

# ---- text and bytes -------------------------------------------------------------------------------------

def _without_surrogates(text: str) -> str:
    """Pairs of surrogates become the character that they spell, lone ones U+FFFD: UTF-8 has neither."""
    try:
        text.isascii() or text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@cache
def _matcher(pattern: str) -> tiktoken.Encoding:
    """Encodes text to the bytes of what the pattern matches in it."""
    return tiktoken.Encoding("bytes", pat_str=pattern, mergeable_ranks={bytes([b]): b for b in range(256)},
                             special_tokens={})


# ---- the tokenizer --------------------------------------------------------------------------------------

class Tokenizer:
    """
    ranks: bytes of a token -> its id, which is also its merge priority. special: spelling -> id; text never
    becomes one of these, whatever it spells. decode_only: entries that a vocabulary holds but no text
    reaches. pattern: a key of PATTERNS. nfc: text is normalised to NFC first (the Qwen families). opening:
    the ids that a text begins with, bos in Llama 3's; none in most, even where they name a bos. source: the
    tokenizer.json that it was read from, which `save` writes back unchanged.
    """
    bytewise = True       # each id stands for bytes of its own, and those of a text are joined
    portable = True       # `save` writes a directory from which anyone can load it

    def __init__(self, name: str, ranks: dict[bytes, int], special: dict[str, int], eos_id: int,
                 bos_id: int | None = None, pad_id: int | None = None, *, pattern: str = OWN_PATTERN,
                 decode_only: dict[bytes, int] | None = None, nfc: bool = False, opening: Iterable[int] = (),
                 chat_template: str | None = None, source: bytes | None = None):
        self.ranks, self.decode_only, self.pattern, self.nfc = ranks, decode_only or {}, pattern, nfc
        table = {i: token for token, i in [*ranks.items(), *self.decode_only.items()]}
        table |= {i: spelling.encode() for spelling, i in special.items()}
        self._describe(name, table, special, eos_id, bos_id, pad_id, opening, chat_template, source)
        self._missing = bytes(b for b in range(256) if bytes([b]) not in ranks)
        self._encoding = tiktoken.Encoding(f"{name} (lignite)", pat_str=PATTERNS[pattern].regex,
                                           mergeable_ranks=ranks, special_tokens=special)

    def _describe(self, name: str, table: dict[int, bytes], special: dict[str, int], eos_id: int,
                  bos_id: int | None, pad_id: int | None, opening: Iterable[int] = (),
                  chat_template: str | None = None, source: bytes | None = None) -> None:
        self.name, self.special, self.opening = name, special, list(opening)
        self.eos_id, self.bos_id, self.pad_id = eos_id, bos_id, pad_id
        self.chat_template, self.source = chat_template, source
        self.ends = frozenset([eos_id])        # the ids that end what a model writes
        self.vocab_size = max([*table, eos_id]) + 1
        self._table = [table.get(i) for i in range(self.vocab_size)]     # None where no token has this id
        self._dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def __repr__(self) -> str:
        return f"<Tokenizer {self.name!r}, {self.vocab_size:,} ids>"

    def normalize(self, text: str) -> str:
        """
        What `decode(encode(text))` gives back. That is the text itself, except that lone surrogates become
        U+FFFD, that some vocabularies want the NFC form, and that bytes without a token vanish, as they do
        in Hugging Face (SmolLM2 has none for six control characters and two bytes of unassigned planes).
        """
        text = self._canonical(text)
        data = text.encode() if self._missing else b""
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
        ids = [self._encode_part(part) for part in self.parts(self._canonical(text))]
        return (ids[0] if len(ids) == 1 else np.concatenate(ids)).astype(self._dtype)

    def parts(self, text: str) -> Iterator[str]:
        """A long text in parts whose ids, one after another, are those of the whole."""
        return parts(text)

    def _encode_part(self, part: str) -> np.ndarray:
        core = self._encoding._core_bpe
        if len(part) <= LONGEST and not (self._missing and self._lacks(part.encode())):
            return np.frombuffer(core.encode_to_tiktoken_buffer(part, set()), np.uint32)
        ids = []
        for begin, end in self._pieces(part):
            data = part[begin:end].encode().translate(None, self._missing)
            ids += core.encode_single_piece(data) if data else []
        return np.array(ids, np.uint32)

    def _pieces(self, part: str) -> Iterator[tuple[int, int]]:
        """Where tiktoken cuts, found by `regex`, which may know letters of a newer Unicode than tiktoken."""
        pattern = PATTERNS[self.pattern].regex
        if not part.isascii():
            letter = f"[{''.join(sorted(set(re.findall(r'.p{[LMNPS][a-z]?}', pattern))))}]"
            letters = "".join(regex.findall(letter, "".join(set(part))))
            newer = set(letters).difference(bytes(_matcher(letter).encode_ordinary(letters)).decode())
            part = part.translate(dict.fromkeys(map(ord, newer), "\u0378"))        # nothing to either
        return (match.span() for match in regex.finditer(pattern, part))

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

    def render_chat(self, messages: list[dict], add_generation_prompt: bool = False
                    ) -> tuple[list[int], list[bool]]:
        """
        (ids, mask) of a conversation, dicts with "role" (system, user, assistant, tool) and "content", as
        chat_template spells it; the mask is True where a token is trained. UserError: see chat.py.
        """
        return chat.render(self, messages, add_generation_prompt)

    def with_special(self, spellings: Iterable[str]) -> "Tokenizer":
        """This tokenizer with more special tokens, whose ids follow its own; those it has already stay."""
        new = [spelling for spelling in dict.fromkeys(spellings) if spelling not in self.special]
        if not new:
            return self
        if not self.portable:
            raise UserError(f"{self!r} is an object that cannot get the tokens {', '.join(new)}: give a "
                            f"tokenizer.json")
        clash = [spelling for spelling in new if spelling.encode() in self._table]
        if clash:
            raise UserError(f"{self!r} has {clash[0]!r} already, as a piece of text: a special token is "
                            f"spelled unlike text, as {END}")
        added = {spelling: self.vocab_size + i for i, spelling in enumerate(new)}
        source = tokenizer_json.with_added(self.to_json(), added)
        extended = self._again({**self.special, **added}, source)
        extended.ends = self.ends
        return extended

    def _again(self, special: dict[str, int], source: bytes) -> "Tokenizer":
        return Tokenizer(self.name, self.ranks, special, self.eos_id, self.bos_id, self.pad_id,
                         pattern=self.pattern, decode_only=self.decode_only, nfc=self.nfc,
                         opening=self.opening, chat_template=self.chat_template, source=source)

    def to_json(self) -> bytes:
        """The content of tokenizer.json; where there was none, it is worked out once."""
        self.source = self.source or tokenizer_json.write(self.ranks, self.special, self.pattern,
                                                          self.decode_only, self.nfc, self.opening)
        return self.source

    def save(self, directory: str) -> None:
        """Writes tokenizer.json and tokenizer_config.json, with which transformers gives the same ids."""
        os.makedirs(directory, exist_ok=True)
        names = {"eos_token": self.eos_id, "bos_token": self.bos_id, "pad_token": self.pad_id}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings |= {key: self.decode([i]) for key, i in names.items() if i is not None}
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        if self.ends != {self.eos_id}:     # for us alone: others look into a model's generation_config.json
            settings["ends"] = [spelling for spelling, i in self.special.items() if i in self.ends]
        if os.path.exists(stale := os.path.join(directory, "chat_template.jinja")):        # it would win
            os.remove(stale)
        _replace(os.path.join(directory, "tokenizer.json"), self.to_json())
        _replace(os.path.join(directory, "tokenizer_config.json"), json.dumps(settings, indent=2).encode())


class HuggingFaceTokenizer(Tokenizer):
    """
    Any other tokenizer.json, run by the `tokenizers` package. Nothing is known about where its texts may be
    cut, so each is encoded whole, and what it does to text (lower case, unknown words) is its own:
    `normalize` gives what comes back.
    """

    def __init__(self, name: str, source: bytes, special: dict[str, int], eos_id: int,
                 bos_id: int | None = None, pad_id: int | None = None, *, opening: Iterable[int] = (),
                 chat_template: str | None = None):
        self.source, spec = source, json.loads(source)
        decoder = spec.get("decoder") or {}
        vocab = self._encoder.get_vocab(with_added_tokens=True)
        added = {token["content"] for token in spec.get("added_tokens") or []}
        self.bytewise = decoder.get("type") == "ByteLevel" and all(
            character in tokenizer_json.BYTE for entry in vocab.keys() - added for character in entry)
        self._by_byte = "ByteFallback" in json.dumps(decoder)          # <0x0A> stands for one byte
        table = {i: tokenizer_json.unspell(entry) if self.bytewise and entry not in added else entry.encode()
                 for entry, i in vocab.items()}
        self._describe(name, table, special, eos_id, bos_id, pad_id, opening, chat_template, source)
        unknown = spec["model"].get("unk_id", vocab.get(spec["model"].get("unk_token")))
        self._reserved = set(special.values()) - {unknown}        # ids that no text may have

    def _again(self, special: dict[str, int], source: bytes) -> Tokenizer:
        return HuggingFaceTokenizer(self.name, source, special, self.eos_id, self.bos_id, self.pad_id,
                                    opening=self.opening, chat_template=self.chat_template)

    @cached_property
    def _encoder(self):
        return _run_by_tokenizers(tokenizer_json.with_markup_special(json.loads(self.source)))

    @cached_property
    def _without_special(self):
        return _run_by_tokenizers(tokenizer_json.without_special(json.loads(self.source)))

    def _encode_as_text(self, text: str) -> list[int]:
        """For models that hold special tokens themselves: Unigram finds "</s>" in a text that spells it."""
        encoder, added = self._without_special, json.loads(self.source).get("added_tokens") or []
        ids = {encoder.token_to_id(token["content"]): token["id"] for token in added
               if token["content"] not in self.special}
        return [ids.get(i, i) for i in encoder.encode(text, add_special_tokens=False).ids]

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items()
                if key not in ("_encoder", "_without_special")}

    def parts(self, text: str) -> Iterator[str]:
        yield text

    def encode_array(self, text: str) -> np.ndarray:
        text = _without_surrogates(text)
        try:
            ids = self._encoder.encode(text, add_special_tokens=False).ids
            if not self._reserved.isdisjoint(ids):
                ids = self._encode_as_text(text)
        except Exception as error:                  # `tokenizers` raises nothing more special
            raise UserError(f"{self.name}: the tokenizers package cannot encode a text of {len(text):,} "
                            f"characters ({error}), which begins {text[:40]!r}.") from error
        return np.array(ids, self._dtype)

    def normalize(self, text: str) -> str:
        return self.decode(self.encode_array(text))

    def decode(self, ids: Iterable[int]) -> str:
        if self.bytewise:
            return super().decode(ids)
        table, size, text = self._table, self.vocab_size, ""
        for known, run in itertools.groupby(ids, lambda i: 0 <= i < size and table[i] is not None):
            run = [int(i) for i in run]
            text += self._encoder.decode(run, skip_special_tokens=False) if known else "\ufffd" * len(run)
        return text

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return super().decode_bytes(ids) if self.bytewise else self.decode(ids).encode()

    @cached_property
    def token_lengths(self) -> np.ndarray:
        """As the Tokenizer's; where ids are no bytes, those that an id adds to the text behind another."""
        lengths = super().token_lengths
        if self.bytewise:
            return lengths
        first = next((i for i in np.flatnonzero(lengths).tolist() if self.decode([i]).strip()), self.eos_id)
        before = len(self.decode_bytes([first]))
        for i in np.flatnonzero(lengths):
            byte = self._by_byte and re.fullmatch(rb"<0x[0-9A-F]{2}>", self._table[i])
            lengths[i] = 1 if byte else len(self.decode_bytes([first, i])) - before
        return lengths


def _run_by_tokenizers(spec: dict):
    import tokenizers
    encoder = tokenizers.Tokenizer.from_str(json.dumps(spec))
    encoder.encode_special_tokens = True            # text that spells a special token stays text
    encoder.no_truncation()                         # files of embedding models cut at a few hundred tokens
    encoder.no_padding()
    return encoder


class ObjectTokenizer(Tokenizer):
    """
    Any Python object with encode(text) -> ids, decode(ids) -> text, vocab_size and eos_id. Data can be
    prepared and models trained with it; as nothing is known about its inside, `save` cannot write it.
    """
    bytewise = portable = False

    def __init__(self, tokenizer: object):
        self._given, kind, numbers = tokenizer, type(tokenizer).__name__, {}
        for name in ("vocab_size", "eos_id", "bos_id", "pad_id"):
            value = getattr(tokenizer, name, None)
            value = value() if callable(value) else value                  # as SentencePiece has them
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 0
            numbers[name] = int(value) if whole else None
        lacks = [name for name in ("vocab_size", "eos_id") if numbers[name] is None]
        if lacks:
            raise UserError(f"The tokenizer ({kind}) needs {' and '.join(lacks)} as a whole number beside "
                            "encode and decode: how many ids there are, and the one that ends a text.")
        size, eos_id, bos_id, pad_id = numbers.values()
        if eos_id >= size:
            raise UserError(f"The tokenizer ({kind}) has eos_id={eos_id} and vocab_size={size}: ids are "
                            "smaller than vocab_size.")
        table = {i: token for i in range(size) if i != eos_id and (token := self._spell(i)) is not None}
        self._describe(kind, table, {END: eos_id}, eos_id, bos_id, pad_id)
        self._table += [None] * (size - self.vocab_size)
        self.vocab_size = size
        self._dtype = np.uint16 if size <= 1 << 16 else np.uint32
        if eos_id in self.encode("a"):
            raise UserError(f"The tokenizer ({kind}) puts eos_id={eos_id} beside every text in encode(): "
                            "it has to give the ids of the text alone, without an end.")

    def _spell(self, i: int) -> bytes | None:
        try:
            return self._given.decode([i]).encode("utf-8", "replace")
        except Exception:               # whatever it raises for a gap of its vocabulary
            return None

    def parts(self, text: str) -> Iterator[str]:
        yield text

    def encode_array(self, text: str) -> np.ndarray:
        ids = np.array(self._given.encode(_without_surrogates(text)), np.int64)
        if ids.ndim != 1 or len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise UserError(f"The tokenizer ({self.name}) encodes {text[:40]!r} as {ids.tolist()[:20]}: "
                            f"ids have to be from 0 to {self.vocab_size - 1:,}.")
        return ids.astype(self._dtype)

    def normalize(self, text: str) -> str:
        return self.decode(self.encode_array(text))

    def decode(self, ids: Iterable[int]) -> str:
        return self._given.decode([int(i) for i in ids])

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode("utf-8", "replace")

    def save(self, directory: str) -> None:
        """Writes nothing, and takes away what an earlier tokenizer left there, which is not this one's."""
        for file in ("tokenizer.json", "tokenizer_config.json"):
            if os.path.exists(os.path.join(directory, file)):
                os.remove(os.path.join(directory, file))


class StreamDecoder:
    """Text from ids that come one by one, never half a character; all pieces + finish() are decode(ids)."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids, self._given = [], 0      # where ids are no bytes: the latest, and the length of their text

    def push(self, token_id: int) -> str:
        """The characters that this id completes; "" while one is still open."""
        if self._tokenizer.bytewise:
            return self._utf8.decode(self._tokenizer.decode_bytes([token_id]))
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):         # a character that the next ids may complete
            return ""
        new, self._given = text[self._given:], max(len(text), self._given)
        if len(self._ids) > 64:             # a few in front are enough to tell how the next ones read
            self._ids = self._ids[-16:]
            self._given = len(self._tokenizer.decode(self._ids))
        return new

    def finish(self) -> str:
        """What is left when no id follows: U+FFFD for a character that stayed open."""
        if not self._tokenizer.bytewise:
            rest = self._tokenizer.decode(self._ids)[self._given:]
            self._ids, self._given = [], 0
            return rest
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


def load_tokenizer(source: object, eos_token: str | None = None) -> Tokenizer:
    """
    "byte" (or "bundled"), a name of tiktoken, a directory with tokenizer.json, the path of such a file or of
    a .tiktoken file, or a Hub id; also an object of tokenizers, transformers or tiktoken, or any other with
    encode, decode, vocab_size and eos_id; a Tokenizer is given back as it is. `eos_token` names the special
    token that ends a text where the source does not. Nothing is trained or guessed: UserError where the
    source lacks what is needed.
    """
    tokenizer = source if isinstance(source, Tokenizer) else _load(source, eos_token)
    if eos_token is None or tokenizer.special.get(eos_token) == tokenizer.eos_id:
        return tokenizer
    if eos_token not in tokenizer.special:
        raise UserError(f"{tokenizer!r} has no special token {eos_token!r} to end a text, only "
                        f"{', '.join(list(tokenizer.special)[:20])}.")
    tokenizer = copy.copy(tokenizer)
    tokenizer.eos_id = tokenizer.special[eos_token]
    tokenizer.ends |= {tokenizer.eos_id}
    return tokenizer


def _load(source: object, eos_token: str | None) -> Tokenizer:
    if not isinstance(source, (str, os.PathLike)):
        return _from_object(source, eos_token)
    source = os.fspath(source)
    if source in ("byte", "bundled"):
        return Tokenizer("byte", {bytes([b]): b for b in range(256)}, {END: 256}, eos_id=256, pad_id=256)
    if source in _TIKTOKEN:
        return _from_tiktoken(source)
    if os.path.isdir(source):
        return _from_directory(source, eos_token)
    path, _, pattern = source.rpartition(":")                   # ranks.tiktoken:cl100k
    if os.path.isfile(path):
        ranks = _read_ranks(path)
        if ranks is None:
            raise UserError(f"{path} is no file of ranks (a token in base64 and its rank a line): only those "
                            f"are followed by the name of a pattern, as in {source}.")
        return _from_ranks(path, ranks, pattern)
    if os.path.isfile(source):
        ranks = _read_ranks(source)
        return _from_ranks(source, ranks, None) if ranks else _from_file(source, eos_token)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        return _from_hub(source, eos_token)
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


# files of ranks: "<base64 of a token> <its rank>" a line. How text is cut and which special tokens follow is
# not in them; these are the published ones, by the hash of their ranks
_RANKS = {
    "20940fd36bff2b33": ("gpt2", "gpt2", [END]),
    "14b6610f6c5c6c71": ("p50k_base", "gpt2", [END]),
    "37b91d00e3c1c0dc": ("cl100k_base", "cl100k",
                         [END, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]),
    "427b73c453cc075f": ("o200k_base", "o200k", [END]),
    "bf97c67da2c66d5e": ("Qwen", "qwen2", [END, "<|im_start|>", "<|im_end|>"]),
    "931bfa8ee8f581ec": ("Qwen3.5", "qwen3.5", [END, "<|im_start|>", "<|im_end|>"]),
    "74f4bbfef3f0e8b0": ("Llama-3", "cl100k", [
        "<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(4)),
        "<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>",
        *(f"<|reserved_special_token_{i}|>" for i in range(5, 251))]),
    "44e5d7ac10cf5127": ("Llama-4", "o200k", [
        "<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
        "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>"]),
}


def _read_ranks(path: str) -> dict[bytes, int] | None:
    """The ranks in a .tiktoken file, or a tokenizer.model that is one; None where it is something else."""
    with open(path, "rb") as file:
        if not re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", file.readline(10_000)):
            return None
        file.seek(0)
        lines = file.read().splitlines()
    ranks = {}
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(f"{path}, line {number}: a token in base64 and its rank belong here, not "
                            f"{line[:40]!r}.") from None
    return ranks


def _from_ranks(path: str, ranks: dict[bytes, int], pattern: str | None) -> Tokenizer:
    digest = hashlib.sha256()
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        digest.update(b"%d %d " % (rank, len(token)) + token)
    name, known, names = _RANKS.get(digest.hexdigest()[:16], (path, None, [END]))
    if pattern is None and known is None:
        raise UserError(f"{path} has {len(ranks):,} ranks that are none of the published ones, and how text "
                        f"is cut is not in such a file: name that with it, as in {path}:cl100k (the ways are "
                        f"{', '.join(PATTERNS)}). It then has one special token, {END}.")
    if pattern not in (None, *PATTERNS):
        raise UserError(f"{path}:{pattern}: there is no way {pattern!r} to cut text, only "
                        f"{', '.join(PATTERNS)}.")
    if pattern not in (None, known):
        name, names = path, [END]
    free = (i for i in itertools.count() if i not in taken)
    taken = set(ranks.values())
    special = dict(zip(names, free))
    unmade = {}
    if name == "Qwen3.5":        # its entries that no merge makes are never used by Hugging Face: as there
        # (behind it 0xFF, with which no token joins, keeps tiktoken from looking a whole piece up)
        core = tiktoken.Encoding("probe", pat_str=".", mergeable_ranks=ranks, special_tokens={})._core_bpe
        unmade = {token: rank for token, rank in ranks.items() if token != b"\xff"
                  and core.encode_single_piece(token + b"\xff") != [rank, ranks[b"\xff"]]}
    llama = name.startswith("Llama")
    return Tokenizer(name, {token: i for token, i in ranks.items() if token not in unmade}, special,
                     special[names[1 if llama else 0]], special[names[0]] if llama else None,
                     None if llama else special[END], pattern=pattern or known, decode_only=unmade,
                     nfc=name.startswith("Qwen"), opening=[special[names[0]]] if llama else [])


def _from_hub(repo: str, eos_token: str | None) -> Tokenizer:
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
    return _from_directory(directory, eos_token, name=repo)


def _from_directory(directory: str, eos_token: str | None, name: str | None = None) -> Tokenizer:
    path = os.path.join(directory, "tokenizer.json")
    if os.path.isfile(path):
        return _from_file(path, eos_token, name or os.path.basename(os.path.abspath(directory)))
    names = sorted(os.listdir(directory))
    for file in names:                                 # as Llama 3 and Qwen were published first
        if file == "tokenizer.model" or file.endswith(".tiktoken"):
            path = os.path.join(directory, file)
            ranks = _read_ranks(path)
            if ranks is not None:
                return _from_ranks(path, ranks, None)
    others = [n for n in names if n in ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt",
                                        "spiece.model")]
    hint = f" (it has {', '.join(others)}; transformers' save_pretrained writes tokenizer.json)"
    raise UserError(f"No tokenizer in {directory}: tokenizer.json is missing{hint if others else ''}.")


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


def _from_file(path: str, eos_token: str | None, name: str | None = None) -> Tokenizer:
    """tokenizer.json, with what the files beside it say about eos, bos, pad and the chat template."""
    if path.endswith(".model"):
        raise UserError(f"{path} is a model of SentencePiece: transformers' AutoTokenizer.from_pretrained("
                        "its directory).save_pretrained(another) writes the tokenizer.json that is needed.")
    directory = os.path.dirname(os.path.abspath(path))
    settings = _read_json(os.path.join(directory, "tokenizer_config.json"))
    settings["chat_template"] = _chat_template(settings, directory)
    models = [_read_json(os.path.join(directory, n)) for n in ("generation_config.json", "config.json")]
    spec = _read_json(path)
    with open(path, "rb") as file:
        source = file.read()
    return _from_spec(spec, source, path, name or path, settings, models, eos_token)


def _from_spec(spec: dict, source: bytes, path: str, name: str, settings: dict, models: list[dict],
               eos_token: str | None) -> Tokenizer:
    """The content of a tokenizer.json, `source` as text; `path` is what messages call it."""
    settings = {**settings, "eos_token": eos_token} if eos_token else settings
    try:
        added = tokenizer_json.with_markup_special(spec)["added_tokens"]
        special = {token["content"]: token["id"] for token in added if token["special"]}
        ids = _named_ids(settings, models, path, special, spec["model"]["vocab"])
        ids["opening"] = tokenizer_json.opening(spec)
        ids["chat_template"] = settings.get("chat_template")
        try:
            read = tokenizer_json.read(spec, special)
            tokenizer = Tokenizer(name, special=special, source=source, **read, **ids)
        except tokenizer_json.Unknown as error:
            try:
                tokenizer = HuggingFaceTokenizer(name, source, special, **ids)
            except ImportError:
                raise UserError(f"{path} has a {error.args[0]}. To run it as it is: pip install "
                                f"tokenizers.") from None
        ends = next((model["eos_token_id"] for model in models if model.get("eos_token_id") is not None), [])
        tokenizer.ends |= set(ends if isinstance(ends, list) else [ends]) & set(special.values())
        tokenizer.ends |= {special[spelling] for spelling in settings.get("ends", ()) if spelling in special}
        return tokenizer
    except UserError:
        raise
    except Exception as error:       # `tokenizers` raises plain Exceptions for what it cannot read
        raise UserError(f"{path} is not a tokenizer.json that we can read "
                        f"({type(error).__name__}: {error}).") from error


def _from_object(given: object, eos_token: str | None) -> Tokenizer:
    """An object of tokenizers, transformers or tiktoken becomes ours; any other is used as it is."""
    kind = type(given).__name__
    packages = {parent.__module__.split(".")[0] for parent in type(given).__mro__}
    if isinstance(given, tiktoken.Encoding):
        return _from_encoding(given, eos_token)
    if "transformers" in packages:
        backend = getattr(given, "backend_tokenizer", None)
        if backend is None:
            raise UserError(f"{kind} is one of transformers' tokenizers without tokenizer.json: give "
                            "PreTrainedTokenizerFast(tokenizer_object=convert_slow_tokenizer(tokenizer), "
                            "eos_token=...) instead, with transformers.convert_slow_tokenizer.")
        settings = {f"{name}_token": getattr(given, f"{name}_token", None) for name in ("eos", "bos", "pad")}
        settings["chat_template"] = getattr(given, "chat_template", None)
        return _from_text(backend.to_str(), getattr(given, "name_or_path", "") or kind, settings, eos_token)
    if "tokenizers" in packages and callable(getattr(given, "to_str", None)):
        return _from_text(given.to_str(), kind, {}, eos_token)
    if not (callable(getattr(given, "encode", None)) and callable(getattr(given, "decode", None))):
        raise UserError("A tokenizer is given by name or path, or as an object with encode and decode, not "
                        f"as {kind}.")
    return ObjectTokenizer(given)


def _from_text(text: str, name: str, settings: dict, eos_token: str | None) -> Tokenizer:
    """tokenizer.json as an object gives it, without the length that its last call set."""
    spec = {**json.loads(text), "truncation": None, "padding": None}
    source = json.dumps(spec, ensure_ascii=False, indent=1).encode()
    template = settings.get("chat_template")
    template = template.get("default") if isinstance(template, dict) else template
    return _from_spec(spec, source, name, name, {**settings, "chat_template": template}, [], eos_token)


def _from_encoding(given: tiktoken.Encoding, eos_token: str | None) -> Tokenizer:
    special, name = dict(given._special_tokens), given.name
    eos_token = eos_token or (END if END in special or len(special) != 1 else next(iter(special)))
    if eos_token not in special:
        raise UserError(f"The Encoding {name!r} has no special token {eos_token!r} to end a text: name "
                        f"another as load_tokenizer(..., eos_token=): {', '.join(special) or 'none'}.")
    clash = [token for token in special if token.encode() in given._mergeable_ranks]
    if clash:
        raise UserError(f"The Encoding {name!r} has {clash[0]!r} both as a special token and as text.")
    pattern = known_pattern(given._pat_str)
    if r"|\s++$|\s*[\r\n]" in given._pat_str and _joins_line_breaks(given._mergeable_ranks):
        pattern = None      # tiktoken keeps all space at the end of a text in one piece, and here that shows
    tokenizer = Tokenizer(name, given._mergeable_ranks, special, special[eos_token],
                          pad_id=special.get(END), pattern=pattern or OWN_PATTERN)
    return tokenizer if pattern else _with_pattern(given, tokenizer, eos_token)


def _joins_line_breaks(ranks: dict[bytes, int]) -> bool:
    """Whether a token holds a line break and space after it, or is a line break that is only found whole."""
    for token in ranks:
        space = token.decode("utf-8", "replace")
        if len(token) > 1 and ("\n" in space or "\r" in space) and not space.replace("\ufffd", " ").strip():
            if space[-1] not in "\r\n" or bpe.last_pair(token, ranks) is None:
                return True
    return False


def _with_pattern(given: tiktoken.Encoding, tokenizer: Tokenizer, eos_token: str) -> Tokenizer:
    """With a pattern that is not one of ours: `tokenizers` runs it, if it cuts as tiktoken does."""
    # to `tokenizers` a plus after an interval means "once or more", and $ is the end of a line
    expression = re.sub(r"(\{[\d,]+\})\+", r"\1", re.sub(r"(?<=\+)\$", r"\\z", given._pat_str))
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Removed", "invert": True}
    bytes_ = PATTERNS["cl100k"].pre_tokenizer["pretokenizers"][-1]
    cut = {"type": "Sequence", "pretokenizers": [split, bytes_]}

    def run_by_tokenizers(tokenizer: Tokenizer, eos_token: str) -> Tokenizer:
        spec = {**json.loads(tokenizer.to_json()), "pre_tokenizer": cut}
        settings = {"eos_token": eos_token, "pad_token": END if END in tokenizer.special else None}
        return _from_text(json.dumps(spec), given.name, settings, None)

    # all pairs of some characters are tokens, so that each border between them shows
    alphabet = (" \t\r\n!\"#$%&'()*+-./;<=@[_{|09AZasdlmtvexz"
                "\xa0\xb2\xe9\u0301\u03c9\u0416\u0967\u3000\u3042\u6f22")
    steps = [c.encode()[:n] for c in alphabet for n in range(2, len(c.encode()) + 1)]
    pairs = [(a + b).encode() for a in alphabet for b in alphabet]
    tokens = dict.fromkeys([*(bytes([b]) for b in range(256)), *steps, *pairs])
    ranks = {token: i for i, token in enumerate(tokens)}
    ours = tiktoken.Encoding("probe", pat_str=given._pat_str, mergeable_ranks=ranks, special_tokens={})
    theirs = run_by_tokenizers(Tokenizer("probe", ranks, {END: len(ranks)}, len(ranks)), END)
    dice = random.Random(0)
    for _ in range(5000):
        text = "".join(c * dice.choice((1, 1, 2, 5)) for c in dice.choices(alphabet, k=dice.randint(1, 15)))
        if ours.encode_ordinary(text) != theirs.encode(text):
            raise UserError(f"The Encoding {given.name!r} cuts text by a pattern that tiktoken and "
                            f"tokenizers read differently, as in {text!r}: {given._pat_str}")
    return run_by_tokenizers(tokenizer, eos_token)


def _named_ids(settings: dict, models: list[dict], path: str, special: dict[str, int],
               vocab: dict[str, int] | list) -> dict[str, int | None]:
    """eos, bos, pad: as tokenizer_config.json spells them, else the ids of (generation_)config.json."""
    vocab = vocab if isinstance(vocab, dict) else {entry: i for i, (entry, _) in enumerate(vocab)}
    known, ids = {*special.values(), *vocab.values()}, {}
    for name in ("eos", "bos", "pad"):
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            spelled = tokenizer_json.spell(token.encode())
            ids[f"{name}_id"] = special.get(token, vocab.get(token, vocab.get(spelled)))
            if ids[f"{name}_id"] is None:
                raise UserError(f"The settings beside {path} name {token!r} as {name}_token, which "
                                "it does not have.")
            if name == "eos" and token not in special:
                raise UserError(f"The settings beside {path} name {token!r} as eos_token, which is ordinary "
                                "text: add it to the added_tokens of tokenizer.json.")
            continue
        found = [model[f"{name}_token_id"] for model in models if model.get(f"{name}_token_id") is not None]
        found = found[0] if found and isinstance(found[0], list) else found        # some name several
        ids[f"{name}_id"] = found[0] if found and found[0] in known else None
    if ids["eos_id"] is None and len(special) == 1:
        ids["eos_id"] = next(iter(special.values()))       # the only special token there is
    if ids["eos_id"] is None:
        raise UserError(f"{path} does not say which token ends a text: name one as \"eos_token\" in "
                        "tokenizer_config.json beside it, or from Python as load_tokenizer(..., eos_token=) "
                        f"(its special tokens: {', '.join(list(special)[:20]) or 'none'}).")
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


# ---- training -------------------------------------------------------------------------------------------

def vocab_size_for(size: int) -> int:
    """The largest power of two that leaves 2,048 bytes of text for each entry, from 512 to 32,768."""
    return 2 ** min(max((size // 2048).bit_length() - 1, 9), 15)


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
    find = regex.compile(PATTERNS[pattern].regex).findall
    words: Counter[str] = Counter()
    for text in texts:
        for part in parts(_without_surrogates(text)):
            words.update(find(part))
    tokens = [bytes([b]) for b in BYTE_ORDER]
    for left, right in bpe.learn(words, vocab_size - smallest, min_frequency):
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
