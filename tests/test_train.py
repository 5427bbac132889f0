"""train.py end to end on small models: one run on any number of ranks, resumed anywhere, stopped any way."""
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import config
import data
import files
import launch
import log
import memory
import model as models
import prepare
import sample
import tokenizer as tokenizers
import train
from config import UserError
from forked import run_ranks
from model import Model

REPO = Path(train.__file__).parent
SMALL = dict(params=None, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, intermediate_size=48, sequence_length=32,
             lr=3e-3, adam_eps=1e-5, device="cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """Bytes of a few source files of the standard library."""
    directory = tmp_path_factory.mktemp("corpus")
    text = directory / "text"
    text.mkdir()
    for name in ("this", "abc", "bisect", "heapq", "copy", "queue", "shlex", "keyword"):
        source = Path(sys.modules["os"].__file__).parent / f"{name}.py"
        (text / f"{name}.md").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    prepare.prepare(str(text), str(directory / "bytes"), "byte", val_fraction=0.1, workers=1,
                    say=lambda _: None)
    return str(directory / "bytes")


def go(corpus, **options) -> dict:
    return train.train(**{**SMALL, "data": corpus, "max_steps": 6, "micro_batch_size": 8,
                          "eval_interval": None, "sample_interval": None, "save_interval": None, **options})


def metrics(out_dir) -> list[dict]:
    return [json.loads(line) for line in Path(out_dir, "metrics.jsonl").read_text().splitlines()]


def weights(out_dir) -> dict:
    return checkpoint.load_model_dir(out_dir)[0].state_dict()


# ---- the same run on any number of ranks ------------------------------------------------------------------

SPLITS = {"1 rank": (1, 8, 12), "1 rank, 4 forwards": (1, 3, 12), "2 ranks": (2, 6, 12),
          "2 ranks, 3 forwards": (2, 2, 12), "3 ranks": (3, 2, 12), "4 ranks": (4, 3, 12),
          "6 ranks": (6, 2, 12)}


def test_any_number_of_ranks_and_any_accumulation_gives_the_same_losses(corpus):
    runs = {}
    for name, (world, micro, total) in SPLITS.items():
        options = dict(micro_batch_size=micro if total % (micro * world) == 0 else total // world,
                       global_batch_size=total, out_dir=name, eval_interval=3)
        runs[name] = run_ranks(go_in_rank, world, corpus, options)[0] if world > 1 else go(corpus, **options)
    first = runs.pop("1 rank")
    assert len(first["losses"]) == 6 and first["losses"][-1] < first["losses"][0]
    for name, run in runs.items():
        assert run["losses"] == pytest.approx(first["losses"], rel=1e-5), name
        assert run["validation_loss"] == pytest.approx(first["validation_loss"], rel=1e-5), name
        assert run["bits_per_byte"] == pytest.approx(first["bits_per_byte"], rel=1e-5), name
        for a, b in zip(metrics("1 rank"), metrics(name)):
            if "gradient-norm" in a:
                assert b["gradient-norm"] == pytest.approx(a["gradient-norm"], rel=1e-5), name


def go_in_rank(corpus, options):
    return go(corpus, **options)


def test_gradients_are_reduced_once_per_step(corpus):
    """4 forwards per step on 2 ranks: DDP's hook must fire for the last one only."""
    fired = run_ranks(count_reductions, 2, corpus)[0]
    assert fired == 3


def count_reductions(corpus):
    fired = []

    class Counting(train.DDP):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)

            def hook(state, bucket):
                fired.append(bucket.index())
                future = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
                return future.then(lambda f: f.value()[0] / 2)
            self.register_comm_hook(None, hook)
    train.DDP = Counting
    go(corpus, micro_batch_size=1, global_batch_size=8, max_steps=3, out_dir="run")
    return fired.count(0)


# ---- stopped and resumed ----------------------------------------------------------------------------------

