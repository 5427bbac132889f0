"""checkpoint.py: what is on disk survives kills, reads back exactly; what doesn't fit is refused by name."""
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoint
import files
import optim
import tokenizer as tokenizers
from config import UserError
from model import Model, ModelConfig
from test_optim import set_gradients, settings

TINY = dict(vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, intermediate_size=48)
RUN = SimpleNamespace(rank=0, world=1, main=True, device=torch.device("cpu"), barrier=lambda: None,
                      say=print)


def trained(steps: int = 2, seed: int = 0):
    model = Model(ModelConfig(**TINY)).init_weights(seed)
    optimizer = optim.Optimizer(model, settings())
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step(torch.tensor(1.0), 1e-2)
    return model, optimizer, optim.LossScale(False, RUN.device, 1)


@dataclass
class Settings(ModelConfig):
    lr: float = 1e-2
    data: str = "stdlib"
    sequence_length: int = 64
    micro_batch_size: int | str = "auto"
    global_batch_size: int | None = None
    tokens: int | None = None
    max_steps: int | None = None
    save_interval: int | None = 250
    init_from: str | None = None
    tokenizer: str = "auto"
    grad_clip: float | None = 1.0
    out_dir: str | None = "run"
    resume: bool | str = "auto"


def asked(**given):
    cfg = Settings(**given)
    cfg.given = dict.fromkeys(given, "--flag")
    return cfg


def save(step: int, out_dir="run", keep_last: int = 3, given=None, trained_model=None, **values):
    model, optimizer, _ = trained_model or trained()
    state = {"step": step, "samples": 8 * step, "tokens": 512 * step, "updates": 2, "skipped_in_a_row": 0,
             "fp16_scale": None, "fp16_finite_steps": 0, "paths": {}, "world": 1,
             "batch": {"global_batch_size": 8}, "model": {**vars(model.cfg)},
             "config": {**vars(Settings()), "global_batch_size": 8, "micro_batch_size": 8, **TINY, **values,
                        **{key: value for key, value in (given or {}).items() if value is not None}},
             "given": given or {}, "defaults": {}}
    return checkpoint.save_state(out_dir, model, optimizer, state, RUN, keep_last)


# ---- the state --------------------------------------------------------------------------------------------

def test_state_comes_back_to_the_bit():
    first = trained()
    torch.manual_seed(5)
    path = save(2, trained_model=first)
    drawn = torch.rand(3)
    model, optimizer, scale = trained(steps=0, seed=9)
    checkpoint.restore(path, model, optimizer, scale, RUN)
    assert all(torch.equal(a, b) for a, b in zip(first[0].parameters(), model.parameters()))
    assert torch.equal(torch.rand(3), drawn)
    for m, o in ((first[0], first[1]), (model, optimizer)):
        set_gradients(m, 7)
        o.step(torch.tensor(1.0), 1e-2)
    assert all(torch.equal(a, b) for a, b in zip(first[0].parameters(), model.parameters()))


def test_state_is_described_by_global_names_and_pieces():
    path = save(2)
    shards = json.loads((path / "shards.json").read_text())
    names = set(shards)
    assert "model.model.layers.1.mlp.up_proj.weight" in names \
        and "optim.model.layers.1.mlp.up_proj.weight.momentum" in names
    assert {"model.embed_tokens.weight"} == {n.removeprefix("optim.").rsplit(".", 1)[0] for n in names
                                             if n.endswith("embed_tokens.weight.exp_avg")}
    assert shards["model.model.norm.weight"] == {
        "shape": [32], "dtype": "float32", "pieces": [
            {"file": "model-00000-of-00001.safetensors", "key": "model.model.norm.weight",
             "offset": [0], "length": [32]}]}
    assert sorted(p.name for p in path.iterdir()) == [
        "complete", "model-00000-of-00001.safetensors", "optim-00000-of-00001.safetensors",
        "rng-00000.safetensors", "shards.json", "state.json"]


