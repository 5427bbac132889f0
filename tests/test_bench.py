"""The referee: equal work, fair clocks, and nothing hidden that went wrong."""
import importlib.util
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bench
from bench import Config
from benchmarks import learn, prepare, sample, train
from benchmarks.race import Contestant, alone, compare, machine, run_race, show
from config import UserError

BENCH = Path(bench.__file__)


# ---- contestants of this file; each runs in a process of its own ------------------------------------------
def quick(clock, out, pause):
    time.sleep(0.3)                            # loading something
    with clock:
        time.sleep(pause)
    time.sleep(0.3)                            # checking something
    return "result"


def slow(clock, out, pause):
    with clock:
        time.sleep(3 * pause)
    return "result"


def wrong(clock, out, pause):
    with clock:
        pass
    return "another result"


def broken(clock, out, pause):
    raise OSError("it is broken")


def hungry(clock, out, pause):
    with clock:
        block = bytearray(b"x") * 150_000_000
        worker = multiprocessing.get_context("spawn").Process(target=bytearray, args=(400_000_000,))
        worker.start()
        worker.join()
    return len(block)


def race(*contestants, rounds=1, peers=True):
    return run_race("a race", list(contestants), Config(rounds=rounds, peers=peers), os.getcwd(), 10, "MB/s",
                    pause=0.05)


# ---- races ------------------------------------------------------------------------------------------------
def test_only_what_stands_in_the_clock_is_timed():
    ours, theirs = race(Contestant("ours", quick), Contestant("theirs", slow))["rows"]
    assert 0.05 <= ours["seconds"][0] < 0.25
    assert 0.15 <= theirs["seconds"][0] and theirs["ratio"] > 1
    assert ours["rate"] == 10 / ours["seconds"][0]
    assert not os.listdir()                    # and nothing of it is left on the disk


def test_contestants_take_turns(capsys):
    race(Contestant("A", quick), Contestant("B", slow), rounds=2)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1][0] for line in lines] == ["A", "B", "A", "B"]


def test_a_ratio_is_taken_within_a_round():
    def runs(*seconds):
        return [{"seconds": s, "cpu_seconds": s, "peak_memory": s, "peak_memory_of_a_worker": 0, "result": 1}
                for s in seconds]
    row = compare("theirs", runs(2, 30, 8), runs(1, 10, 1), 60)      # the machine was busy in round 2
    assert row["ratios"] == [2, 3, 8] and row["ratio"] == 3
    assert row["rate"] == 60 / 8 and row["peak_memory"] == 30 and row["equal"]


def test_a_result_that_is_not_ours_is_marked():
    found = race(Contestant("ours", quick), Contestant("theirs", wrong))
    assert [row["equal"] for row in found["rows"]] == [True, False]
    text = show({"machine": machine(), "races": [found]})
    marked = [line for line in text.splitlines() if "ITS RESULT IS NOT OURS" in line]
    assert len(marked) == 1 and marked[0].startswith("theirs")


def test_a_peer_that_is_missing_or_broken_is_named_and_left_out():
    found = race(Contestant("ours", quick), Contestant("absent", quick, ("no_such_package",)),
                 Contestant("broken", broken), rounds=2)
    assert [row["name"] for row in found["rows"]] == ["ours"]
    assert found["left_out"] == {"absent": "pip install no_such_package",
                                 "broken": "broken failed: OSError: it is broken"}
    text = show({"machine": machine(), "races": [found]})
    assert "left out: pip install no_such_package" in text
    with pytest.raises(UserError, match="ours failed: OSError: it is broken"):
        race(Contestant("ours", broken), Contestant("theirs", quick))


def test_without_peers_only_ours_runs():
    found = race(Contestant("ours", quick), Contestant("theirs", broken), peers=False)
    assert [row["name"] for row in found["rows"]] == ["ours"] and not found["left_out"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell")
def test_peak_memory_is_that_of_the_contestant_and_of_its_worker():
    ballast = bytearray(b"x") * 600_000_000    # ours here; a child must not be charged for it
    (row,) = race(Contestant("hungry", hungry))["rows"]
    assert len(ballast) == 600_000_000
    assert 150e6 < row["peak_memory"] < 390e6 and 400e6 < row["peak_memory_of_a_worker"] < 590e6


# ---- prepare ----------------------------------------------------------------------------------------------
def run(*argv, tokenizer="byte"):
    command = [sys.executable, str(BENCH), "prepare", "--rounds=1", f"--tokenizer={tokenizer}", *argv]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)


