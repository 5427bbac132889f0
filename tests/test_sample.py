"""sample.py: prompts in, text out, whole or in pieces; what is asked is done, or refused in one sentence."""
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

import checkpoint
import config
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
