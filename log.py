"""
What a run says: the log line, metrics.jsonl, the progress bar, loss.png; wandb and tensorboard on request.

    lines = log.Log(cfg, run, max_steps, start_step)     every rank makes one, rank 0 speaks
    lines.step(step, {"step-time": 1.2, "cross-entropy-loss": 7.89, "learning-rate": 3e-4, ...})
    lines.evaluation(step, {"validation-loss": 4.1, "bits-per-byte": 1.2})
    lines.finish()

`step` counts finished optimizer steps: the first line says 1, a run resumed at 250 goes on with 251. Nothing
here ends a run: what is not installed, not logged in or offline costs one line, and the run goes on.
"""
import importlib
import json
import math
import os
import sys
import time
from pathlib import Path

import checkpoint
from config import UserError

# In the order of the log line; a value that does not exist is left out, other names follow as they come.
FORMATS = {
    "step-time": "{:.3f} sec", "cross-entropy-loss": "{:.4f}", "load-balance-loss": "{:.6f}",
    "learning-rate": "{:.6e}", "gradient-norm": "{:.4f}", "tokens-per-second": "{:,.0f}",
    "peak-gpu-memory": "{:.2f} GB", "mfu": "{:.2%}", "validation-loss": "{:.4f}", "bits-per-byte": "{:.4f}",
}


def due(step: int, interval: int | None) -> bool:
    """Does what happens every `interval` steps happen now? None is never."""
    return interval is not None and step % interval == 0


def line(step: int, max_steps: int, values: dict) -> str:
    """step 00000123/00004096 | step-time 1.234 sec | cross-entropy-loss 7.8901 | ..."""
    names = [name for name in FORMATS if name in values] + [name for name in values if name not in FORMATS]
    pairs = [f"{name} {FORMATS.get(name, '{}').format(values[name])}" for name in names]
    return " | ".join([f"step {step:08d}/{max_steps:08d}", *pairs])


class Log:
    def __init__(self, cfg, run, max_steps: int, start_step: int = 0, wandb_id: str | None = None):
        """Of cfg: out_dir (exists), wandb_project, wandb_entity, wandb_name, tensorboard."""
        self.main, self.max_steps, self.start_step = run.main, max_steps, start_step
        self.losses: list[tuple[int, float]] = []      # (step, loss) of the log lines, on every rank
        self.sinks, self.wandb_id = [], wandb_id       # [(name, send(step, values), close())]
        self.bar, self.began = "", None                # what a terminal shows; (time, step) at its start
        if not self.main:
            return
        self.image = os.path.join(cfg.out_dir, "loss.png")
        self.path = os.path.join(cfg.out_dir, "metrics.jsonl")
        forget_after(start_step, self.path)
        self.attempt("metrics.jsonl", lambda: self.sinks.append(("metrics.jsonl", *open_metrics(self.path))))
        if cfg.wandb_project:
            self.attempt("wandb", lambda: self.sinks.append(("wandb", *self.open_wandb(cfg))))
        if cfg.tensorboard:
            self.attempt("tensorboard", lambda: self.sinks.append(("tensorboard", *open_tensorboard(cfg))))

    def step(self, step: int, values: dict) -> None:
        """The log line, from plain numbers; None is left out."""
        if values.get("cross-entropy-loss") is not None:
            self.losses.append((step, values["cross-entropy-loss"]))
        self.progress(step)
        self.record(step, values)

    def evaluation(self, step: int, values: dict) -> None:
        self.record(step, values)

    def record(self, step: int, values: dict) -> None:
        values = {name: value for name, value in values.items() if value is not None}
        if not self.main or not values:
            return
        self.note(line(step, self.max_steps, values))
        for name, send, _ in list(self.sinks):
            self.attempt(name, lambda: send(step, values))

    def note(self, text: str) -> None:
        """A line, above the progress bar where there is one."""
        if not self.main or not text:
            return
        if self.bar:
            sys.stderr.write("\r" + " " * len(self.bar) + "\r")
            sys.stderr.flush()
        print(text, flush=True)
        if self.bar:
            sys.stderr.write(self.bar)
            sys.stderr.flush()

    def complain(self, cfg, step: int, loss: float, in_a_row: int) -> None:
        """
        Stop a run that has diverged; warn about one that does not learn. `in_a_row`: how many of the last
        steps had a gradient that is not finite.
        """
        if in_a_row >= 10:
            state, _ = checkpoint.newest_state(Path(cfg.out_dir))
            hint = f", for instance by --resume={state} --lr={cfg.lr / 3:.1e}" if state else ""
            raise UserError(f"{in_a_row} steps in a row had a gradient that is not finite (step {step}, loss "
                            f"{loss}): lower lr={cfg.lr} or warm up longer{hint}")
        warm = max(1, round(cfg.warmup_ratio * self.max_steps))
        if warm <= step < warm + cfg.log_interval and step >= 20 and loss > 0.99 * math.log(cfg.vocab_size):
            self.note(f"warning: after the warm-up the loss is still {loss:.4f}, what a model that knows "
                      f"nothing has ({math.log(cfg.vocab_size):.4f}): is lr={cfg.lr} right?")

    def progress(self, step: int) -> None:
        """The bar and the time left, on a terminal only: in a file or a pipe they are noise."""
        if not self.main or not sys.stderr.isatty():
            return
        now = time.monotonic()
        self.began = self.began or (now, step)         # the first step compiles and warms up: not counted
        done, filled, left = step - self.began[1], 30 * step // self.max_steps, ""
        if done:
            left = f"{clock((now - self.began[0]) / done * (self.max_steps - step))} left"
        self.bar = f"{step / self.max_steps:4.0%} [{'=' * filled:30}] {left:20}"

    def finish(self) -> dict:
        """Closes everything and draws loss.png. Returns {"steps", "losses"}."""
        if self.main:
            if self.bar:
                sys.stderr.write("\n")
                self.bar = ""
            for name, _, close in list(self.sinks):
                self.attempt(name, close)
            self.attempt("loss.png", lambda: draw_losses(self.path, self.image))
        return {"steps": self.losses[-1][0] if self.losses else self.start_step, "losses": self.losses}

    def attempt(self, name: str, act) -> None:
        """Do something that may fail without harm: no package, no key, no network, no space."""
        try:
            act()
        except Exception as error:
            self.sinks = [sink for sink in self.sinks if sink[0] != name]
            missing = isinstance(error, ImportError) and (error.name or name).split(".")[0]
            reason = f"needs pip install {missing}" if missing else f"failed ({first_line(error)})"
            self.note(f"{name} {reason}: going on without it")

    def open_wandb(self, cfg):
        wandb = importlib.import_module("wandb")
        run = wandb.init(project=cfg.wandb_project, entity=cfg.wandb_entity, name=cfg.wandb_name,
                         dir=cfg.out_dir, id=self.wandb_id, resume="allow", config=dict(vars(cfg)))
        self.wandb_id = run.id
        return lambda step, values: run.log(values, step=step), run.finish


