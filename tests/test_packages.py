"""packages.py: files out of packages, and what happens where they cannot be fetched."""
import shutil
import subprocess
from pathlib import Path

import pytest

import packages


def test_a_package_that_cannot_be_fetched_skips_or_fails(monkeypatch, tmp_path):
    def no_index(command, **kwargs):
        raise subprocess.CalledProcessError(1, command, stderr="no matching distribution")
    monkeypatch.setattr(packages.subprocess, "run", no_index)
    monkeypatch.setattr(packages, "_failed", {})
    monkeypatch.setenv("LIGNITE_TEST_CACHE", str(tmp_path))
    for required, outcome in [("0", pytest.skip.Exception), ("1", pytest.fail.Exception)]:
        monkeypatch.setenv("LIGNITE_REQUIRE_PACKAGES", required)
        with pytest.raises(outcome, match="nothing==1.0 could not be fetched: no matching distribution"):
            packages.fetch("nothing==1.0", "nothing/file")


def test_packages_are_unpacked_from_wheels_and_source_archives(monkeypatch, tmp_path):
    def download(command, **kwargs):
        folder = Path(next(word for word in command if word.startswith("--dest="))[len("--dest="):])
        (tmp_path / "thing-1.0" / "thing").mkdir(parents=True, exist_ok=True)
        (tmp_path / "thing-1.0" / "thing" / "data.txt").write_bytes(b"content")
        if command[-1] == "thing==1.0":
            shutil.make_archive(str(folder / "thing-1.0"), "gztar", tmp_path, "thing-1.0")
        else:
            shutil.make_archive(str(folder / "thing"), "zip", tmp_path / "thing-1.0")
    monkeypatch.setattr(packages.subprocess, "run", download)
    monkeypatch.setenv("LIGNITE_TEST_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LIGNITE_REQUIRE_PACKAGES", raising=False)
    for requirement in ("thing==1.0", "thing==2.0"):
        directory = packages.fetch(requirement, "thing/data.txt")
        assert (directory / "thing" / "data.txt").read_bytes() == b"content"
        assert sorted(path.name for path in directory.iterdir()) == ["thing"]
    with pytest.raises(pytest.skip.Exception, match="holds no other.txt"):
        packages.fetch("thing==1.0", "other.txt")
