"""sft.py end to end on small models: what is learned, packing changes nothing, resume, LoRA, the judges."""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import chat
import checkpoint
import data
import log
import sample
import sft
from config import UserError
from forked import run_ranks
from model import Model, ModelConfig
from tokenizer import load_tokenizer

REPO = Path(sft.__file__).parent
SHAPE = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
             intermediate_size=96)
PAIRS = [("What is the capital of France?", "Paris."), ("And of Italy?", "Rome, of course."),
         ("Say hello.", "Hello there!"), ("2 + 2?", "4"), ("Name a fruit", "A pear\nis one.")]


def write(path: str, records: list) -> str:
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def pairs() -> str:
    return write("pairs.jsonl", [{"question": question, "answer": answer} for question, answer in PAIRS])


def many(n: int = 48) -> list[dict]:
    random = np.random.default_rng(0)
    return [{"question": "q" * int(random.integers(1, 20)),
             "answer": chr(97 + i % 26) * int(random.integers(1, 30))} for i in range(n)]


def base(path: str = "base", seed: int = 0, tokenizer: str = "byte", **shape) -> str:
    """A model of the byte tokenizer, without chat tokens."""
    cfg = ModelConfig(vocab_size=320, max_position_embeddings=128, **{**SHAPE, **shape})
    checkpoint.save_model_dir(Model(cfg).init_weights(seed), load_tokenizer(tokenizer), path)
    return path


def go(data: str, **options) -> dict:
    return sft.finetune(**{"data": data, "sequence_length": 128, "device": "cpu", "micro_batch_size": 2,
                           "max_steps": 6, "lr": 3e-3, "adam_eps": 1e-5, "eval_interval": None,
                           "sample_interval": None, "save_interval": None, "val_fraction": 0, **options})


def fresh(data: str, **options) -> dict:
    return go(data, **{"params": None, **SHAPE, "tokenizer": "byte", **options})


def metrics(out_dir) -> list[dict]:
    return [json.loads(line) for line in Path(out_dir, "metrics.jsonl").read_text().splitlines()]


def weights(out_dir) -> dict:
    return checkpoint.load_model_dir(out_dir)[0].state_dict()


# ---- it learns --------------------------------------------------------------------------------------------

def answers_of(path, **options) -> list[str]:
    model = sample.load_model(path, "cpu")
    return [sample.generate(model, [{"role": "user", "content": question}], temperature=0, max_new_tokens=40)
            for question, _ in PAIRS]


@pytest.mark.parametrize("start", ["from scratch", "from a base", "an adapter"])
def test_a_handful_of_pairs_is_learned_by_heart_and_each_answer_stops_by_itself(pairs, start):
    options = {"from scratch": dict(params=None, **SHAPE, tokenizer="byte"),
               "from a base": dict(init_from=base()),
               "an adapter": dict(init_from="educated", lora_rank=16, lr=2e-2, max_steps=160)}[start]
    if start == "an adapter":                                  # noise cannot be adapted to anything
        path = write("texts.jsonl", [{"text": f"{question} {answer}"} for question, answer in PAIRS])
        go(path, init_from=base(), objective="causal_lm", max_steps=60, out_dir="educated", lr=1e-2)
        assert "<|im_end|>" not in checkpoint.load_model_dir("educated")[1].special
    result = go(pairs, **{"max_steps": 120, "out_dir": "out", "lr": 1e-2, **options})
    assert result["losses"][-1] < (0.2 if start == "an adapter" else 0.05)
    assert answers_of("out") == [answer for _, answer in PAIRS]


def test_new_tokens_begin_at_the_mean_and_the_rest_of_the_vocabulary_stays(pairs):
    path = base()
    before = weights(path)["model.embed_tokens.weight"]
    cfg = sft.config.make(sft.Config, dict(init_from=path))
    model = checkpoint.open_base(cfg, None, None)
    tokenizer = sft.choose_tokenizer(cfg, model, None, lambda _: None)
    assert sft.settle_shape(cfg, model, tokenizer, lambda _: None) == [257, 258]
    rows = model.model.embed_tokens.weight
    assert torch.equal(rows[:257], before[:257]) and cfg.vocab_size == 320
    assert torch.allclose(rows[257], before[:257].mean(0)) and torch.equal(rows[257], rows[258])


def test_a_vocabulary_without_room_grows(pairs):
    cfg = ModelConfig(vocab_size=257, max_position_embeddings=128, tie_word_embeddings=False, **SHAPE)
    checkpoint.save_model_dir(Model(cfg).init_weights(0), load_tokenizer("byte"), "full")
    go(pairs, init_from="full", out_dir="out", max_steps=1)
    model, tokenizer = checkpoint.load_model_dir("out")
    assert model.cfg.vocab_size >= 259 and tokenizer.special["<|im_end|>"] == 258
    assert model.lm_head.weight.shape[0] == model.cfg.vocab_size


