"""
What a loss costs: train.py with its defaults beside nanoGPT's recipe (GPT-2's shape, AdamW at 1e-3, a
cosine), on one thread, each round with another seed. Two tasks:

* characters: what nanoGPT's README trains on a CPU, 4 layers of 128, context 64, 12 sequences a step, 2,000
  steps. Ours has the same shape, context and batch, and fewer steps. The text is --data: the tiny
  Shakespeare of nanoGPT's data/shakespeare_char for the numbers of its README.
* 4,096 BPE tokens of the Python standard library, 6 layers of 192, context 128, 16 sequences a step: ours
  has as many steps as take the same CPU seconds.

The loss is that of the whole validation split. CPU seconds are those of the whole call: opening the corpus,
the steps, the loss at the end. --plot draws the losses of the steps.
"""
import contextlib
import importlib.util
import json
import math
import os
import statistics
import sys
import time

import numpy as np

from benchmarks.race import Contestant, take_turns
from benchmarks.train import check_nanogpt, gpt2, parameters, run_nanogpt
from config import UserError

TASKS = {
    "characters": dict(layers=4, width=128, heads=4, context=64, batch=12, ours=250, theirs=2000, warm_up=100,
                       beta2=0.99),
    "BPE": dict(layers=6, width=192, heads=6, context=128, batch=16, ours=240, theirs=300, warm_up=15,
                beta2=0.95),
}


def races(cfg, folder: str) -> list[dict]:
    check_nanogpt(cfg)
    if cfg.plot and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install matplotlib")
    found = []
    for task, work in TASKS.items():
        if task == "characters" and cfg.data is None:
            print("characters: left out, as its text is --data", file=sys.stderr)
            continue
        corpus, vocabulary = characters_of(cfg.data, folder) if task == "characters" else bpe_of(folder)
        work = dict(work, corpus=corpus, vocabulary=vocabulary)
        rivals = [Contestant("train.py", ours), Contestant("a plain loop, nanoGPT's recipe", recipe)]
        if task == "characters" and cfg.nanogpt:
            work["nanogpt"] = os.path.abspath(cfg.nanogpt)
            rivals.append(Contestant("nanoGPT's train.py", nanogpt))
        measured = take_turns(rivals, cfg, folder, lambda seed: {"work": {**work, "seed": seed}})
        found.append(compare(f"what a loss costs: {task}", *measured))
    if cfg.plot:
        draw(found, cfg.plot)
    return found


def compare(title: str, runs: dict[str, list[dict]], left_out: dict[str, str]) -> dict:
    """The race as bench.py prints it; a ratio is ours / its here, the mean over the seeds."""
    rows, lines = [], [f"{'':32}  {'steps':>6}  {'tokens':>9}  {'CPU sec':>8}  loss, mean (of each seed)"]
    for name, mine in runs.items():
        results = [run["result"] for run in mine]
        rows.append({"name": name, "equal": True, "loss": statistics.mean(one["loss"] for one in results),
                     "losses": [one["loss"] for one in results], "tokens": results[0]["tokens"],
                     "cpu_seconds": statistics.mean(run["cpu_seconds"] for run in mine),
                     "curve": results[0]["curve"]})
        row, each = rows[-1], " ".join(f"{one['loss']:.4f}" for one in results)
        lines.append(f"{name:32}  {results[0]['steps']:6,}  {row['tokens']:9,}  {row['cpu_seconds']:8.1f}  "
                     f"{row['loss']:.4f} ({each})")
    for row in rows[1:]:
        lines.append(f"ours / {row['name']}: {rows[0]['tokens'] / row['tokens']:.2f} x the tokens, "
                     f"{rows[0]['cpu_seconds'] / row['cpu_seconds']:.2f} x the CPU seconds, "
                     f"loss {rows[0]['loss'] - row['loss']:+.4f}")
    lines += [f"{name}: left out: {reason}" for name, reason in left_out.items()]
    return {"title": title, "rows": rows, "lines": lines, "left_out": left_out}