def test_tensors_cut_into_pieces_are_put_together():
    path = save(2)
    whole = checkpoint.read_pieces(path)["model.model.embed_tokens.weight"]
    shards = json.loads((path / "shards.json").read_text())
    pieces = []
    for i, (rows, columns) in enumerate([((0, 100), (0, 32)), ((100, 320), (0, 9)), ((100, 320), (9, 32))]):
        part = whole[slice(*rows), slice(*columns)].contiguous()
        save_file({"part": part}, path / f"piece-{i}.safetensors")
        pieces.append({"file": f"piece-{i}.safetensors", "key": "part", "offset": [rows[0], columns[0]],
                       "length": list(part.shape)})
    shards["model.model.embed_tokens.weight"]["pieces"] = pieces
    (path / "shards.json").write_text(json.dumps(shards))
    read = checkpoint.read_pieces(path, ["model.model.embed_tokens.weight"])
    assert torch.equal(read["model.model.embed_tokens.weight"], whole)


def test_only_the_newest_states_are_kept():
    for step in (1, 2, 10, 11):
        save(step, keep_last=2)
    assert sorted(os.listdir("run/checkpoints")) == ["00000010", "00000011"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "unmarked", "empty", "marker", "version"])
def test_a_damaged_state_is_skipped_with_a_sentence(damage):
    good, bad = save(1), save(2)
    weights = bad / "model-00000-of-00001.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "missing":
        weights.unlink()
    elif damage == "unmarked":
        (bad / "complete").unlink()
    elif damage == "empty":
        shutil.rmtree(bad)
        bad.mkdir()
    elif damage == "marker":
        (bad / "complete").write_text("{")
    else:
        text = (bad / "state.json").read_text()
        (bad / "state.json").write_text(text.replace('"version": 1', '"version": 9'))
    found, said = checkpoint.newest_state(Path("run"))
    assert found == good and len(said) == 1 and str(bad) in said[0]
    with pytest.raises(UserError, match="00000002"):
        checkpoint.load_model_dir(bad)