def open_metrics(path: str):
    file = open(path, "a", encoding="utf-8", newline="\n")

    def send(step, values):
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        file.write(json.dumps({"step": step, **finite}) + "\n")             # JSON has no NaN
        file.flush()
    return send, file.close


def open_tensorboard(cfg):
    summary = importlib.import_module("torch.utils.tensorboard")
    writer = summary.SummaryWriter(os.path.join(cfg.out_dir, "tensorboard"))

    def send(step, values):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    return send, writer.close


def forget_after(step: int, path: str) -> None:
    """Drop the records after `step`, which a resumed run writes anew. Atomic."""
    kept = [record for record in read_metrics(path) if record["step"] <= step] if step else []
    with open(path + ".tmp", "w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
    os.replace(path + ".tmp", path)


def read_metrics(path: str) -> list[dict]:
    """The records of a metrics.jsonl, without a line that a kill has torn."""
    records = []
    if os.path.exists(path):
        with open(path, encoding="utf-8", newline="\n") as file:
            for text in file:
                try:
                    records.append(json.loads(text))
                except ValueError:
                    continue
    return records


def evaluation_at(out_dir: str, step: int) -> dict:
    """The evaluation that metrics.jsonl holds for a step; {} when there is none."""
    records = read_metrics(os.path.join(out_dir, "metrics.jsonl"))
    return next((record for record in records if record["step"] == step and "validation-loss" in record), {})


def draw_losses(metrics: str, image: str) -> None:
    """loss.png of the whole run, resumed parts included. Without pyplot: no window, no global state."""
    figure = importlib.import_module("matplotlib.figure").Figure((8, 5), layout="constrained")
    axes, records = figure.subplots(), read_metrics(metrics)
    for name in ("cross-entropy-loss", "validation-loss"):
        points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
        if points:
            axes.plot(*zip(*points), label=name, marker="o" if len(points) < 3 else None)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    if axes.lines:
        axes.legend()
    figure.savefig(image + ".tmp", format="png")
    os.replace(image + ".tmp", image)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def first_line(error) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
