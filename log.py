"""
What a run says: the log line, metrics.jsonl, the progress bar, loss.png, and wandb or tensorboard when asked for.

    lines = log.Log(cfg, run, max_steps, start_step)     every rank makes one, rank 0 speaks
    lines.step(step, {"step-time": 1.2, "cross-entropy-loss": 7.89, "learning-rate": 3e-4, ...})
    lines.evaluation(step, {"validation-loss": 4.1, "bits-per-byte": 1.2})
    lines.finish()

`step` counts finished optimizer steps: the first line says 1, and a run resumed at 250 goes on with 251.
Nothing here can end a run: what is not installed, not logged in or offline costs one line, and the run goes on.
"""
import importlib
import json
import math
import os
import sys
import time

# The names of the log line in their order; a value that does not exist is left out, other names follow as they come.
FORMATS = {
    "step-time": "{:.3f} sec", "cross-entropy-loss": "{:.4f}", "load-balance-loss": "{:.6f}", "learning-rate": "{:.6e}",
    "gradient-norm": "{:.4f}", "tokens-per-second": "{:,.0f}", "peak-gpu-memory": "{:.2f} GB", "mfu": "{:.2%}",
    "validation-loss": "{:.4f}", "bits-per-byte": "{:.4f}",
}


def due(step: int, interval: int | None) -> bool:
    """Is something that happens every `interval` steps to happen now? None is never."""
    return interval is not None and step % interval == 0


def line(step: int, max_steps: int, values: dict) -> str:
    """step 00000123/00004096 | step-time 1.234 sec | cross-entropy-loss 7.8901 | ..."""
    names = [name for name in FORMATS if name in values] + [name for name in values if name not in FORMATS]
    pairs = [f"{name} {FORMATS.get(name, '{}').format(values[name])}" for name in names if values[name] is not None]
    return " | ".join([f"step {step:08d}/{max_steps:08d}", *pairs])


class Log:
    def __init__(self, cfg, run, max_steps: int, start_step: int = 0, wandb_id: str | None = None):
        """cfg: out_dir (exists), wandb_project, wandb_entity, wandb_name, tensorboard. `wandb_id`: the run to go on with."""
        self.out_dir, self.max_steps, self.start_step, self.main = cfg.out_dir, max_steps, start_step, run.main
        self.losses: list[tuple[int, float]] = []      # (step, loss) of every log line of this process, on every rank
        self.wandb_id, self.sinks = wandb_id, []       # sinks: (name, send(step, values), close())
        self.bar, self.since = "", None                # what the terminal shows; (when, at which step) the ETA counts from
        if not self.main:
            return
        self.path = os.path.join(cfg.out_dir, "metrics.jsonl")
        forget_after(start_step, self.path)
        self.file = open(self.path, "a", encoding="utf-8", newline="\n")
        if cfg.wandb_project:
            self.open_sink("wandb", lambda: self.open_wandb(cfg))
        if cfg.tensorboard:
            self.open_sink("tensorboard", lambda: open_tensorboard(os.path.join(cfg.out_dir, "tensorboard")))

    def step(self, step: int, values: dict) -> None:
        """The log line, with plain numbers."""
        if "cross-entropy-loss" in values:
            self.losses.append((step, values["cross-entropy-loss"]))
        self.progress(step)
        self.record(step, values)

    def evaluation(self, step: int, values: dict) -> None:
        self.record(step, values)

    def record(self, step: int, values: dict) -> None:
        if not self.main:
            return
        self.note(line(step, self.max_steps, values))
        self.file.write(json.dumps({"step": step, **{name: finite(value) for name, value in values.items()}}) + "\n")
        self.file.flush()
        for sink in list(self.sinks):
            self.attempt(sink, lambda: sink[1](step, values))

    def note(self, text: str) -> None:
        """A line, above the progress bar where there is one."""
        if not self.main:
            return
        if self.bar:
            sys.stderr.write("\r" + " " * len(self.bar) + "\r")
            sys.stderr.flush()
        print(text, flush=True)
        if self.bar:
            sys.stderr.write(self.bar)
            sys.stderr.flush()

    def progress(self, step: int) -> None:
        """The bar and the time left, on a terminal only: in a file or a pipe they are noise."""
        if not self.main or not sys.stderr.isatty():
            return
        now = time.monotonic()
        self.since = self.since or (now, step)         # from the first line on: the first step compiles and warms up
        seconds = (now - self.since[0]) / max(1, step - self.since[1]) * (self.max_steps - step)
        left = f"{clock(seconds)} left" if step > self.since[1] else ""
        done = 30 * step // self.max_steps
        self.bar = f"\r{step / self.max_steps:4.0%} [{'=' * done}{' ' * (30 - done)}] {left}"

    def finish(self) -> dict:
        """Close everything, draw loss.png. Returns {"steps", "losses"}."""
        if self.main:
            if self.bar:
                sys.stderr.write("\n")
                self.bar = ""
            self.file.close()
            for sink in list(self.sinks):
                self.attempt(sink, sink[2])
            draw_losses(self.path, os.path.join(self.out_dir, "loss.png"), self.note)
        return {"steps": self.losses[-1][0] if self.losses else self.start_step, "losses": self.losses}

    # -- wandb, tensorboard --
    def open_sink(self, name, opening) -> None:
        try:
            self.sinks.append((name, *opening()))
        except ImportError:
            self.note(f"{name} is not installed (pip install {name}): going on without it")
        except Exception as error:                     # no key, no network, a directory that cannot be written
            self.note(f"{name} does not start ({first_line(error)}): going on without it")

    def attempt(self, sink, act) -> None:
        try:
            act()
        except Exception as error:
            self.sinks.remove(sink)
            self.note(f"{sink[0]} failed ({first_line(error)}): going on without it")

    def open_wandb(self, cfg):
        wandb = importlib.import_module("wandb")
        run = wandb.init(project=cfg.wandb_project, entity=cfg.wandb_entity, name=cfg.wandb_name, id=self.wandb_id,
                         resume="allow", dir=cfg.out_dir, config={k: v for k, v in vars(cfg).items() if k not in ("given", "files")})
        self.wandb_id = run.id
        return lambda step, values: run.log(values, step=step), run.finish


def open_tensorboard(folder: str):
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder)

    def send(step, values):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    return send, writer.close


def forget_after(step: int, path: str) -> None:
    """Drop the lines after `step` (and a torn one): a resumed run writes them anew. Atomic."""
    kept = [record for record in read_metrics(path) if record["step"] <= step] if step else []
    with open(path + ".tmp", "w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
    os.replace(path + ".tmp", path)


def read_metrics(path: str) -> list[dict]:
    """The records of a metrics.jsonl; a last line that a kill has torn is left out."""
    if not os.path.exists(path):
        return []
    records = []
    with open(path, encoding="utf-8", newline="\n") as file:
        for text in file:
            try:
                records.append(json.loads(text))
            except ValueError:
                continue
    return records


def finite(value):
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw_losses(metrics: str, image: str, note) -> None:
    """loss.png of the whole run, resumed parts included."""
    try:
        figure = importlib.import_module("matplotlib.figure").Figure((8, 5), layout="constrained")   # no pyplot, no window
    except ImportError:
        note("loss.png needs matplotlib (pip install matplotlib)")
        return
    axes, records = figure.subplots(), read_metrics(metrics)
    for name in ("cross-entropy-loss", "validation-loss"):
        points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
        if points:
            axes.plot(*zip(*points), label=name, marker="o" if len(points) == 1 else None)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    figure.savefig(image + ".tmp", format="png")
    os.replace(image + ".tmp", image)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def first_line(error) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
