"""
Records to learn answers from: of any common spelling to conversations, and these to tokens, once.

    conversation_of({"question": "2 + 2?", "answer": 4})      a Conversation, or Unusable says why not
    folder = ensure("instructions.jsonl", tokenizer)          their tokens, in data/instructions-sft-<key>
    samples = Samples(folder)                                 samples.tokens(i): ids [n], trained [n]

Each record says itself what it is; none is guessed from its neighbours. What cannot be used is counted by
its reason. data.py makes rows of the samples.
"""
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

import chat
from config import UserError
from files import digest, made, read_json, write_json
from records import Records, Unusable, read_records
from tokenizer import BPE_SAMPLE, END, Tokenizer, load_tokenizer, train_bpe, vocab_size_for

VERSION = 2                    # of the folder's format
TRAINED = np.uint32(1 << 31)   # the bit of a token that is to be predicted where prompts are masked

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "model": "assistant", "bing": "assistant", "bard": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool",
}
# the name of a format: (keys of which one must be there, for each thing that it consists of)
FORMATS = {
    "messages": (("messages",),),
    "sharegpt": (("conversations", "conversation"),),
    "alpaca": (("instruction",), ("output", "response", "completion", "answer")),
    "prompt-completion": (("prompt",), ("completion",)),
    "prompt-response": (("prompt",), ("response",)),
    "question-answer": (("question",), ("answer",)),
    "text": (("text",),),
}
BESIDE = ("input", "context")                  # what a question is about, in a key of its own


class Conversation(NamedTuple):
    format: str
    messages: list[dict]                       # "role" and "content"; of a "text" its content alone
    noted: tuple[str, ...] = ()                # worth a word


def conversation_of(record: dict, format: str | None = None) -> Conversation:
    """Of `format`, a key of FORMATS, or of the first one whose keys the record has. Raises Unusable."""
    format = format or next((name for name in FORMATS if keys_of(record, name)), None)
    if format is None:
        raise Unusable("no known format (keys: " + ", ".join(sorted(map(str, record))[:6]) + ")")
    keys = keys_of(record, format)
    if not keys:
        raise Unusable(f"not of the format {format}")
    noted: list[str] = []
    if format == "text":
        text = text_of(record["text"], noted)
        if not text.strip():
            raise Unusable("an empty text")
        return Conversation(format, [{"role": "text", "content": text}], tuple(noted))
    if format in ("messages", "sharegpt"):
        messages = messages_of(record[keys[0]], noted)
    else:
        asked, answered = record[keys[0]], record[keys[1]]
        if isinstance(asked, list) and isinstance(answered, list):       # both are lists of messages
            messages = messages_of(asked, noted) + messages_of(answered, noted)
        else:
            question = [text_of(asked, noted)]
            question += [text_of(record[key], noted) for key in BESIDE if not empty(record.get(key))]
            messages = [{"role": "user", "content": "\n\n".join(filter(None, question))},
                        {"role": "assistant", "content": text_of(answered, noted)}]
    if not empty(record.get("system")) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": text_of(record["system"], noted)})
    return Conversation(format, checked(messages, noted), tuple(dict.fromkeys(noted)))


def keys_of(record: dict, format: str) -> list[str]:
    """The record's keys for the format's parts; [] where one is missing."""
    found = [next((key for key in names if key in record), None) for names in FORMATS[format]]
    return [] if None in found else found


def empty(value) -> bool:
    return value is None or value == "" or value == []


def messages_of(value, noted: list[str]) -> list[dict]:
    """A list of messages in either spelling: role and content, from and value."""
    if isinstance(value, str):                             # some files keep the list as JSON in a text
        try:
            value = json.loads(value)
        except ValueError:
            pass
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise Unusable("messages that are no list of objects")
    messages = []
    for message in value:
        role = message.get("role", message.get("from"))
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise Unusable(f"a role that is none ({str(role)[:20]})")
        content = message.get("content", message.get("value"))
        if empty(content) and message.get("tool_calls"):
            raise Unusable("a call of a tool without text")
        messages.append({"role": ROLES[role.lower()], "content": text_of(content, noted)})
    return messages