@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_resume_is_bitwise(corpus, optimizer):
    whole = go(corpus, out_dir="whole", optimizer=optimizer)
    stop_at(4, corpus, out_dir="cut", optimizer=optimizer)
    rest = go(corpus, out_dir="cut", optimizer=optimizer)
    assert rest["losses"] == whole["losses"][4:] and rest["steps"] == 6
    assert all(torch.equal(a, b) for a, b in zip(weights("whole").values(), weights("cut").values()))
    assert [m["cross-entropy-loss"] for m in metrics("cut") if "cross-entropy-loss" in m] == whole["losses"]


def stop_at(step: int, corpus, number=signal.SIGTERM, **options) -> dict:
    """Train, with a signal that comes after that step."""
    original = log.Log.step

    def send(self, at, values):
        original(self, at, values)
        if at == step:
            os.kill(os.getpid(), number)
    log.Log.step = send
    try:
        return go(corpus, **options)
    finally:
        log.Log.step = original


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_save_at_the_next_step_and_leave_the_callers_handlers(corpus, number, capsys):
    before = signal.getsignal(number)
    result = stop_at(3, corpus, number, out_dir="run")
    assert result["steps"] == 3 and Path("run/checkpoints/00000003/complete").exists()
    assert "stopped at step 3 of 6" in capsys.readouterr().out
    assert signal.getsignal(number) is before


def test_a_run_goes_on_with_another_number_of_ranks(corpus):
    whole = go(corpus, out_dir="whole", micro_batch_size="auto", global_batch_size=12)
    for first, then in ((1, 4), (2, 3), (4, 1)):
        name = f"{first} to {then}"
        options = dict(out_dir=name, micro_batch_size="auto", global_batch_size=12)
        run_ranks(stop_in_rank, first, corpus, options) if first > 1 else stop_at(2, corpus, **options)
        rest = run_ranks(go_in_rank, then, corpus, options)[0] if then > 1 else go(corpus, **options)
        assert rest["losses"] == pytest.approx(whole["losses"][2:], rel=1e-5), name


def stop_in_rank(corpus, options):
    if int(os.environ["RANK"]) == 1:                       # the signal reaches one rank, all must stop
        return stop_at(2, corpus, **options)
    return go(corpus, **options)


def test_longer_runs_follow_the_longer_curve_and_say_so(corpus, capsys):
    go(corpus, out_dir="run", max_steps=4)
    result = go(corpus, out_dir="run", max_steps=8)
    assert result["steps"] == 8 and "8 steps now instead of 4" in capsys.readouterr().out
    from test_optim import settings
    rates = {m["step"]: m["learning-rate"] for m in metrics("run") if "learning-rate" in m}
    defaults = {name: getattr(train.Config(), name)
                for name in ("warmup_ratio", "schedule", "final_lr", "start_lr")}
    assert rates[7] == pytest.approx(train.optim.lr_at(6, 8, settings(lr=SMALL["lr"], **defaults)))


def test_without_lr_the_width_decides_and_trained_weights_get_a_tenth(corpus, capsys):
    wide = dict(lr=None, warmup_ratio=0.0, schedule="constant", max_steps=2)
    for optimizer, rate in (("muon", 0.0375), ("adamw", 0.0156)):          # 1.2 / 32, 0.5 / 32
        go(corpus, out_dir=optimizer, optimizer=optimizer, **wide)
        assert [m["learning-rate"] for m in metrics(optimizer) if "learning-rate" in m] == [rate] * 2
        assert f"learning rate: {rate} = " in capsys.readouterr().out
    go(corpus, out_dir="tuned", init_from="muon", **wide)
    assert metrics("tuned")[0]["learning-rate"] == 0.00375
    go(corpus, out_dir="tuned", init_from="muon", **{**wide, "max_steps": 3})            # and stays it
    assert metrics("tuned")[-2]["learning-rate"] == 0.00375


