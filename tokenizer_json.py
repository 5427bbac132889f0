"""
tokenizer.json: read into what tiktoken needs to give the same ids, and written.

    read(spec, special)          {"ranks": ..., "decode_only": ..., "pattern": ..., "nfc": ...}
    write(ranks, special, ...)   the content of a file with which `tokenizers` gives the same ids

`Unknown` names a part of a file that tiktoken cannot run with the same ids.
"""
import itertools
import json
import operator
import re

import numpy as np

import bpe
from patterns import PATTERNS

# ---- bytes, as it spells them ----------------------------------------------------------------------------

_SPELLED = {b: chr(b) if i < 188 else chr(256 + i - 188) for i, b in enumerate(bpe.BYTE_ORDER)}
BYTE = {character: b for b, character in _SPELLED.items()}
_IN_UTF8 = [b for b in range(256) if b not in (0xC0, 0xC1) and b < 0xF5]


def spell(token: bytes) -> str:
    return "".join([_SPELLED[b] for b in token])


def unspell(entry: str) -> bytes:
    return bytes([BYTE[character] for character in entry])


def unspell_all(entries: list[str]) -> list[bytes]:
    """All at once, which is fast; Unknown where the vocabulary is not byte-level."""
    text = "".join(entries)
    odd = set(text).difference(BYTE)
    if odd:
        raise Unknown("vocabulary that is not byte-level, with the characters", sorted(odd)[:9])
    data = text.translate({ord(character): b for character, b in BYTE.items()}).encode("latin-1")
    ends = list(itertools.accumulate(map(len, entries), initial=0))
    return [data[begin:end] for begin, end in itertools.pairwise(ends)]


# ---- read -----------------------------------------------------------------------------------------------

class Unknown(Exception):
    """A part of a tokenizer.json that tiktoken cannot run with the same ids."""

    def __init__(self, part: str, value: object):
        text = json.dumps(value, ensure_ascii=False)
        super().__init__(f"{part} that we do not know, and approximating it would give other ids: "
                         f"{text[:300]}{'...' if len(text) > 300 else ''}")


def read(spec: dict, special: dict[str, int]) -> dict:
    """What Tokenizer needs of a tokenizer.json; Unknown names a part that tiktoken cannot run."""
    normalizer, model, cut = _plain(spec.get("normalizer")), spec["model"], _plain(spec.get("pre_tokenizer"))
    if normalizer not in (None, {"type": "NFC"}):
        raise Unknown("normalizer", normalizer)
    pattern = next((name for name, known in PATTERNS.items() if _plain(known.pre_tokenizer) == cut), None)
    if pattern is None:
        raise Unknown("pre_tokenizer", cut)
    if model.get("type", "BPE") != "BPE":
        raise Unknown("model", model["type"])
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise Unknown(f"model.{key}", model[key])
    in_text = [token["content"] for token in spec.get("added_tokens") or []
               if token["content"] not in special]
    if in_text:
        raise Unknown("added token that is no special one", in_text[:5])
    ranks, decode_only = ranks_of(model, special)
    if model.get("unk_token") and any(bytes([b]) not in ranks for b in _IN_UTF8):
        raise Unknown("model.unk_token that stands for bytes without an entry", model["unk_token"])
    return {"ranks": ranks, "decode_only": decode_only, "pattern": pattern, "nfc": bool(normalizer)}


def ranks_of(model: dict, special: dict[str, int]) -> tuple[dict[bytes, int], dict[bytes, int]]:
    """
    The entries that tiktoken shall merge, and those for decoding only. Hugging Face merges the pairs that
    are listed, in their order. tiktoken merges any pair whose bytes together are an entry, the lowest id
    first, and looks a whole piece up before, as Hugging Face does with ignore_merges.
    """
    vocab, merges = model["vocab"], model["merges"]
    if merges and isinstance(merges[0], str):              # "a b", in older files
        flat = " ".join(merges).split(" ")
    else:
        flat = list(itertools.chain.from_iterable(merges))
    lefts, rights = flat[::2], flat[1::2]
    if len(flat) != 2 * len(merges):
        raise Unknown("merge that is not of two parts", merges[:3])
    made = [list(map(vocab.get, names)) for names in (lefts, rights, map(operator.add, lefts, rights))]
    gone = [ids.index(None) for ids in made if None in ids]
    if gone:
        raise Unknown("merge whose parts or result are not in the vocabulary", merges[gone[0]])
    entries = [entry for entry in vocab if entry not in special]
    ranks = dict(zip(unspell_all(entries), map(vocab.get, entries)))
    left, right, result = np.array(made, np.int64)
    if np.isin(result, list(special.values())).any():
        raise Unknown("merge that makes a special token", sorted(special)[:9])
    falls = np.flatnonzero(np.diff(result) < 0)
    if len(falls):
        raise Unknown("merge whose result has a lower id than the one before", merges[falls[0] + 1])
    singles = [i for token, i in ranks.items() if len(token) == 1]
    sure = set(result[bpe.surely_made(left, right, result, singles)].tolist())
    doubtful = [token for token, i in ranks.items() if len(token) > 1 and i not in sure]
    pairs = {token: bpe.last_pair(token, ranks) for token in doubtful}
    listed = set(zip(lefts, rights)) if any(pairs.values()) else ()
    other = [tuple(map(spell, pair)) for pair in pairs.values() if pair]
    other = [pair for pair in other if pair not in listed]
    if other:
        raise Unknown(f"set of merges without the pairs that make {len(other)} entries first", other[:5])
    unmade = {token: ranks[token] for token, pair in pairs.items() if not pair}
    if model.get("ignore_merges"):
        return ranks, {}
    return {token: i for token, i in ranks.items() if token not in unmade}, unmade