def draw(found: list[dict], path: str) -> None:
    """Loss of the steps (means of 20) against CPU seconds, with the validation loss at the end."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, len(found), figsize=(5 * len(found), 3.6), squeeze=False)
    for axis, race in zip(axes[0], found):
        for row in race["rows"]:
            curve = np.array(row["curve"]).reshape(-1, 2)              # nanoGPT's own program has none
            whole = len(curve) // 20 * 20
            seconds, losses = curve[:whole].reshape(-1, 20, 2).mean(1).T
            (line,) = axis.plot(seconds, losses, label=row["name"])
            axis.plot(row["cpu_seconds"], row["loss"], "o", color=line.get_color())
        axis.set(title=race["title"], xlabel="CPU seconds (o: validation)", ylabel="nats per token")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# ---- the texts --------------------------------------------------------------------------------------------
def characters_of(path: str, folder: str) -> tuple[str, int]:
    """(a directory with train.bin and val.bin, how many characters there are), as nanoGPT prepares it."""
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data={path} cannot be read as a text: {error}") from None
    least = 20 * TASKS["characters"]["context"]
    if len(text) < least:
        raise UserError(f"data={path} has {len(text):,} characters: a text of {least:,} at least is needed")
    known = sorted(set(text))
    index = {character: number for number, character in enumerate(known)}
    ids = np.array([index[character] for character in text], dtype=np.uint16)
    place, cut = os.path.join(folder, "characters"), int(0.9 * len(ids))
    os.makedirs(place)
    ids[:cut].tofile(os.path.join(place, "train.bin"))
    ids[cut:].tofile(os.path.join(place, "val.bin"))
    return place, len(known)


def bpe_of(folder: str) -> tuple[str, int]:
    import data
    from prepare import prepare
    place = os.path.join(folder, "bpe")
    with contextlib.redirect_stdout(sys.stderr):
        prepare("stdlib", place, "auto", val_fraction=0.01)
    return place, data.open_corpus(place, 128).vocab_size


# ---- the contestants --------------------------------------------------------------------------------------
def ours(clock, out: str, work: dict) -> dict:
    """Everything that concerns learning is a default of train.py; the number of parameters is GPT-2's."""
    import torch
    from train import train
    torch.set_num_threads(1)
    with clock:
        found = train(
            data=work["corpus"], out_dir=os.path.join(out, "model"), seed=work["seed"],
            max_steps=work["ours"], params=parameters(**work), vocab_size=work["vocabulary"],
            hidden_size=work["width"], num_hidden_layers=work["layers"], num_attention_heads=work["heads"],
            head_dim=work["width"] // work["heads"], sequence_length=work["context"],
            global_batch_size=work["batch"], device="cpu",
            eval_interval=None, sample_interval=None, save_interval=None)
    with open(os.path.join(out, "model", "metrics.jsonl"), encoding="utf-8") as file:
        seconds = [record["step-time"] for record in map(json.loads, file) if "step-time" in record]
    return {"loss": found["validation_loss"], "steps": found["steps"], "tokens": found["tokens"],
            "curve": list(zip(np.cumsum(seconds).tolist(), found["losses"]))}


def recipe(clock, out: str, work: dict) -> dict:
    """nanoGPT's loop and settings on the windows that train.py draws."""
    import data
    import torch
    torch.set_num_threads(1)
    steps, batch, warm_up = work["theirs"], work["batch"], work["warm_up"]
    model = gpt2(work["layers"], work["width"], work["vocabulary"], work["context"], work["heads"],
                 work["seed"])
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                   {"params": others, "weight_decay": 0.0}], betas=(0.9, work["beta2"]))
    began, curve = time.process_time(), []
    with clock:
        corpus = data.open_corpus(work["corpus"], work["context"], work["seed"])
        for step in range(steps):
            progress = max(0, step - warm_up) / (steps - warm_up)
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (step + 1) / (warm_up + 1) if step < warm_up else \
                    1e-4 + 0.5 * (1 + math.cos(math.pi * progress)) * 9e-4
            [ids] = corpus.step(step * batch, batch, 1, 0, 1)
            loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            curve.append((time.process_time() - began, loss.item()))
        loss = validation_loss(model, corpus)
    return {"loss": loss, "steps": steps, "tokens": steps * batch * work["context"], "curve": curve}


def validation_loss(model, corpus) -> float:
    """Of a GPT-2 that gives the mean loss of a batch."""
    import torch
    total = count = 0
    with torch.no_grad():
        for ids, labels in corpus.evaluation(32, 0, 1, None):
            valid = int((labels != -100).sum())
            total += model(ids, labels).item() * valid
            count += valid
    return total / count


def nanogpt(clock, out: str, work: dict) -> dict:
    """A checkout's own train.py, by the line of its README; its model at the end, on the validation split."""
    import data
    import torch
    torch.set_num_threads(1)
    steps = work["theirs"]
    flags = dict(device="cpu", dtype="float32", compile=False, n_head=work["heads"], dropout=0.0,
                 learning_rate=1e-3, min_lr=1e-4, beta2=work["beta2"], warmup_iters=work["warm_up"],
                 max_iters=steps, lr_decay_iters=steps, eval_iters=20, eval_interval=steps, log_interval=1)
    with clock:
        ended, _ = run_nanogpt(out, work, **flags)
    model = ended["raw_model"].eval()
    corpus = data.open_corpus(work["corpus"], work["context"], work["seed"])
    loss = validation_loss(lambda ids, labels: model(ids, labels.where(labels != -100, -1))[1], corpus)
    return {"loss": loss, "steps": steps, "tokens": steps * work["batch"] * work["context"],
            "curve": []}