def die_after(steps_on_disk: int):
    """In a child process: replace run/ by a later save; die by SIGKILL at the n-th thing done to disk."""
    model, left = trained(steps=3, seed=4), [steps_on_disk]

    def counted(original):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                if original is files.save_file:       # in the middle of its bytes
                    original(*args, **kwargs)
                    os.truncate(args[1], os.path.getsize(args[1]) // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        return call

    for owner, name in ((os, "replace"), (os, "fsync"), (files, "save_file"), (shutil, "rmtree")):
        setattr(owner, name, counted(getattr(owner, name)))
    save(2, trained_model=model, keep_last=1)
    checkpoint.save_model_dir(model[0], None, "run", step=2)
    os._exit(0)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_kill_9_at_any_point_of_a_save_leaves_a_state_and_a_model():
    first, second = trained(seed=1), trained(steps=3, seed=4)[0]
    save(1, trained_model=first)
    checkpoint.save_model_dir(first[0], None, "run", step=1)
    shutil.copytree("run", "saved")
    for steps_on_disk in range(100):
        shutil.rmtree("run")
        shutil.copytree("saved", "run")
        child = multiprocessing.get_context("fork").Process(target=die_after, args=(steps_on_disk,))
        child.start()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        state, _ = checkpoint.newest_state(Path("run"))
        wanted = {"00000001": first[0], "00000002": second}[state.name].model.embed_tokens.weight
        assert torch.equal(checkpoint.read_pieces(state)["model.model.embed_tokens.weight"], wanted)
        model = checkpoint.load_model_dir("run")[0]
        assert any(all(torch.equal(p, q) for p, q in zip(model.parameters(), whole.parameters()))
                   for whole in (first[0], second))
        if child.exitcode == 0:
            break
    assert child.exitcode == 0 and steps_on_disk > 15
    assert state.name == "00000002" \
        and torch.equal(model.model.embed_tokens.weight, second.model.embed_tokens.weight)


# ---- is it this run's? ------------------------------------------------------------------------------------

def test_equal_settings_go_on_and_lengths_and_intervals_may_change():
    path = save(5, given={"lr": 1e-2, "tokens": 1000})
    assert checkpoint.resume(asked(lr=1e-2, tokens=9000, save_interval=3)) == path
    cfg = asked(lr=1e-2)
    assert checkpoint.resume(cfg) == path
    assert cfg.tokens == 1000                              # no length given: the stored one stays
    cfg = asked(lr=1e-2, max_steps=7)
    checkpoint.resume(cfg)
    assert (cfg.tokens, cfg.max_steps) == (None, 7)


@pytest.mark.parametrize("now", [{"lr": 2e-2}, {"data": "book.txt"}, {"global_batch_size": 16},
                                 {"hidden_size": 64}, {"init_from": "base"}])
def test_other_settings_are_refused_by_name_and_nothing_is_touched(now):
    save(5)
    before = sorted(str(p) for p in Path("run").rglob("*"))
    with pytest.raises(UserError, match=next(iter(now))):
        checkpoint.resume(asked(**now))
    assert sorted(str(p) for p in Path("run").rglob("*")) == before


def test_a_given_key_that_is_not_given_again_differs():
    save(5, given={"lr": 3e-2})
    with pytest.raises(UserError, match="lr was 0.03, is 0.01"):
        checkpoint.resume(asked())


def test_none_is_a_value_where_it_turns_something_off():
    save(5)
    with pytest.raises(UserError, match="grad_clip was 1.0, is None"):
        checkpoint.resume(asked(grad_clip=None))


def test_the_same_file_may_be_spelled_in_another_way():
    Path("book.txt").write_text("text", encoding="utf-8")
    path = save(5, given={"data": "book.txt"})
    state = json.loads((path / "state.json").read_text())
    state["paths"] = checkpoint.paths_of(asked(data="book.txt"))
    (path / "state.json").write_text(json.dumps(state))
    sizes = {p.name: p.stat().st_size for p in path.iterdir() if p.name != "complete"}
    (path / "complete").write_text(json.dumps(sizes))
    for spelling in ("./book.txt", os.path.abspath("book.txt"), "run/../book.txt"):
        assert checkpoint.resume(asked(data=spelling)) == path
    with pytest.raises(UserError, match="data was 'book.txt', is 'look.txt'"):
        checkpoint.resume(asked(data="look.txt"))


def test_auto_and_none_take_what_they_were_resolved_to():
    save(5, given={"global_batch_size": None})
    cfg = asked(global_batch_size=None)
    checkpoint.resume(cfg)
    assert cfg.global_batch_size == 8


def test_a_default_that_changed_between_versions_keeps_the_runs_value():
    save(5, lr=7e-3)
    cfg = asked()
    checkpoint.resume(cfg)
    assert cfg.lr == 7e-3


def test_a_path_forces_other_settings_but_never_another_shape():
    path = save(5)
    said = []
    assert checkpoint.resume(asked(lr=2e-2, resume=str(path)), said.append) == path
    assert "lr was 0.01, is 0.02" in said[0]
    assert checkpoint.resume(asked(lr=2e-2, resume="run"), said.append) == path  # an out_dir: its newest
    with pytest.raises(UserError, match="shape.*hidden_size"):
        checkpoint.resume(asked(hidden_size=64, resume=str(path)))


def test_forcing_an_older_state_is_refused_while_a_newer_one_is_in_the_way():
    old = save(5)
    save(6)
    with pytest.raises(UserError, match="00000006"):
        checkpoint.resume(asked(resume=str(old)))
    assert checkpoint.resume(asked(resume=str(old), out_dir="other")) == old


def test_never_and_foreign_directories_are_refused():
    assert checkpoint.resume(asked(resume="never")) is None
    save(5)
    with pytest.raises(UserError, match="not empty"):
        checkpoint.resume(asked(resume="never"))
    checkpoint.save_model_dir(trained()[0], None, "model")
    with pytest.raises(UserError, match="init_from=model"):
        checkpoint.resume(asked(out_dir="model"))
    with pytest.raises(UserError, match="no complete"):
        checkpoint.resume(asked(resume="nowhere"))
    state = Path("run/checkpoints/00000005")
    with pytest.raises(UserError, match="model.safetensors, which would be overwritten"):
        checkpoint.resume(asked(out_dir="model", resume=str(state)))
    Path("notes").mkdir()
    Path("notes/metrics.jsonl").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="metrics.jsonl, which would be overwritten"):
        checkpoint.resume(asked(out_dir="notes"))
    with pytest.raises(UserError, match="is a file"):
        checkpoint.resume(asked(out_dir="notes/metrics.jsonl"))


