"""The log line, its copies, and everything that may be missing."""
import io
import json
import math
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

import log

VALUES = {"tokens-per-second": 1234567.0, "cross-entropy-loss": 7.89012, "step-time": 1.23449,
          "learning-rate": 3e-4, "gradient-norm": 0.98761, "load-balance-loss": 1.0123449,
          "peak-gpu-memory": 62.341}


@dataclass
class Config:
    out_dir: str = "."
    wandb_project: str | None = None
    wandb_entity: str | None = None
    wandb_name: str | None = None
    tensorboard: bool = False


class Rank:
    def __init__(self, main=True):
        self.main = main


class Terminal(io.StringIO):
    def isatty(self):
        return True


def records():
    return [json.loads(line) for line in Path("metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def hide(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)      # `import package` raises ImportError


def test_the_line_has_a_fixed_order_and_leaves_out_what_does_not_exist(capsys):
    lines = log.Log(Config(), Rank(), 4096)
    lines.step(123, VALUES)
    lines.step(124, {"cross-entropy-loss": 2.0, "load-balance-loss": None, "mfu": 0.4567, "step-time": 1})
    lines.evaluation(124, {"validation-loss": 4.12341, "bits-per-byte": 1.23449})
    lines.evaluation(125, {})
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "step 00000123/00004096 | step-time 1.234 sec | cross-entropy-loss 7.8901 | "
        "load-balance-loss 1.012345 | learning-rate 3.000000e-04 | gradient-norm 0.9876 | "
        "tokens-per-second 1,234,567 | peak-gpu-memory 62.34 GB",
        "step 00000124/00004096 | step-time 1.000 sec | cross-entropy-loss 2.0000 | mfu 45.67%",
        "step 00000124/00004096 | validation-loss 4.1234 | bits-per-byte 1.2345"]
    assert said.err == ""                                # no bar without a terminal
    assert records()[0] == {"step": 123, **VALUES} and len(records()) == 3
    assert lines.finish() == {"steps": 124, "losses": [(123, 7.89012), (124, 2.0)]}


def test_json_never_holds_nan():
    lines = log.Log(Config(), Rank(), 10)
    lines.step(1, {"cross-entropy-loss": math.nan, "gradient-norm": math.inf, "mfu": 1.0})
    lines.finish()
    assert records() == [{"step": 1, "cross-entropy-loss": None, "gradient-norm": None, "mfu": 1.0}]


def test_a_resumed_run_holds_each_step_once():
    lines = log.Log(Config(), Rank(), 10)
    for step in range(1, 8):
        lines.step(step, {"cross-entropy-loss": float(step)})
    with open("metrics.jsonl", "a", encoding="utf-8", newline="\n") as file:
        file.write('{"step": 8, "cross-ent')             # killed while it wrote
    lines = log.Log(Config(), Rank(), 10, start_step=5)
    lines.step(6, {"cross-entropy-loss": 60.0})
    assert [record["step"] for record in records()] == [1, 2, 3, 4, 5, 6]
    assert records()[-1]["cross-entropy-loss"] == 60.0
    log.Log(Config(), Rank(), 10)
    assert records() == []                               # from the start: nothing is left of the old run


def test_only_rank_0_speaks_and_writes(capsys):
    lines = log.Log(Config(wandb_project="p", tensorboard=True), Rank(main=False), 10)
    lines.step(1, VALUES)
    lines.evaluation(1, {"validation-loss": 1.0})
    lines.note("hello")
    assert lines.finish()["losses"] == [(1, 7.89012)]    # every rank returns them
    assert capsys.readouterr() == ("", "") and os.listdir() == []


def test_the_bar_and_the_time_left_are_for_terminals(monkeypatch, capsys):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(log.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys, "stderr", Terminal())
    lines = log.Log(Config(), Rank(), 1000)
    lines.step(1, VALUES)
    lines.step(11, VALUES)                               # 1 s a step, 989 to go
    bar = sys.stderr.getvalue().split("\r")[-1]
    assert "0:16:29 left" in bar and bar.startswith("  1% [")
    assert "\r" not in capsys.readouterr().out
    lines.note("a word")
    assert sys.stderr.getvalue().endswith("\r" + bar)    # back below the line


def test_due_counts_finished_steps():
    assert [step for step in range(1, 10) if log.due(step, 3)] == [3, 6, 9]
    assert not log.due(3, None)


def test_the_losses_are_drawn_when_matplotlib_is_there(monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    lines = log.Log(Config(), Rank(), 10)
    lines.step(1, VALUES)
    lines.evaluation(1, {"validation-loss": 3.0})
    lines.finish()
    assert Path("loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir()) == ["loss.png", "metrics.jsonl"]
    hide(monkeypatch, "matplotlib.figure")
    log.Log(Config(), Rank(), 10).finish()
    assert "loss.png needs pip install matplotlib: going on without it" in capsys.readouterr().out


def test_what_is_not_installed_costs_one_line(monkeypatch, capsys):
    hide(monkeypatch, "wandb")
    hide(monkeypatch, "tensorboard")
    hide(monkeypatch, "torch.utils.tensorboard")
    lines = log.Log(Config(wandb_project="p", tensorboard=True), Rank(), 10)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and said[0] == "wandb needs pip install wandb: going on without it"
    assert "tensorboard" in said[1]
    lines.step(1, VALUES)
    assert len(capsys.readouterr().out.splitlines()) == 1


def fake_wandb(monkeypatch, init):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))


def test_wandb_without_a_key_or_a_network_never_ends_a_run(monkeypatch, capsys):
    def no_key(**settings):
        raise ValueError("api_key not configured (no-tty)\ncall wandb.login()")
    fake_wandb(monkeypatch, no_key)
    log.Log(Config(wandb_project="p"), Rank(), 10)
    said = "wandb failed (ValueError: api_key not configured (no-tty)): going on without it\n"
    assert capsys.readouterr().out == said

    def offline(values, step):
        raise ConnectionError("no route")
    fake_wandb(monkeypatch, lambda **_: types.SimpleNamespace(id="r1", log=offline, finish=lambda: None))
    lines = log.Log(Config(wandb_project="p"), Rank(), 10)
    lines.step(1, VALUES)
    lines.step(2, VALUES)
    assert capsys.readouterr().out.count("wandb failed (ConnectionError: no route)") == 1
    assert len(records()) == 2


def test_wandb_gets_every_record_and_goes_on_with_the_same_run(monkeypatch):
    sent, settings, closed = [], {}, []

    def init(**given):
        settings.update(given)
        return types.SimpleNamespace(id=given["id"] or "fresh", finish=lambda: closed.append(True),
                                     log=lambda values, step: sent.append((step, values)))
    fake_wandb(monkeypatch, init)
    lines = log.Log(Config(wandb_project="p", wandb_name="n"), Rank(), 10)
    assert lines.wandb_id == "fresh" and settings["project"] == "p" and settings["name"] == "n"
    lines.step(1, {"cross-entropy-loss": 2.0, "load-balance-loss": None})
    lines.evaluation(1, {"validation-loss": 3.0})
    lines.finish()
    assert sent == [(1, {"cross-entropy-loss": 2.0}), (1, {"validation-loss": 3.0})] and closed == [True]
    assert log.Log(Config(wandb_project="p"), Rank(), 10, 1, wandb_id="old").wandb_id == "old"
