"""A real trained model, SmolLM2-135M-Instruct: our logits and text are transformers', and make sense."""
import json
import os
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from safetensors.torch import load_file, save_file

import data
import instructions
import sample
import sft
from packages import package  # noqa: F401  (a fixture)
from test_vocabularies import SMOLLM2, smollm2_files

PROMPTS = {                            # and what must come (it knows little but English and code)
    "The capital of France is": " Paris.",
    "The days of the week are Monday, Tuesday,": " Wednesday, Thursday, Friday, Saturday, Sunday",
    "1, 2, 3, 4, 5,": " 6, 7, 8, 9, 10,",
    "def add(a, b):\n    return": " a + b\n",
    "Здравствуйте, меня зовут": "",
    "水は": "",
}
PENALISED = [0, 4]


@pytest.fixture(scope="module")
def directory(package) -> Path:  # noqa: F811
    """The model as a Hugging Face directory, made once, in the cache of packages.py beside its package."""
    gguf = pytest.importorskip("gguf", reason="pip install -r requirements-dev.txt")
    file = package(*SMOLLM2) / SMOLLM2[1]
    final = file.parent / "huggingface-1"          # the next number when make() writes something else
    if not final.exists():
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            os.mkdir(f"{scratch}/made")
            make(Path(scratch, "made"), gguf.GGUFReader(file))
            os.rename(f"{scratch}/made", final)    # what is there is complete
    return final


