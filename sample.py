"""
Let a model write.

    python sample.py --out_dir=out/tiny --prompt="def main():"            an out_dir, one of its checkpoints, or a
    python sample.py --out_dir=out/tiny --num_samples=5 --temperature=1   Hugging Face directory of a known family
    python sample.py --out_dir=out/tiny --prompt_file=prompts.txt         one prompt a line; "-" reads standard input
    python sample.py --out_dir=out/tiny --interactive                     type, and it goes on; an empty line ends

From Python: from sample import generate, load_model, stream; generate("out/tiny", "def main():", max_new_tokens=50).

Temperature 0 always takes the most likely token. A text longer than the model's context goes on with a window: each time it
is full, the oldest half is dropped. Generation stops at the end-of-text token, at a stop string (not part of the result), or
after max_new_tokens.
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
    stop: list[str] = field(default_factory=list)  # strings that end a text; repeat as --stop="['A', 'B']"
    # how
    temperature: float = 0.8               # 0 = always the most likely token; 1 = as the model says
    top_k: int | None = None               # only the k most likely tokens
    top_p: float | None = None             # only the most likely tokens that together have this probability
    min_p: float | None = None             # only tokens at least this likely, relative to the most likely
    repetition_penalty: float = 1.0        # above 1: tokens that were there already become less likely
    seed: int | None = None                # equal seeds give equal texts; None = another text each time
    # machine
    device: str = "auto"                   # auto = CUDA, MPS, CPU
    dtype: str = "auto"                    # of weights and products: auto = bf16 on a GPU, fp32 elsewhere


def main(cfg: Config) -> list[str]:
    # ---- model ------------------------------------------------------------------------------------------------------
    model = load_model(cfg.out_dir, cfg.device, None if cfg.dtype == "auto" else cfg.dtype)
    options = dict(max_new_tokens=cfg.max_new_tokens, temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p,
                   min_p=cfg.min_p, repetition_penalty=cfg.repetition_penalty, stop=cfg.stop, seed=cfg.seed)
    if cfg.interactive:
        return converse(model, options)
    prompts = [cfg.prompt] if cfg.prompt_file is None else read_prompts(cfg)

    # ---- one text: as it comes; several: in one batch ---------------------------------------------------------------
    if len(prompts) == 1 and cfg.num_samples == 1:
        pieces = [prompts[0]]
        print(prompts[0], end="", flush=True)
        for piece in stream(model, prompts[0], **options):
            print(piece, end="", flush=True)
            pieces.append(piece)
        print()
        return ["".join(pieces)]
    texts = []
    for prompt, new in zip(prompts, generate(model, prompts, num_samples=cfg.num_samples, **options)):
        for text in new if cfg.num_samples > 1 else [new]:
            print(f"{prompt}{text}\n---------------")
            texts.append(prompt + text)
    return texts


def read_prompts(cfg: Config) -> list[str]:
    if "prompt" in cfg.given:
        raise UserError("prompt and prompt_file were both given: one of them says what to go on from")
    try:
        if cfg.prompt_file == "-":
            lines = sys.stdin.read().splitlines()
        else:
            lines = Path(cfg.prompt_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompt_file={cfg.prompt_file} cannot be read: {error}") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"prompt_file={cfg.prompt_file} holds no prompt: one a line, {len(lines)} empty lines found")
    return prompts


def converse(model: Model, options: dict) -> list[str]:
    """Plain continuation: what was typed and written so far is the prompt of the next turn. Ctrl-C stops a turn."""
    text = ""
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            break
        if not line:
            break
        text += line + "\n"
        try:
            for piece in stream(model, text, **options):
                print(piece, end="", flush=True)
                text += piece
        except KeyboardInterrupt:
            pass
        print()
        text += "\n"
    return [text]


# ---- from Python ----------------------------------------------------------------------------------------------------

def load_model(path: str | Path, device: str = "auto", dtype: str | torch.dtype | None = None) -> Model:
    """
    The model of an out_dir, a checkpoint or a Hugging Face directory, ready to generate; its `tokenizer` is the
    directory's. dtype "fp32", "bf16", "fp16" or None: bf16 on a GPU, fp32 elsewhere. UserError says what is missing.
    """
    place = launch.choose_device(device, launch.environment())
    if not isinstance(dtype, torch.dtype):
        dtype = launch.choose_dtype(dtype or "auto", place)
    model, tokenizer = checkpoint.load_model_dir(path, place, dtype)
    model.tokenizer = tokenizer
    return model.eval()


def stream(model_or_path, prompt: str, max_new_tokens: int = 100, temperature: float = 0.8, top_k: int | None = None,
           top_p: float | None = None, min_p: float | None = None, repetition_penalty: float = 1.0, stop=(),
           seed: int | None = None, tokenizer=None) -> Iterator[str]:
    """
    Yields the new text piece by piece; the pieces joined are what generate() returns. No piece ends within a character,
    and text that may be the beginning of a stop string is held back until it is decided.
    """
    model, tokenizer = ready(model_or_path, tokenizer)
    texts = [Text(tokenizer, stop)]
    ids = encode(tokenizer, prompt)
    for (new,) in generate_ids(model, [ids], **sampling(model, tokenizer, max_new_tokens, temperature, top_k, top_p, min_p,
                                                        repetition_penalty, seed)):
        piece = texts[0].push(new)
        if piece:
            yield piece
        if texts[0].done:
            return
    if rest := texts[0].finish():
        yield rest


def generate(model_or_path, prompt: str | list[str], max_new_tokens: int = 100, temperature: float = 0.8,
             top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
             repetition_penalty: float = 1.0, stop=(), seed: int | None = None, num_samples: int = 1,
             tokenizer=None) -> str | list:
    """
    The new text for a prompt; a list of them for num_samples > 1; for a list of prompts a list of either. All are
    generated in one batch. `model_or_path`: what load_model returned, or a path for it.
    """
    model, tokenizer = ready(model_or_path, tokenizer)
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not prompts:
        return []
    rows = [encode(tokenizer, p) for p in prompts for _ in range(num_samples)]
    texts = [Text(tokenizer, stop) for _ in rows]
    found = [""] * len(rows)
    for new in generate_ids(model, rows, **sampling(model, tokenizer, max_new_tokens, temperature, top_k, top_p, min_p,
                                                    repetition_penalty, seed)):
        for i, (text, id) in enumerate(zip(texts, new)):
            found[i] += text.push(id)
        if all(text.done for text in texts):
            break
    found = [so_far + text.finish() for so_far, text in zip(found, texts)]
    grouped = [found[i:i + num_samples] for i in range(0, len(found), num_samples)]
    answers = [group[0] if num_samples == 1 else group for group in grouped]
    return answers[0] if isinstance(prompt, str) else answers


def ready(model_or_path, tokenizer) -> tuple[Model, object]:
    model = model_or_path if isinstance(model_or_path, Model) else load_model(model_or_path)
    tokenizer = tokenizer or model.tokenizer
    if tokenizer is None:
        where = "the model" if isinstance(model_or_path, Model) else f"{model_or_path}"
        raise UserError(f"{where} has no tokenizer (no tokenizer.json): put one there, or pass tokenizer=")
    return model, tokenizer


def encode(tokenizer, prompt: str) -> list[int]:
    """Ids of a prompt; a document begins after an end of text, which is what an empty prompt becomes."""
    ids = tokenizer.encode(prompt)
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    return ids or [tokenizer.eos_id]


def sampling(model: Model, tokenizer, max_new_tokens: int, temperature: float, top_k, top_p, min_p, repetition_penalty: float,
             seed: int | None) -> dict:
    generator = torch.Generator(model.head.device)
    generator.seed() if seed is None else generator.manual_seed(seed)
    return dict(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                repetition_penalty=repetition_penalty, vocab_size=tokenizer.vocab_size, generator=generator)


class Text:
    """One text while it is made: whole characters only, ended by the end-of-text id or by a stop string."""
    def __init__(self, tokenizer, stop=()):
        self.decoder, self.eos = tokenizers.StreamDecoder(tokenizer), tokenizer.eos_id
        self.stop = [stop] if isinstance(stop, str) else [s for s in stop if s]
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
        piece = self.settle() + self.held
        if self.done:                                      # settle() met a stop string: what it held back is not part
            piece = piece.removesuffix(self.held)
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
