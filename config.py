"""
Configuration: a script declares one dataclass; a field is a line of a config file, a flag and a keyword.

    python train.py configs/tiny.py                     a config file is Python that assigns: lr = 3e-4
    python train.py configs/tiny.py more.py --lr=1e-3   read in order, the later one wins
    python train.py --tokens=100M --no-compile --help   sizes end in K, M, B, T; --no- turns a switch off
    train(data="my.jsonl", tokens="100M")               the same names and the same checks from Python

A field is `name: type = default    # what it means`: its comment is the help text, a comment on a line of
its own heads a group. What the user got wrong is a UserError: one sentence that says what to write instead.
"""
import ast
import dataclasses
import difflib
import functools
import glob
import inspect
import io
import json
import math
import numbers
import os
import runpy
import shutil
import sys
import textwrap
import tokenize
import traceback
from decimal import Decimal
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

__version__ = "0.1.0"

HERE = os.path.dirname(os.path.abspath(__file__))


class UserError(ValueError):
    """Something the user can put right; the scripts print it as one sentence and exit with 2."""


# ---- which numbers make sense -----------------------------------------------------------------------------
# Names mean the same in every script, so one table serves all. A number in none of these must be above 0.
ZERO_TOO = {
    "seed", "weight_decay", "start_lr", "final_lr", "warmup_ratio", "decay_ratio", "beta1", "beta2",
    "grad_clip", "temperature", "top_k", "min_p", "val_fraction", "attention_dropout", "n_shared_experts",
    "first_k_dense_replace", "bos_token_id", "eos_token_id", "pad_token_id", "moe_load_balance_coef",
    "port", "nsys_start", "nsys_stop", "memory_profile_start", "memory_profile_stop", "profile_start",
    "profile_stop",
}
UP_TO_ONE = {"warmup_ratio", "decay_ratio", "top_p", "min_p", "partial_rotary_factor"}
BELOW_ONE = {"beta1", "beta2", "val_fraction", "attention_dropout"}


def check_range(key, value, kind) -> None:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, bool) or not isinstance(item, (int, float)):
            continue
        if not math.isfinite(item):
            raise UserError(f"{key}={item} must be a finite number")
        if abs(item) >= 2**63:
            raise UserError(f"{key}={item:.3g} must be below 2**63")
        if item < 0 or (item == 0 and key not in ZERO_TOO):
            off = " (None turns it off)" if NoneType in members(kind) else ""
            raise UserError(f"{key}={item} must be {'at least' if key in ZERO_TOO else 'above'} 0{off}")
        if (item > 1 and key in UP_TO_ONE) or (item >= 1 and key in BELOW_ONE):
            raise UserError(f"{key}={item} must be {'at most' if key in UP_TO_ONE else 'below'} 1")


# ---- values -----------------------------------------------------------------------------------------------
SIZES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse_size(text: str) -> int:
    """"20M", "1.5b", "750k", "524_288" or "1e9" as a whole number; in decimal, so that 1.1k is 1100."""
    text = text.strip()
    digits, unit = (text[:-1], SIZES[text[-1].lower()]) if text[-1:].lower() in SIZES else (text, 1)
    try:
        number = Decimal(digits) * unit
        if number.adjusted() < 40 and number == int(number):     # 1e999999 in full would fill the memory
            return int(number)
    except (ArithmeticError, ValueError):                        # not a number, inf, nan
        pass
    raise UserError(f"{text!r} is not a whole number: write it like 20M, 1.5B, 750k, 524_288 or 1e9")


