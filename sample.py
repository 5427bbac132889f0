"""
Let a model write.

    python sample.py --out_dir=out/tiny --prompt="def main():"       an out_dir, one of its checkpoints, or a
    python sample.py --out_dir=out/tiny --num_samples=5              Hugging Face directory of a known family
    python sample.py --out_dir=out/tiny --prompt_file=prompts.txt    one prompt a line; "-" = standard input
    python sample.py --out_dir=out/tiny --interactive                type, and it goes on; an empty line ends

From Python: from sample import generate, load_model, stream; generate("out/tiny", "def main():").

Temperature 0 always takes the most likely token. A text longer than the model's context goes on with a
window: each time it is full, the oldest half is dropped. Generation stops at the end-of-text token, at a
stop string (not part of the result), or after max_new_tokens.
"""
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

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
    prompt: str = ""                       # text to go on from; empty = the start of a document
    prompt_file: str | None = None         # prompts, one a line; "-" = standard input
    interactive: bool = False              # a conversation in the terminal
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
    prompts = [] if cfg.interactive else read_prompts(cfg)
    model = load_model(cfg.out_dir, cfg.device, None if cfg.dtype == "auto" else cfg.dtype)
    _, tokenizer = ready(model, None, cfg.out_dir)
    options = dict(max_new_tokens=cfg.max_new_tokens, temperature=cfg.temperature, top_k=cfg.top_k,
                   top_p=cfg.top_p, min_p=cfg.min_p, repetition_penalty=cfg.repetition_penalty,
                   stop=cfg.stop, seed=cfg.seed)
    if cfg.interactive:
        return converse(model, options)

    # ---- one text: as it comes; several: in one batch ---------------------------------------------------
    prompts = [tokenizer.normalize(prompt) for prompt in prompts]      # what the model reads
    if len(prompts) == 1 and cfg.num_samples == 1:
        print(prompts[0], end="", flush=True)
        return [prompts[0] + write(model, prompts[0], options)]
    texts = []
    for prompt, new in zip(prompts, generate(model, prompts, num_samples=cfg.num_samples, **options)):
        for text in new if cfg.num_samples > 1 else [new]:
            print(f"{prompt}{text}\n---------------")
            texts.append(prompt + text)
    return texts


def read_prompts(cfg: Config) -> list[str]:
    if cfg.prompt_file is None:
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


def write(model: Model, prompt: str, options: dict) -> str:
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


def converse(model: Model, options: dict) -> list[str]:
    """Plain continuation: all that was typed and written is the next turn's prompt. Ctrl-C stops a turn."""
    text = ""
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            break
        if not line:
            break
        text += line + "\n"
        text += write(model, text, options) + "\n"
    return [text]


# ---- from Python ----------------------------------------------------------------------------------------

def load_model(path: str | Path, device: str = "auto", dtype: str | torch.dtype | None = None) -> Model:
    """
    The model of an out_dir, a checkpoint or a Hugging Face directory, ready to generate; its `tokenizer` is
    the directory's. dtype "fp32", "bf16", "fp16" or None: bf16 on a GPU, fp32 elsewhere; "int8": fp32 with
    the matrices in 8 bits, for a CPU (kernels/int8.py). UserError says what is missing.
    """
    place = launch.choose_device(device, launch.environment())
    eight_bits = dtype in ("int8", torch.int8)
    if eight_bits:
        check_products(place)
        dtype = torch.float32
    if not isinstance(dtype, torch.dtype):
        dtype = launch.choose_dtype(dtype or "auto", place)
    model, tokenizer = checkpoint.load_model_dir(path, place, dtype)
    model.tokenizer = tokenizer
    return model.in_int8().eval() if eight_bits else model.eval()


def stream(model_or_path, prompt: str, max_new_tokens: int = 100, temperature: float = 0.8,
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


def generate(model_or_path, prompt: str | list[str], max_new_tokens: int = 100, temperature: float = 0.8,
             top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
             repetition_penalty: float = 1.0, stop=(), seed: int | None = None, num_samples: int = 1,
             tokenizer=None) -> str | list:
    """
    The new text for a prompt; a list of them for num_samples > 1; for a list of prompts a list of either. All
    are generated in one batch. `model_or_path`: what load_model returned, or a path for it. `stop`: a string
    or several. UserError for values that make no sense.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
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
    return answers[0] if isinstance(prompt, str) else answers


def start(model_or_path, tokenizer, prompts: list[str], num_samples: int, stop, seed: int | None,
          **options) -> tuple[Iterator[list[int]], list["Text"]]:
    """The ids to come, a list for each token, and what makes text of them: num_samples rows for a prompt."""
    cfg = config.make(Config, dict(num_samples=num_samples, stop=stop or [], seed=seed, **options))
    model, tokenizer = ready(model_or_path, tokenizer)
    generator = torch.Generator(model.head.device)
    generator.seed() if cfg.seed is None else generator.manual_seed(cfg.seed)
    rows = [ids for ids in (encode(tokenizer, prompt) for prompt in prompts)
            for _ in range(num_samples)]
    largest = max(map(max, rows))
    if largest >= model.cfg.vocab_size:
        raise UserError(f"the prompt has the id {largest:,} and the model only {model.cfg.vocab_size:,} ids: "
                        f"{tokenizer} is another model's")
    ids = generate_ids(model, rows, vocab_size=tokenizer.vocab_size, generator=generator,
                       **{key: getattr(cfg, key) for key in options})
    return ids, [Text(tokenizer, cfg.stop) for _ in rows]


def ready(model_or_path, tokenizer, where=None) -> tuple[Model, tokenizers.Tokenizer]:
    model = model_or_path if isinstance(model_or_path, Model) else load_model(model_or_path)
    tokenizer = model.tokenizer if tokenizer is None else tokenizers.load_tokenizer(tokenizer)
    if tokenizer is None:
        where = where or ("the model" if isinstance(model_or_path, Model) else model_or_path)
        raise UserError(f"{where} has no tokenizer (no tokenizer.json): put one there, or pass "
                        "tokenizer= from Python")
    return model, tokenizer


def encode(tokenizer, prompt: str) -> list[int]:
    """Ids of a prompt, at least one: an empty text begins after an end of text, as documents in training."""
    return tokenizer.opening + tokenizer.encode(prompt) or [tokenizer.eos_id]


class Text:
    """One text while it is made: whole characters only, ended by the end-of-text id or by a stop string."""
    def __init__(self, tokenizer, stop: list[str]):
        self.decoder, self.eos = tokenizers.StreamDecoder(tokenizer), tokenizer.eos_id
        self.stop = [s for s in stop if s]
        self.held, self.done = "", False

    def push(self, id: int) -> str:
        """The text that this id settles."""
        if self.done:
            return ""
        if id == self.eos:
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
