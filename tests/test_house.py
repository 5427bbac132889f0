"""The shape of the house: which way imports point, what every file keeps to, what stands in the README."""
import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
FOLDERS = "kernels", "parallel", "benchmarks"
FILES = sorted([*REPO.glob("*.py"), *(file for folder in FOLDERS for file in REPO.glob(f"{folder}/*.py"))])
if (REPO / ".git").exists():           # a user's own scripts beside ours may look as they like
    LISTED = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, encoding="utf-8")
    FILES = [f for f in FILES if f.relative_to(REPO).as_posix() in LISTED.stdout.split()]
SCRIPTS = [f for f in FILES if "config.run(main, Config)" in f.read_text(encoding="utf-8")]
NOUNS = {"config", "tokenizer", "tokenizer_json", "bpe", "patterns", "records", "data", "optim", "checkpoint",
         "files", "chat", "instructions", "lora", "memory", "launch", "log", "model"}


def imports(file: Path) -> set[str]:
    """Every module that a file names in an import, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_arrows_point_one_way():
    scripts = {f.stem for f in SCRIPTS}
    for file in FILES:
        names = imports(file)
        tops = {name.split(".")[0] for name in names}
        if file.stem == "model" or file.parent.name == "kernels":
            assert not any(name.startswith("torch.distributed") for name in names), file
            assert not tops & {"parallel", "launch", "data", "checkpoint", "optim"}, file
        if file.parent.name != "kernels":
            assert "triton" not in tops, file
        if file.stem in NOUNS or file.parent.name in ("kernels", "parallel"):
            assert not tops & scripts, f"{file} imports a script"
        if file in SCRIPTS:
            assert not tops & (scripts - {"prepare"}), f"{file} imports a script other than prepare.py"
        if file.parent.name == "benchmarks":
            assert "bench" not in tops, file
        else:                                  # peers run in processes of their own
            assert not tops & {"transformers", "datasets"} or file.stem == "records", file


def test_a_package_of_the_same_name_does_not_win(tmp_path):
    """Hugging Face's `kernels`, which transformers installs, would where ours were folders without a file."""
    for folder in FOLDERS:
        Path(tmp_path, folder).mkdir()
        Path(tmp_path, folder, "__init__.py").write_text("", encoding="utf-8")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import benchmarks, kernels; " \
           "print(benchmarks.__file__, kernels.__file__)"
    found = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, encoding="utf-8")
    ours = [str(REPO / folder / "__init__.py") for folder in ("benchmarks", "kernels")]
    assert found.stdout.split() == ours
    assert all(Path(file.parent, "__init__.py").exists() for file in FILES if file.parent != REPO)


def test_text_files_are_opened_with_encoding_and_newline():
    """What the system's defaults are differs between Windows, macOS and Linux."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute))):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            keywords, where = {k.arg for k in node.keywords}, f"{file.name}:{node.lineno}"
            if name == "open" and isinstance(node.func, ast.Name) and node.args:
                mode = next((a.value for a in node.args[1:2] if isinstance(a, ast.Constant)), "r")
                if "b" not in mode:
                    assert "encoding" in keywords, where
                    assert "newline" in keywords or not set(mode) & set("wax+"), where
            if name in ("read_text", "write_text"):
                assert "encoding" in keywords, where


def test_nothing_is_assumed_that_only_unix_has():
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        for word in ("os.fork(", "signal.SIGKILL", "signal.SIGUSR1", "import fcntl", "import resource",
                     "os.sched_getaffinity("):
            for line in text.splitlines():
                if word in line:
                    assert "win32" in line or "linux" in line or "try" in text, f"{file.name}: {line.strip()}"


def test_lines_and_functions_are_short():
    long = []
    for file in [*FILES, *REPO.glob("configs/*.py"), *REPO.glob("tests/*.py")]:
        text = file.read_text(encoding="utf-8")
        long += [f"{file.name}:{n}" for n, line in enumerate(text.splitlines(), 1) if len(line) > 110]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                limit = 260 if node.name == "main" else 70
                long += [f"{file.name}: {node.name}"] if node.end_lineno - node.lineno > limit else []
    assert not long


def test_copies_stay_equal():
    """A fence `# -- copy: NAME --` ... `# -- end --` is the same text in every script that has it."""
    copies: dict[str, list] = {}
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        found = re.findall(r"^ *# -- copy: ([^\n]+) --\n(.*?)^ *# -- end --\n", text, re.M | re.S)
        assert len(found) == text.count("# -- copy: ") == text.count("# -- end --"), file
        for name, content in found:
            copies.setdefault(name, []).append((file.name, content))
    assert {"budget", "knobs", "loop", "finish"} <= set(copies)
    for name, (first, *others) in copies.items():
        assert others, f"{name} stands in {first[0]} alone"
        for other in others:
            (one, here), (two, there) = first, other
            lines = difflib.unified_diff(here.splitlines(), there.splitlines(), one, two, n=0, lineterm="")
            assert here == there, f"{name} differs:\n" + "\n".join(lines)


def test_importing_any_file_does_nothing(tmp_path):
    names = [".".join(f.relative_to(REPO).with_suffix("").parts) for f in FILES]
    program = f"import sys; sys.path.insert(0, {str(REPO)!r}); import {', '.join(names)}"
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_lignite_offers_its_names_from_any_directory(tmp_path):
    run = subprocess.run([sys.executable, "-c", f"""
import sys
sys.path.insert(0, {str(REPO)!r})
import lignite
before = set(sys.modules)
assert "torch" not in before
for name in lignite.__all__:
    assert getattr(lignite, name) is not None, name
try:
    lignite.nothing
except AttributeError as error:
    assert "train" in str(error)
from lignite import train, generate
"""], cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda f: f.name)
def test_help_names_every_key_with_its_comment(script):
    import config
    run = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, encoding="utf-8")
    assert run.returncode == 0
    for key in config.names(str(script)):
        assert re.search(rf"--{key}=\S*", run.stdout), key
    lines = script.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("class Config"))
    for line in lines[start + 1:]:
        if line and not line.startswith("    "):
            break
        if re.match(r"    \w+: ", line):
            assert "  # " in line, f"{script.name}: {line.strip()} has no comment"


def test_readme_names_only_what_exists():
    text = (REPO / "README.md").read_text(encoding="utf-8")
    folders = "|".join(("configs", "docs", *FOLDERS))
    for path in set(re.findall(rf"(?<![\w/.])((?:{folders})/[\w.]+|[\w]+\.py)\b", text)):
        assert (REPO / path).exists(), path
    sources = {f.relative_to(REPO).as_posix(): f.read_text(encoding="utf-8") for f in FILES}
    for row in re.findall(r"^\| .+ \| (.+) \|$", text, re.M):
        for file in re.findall(r"`([\w/]+\.py)`", row):
            names = re.findall(r"`([A-Za-z_.]+)`", row.split(f"`{file}`")[1].split(";")[0])
            for name in names:
                found = re.search(rf"(class|def) {name.split('.')[-1]}\b", sources[file])
                assert found, f"{file}: {name}"
