r"""
How text is cut into the pieces inside which tokens merge: one regular expression for each family of models.

    PATTERNS["cl100k"].regex             what tiktoken runs
    PATTERNS["cl100k"].pre_tokenizer     the part of tokenizer.json that cuts the same way
    parts(text)                          a long text, cut where all of them cut

Where a family cuts once, tiktoken runs the regular expression that it published. Where it cuts several times
in a row, one expression has to find the same borders. None looks behind, and each covers every character:
tiktoken silently drops what no alternative matches.
"""
import re
from collections.abc import Iterator
from typing import NamedTuple


class Pattern(NamedTuple):
    regex: str
    pre_tokenizer: dict


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = {**_BYTES, "use_regex": True}


def _splits(*patterns: str, then: tuple[dict, ...] = ()) -> dict:
    """The pre-tokenizer of a tokenizer.json that cuts at the matches of each pattern, one after another."""
    splits = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
              for pattern in patterns]
    return {"type": "Sequence", "pretokenizers": [*splits, *then, _BYTES]}


def _once(pattern: str) -> Pattern:
    return Pattern(pattern, _splits(pattern))


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"      # a word takes the character before it along


def _deepseek2() -> Pattern:
    """
    DeepSeek-V2 cuts six times in a row: line breaks, words, punctuation, space before an end, ideographs,
    digits. Each later cut goes through the pieces of the earlier ones, whose borders are ends of text to it.
    Here the same borders are found in one pass, for classes of characters that do not overlap.
    """
    # cased letters: below U+0800, among the "ideographs", beyond them (escaped, as NFC would change some)
    low = ("\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
           "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
           "\u048a-\u052f\u0531-\u0556")
    mid = ("\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
           "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
           "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
           "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
           "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
           "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3")
    high = ("\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
           "\ufb13-\ufb17")
    far = ("\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
           "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943")
    letters = f"A-Za-z{low}{mid}{high}\uff21-\uff3a\uff41-\uff5a{far}"
    marks = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"          # and a-z, as it happens
    wide = "\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff"        # most scripts beyond U+0800, and their spaces
    cuts = _splits("[\r\n]", rf"\s?[{letters}]+", rf"\s?[{marks}]+", r"\s+$", f"[{wide}]+",
                   then=({"type": "Digits", "individual_digits": True},))

    latin, word = r"[A-Za-z\uff21-\uff3a\uff41-\uff5a]", f"[{low}{high}{far}]"
    point = r"[!-/:-@\[-`{-~\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff5e]"
    space, blank = r"[\t\v\f \x85\xa0]", r"[\u1680\u2000-\u200a\u2028\u2029\u202f\u205f]"
    quote, ideographic = r"[\u2018-\u201f\u3001\u3002]", r"\u3000"        # the latter is a space and a mark
    rest = f"{letters}{marks}{wide}"
    also = rf"\x00-\u07ff\u9fa6-\uabff\ue000-\U0010ffff{mid}\u2018-\u201f\u3000-\u3002"
    end = rf"(?!\s*(?:[{letters}{marks}\r\n]|$))"        # space that ends a stretch is a piece of its own
    taker = f"(?!{ideographic}[{letters}])[{letters}{marks}]"           # takes the space before it along
    return Pattern("|".join([
        rf"{space}?(?:{latin}+|{word}+|{point}+)", r"[\r\n]", r"\p{N}",
        rf"[^\r\n\p{{N}}{rest}]*[^\s\p{{N}}{rest}](?:{space}++{end})?",
        rf"[^\p{{N}}{also}]*[^\s\p{{N}}{also}](?:{blank}++{end})?",
        f"{blank}?[{mid}]+",
        f"{blank}?(?:{ideographic}*{quote})+(?:{ideographic}+(?={point}))?",
        f"{blank}?{ideographic}+(?={ideographic}[{letters}])",
        f"{blank}{ideographic}+(?![{ideographic}{letters}])", f"{ideographic}+",
        f"{space}+(?={space}{taker})", f"{space}+", f"{blank}+(?={blank}{taker})", f"{blank}+"]), cuts)


