"""Every way to set a value, and every way to get it wrong."""
import os
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest

import config
from config import UserError, load, make

REPO = Path(config.HERE)


@dataclass
class Base:
    # shape
    hidden_size: int = 64                        # width
    rope_scaling: dict | None = None             # as on the Hub


@dataclass
class Config(Base):
    # what
    data: str = "stdlib"                         # a corpus
    out_dir: str | None = None                   # where it goes
    resume: bool | str = "auto"                  # "auto", "never" or a path
    seed: int = 0                                # any
    # how much
    tokens: int | None = None                    # a budget
    max_steps: int | None = None                 # another way to say it
    micro_batch_size: int | Literal["auto"] = "auto"    # sequences
    lr: float = 0.02                             # peak
    beta1: float = 0.9                           # a fraction
    schedule: Literal["linear", "cosine"] = "linear"    # the curve
    compile: bool | None = None                  # None = on for CUDA
    tensorboard: bool = False                    # yes or no
    stop: list[str] | None = None                # strings
    dims: list[int] | None = None                # numbers
    tokenizer: str | object = "auto"             # a name, or a live one from Python


def write(name, text):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def error(*argv) -> str:
    with pytest.raises(UserError) as caught:
        load(Config, argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what works -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("argv, key, value", [
    (["--lr=1"], "lr", 1.0), (["--lr", "1e-3"], "lr", 1e-3), (["--compile=false"], "compile", False),
    (["--compile", "False"], "compile", False), (["--no-compile"], "compile", False),
    (["--compile"], "compile", True),
    (["--compile=None"], "compile", None), (["--micro-batch-size=4"], "micro_batch_size", 4),
    (["--micro_batch_size=auto"], "micro_batch_size", "auto"), (["--tokens=100M"], "tokens", 100_000_000),
    (["--tokens=1e9"], "tokens", 10**9), (["--tokens=524_288"], "tokens", 524288),
    (["--tokens=1.5b"], "tokens", 1_500_000_000),
    (["--tokens=5", "--tokens=None"], "tokens", None), (["--tokens=None", "--tokens", "5"], "tokens", 5),
    (["--out_dir=a=b"], "out_dir", "a=b"), (["--out_dir=123"], "out_dir", "123"),
    (["--out-dir", "x"], "out_dir", "x"),
    (["--resume=false"], "resume", False), (["--resume", "some/dir"], "resume", "some/dir"),
    (["--resume"], "resume", True),
    (["--schedule=cosine"], "schedule", "cosine"), (["--seed=0"], "seed", 0), (["--lr", "1E-4"], "lr", 1e-4),
    (["--stop=a,b"], "stop", ["a,b"]), (["--stop=[/INST]"], "stop", ["[/INST]"]),
    (["--stop=['a', 'b']"], "stop", ["a", "b"]),
    (["--dims=1,2"], "dims", [1, 2]),
    (["--dims=[64, 32]"], "dims", [64, 32]),
    (["--rope_scaling={'factor': 2.0}"], "rope_scaling", {"factor": 2.0}),
    (['--rope_scaling={"x": null}'], "rope_scaling", {"x": None}),
    (["--tensorboard", "--seed=3"], "tensorboard", True),
])
def test_a_flag_gives_the_value_that_it_spells(argv, key, value):
    cfg = load(Config, argv)
    assert getattr(cfg, key) == value and type(getattr(cfg, key)) is type(value)
    assert cfg.given[key] == f"--{key}"


def test_files_and_flags_are_read_in_order_and_the_later_wins():
    imports = "import os\nfrom math import sqrt\n"
    first = write("first.py", imports + "_lr = 0.25\nlr = sqrt(_lr)\ntokens = '20M'\nseed = 1\n")
    second = write("second.py", "def double(x):\n    return 2 * x\nseed = double(2)\n")
    cfg = load(Config, ["--lr=3", first, second, "--seed=7"])
    assert (cfg.lr, cfg.tokens, cfg.seed) == (0.5, 20_000_000, 7)
    assert cfg.given == {"lr": first, "tokens": first, "seed": "--seed"} and cfg.files == [first, second]
    assert load(Config, [second, first]).seed == 1
    assert config.default_out_dir(load(Config, [first, second])) == "out/second"
    assert config.default_out_dir(load(Config, [])) == "out/test_config"


def test_a_later_length_in_another_unit_replaces_the_earlier_one():
    file, other = write("a.py", "tokens = '1M'"), write("b.py", "max_steps = 7")
    cfg = load(Config, [file, "--max_steps=5"])
    assert (cfg.tokens, cfg.max_steps) == (None, 5) and "tokens" not in cfg.given
    cfg = load(Config, [file, other])
    assert (cfg.tokens, cfg.max_steps) == (None, 7)
    cfg = load(Config, ["--max_steps=5", "--tokens=9"])    # a contradiction, for the script to refuse
    assert (cfg.tokens, cfg.max_steps) == (9, 5)


def test_a_config_file_imports_another_from_the_repo(monkeypatch):
    monkeypatch.setattr(config, "HERE", os.getcwd())
    write("configs_of_test/base.py", "lr = 1\n_hidden = 3\nseed = 4\n")
    child = write("child.py", "from configs_of_test.base import *\nseed = seed + 1\n")
    cfg = load(Config, [child])
    assert (cfg.lr, cfg.seed) == (1.0, 5)
    assert os.getcwd() not in sys.path


@dataclass
class Verbs:
    command: Literal["train", "encode"] = "train"    # what to do
    names: list[str] | None = None                   # what with
    lr: float = 1                                    # peak


def test_the_first_word_that_is_no_file_is_the_command():
    file = write("a.py", "lr = 3\n")
    for argv in (["encode", file], [file, "encode"], ["--lr=2", "encode", file], ["ENCODE", file]):
        cfg = load(Verbs, argv)
        assert (cfg.command, cfg.lr, cfg.names) == ("encode", 3.0, None), argv
        assert cfg.given["command"] == "the command line"
    assert load(Verbs, ["train", "--names", "encode"]).names == ["encode"]
    config.write(load(Verbs, ["encode", "--lr=5"]), "written.py")    # settings serve every command
    assert load(Verbs, ["train", "written.py"]).command == "train"
    assert make(Verbs, {"lr": 2}).command == "train"


@pytest.mark.parametrize("argv, words", [
    ([], ["first word: train | encode"]), (["--lr=3"], ["first word: train | encode"]),
    (["encod"], ["'encod' is neither a command (train | encode)", "did you mean encode?"]),
    (["lr=3"], ["train | encode", "did you mean --lr=3?"]),
    (["train", "encode"], ["'encode' is neither a flag nor a config file"]),
    (["--command=both"], ["command='both' should be train | encode"]),
])
def test_a_command_that_is_missing_or_wrong_is_answered_with_those_that_there_are(argv, words):
    with pytest.raises(UserError) as caught:
        load(Verbs, argv)
    assert all(word in str(caught.value) for word in words), caught.value


def test_help_lists_the_commands():
    assert any("train | encode" in line and "what to do" in line
               for line in config.help_text(Verbs).splitlines())


def test_python_keywords_pass_the_same_checks():
    live = object()
    assert make(Config, {"tokenizer": Path("a/b")}).tokenizer == "a/b"
    cfg = make(Config, {"tokens": "100M", "lr": 1, "out_dir": Path("x"), "tokenizer": live, "dims": (1, 2)})
    assert (cfg.tokens, cfg.lr, cfg.out_dir, cfg.dims) == (100_000_000, 1.0, "x", [1, 2])
    assert cfg.tokenizer is live
    assert type(cfg.lr) is float and cfg.given["lr"] == "keyword"
    nan, inf = float("nan"), float("inf")
    for wrong in ({"lr": "fast"}, {"lr": nan}, {"lr": None}, {"tokens": 1.5}, {"tokens": True},
                  {"tokens": inf}, {"tensorboard": "yes"}, {"data": 3}, {"lrr": 1}, {"schedule": "step"},
                  {"dims": [1, "x"]}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            make(Config, wrong)


def test_a_written_config_loads_as_the_same_config():
    cfg = make(Config, {"tokens": 5, "out_dir": "it's", "rope_scaling": {"factor": 2.0}, "stop": ["a\n"],
                        "compile": None})
    config.write(cfg, "settings.py")
    again = load(Config, ["settings.py"])
    assert again == cfg and set(again.given) == set(cfg.given)


@pytest.mark.parametrize("text, number", [
    ("20M", 20_000_000), ("1.5b", 1_500_000_000), ("750k", 750_000), ("2T", 2 * 10**12), ("524_288", 524288),
    ("1e9", 10**9), ("1.1k", 1100), ("0.3k", 300), ("-1", -1)])
def test_sizes_are_exact(text, number):
    assert config.parse_size(text) == number


@pytest.mark.parametrize("text", ["", "M", "1.5", "1.0001k", "nan", "inf", "1e999999999", "20 MB", "0x10"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match="whole number"):
        config.parse_size(text)


# ---- what the user gets wrong -----------------------------------------------------------------------------
@pytest.mark.parametrize("argv, words", [
    (["--hiden_size=3"], ["hiden_size", "did you mean hidden_size?"]),
    (["--learning_rate=3"], ["learning_rate is not a key"]), (["--no-lr"], ["no_lr"]),
    (["--no-compile=1"], ["--no-compile takes no value", "--compile=1"]),
    (["--lr"], ["--lr needs a value", "float"]),
    (["--lr", "--compile"], ["--lr needs a value"]), (["--lr=fast"], ["lr='fast' should be float"]),
    (["--tokens=1.5"], ["tokens='1.5' should be int | None"]),
    (["--tensorboard=maybe"], ["tensorboard='maybe' should be bool"]),
    (["--schedule=cosin"], ["linear | cosine", "did you mean cosine?"]),
    (["--learning_rate=1"], ["did you mean lr?"]), (["--output_dir=x"], ["out_dir"]),
    (["--micro_batch_size=atuo"], ["int | auto", "did you mean auto?"]), (["--dims=[1"], ["dims"]),
    (["--dims=1,x"], ["dims"]),
    (["--rope_scaling=3"], ["rope_scaling"]), (["tiny"], ["'tiny' is neither a flag nor a config file"]),
    (["--tokens="], ["tokens=''"]),
    (["lr=3"], ["did you mean --lr=3"]), (["-lr=3"], ["neither"]), (["--tokens=1e30"], ["2**63"]),
    (["--dims=1,0"], ["dims=0 must be above 0"]),
])
def test_a_wrong_flag_is_refused_in_a_sentence(argv, words):
    message = error(*argv)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("flag, allowed", [
    ("lr=0", False), ("lr=-1", False), ("lr=nan", False), ("lr=inf", False), ("tokens=0", False),
    ("tokens=-5", False),
    ("seed=0", True), ("seed=-1", False), ("beta1=0", True), ("beta1=1", False), ("beta1=0.999", True),
    ("hidden_size=0", False),
])
def test_numbers_that_make_no_sense_are_refused(flag, allowed):
    if allowed:
        load(Config, [f"--{flag}"])
    else:
        assert flag.split("=")[0] in error(f"--{flag}")


@pytest.mark.parametrize("text, words", [
    ("open = 3\n", ["open is not a key", "start with _"]), ("os = 'x'\n", ["os is not a key"]),
    ("lr = 1\nlr = (\n", ["bad.py, line 2:", "was never closed", "lr = ("]),
    ("lr = 'x'\n", ["bad.py: lr='x' should be float"]),
    ("lr = 1\n\nseed = 1 / 0\n", ["bad.py, line 3: ZeroDivisionError: division by zero"]),
    ("lr = -1\n", ["bad.py: lr=-1.0"]),
    ("from nowhere_at_all import *\n", ["line 1: ModuleNotFoundError"]),
    ("lr = print\n", ["lr=", "should be float"]),
    ("raise SystemExit('no')\n", ["line 1: SystemExit: no"]), ("lr = '\0'\n", ["bad.py"]),
    ("tokens = 1.5\n", ["tokens=1.5 should be int"]),
])
def test_a_wrong_config_file_is_refused_with_its_name_and_line(text, words):
    message = error(write("bad.py", text))
    assert all(word in message for word in words), message
    assert "Traceback" not in message


def test_an_error_in_an_imported_config_names_that_file(monkeypatch):
    monkeypatch.setattr(config, "HERE", os.getcwd())
    write("configs_broken/base.py", "lr = 1\nseed = nothing\n")
    message = error(write("child.py", "from configs_broken.base import *\n"))
    assert f"{os.path.join('configs_broken', 'base.py')}, line 2: NameError" in message


def test_a_missing_file_names_the_nearest_one():
    write("mine/small.py", "")
    assert "did you mean mine/small.py?" in error("mine/smal.py")
    assert "does not exist" in error("nowhere/zzz.py")
    write("small.py", "")
    assert "did you mean small.py?" in error("small")


def test_a_key_of_another_script_names_that_script(monkeypatch):
    monkeypatch.setattr(config, "HERE", os.getcwd())
    write("shapes.py", "class Shape:\n    num_experts: int = 4\n")
    write("train_moe.py", "from shapes import Shape\nclass Config(Shape):\n    pp: int = 1    # pipeline\n")
    write("broken.py", "class Config(:\n")
    assert config.names("train_moe.py") == ["num_experts", "pp"]
    assert "pp is not a key of this script, but of train_moe.py" in error("--pp=2")
    assert "but of train_moe.py" in error("--num_experts=2")
    assert "but of" not in error("--nothing_like_it=2")


# ---- what the user reads ----------------------------------------------------------------------------------
def test_help_prints_every_key_with_type_default_and_comment_in_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    text = config.help_text(Config)
    assert text.startswith("Every way to set a value")
    lines = text.splitlines()
    for field in fields(Config):
        assert any(line.startswith(f"  --{field.name}={field.default}") for line in lines), field.name
    assert any(line.split() == "--lr=0.02 float peak".split() for line in lines)
    comments = ("a budget", "peak", "the curve", "width")
    starts = {line.index(word) for line in lines for word in comments if line.endswith(word)}
    assert len(starts) == 1
    order = [lines.index(heading) for heading in ("what", "how much", "shape")]
    assert order == sorted(order)


def test_the_resolved_config_marks_what_the_user_set():
    lines = config.show(load(Config, [write("a.py", "lr = 1\n"), "--seed=3"])).splitlines()
    assert len(lines) == len(fields(Config))
    marked = {line.split()[0]: line.split("<- ")[1] for line in lines if "<- " in line}
    assert marked == {"lr": "a.py", "seed": "--seed"}


SCRIPT = f'''"""Doc of the script."""
import sys
sys.path.insert(0, {str(REPO)!r})
from dataclasses import dataclass
import config
@dataclass
class Config:
    lr: float = 1.0    # peak
def main(cfg):
    if cfg.lr == 3:
        raise config.UserError("3 is no good")
    print("lr is", cfg.lr)
config.run(main, Config)
'''


def test_the_guard_of_a_script_prints_one_sentence_and_exits_with_2():
    def run(*argv, **env):
        done = subprocess.run([sys.executable, write("script.py", SCRIPT), *argv], env={**os.environ, **env},
                              capture_output=True, text=True, encoding="utf-8")
        return done.returncode, done.stdout, done.stderr

    second = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert run("--lr=2") == (0, "lr is 2.0\n", "")
    assert run("--lr=3") == (2, "", "script.py: 3 is no good\n")
    assert run("--version") == (0, f"lignite {config.__version__}\n", "")
    assert run("--help", **second) == (0, "", "")        # rank 0 has said it
