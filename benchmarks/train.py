"""
Steps of training at equal parameters, batch and optimizer (AdamW): train.py beside nanoGPT's own train.py
(--nanogpt=<a checkout>), or beside a plain loop of the same shape. The corpora are made: ids by Zipf's law.
"""
import contextlib
import glob
import io
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import time

import numpy as np

from benchmarks.race import Contestant, run_race
from config import HERE, UserError

WARM_UP = 4                                    # looks at the clock before the first that counts
SIZES = {
    "30M, GPT-2's vocabulary": dict(layers=6, width=384, vocabulary=50304, context=256, batch=12),
    "10M, 65 characters": dict(layers=6, width=384, vocabulary=65, context=256, batch=12),
    "124M": dict(layers=12, width=768, vocabulary=50304, context=1024, batch=32),
    "1B": dict(layers=20, width=2048, vocabulary=50304, context=1024, batch=8),
}
RACES = {                                      # size, compiled?
    "cpu": [("30M, GPT-2's vocabulary", False), ("30M, GPT-2's vocabulary", True),
            ("10M, 65 characters", True)],
    "cuda": [("124M", True), ("1B", True)],
}


def races(cfg, folder: str) -> list[dict]:
    check_nanogpt(cfg), check_device(cfg)
    peak, found = gemm_peak(cfg.device), []
    for size, compiled in RACES[cfg.device]:
        # a GPU must not be waited for at each step
        work = dict(SIZES[size], compiled=compiled, device=cfg.device, steps=cfg.steps,
                    every=1 if cfg.device == "cpu" else 5)
        work["corpus"] = corpus_of(folder, work["vocabulary"])
        work["nanogpt"] = cfg.nanogpt and os.path.abspath(cfg.nanogpt)
        rivals = [Contestant("train.py", ours), Contestant("nanoGPT's train.py", nanogpt) if cfg.nanogpt
                  else Contestant("a plain GPT-2 loop", plain_loop)]
        if cfg.device == "cpu" and not compiled:
            rivals.append(Contestant("train.py, two processes of one thread", two_ranks))
        if not found:
            rivals.append(Contestant("train.py with Muon", ours_with_muon))
        tokens, kind = work["batch"] * work["context"], "compiled" if compiled else "not compiled"
        race = run_race(f"training {size}, {work['batch']} x {work['context']} tokens a step, {cfg.device}, "
                        f"{kind}", rivals, cfg, folder, tokens * cfg.steps, "tokens/s", work=work)
        flops = 6 * parameters(**work) + 12 * work["layers"] * work["width"] * work["context"]
        race["notes"] = [f"{row['name']}: MFU {row['rate'] * flops / peak:.1%} of the {peak / 1e12:.2f} "
                         f"TFLOP/s that a large product reaches here" for row in race["rows"]]
        found.append(race)
    return found


def check_nanogpt(cfg) -> None:
    if cfg.nanogpt and not os.path.exists(os.path.join(cfg.nanogpt, "model.py")):
        raise UserError(f"nanogpt={cfg.nanogpt} holds no model.py: give a checkout of "
                        f"https://github.com/karpathy/nanoGPT")


def check_device(cfg) -> None:
    import torch
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"torch {torch.__version__} sees no CUDA device: leave --device=cuda out")


def parameters(layers: int, width: int, vocabulary: int, **rest) -> int:
    """Of GPT-2's matrices, head and embedding being one; norms and positions left out."""
    return 12 * layers * width ** 2 + vocabulary * width


def gemm_peak(device: str) -> float:
    """FLOP/s of a large product: fp32 on a CPU, bf16 on a GPU; the best of several."""
    import torch
    n, dtype = (2048, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    a, seconds = torch.randn(n, n, device=device).to(dtype), []
    for _ in range(10):
        began = time.perf_counter()
        a @ a
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * n ** 3 / min(seconds)


def corpus_of(folder: str, vocabulary: int) -> str:
    """A directory with train.bin and val.bin, which nanoGPT reads, too."""
    path = os.path.join(folder, f"corpus-{vocabulary}")
    if os.path.exists(path):                           # made for an earlier race
        return path
    entries = min(vocabulary, 50257)
    frequency = 1 / np.arange(1, entries + 1)
    random = np.random.default_rng(0)
    os.makedirs(path, exist_ok=True)
    for split, count in (("train", 2_000_000), ("val", 100_000)):
        ids = random.choice(entries, count, p=frequency / frequency.sum())
        ids.astype(np.uint16).tofile(os.path.join(path, f"{split}.bin"))
    return path


# ---- the contestants --------------------------------------------------------------------------------------
def note(clock, seconds: list[float], work: dict) -> None:
    """What the race counts: `steps` times the median of the steps' seconds, and a GPU's memory."""
    clock.seconds = statistics.median(seconds[WARM_UP:]) * work["steps"]
    note_memory(clock, work["device"])


def note_memory(clock, device: str) -> None:
    if device == "cuda":
        import torch
        clock.peak_memory = torch.cuda.max_memory_allocated()


def settings_of(out: str, work: dict, **changes) -> dict:
    """
    For train.py: as many parameters as GPT-2 has at this depth and width, and how the batch is cut into
    forwards is its own choice.
    """
    return {"data": work["corpus"], "out_dir": os.path.join(out, "model"), "vocab_size": work["vocabulary"],
            "params": parameters(**work), "hidden_size": work["width"], "num_hidden_layers": work["layers"],
            "num_attention_heads": work["width"] // 64, "sequence_length": work["context"],
            "global_batch_size": work["batch"], "optimizer": "adamw", "device": work["device"],
            "compile": work["compiled"], "max_steps": (WARM_UP + work["steps"]) * work["every"],
            "resume": "never", "log_interval": work["every"], "eval_interval": None, "eval_tokens": 1000,
            "sample_interval": None, "save_interval": None, **changes}


def seconds_of(out: str) -> list[float]:
    [path] = glob.glob(os.path.join(out, "model", "metrics.jsonl"))
    with open(path, encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return [record["step-time"] for record in records if "step-time" in record]


def ours(clock, out: str, work: dict, **changes) -> None:
    from train import train
    train(**settings_of(out, work, **changes))
    note(clock, seconds_of(out), work)


def ours_with_muon(clock, out: str, work: dict) -> None:
    ours(clock, out, work, optimizer="muon")


def two_ranks(clock, out: str, work: dict) -> None:
    """The batch shared out over two processes (gloo), each with half of the threads."""
    flags = [f"--{key}={value}" for key, value in settings_of(out, work).items()]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                    os.path.join(HERE, "train.py"), *flags], check=True)
    note(clock, seconds_of(out), work)


