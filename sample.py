"""
Let a model write.

    python sample.py --out_dir=out/tiny --prompt="def main():"       an out_dir, one of its checkpoints, or a
    python sample.py --out_dir=out/tiny --num_samples=5              Hugging Face directory of a known family
    python sample.py --out_dir=out/tiny --prompt_file=prompts.txt    one prompt a line; "-" = standard input
    python sample.py --out_dir=out/tiny --interactive                type, and it goes on; an empty line ends

and, where it has a chat template (python sft.py trains such models), let it answer:

    python sample.py --out_dir=out/chat --chat --prompt="Hi"         prints the answer alone; --system="..."
    python sample.py --out_dir=out/chat --interactive                a conversation; /help lists its commands
    python sample.py --out_dir=out/base --adapter=out/lora --chat --prompt="Hi"

From Python: from sample import generate, load_model, stream; generate("out/tiny", "def main():"), or
generate("out/chat", [{"role": "user", "content": "Hi"}]).

Temperature 0 always takes the most likely token. A text longer than the model's context goes on with a
window: each time it is full, the oldest half is dropped. Generation stops at the end-of-text token, at the
end of an answer, at a stop string (none of these is part of the result), or after max_new_tokens.
"""
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

import chat
import checkpoint
import config
import launch
import tokenizer as tokenizers
from config import UserError
from kernels.int8 import check_products
from model import Model
from model import generate as generate_ids


@dataclass
class Config:
    # what
    out_dir: str = "out/tiny"              # out_dir of a run, a checkpoint of it, or a Hugging Face directory
    adapter: str | None = None             # directory of a LoRA adapter that was trained on that model
    prompt: str = ""                       # text to go on from; empty = the start of a document
    prompt_file: str | None = None         # prompts, one a line; "-" = standard input
    interactive: bool = False              # a conversation in the terminal
    chat: bool | None = None               # answer messages; None = if interactive, with a chat template
    system: str = ""                       # message before a chat, on how to answer; empty = none
    # how much
    max_new_tokens: int = 200              # at most this many tokens each
    num_samples: int = 1                   # texts for each prompt
    stop: list[str] = field(default_factory=list)  # strings that end a text; several as --stop="['A', 'B']"
    # how
    temperature: float = 0.8               # 0 = always the most likely token; 1 = as the model says
    top_k: int | None = None               # only the k most likely tokens; 0 or None = all
    top_p: float | None = None             # only the most likely tokens that together have this probability
    min_p: float | None = None             # only tokens at least this likely, relative to the most likely
    repetition_penalty: float = 1.0        # above 1: tokens that were there already become less likely
    seed: int | None = None                # equal seeds give equal texts; None = another text each time
    # machine
    device: str = "auto"                   # auto = CUDA, MPS, CPU
    dtype: str = "auto"                    # auto = bf16 on a GPU, fp32 elsewhere; int8 = faster on a CPU


