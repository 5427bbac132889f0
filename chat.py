"""
Conversations as token ids, with a mask of what a model is to learn from them.

    ids, mask = tokenizer.render_chat([{"role": "user", "content": "Hi"},
                                       {"role": "assistant", "content": "Hello."}])

How a conversation is spelled is the tokenizer's chat template: a text in Jinja that stands in its
tokenizer_config.json, where transformers reads it, too. Ours is CHATML; any other is run by jinja2.

The template is run on marks that stand for the contents, once for each shape of a conversation. So it is
known which parts of what it writes are its own, where a special token is a special token, and which are
content, where it is text: whoever types <|im_end|> ends no turn. Then it is run on each conversation itself,
which has to come out as the marked one with the contents at the marks.

The mask is True from the end of what the template writes when an answer is asked for (the generation prompt)
to the token that ends the turn, for each message of the assistant. An answer is encoded apart from what
stands before it, since that is how a model meets it.
"""
import copy
import functools
import itertools
import json
import os
import re
from datetime import datetime
from typing import NamedTuple

from config import UserError

ROLES = ("system", "user", "assistant", "tool")
START, END_OF_TURN = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}")
MARK, MARKS = "\ue000{}\ue001", re.compile("\ue000(\\d+)\ue001")           # private use: the n-th text
THINKS = re.compile(r"(\s*(?:<think>)?)(.*?)(</think>)(.*)", re.DOTALL)    # then answers


def render(tokenizer, messages: list[dict], add_generation_prompt: bool = False
           ) -> tuple[list[int], list[bool]]:
    """
    (ids, mask) of `messages`, dicts with "role" (one of ROLES) and "content" (a text, which goes in as it
    is). UserError: no template, or one that cannot be followed or refuses this conversation.
    """
    template = template_of(tokenizer, tokenizer.chat_template)
    shape, texts = taken_apart(messages)
    runs = template.layout(shape, add_generation_prompt)
    spelled = [run.filled(texts) for run in runs]
    if "".join(spelled) != template.run(messages, add_generation_prompt):
        raise template.unusable("it rewrites the content of a message")
    ids, mask = [], []
    for run, text in zip(runs, spelled):
        new = encode(tokenizer, text, run.goes_on) if run.ids is None else run.ids
        ids += new
        mask += [run.trained] * len(new)
    if tokenizer.opening and ids[:len(tokenizer.opening)] != tokenizer.opening:    # a template may write it
        ids, mask = tokenizer.opening + ids, [False] * len(tokenizer.opening) + mask
    return ids, mask