def _deepseek3() -> Pattern:
    """DeepSeek-V3 and V4 cut three times in a row: numbers, Chinese and Japanese, then all pieces again."""
    cjk = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"
    ascii_mark = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
    cuts = _splits(r"\p{N}{1,3}", f"[{cjk}]+",
                   ascii_mark + "[A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
                   " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+")
    glyph = r"[\u4e00-\u9fa5\u3041-\u3096\u3099\u309a\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff]"
    dot, unassigned = r"[\u309b\u309c\u30a0\u30fb]", r"[\u3040\u3097\u3098]"         # the others of cjk
    letter = rf"[^\p{{N}}\p{{P}}\p{{S}}\p{{Z}}\p{{C}}{cjk}]"      # \p{L} and \p{M} but these
    mark = rf"[^\p{{L}}\p{{M}}\p{{N}}\p{{Z}}\p{{C}}{cjk}]"        # \p{P} and \p{S} but these
    return Pattern("|".join([
        r"\p{N}{1,3}", f"{unassigned}?{glyph}+", f"{dot}+", f"(?:{unassigned}(?!{glyph}))+",
        f"{ascii_mark}[A-Za-z]+", rf"[^\r\n\p{{L}}\p{{P}}\p{{S}}\p{{N}}{cjk}]?{letter}+",
        rf" ?{mark}+[\r\n]*", r"\s*[\r\n]+", rf"\s+(?![^\s\p{{N}}{cjk}])", r"\s+",
        rf"(?:[^\s\p{{L}}\p{{M}}\p{{N}}\p{{P}}\p{{S}}{cjk}](?!{letter}))+", r"[\s\S]"]), cuts)


PATTERNS = {
    "gpt2": Pattern(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", _GPT2),
    # SmolLM2: as GPT-2, but a digit stands alone, and space before one is cut as if the text ended there
    "smollm": Pattern(
        r"'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
        {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2]}),
    # GPT-4, Llama 3 and GLM
    "cl100k": _once(_SHORT + "|" + _WORD + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES),
    # Qwen 2, 2.5 and 3: as cl100k with single digits
    "qwen2": _once(_SHORT + "|" + _WORD + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES),
    # Qwen 3.5: accents and vowel signs belong to the word
    "qwen3.5": _once(_SHORT + "|" + _WORD + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES),
    # GPT-4o, GPT-OSS, MiniMax and Llama 4: words also end where lower case meets upper case
    "o200k": _once(f"{_WORD}{_UPPER}*{_LOWER}+{_SHORT}?|{_WORD}{_UPPER}+{_LOWER}*{_SHORT}?"
                   r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES),
    "deepseek2": _deepseek2(),
    "deepseek3": _deepseek3(),
}


def known_pattern(expression: str) -> str | None:
    """
    The name of the pattern that cuts as this expression of tiktoken's does, if it is one of ours. The newest
    one of cl100k has space at the end of a text before line breaks: no published vocabulary shows it.
    """
    published = {r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
                 r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": "gpt2",
                 r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
                 r"\s*[\r\n]|\s+(?!\S)|\s+": "cl100k",
                 r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
                 r"\s++$|\s*[\r\n]|\s+(?!\S)|\s": "cl100k"}
    return {**published, **{pattern.regex: name for name, pattern in PATTERNS.items()}}.get(expression)


# For the vocabularies that we train: a line break and the indentation after it are one piece ("\n        "
# becomes one token, which is what source code needs), and numbers are spelled digit by digit, so equal
# digits are equal tokens.
OWN_PATTERN = "smollm"

# The regular expressions need memory for every character of a run and fail after a million of them, so a
# long text is cut where every pattern above cuts anyway and none looks across: before a space and a letter,
# after the break of a line that ends with text, and before some punctuation after an ASCII letter or digit
# (minified files have little else). Python's \S is narrower than tiktoken's, which only makes us cut more
# rarely.
PART = 1 << 16         # characters; a part ends at the first cut from here on
_CUT = re.compile(r"(?<=\S)(?= [A-Za-z\u0410-\u044f])|(?<=\S\n)(?=[^\s/])|"
                  r"(?<=[A-Za-z0-9])(?=[\"(),:;<>=\[\]{}])")


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