def main(cfg: Config) -> list[str]:
    # ---- prompts and model ------------------------------------------------------------------------------
    aside = [key for key in ("prompt", "prompt_file", "num_samples") if key in cfg.given]
    if cfg.interactive and aside:
        raise UserError("interactive goes on from what you type, one text at a time: leave out "
                        f"{' and '.join(aside)}")
    if cfg.system and not (cfg.interactive if cfg.chat is None else cfg.chat):
        raise UserError(f"system={cfg.system!r:.40} stands before a conversation, and a prompt is plain text "
                        "that goes on: give --chat too, or leave system out")
    prompts = [] if cfg.interactive else read_prompts(cfg)
    model = load_model(cfg.out_dir, cfg.device, None if cfg.dtype == "auto" else cfg.dtype, cfg.adapter)
    _, tokenizer = ready(model, None, cfg.out_dir)
    options = dict(max_new_tokens=cfg.max_new_tokens, temperature=cfg.temperature, top_k=cfg.top_k,
                   top_p=cfg.top_p, min_p=cfg.min_p, repetition_penalty=cfg.repetition_penalty,
                   stop=cfg.stop, seed=cfg.seed)
    opening = [{"role": "system", "content": cfg.system}] if cfg.system else []
    if cfg.interactive:
        prepare_terminal()
        chats = (tokenizer.chat_template or cfg.system) if cfg.chat is None else cfg.chat
        return converse(model, opening, options) if chats else go_on(model, options)

    # ---- one text: as it comes; several: in one batch ---------------------------------------------------
    if cfg.chat:                                       # the answer alone is shown
        shown = [""] * len(prompts)
        prompts = [[*opening, {"role": "user", "content": prompt}] for prompt in prompts]
    else:
        shown = prompts = [tokenizer.normalize(prompt) for prompt in prompts]      # what the model reads
    if len(prompts) == 1 and cfg.num_samples == 1:
        print(shown[0], end="", flush=True)
        return [shown[0] + write(model, prompts[0], options)]
    texts = []
    for before, new in zip(shown, generate(model, prompts, num_samples=cfg.num_samples, **options)):
        for text in new if cfg.num_samples > 1 else [new]:
            print(f"{before}{text}\n---------------")
            texts.append(before + text)
    return texts