def with_markup_special(spec: dict) -> dict:
    """
    With markup like <think> as special tokens, whether it says so or not: templates insert them. Hugging
    Face finds any added token that is no special one in plain text, where ours is to stay text.
    """
    def markup(token: dict) -> bool:
        return bool(re.fullmatch(r"\S*<\S*\w\S*[>:]\S*|\uff5c\S+\uff5c", token["content"]))
    added = [{**token, "special": token.get("special") or markup(token)}
             for token in spec.get("added_tokens") or []]
    return {**spec, "added_tokens": added}


def without_special(spec: dict) -> dict:
    """
    Where no text can become a special token: they are no added tokens, and the model, if it holds them too,
    has them under names that no text has. The ids of other added tokens may become others.
    """
    spec = with_markup_special(spec)
    special = {token["content"] for token in spec["added_tokens"] if token["special"]}
    model = dict(spec["model"])

    def renamed(entry: str) -> str:
        return f"\ue000 \ue000{entry}" if entry in special else entry
    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed(entry): i for entry, i in model["vocab"].items()}
    else:
        model["vocab"] = [[renamed(entry), score] for entry, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = renamed(model["unk_token"])
    in_text = [token for token in spec["added_tokens"] if not token["special"]]
    return {**spec, "model": model, "added_tokens": in_text, "post_processor": None}


def _plain(part: object) -> object:
    """A part without what cannot change ids, and with the defaults that older files leave out."""
    if isinstance(part, list):
        return [_plain(value) for value in part]
    if not isinstance(part, dict):
        return part
    part = {"use_regex": True, **part} if part.get("type") == "ByteLevel" else part
    part = {key: _plain(value) for key, value in part.items() if key != "trim_offsets"}
    steps = part.get("normalizers")
    if part.get("type") == "Sequence" and steps is not None and len(steps) < 2:
        return steps[0] if steps else None
    steps = part.get("pretokenizers", [])
    if len(steps) == 2 and steps[0].get("behavior") == "Removed" and steps[0].get("invert"):
        # a sole pattern, of which the rest is removed: nothing, as those that we know match every character
        steps[0] |= {"behavior": "Isolated", "invert": False}
    return part


def with_added(source: bytes, added: dict[str, int]) -> bytes:
    """A tokenizer.json with more special tokens."""
    spec = json.loads(source)
    spec["added_tokens"] = (spec.get("added_tokens") or []) + special_tokens(added)
    if isinstance(spec["model"]["vocab"], dict):       # where it has gaps, `tokenizers` counts ids on its own
        spec["model"]["vocab"] |= {token["content"]: token["id"] for token in spec["added_tokens"]}
    return json.dumps(spec, ensure_ascii=False, indent=1).encode()


def special_tokens(special: dict[str, int]) -> list[dict]:
    """As they stand in the list `added_tokens`."""
    return [{"id": i, "content": spelling, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for spelling, i in sorted(special.items(), key=lambda item: item[1])]


def opening(spec: dict) -> list[int]:
    """The ids that it puts before every text."""
    processor = spec.get("post_processor") or {}
    for step in processor.get("processors", [processor]):
        if step.get("type") == "TemplateProcessing":
            before = itertools.takewhile(lambda part: "SpecialToken" in part, step["single"])
            named = [part["SpecialToken"]["id"] for part in before]
            return [i for name in named for i in step["special_tokens"][name]["ids"]]
        if step.get("type") in ("BertProcessing", "RobertaProcessing"):
            return [step["cls"][1]]
    return []


# ---- written --------------------------------------------------------------------------------------------

def write(ranks: dict[bytes, int], special: dict[str, int], pattern: str, decode_only: dict[bytes, int],
          nfc: bool, opening: list[int]) -> bytes:
    """As Tokenizer takes them."""
    pairs, whole = bpe.merges_of(ranks)          # the latter are found by looking up whole pieces only
    assert not (whole and decode_only), "Hugging Face looks up whole pieces either among all entries or none"
    vocab = {spell(token): i for token, i in [*ranks.items(), *decode_only.items()]} | special
    spec = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special_tokens(special),
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": PATTERNS[pattern].pre_tokenizer,
        "post_processor": _template(opening, special) if opening else None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": bool(whole),
                  "vocab": dict(sorted(vocab.items(), key=lambda item: item[1])),
                  "merges": [[spell(left), spell(right)] for left, right in pairs]}}
    return json.dumps(spec, ensure_ascii=False, indent=1).encode()


def _template(opening: list[int], special: dict[str, int]) -> dict:
    """The post-processor that puts the opening before a text."""
    spelling = {i: token for token, i in special.items()}
    tokens = {spelling[i]: {"id": spelling[i], "ids": [i], "tokens": [spelling[i]]} for i in opening}
    before = [{"SpecialToken": {"id": spelling[i], "type_id": 0}} for i in opening]
    first, second = ([*before, {"Sequence": {"id": which, "type_id": 0}}] for which in "AB")
    return {"type": "TemplateProcessing", "single": first, "pair": first + second, "special_tokens": tokens}
