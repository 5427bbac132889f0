"""sample.py: prompts in, text out, whole or in pieces; what is asked is done, or refused in one sentence."""
import dataclasses
import functools
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import chat
import checkpoint
import config
import lora
import sample
import tokenizer as tokenizers
from config import UserError
from model import Model, ModelConfig
from sample import generate, load_model, stream
from test_checkpoint import save, trained

REPO = Path(sample.__file__).parent
BYTES = tokenizers.load_tokenizer("byte")


def reciter(text: str, tokenizer=BYTES, ends: bool = True) -> Model:
    """
    A model that writes `text` from the start of a document, then ends it, or begins anew. Its head knows what
    follows each id: every token of the text must be another one, and a prompt is continued from its last.
    """
    ids = tokenizer.encode(text)
    assert len(set(ids)) == len(ids), "a token comes twice: what follows it?"
    size = tokenizer.vocab_size + 3
    model = Model(ModelConfig(model_type="llama", vocab_size=size, hidden_size=size, num_hidden_layers=1,
                              num_attention_heads=1, num_key_value_heads=1, head_dim=2, intermediate_size=2,
                              max_position_embeddings=8, tie_word_embeddings=False))
    with torch.no_grad():
        for p in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj, model.lm_head):
            p.weight.zero_()
        torch.nn.init.eye_(model.model.embed_tokens.weight)
        chain = [tokenizer.eos_id, *ids]
        for now, following in zip(chain, [*ids, chain[0] if ends else ids[0]]):
            model.lm_head.weight[following, now] = 1           # times sqrt(size) from the norm: certain
    model.tokenizer = tokenizer
    return model


@functools.cache
def wild(limit: int = 128) -> Model:
    """Fresh weights so large that the text depends on all that came before."""
    model = Model(ModelConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                              num_key_value_heads=2, head_dim=8, intermediate_size=48,
                              tie_word_embeddings=False, initializer_range=0.5,
                              max_position_embeddings=limit)).init_weights(1)
    model.tokenizer = BYTES
    return model