def test_texts_are_learned_as_a_whole_by_causal_lm():
    path = write("texts.jsonl", [{"text": "abcdefghij" * 30}])
    result = go(path, init_from=base(), objective="causal_lm", max_steps=40, out_dir="out", lr=1e-2,
                sequence_length=64)
    assert result["losses"][-1] < 0.5
    tokenizer = checkpoint.load_model_dir("out")[1]
    assert tokenizer.chat_template is None and "<|im_end|>" not in tokenizer.special


# ---- packing, accumulation and ranks change nothing -------------------------------------------------------

def rows_of(path: str, packing: bool) -> data.Rows:
    tokenizer = chat.with_chatml(load_tokenizer("byte"))
    return data.pack_sft(path, tokenizer, 128, packing=packing, say=lambda _: None)


def loss_of(model: Model, rows: torch.Tensor):
    ids, labels, documents, positions = rows.unbind(1)
    return model(ids, labels=labels, documents=documents, positions=positions)


@pytest.mark.parametrize("shape", [{}, {"model_type": "llama"}, {"sliding_window": 16}])
def test_packed_samples_have_the_logits_and_gradients_of_samples_alone(shape):
    path = write("many.jsonl", many())
    model = Model(ModelConfig(vocab_size=320, **{**SHAPE, **shape})).init_weights(1)
    packed, alone = rows_of(path, True), rows_of(path, False)
    assert len(packed.train) < len(alone.train) / 2
    for number in range(len(packed.train)):
        ids, _, documents, positions = torch.from_numpy(packed.row(packed.train, number)).unsqueeze(1)
        logits, begin = model(ids, documents=documents, positions=positions), 0
        for piece in packed.train.rows[number]:
            index, _, places = packed.train.pieces[piece].tolist()
            alone_ids = torch.from_numpy(packed.samples.tokens(index)[0])[None, :-1]
            here = logits[:, begin:begin + places]
            torch.testing.assert_close(here, model(alone_ids), rtol=1e-4, atol=1e-4)
            begin += places
    gradients = []
    for rows in (packed, alone):
        model.zero_grad()
        batch = torch.from_numpy(np.stack([rows.row(rows.train, n) for n in range(len(rows.train))]))
        loss, valid = loss_of(model, batch)
        (loss / valid).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        assert int(valid) == rows.train.trained
    for name, gradient in gradients[0].items():
        assert (gradient - gradients[1][name]).norm() <= 1e-5 * gradient.norm(), name


SPLITS = {"1 rank": (1, 8), "1 rank, 4 forwards": (1, 2), "2 ranks": (2, 4), "2 ranks, 4 forwards": (2, 1)}


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_any_number_of_ranks_and_any_accumulation_gives_the_same_losses(lora_rank):
    """Rows differ in their numbers of labels: a mean of means would show."""
    path, runs = write("many.jsonl", [*many(200), {"question": "x", "answer": "y" * 100}]), {}
    for name, (world, micro) in SPLITS.items():
        options = dict(micro_batch_size=micro, global_batch_size=8, out_dir=name, eval_interval=3,
                       max_steps=4, val_fraction=0.1, init_from=base(), lora_rank=lora_rank)
        runs[name] = run_ranks(go_in_rank, world, path, options)[0] if world > 1 else go(path, **options)
    first = runs.pop("1 rank")
    assert first["losses"][-1] < first["losses"][0]
    for name, run in runs.items():
        assert run["losses"] == pytest.approx(first["losses"], rel=1e-5), name
        assert run["validation_loss"] == pytest.approx(first["validation_loss"], rel=1e-5), name
        assert run["tokens"] == first["tokens"]
        for a, b in zip(metrics("1 rank"), metrics(name)):
            if "gradient-norm" in a:
                assert b["gradient-norm"] == pytest.approx(a["gradient-norm"], rel=1e-5), name


def go_in_rank(path, options):
    return go(path, **options)


# ---- how long ---------------------------------------------------------------------------------------------

