"""What all tests share: the repo on the path, the oracle process, the seconds of each file."""
import importlib.util
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests")]
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")

import torch  # noqa: E402  (before any test forks)

from oracle import Oracle  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def oracle():
    if importlib.util.find_spec("transformers") is None:   # imported here, it would find our `kernels`
        pytest.skip("no transformers: pip install -r requirements-dev.txt")
    judge = Oracle()
    yield judge
    judge.stop()


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path, monkeypatch):
    """Every test works in a directory of its own: nothing it writes can reach another test or the repo."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no test pulls the plug, and disks can be slow


seconds = defaultdict(float)


def pytest_runtest_logreport(report):
    seconds[report.nodeid.split("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("seconds per file")
    for file, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{spent:7.1f}  {file}")


@pytest.fixture
def hub(monkeypatch):
    """A data set org/stories of the Hub, without one: set `texts`; `opened` says when it was asked for."""
    datasets = pytest.importorskip("datasets")

    class Hub:
        texts, opened = [], []

    def load_dataset(path, name=None, *, split, streaming):
        assert (path, split, streaming) == ("org/stories", "train", True)
        Hub.opened.append(name)
        columns = {"text": Hub.texts, "other": list(range(len(Hub.texts)))}
        return datasets.Dataset.from_dict(columns).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return Hub