def command(monkeypatch, capsys, *flags) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of `python sample.py flags`."""
    monkeypatch.setattr(sys, "argv", ["sample.py", "--device=cpu", *flags])
    code = 0
    try:
        config.run(sample.main, sample.Config)
    except SystemExit as error:
        code = error.code
    return (code, *capsys.readouterr())


@pytest.fixture
def run(monkeypatch, capsys):
    return functools.partial(command, monkeypatch, capsys)


@pytest.fixture
def recites():
    """The directory of a model that writes abcdefgh."""
    model = reciter("abcdefgh")
    checkpoint.save_model_dir(model, model.tokenizer, "recites")
    return "--out_dir=recites"


# ---- where a model comes from ---------------------------------------------------------------------------

def test_an_out_dir_a_checkpoint_and_a_hugging_face_directory_write_the_same():
    first = trained()
    first[0].cfg.initializer_range = 0.5
    first[0].init_weights(1)
    state = save(2, trained_model=first)
    checkpoint.save_model_dir(first[0], BYTES, "run", step=2)
    checkpoint.save_model_dir(first[0], BYTES, "hub", shard_size=20_000)
    assert len(list(Path("hub").glob("model-*.safetensors"))) > 1 and not os.path.exists("hub/checkpoints")
    expected = generate(first[0], "ab", 20, temperature=0, tokenizer=BYTES)
    loaded = [load_model("run", "cpu"), load_model("hub", "cpu", torch.float32)]
    for model_or_path in ("run", state, str(state), "hub", *loaded):
        assert generate(model_or_path, "ab", 20, temperature=0) == expected


def test_a_loaded_model_knows_its_tokenizer_or_is_told():
    model = reciter("abc")
    checkpoint.save_model_dir(model, None, "bare")
    bare = load_model("bare", "cpu")
    assert bare.tokenizer is None and not bare.training
    with pytest.raises(UserError, match="^the model has no tokenizer"):
        generate(bare, "a")
    with pytest.raises(UserError, match="^bare has no tokenizer"):
        generate("bare", "a")
    assert generate(bare, "a", tokenizer="byte") == "bc" == "".join(stream(bare, "a", tokenizer=BYTES))
    assert load_model("bare", "cpu", "bf16").head.dtype == torch.bfloat16


def test_a_model_in_int8_writes_too(run, recites):
    assert run(recites, "--prompt=abc", "--dtype=int8") == (0, "abcdefgh\n", "")
    weights = dict(load_model("recites", "cpu", "int8").named_buffers())
    assert {w.dtype for name, w in weights.items() if name.endswith("_proj.weight")} == {torch.int8}


def test_the_tokenizer_of_another_model_is_refused():
    large = tokenizers.train_bpe(["one two three"] * 9, 300, say=str)
    model = reciter("abc")
    model.cfg.vocab_size = 258
    with pytest.raises(UserError, match=r"prompt has the id 26\d and the model only 258 ids: .*bpe-2\d\d"):
        generate(model, "one two three", tokenizer=large)


@pytest.mark.parametrize("file_says", [True, False], ids=["said by tokenizer.json", "only named"])
def test_bos_comes_first_where_tokenizer_json_says_so(file_says):
    """Llama 3's does; SmolLM2's names a bos that no text begins with."""
    hf = pytest.importorskip("tokenizers", reason="pip install -r requirements-dev.txt")
    tokenizers.Tokenizer("two", BYTES.ranks, {**BYTES.special, "<bos>": 257}, 256, bos_id=257).save("there")
    path = Path("there/tokenizer.json")
    spec = json.loads(path.read_text())
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}},
                                                         {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
                "special_tokens": {"<bos>": {"id": "<bos>", "ids": [257], "tokens": ["<bos>"]}}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    if file_says:
        spec["post_processor"] = {"type": "Sequence", "processors": [byte_level, template]}
    path.write_text(json.dumps(spec))
    ours = tokenizers.load_tokenizer("there")
    assert ours.bos_id == 257
    for text in ("ab", "é") + (("",) if file_says else ()):
        assert sample.encode(ours, text) == hf.Tokenizer.from_file(str(path)).encode(text).ids
    assert sample.encode(ours, "") == [257 if file_says else 256]


# ---- prompts --------------------------------------------------------------------------------------------

def test_prompt_of_the_command_line(run, recites):
    assert run(recites, "--prompt=abc") == (0, "abcdefgh\n", "")
    assert run(recites) == (0, "abcdefgh\n", "")                   # none: the start of a document
    assert run(recites, "--prompt", "c", "--max_new_tokens=2") == (0, "cde\n", "")


def test_several_texts_are_separated(run, recites):
    line = "---------------\n"
    assert run(recites, "--prompt=ef", "--num_samples=2") == (0, 2 * f"efgh\n{line}", "")


def test_prompts_of_a_file_are_its_lines_that_are_not_blank(run, recites):
    line = "---------------\n"
    Path("prompts.txt").write_bytes("\ufeffc\r\n\r\n  \r\n\x0cfg\r\nh".encode())
    assert run(recites, "--prompt_file=prompts.txt") == (0, f"cdefgh\n{line}\x0cfgh\n{line}h\n{line}", "")
    Path("one.txt").write_text("e\n")
    assert run(recites, "--prompt_file=one.txt") == (0, "efgh\n", "")


def test_prompts_of_standard_input(run, recites, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("g\n\ne\n"))
    assert run(recites, "--prompt_file=-") == (0, "gh\n---------------\nefgh\n---------------\n", "")


def test_a_prompt_that_is_not_text_is_shown_as_the_model_reads_it(run, recites):
    code, out, _ = run(recites, "--prompt=\udcff", "--max_new_tokens=1")       # b"\xff" on a command line
    assert code == 0 and out.startswith("\ufffd")


@pytest.mark.parametrize("typed,answer", [
    ("x\ny\n", "> hi!\n> hi!\n> \n"), ("x\n\ny\n", "> hi!\n> "), ("", "> \n")],
    ids=["two turns", "empty line", "nothing"])
def test_conversation_answers_each_line_until_an_empty_one(run, monkeypatch, typed, answer):
    model = reciter("\nhi!")
    checkpoint.save_model_dir(model, model.tokenizer, "model")
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert run("--out_dir=model", "--interactive") == (0, answer, "")


def test_conversation_goes_on_from_all_that_was_said(run, recites, monkeypatch):
    said = []

    def heard(model, prompt, **options):
        said.append(prompt)
        yield from ("wa", "it")
    monkeypatch.setattr(sample, "stream", heard)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert run(recites, "--interactive") == (0, "> wait\n> wait\n> \n", "")
    assert said == ["one\n", "one\nwait\ntwo\n"]


def test_conversation_through_a_pipe():
    model = reciter("\nhé!")
    checkpoint.save_model_dir(model, model.tokenizer, "model")
    flags = ["--out_dir=model", "--device=cpu", "--interactive"]
    program = subprocess.run([sys.executable, REPO / "sample.py", *flags], input="x\n", capture_output=True,
                             timeout=100, encoding="utf-8", env={**os.environ, "PYTHONUTF8": "1"})
    assert (program.returncode, program.stdout, program.stderr) == (0, "> hé!\n> \n", "")


def test_ctrl_c_ends_the_text_and_keeps_it(run, recites, monkeypatch):
    def interrupted(*_, **__):
        yield "bc"
        raise KeyboardInterrupt
    monkeypatch.setattr(sample, "stream", interrupted)
    assert run(recites, "--prompt=a") == (0, "abc\n", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\na\n"))
    assert run(recites, "--interactive") == (0, "> bc\n> bc\n> \n", "")


# ---- what comes out -------------------------------------------------------------------------------------

def test_types_follow_from_what_was_asked(capsys):
    model = reciter("abcdefgh")
    assert generate(model, "g") == "h"
    assert generate(model, "g", num_samples=2) == ["h", "h"]
    assert generate(model, ["g"]) == ["h"] and generate(model, ("g", "")) == ["h", "abcdefgh"]
    assert generate(model, ["g", "f"], num_samples=2) == [["h", "h"], ["gh", "gh"]]
    assert generate(model, []) == [] == generate(model, [], num_samples=3)
    assert list(stream(model, "f")) == ["g", "h"] and list(stream(model, "h")) == []
    assert capsys.readouterr() == ("", "")


def test_max_new_tokens_counts_tokens():
    assert len(generate(reciter("abcdefgh", ends=False), "", max_new_tokens=37)) == 37
    assert generate(reciter("abcdefgh", ends=False), "", max_new_tokens=3) == "abc"


def test_end_of_text_ends_it_and_is_no_part_of_it(monkeypatch):
    steps = []

    def counted(*args, **options):
        for new in real(*args, **options):
            steps.append(new)
            yield new
    real = sample.generate_ids
    monkeypatch.setattr(sample, "generate_ids", counted)
    assert generate(reciter("abc"), ["b", ""], max_new_tokens=10**6) == ["c", "abc"]   # each at its own end
    assert len(steps) == 4                                                             # and no step more
    assert "".join(stream(reciter("abc"), "", max_new_tokens=10**6)) == "abc" and len(steps) == 8


def test_a_batch_of_different_lengths_equals_each_alone():
    prompts = ["", "a", "def main():\n    return", "é", "x" * 50]
    together = generate(wild(), prompts, 40, temperature=0)
    assert together == [generate(wild(), prompt, 40, temperature=0) for prompt in prompts]
    assert len(set(together)) == len(prompts)


@pytest.mark.parametrize("length", [3, 16, 50])
def test_past_the_context_limit_the_cache_changes_nothing(length, monkeypatch):
    prompts = ["y" * length, "z"]
    cached = generate(wild(limit=16), prompts, 60, temperature=0)
    monkeypatch.setattr(sample, "generate_ids", functools.partial(sample.generate_ids, cached=False))
    assert generate(wild(limit=16), prompts, 60, temperature=0) == cached


# ---- how it is drawn ------------------------------------------------------------------------------------

def test_temperature_0_is_greedy():
    greedy = generate(wild(), "ab", 30, temperature=0)
    for more in (dict(seed=1), dict(top_p=0.5), dict(top_k=3, min_p=0.1)):
        assert generate(wild(), "ab", 30, temperature=0, **more) == greedy, more
    for almost in (dict(top_k=1), dict(top_p=1e-9), dict(min_p=1.0), dict(temperature=1e-5)):
        assert generate(wild(), "ab", 30, **{"temperature": 1.0, **almost}) == greedy, almost
    assert generate(wild(), "ab", 30, temperature=1.0) != greedy


def test_equal_seeds_give_equal_texts():
    state = torch.get_rng_state()
    a, b, c = (generate(wild(), ["ab", "c"], 30, seed=seed, num_samples=2) for seed in (3, 3, 4))
    assert a == b != c and len({*a[0], *a[1]}) == 4                # every sample is another one
    assert generate(wild(), "ab", 30) != generate(wild(), "ab", 30)
    assert generate(wild(), "ab", 30, seed=3, top_k=0) == generate(wild(), "ab", 30, seed=3)      # 0 = all
    assert torch.equal(torch.get_rng_state(), state)               # the program's own numbers stay its own


def test_a_strong_repetition_penalty_lets_no_token_come_twice(monkeypatch):
    drawn = []

    def noted(*args, **options):
        for new in real(*args, **options):
            drawn.extend(new)
            yield new
    real = sample.generate_ids
    monkeypatch.setattr(sample, "generate_ids", noted)
    generate(wild(), "a", 100, temperature=0)
    assert len(set(drawn)) < len(drawn)
    drawn.clear()
    generate(wild(), "a", 100, temperature=0, repetition_penalty=1e9)
    assert len({*drawn, ord("a")}) == len(drawn) + 1 > 50


# ---- stop strings and streaming -------------------------------------------------------------------------

def test_stop_strings_end_a_text_before_them():
    model = reciter("abcdefgh")
    for stop, text in [("d", "abc"), (["fg"], "abcde"), (["gh", "cd", "xyz"], "ab"), ("cde", "ab"),
                       (["a"], ""), (("b", "ab"), ""), (["", "h"], "abcdefg"), ("xyz", "abcdefgh"),
                       ("ghi", "abcdefgh"), ("", "abcdefgh"), ([], "abcdefgh"), (None, "abcdefgh")]:
        assert generate(model, "", stop=stop) == text == "".join(stream(model, "", stop=stop)), stop


def test_a_stop_string_is_no_more_than_a_part_of_a_token():
    tokenizer = tokenizers.train_bpe(["one two STOPS! three"] * 9, 300, say=str)
    model = reciter("one two STOPS! three", tokenizer)
    assert list(stream(model, "")) == ["one", " two", " STOPS", "!", " three"]
    for stop, pieces in [("OPS!", ["one", " two", " ST"]), ("TOP", ["one", " two", " S"]), (" t", ["one"]),
                         ("S! th", ["one", " two", " STOP"]), (" three", ["one", " two", " STOPS", "!"]),
                         ("!?", ["one", " two", " STOPS", "! three"])]:
        assert list(stream(model, "", stop=stop)) == pieces
        assert generate(model, "", stop=stop) == "".join(pieces)


def test_what_may_become_a_stop_string_is_held_back():
    model = reciter("abcdefgh")
    assert list(stream(model, "", stop="cdx")) == ["a", "b", "cde", "f", "g", "h"]
    assert list(stream(model, "", stop=["bcdx", "cy"])) == ["a", "bcde", "f", "g", "h"]
    assert list(stream(model, "d", stop="ghi")) == ["e", "f", "gh"]            # the end of the text decides
    assert list(stream(model, "d", stop="ghi", max_new_tokens=3)) == ["e", "f", "g"]


def test_stop_of_the_command_line(run, recites):
    assert run(recites, "--stop=de") == (0, "abc\n", "")
    assert run(recites, "--stop=['x', 'f']") == (0, "abcde\n", "")


def test_no_piece_ends_within_a_character():
    text = "aé😀漢"                                   # 1 + 2 + 4 + 3 bytes, one token each
    assert list(stream(reciter(text), "")) == list(text)
    assert list(stream(reciter(text), "", max_new_tokens=5)) == ["a", "é", "\ufffd"]
    assert generate(reciter(text), "", max_new_tokens=5) == "aé\ufffd"
    assert generate(reciter(text), "", stop="😀") == "aé" == "".join(stream(reciter(text), "", stop="😀"))


@pytest.mark.parametrize("options", [dict(temperature=0), dict(seed=1),
                                     dict(seed=2, temperature=1.5, stop=["e", "\ufffda", "xy"])], ids=str)
def test_joined_pieces_are_the_generated_text(options):
    pieces = list(stream(wild(), "ab", 100, **options))
    assert "".join(pieces) == generate(wild(), "ab", 100, **options)
    assert all(pieces) and (len(pieces) > 20 or "stop" in options)


# ---- conversations --------------------------------------------------------------------------------------

CHATS = BYTES.with_special([chat.START, chat.END_OF_TURN])
CHATS.chat_template = chat.CHATML
END_OF_TURN = CHATS.special[chat.END_OF_TURN]
FORECAST = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is it?"},
            {"role": "assistant", "content": "Wet<|im_end|>."}, {"role": "user", "content": "And é?"}]


def asked(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def answerer(text: str, limit: int = 200) -> Model:
    """A model that answers `text` to whatever is asked: what follows the newline of the generation prompt."""
    model = reciter("\n" + text, CHATS)
    model.cfg.max_position_embeddings = limit
    with torch.no_grad():
        model.lm_head.weight[:, ord(text[-1])] = 0
        model.lm_head.weight[END_OF_TURN, ord(text[-1])] = 1
    return model


@functools.cache
def talker(limit: int = 128) -> Model:
    """As wild(), with the ids of a conversation, in ASCII, and with an end now and then."""
    model = Model(ModelConfig(vocab_size=CHATS.vocab_size, hidden_size=32, num_hidden_layers=2,
                              num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
                              tie_word_embeddings=False, initializer_range=0.5,
                              max_position_embeddings=limit)).init_weights(1)
    with torch.no_grad():
        for rows in (slice(0, 33), slice(127, 256)):
            model.lm_head.weight[rows] = 0
        model.lm_head.weight[END_OF_TURN] *= 1.4
    model.tokenizer = CHATS
    return model


@pytest.fixture
def heard(monkeypatch) -> list[list[int]]:
    """The ids of each prompt that a model gets."""
    rows, real = [], sample.generate_ids

    def noted(model, prompts, *args, **options):
        rows.extend(prompts)
        return real(model, prompts, *args, **options)
    monkeypatch.setattr(sample, "generate_ids", noted)
    return rows


def test_a_conversation_is_what_its_template_makes_of_it(heard):
    rendered = CHATS.render_chat(FORECAST, add_generation_prompt=True)[0]
    generate(talker(), FORECAST, 3)
    list(stream(talker(), FORECAST, 3))
    generate(talker(), ["plain", FORECAST], 3, num_samples=2)
    assert heard == [rendered, rendered, *[list(b"plain")] * 2, *[rendered] * 2]
    assert rendered.count(END_OF_TURN) == 4                            # the one that was typed is text
    assert CHATS.decode(rendered).endswith("<|im_start|>user\nAnd é?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("template", [chat.CHATML, "{{ bos_token }}" + chat.CHATML], ids=["none", "written"])
def test_bos_comes_once_before_a_conversation(heard, template):
    pytest.importorskip("jinja2")
    special = {**CHATS.special, "<bos>": CHATS.vocab_size}
    begins = tokenizers.Tokenizer("bos", BYTES.ranks, special, 256, bos_id=CHATS.vocab_size,
                                  opening=[CHATS.vocab_size], chat_template=template)
    model = answerer("ok")
    for prompt in (FORECAST, "plain"):
        generate(model, prompt, 3, tokenizer=begins)
        assert heard[-1][0] == begins.bos_id and heard[-1].count(begins.bos_id) == 1
    assert heard[0][1:] == CHATS.render_chat(FORECAST, add_generation_prompt=True)[0]


def test_an_answer_ends_with_its_turn_and_is_plain_text():
    model, question = answerer("Yes!"), asked("Well?")
    assert END_OF_TURN not in CHATS.ends
    assert generate(model, question) == "Yes!" == "".join(stream(model, question))
    assert generate(model, tuple(question), stop="s!") == "Ye"
    assert generate(model, question, num_samples=2) == ["Yes!"] * 2
    assert generate(model, [question]) == ["Yes!"] and generate(model, [question, question]) == ["Yes!"] * 2
    model = reciter("\nNo.", CHATS)                                    # an end of text ends an answer, too
    model.cfg.max_position_embeddings = 99
    assert generate(model, question) == "No."
    mixed = generate(answerer("Yes!"), ["Y", question], max_new_tokens=6)
    assert mixed[0].startswith("es!<|im_end|>") and mixed[1] == "Yes!"     # a text goes on, as ever


@pytest.mark.parametrize("options", [dict(temperature=0), dict(seed=1), dict(seed=2, stop=["eQ", "7"])],
                         ids=str)
def test_joined_pieces_are_the_answer(options):
    pieces = list(stream(talker(), FORECAST, 60, **options))
    together = generate(talker(), [asked("Why?"), FORECAST, "text"], 60, **options)
    assert "".join(pieces) == generate(talker(), FORECAST, 60, **options) and len(pieces) > 3
    if options == dict(temperature=0):
        assert together[1] == "".join(pieces)


def test_greedy_answers_are_those_of_transformers(oracle, tmp_path):
    checkpoint.save_model_dir(talker(), chat.with_chatml(BYTES), "model")
    plain = [{**message, "content": message["content"].replace("<|im_end|>", "")} for message in FORECAST]
    talks = [plain, asked("c"), asked("<think> Ω")]
    theirs = json.loads(oracle.run(f"""