def make(out: Path, reader) -> None:
    def value(key: str):
        return reader.fields[f"llama.{key}"].contents()
    tokenizer, settings = smollm2_files(reader.fields)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "torch_dtype": "bfloat16", "tie_word_embeddings": True, **ends,
        "vocab_size": value("vocab_size"), "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"), "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"), "rope_theta": value("rope.freq_base"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("context_length")}
    for name, content in (("config", config), ("generation_config", ends), ("tokenizer", tokenizer),
                          ("tokenizer_config", settings)):
        (out / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    save_file(dequantised(reader), out / "model.safetensors", metadata={"format": "pt"})


def dequantised(reader) -> dict:
    """The tensors with Hugging Face's names, in bf16: half the disk, and both sides read the same."""
    from gguf.quants import dequantize
    parts = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm",
             "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj"}
    outside = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    K, tensors = reader.fields["llama.rope.dimension_count"].contents(), {}
    for tensor in reader.tensors:
        t = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, name = name.split(".")
            if name in ("attn_q", "attn_k"):       # rows i and i + K/2 side by side for llama.cpp: put back
                t = t.view(-1, K // 2, 2, t.shape[-1]).transpose(1, 2).reshape(t.shape)
            name = f"model.layers.{layer}.{parts[name]}"
        else:
            name = outside[name]
        tensors[f"{name}.weight"] = t.to(torch.bfloat16)
    return tensors


@pytest.fixture(scope="module")
def model(directory):
    return sample.load_model(directory, "cpu", "fp32")


@pytest.fixture(scope="module")
def theirs(directory, oracle, tmp_path_factory) -> dict:
    """What transformers makes of each prompt alone: logits; ids, greedy text, greedy text with a penalty."""
    out = tmp_path_factory.mktemp("transformers")
    (out / "prompts.json").write_text(json.dumps(list(PROMPTS)))
    answer = oracle.run(f"""
import json, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({str(directory)!r}, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained({str(directory)!r})
answer, logits = [], {{}}
for i, prompt in enumerate(json.load(open("prompts.json"))):
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        logits[str(i)] = model(ids).logits[0].contiguous()
    texts = []
    for penalty in (1.0, 1.3)[:2 if i in {PENALISED} else 1]:
        new = model.generate(ids, do_sample=False, max_new_tokens=16, repetition_penalty=penalty)
        new = new[0, ids.shape[1]:]
        texts.append(tokenizer.decode(new[new != 2], clean_up_tokenization_spaces=False))
    answer.append([ids[0].tolist(), *texts])
save_file(logits, "logits.safetensors")
del model
print(json.dumps(answer))
""", out)
    return {"answers": json.loads(answer), "logits": load_file(out / "logits.safetensors")}


def test_logits_equal_transformers(model, theirs):
    for i, prompt in enumerate(PROMPTS):
        ids = sample.encode(model.tokenizer, prompt)
        assert ids == theirs["answers"][i][0]
        with torch.inference_mode():
            logits = model(torch.tensor([ids]))[0]
        expected = theirs["logits"][str(i)]
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max(), prompt


def test_greedy_text_equals_transformers_and_makes_sense(model, theirs):
    """All prompts in one batch here, each alone there."""
    texts = sample.generate(model, list(PROMPTS), max_new_tokens=16, temperature=0)
    assert texts == [answer[1] for answer in theirs["answers"]]
    for (prompt, expected), text in zip(PROMPTS.items(), texts):
        assert text.startswith(expected), f"{prompt!r} -> {text!r}"


def test_repetition_penalty_equals_transformers(model, theirs):
    prompts = [list(PROMPTS)[i] for i in PENALISED]
    texts = sample.generate(model, prompts, max_new_tokens=16, temperature=0, repetition_penalty=1.3)
    assert texts == [theirs["answers"][i][2] for i in PENALISED]


def test_an_answer_ends_at_its_end_of_text(model):
    """A turn of the template it was tuned on, put together by hand: <|im_start|> 1, <|im_end|> 2."""
    encode = model.tokenizer.encode
    ids = [1, *encode("user\nWhat is the capital of Italy?"), 2, *encode("\n"), 1, *encode("assistant\n")]
    text, answer = sample.Text(model.tokenizer, []), ""
    for (new,) in sample.generate_ids(model, [ids], 40, temperature=0):
        answer += text.push(new)
        if text.done:
            break
    assert text.done and new == 2 and "Rome" in answer and "<|" not in answer


def test_8_bit_weights_cost_less_than_a_hundredth_of_a_nat(model, directory):
    text = " ".join(topics["specialnames"].split())
    ids = torch.tensor([model.tokenizer.encode(text)[:1025]])
    labels = ids[0, 1:]
    with torch.inference_mode():
        exact, coarse = (torch.nn.functional.cross_entropy(m(ids[:, :-1])[0], labels).item()
                         for m in (model, sample.load_model(directory, "cpu", "int8")))
    assert len(labels) == 1024 and exact < 3.5 and abs(coarse - exact) < 0.01


# ---- fine-tuned on a real set of conversations ------------------------------------------------------------

TOPICS = ("ai botprofile computers conversations emotion food gossip greetings health history humor "
          "literature money movies politics psychology science sports trivia").split()


def conversations(package, path: str) -> None:  # noqa: F811
    yaml = pytest.importorskip("yaml", reason="pip install -r requirements-dev.txt")
    files = [f"chatterbot_corpus/data/english/{topic}.yml" for topic in TOPICS]
    directory = package("chatterbot-corpus==1.3.3", *files)
    with open(path, "w", encoding="utf-8") as out:
        for file in files:
            for turns in yaml.safe_load((directory / file).read_text(encoding="utf-8"))["conversations"]:
                roles = ["user", "assistant"] * len(turns)
                messages = [{"role": role, "content": str(turn)} for role, turn in zip(roles, turns)]
                out.write(json.dumps({"messages": messages}) + "\n")


@pytest.mark.slow
def test_tuning_on_conversations_lowers_the_loss_of_held_out_answers_and_they_end(
        directory, package, oracle):  # noqa: F811
    """About ten minutes on two cores."""
    conversations(package, "chats.jsonl")
    torch.set_num_threads(2)
    sft.finetune(init_from=str(directory), data="chats.jsonl", out_dir="out", sequence_length=256,
                 val_fraction=0.1, eval_interval=40, sample_interval=None, save_interval=None, device="cpu")
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    losses = [line["validation-loss"] for line in lines if "validation-loss" in line]
    print("loss on the answers held out:", losses)
    assert losses[-1] <= losses[0] - 0.3

    model = sample.load_model("out", "cpu")
    samples = instructions.Samples(str(next(Path("data").glob("chats-*"))))
    rows = data.Rows(samples, 256, True, True, "truncate", 0.1, 1337, lambda text: None)
    asked = [model.tokenizer.decode(samples.tokens(int(i))[0]) for i in rows.val.pieces[:20, 0]]
    asked = [text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0] for text in asked]
    answers = [sample.generate(model, [{"role": "user", "content": question}], temperature=0,
                               max_new_tokens=100) for question in asked]
    print(*zip(asked, answers), sep="\n")
    assert sum(len(model.tokenizer.encode(answer)) < 100 for answer in answers) >= 15
    theirs = oracle.run("""
import json
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("out", dtype="float32")
tokenizer, texts = AutoTokenizer.from_pretrained("out"), []
for question in %r:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True,
                                        return_tensors="pt", return_dict=True)["input_ids"]
    new = model.generate(ids, max_new_tokens=100, do_sample=False)[0, ids.shape[1]:]
    texts.append(tokenizer.decode(new, skip_special_tokens=True))
print(json.dumps(texts))
""" % asked[:10], Path.cwd())
    assert json.loads(theirs) == answers[:10]