def end_of_turn(tokenizer) -> int:
    """The id behind an answer."""
    ids, mask = render(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    return [id for id, trained in zip(ids, mask) if trained][-1]


def with_chatml(tokenizer):
    """The tokenizer with CHATML as its template, and with the two special tokens that it needs."""
    tokenizer = copy.copy(tokenizer.with_special([START, END_OF_TURN]))
    tokenizer.chat_template = CHATML
    tokenizer.ends |= {tokenizer.special[END_OF_TURN]}
    return tokenizer


def encode(tokenizer, text: str, goes_on: bool) -> list[int]:
    """The ids of a text, or of one that goes on: SentencePiece begins a text with a space of its own."""
    if goes_on and not tokenizer.bytewise:
        before, both = tokenizer.encode("\n"), tokenizer.encode("\n" + text)
        if both[:len(before)] == before:
            return both[len(before):]
    return tokenizer.encode(text)


# ---- shapes -----------------------------------------------------------------------------------------------

def taken_apart(messages: list[dict]) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """
    (shape, texts): the (role, content) of the messages with marks, and what these stand for. The space around
    a text stays in the shape, as some templates strip it, and so do the tags around what an answer thinks,
    which some look for.
    """
    if not messages:
        raise UserError("a conversation without messages has nothing to render")
    shape, texts = [], []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES \
                or not isinstance(message.get("content"), str):
            raise UserError(f"a message has a role ({', '.join(ROLES)}) and a text as its content, unlike "
                            f"{message!r:.80}")
        role, content = message["role"], message["content"]
        thinks = role == "assistant" and THINKS.fullmatch(content)
        marked, pieces = "", thinks.groups() if thinks else ("", content)
        for tag, text in zip(pieces[::2], pieces[1::2]):
            begin, core = len(text) - len(text.lstrip()), text.strip()
            marked += tag + text[:begin] + MARK.format(len(texts)) + text[begin + len(core):]
            texts.append(core)
        shape.append((role, marked))
    return tuple(shape), texts


class Run(NamedTuple):
    """A stretch of a conversation that is encoded at once."""
    parts: list[str | int]                     # texts of the template, and numbers of texts of the messages
    ids: list[int] | None                      # where all is the template's
    trained: bool
    goes_on: bool                              # text is before it

    def filled(self, texts: list[str]) -> str:
        return "".join([part if isinstance(part, str) else texts[part] for part in self.parts])


def layout(template: "Template", shape: tuple[tuple[str, str], ...], add_generation_prompt: bool
           ) -> list[Run]:
    """What the template makes of the conversations of a shape."""
    marked = template.run(messages_of(shape), add_generation_prompt)
    written, given = MARKS.findall(marked), [MARKS.findall(content) for _, content in shape]
    # what earlier answers thought, many leave out
    needed = {numbers[-1] for numbers in given} | set(given[-1])
    if len(set(written)) < len(written) or not needed <= set(written):
        raise template.unusable("it leaves out or repeats what a message says")
    tokens = {match.span() for match in template.special.finditer(marked)}
    spans = [answer_span(template, shape, index, marked, tokens) for index, (role, _) in enumerate(shape)
             if role == "assistant"]
    runs, tokenizer, behind_token = [], template.tokenizer, {0, *(end for _, end in tokens)}
    for begin, end in itertools.pairwise(sorted({0, len(marked), *itertools.chain(*tokens, *spans)})):
        parts, ids, goes_on = MARKS.split(marked[begin:end]), None, begin not in behind_token
        parts[1::2] = map(int, parts[1::2])
        if (begin, end) in tokens:
            ids = [tokenizer.special[parts[0]]]
        elif len(parts) == 1:
            ids = encode(tokenizer, parts[0], goes_on)
        runs.append(Run(parts, ids, any(start <= begin < stop for start, stop in spans), goes_on))
    return runs


def answer_span(template: "Template", shape, index: int, marked: str, tokens: set[tuple[int, int]]
                ) -> tuple[int, int]:
    """Where in `marked` that which the model is to write for message `index` begins and ends."""
    marks = [mark for mark in MARKS.finditer(marked) if mark[0] in shape[index][1]]
    start = begin = marks[0].start()                           # nobody asked: the template cannot say
    if index:
        asked = template.run(messages_of(shape[:index]), True)
        start = len(os.path.commonprefix((asked, marked[:begin])))
        start = next((before for before, after in tokens if before < start < after), start)
        # some open a thought there that an answer without one lacks
        if template.special.sub("", asked[start:]).strip() or start <= marked.rfind("\ue001", 0, begin):
            raise template.unusable("it writes answers in another way than it asks for them")
    behind = len(marked) - len(marked[marks[-1].end():].lstrip())
    token = template.special.match(marked, behind)
    if token is None:
        raise template.unusable("no special token ends an answer")
    return start, token.end()


def messages_of(shape) -> list[dict]:
    return [{"role": role, "content": content} for role, content in shape]


# ---- templates --------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=4)
def template_of(tokenizer, source: str | None) -> "Template":
    if source is None:
        raise UserError(f"{tokenizer!r} has no chat template: give --template=chatml to train with one, or "
                        f"use a model that was trained on conversations")
    return Template(tokenizer, source)


class Template:
    """A chat template, ready to run."""

    def __init__(self, tokenizer, source: str):
        self.tokenizer = tokenizer
        self.layout = functools.lru_cache(maxsize=1024)(functools.partial(layout, self))
        longest_first = sorted(tokenizer.special, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        named = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
        self.names = {f"{name}_token": tokenizer.decode([id]) for name, id in named.items() if id is not None}
        self.compiled = None if source == CHATML else compiled(source, repr(tokenizer))

    def run(self, messages: list[dict], add_generation_prompt: bool) -> str:
        """What it makes of the messages."""
        if self.compiled is None:                              # CHATML needs no jinja2
            turns = [f"{START}{m['role']}\n{m['content']}{END_OF_TURN}\n" for m in messages]
            return "".join(turns) + (f"{START}assistant\n" if add_generation_prompt else "")
        try:
            return self.compiled.render(messages=messages, tools=None, documents=None,
                                        add_generation_prompt=add_generation_prompt, **self.names)
        except Exception as error:                             # a template can raise what it likes
            raise UserError(f"the chat template of {self.tokenizer!r} refuses this conversation: "
                            f"{error}") from None

    def unusable(self, why: str) -> UserError:
        return UserError(f"the chat template of {self.tokenizer!r} cannot be followed token by token: {why}. "
                         f"Give --template=chatml to replace it")


def compiled(source: str, owner: str):
    """As transformers compiles it: the same switches, and the functions that templates rely on."""
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError("the model's chat template needs the package jinja2: pip install jinja2, or give "
                        "--template=chatml to replace it") from None

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}: marks for others, nothing to us."""
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    today = datetime.now()                     # one day for all conversations, also past midnight
    environment.globals["strftime_now"] = today.strftime
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template of {owner} is no Jinja: {error}. Give --template=chatml to "
                        f"replace it") from None