def test_what_a_kill_after_the_last_state_left_undone_is_made_up_for(corpus):
    result = go(corpus, out_dir="run")
    os.remove("run/model.safetensors")
    records = [r for r in metrics("run") if "validation-loss" not in r]
    Path("run/metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    again = go(corpus, out_dir="run")
    assert again["validation_loss"] == result["validation_loss"] and again["losses"] == []
    assert checkpoint.published_step("run") == 6
    assert metrics("run")[-1]["validation-loss"] == result["validation_loss"]


def test_forcing_another_batch_or_optimizer_uses_it_and_says_so(corpus, capsys):
    go(corpus, out_dir="run", max_steps=None, tokens=6 * 8 * 32)
    result = go(corpus, out_dir="new", resume="run", micro_batch_size="auto", global_batch_size=4,
                max_steps=None, tokens=8 * 8 * 32, optimizer="adamw")
    said = capsys.readouterr().out
    assert "global_batch_size was 8, is 4; optimizer was 'muon', is 'adamw'" in said
    assert "no moments for 14 of" in said
    assert result["steps"] == 6 + 4 and result["tokens"] == 8 * 8 * 32     # what was left, in smaller steps


def test_two_processes_cannot_train_in_one_out_dir(corpus):
    go(corpus, out_dir="run", max_steps=2)
    with files.hold("run"):
        with pytest.raises(UserError, match="another process is training in run"):
            go(corpus, out_dir="run", max_steps=4)
    assert go(corpus, out_dir="run", max_steps=4)["steps"] == 4


def test_a_finished_run_says_so_and_changes_nothing(corpus, capsys):
    go(corpus, out_dir="run")
    before = {p: p.stat().st_mtime_ns for p in Path("run").rglob("*")
              if p.is_file() and "source" not in p.parts}
    result = go(corpus, out_dir="run")
    said = capsys.readouterr().out
    assert "is finished: it has 6 steps, 6 were asked for" in said
    assert "more max_steps" in said and "another out_dir" in said
    assert result["steps"] == 6 and result["losses"] == [] and result["validation_loss"] is not None
    assert all(p.stat().st_mtime_ns == t for p, t in before.items() if p.name != "run_config.json")


@pytest.mark.parametrize("changed", [
    dict(lr=1e-4), dict(micro_batch_size=4, global_batch_size=4), dict(hidden_size=64)])
def test_other_settings_in_the_same_out_dir_are_refused(corpus, changed):
    go(corpus, out_dir="run", max_steps=2)
    before = sorted((str(p), p.stat().st_mtime_ns) for p in Path("run").rglob("*"))
    with pytest.raises(UserError, match=list(changed)[-1]):
        go(corpus, out_dir="run", **changed)
    assert sorted((str(p), p.stat().st_mtime_ns) for p in Path("run").rglob("*")) == before


def test_data_that_changed_under_a_run_is_refused(corpus, tmp_path):
    import shutil
    shutil.copytree(corpus, "mine")
    go("mine", out_dir="run", max_steps=2)
    other = np.fromfile("mine/train-00000.bin", dtype=np.uint16)[::-1].copy()
    shutil.rmtree("mine")
    os.makedirs("text")
    Path("text/a.txt").write_text("other text " * 2000)
    prepare.prepare("text", "mine", "byte", workers=1, say=lambda _: None)
    with pytest.raises(UserError, match="content changed"):
        go("mine", out_dir="run", max_steps=4)
    assert other.size


def test_a_longer_run_on_a_streamed_data_set_extends_it_and_goes_on(hub):
    hub.texts = [f"{i} " + "A story that goes on. " * 20 for i in range(200)]
    options = dict(out_dir="run", tokenizer="byte", document_mask=True)
    go("org/stories", max_steps=4, **options)
    (made,) = os.listdir("data")
    segments = [data.open_corpus(f"data/{made}", 32).segments_of[0]]
    result = go("org/stories", max_steps=30, **options)
    segments.append(data.open_corpus(f"data/{made}", 32).segments_of[0])
    assert result["steps"] == 30 and len(result["losses"]) == 26 and os.listdir("data") == [made]
    assert len(segments[0]) == 2 and segments[0][-1] >= 4 * 8        # as many windows as the steps need
    assert segments[1][:2] == segments[0] and segments[1][-1] >= 30 * 8
    assert segments[1][-1] < 45 * 8, "read more than the run needs"


class Letters:
    """A tokenizer of somebody's own: 27 ids."""
    vocab_size, eos_id = 27, 26

    def encode(self, text):
        return [ord(c) - 97 for c in text.lower() if "a" <= c <= "z"]

    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


def test_a_tokenizer_of_ones_own_trains_and_says_that_sampling_needs_it(capsys, monkeypatch):
    Path("text.txt").write_text("Only the letters count. " * 400, encoding="utf-8")
    result = go("text.txt", out_dir="run", tokenizer=Letters(), sample_interval=6)
    out = capsys.readouterr().out
    assert "1 x changed by the tokenizer's normalisation" in out and "--- sample ---" in out
    assert "sampling needs tokenizer=" in out and result["bits_per_byte"] is None
    assert not Path("run/tokenizer.json").exists()
    assert sample.generate("run", "only", 5, seed=1, tokenizer=Letters()).isalpha()
    with pytest.raises(UserError, match="has no tokenizer"):
        sample.generate("run", "only", 5)
    assert go("text.txt", out_dir="run", tokenizer=Letters(), max_steps=8)["steps"] == 8      # resumed
    (made,) = Path("data").iterdir()
    with pytest.raises(UserError, match="was made with another tokenizer than the one given"):
        go(str(made), out_dir="other", tokenizer="byte")
    assert go(str(made), out_dir="other", max_steps=2)["steps"] == 2
    monkeypatch.setattr(launch, "processes_to_start", lambda cfg: 2)
    with pytest.raises(UserError, match="the tokenizer is an object that cannot be saved"):
        go("text.txt", out_dir="third", tokenizer=Letters())


def test_states_are_kept_and_pruned(corpus):
    go(corpus, out_dir="run", save_interval=1, keep_last=2)
    assert sorted(os.listdir("run/checkpoints")) == ["00000005", "00000006"]


def test_max_minutes_saves_and_ends(corpus):
    result = go(corpus, out_dir="run", max_minutes=1e-6)
    assert result["steps"] == 1 and Path("run/checkpoints/00000001/complete").exists()


# ---- what can go wrong ------------------------------------------------------------------------------------

def break_gradients(monkeypatch, steps) -> None:
    original, calls = train.optim.finish_gradients, []

    def broken(model, scale, clip):
        calls.append(1)
        if len(calls) in steps:
            next(model.parameters()).grad[0, 0] = float("nan")
        return original(model, scale, clip)
    monkeypatch.setattr(train.optim, "finish_gradients", broken)


def test_a_step_that_is_not_finite_is_skipped_and_resume_remembers(corpus, monkeypatch):
    break_gradients(monkeypatch, {2})
    go(corpus, out_dir="run", max_steps=3)
    state = checkpoint.read_json(Path("run/checkpoints/00000003/state.json"))
    assert (state["step"], state["updates"], state["samples"]) == (3, 2, 24)
    assert metrics("run")[1]["gradient-norm"] is None      # NaN is no JSON
    assert [m.get("skipped-steps") for m in metrics("run")][:3] == [None, 1, 1]
    assert all(t.isfinite().all() for t in weights("run").values())


def test_ten_of_them_in_a_row_stop_the_run(corpus, monkeypatch):
    break_gradients(monkeypatch, range(3, 100))
    with pytest.raises(UserError, match="10 steps in a row.*step 12"):
        go(corpus, out_dir="run", max_steps=30, save_interval=2)
    assert os.listdir("run/checkpoints") == ["00000002"]   # what follows may be diverged: it is not saved


def test_a_loss_that_does_not_move_is_pointed_out(corpus, capsys):
    go(corpus, out_dir="run", max_steps=50, lr=1e-9, warmup_ratio=0.5, initializer_range=0.002)
    assert "warning: after the warm-up the loss is still" in capsys.readouterr().out


@pytest.mark.parametrize("options,says", [
    (dict(data="nowhere"), "nowhere"),
    (dict(tokens=10, max_steps=3), "tokens and max_steps were both given"),
    (dict(schedule="wsd", warmup_ratio=0.5, decay_ratio=0.8), "sum to more than"),
    (dict(epochs=3, max_epochs=2, max_steps=None), "epochs=3 is more than max_epochs=2"),
    (dict(max_epochs=1, max_steps=10**6), "Dataset is too small for this run: available-samples="),
    (dict(sequence_length=10**6), "Dataset is too small for this run: the training split"),
    (dict(global_batch_size=12, micro_batch_size=8), "use a global_batch_size of"),
    (dict(vocab_size=100), "vocab_size=100"), (dict(num_key_value_heads=3), "not divisible"),
    (dict(init_from="nowhere"), "not a directory"), (dict(device="cuda:7"), "cuda:7"),
    (dict(eval_only=True, out_dir="nothing"), "not a directory")])
def test_what_the_user_got_wrong_is_said_before_anything_is_written(corpus, options, says):
    with pytest.raises(UserError, match=says):
        go(**{"corpus": corpus, "out_dir": "run", **({k: v for k, v in options.items() if k != "data"})}) \
            if "data" not in options else go(options["data"], out_dir="run")
    assert not Path("run").exists()


OUT_OF_MEMORY = """
import sys
sys.path.insert(0, {repo!r})
import os, torch, train
forward, calls = train.Model.forward, []
def failing(self, *args, **options):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 3:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return forward(self, *args, **options)
if len(sys.argv) > 1:
    train.Model.forward = failing
result = train.train(**{options!r})
print("rank", os.environ["RANK"], "steps", result["steps"], flush=True)
"""


def torchrun(script, *args, ranks=2):
    environment = {k: v for k, v in os.environ.items()
                   if not k.startswith(("RANK", "WORLD_SIZE", "MASTER", "LOCAL"))}
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                           f"--nproc-per-node={ranks}", script, *args],
                          capture_output=True, encoding="utf-8", timeout=120, env=environment)