def nanogpt(clock, out: str, work: dict) -> None:
    dtype = "float32" if work["device"] == "cpu" else "bfloat16"
    _, said = run_nanogpt(
        out, work, device=work["device"], dtype=dtype, compile=work["compiled"], n_head=work["width"] // 64,
        max_iters=(WARM_UP + work["steps"]) * work["every"], log_interval=work["every"], eval_iters=1,
        eval_interval=10 ** 9)
    # the line tells the time of the one iteration that it stands behind
    found = re.findall(r"^iter \d+: .* time ([\d.]+)ms", said, re.MULTILINE)
    note(clock, [float(one) / 1000 for one in found], work)


def run_nanogpt(out: str, work: dict, **flags) -> tuple[dict, str]:
    """
    A checkout's own train.py, in this process: its variables at the end, and what it printed. It takes a
    vocabulary of 50,304 unless it finds another in a meta.pkl.
    """
    import pickle
    with open(os.path.join(work["corpus"], "meta.pkl"), "wb") as file:
        pickle.dump({"vocab_size": work["vocabulary"]}, file)
    flags = dict(dataset=work["corpus"], out_dir=out, n_layer=work["layers"], n_embd=work["width"],
                 block_size=work["context"], batch_size=work["batch"], gradient_accumulation_steps=1, **flags)
    os.chdir(work["nanogpt"])
    sys.path.insert(0, work["nanogpt"])                # its model.py, not ours
    sys.argv = ["train.py", *(f"--{key}={value}" for key, value in flags.items())]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        ended = runpy.run_path("train.py", run_name="__main__")
    return ended, said.getvalue()


def gpt2(layers: int, width: int, vocabulary: int, context: int, heads: int, seed: int = 0):
    """GPT-2's shape, written anew: LayerNorm, GELU, learned positions, q, k and v in one, all logits."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.between = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2)
                       for part in self.qkv(self.before(x)).split(width, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.between(x))))

    class GPT2(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.norm = nn.LayerNorm(width, bias=False)
            for name, p in self.named_parameters():
                if p.ndim == 2:
                    into_residual = name.endswith(("out.weight", "down.weight"))
                    nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if into_residual else 0.02)

        def forward(self, ids, labels=None):
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
            x = self.norm(self.blocks(x))
            if labels is None:                         # what follows the last token alone
                return F.linear(x[:, -1], self.tokens.weight)
            return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), labels.flatten())

    torch.manual_seed(seed)
    return GPT2()


def plain_loop(clock, out: str, work: dict) -> None:
    """
    What nanoGPT's loop does, for where its own code is not at hand: the batch of the next step is read while
    the device works, a clip, AdamW (fused on a GPU only, as there).
    """
    import torch
    device, context, cuda = work["device"], work["context"], work["device"] == "cuda"

    def rows():
        starts = random.integers(len(stream) - context - 1, size=work["batch"])
        ids = torch.from_numpy(np.stack([stream[s:s + context + 1] for s in starts]).astype(np.int64))
        if cuda:
            ids = ids.pin_memory().to(device, non_blocking=True)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    torch.set_float32_matmul_precision("high")
    random = np.random.default_rng(0)
    stream = np.memmap(os.path.join(work["corpus"], "train.bin"), np.uint16, mode="r")
    model = gpt2(work["layers"], work["width"], work["vocabulary"], context, work["width"] // 64).to(device)
    forward = torch.compile(model) if work["compiled"] else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=cuda)
    seconds, coming = [], rows()
    for _ in range(WARM_UP + work["steps"]):
        began = time.perf_counter()
        for _ in range(work["every"]):
            with torch.autocast(device, torch.bfloat16, enabled=cuda):
                loss = forward(*coming)
            coming = rows()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        assert np.isfinite(loss.item())                # waits for the device
        seconds.append((time.perf_counter() - began) / work["every"])
    note(clock, seconds, work)