def text_of(value, noted: list[str]) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or value is None:
        raise Unusable("null or true/false where a text should be")
    if isinstance(value, (int, float)):
        noted.append("a number as a text")
        return str(value)
    if isinstance(value, list) and all(isinstance(part, (str, dict)) for part in value):
        parts = [part if isinstance(part, str) else part.get("text") for part in value]
        if not all(isinstance(part, str) for part in parts):
            raise Unusable("a part of a content that is no text (an image, a sound)")
        noted.append("content in parts (joined)")
        return "".join(parts)
    raise Unusable("a content that is neither text nor a list of parts")


def checked(messages: list[dict], noted: list[str]) -> list[dict]:
    """Up to the last answer; one without an answer teaches nothing."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise Unusable("no answer of the assistant")
    if not any(messages[i]["content"].strip() for i in answers):
        raise Unusable("an empty answer")
    if answers[-1] < len(messages) - 1:
        noted.append("messages after the last answer (left out)")
    return messages[:answers[-1] + 1]


# ---- tokens -----------------------------------------------------------------------------------------------
def tokens_of(conversation: Conversation, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """(ids, mask); a text is trained as a whole, and ends as a document does."""
    if conversation.format != "text":
        return tokenizer.render_chat(conversation.messages)
    opening = tokenizer.opening or [tokenizer.eos_id]
    text = [*tokenizer.encode(conversation.messages[0]["content"]), tokenizer.eos_id]
    return opening + text, [False] * len(opening) + [True] * len(text)


class Samples:
    """
    A folder that ensure() has made: sample i is tokens starts[i] to starts[i + 1]. `trained`: how many
    tokens of it are to be predicted, `first`: the place of the first of them; `place`: a hash of it in
    [0, 1), which decides whether it is held out. int64 and float64 [number of samples].
    """
    def __init__(self, folder: str):
        self.folder = folder
        self.meta = read_json(os.path.join(folder, "meta.json"))
        path = os.path.join(folder, "tokens.bin")
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        if size != 4 * self.meta["tokens"]:
            raise UserError(f"{path} has {size:,} bytes where meta.json says {4 * self.meta['tokens']:,}: "
                            f"delete {folder}, and it is made again")
        self.marked = np.memmap(path, np.uint32, "r")
        facts = np.load(os.path.join(folder, "samples.npz"))
        self.starts, self.trained, self.first, self.place = (
            facts[name] for name in ("starts", "trained", "first", "place"))

    def __len__(self) -> int:
        return len(self.trained)

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [n], trained bool [n])"""
        marked = self.marked[self.starts[index]:self.starts[index + 1]]
        return (marked & ~TRAINED).astype(np.int64), marked >= TRAINED

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)


def ensure(source: str, tokenizer: Tokenizer | str, format: str | None = None, rank: int = 0, world: int = 1,
           say: Callable[[str], object] = print) -> str:
    """
    The folder data/<name>-sft-<key> with the samples of `source`, which read_records takes; made when it is
    missing, by rank 0, while the others wait. Every rank calls this, before the process group exists.
    `tokenizer` "auto": a BPE trained on the records, with chat.CHATML. UserError: no record can be used.
    """
    records = read_records(source)
    name = re.sub(r"[^\w.-]+", "-", records.name)
    if tokenizer == "auto":
        key = digest([VERSION, records.identity(), format])
        folder = f"data/{name}-bpe-{key[:8]}"
        fill = partial(write_tokenizer, records, source, format, key=key, say=say)
        tokenizer = load_tokenizer(made(folder, fill, rank, world, say))
    key = digest([VERSION, records.identity(), format, tokenizer.fingerprint, tokenizer.eos_id,
                  tokenizer.opening, tokenizer.chat_template])
    folder = f"data/{name}-sft-{key[:8]}"
    made(folder, partial(write, records, source, tokenizer, format, key=key, say=say), rank, world, say)
    if rank == 0:
        meta = read_json(os.path.join(folder, "meta.json"))
        say(f"the records of {source} are in {folder}:\n{summary(meta)}")
    return folder