def test_one_epoch_is_the_default_and_tokens_are_trained_tokens():
    path = write("many.jsonl", many())
    rows = rows_of(path, True)
    result = fresh(path, max_steps=None, micro_batch_size=1, out_dir="one")
    assert result["steps"] == len(rows.train) and result["tokens"] == rows.train.trained
    rates = [m["learning-rate"] for m in metrics("one")]
    assert len(rates) == result["steps"] and rates[-1] < 0.2 * 3e-3        # the curve ends where the run does
    half = fresh(path, max_steps=None, tokens=rows.train.trained // 2, micro_batch_size=1, out_dir="half")
    assert 0 <= half["tokens"] - rows.train.trained // 2 < rows.train.labels.max()


def test_a_batch_that_nobody_gave_leaves_fifty_steps():
    path = write("many.jsonl", many(200))
    result = fresh(path, max_steps=None, epochs=2, micro_batch_size="auto", out_dir="out", packing=False,
                   sequence_length=96, log_interval=50)
    assert result["steps"] == 50


# ---- stopped and resumed ----------------------------------------------------------------------------------

def stop_at(step: int, path: str, **options) -> dict:
    original = log.Log.step

    def stopping(self, now, values):
        original(self, now, values)
        if now == step:
            signal.raise_signal(signal.SIGTERM)
    log.Log.step = stopping
    try:
        return go(path, **options)
    finally:
        log.Log.step = original


@pytest.mark.parametrize("options", [
    {"init_from": "base"}, {"init_from": "base", "lora_rank": 4, "lora_dropout": 0.1},
    {"params": None, **SHAPE}, {"params": None, **SHAPE, "tokenizer": "byte"},
], ids=["full", "adapter", "its own tokenizer", "scratch"])
def test_resume_is_bitwise(options):
    path = write("many.jsonl", many())
    base()
    whole = go(path, out_dir="whole", **options)
    assert stop_at(4, path, out_dir="cut", **options)["steps"] == 4
    rest = go(path, out_dir="cut", **options)
    assert rest["losses"] == whole["losses"][4:] and rest["tokens"] == whole["tokens"]
    assert all(torch.equal(a, b) for a, b in zip(weights("whole").values(), weights("cut").values()))
    assert go(path, out_dir="cut", **options)["steps"] == 6    # finished: says so
    assert len(list(Path("data").glob("*-sft-*/meta.json"))) == 1


def test_a_file_that_was_only_touched_is_the_same_data():
    path = write("many.jsonl", many())
    fresh(path, out_dir="whole", tokenizer="auto")
    stop_at(4, path, out_dir="out", params=None, **SHAPE)
    os.utime(path, (0, 0))
    fresh(path, out_dir="out", tokenizer="auto")
    assert all(torch.equal(a, b) for a, b in zip(weights("whole").values(), weights("out").values()))


def test_other_records_are_another_run():
    path = write("many.jsonl", many())
    stop_at(4, path, init_from=base(), out_dir="out")
    write("many.jsonl", many()[1:])
    with pytest.raises(UserError, match="content changed"):
        go(path, init_from="base", out_dir="out")
    with pytest.raises(UserError, match="template was 'auto', is 'chatml'"):
        go(path, init_from="base", out_dir="out", template="chatml")


def test_a_checkpoint_of_an_adapter_is_a_model(pairs):
    go(pairs, init_from=base(), lora_rank=4, out_dir="out", save_interval=3)
    last, out = (checkpoint.load_model_dir(path)[0] for path in ("out/checkpoints/00000006", "out"))
    earlier = checkpoint.load_model_dir("out/checkpoints/00000003")[0]
    ids = torch.arange(40)[None]
    torch.testing.assert_close(last(ids), out(ids), rtol=1e-5, atol=1e-5)
    assert (earlier(ids) - out(ids)).abs().max() > 1e-3


# ---- adapters ---------------------------------------------------------------------------------------------

def test_an_adapter_trains_little_and_out_dir_holds_no_model(pairs, capsys):
    path = base()
    before = weights(path)
    go(pairs, init_from=path, lora_rank=4, out_dir="out", max_steps=3)
    assert not Path("out/model.safetensors").exists() and Path("out/adapter_model.safetensors").exists()
    assert "of them trained" in capsys.readouterr().out
    state = checkpoint.read_pieces(checkpoint.newest_state(Path("out"))[0])
    assert sum(t.numel() for t in state.values()) < 3.1 * 17_000       # adapters and moments, no base
    assert all(torch.equal(a, b) for a, b in zip(before.values(), weights(path).values()))


def test_merge_writes_the_model_that_the_adapter_and_its_base_are(pairs):
    go(pairs, init_from=base(), lora_rank=4, out_dir="out", max_steps=30, merge=True)
    ids = torch.arange(40)[None]
    merged, adapted = (checkpoint.load_model_dir(path)[0] for path in ("out/merged", "out"))
    torch.testing.assert_close(merged(ids), adapted(ids), rtol=1e-5, atol=1e-5)
    assert not Path("out/merged/adapter_config.json").exists()
    first = weights("out/merged")
    assert sft.finetune(merge=True, out_dir="out") == {"out_dir": "out/merged"}
    assert all(torch.equal(a, b) for a, b in zip(first.values(), weights("out/merged").values()))
    with pytest.raises(UserError, match="holds no adapter"):
        sft.finetune(merge=True, out_dir="base")


# ---- templates --------------------------------------------------------------------------------------------

def test_a_model_keeps_its_own_template(pairs):
    go(pairs, init_from=base(), out_dir="chatty", max_steps=1)
    path = Path("chatty/tokenizer_config.json")
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["chat_template"] = (
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}")
    path.write_text(json.dumps(settings), encoding="utf-8")
    go(pairs, init_from="chatty", out_dir="own", max_steps=1)
    assert checkpoint.load_model_dir("own")[1].chat_template == settings["chat_template"]
    go(pairs, init_from="chatty", out_dir="ours", max_steps=1, template="chatml")
    assert checkpoint.load_model_dir("ours")[1].chat_template == chat.CHATML
    settings["chat_template"] = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    path.write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(UserError, match="--template=chatml"):
        go(pairs, init_from="chatty", out_dir="no", max_steps=1)
    Path("my.jinja").write_text("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
                                "{% if add_generation_prompt %}<|im_start|>{% endif %}", encoding="utf-8")
    go(pairs, init_from="chatty", out_dir="file", max_steps=1, template="my.jinja")
    assert "<|im_start|>{{ m.content }}" in checkpoint.load_model_dir("file")[1].chat_template


# ---- what is refused, and what is honoured ----------------------------------------------------------------

@pytest.mark.parametrize("options, words", [
    ({"data": ""}, "--data is missing"),
    ({"data": "nothing.jsonl"}, "does not exist"),
    ({"out_dir": "base"}, "init_from itself"),
    ({"epochs": 1, "max_steps": 2}, "both given"),
    ({"lora_rank": 4, "init_from": None}, "name it by --init_from"),
    ({"lora_alpha": 4.0}, "without lora_rank"),
    ({"merge": True}, "needs lora_rank"),
    ({"format": "alpacca"}, "none of messages"),
    ({"format": "alpaca"}, "no record that can be trained on"),
    ({"template": "nothing.jinja"}, "neither auto, chatml nor a readable file"),
    ({"overlong": "error", "sequence_length": 16}, "5 of 5 records"),
    ({"hidden_size": 64}, "does not fit init_from"),
    ({"max_epochs": 1, "max_steps": 50}, "too small for this run"),
    ({"lora_rank": 4, "lora_targets": ["nothing"]}, "nothing"),
    ({"val_fraction": 1.0}, "val_fraction"),
])
def test_what_cannot_be_is_said_before_anything_is_trained(pairs, options, words):
    with pytest.raises(UserError, match=words):
        go(**{"data": pairs, "init_from": base(), "out_dir": "out", **options})
    assert not Path("out/checkpoints").exists()


def test_an_explicit_learning_rate_is_honoured(pairs):
    go(pairs, init_from=base(), out_dir="out", lr=1.5e-4, schedule="constant", warmup_ratio=0.0, max_steps=2)
    assert [m["learning-rate"] for m in metrics("out")] == [1.5e-4] * 2


def test_records_are_shown_with_their_trained_tokens_in_colour(pairs, capsys):
    fresh(pairs, show=2, max_steps=1, out_dir="out")
    said = capsys.readouterr().out
    assert said.count("tokens are trained ---") == 2
    assert "<|im_start|>assistant\n\033[4;32mParis.<|im_end|>\033[0m\n" in said


def test_the_command_line_says_one_sentence_and_exits_2(pairs):
    command = [sys.executable, str(REPO / "sft.py"), "--data=nothing.jsonl"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "does not exist" in done.stderr


# ---- judges -----------------------------------------------------------------------------------------------

def test_transformers_answers_with_equal_greedy_text_and_stops(pairs, oracle):
    go(pairs, init_from=base(), max_steps=120, lr=1e-2, out_dir="out")
    said = oracle.run("""
import json
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained("out"), AutoTokenizer.from_pretrained("out")
texts = []
for question in %r:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                        return_tensors="pt", return_dict=True)["input_ids"]
    new = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1]:]
    texts.append([tokenizer.decode(new, skip_special_tokens=True), len(new)])
print(json.dumps(texts))
""" % [question for question, _ in PAIRS], Path.cwd())
    assert [text for text, _ in json.loads(said)] == answers_of("out") == [answer for _, answer in PAIRS]
    assert all(length < 40 for _, length in json.loads(said))