def test_a_full_disk_is_a_sentence_and_keeps_what_was_there(monkeypatch):
    good = save(1)

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise files.SafetensorError("No space left on device")
    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(UserError, match="No space left on device; what was saved before is intact"):
        save(2)
    with pytest.raises(UserError, match="model could not be saved to run: No space left on device"):
        checkpoint.save_model_dir(trained()[0], None, "run")
    assert not list(Path("run").rglob("*.tmp"))
    assert sorted(os.listdir("run/checkpoints")) == ["00000001"]
    assert checkpoint.newest_state(Path("run"))[0] == good


def test_a_key_that_another_script_was_given_must_hold_its_default():
    save(5, given={"template": "chatml"})
    with pytest.raises(UserError, match="template was 'chatml'"):
        checkpoint.resume(asked())


# ---- the model --------------------------------------------------------------------------------------------

def test_shards_and_index_are_written_and_stale_files_removed():
    model = trained()[0]
    checkpoint.save_model_dir(model, None, "m", step=1)
    checkpoint.save_model_dir(model, None, "m", shard_size=20_000, step=2)
    files = sorted(p.name for p in Path("m").glob("*.safetensors"))
    assert len(files) > 2 and "model.safetensors" not in files
    assert sum(t.nbytes for f in files for t in load_file(f"m/{f}").values()) == \
        json.loads(Path("m/model.safetensors.index.json").read_text())["metadata"]["total_size"]
    again = checkpoint.load_model_dir("m")[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    checkpoint.save_model_dir(model, None, "m", step=3)
    assert sorted(p.name for p in Path("m").glob("model*")) == ["model.safetensors"]


def test_weights_of_two_steps_are_refused_or_replaced_by_the_newest_state(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    old, new = trained(seed=1), trained(seed=2)
    checkpoint.save_model_dir(old[0], None, "run", shard_size=20_000, step=1)
    first = sorted(Path("run").glob("model-*"))[0]
    kept = first.read_bytes()
    checkpoint.save_model_dir(new[0], None, "run", shard_size=20_000, step=2)
    first.write_bytes(kept)
    with pytest.raises(UserError, match="different steps.*'1', '2'"):
        checkpoint.load_model_dir("run")
    save(2, trained_model=new)
    model = checkpoint.load_model_dir("run")[0]
    assert all(torch.equal(a, b) for a, b in zip(new[0].parameters(), model.parameters()))


@pytest.mark.parametrize("fault,says", [
    ("missing", "1 missing: model.norm.weight"), ("unexpected", "1 unexpected: model.extra"),
    ("shape", r"1 of another shape: model.norm.weight \[7\]"), ("torn", "safetensors"),
    ("no weights", "no model.safetensors"), ("pickle", "convert it to safetensors"),
    ("no config", "config.json"), ("family", "model_type='bert'"), ("act", "hidden_act"),
    ("json", "not valid JSON"), ("nothing", "not a directory")])
def test_model_directories_that_do_not_fit_are_refused_by_name(fault, says):
    checkpoint.save_model_dir(trained()[0], None, "m")
    weights = load_file("m/model.safetensors")
    changes = {"missing": lambda: weights.pop("model.norm.weight"),
               "unexpected": lambda: weights.update({"model.extra": torch.ones(1)}),
               "shape": lambda: weights.update({"model.norm.weight": torch.ones(7)})}
    if fault in changes:
        changes[fault]()
        save_file(weights, "m/model.safetensors")
    elif fault == "torn":
        os.truncate("m/model.safetensors", 1000)
    elif fault in ("no weights", "pickle"):
        os.remove("m/model.safetensors")
        if fault == "pickle":
            Path("m/pytorch_model.bin").write_bytes(b"")
    elif fault == "no config":
        os.remove("m/config.json")
    elif fault in ("family", "act"):
        content = json.loads(Path("m/config.json").read_text())
        content.update({"family": {"model_type": "bert"}, "act": {"hidden_act": "gelu"}}[fault])
        Path("m/config.json").write_text(json.dumps(content))
    elif fault == "json":
        Path("m/config.json").write_text("{")
    else:
        shutil.rmtree("m")
    with pytest.raises(UserError, match=says):
        checkpoint.load_model_dir("m")


HF = {"model_type": "qwen3", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2,
      "num_attention_heads": 4, "intermediate_size": 48}


@pytest.mark.parametrize("changes,field,value", [
    ({}, "head_dim", 128), ({}, "num_key_value_heads", 32), ({"model_type": "llama"}, "head_dim", 8),
    ({"sliding_window": 4, "max_window_layers": 0}, "sliding_window", None),        # not unless used
    ({"sliding_window": 4, "max_window_layers": 1, "use_sliding_window": True}, "layer_types",
     ["full_attention", "sliding_attention"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77}}, "rope_theta", 77.0),
    ({"rope_theta": 9.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta", 5.0),
    ({"original_max_position_embeddings": 16, "rope_scaling": {"type": "yarn", "factor": 2.0}},
     "rope_scaling", {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16})])
def test_configs_of_the_hub_are_read_as_transformers_reads_them(changes, field, value):
    assert getattr(checkpoint.config_from_hf({**HF, "num_key_value_heads": 2, **changes}
                                             if field != "num_key_value_heads" else HF, "x"), field) == value


@pytest.mark.parametrize("changes,says", [
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"num_hidden_layers": "2"}, "lacks a number for num_hidden_layers"), ({"rope_scaling": "yarn"}, "rope"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one dict for all layers"),
    ({"rms_norm_eps": -1}, "rms_norm_eps")])
def test_configs_that_model_py_does_not_compute_are_refused(changes, says):
    with pytest.raises(UserError, match=says):
        checkpoint.config_from_hf({**HF, **changes}, "x")


def test_quantized_weights_are_refused():
    checkpoint.save_model_dir(trained()[0], None, "m")
    weights = load_file("m/model.safetensors")
    weights["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    save_file(weights, "m/model.safetensors")
    with pytest.raises(UserError, match="are int8; model.py reads float32"):
        checkpoint.load_model_dir("m")


def test_a_missing_head_is_never_replaced_by_random_numbers():
    model = Model(ModelConfig(**TINY, tie_word_embeddings=False)).init_weights(0)
    checkpoint.save_model_dir(model, None, "m")
    weights = load_file("m/model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, "m/model.safetensors")
    with pytest.raises(UserError, match="1 missing: lm_head.weight"):
        checkpoint.load_model_dir("m")


def test_transformers_opens_the_directory_with_its_tokenizer(oracle, tmp_path):
    model = trained()[0]
    checkpoint.save_model_dir(model, tokenizers.load_tokenizer("byte"), "m")
    text = "naïve_code(x)  # 日本 🙂"
    ids = tokenizers.load_tokenizer("m").encode(text)
    output = oracle.run(f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
import torch
tokenizer = AutoTokenizer.from_pretrained("m")
assert tokenizer({text!r}, add_special_tokens=False)["input_ids"] == {ids!r}
model = AutoModelForCausalLM.from_pretrained("m")
torch.save(model(torch.tensor([{ids!r}])).logits, "logits.pt")
print(model.config.eos_token_id, model.generation_config.eos_token_id, tokenizer.eos_token_id)
""", tmp_path)
    assert output.split() == ["256", "256", "256"]
    ours = model(torch.tensor([ids]))
    theirs = torch.load("logits.pt", weights_only=True)
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