def test_one_rank_out_of_memory_ends_both_in_seconds_with_one_sentence(corpus):
    options = {**SMALL, "data": corpus, "max_steps": 5, "micro_batch_size": 2, "out_dir": "run",
               "save_interval": 1, "eval_interval": None, "sample_interval": None}
    Path("user.py").write_text(OUT_OF_MEMORY.format(repo=str(REPO), options=options))
    began = time.monotonic()
    run = torchrun("user.py", "fail")
    assert run.returncode == 1 and time.monotonic() - began < 60
    assert run.stderr.count("Out of memory: lower micro_batch_size") == 1
    assert "micro_batch_size=2" in run.stderr
    assert checkpoint.newest_state(Path("run"))[0].name == "00000002"
    run = torchrun("user.py")                              # every rank of a program gets the result
    assert run.returncode == 0, run.stderr
    assert "rank 0 steps 5" in run.stdout and "rank 1 steps 5" in run.stdout
    assert "resuming at step 2" in run.stdout


# ---- evaluation -------------------------------------------------------------------------------------------

def test_validation_loss_and_bits_per_byte_are_those_of_every_token_once(corpus, capsys):
    result = go(corpus, out_dir="run", max_steps=2)
    model = checkpoint.load_model_dir("run")[0]
    tokens = data.open_corpus(corpus, 32).sources[0].val.read(0, 10**9)
    losses, T = [], 32
    for start in range(0, len(tokens) - 1, T):
        ids = torch.from_numpy(tokens[start:start + T + 1])[None]
        losses.append(torch.nn.functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="none"))
    losses = torch.cat(losses)
    assert len(losses) == len(tokens) - 1
    assert result["validation_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    size = (tokens[1:] < 256).sum()                        # one byte each, the end of text none
    assert result["bits_per_byte"] == pytest.approx(losses.sum().item() / math.log(2) / size, rel=1e-5)
    only = train.train(eval_only=True, init_from="run", data=corpus, sequence_length=32, device="cpu",
                       micro_batch_size=3)
    assert only["validation_loss"] == pytest.approx(result["validation_loss"], rel=1e-5)
    assert only["bits_per_byte"] == pytest.approx(result["bits_per_byte"], rel=1e-5)


def test_evaluation_without_tokens_or_tokenizer_is_refused(corpus):
    go(corpus, out_dir="run", max_steps=1)
    prepare.prepare(str(Path(corpus).parent / "text"), "no-val", "byte", val_fraction=0.0, workers=1,
                    say=lambda _: None)
    with pytest.raises(UserError, match="no validation tokens"):
        train.train(eval_only=True, init_from="run", data="no-val", device="cpu")
    os.remove("run/tokenizer.json")
    Path("a.txt").write_text("some words " * 500, encoding="utf-8")
    with pytest.raises(UserError, match="raw text, and the model that it is for has no tokenizer"):
        train.train(eval_only=True, init_from="run", data="a.txt", device="cpu")
    prepare.prepare("a.txt", "words", tokenizers.train_bpe(["some words " * 500], 260), workers=1,
                    say=lambda _: None)
    with pytest.raises(UserError, match="prepared with another tokenizer .260 entries. than byte"):
        go("words", out_dir="other", tokenizer="byte")


def test_eval_tokens_takes_a_fixed_part_and_says_so(corpus, capsys):
    go(corpus, out_dir="run", max_steps=2, eval_tokens=64)
    assert "validation-tokens 64" in capsys.readouterr().out
    assert [m["validation-tokens"] for m in metrics("run") if "validation-loss" in m] == [64]


# ---- weights, text, objects -------------------------------------------------------------------------------

def test_init_from_trains_on_from_the_given_weights(corpus):
    go(corpus, out_dir="base", max_steps=8)
    base = checkpoint.load_model_dir("base")[0]
    result = train.train(data=corpus, init_from="base", out_dir="more", max_steps=2, sequence_length=32,
                         micro_batch_size=8, device="cpu", sample_interval=None)
    window = data.open_corpus(corpus, 32, train.Config.seed)
    ids = next(window.step(0, 8, 1, 0, 1))
    loss, valid = base(ids[:, :-1], labels=ids[:, 1:])
    assert result["losses"][0] == pytest.approx((loss / valid).item(), rel=1e-5)
    assert checkpoint.load_model_dir("more")[0].cfg == base.cfg
    with pytest.raises(UserError, match="hidden_size=64 does not fit"):
        train.train(data=corpus, init_from="base", out_dir="other", hidden_size=64, device="cpu")
    with pytest.raises(UserError, match="would be overwritten"):
        train.train(data=corpus, init_from="base", out_dir="base", device="cpu", resume="auto", lr=1e-4)


def test_a_longer_context_is_scaled_from_the_bases(corpus):
    go(corpus, out_dir="base", max_steps=1)
    train.train(data=corpus, init_from="base", out_dir="long", max_steps=1, sequence_length=64, device="cpu",
                rope_scaling={"rope_type": "yarn", "factor": 2.0}, micro_batch_size=2, sample_interval=None)
    cfg = checkpoint.load_model_dir("long")[0].cfg
    assert cfg.max_position_embeddings == 64
    assert cfg.rope_scaling["original_max_position_embeddings"] == 32
    train.train(data=corpus, init_from="base", out_dir="short", max_steps=1, sequence_length=16, device="cpu",
                max_position_embeddings=16, micro_batch_size=2, sample_interval=None)
    assert checkpoint.load_model_dir("short")[0].cfg.max_position_embeddings == 32      # never lowered


def test_an_epoch_visits_every_window(corpus):
    windows = data.open_corpus(corpus, 512).windows
    result = go(corpus, out_dir="run", max_steps=None, epochs=1, max_epochs=1, sequence_length=512,
                micro_batch_size=16)
    assert result["steps"] == -(-windows // 16) and windows % 16


def test_raw_text_trains_without_a_step_of_its_own(capsys):
    Path("book.txt").write_text("\n".join(f"{i} green bottles hanging on the wall" for i in range(3000)))
    result = train.train(**{**SMALL, "data": "book.txt", "max_steps": 3, "micro_batch_size": 4,
                            "out_dir": "run"})
    assert result["validation_loss"] is not None
    said = capsys.readouterr().out
    assert "is raw text: preparing it in data/book-" in said and "--- sample ---" in said
    assert isinstance(sample.generate("run", "12 green", max_new_tokens=5), str)


def test_preparing_may_take_longer_than_the_process_groups_timeout():
    Path("book.txt").write_text("\n".join(f"{i} green bottles hanging on the wall" for i in range(3000)))
    results = run_ranks(prepare_slowly, 2, dict(data="book.txt", timeout=5, max_steps=2, micro_batch_size=2,
                                                out_dir="run"))
    assert [result["steps"] for result in results] == [2, 2]


def prepare_slowly(options):
    original = prepare.encode_all

    def slow(*args, **kwargs):
        time.sleep(20)
        return original(*args, **kwargs)
    prepare.encode_all = slow
    return train.train(**{**SMALL, **options, "sample_interval": None})


def test_bare_files_of_nanogpt_train_with_the_tokenizer_that_is_named():
    Path("nano").mkdir()
    for name, text in (("train", "some words and " * 900), ("val", "more words " * 40)):
        np.frombuffer(text.encode(), np.uint8).astype(np.uint16).tofile(f"nano/{name}.bin")
    result = go("nano", out_dir="run", tokenizer="byte", max_steps=2)
    assert result["validation_loss"] > 0 and isinstance(sample.generate("run", "some", 3), str)
    with pytest.raises(UserError, match="document_mask needs the id"):
        go("nano", out_dir="other", document_mask=True)


def test_document_mask_hides_other_documents_from_the_loss(corpus):
    plain, masked = (go(corpus, out_dir=name, document_mask=mask, max_steps=1)["losses"][0]
                     for name, mask in (("plain", False), ("masked", True)))
    ids = next(data.open_corpus(corpus, 32, train.Config.seed).step(0, 8, 1, 0, 1))
    assert (ids[:, :-1] == 256).any() == (plain != masked)


def test_a_live_tokenizer_and_a_live_model_become_directories(corpus):
    Path("a.txt").write_text("some words and some more words " * 500)
    tokenizer = tokenizers.train_bpe([Path("a.txt").read_text()], 280)
    result = train.train(**{**SMALL, "data": "a.txt", "tokenizer": tokenizer, "max_steps": 2,
                            "micro_batch_size": 2, "out_dir": "run"})
    assert result["steps"] == 2
    model = sample.load_model("run", device="cpu")
    assert model.tokenizer.fingerprint == tokenizer.fingerprint
    more = train.train(data="a.txt", init_from=model, out_dir="more", max_steps=1, sequence_length=32,
                       micro_batch_size=2, device="cpu")
    assert more["steps"] == 1 and list(Path("more/given").glob("init_from-*/model.safetensors"))
    found = train.train(eval_only=True, init_from=model, data="a.txt", sequence_length=32, device="cpu")
    assert found["validation_loss"] > 0
    with torch.no_grad():
        model.model.norm.weight.mul_(1.1)
    with pytest.raises(UserError, match="init_from was"):  # another model is another setting
        train.train(data="a.txt", init_from=model, out_dir="more", max_steps=9, sequence_length=32,
                    micro_batch_size=2, device="cpu")
    with pytest.raises(UserError, match="init_from takes a path or a loaded model, not int"):
        train.train(data="a.txt", init_from=3, out_dir="other")


def test_two_visible_gpus_train_in_a_child_and_return_its_result(monkeypatch, capfd):
    """The fake is seen by this process only; the child finds no GPU and trains two ranks on the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    Path("a.txt").write_text("some words and some more words " * 500)
    tokenizer = tokenizers.train_bpe([Path("a.txt").read_text()], 280)
    options = {**SMALL, "device": "auto", "data": "a.txt", "tokenizer": tokenizer,
               "micro_batch_size": 2, "out_dir": "run"}
    result = train.train(**options, max_steps=2)
    assert result["steps"] == 2 and len(result["losses"]) == 2
    state = checkpoint.read_json(Path("run/checkpoints/00000002/state.json"))
    assert state["world"] == 2 and state["batch"]["global_batch_size"] == 4
    with pytest.raises(UserError, match="not divisible by 2 replicas"):
        train.train(**{**options, "out_dir": "other"}, global_batch_size=3, max_steps=2)


# ---- precision, compile -----------------------------------------------------------------------------------

def test_bf16_and_fp16_learn_what_fp32_learns(corpus):
    losses = {dtype: go(corpus, out_dir=dtype, dtype=dtype)["losses"] for dtype in ("fp32", "bf16", "fp16")}
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01) and losses["bf16"] != losses["fp32"]
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=0.01) and losses["fp16"] != losses["fp32"]


def test_recomputation_changes_no_loss(corpus):
    first, *others = (go(corpus, out_dir=how, recompute=how, max_steps=3)["losses"]
                      for how in ("none", "attention", "layer"))
    assert all(other == first for other in others)


@pytest.mark.slow
def test_compiled_layers_give_the_same_losses_and_names(corpus):
    plain, compiled = (go(corpus, out_dir=str(on), compile=on)["losses"] for on in (False, True))
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert weights("True").keys() == weights("False").keys()


# ---- the command line -------------------------------------------------------------------------------------

@pytest.mark.parametrize("file", sorted(p.name for p in (REPO / "configs").glob("*.py")))
def test_every_config_is_headed_by_the_command_that_uses_it_and_loads(file):
    first = (REPO / "configs" / file).read_text(encoding="utf-8").splitlines()[0]
    words = first.removeprefix("# ").split()
    script = next(w for w in words if w.endswith(".py") and "/" not in w)
    arguments = words[words.index(script) + 1:]
    assert f"configs/{file}" in arguments and (REPO / script).exists()
    cfg = config.load(train.Config, [str(REPO / a) if a.startswith("configs/") else a for a in arguments])
    for replicas in (1, 2, 8):
        cfg.vocab_size = 4096
        batch = memory.plan(cfg, replicas, torch.float32, "cpu", 2**62, cfg.params)
        assert batch.replicas == replicas


def test_wrong_flags_are_one_sentence_and_exit_code_2():
    for arguments, says in ((["--lrr=1"], "lr"), (["configs/tinny.py"], "tiny.py"), (["--lr=-1"], "above 0"),
                            (["--data=nothing.txt"], "nothing.txt does not exist")):
        run = subprocess.run([sys.executable, str(REPO / "train.py"), *arguments], capture_output=True,
                             encoding="utf-8")
        assert run.returncode == 2 and says in run.stderr, run.stderr
        assert len(run.stderr.strip().splitlines()) == 1, run.stderr
    assert not os.listdir(".")