def test_prepare_gives_the_ids_and_merges_of_all_peers():
    pytest.importorskip("datasets"), pytest.importorskip("tokenizers")
    done = run("--megabytes=0.3", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    to_ids, merges = found["races"]
    assert len(to_ids["rows"]) == 4 and len(merges["rows"]) == 2 and not to_ids["left_out"]
    for row in to_ids["rows"] + merges["rows"]:
        assert row["equal"] and row["rate"] > 0 and row["peak_memory"] > 10e6, row
    facts = found["machine"]
    assert facts["cores"] >= 1 and facts["cpu"] and facts["versions"]["torch"]


def test_prepare_runs_on_the_users_own_text():
    lines = [{"body": f"Document {i} says \u00e9 {i * i}."} for i in range(500)]
    lines += [{"other": 1}, {"body": ""}]
    Path("own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    done = run("--data=own.jsonl", "--text_key=body", "--no-peers")
    assert done.returncode == 0, done.stderr
    assert "in 500 documents" in done.stdout and "byte (257 entries)" in done.stdout
    assert not Path("data").exists() and os.listdir() == ["own.jsonl"]
    done = run("--data=own.jsonl", "--no-peers")
    assert done.returncode == 2 and "--text_key" in done.stderr and "Traceback" not in done.stderr


def test_other_results_than_ours_end_with_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(prepare, "races", lambda cfg, folder: [
        race(Contestant("ours", quick), Contestant("theirs", wrong))])
    with pytest.raises(SystemExit) as ended:
        bench.main(Config(json=True))
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().out)["races"][0]["rows"][1]["equal"] is False


def test_the_made_text_is_code_and_prose_of_the_size_that_was_asked_for():
    texts = list(prepare.documents_of(Config(megabytes=2)))
    size = sum(len(text.encode()) for text in texts)
    assert 2e6 <= size < 2.2e6
    assert texts == list(prepare.documents_of(Config(megabytes=2)))
    code = [text for text in texts if "import " in text and "    " in text]
    prose = [text for text in texts if "    " not in text and ". " in text]
    assert sum(map(len, code)) > 0.5e6 and sum(map(len, prose)) > 0.5e6


def test_without_gpt2s_vocabulary_one_is_trained_on_the_text(monkeypatch):
    def offline(source):
        if source == "gpt2":
            raise UserError("no network")
        return load(source)

    load = prepare.load_tokenizer
    monkeypatch.setattr(prepare, "load_tokenizer", offline)
    prepare.write_jsonl("text.jsonl", prepare.documents_of(Config(megabytes=0.3)))
    source, name = prepare.choose_vocabulary("auto", "text.jsonl", os.getcwd())
    encoding, end, _ = prepare.encoding_of(source)
    text = "def naïve(x):\n    return [x, 1234]\n"
    assert encoding.encode_ordinary(text) == load(source).encode(text) and end == load(source).eos_id
    assert "entries" in name
    with pytest.raises(UserError):
        prepare.choose_vocabulary("gpt2", "text.jsonl", os.getcwd())


# ---- train, learn, sample ---------------------------------------------------------------------------------
def tiny(folder, **changes):
    work = dict(layers=1, width=64, vocabulary=300, context=32, batch=4, compiled=False, device="cpu",
                steps=3, every=1, **changes)
    return {**work, "corpus": train.corpus_of(str(folder), 300)}


def measured(run, **arguments):
    return alone(Contestant(run.__name__, run), os.getcwd(), arguments)


def test_the_contestants_of_train_do_the_same_work(tmp_path):
    work = tiny(tmp_path)
    for run in (train.ours, train.plain_loop, train.two_ranks):
        found = measured(run, work=work)
        assert 0 < found["seconds"] < 30 and found["cpu_seconds"] == 0, run   # of the steps, not of the call
    settings = train.settings_of("out", work)
    assert settings["max_steps"] == 3 + train.WARM_UP and settings["params"] == 12 * 64 ** 2 + 300 * 64


def test_the_plain_gpt2_has_the_parameters_that_train_py_is_given():
    import torch                               # here: a contestant of this file would be charged for it
    model = train.gpt2(2, 64, 300, 32, 2)
    counted = sum(p.numel() for p in model.parameters() if p.ndim == 2) - 32 * 64      # less the positions
    assert counted == train.parameters(layers=2, width=64, vocabulary=300, context=32)
    ids = torch.arange(32)[None]
    assert abs(model(ids, ids + 200).item() - math.log(300)) < 0.2 and model(ids).shape == (1, 300)


def test_nanogpts_own_program_is_run_and_its_lines_are_read(tmp_path):
    (tmp_path / "model.py").write_text("name = 'theirs'\n", encoding="utf-8", newline="\n")
    (tmp_path / "train.py").write_text("""
import os, pickle, sys, model
flags = dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[1:])
assert model.name == "theirs" and flags["n_layer"] == "1" and flags["compile"] == "False", flags
assert pickle.load(open(os.path.join(flags["dataset"], "meta.pkl"), "rb"))["vocab_size"] == 300
for step in range(8):
    print(f"iter {step}: loss 4.0000, time {1000 if step < 4 else 20 * (step - 3):.2f}ms, mfu -100.00%")
""", encoding="utf-8", newline="\n")
    found = measured(train.nanogpt, work=tiny(tmp_path, nanogpt=str(tmp_path)))
    assert found["seconds"] == pytest.approx(3 * 0.050)            # the median of 20, 40, 60, 80 ms
    for command in ("train", "learn", "sample"):
        with pytest.raises(UserError, match="nanogpt=nowhere holds no model.py"):
            bench.main(Config(command=command, nanogpt="nowhere"))
    Path("short.txt").write_text("To be", encoding="utf-8")
    for path, says in (("nowhere.txt", "cannot be read"), ("short.txt", "5 characters"), (".", "cannot be")):
        with pytest.raises(UserError, match=says):
            bench.main(Config(command="learn", data=path))


def test_learn_compares_losses_tokens_and_cpu_seconds(monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    few = dict(learn.TASKS["characters"], layers=1, width=32, heads=2, ours=10, theirs=20, warm_up=3)
    monkeypatch.setattr(learn, "TASKS", {"characters": few})
    Path("input.txt").write_text("To be, or not to be, that is the question.\n" * 400, encoding="utf-8")
    Path("model.py").write_text("", encoding="utf-8")                  # a checkout that is none
    found = bench.main(Config(command="learn", data="input.txt", rounds=1, plot="losses.png", nanogpt="."))
    assert "nanoGPT's train.py failed" in found["races"][0]["left_out"]["nanoGPT's train.py"]
    ours, theirs = found["races"][0]["rows"]
    assert (ours["tokens"], theirs["tokens"]) == (10 * 12 * 64, 20 * 12 * 64)
    assert len(ours["curve"]) == 10 and len(theirs["curve"]) == 20
    for row in (ours, theirs):
        assert 0 < row["loss"] < row["curve"][0][1] and row["cpu_seconds"] > 0
    shown = capsys.readouterr().out
    assert "ours / a plain loop, nanoGPT's recipe: 0.50 x the tokens" in shown
    assert Path("losses.png").stat().st_size > 5000


def test_the_contestants_of_sample_write_as_many_tokens(monkeypatch):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("no transformers")
    monkeypatch.setattr(sample, "WIDTH", 64), monkeypatch.setattr(sample, "HEADS", 1)
    monkeypatch.setattr(sample, "BATCHES", (1,))
    [one] = sample.races(Config(command="sample", rounds=1, tokens=4), os.getcwd())
    assert [row["name"] for row in one["rows"]][:2] == ["model.generate", "model.generate in int8"]
    assert len(one["rows"]) == 4 and not one["left_out"] and all(row["equal"] for row in one["rows"])