import json, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained("model")
answers = []
for messages in {talks!r}:
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt",
                                          return_dict=True)
    ids = model.generate(**asked, do_sample=False, max_new_tokens=40)[0, asked["input_ids"].shape[1]:]
    answers.append(tokenizer.decode(ids, skip_special_tokens=True))
print(json.dumps(answers))""", tmp_path))
    assert generate("model", talks, 40, temperature=0) == theirs and len(theirs[1]) < 40      # it ended


def test_an_adapter_brings_its_weights_its_tokens_and_its_template(run):
    base = Model(dataclasses.replace(talker().cfg, vocab_size=257)).init_weights(1)
    checkpoint.save_model_dir(base, BYTES, "base")
    checkpoint.save_model_dir(base, None, "bare")
    new_ids = [CHATS.special[chat.START], END_OF_TURN]
    adapted = lora.adapt(base.extend_vocabulary(259, new_ids, used=257), rank=2, alpha=8, new_ids=new_ids)
    with torch.no_grad():
        for name, p in lora.trained(adapted).items():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    lora.save_adapter(adapted, "adapter", "base")
    chat.with_chatml(BYTES).save("adapter")
    expected = generate(lora.merge(adapted), FORECAST, 20, temperature=0, tokenizer=CHATS)
    for path in ("base", "bare"):
        model = load_model(path, "cpu", adapter="adapter")
        assert generate(model, FORECAST, 20, temperature=0) == expected and model.cfg.vocab_size == 259
    flags = ["--adapter=adapter", "--chat", "--prompt=a", "--temperature=0", "--max_new_tokens=5"]
    assert run("--out_dir=base", *flags) == (0, generate(model, asked("a"), 5, temperature=0) + "\n", "")
    assert run("--out_dir=base", *flags, "--dtype=int8")[0] == 0
    with pytest.raises(UserError, match="no chat template"):
        generate("base", FORECAST)
    code, out, error = run("--out_dir=base", "--adapter=base", "--prompt=a")
    assert (code, out) == (2, "") and "adapter_config.json" in error and error.count("\n") == 1


def test_chat_of_the_command_line_prints_the_answer_alone(run, heard):
    checkpoint.save_model_dir(answerer("Yes!"), CHATS, "model")
    flags, twice = ["--out_dir=model", "--chat"], 2 * "Yes!\n---------------\n"
    assert run(*flags, "--prompt=Well?") == (0, "Yes!\n", "")
    assert run(*flags, "--prompt=Well?", "--num_samples=2") == (0, twice, "")
    Path("two.txt").write_text("a\nb\n")
    assert run(*flags, "--prompt_file=two.txt", "--system=Hush.") == (0, twice, "")
    system = {"role": "system", "content": "Hush."}
    assert heard == [CHATS.render_chat(talk, True)[0] for talk in (
        *3 * [asked("Well?")], [system, *asked("a")], [system, *asked("b")])]


# ---- conversations in the terminal ----------------------------------------------------------------------

GREETING = "/help lists the commands, an empty line ends\n"


@pytest.fixture
def talk(run, monkeypatch, tmp_path):
    """talk(typed lines, *flags) -> what is printed, without the greeting and the prompts, as lines."""
    def with_lines(lines, *flags):
        monkeypatch.setattr("builtins.input", lambda prompt, left=iter(lines): next_line(left))
        code, out, error = run("--out_dir=model", "--interactive", *flags)
        assert (code, error) == (0, "") and out.startswith(GREETING) and out.endswith("\n")
        return out.removeprefix(GREETING).splitlines()

    def next_line(left) -> str:
        line = next(left, EOFError)
        if isinstance(line, str):
            return line
        raise line
    return with_lines


@pytest.fixture
def scripted(monkeypatch):
    """
    scripted(answers) -> the (messages, options) that are asked: no model writes, these are the answers. "^C"
    in one = the user presses it there.
    """
    def with_answers(*answers, limit=1000):
        left, calls = iter(answers), []
        checkpoint.save_model_dir(answerer("Yes!", limit), CHATS, "model")

        def stream(model, messages, **options):
            calls.append((messages, options))
            before, interrupted, _ = next(left).partition("^C")
            yield from before
            if interrupted:
                raise KeyboardInterrupt
        monkeypatch.setattr(sample, "stream", stream)
        return calls
    return with_answers


def said(call) -> list[str]:
    return [f"{message['role'][0]}: {message['content']}" for message in call[0]]


def test_a_conversation_remembers_its_turns(talk, scripted):
    calls = scripted("one", "two", "three")
    assert talk(["a", " b ", "//c", ""], "--system=s") == ["one", "two", "three"]
    assert [said(call) for call in calls] == [["s: s", "u: a"], ["s: s", "u: a", "a: one", "u: b"],
                                              ["s: s", "u: a", "a: one", "u: b", "a: two", "u: /c"]]


@pytest.mark.parametrize("last", [["/quit", "b"], ["", "b"], ["  ", "b"], [EOFError, "b"],
                                  [KeyboardInterrupt, "b"]], ids=str)
def test_a_conversation_ends(talk, scripted, last):
    calls = scripted("one")
    assert talk(["a", *last])[:1] == ["one"] and len(calls) == 1


def test_a_real_conversation_through_the_model(talk):
    checkpoint.save_model_dir(answerer("Yes!"), CHATS, "model")
    assert talk(["Well?", "Well?", "/retry"]) == ["Yes!", "Yes!", "Yes!", ""]


def test_without_a_template_or_with_no_chat_it_is_plain_continuation(run, scripted, monkeypatch):
    calls = scripted("b", "b")
    checkpoint.save_model_dir(reciter("abc"), BYTES, "plain")
    for flags in (["--out_dir=model", "--no-chat"], ["--out_dir=plain"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("/help\n"))
        assert run(*flags, "--interactive") == (0, "> b\n> \n", "")
    assert [prompt for prompt, _ in calls] == ["/help\n"] * 2


def test_system_and_reset_begin_anew(talk, scripted):
    calls = scripted("one", "two", "three")
    assert talk(["/system", "a", "/system  Be kind. ", "/system", "b", "/reset", "c"]) == [
        "(no system message)", "one", "(a new conversation)", "Be kind.", "two", "(a new conversation)",
        "three", ""]
    assert [said(call) for call in calls] == [["u: a"], ["s: Be kind.", "u: b"], ["s: Be kind.", "u: c"]]


def test_retry_asks_again_with_another_draw(talk, scripted):
    calls = scripted("one", "two", "three", "four")
    printed = talk(["/retry", "a", "b", "/retry", "/retry"], "--seed=5")
    assert printed == ["(nothing was asked yet)", "one", "two", "three", "four", ""]
    assert [said(call) for call in calls] == [["u: a"], *3 * [["u: a", "a: one", "u: b"]]]
    assert [options["seed"] for _, options in calls] == [5, 6, 7, 8]


def test_retry_draws_another_answer_unless_it_is_greedy(talk):
    checkpoint.save_model_dir(talker(), CHATS, "model")
    lines, few = ["Hi", "/retry", "/retry"], "--max_new_tokens=12"
    drawn = [talk(lines, few, *flags)[:3] for flags in (["--seed=1"], ["--seed=1"], [], ["--temperature=0"])]
    assert [len(set(answers)) for answers in drawn] == [3, 3, 3, 1] and drawn[0] == drawn[1] != drawn[2]
    assert talk(lines, few, f"--seed={2**63 - 1}")[:3] != drawn[0]


def test_save_appends_a_line_that_sft_can_train_on(talk, scripted):
    from instructions import conversation_of
    scripted("one", "é^C", "^C", "two")
    Path("talks.jsonl").write_text("{}")                   # by someone who left its last line open
    assert talk(["/save talks.jsonl", "a", "/save talks.jsonl", "/save", "b", "c", "/save talks.jsonl",
                 "/save .", "/save no/where", "/save a\0b"], "--system=s") == [
        "(there is no answer to save yet)", "one", "(saved to talks.jsonl)",
        "(/save needs a file: /save talks.jsonl)", "é", "", "(an empty answer, which is not kept)",
        "(saved to talks.jsonl)", "(. could not be written: [Errno 21] Is a directory: '.')",
        "(no/where could not be written: [Errno 2] No such file or directory: 'no/where')",
        "(a\0b could not be written: embedded null byte)", ""]
    before, *lines = Path("talks.jsonl").read_text(encoding="utf-8").splitlines()
    messages = [conversation_of(json.loads(line)).messages for line in lines]
    system, first, second = [{"role": "system", "content": "s"}], asked("a"), asked("b")
    one, two = ([{"role": "assistant", "content": text}] for text in ("one", "é"))
    assert before == "{}" and messages == [system + first + one, system + first + one + second + two]


def test_ctrl_c_keeps_what_was_written_of_an_answer(talk, scripted):
    calls = scripted("half^C", "^C", "two", "^C", "three")
    assert talk(["a", "b", "/retry", "c", "d"]) == [
        "half", "", "(an empty answer, which is not kept)", "two", "", "(an empty answer, which is not kept)",
        "three", ""]
    begun = ["u: a", "a: half"]
    assert [said(call) for call in calls] == [
        ["u: a"], [*begun, "u: b"], [*begun, "u: b"], [*begun, "u: b", "a: two", "u: c"],
        [*begun, "u: b", "a: two", "u: d"]]


def test_what_an_answer_thought_stays_in_the_history(talk, scripted):
    pytest.importorskip("jinja2")
    calls = scripted("<think>Hm.</think>Wet.", "Yes.")
    forgets = tokenizers.load_tokenizer("model")
    content = "message['content']"
    forgets.chat_template = chat.CHATML.replace(content, content + ".split('</think>')[-1]")
    checkpoint.save_model_dir(answerer("Yes!", 1000), forgets, "model")
    assert talk(["a", "b"]) == ["<think>Hm.</think>Wet.", "Yes.", ""]
    assert said(calls[1]) == ["u: a", "a: <think>Hm.</think>Wet.", "u: b"]


def test_unknown_commands_say_how_a_slash_is_sent(talk, scripted):
    assert not scripted()
    helped, *listed = talk(["/etc/passwd please", "/", "/help"])
    assert helped == ("(/etc/passwd is no command, /help lists them; a message that begins with a slash is "
                      "typed with two: //etc/passwd)")
    for command in ("/system", "/reset", "/retry", "/save", "/help", "/quit", "//"):
        assert any(line.startswith(command) for line in listed)


def test_a_long_conversation_loses_its_oldest_turns_and_says_so_once(talk, scripted):
    calls = scripted(*"1234567", limit=80)                             # half of it is for the answer
    full = "(the model's context of 80 tokens is full: it does not see the oldest turns now)"
    assert talk(["a", "b", "c", "d", "/retry", "/save all.jsonl", "/reset", "e", "f"]) == [
        "1", full, "2", "3", "4", "5", "(saved to all.jsonl)", "(a new conversation)", "6", full, "7", ""]
    assert [said(call) for call in calls] == [[f"u: {letter}"] for letter in "abcddef"]
    assert len(json.loads(Path("all.jsonl").read_text(encoding="utf-8"))["messages"]) == 8
    calls = scripted(*"1234", limit=200)
    system = 40 * "s"
    assert talk(["a", "b", "c", "d"], f"--system={system}")[2:4] == [full.replace("80", "200"), "3"]
    assert [said(call) for call in calls[2:]] == [[f"s: {system}", "u: b", "a: 2", "u: c"],
                                                  [f"s: {system}", "u: c", "a: 3", "u: d"]]


def test_a_message_that_does_not_fit_is_not_kept(talk, scripted):
    calls = scripted("1", "2", "3", limit=128)
    long, limit = "x" * 200, "tokens, and the model's context is 128: shorten"
    assert talk(["a", long, "b", f"/system {long}", "c"], "--max_new_tokens=1") == [
        "1", f"(with this message there would be 219 {limit} it, it was not asked)", "2",
        f"(a conversation has 230 {limit} its messages, or leave out the oldest)", "3", ""]
    assert said(calls[-1]) == ["u: a", "a: 1", "u: b", "a: 2", "u: c"]


def test_a_template_that_refuses_is_a_sentence(run, talk):
    pytest.importorskip("jinja2")
    strict = BYTES.with_special([chat.START, chat.END_OF_TURN])
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    strict.chat_template = refusal + chat.CHATML
    checkpoint.save_model_dir(answerer("Yes!"), strict, "model")
    sentence = "the chat template of <Tokenizer 'model', 259 ids> refuses this conversation: no system"
    assert talk(["/system s", "a"]) == [f"({sentence})", "Yes!", ""]
    for flags in (["--interactive"], ["--chat", "--prompt=a"]):
        assert run("--out_dir=model", "--system=s", *flags) == (2, "", f"sample.py: {sentence}\n")


# ---- what is refused ------------------------------------------------------------------------------------

def prepare_wrong_files():
    shutil.copytree("recites", "bare")
    os.remove("bare/tokenizer.json")
    Path("empty.txt").write_text("\n  \n")
    Path("latin.txt").write_bytes(b"caf\xe9\n")
    os.mkdir("folder")


@pytest.mark.parametrize("flags,sentence", [
    (["--out_dir=bare", "--prompt=a"], "bare has no tokenizer (no tokenizer.json)"),
    (["--out_dir=bare", "--interactive"], "bare has no tokenizer (no tokenizer.json)"),
    (["--out_dir=nowhere"], "nowhere is not a directory"),
    (["--out_dir=folder"], "folder holds no model"),
    (["--prompt=a", "--prompt_file=empty.txt"], "prompt and prompt_file were both given"),
    (["--prompt_file=empty.txt"], "prompt_file=empty.txt holds no prompt"),
    (["--prompt_file=nowhere.txt"], "prompt_file=nowhere.txt cannot be read"),
    (["--prompt_file=latin.txt"], "prompt_file=latin.txt cannot be read"),
    (["--prompt_file=folder"], "prompt_file=folder cannot be read"),
    (["--interactive", "--prompt=a", "--num_samples=2"], "leave out prompt and num_samples"),
    (["--chat", "--prompt=a"], "has no chat template, so the model knows no conversations: train it on some "
                               "with sft.py"),
    (["--chat", "--interactive"], "no chat template"),
    (["--system=s", "--interactive"], "no chat template"),
    (["--system=s", "--prompt=a"], "system='s' stands before a conversation"),
    (["--system=s", "--interactive", "--no-chat"], "system='s' stands before a conversation"),
    (["--chat"], "chat answers a message, and there is none"),
    (["--chat", "--prompt= "], "chat answers a message, and there is none"),
    (["--temperature=-1"], "--temperature=-1.0 must be at least 0"),
    (["--top_p=2"], "--top_p=2.0 must be at most 1"),
    (["--num_samples=0"], "--num_samples=0 must be above 0"),
    (["--max_new_tokens=many"], "max_new_tokens"),
    (["--dtype=fp7"], "dtype=fp7 is not one of"),
    (["--device=abacus"], "device=abacus is none of")], ids=str)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(run, recites, flags, sentence):
    prepare_wrong_files()
    code, out, error = run(recites, *flags)
    assert (code, out) == (2, "")
    assert error.startswith("sample.py: ") and sentence in error and error.count("\n") == 1


@pytest.mark.parametrize("options", [
    dict(temperature=-1), dict(temperature=float("nan")), dict(temperature="warm"), dict(top_p=2),
    dict(top_p=0), dict(top_k=-1), dict(max_new_tokens=0), dict(num_samples=0), dict(repetition_penalty=0),
    dict(stop=1.5), dict(seed=-1)], ids=str)
def test_values_without_sense_are_refused_from_python_too(options):
    with pytest.raises(UserError, match=next(iter(options))):
        generate(reciter("abc"), "a", **options)
    if "num_samples" not in options:
        with pytest.raises(UserError, match=next(iter(options))):
            list(stream(reciter("abc"), "a", **options))


@pytest.mark.parametrize("prompt,sentence", [
    ([], "a conversation without messages"), ({"role": "user", "content": "a"}, "a list of messages"),
    (None, "None is neither"), ([{"role": "user"}], "unlike {'role': 'user'}"),
    ([*asked("a"), "b"], "is neither"), ([{"messages": asked("a")}], "unlike {'messages'"),
    ([{"role": "users", "content": "a"}], "system, user, assistant, tool"),
    ([{"role": ["user"], "content": "a"}], "system, user, assistant, tool"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "a text as its content"),
    ([*asked("a"), {"role": "assistant", "content": "b"}], "ends with an answer"),
    (asked("a" * 200), "tokens, and the model's context is 128: shorten")], ids=lambda value: str(value)[:30])
def test_conversations_that_are_none_are_refused(prompt, sentence):
    for ask in (lambda: list(stream(talker(), prompt)), lambda: generate(talker(), ["text", prompt])):
        with pytest.raises(UserError, match=sentence):
            ask()
    if prompt:
        with pytest.raises(UserError, match=sentence):
            generate(talker(), prompt)


def test_a_conversation_needs_a_template():
    with pytest.raises(UserError, match=r"<Tokenizer 'byte', 257 ids> has no chat template.*sft\.py"):
        generate(wild(), asked("a"))