def members(kind) -> tuple:
    """The alternatives of `A | B | None`, those last that take anything; of any other type, that type."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    first, last = [NoneType, int, float, bool], [str, object]
    rank = {k: i for i, k in enumerate([*first, "others", *last])}
    return tuple(sorted(kinds, key=lambda k: rank.get(k, len(first))))


def describe(kind) -> str:
    """A type as the help and the errors spell it."""
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(describe(member) for member in get_args(kind))
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    return "None" if kind is NoneType else str(kind) if get_args(kind) else kind.__name__


def convert(value, kind, text=False):
    """`value` as an object of type `kind`, else ValueError. `text`: of a flag, where "none" spells None."""
    if len(members(kind)) > 1:
        for member in members(kind):
            try:
                return convert(value, member, text)
            except ValueError:
                continue
    elif kind is object:                                        # a live tokenizer or model, from Python
        return value
    elif get_origin(kind) is Literal:
        for choice in get_args(kind):
            if text and value.lower() == str(choice).lower():
                return choice
            if type(value) is type(choice) and value == choice:
                return choice
    elif kind is NoneType:
        if value is None or (text and value.lower() in ("none", "null")):
            return None
    elif kind is bool:
        if isinstance(value, bool):
            return value
        if text and value.lower() in WORDS:
            return WORDS[value.lower()]
    elif kind in (int, float) and not isinstance(value, bool):
        if isinstance(value, str):
            return parse_size(value) if kind is int else float(value)
        whole = isinstance(value, numbers.Real) and math.isfinite(value) and value == int(value)
        if whole or (kind is float and isinstance(value, numbers.Real)):
            return kind(value)
    elif kind is str and isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    elif kind is dict or get_origin(kind) is dict:
        value = literal(value) if text else value
        if isinstance(value, dict):
            return value
    elif kind is list or get_origin(kind) is list:
        item = (get_args(kind) or (str,))[0]
        if text and value.startswith("[") and (item is not str or is_literal(value)):    # "[/INST]" is a text
            value, text = literal(value), False
        elif isinstance(value, str):                            # a text may hold commas, a number doesn't
            value = [value] if item is str else value.split(",")
        value = value if isinstance(value, (list, tuple)) else [value]
        return [convert(each, item, text) for each in value]
    raise ValueError


def fits(text, kind) -> bool:
    try:
        convert(text, kind, text=True)
        return True
    except ValueError:
        return False


def literal(text: str):
    """A Python literal or JSON."""
    for read in (ast.literal_eval, json.loads):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    raise ValueError


def is_literal(text: str) -> bool:
    try:
        literal(text)
        return True
    except ValueError:
        return False


# ---- where values come from -------------------------------------------------------------------------------
def load(Config, argv: list[str]):
    """
    Config files (*.py) and flags, the later one wins. A script whose Config has `command: Literal["train",
    "encode"]` takes that from the first other word, and needs it. UserError; --help and --version exit.
    """
    values, given, files, argv = {}, {}, [], list(argv)
    commands = kinds_of(Config).get("command")
    while argv:
        word = argv.pop(0)
        if word in ("--help", "-h", "--version"):
            import launch                          # here, as launch.py imports this file
            if launch.environment().rank == 0:
                print(f"lignite {__version__}" if word == "--version" else help_text(Config))
            raise SystemExit(0)
        if word.startswith("--"):
            key, value = read_flag(Config, word, argv)
            value = accept(Config, key, value, "--", text=isinstance(value, str))
            drop_lengths(values, given, {key: value}, lambda origin: not origin.startswith("--"))
            values[key] = value
            given[key] = f"--{key}"
        elif commands and "command" not in given and fits(word, commands):
            values["command"], given["command"] = convert(word, commands, text=True), "the command line"
        elif word.endswith(".py"):
            files.append(word)
            assigned = read_file(Config, word)
            drop_lengths(values, given, assigned, lambda origin: True)
            for key, value in assigned.items():
                values[key], given[key] = accept(Config, key, value, f"{word}: "), word
        else:
            files = (f"{word}.py", os.path.join(HERE, "configs", f"{word}.py"))
            hint = f": did you mean --{word.lstrip('-')}?" if "=" in word else ": write --key=value"
            hint = nearest_file(f"{word}.py") if any(map(os.path.isfile, files)) else hint
            if commands and "command" not in given:
                known = describe(commands)
                raise UserError(f"{word!r} is neither a command ({known}), a flag nor a config file"
                                f"{did_you_mean(word, known.split(' | ')) or hint}")
            raise UserError(f"{word!r} is neither a flag nor a config file{hint}")
    if commands and "command" not in given:
        raise UserError(f"say what to do with the first word: {describe(commands)}")
    return build(Config, values, given, files)


LENGTHS = ("tokens", "max_steps", "epochs")


def check_length(cfg) -> None:
    """UserError where the length or the schedule contradicts itself."""
    lengths = [key for key in LENGTHS if getattr(cfg, key) is not None]
    if len(lengths) > 1:
        raise UserError(f"{' and '.join(lengths)} were both given: a run's length is one of them")
    if cfg.epochs and cfg.max_epochs and cfg.epochs > cfg.max_epochs:
        raise UserError(f"epochs={cfg.epochs} is more than max_epochs={cfg.max_epochs}")
    if cfg.schedule == "wsd" and cfg.warmup_ratio + cfg.decay_ratio > 1:
        raise UserError(f"warmup_ratio={cfg.warmup_ratio} and decay_ratio={cfg.decay_ratio} sum to more than "
                        f"the run: lower one of them")


def drop_lengths(values: dict, given: dict, assigned: dict, earlier) -> None:
    """
    A run has one length: a later file or flag that sets it in another unit replaces the earlier one. Two in
    the same file, or two flags, stay: that is a contradiction, and the scripts say so.
    """
    if any(assigned.get(key) is not None for key in LENGTHS):
        for other in LENGTHS:
            if other in given and earlier(given[other]):
                del values[other], given[other]


def make(Config, values: dict):
    """The same checks for keywords from Python."""
    values = {key: accept(Config, key, value) for key, value in values.items()}
    return build(Config, values, dict.fromkeys(values, "keyword"), [])


def build(Config, values, given, files):
    cfg = Config(**values)
    cfg.given = given           # key -> "configs/tiny.py", "--lr" or "keyword": what the user set, and where
    cfg.files = files           # the config files, in order
    return cfg


def read_flag(Config, word, argv):
    """(key, value) of --key=value, --key value, --flag or --no-flag; a value apart is taken off `argv`."""
    name, equals, value = word[2:].partition("=")
    key, kinds = name.replace("-", "_"), kinds_of(Config)
    if key not in kinds and key.startswith("no_") and bool in members(kinds.get(key[3:])):
        if equals:
            raise UserError(f"--{name} takes no value: write --{key[3:]}={value}")
        return key[3:], False
    if equals or key not in kinds:
        return key, value
    follows = bool(argv) and not argv[0].startswith("--")
    if bool in members(kinds[key]) and not (follows and fits(argv[0], kinds[key])):
        return key, True
    if not follows:
        raise UserError(f"--{name} needs a value ({describe(kinds[key])}): write --{name}=...")
    return key, argv.pop(0)


def read_file(Config, path) -> dict:
    """What a config file assigns. Names that start with _, modules, functions and classes are its own."""
    if not os.path.isfile(path):
        raise UserError(f"config file {path} does not exist{nearest_file(path)}")
    sys.path.insert(0, HERE)                       # for `from configs.base import *`
    try:
        found = runpy.run_path(path)
    except SyntaxError as error:
        where, line = short(error.filename or path), (error.text or "").strip()
        raise UserError(f"{where}, line {error.lineno}: {error.msg}{line and f': {line}'}") from None
    except (Exception, SystemExit) as error:       # the line of this file, or of the one that it imports
        ours = (os.path.abspath(path), HERE + os.sep)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__)
                  if os.path.abspath(frame.filename).startswith(ours) and frame.filename != __file__]
        where = f"{short(frames[-1].filename)}, line {frames[-1].lineno}" if frames else path
        raise UserError(f"{where}: {type(error).__name__}: {' '.join(str(error).split())}") from None
    finally:
        sys.path.remove(HERE)
    own = {key for key, value in found.items() if key.startswith("_") or inspect.ismodule(value)
           or (key not in kinds_of(Config) and (inspect.isroutine(value) or inspect.isclass(value)))}
    return {key: value for key, value in found.items() if key not in own}


def accept(Config, key, value, origin="", text=False):
    """The value of field `key`, converted and in range, or a UserError that begins with its origin."""
    kinds = kinds_of(Config)
    if key not in kinds:
        hint = did_you_mean(ELSEWHERE.get(key, key), kinds)
        hint += " (names of your own start with _)" if ".py: " in origin else ""
        raise UserError(f"{origin}{key} is not a key of this script{elsewhere(key)}{hint}")
    try:
        value = convert(value, kinds[key], text)
    except ValueError:
        kind = describe(kinds[key])
        hint = did_you_mean(str(value), kind.split(" | "))
        raise UserError(f"{origin}{key}={value!r:.80} should be {kind}{hint}") from None
    try:
        check_range(key, value, kinds[key])
    except UserError as error:
        raise UserError(f"{origin}{error}") from None
    return value


def write(cfg, path: str) -> None:
    """What the user set, and out_dir, as a config file: loading it gives an equal config."""
    keys = [key for key in kinds_of(type(cfg)) if key == "out_dir" or (key in cfg.given and key != "command")]
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{key} = {getattr(cfg, key)!r}\n" for key in keys)


def default_out_dir(cfg) -> str:
    """out/<the last config file's name>, without one out/<the script's name>."""
    source = cfg.files[-1] if cfg.files else inspect.getfile(type(cfg))
    return "out/" + os.path.splitext(os.path.basename(source))[0]


@functools.cache
def kinds_of(Config) -> dict:
    """Field name -> type; annotations that are strings are evaluated."""
    hints = get_type_hints(Config)
    return {field.name: hints[field.name] for field in dataclasses.fields(Config)}


# What nanoGPT, Hugging Face and others call our keys.
ELSEWHERE = {
    "learning_rate": "lr", "min_lr": "final_lr", "max_iters": "max_steps", "num_train_epochs": "epochs",
    "batch_size": "micro_batch_size", "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation", "block_size": "sequence_length",
    "context_length": "sequence_length", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_embd": "hidden_size", "d_model": "hidden_size", "output_dir": "out_dir", "dataset": "data",
    "max_tokens": "max_new_tokens",
}


# ---- what to say ------------------------------------------------------------------------------------------
def did_you_mean(word, choices) -> str:
    close = difflib.get_close_matches(word, [str(choice) for choice in choices], n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else ""


def nearest_file(path) -> str:
    folders = (os.path.join(HERE, "configs"), os.path.dirname(path) or ".")
    files = [file for folder in folders for file in glob.glob(os.path.join(folder, "*.py"))]
    named = {os.path.basename(file): short(file) for file in files}
    close = difflib.get_close_matches(os.path.basename(path), named, n=1, cutoff=0.0)
    return f": did you mean {named[close[0]]}?" if close else ""


def elsewhere(key) -> str:
    """The other scripts of this folder that have the key."""
    scripts = [short(path) for path in sorted(glob.glob(os.path.join(HERE, "*.py"))) if key in names(path)]
    return f", but of {' and '.join(scripts[:2])}" if scripts else ""


def short(path) -> str:
    """As the user would type it: relative to this folder when it is the current one."""
    return path.removeprefix(os.getcwd() + os.sep).removeprefix("." + os.sep)


def names(script: str, Class="Config") -> list[str]:
    """The keys of a script's Config, its bases' first, from the source: nothing is imported."""
    with open(script, encoding="utf-8") as file:
        try:
            tree = ast.parse(file.read())
        except SyntaxError:                        # a half-written fork must not hide the message at hand
            return []
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == Class), None)
    if found is None:
        return []
    homes = {alias.name: os.path.join(os.path.dirname(script), f"{node.module}.py")
             for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    bases = [(homes.get(base.id, script), base.id) for base in found.bases if isinstance(base, ast.Name)]
    inherited = [key for home, base in bases if os.path.isfile(home) for key in names(home, base)]
    return inherited + [node.target.id for node in found.body if isinstance(node, ast.AnnAssign)]


def documented(Config) -> list[tuple[str, dict]]:
    """[(heading, {key: comment}), ...] in the order of the source: the script's class, then its bases."""
    groups, seen = [], set()
    for Class in [Class for Class in Config.__mro__ if dataclasses.is_dataclass(Class)]:
        try:
            source = textwrap.dedent(inspect.getsource(Class))
        except (OSError, TypeError):               # a class typed into a prompt has no source
            source = "class _:\n" + "".join(f"    {key}: int\n" for key in kinds_of(Class))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
        body = ast.parse(source).body[0].body
        fields = {node.end_lineno: node.target.id for node in body if isinstance(node, ast.AnnAssign)}
        groups.append((Class.__name__, {}))
        for line in sorted({*comments, *fields}):
            if line not in fields:                 # a comment on a line of its own heads a group
                if not comments[line].startswith("-- "):           # a fence around what is copied
                    groups.append((comments[line], {}))
            elif fields[line] not in seen:
                seen.add(fields[line])
                groups[-1][1][fields[line]] = comments.get(line, "")
    return [group for group in groups if group[1]]