def read_prompts(cfg: Config) -> list[str]:
    if cfg.prompt_file is None:
        if cfg.chat and not cfg.prompt.strip():
            raise UserError("chat answers a message, and there is none: give --prompt or --prompt_file, or "
                            "type with --interactive")
        return [cfg.prompt]
    if "prompt" in cfg.given:
        raise UserError("prompt and prompt_file were both given: one of them says what to go on from")
    try:
        text = (sys.stdin.read() if cfg.prompt_file == "-"
                else Path(cfg.prompt_file).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt_file={cfg.prompt_file} cannot be read: {error}") from None
    prompts = [line for line in text.split("\n") if line.strip()]     # splitlines() cuts at form feeds too
    if not prompts:
        raise UserError(f"prompt_file={cfg.prompt_file} holds no prompt, only {len(text):,} blank "
                        "characters: write one a line")
    return prompts


def write(model: Model, prompt: str | list[dict], options: dict) -> str:
    """Print the new text as it comes, and give it back. Ctrl-C ends it there."""
    text = ""
    try:
        for piece in stream(model, prompt, **options):
            print(piece, end="", flush=True)
            text += piece
    except KeyboardInterrupt:
        pass
    print()
    return text


# ---- in the terminal ------------------------------------------------------------------------------------

def prepare_terminal() -> None:
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    try:
        import readline  # noqa: F401   else a terminal cuts lines at 4,096 bytes
    except ImportError:
        pass                                               # Windows


def typed() -> str:
    """A line from the terminal; "" at the end of input and at Ctrl-C."""
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        print()
        return ""


def go_on(model: Model, options: dict) -> list[str]:
    """Plain continuation: all that was typed and written is the next turn's prompt. Ctrl-C stops a turn."""
    text = ""
    while line := typed():
        text += line + "\n"
        text += write(model, text, options) + "\n"
    return [text]


def converse(model: Model, opening: list[dict], options: dict) -> list[str]:
    """A conversation by the model's chat template; the answers that are in it at its end."""
    talk = Conversation(model, opening, options)
    print("/help lists the commands, an empty line ends")
    while line := typed().strip():
        try:
            if line.startswith("/") and not line.startswith("//"):
                if not talk.obey(*line.split(maxsplit=1)):
                    break
            else:
                talk.ask(talk.answered + [{"role": "user", "content": line.removeprefix("/")}])
        except UserError as error:
            print(f"({error})")
        except KeyboardInterrupt:                          # before the answer began
            print()
    return [message["content"] for message in talk.answered if message["role"] == "assistant"]


HELP = """\
/system <text>   start anew, with this text as the system message; without a text: show it
/reset           start anew, with the same system message
/retry           ask again for the last answer; at temperature 0 it stays the same
/save <file>     append the conversation to a file, a line of JSON as sft.py reads it
/help            this list
/quit            end, as an empty line does; Ctrl-C stops an answer
//text           a message that begins with a slash: the first one is taken off"""


class Conversation:
    """
    What was said. `opening`: the system message, or nothing. `turns`: the user's messages and the answers,
    alternating; the last message is without one where that was empty. `dropped`: as many of `turns` as the
    model does not see any more.
    """
    def __init__(self, model: Model, opening: list[dict], options: dict):
        self.model, self.options, self.draws = model, options, 0
        self.begin(opening)

    def begin(self, opening: list[dict]) -> None:
        """Anew. UserError, and all stays, where the template or the context takes no such system message."""
        start(self.model, None, [[*opening, {"role": "user", "content": "?"}]], 1, **self.options)
        self.opening, self.turns, self.dropped = opening, [], 0

    @property
    def answered(self) -> list[dict]:
        return self.turns[:len(self.turns) // 2 * 2]

    def obey(self, command: str, text: str = "") -> bool:
        """False = the user leaves."""
        if command == "/reset" or (command == "/system" and text):
            self.begin([{"role": "system", "content": text}] if command == "/system" else self.opening)
            print("(a new conversation)")
        elif command == "/system":
            print(self.opening[0]["content"] if self.opening else "(no system message)")
        elif command == "/retry":
            if not self.turns:
                raise UserError("nothing was asked yet")
            self.ask(self.turns[:(len(self.turns) - 1) // 2 * 2 + 1])
        elif command == "/save":
            self.save(text)
        elif command == "/help":
            print(HELP)
        elif command != "/quit":
            raise UserError(f"{command} is no command, /help lists them; a message that begins with a slash "
                            f"is typed with two: /{command}")
        return command != "/quit"

    def ask(self, turns: list[dict]) -> None:
        """
        The answer to the last of `turns`, of which the model sees what fits. UserError where that is not even
        the last one; then it is not kept.
        """
        limit, dropped = self.model.cfg.max_position_embeddings, self.dropped
        room = min(self.options["max_new_tokens"], limit // 2)                      # for the answer
        while True:
            seen = self.opening + turns[dropped:]
            size = len(encode(self.model.tokenizer, seen))
            if size + room <= limit or len(turns) - dropped == 1:
                break
            dropped += 2
        if size > limit:
            raise UserError(f"with this message there would be {size:,} tokens, and the model's context "
                            f"is {limit:,}: shorten it, it was not asked")
        if dropped and not self.dropped:
            print(f"(the model's context of {limit:,} tokens is full: it does not see the oldest turns now)")
        seed = self.options["seed"]
        if seed is not None:                               # one for each answer, or /retry would be vain
            seed = (seed + self.draws) % 2**63
        answer = write(self.model, seen, {**self.options, "seed": seed})
        self.turns, self.dropped, self.draws = turns, dropped, self.draws + 1
        if answer.strip():
            self.turns = [*turns, {"role": "assistant", "content": answer}]
        else:
            print("(an empty answer, which is not kept)")

    def save(self, path: str) -> None:
        if not path:
            raise UserError("/save needs a file: /save talks.jsonl")
        if not self.answered:
            raise UserError("there is no answer to save yet")
        line = json.dumps({"messages": self.opening + self.answered}, ensure_ascii=False) + "\n"
        try:
            with open(os.path.expanduser(path), "a+b") as file:
                if file.tell():                            # another's last line may not be closed
                    file.seek(-1, os.SEEK_END)
                    line = line if file.read() == b"\n" else "\n" + line
                file.write(line.encode("utf-8", "replace"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} could not be written: {error}") from None
        print(f"(saved to {path})")


# ---- from Python ----------------------------------------------------------------------------------------

def load_model(path: str | Path, device: str = "auto", dtype: str | torch.dtype | None = None,
               adapter: str | Path | None = None) -> Model:
    """
    The model of an out_dir, a checkpoint or a Hugging Face directory, ready to generate; its `tokenizer` is
    the directory's. dtype "fp32", "bf16", "fp16" or None: bf16 on a GPU, fp32 elsewhere; "int8": fp32 with
    the matrices in 8 bits, for a CPU (kernels/int8.py). `adapter`: the directory of a LoRA adapter, which is
    merged into the weights; its tokenizer, where it has one, is the model's then. UserError says what is
    missing, or does not fit.
    """
    place = launch.choose_device(device, launch.environment())
    eight_bits = dtype in ("int8", torch.int8)
    if eight_bits:
        check_products(place)
        dtype = torch.float32
    if not isinstance(dtype, torch.dtype):
        dtype = launch.choose_dtype(dtype or "auto", place)
    model, model.tokenizer = checkpoint.load_model_dir(path, place, dtype)
    if adapter is not None:
        model, model.tokenizer = checkpoint.with_adapter(model, model.tokenizer, adapter)
    return model.in_int8().eval() if eight_bits else model.eval()


def stream(model_or_path, prompt: str | list[dict], max_new_tokens: int = 100, temperature: float = 0.8,
           top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
           repetition_penalty: float = 1.0, stop=(), seed: int | None = None,
           tokenizer=None) -> Iterator[str]:
    """
    Yields the new text piece by piece; the pieces joined are what generate() returns. No piece ends within a
    character, and text that may be the beginning of a stop string is held back until it is decided.
    """
    ids, (text,) = start(model_or_path, tokenizer, [prompt], 1, stop, seed,
                         max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
                         min_p=min_p, repetition_penalty=repetition_penalty)
    for (new,) in ids:
        if piece := text.push(new):
            yield piece
        if text.done:
            return
    if rest := text.finish():
        yield rest


def generate(model_or_path, prompt: str | list, max_new_tokens: int = 100, temperature: float = 0.8,
             top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
             repetition_penalty: float = 1.0, stop=(), seed: int | None = None, num_samples: int = 1,
             tokenizer=None) -> str | list:
    """
    The new text for a prompt: a text to go on from, or a conversation to answer, a list of messages with
    "role" (system, user, assistant, tool) and "content" (a text), which becomes tokens by the tokenizer's
    chat template. A list of texts for num_samples > 1; for a list of prompts a list of either. All are
    generated in one batch. `model_or_path`: what load_model returned, or a path for it. `stop`: a string or
    several. UserError for values that make no sense and for conversations that cannot be answered.
    """
    one = isinstance(prompt, (str, dict))                  # a dict is refused below
    prompts = [prompt] if one else list(prompt)
    if not one and prompts and isinstance(prompts[0], dict):
        one, prompts = True, [prompts]                     # a conversation
    if not prompts:
        return []
    ids, texts = start(model_or_path, tokenizer, prompts, num_samples, stop, seed,
                       max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
                       min_p=min_p, repetition_penalty=repetition_penalty)
    found = [""] * len(texts)
    for new in ids:
        for i, (text, id) in enumerate(zip(texts, new)):
            found[i] += text.push(id)
        if all(text.done for text in texts):
            break
    found = [so_far + text.finish() for so_far, text in zip(found, texts)]
    grouped = [found[i:i + num_samples] for i in range(0, len(found), num_samples)]
    answers = [group[0] if num_samples == 1 else group for group in grouped]
    return answers[0] if one else answers


def start(model_or_path, tokenizer, prompts: list, num_samples: int, stop, seed: int | None,
          **options) -> tuple[Iterator[list[int]], list["Text"]]:
    """The ids to come, a list for each token, and what makes text of them: num_samples rows for a prompt."""
    cfg = config.make(Config, dict(num_samples=num_samples, stop=stop or [], seed=seed, **options))
    model, tokenizer = ready(model_or_path, tokenizer)
    generator = torch.Generator(model.head.device)
    generator.seed() if cfg.seed is None else generator.manual_seed(cfg.seed)
    limit, rows, texts = model.cfg.max_position_embeddings, [], []
    for prompt in prompts:
        ids, ends = encode(tokenizer, prompt), frozenset()
        if not isinstance(prompt, str):
            ends = frozenset([chat.end_of_turn(tokenizer)])
            if len(ids) > limit:                           # a window would lose who said what
                raise UserError(f"a conversation has {len(ids):,} tokens, and the model's context is "
                                f"{limit:,}: shorten its messages, or leave out the oldest")
        rows += [ids] * num_samples
        texts += [Text(tokenizer, cfg.stop, ends) for _ in range(num_samples)]
    largest = max(map(max, rows))
    if largest >= model.cfg.vocab_size:
        raise UserError(f"the prompt has the id {largest:,} and the model only {model.cfg.vocab_size:,} ids: "
                        f"{tokenizer} is another model's")
    ids = generate_ids(model, rows, vocab_size=tokenizer.vocab_size, generator=generator,
                       **{key: getattr(cfg, key) for key in options})
    return ids, texts


def ready(model_or_path, tokenizer, where=None) -> tuple[Model, tokenizers.Tokenizer]:
    model = model_or_path if isinstance(model_or_path, Model) else load_model(model_or_path)
    tokenizer = model.tokenizer if tokenizer is None else tokenizers.load_tokenizer(tokenizer)
    if tokenizer is None:
        where = where or ("the model" if isinstance(model_or_path, Model) else model_or_path)
        raise UserError(f"{where} has no tokenizer (no tokenizer.json): put one there, or pass "
                        "tokenizer= from Python")
    return model, tokenizer


def encode(tokenizer, prompt: str | list[dict]) -> list[int]:
    """
    Ids of a prompt, at least one: an empty text begins after an end of text, as documents in training. Those
    of a conversation end where its answer begins. UserError where there is none to give.
    """
    if isinstance(prompt, str):
        return tokenizer.opening + tokenizer.encode(prompt) or [tokenizer.eos_id]
    if not isinstance(prompt, (list, tuple)) or not all(isinstance(message, dict) for message in prompt):
        raise UserError("a prompt is a text, or a conversation as a list of messages, dicts of \"role\" and "
                        f"\"content\": {prompt!r:.80} is neither")
    if prompt and prompt[-1].get("role") == "assistant":
        raise UserError("the conversation ends with an answer of the assistant: leave it out, the model is "
                        "to write it")
    if tokenizer.chat_template is None:
        raise UserError(f"{tokenizer} has no chat template, so the model knows no conversations: train it on "
                        "some with sft.py, or let it go on from a text (without --chat)")
    return tokenizer.render_chat(prompt, add_generation_prompt=True)[0]      # with bos, where there is one


class Text:
    """
    One text while it is made: whole characters only, ended by an id that ends texts, one of `ends`, or a
    stop string.
    """
    def __init__(self, tokenizer, stop: list[str], ends: frozenset[int] = frozenset()):
        self.decoder, self.ends = tokenizers.StreamDecoder(tokenizer), tokenizer.ends | ends
        self.stop = [s for s in stop if s]
        self.held, self.done = "", False

    def push(self, id: int) -> str:
        """The text that this id settles."""
        if self.done:
            return ""
        if id in self.ends:
            return self.finish()
        self.held += self.decoder.push(id)
        return self.settle()

    def finish(self) -> str:
        if self.done:
            return ""
        self.held += self.decoder.finish()
        piece = self.settle() + self.held                  # nothing is held where settle() met a stop string
        self.done, self.held = True, ""
        return piece

    def settle(self) -> str:
        """Cut at the first stop string; else give out all but a tail that may become one."""
        found = min((self.held.find(s) for s in self.stop if s in self.held), default=-1)
        if found >= 0:
            piece, self.held, self.done = self.held[:found], "", True
            return piece
        tail = max((n for s in self.stop for n in range(1, len(s)) if self.held.endswith(s[:n])), default=0)
        cut = len(self.held) - tail
        piece, self.held = self.held[:cut], self.held[cut:]
        return piece


if __name__ == "__main__":
    config.run(main, Config)
