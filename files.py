"""
Files that several processes read and write: whole or not at all, one writer at a time, and notes by which
ranks wait for another before the process group exists.
"""
import contextlib
import errno
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from config import UserError

LOCK = ".lock"
PATIENCE = 30                  # seconds that a rank gives rank 0 to begin
STARTED = time.time()          # of this process, nearly


# ---- whole or not at all ----------------------------------------------------------------------------------
def digest(value) -> str:
    """16 hexadecimal digits that tell one JSON value from another."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def read_json(path: str | Path) -> dict:
    """A JSON object; UserError where there is none."""
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            content = json.load(file)
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): make it, or copy it, again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} should hold a JSON object, not a {type(content).__name__}: make it, or copy "
                        f"it, again")
    return content


def write_json(path: str | Path, value) -> None:
    """Whole or not at all: a reader never sees half a file."""
    part = f"{path}.{os.getpid()}.tmp"
    try:
        with open(part, "w", encoding="utf-8", newline="\n") as file:
            json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):                     # a full disk needs the place
            os.remove(part)
        raise


def flush(path: Path) -> None:
    """Bring a file (or, where the system can, a directory's names) safely to the disk."""
    try:
        handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    except OSError:                                # a directory on Windows
        return
    try:
        os.fsync(handle)
    except OSError:                                # some network file systems refuse directories
        if path.is_file():
            raise
    finally:
        os.close(handle)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Replace a safetensors file in one go."""
    beside = path.with_name(f".{path.name}.tmp")
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    try:
        save_file(tensors, beside, metadata=metadata)
    except SafetensorError as error:                   # a full disk, mostly
        beside.unlink(missing_ok=True)
        raise OSError(str(error)) from None
    flush(beside)
    os.replace(beside, path)


def open_tensors(path: Path, device: str | torch.device = "cpu"):
    try:
        return safe_open(path, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file (torn or foreign): {error}") from None


def read_tensors(path: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    with open_tensors(path, device) as f:
        return {name: f.get_tensor(name) for name in f.keys()}


# ---- one writer -------------------------------------------------------------------------------------------
def hold(directory: str):
    """
    Lock a directory until the file that is returned is closed; the system does so for a process that dies.
    UserError where another process holds it.
    """
    file = open(os.path.join(directory, LOCK), "ab")
    if not lock(file):
        raise UserError(f"another process is training in {directory}: wait for it, or choose another out_dir")
    return file


def lock(file) -> bool:
    try:
        if os.name == "nt":
            import msvcrt
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:                                  # a file system without locks
        pass
    return True


@contextlib.contextmanager
def writing(out_dir: str):
    """Makes the directory; what its disk refuses, here and later, is a sentence."""
    refused = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
    try:
        os.makedirs(out_dir, exist_ok=True)
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space is left on the disk of {out_dir}: make some, and the same command "
                            f"goes on where it was; what is written stays") from None
        if error.errno in refused:
            raise UserError(f"{error.filename or out_dir} cannot be written ({error.strerror}): choose "
                            f"another --out_dir") from None
        raise


@contextlib.contextmanager
def exclusive(out_dir: str, say):
    """One process at a time; the system lifts the lock of one that dies."""
    path, told = os.path.join(out_dir, LOCK), False
    while True:
        with open(path, "ab") as file:
            if lock(file):
                if os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    yield
                    return
                continue                             # the one before removed it: make another
        if not told:
            say(f"waiting for another process that is preparing {out_dir}")
            told = True
        time.sleep(0.2)


# ---- ranks that wait for rank 0 ----------------------------------------------------------------------------
@contextlib.contextmanager
def announced(path: str):
    """Rank 0 leaves a note beside the directory, so that the others learn that it works, or why not."""
    def write(error):
        write_json(path, {"host": platform.node(), "time": time.time(), "error": error})

    write(None)
    try:
        yield
    except BaseException as error:
        write(str(error) or type(error).__name__)
        raise
    os.remove(path)


def wait_for(out_dir: str, path: str, finished: Callable[[], object]):
    """
    Until rank 0's meta.json is there; UserError with its words when it failed. A note of an earlier run says
    nothing about this one: we believe one that changes while we look, or is younger than this process (which
    only the same machine's clock can tell), or has stood for so long that rank 0 would have replaced it.
    """
    def look():
        with contextlib.suppress(OSError, UserError):
            return read_json(path)

    began, first = time.monotonic(), look()
    while not finished():
        note, waited = look(), time.monotonic() - began
        if note and note["error"]:
            ours = note["host"] == platform.node() and note["time"] >= STARTED
            if ours or note != first or waited > PATIENCE:
                raise UserError(note["error"])
        if note is None and waited > 2 * PATIENCE and not os.path.isdir(out_dir):
            raise UserError(f"rank 0 prepares {out_dir}, but {platform.node()} sees nothing of it after "
                            f"{waited:.0f} s: start on a disk that all machines share, or prepare the "
                            f"corpus on each of them first")
        time.sleep(0.1)


def made(folder: str, fill: Callable[[str], object], rank: int, world: int, say) -> str:
    """
    The folder, which `fill(folder)` makes, with its meta.json last: by rank 0 where that is missing, while
    the others wait. Every rank calls this, before the process group exists.
    """
    def there() -> bool:
        return os.path.isfile(os.path.join(folder, "meta.json"))

    if not there() and rank > 0:
        wait_for(folder, folder + ".note.json", there)
    elif not there():
        note = announced(folder + ".note.json") if world > 1 else contextlib.nullcontext()
        with writing(os.path.dirname(folder)), note, writing(folder), exclusive(folder, say):
            if not there():
                fill(folder)
    return folder