def help_text(Config) -> str:
    """The script's docstring, then every key as --key=default with its type and its comment, in columns."""
    defaults, kinds = Config(), kinds_of(Config)
    cells = {key: (f"--{key}={getattr(defaults, key)}", describe(kind)) for key, kind in kinds.items()}
    first, second = (min(max(len(cell[column]) for cell in cells.values()), 34) for column in (0, 1))
    margin = first + second + 6
    room = max(shutil.get_terminal_size((140, 24)).columns - margin, 30)
    lines = [(sys.modules[Config.__module__].__doc__ or "").strip()]
    for heading, comments in documented(Config):
        lines += ["", heading]
        for key, comment in comments.items():
            start = f"  {cells[key][0]:{first}}  {cells[key][1]:{second}}  "
            wrapped = textwrap.wrap(comment, room)
            lines += [start + wrapped.pop(0)] if wrapped and len(start) == margin else [start]
            lines += [" " * margin + line for line in wrapped]
    return "\n".join(line.rstrip() for line in lines)


def show(cfg) -> str:
    """The resolved config as a table; what the user set carries its origin."""
    values = {key: repr(getattr(cfg, key)) for _, comments in documented(type(cfg)) for key in comments}
    first, second = max(map(len, values)), min(max(map(len, values.values())), 40)
    origins = {key: f"  <- {cfg.given[key]}" if key in cfg.given else "" for key in values}
    return "\n".join(f"{key:{first}}  {values[key]:{second}}{origins[key]}".rstrip() for key in values)


def run(main, Config) -> None:
    """The guard of every script: main(load(sys.argv)); a UserError becomes one sentence and exit code 2."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")       # a model writes what a terminal's code page may lack
    try:
        main(load(Config, sys.argv[1:]))
    except UserError as error:
        import launch
        launch.refuse(error)
    except KeyboardInterrupt:                          # before the loop, which stops by itself
        print("stopped: the same command starts again", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:                            # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