def write_tokenizer(records: Records, source: str, format: str | None, folder: str, key: str, say) -> None:
    """A BPE of what the records say, whose chat template is ours; meta.json comes last."""
    size, texts = 0, []
    for conversation in conversations(records, format):
        texts += [message["content"] for message in conversation.messages]
        size += sum(len(message["content"].encode("utf-8", "replace")) for message in conversation.messages)
    if not texts:
        refuse(source, left_out(records))
    vocab_size = vocab_size_for(size)
    say(f"training a BPE tokenizer with {vocab_size:,} entries on the records of {source}")
    every = -(-size // BPE_SAMPLE) or 1
    tokenizer = train_bpe(texts[::every], vocab_size, (END, chat.START, chat.END_OF_TURN), say=say)
    chat.with_chatml(tokenizer).save(folder)
    write_json(os.path.join(folder, "meta.json"), {"version": VERSION, "key": key, "source": source})


def write(records: Records, source: str, tokenizer: Tokenizer, format: str | None, folder: str, key: str,
          say) -> None:
    """Fills the folder; meta.json comes last."""
    say(f"{source}: making samples of its records in {folder}")
    formats, starts, trained, first, hashes = Counter(), [0], [], [], []
    with open(os.path.join(folder, "tokens.bin"), "wb") as file:
        for conversation in conversations(records, format):
            try:
                ids, mask = tokens_of(conversation, tokenizer)
            except UserError as error:                 # of one record; else chat.end_of_turn() had found it
                records.leave_out("conversation that the chat template does not take", f" ({error})")
                continue
            formats[conversation.format] += 1
            for what in conversation.noted:
                records.note(what)
            marked = np.array(ids, np.uint32) | np.where(mask, TRAINED, np.uint32(0))
            file.write(marked.data)
            starts.append(starts[-1] + len(ids))
            trained.append(sum(mask))
            first.append(mask.index(True))
            hashes.append(hashlib.blake2b(marked.data, digest_size=8).digest())
    if not trained:
        refuse(source, left_out(records))
    place = np.frombuffer(b"".join(hashes), ">u8") / 2**64
    np.savez(os.path.join(folder, "samples.npz"), starts=np.array(starts, np.int64),
             trained=np.array(trained, np.int64), first=np.array(first, np.int64), place=place)
    tokenizer.save(folder)
    write_json(os.path.join(folder, "meta.json"), {
        "version": VERSION, "key": key, "content": hashlib.sha256(b"".join(hashes)).hexdigest(),
        "source": source, "samples": len(trained), "tokens": starts[-1], "trained": sum(trained),
        "formats": dict(formats), "vocab_size": tokenizer.vocab_size, **left_out(records)})


def left_out(records: Records) -> dict:
    return {"left_out": dict(records.left_out), "noted": dict(records.noted), "example": records.example}


def refuse(source: str, found: dict) -> None:
    reasons = listed(found, "left_out") or "it holds no record"
    raise UserError(f"{source} has no record that can be trained on: {reasons}. A record is one of "
                    f"{', '.join(FORMATS)} (--format forces one): see instructions.py")


def conversations(records: Records, format: str | None) -> Iterator[Conversation]:
    """Of the records that are some; the others are counted."""
    for record in records:
        try:
            yield conversation_of(record, format)
        except Unusable as reason:
            records.leave_out(str(reason))


def summary(meta: dict) -> str:
    formats = ", ".join(f"{count:,} {name}" for name, count in meta["formats"].items())
    lines = [f"  {meta['samples']:,} records ({formats}): {meta['tokens']:,} tokens, {meta['trained']:,} of "
             f"them are trained"]
    if "text" in meta["formats"]:
        lines.append(f"  of {meta['formats']['text']:,} texts all tokens are trained: they have no prompt")
    lines += [f"  {name.replace('_', ' ')}: {listed(meta, name)}" for name in ("left_out", "noted")
              if meta[name]]
    return "\n".join(lines)


def listed(found: dict, name: str) -> str:
    return ", ".join(f"{count:,} x {reason} (first: {found['example'].get(reason)})"
                     for reason, count in sorted(found[name].items()))
