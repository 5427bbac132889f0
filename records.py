"""
Records: dicts out of whatever people keep text in.

    read_records("stories.jsonl.gz")                       a file; text files give {"text": ...}
    read_records("books,code/**/*.py,more.parquet")        a directory, a pattern, a file, one after the other
    read_records("HuggingFaceFW/fineweb:sample-10BT")      a Hugging Face data set, streamed
    read_records([{"text": "one"}, {"text": "two"}])       what is in memory already

One generator function for each format (READERS says which suffix is whose), one layer below them that
unpacks .gz and .zst. Nothing is lost in silence: what is left out is counted by its reason, with the place
where that was first met, and so is what is read but worth a word. Memory: one record, or one batch of
parquet; a list of objects in a .json file is never read as a whole.
"""
import codecs
import contextlib
import csv
import difflib
import functools
import glob
import hashlib
import importlib.util
import io
import itertools
import json
import os
import re
import stat
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from config import UserError

LARGE = 2**24                  # bytes: a longer text is not held in memory, if the caller can do without
BLOCK = 2**20                  # bytes read at a time
FIELD = 2**27                  # characters of a csv field; what is longer is a quote that nobody closed
PACKED = 4                     # times its size is about what a packed file of text holds
MARK = codecs.BOM_UTF8
WRAPPERS = {"data", "rows", "records", "examples", "items", "documents", "instances"}
NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
NEEDS = {".zst": "zstandard", ".parquet": "pyarrow"}
TWICE = "a key twice in one record (the last one counts)"
DAMAGED = "damaged file (read as far as it goes)"
SPACE, NOT_NUMBER = re.compile(r"[ \t\n\r]*"), re.compile(r"[^-+.\w]")
ESCAPED = re.compile("[\udc80-\udcff]")        # bytes that are no text, as surrogateescape keeps them


def read_records(source, document_separator: str | None = None, *, split: str = "train",
                 columns: list[str] | None = None, part: tuple[int, int] | None = None, lazy: bool = False
                 ) -> "Records":
    """
    The records of `source`: "stdlib" (the sources of the running Python), a file, a directory (recursive,
    sorted, hidden files skipped), a glob pattern, a data set id "org/name" or "org/name:config", several of
    them (a list, or with commas between), or any iterable of dicts that can be read more than once.

    `document_separator` divides text files into records. `split` is that of a data set; `columns` are the
    keys that the caller needs: parquet and data sets read no others, if they have these. part=(k, n) is the
    k-th of n slices that have about the same number of bytes and together hold every record once, in order.
    With `lazy`, a text file of more than LARGE bytes comes as {"text": LargeText}. UserError: no such input.
    """
    return Records(source, document_separator, split, columns, part, lazy)


class File(NamedTuple):
    path: str
    size: int                  # bytes that are to be read
    modified: int              # ns
    start: int = 0             # of a slice: the lines that begin in [start, stop) are read
    stop: int | None = None


class Stream(NamedTuple):
    name: str
    open: Callable             # () -> the rows; of a remote one it takes the network, and may fail
    identity: object           # None: look at the rows
    remote: bool


class Unusable(Exception):
    """A record that is not what its reader looks for. Its text is the reason that is counted."""


class Records:
    """
    Iterable, as often as needed. Meanwhile and afterwards: `records_read`; `bytes_read` of `total_bytes` (as
    they lie on the disk; about `text_bytes` of text; both None when `streamed` or in memory, where the
    characters of the texts are counted); `left_out` and `noted`, how many by reason; `example`, where a
    reason was first met; `where`, the place of the record. `files` are the paths, `name` is a short one for
    the whole.
    """

    def __init__(self, source, document_separator, split, columns, part, lazy):
        self.separator = document_separator.encode() if document_separator else None
        self.columns, self.lazy, self.twice = columns, lazy, False
        self.json = json.JSONDecoder(object_pairs_hook=self.merge)
        self.beforehand, self.examples = Counter(), {}           # what is known before a file is opened
        self.start()
        known = set()                                            # files, so that none is read twice
        self.inputs = [self.find(item, split, known) for item in inputs_of(source, split)]
        self.items = [item for _, _, items in self.inputs for item in items]
        self.streamed = any(isinstance(item, Stream) and item.remote for item in self.items)
        if part:
            self.items = part_of(self.items, *part)
        self.files = [item.path for item in self.items if isinstance(item, File)]
        for path in self.files:
            needed = NEEDS.get(os.path.splitext(path)[1].lower())
            if needed and importlib.util.find_spec(needed) is None:
                raise UserError(f"{path} needs the package {needed}: pip install {needed}")
        on_disk = len(self.files) == len(self.items)
        self.total_bytes = sum(file.size for file in self.items) if on_disk else None
        self.text_bytes = sum(file.size * (PACKED if is_packed(file.path) else 1)
                              for file in self.items) if on_disk else None
        if not part or part[0] == 1:                             # of all parts, one says it
            self.beforehand, self.examples = self.left_out, self.example
        self.start()

    def find(self, source, split: str, known: set) -> tuple[str, object, list]:
        """An input's (short name, what identifies it if that is not its items, its items)."""
        if not isinstance(source, str):
            return "records", None, [Stream("the data", lambda: source, getattr(source, "_fingerprint", None),
                                            not hasattr(source, "__len__"))]
        if stream := find_data_set(source, split):
            return stream.name.split("/")[1].replace(":", "-"), stream.identity, [stream]
        files = []
        for path, why in find_files(source):
            if not why:
                try:
                    facts = os.stat(path)
                    me = (facts.st_dev, facts.st_ino) if facts.st_ino else os.path.realpath(path)
                    why = ("no file with content (a pipe or a device)" if not stat.S_ISREG(facts.st_mode) else
                           "file that was read already (a link, or named twice)" if me in known else
                           "empty file" if not facts.st_size and suffix_of(path) in LINES else "")
                except OSError:
                    why = "unreadable file"
            if why:
                self.leave_out(why, place=path)
            else:
                known.add(me)
                files.append(File(path, facts.st_size, facts.st_mtime_ns))
        return name_of(source), sys.version if source == "stdlib" else None, files

    @property
    def name(self) -> str:
        first, more = self.inputs[0][0], len(self.inputs) - 1
        return first + (f"-and-{more}-more" if more else "")

    def identity(self) -> list:
        """
        What the input is (not which part of it), for json: paths with sizes and times; Python's version; the
        name of a data set. Of an object its fingerprint, or a digest of its rows: all if it has a length,
        else the first 1,000.
        """
        return [fixed or [describe(item) for item in items] for _, fixed, items in self.inputs]

    # ---- counting ----
    def start(self):
        self.left_out, self.noted = Counter(self.beforehand), Counter()
        self.example = dict(self.examples)
        self.records_read, self.before, self.tell = 0, 0, int
        self.path, self.unit, self.number = "", "", 0

    @property
    def bytes_read(self) -> int:
        return self.before + self.tell()

    @property
    def where(self) -> str:
        return f"{self.path} {self.unit} {self.number}" if self.number else self.path

    def leave_out(self, reason: str, detail: str = "", place: str = ""):
        self.left_out[reason] += 1
        self.remember(reason, (place or self.where) + detail)

    def note(self, what: str):
        self.noted[what] += 1
        self.remember(what, self.where)

    def remember(self, what: str, place: str):
        if what not in self.example:                 # a path or a key can hold what no terminal prints
            self.example[what] = place.encode(errors="backslashreplace").decode()

    def give_up(self, error: OSError | UnicodeDecodeError):
        """Counts a file, or a text of it, that could not be read."""
        if isinstance(error, UnicodeDecodeError):
            self.leave_out("not UTF-8", f", byte {error.start:,}")
        else:
            self.leave_out("unreadable file", f" ({error.strerror or error})")

    # ---- reading ----
    def __iter__(self) -> Iterator[dict]:
        self.start()
        for item in self.items:
            self.path, self.unit, self.number = item[0], "", 0
            for record in self.read(item) if isinstance(item, File) else self.take(item):
                self.records_read += 1
                yield record

    def read(self, file: File) -> Iterator[dict]:
        try:
            with open(file.path, "rb", buffering=BLOCK) as raw:
                self.tell = lambda: min(file.size, max(0, raw.tell() - file.start))
                content = unpacked(raw, file.path)
                if not file.start and skip_mark(content):
                    self.note("byte order mark (removed)")
                if file.start:
                    self.unit = f"line (counted from byte {file.start:,})"
                lines = content if file.stop is None else lines_from(raw, file.start, file.stop)
                yield from READERS.get(suffix_of(file.path), read_text)(self, lines)
                if content is not raw and content.raw.damage:
                    self.leave_out(DAMAGED, f" ({content.raw.damage})", place=file.path)
        except OSError as error:
            self.give_up(error)
        finally:
            self.tell = int
        self.before += file.size

    def take(self, stream: Stream) -> Iterator[dict]:
        rows, self.unit = stream.open(), "record"
        names = getattr(rows, "column_names", None)
        if self.columns and names and set(self.columns) <= set(names):
            rows = rows.select_columns(self.columns)
        try:
            for self.number, record in enumerate(rows, 1):
                if isinstance(record, Mapping):
                    self.before += sum(len(text) for text in record.values() if isinstance(text, str))
                    yield record
                else:
                    self.leave_out("record that is no object")
        except Exception as error:                   # of any kind: of the network, of a user's own map()
            if not stream.remote:
                raise
            raise UserError(f"{stream.name} broke off after {self.number:,} records ({one_line(error)}): "
                            f"give the same command again") from error

    # ---- what the readers share ----
    def decode(self, raw: bytes) -> str | None:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.give_up(error)

    def merge(self, pairs: list) -> dict:
        """Each object of a JSON text passes through here: where else would a key be seen that comes twice?"""
        record = dict(pairs)
        if len(record) < len(pairs):
            self.twice = True
        return record

    def seen(self, record: dict) -> dict:
        if self.twice:
            self.note(TWICE)
            self.twice = False
        return record


# ---- formats: each a generator of records, from a binary file ---------------------------------------------
def read_text(records: Records, file) -> Iterator[dict]:
    if records.lazy and not records.separator:
        parts = [file.read(LARGE + 1)]
        if len(parts[0]) > LARGE:
            text = LargeText(records.path)
            yield {"text": text}
            if text.damage:
                records.leave_out(DAMAGED, f" ({text.damage})", place=records.path)
            return
    else:
        parts = split_file(file, records.separator)
    for number, raw in enumerate(parts, 1):
        records.unit, records.number = "part", number if records.separator else 0
        text = records.decode(raw)
        if text is not None:
            yield {"text": text}


def read_lines(records: Records, lines: Iterable[bytes]) -> Iterator[dict]:
    records.unit = records.unit or "line"
    for records.number, raw in enumerate(lines, 1):
        text = records.decode(raw)
        if text is None:
            continue
        if not text or text.isspace():
            records.leave_out("empty line")
            continue
        records.twice = False
        try:
            record = records.json.decode(text)
        except (ValueError, RecursionError):
            records.leave_out("broken JSON line")
            continue
        if isinstance(record, dict):
            yield records.seen(record)
        else:
            records.leave_out("JSON line that is no object")


def read_json(records: Records, file) -> Iterator[dict]:
    """Lists, objects, objects around a list; JSON lines, if the first line is an object and more follows."""
    first, after = skip_space(file) + file.readline(BLOCK), b""
    if re.fullmatch(rb"\{.*\}\s*\n", first, re.DOTALL):
        after = skip_space(file)
    if after not in (b"", b","):
        yield from read_lines(records, itertools.chain([first, after + file.readline()], file))
        return
    records.unit, records.twice, text = "record", False, JsonText(file, first + after, records.json)
    try:
        for records.number, value in enumerate(text.values(), 1):
            if not text.clean:
                records.leave_out("not UTF-8")
            elif isinstance(value, (dict, str)):
                yield records.seen(value if isinstance(value, dict) else {"text": value})
            else:
                records.leave_out("JSON value that is no object")
            records.twice = False
    except (ValueError, RecursionError) as error:
        records.number += 1
        records.leave_out("broken JSON (the rest of the file is not read)", f" ({one_line(error)})")
    if text.beside:
        records.number = 0                           # it is said of the file
        records.note("keys beside the list of records (not read)")


def read_rows(records: Records, file) -> Iterator[dict]:
    csv.field_size_limit(FIELD)
    ended = False

    def lines():
        nonlocal ended
        yield from io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
        ended = True
        yield "\n"                                   # a row of its own, unless a quote is still open

    rows = csv.reader(lines(), delimiter="\t" if ".tsv" in suffix_of(records.path) else ",")
    records.unit, header = "line", None
    while not ended:
        records.number = rows.line_num + 1
        try:
            row = next(rows)
        except csv.Error as error:
            records.leave_out("broken row", f" ({error})")
            continue
        if not row:
            if not ended:
                records.leave_out("empty line")
        elif ended:
            records.leave_out("row with a quote that is not closed")
        elif not is_text("".join(row)):
            records.leave_out("not UTF-8")
            if header is None:
                return
        elif header is None:
            header = row
            if again := [name for name, count in Counter(header).items() if count > 1]:
                records.leave_out("file that has a column twice", f" ({', '.join(again)})")
                return
        elif len(row) == len(header):
            yield dict(zip(header, row))
        else:
            more = "more" if len(row) > len(header) else "fewer"
            records.leave_out(f"row with {more} fields than the header", f" ({len(row)}, {len(header)})")
    if header is None:
        records.leave_out("file without a header", place=records.path)


def is_text(text: str) -> bool:
    """Whether all bytes of a field were UTF-8 (ESCAPED says the same, slowly)."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def read_parquet(records: Records, file) -> Iterator[dict]:
    import pyarrow
    import pyarrow.parquet
    try:
        table = pyarrow.parquet.ParquetFile(file, buffer_size=BLOCK)
        names, total = table.schema_arrow.names, max(1, table.metadata.num_rows)
        records.unit = "record"
        if len(set(names)) < len(names):
            return records.leave_out("file that has a column twice")
        size = os.path.getsize(records.path)
        records.tell = lambda: min(size, size * records.number // total)
        columns = records.columns if records.columns and set(records.columns) <= set(names) else None
        for batch in table.iter_batches(batch_size=256, columns=columns):
            try:
                rows = batch.to_pylist()
            except ValueError:                       # bytes that are no text, a year beyond 9999: which row?
                rows = (rows_of(batch.slice(i, 1)) for i in range(len(batch)))
            for row in rows:
                records.number += 1
                if isinstance(row, dict):
                    yield row
                else:
                    records.leave_out(row)
    except pyarrow.ArrowException as error:
        records.leave_out(DAMAGED, f" ({one_line(error)})")


def rows_of(batch) -> dict | str:
    """The one row of a batch, or why it is none."""
    try:
        return batch.to_pylist()[0]
    except ValueError as error:
        return "not UTF-8" if isinstance(error, UnicodeDecodeError) else "row that Python has no values for"


READERS = {".txt": read_text, ".md": read_text, ".jsonl": read_lines, ".ndjson": read_lines,
           ".json": read_json, ".csv": read_rows, ".tsv": read_rows}
READERS |= {suffix + packed: reader for suffix, reader in READERS.items() for packed in (".gz", ".zst")}
READERS[".parquet"] = read_parquet
LINES = (".jsonl", ".ndjson", ".json")         # an empty one holds no record that could be counted
SUFFIXES = tuple(READERS)


def suffix_of(path: str) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.lower().endswith(suffix)), None)


# ---- layers below the formats -----------------------------------------------------------------------------
class Unpacked(io.RawIOBase):
    """What a packed file holds: member after member. Where it is damaged it ends, and `damage` says why."""

    def __init__(self, file, begin, failure):
        self.held, self.damage = b"", None
        self.blocks = self.unpack(file, begin, failure)

    def unpack(self, file, begin, failure) -> Iterator[bytes]:
        member = None                                # begin() makes what unpacks one member
        try:
            while raw := file.read(2**13):           # little: it may be a thousand times as much unpacked
                while raw and (member or (raw := raw.lstrip(b"\0"))):
                    member = member or begin()
                    yield member.decompress(raw)
                    raw, member = (member.unused_data, None) if member.eof else (b"", member)
        except failure as error:
            self.damage = one_line(error)
        if member and not self.damage:
            self.damage = "it ends in the middle"

    def readable(self):
        return True

    def readinto(self, buffer):
        while len(self.held) < len(MARK) and (block := next(self.blocks, None)) is not None:
            self.held = bytes(self.held) + block     # enough for skip_mark to look at
        count = min(len(buffer), len(self.held))
        buffer[:count] = self.held[:count]
        self.held = memoryview(self.held)[count:]
        return count


def is_packed(path: str) -> bool:
    return path.lower().endswith((".gz", ".zst", ".parquet"))


def unpacked(file, path: str):
    """`file`, or what comes out of it when its name says that it is packed."""
    if path.lower().endswith(".gz"):
        return io.BufferedReader(Unpacked(file, lambda: zlib.decompressobj(31), zlib.error), BLOCK)
    if path.lower().endswith(".zst"):
        import zstandard
        frames = zstandard.ZstdDecompressor(max_window_size=2**31)
        return io.BufferedReader(Unpacked(file, frames.decompressobj, zstandard.ZstdError), BLOCK)
    return file


def skip_mark(file) -> bool:
    return file.peek(len(MARK)).startswith(MARK) and file.read(len(MARK)) == MARK


def skip_space(file) -> bytes:
    """The first byte that is no space; b"" at the end."""
    while (byte := file.read(1)).isspace():
        pass
    return byte


def split_file(file, separator: bytes | None) -> Iterator[bytes]:
    """The parts of a binary file between separators, one at a time. Mere space after the last is no part."""
    if not separator:
        yield file.read()
        return
    held, parts = bytearray(), 0
    while block := file.read(BLOCK):
        seen = max(0, len(held) - len(separator) + 1)      # what came before holds no separator
        held += block
        start = 0
        while (at := held.find(separator, seen)) >= 0:
            yield bytes(held[start:at])
            start = seen = at + len(separator)
            parts += 1
        del held[:start]
    if not parts or held.strip():
        yield bytes(held)


def lines_from(file, start: int, stop: int) -> Iterator[bytes]:
    """The lines that begin in bytes [start, stop)."""
    if start:
        file.seek(start - 1)
        file.readline()
    at = file.tell() if start else 0                 # a byte order mark is of the first line
    while at < stop and (line := file.readline()):
        at = at + len(line) if at else file.tell()
        yield line


class LargeText:
    """A text that is too long to be held: pieces() gives it from its beginning, as often as it is called."""

    def __init__(self, path: str):
        self.path, self.size = path, os.path.getsize(path)         # bytes, as it lies on the disk
        self.damage = None                           # why the last pieces() ended before the text did

    def pieces(self) -> Iterator[str]:
        """
        About a MiB each, up to where a packed file is damaged. UnicodeDecodeError with the byte of the file,
        OSError: see Records.give_up.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        with open(self.path, "rb", buffering=BLOCK) as raw:
            content = unpacked(raw, self.path)
            before = len(MARK) if skip_mark(content) else 0
            while block := content.read(BLOCK):
                yield self.decode(decoder, block, before)
                before += len(block)
            self.damage = content.raw.damage if content is not raw else None
            if not self.damage:                      # else a character may be cut
                self.decode(decoder, b"", before)

    def decode(self, decoder, block: bytes, before: int) -> str:
        held = len(decoder.getstate()[0])            # bytes of a character that the last block cut
        try:
            return decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            error.start += before - held
            raise


class JsonText:
    """JSON out of a file, value by value. In memory: the value at hand, and a block."""

    def __init__(self, file, head: bytes, decoder: json.JSONDecoder):
        self.file, self.decoder = file, decoder
        self.utf8, self.damaged = codecs.getincrementaldecoder("utf-8")(), False
        self.text, self.at, self.before = self.characters(head), 0, 0
        self.clean, self.beside = True, False

    def characters(self, raw: bytes) -> str:
        """Bytes that are no UTF-8 cost the values that hold them, not the file."""
        try:
            return self.utf8.decode(raw, final=not raw)
        except UnicodeDecodeError:
            self.utf8.errors, self.damaged = "surrogateescape", True
            return self.utf8.decode(raw, final=not raw)

    def more(self) -> bool:
        """Reads on; by as much as is held, so that a long value is looked at a few times only."""
        raw = self.file.read(max(BLOCK, len(self.text) - self.at))
        more = self.characters(raw)
        self.before += self.at
        self.text, self.at = self.text[self.at:] + more, 0
        return bool(raw or more)

    def peek(self) -> str:
        """The next character that is no space; "" at the end."""
        self.at = SPACE.match(self.text, self.at).end()
        while self.at == len(self.text) and self.more():
            self.at = SPACE.match(self.text).end()
        return self.text[self.at:self.at + 1]

    def take(self, wanted: str) -> str:
        if (char := self.peek()) == "" or char not in wanted:
            raise ValueError(f"no {' or '.join(wanted)} at character {self.before + self.at:,}")
        self.at += 1
        return char

    def value(self):
        if self.peek() not in '"{[':                 # a number ends where something else begins
            while not NOT_NUMBER.search(self.text, self.at) and self.more():
                pass
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
                break
            except json.JSONDecodeError as error:    # at the end of what is held it may be whole, with more
                cut = error.pos > len(self.text) - 16 or error.msg.startswith("Unterminated string")
                if not (cut and self.more()):
                    raise ValueError(f"{error.msg}, character {self.before + error.pos:,}") from None
        self.clean = not (self.damaged and ESCAPED.search(self.text, self.at, end))
        self.at = end
        return value

    def items(self) -> Iterator:
        self.take("[")
        if self.peek() == "]":
            self.at += 1
            return
        yield self.value()
        while self.take(",]") == ",":
            yield self.value()

    def members(self) -> Iterator:
        """What the lists under one of the WRAPPERS hold; without such a list, the object itself."""
        pairs, clean, wraps = [], True, False
        self.take("{")
        end = self.take("}") if self.peek() == "}" else ","
        while end == ",":
            key, clean = self.value(), clean and self.clean
            if not isinstance(key, str):
                raise ValueError(f"a key that is no string before character {self.before + self.at:,}")
            self.take(":")
            if key in WRAPPERS and self.peek() == "[":
                wraps = True
                yield from self.items()
            else:
                pairs.append((key, self.value()))
                clean &= self.clean
            end = self.take(",}")
        self.beside |= wraps and bool(pairs)
        if not wraps:
            self.clean = clean
            yield self.decoder.object_pairs_hook(pairs)

    def values(self) -> Iterator:
        while char := self.peek():
            if char in "[{":
                yield from self.items() if char == "[" else self.members()
            else:
                yield self.value()


# ---- where the records are --------------------------------------------------------------------------------
def inputs_of(source, split: str) -> list:
    """`source` as a list: paths, patterns, data set ids, iterables of dicts."""
    if isinstance(source, Mapping):                  # a DatasetDict
        if split not in source:
            raise UserError(f"the data has no split {split!r}: it has {', '.join(map(str, source))}")
        return [source[split]]
    path = (str, os.PathLike)
    if isinstance(source, (list, tuple)) and source and all(isinstance(item, path) for item in source):
        inputs = [os.fspath(item) for item in source]
    elif isinstance(source, path):
        source = os.fspath(source)
        alone = os.path.exists(source) or "," not in source or (glob.has_magic(source) and glob.glob(
            source, recursive=True))
        inputs = [source] if alone else [item.strip() for item in source.split(",")]
    elif not isinstance(source, Iterable) or iter(source) is source:
        raise UserError(f"{type(source).__name__} cannot be read more than once, as is needed here: give a "
                        f"path, a list of dicts or a data set")
    else:
        return [source]
    if "" in inputs:
        raise UserError(f"{source!r} names nothing, or has nothing between two commas: give a path")
    return inputs


def find_data_set(source: str, split: str) -> Stream | None:
    """The data set of the Hugging Face Hub, if `source` can only be the name of one."""
    match = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?::(.+))?", source)
    if not match or os.path.exists(source) or suffix_of(source) or glob.has_magic(source):
        return None
    name, config = match.groups()
    near = nearest(source)
    # a slip, or one of our own folders; the network would take its time
    if (near and os.path.isdir(os.path.dirname(source))) or name.startswith(("data/", "out/")):
        return None
    if importlib.util.find_spec("datasets") is None:
        raise UserError(f"{source} does not exist{near}; if it is a Hugging Face data set: pip install "
                        f"datasets")
    identity = {"data set": name, "config": config, "split": split}
    return Stream(source, functools.partial(open_data_set, source, name, config, split, near), identity, True)


def open_data_set(source: str, name: str, config: str | None, split: str, near: str) -> Iterable:
    import datasets
    try:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:                       # of any kind: of the network, of the data set's files
        listed = re.search(r"\[(.*?)\]", str(error))
        names = listed[1].replace("'", "") if listed else ""
        if "Config name is missing" in str(error):
            raise UserError(f"{name} has several configs, {names}: choose one, like "
                            f"{name}:{names.split(', ')[0]}") from None
        if "BuilderConfig" in str(error) and listed:
            raise UserError(f"{name} has no config {config!r}: choose one of {names}") from None
        if "Bad split" in str(error) and listed:
            raise UserError(f"{source} has no split {split!r}: choose one of {names}") from None
        raise UserError(f"{source} does not exist{near}, and no Hugging Face data set of that name could be "
                        f"opened ({one_line(error)})") from None


def find_files(source: str) -> Iterator[tuple[str, str]]:
    """(path, why it is not read, or ""): in an order that depends on the names alone."""
    if source == "stdlib":
        yield from walk(sysconfig.get_paths()["stdlib"], (".py",), NOT_LIBRARY)
    elif os.path.isdir(source):
        yield from walk(source, SUFFIXES, ())
    elif os.path.isfile(source):
        yield source, ""
    elif os.path.exists(source):
        raise UserError(f"{source} is a pipe or a device: write its content to a file first, or pipe it in")
    elif glob.has_magic(source):
        found = sorted(glob.glob(source, recursive=True), key=lambda path: path.split(os.sep))
        if not found:
            raise UserError(f"no file matches {source}")
        for path in found:
            if not os.path.isdir(path):
                yield path, ""
            elif "**" not in source:
                yield path, "folder that the pattern matches (its files are not read)"
    else:
        raise UserError(f"{source} does not exist{nearest(source)}")


def walk(top: str, suffixes: tuple, skipped) -> Iterator[tuple[str, str]]:
    """find_files for what is below a folder: what has one of `suffixes` is read, other files are counted."""
    waiting, seen = [top], set()
    while waiting:
        path = waiting.pop()
        name = os.path.basename(path)
        if not os.path.isdir(path):
            if name.lower().endswith(suffixes):
                yield path, ""
            elif suffixes == SUFFIXES:
                suffix = re.search(r"\.[A-Za-z]\w{0,9}$|$", name, re.ASCII)[0] or "no suffix"
                yield path, f"file of another format ({suffix})"
        elif (real := os.path.realpath(path)) in seen:           # a link that leads back
            yield path, "folder that was read already (a link)"
        else:
            seen.add(real)
            try:
                names = sorted(os.listdir(path), reverse=True)
            except OSError:
                yield path, "folder that cannot be read"
                continue
            waiting += [os.path.join(path, name) for name in names
                        if name not in skipped and not name.startswith((".", "__pycache__"))]


def nearest(path: str) -> str:
    """What stands near a path that does not exist, for its error message."""
    if os.path.exists(path):
        return ""
    folder = os.path.dirname(path) or "."
    while not os.path.isdir(folder):
        path, folder = folder, os.path.dirname(folder) or "."
    try:
        names = difflib.get_close_matches(os.path.basename(path), os.listdir(folder), n=3)
    except OSError:
        names = []
    near = ", ".join(os.path.normpath(os.path.join(folder, name)) for name in names)
    return f" (near it: {near})" if near else ""


def part_of(items: list, k: int, n: int) -> list[File]:
    """
    The k-th of n slices: the files whose middle lies in its share of all bytes. Plain JSON lines are cut at
    the first line that begins there. Concatenated, the slices are the whole, each record in its place.
    """
    if not 1 <= k <= n:
        raise UserError(f"part {k} of {n} does not exist: parts are numbered from 1 to {n}")
    for item in items:
        if isinstance(item, Stream):
            raise UserError(f"{item.name} is a stream, which cannot be divided into parts: download its "
                            f"files and give their directory")
    total, begin, mine = sum(file.size for file in items), 0, []
    low, high = total * (k - 1) // n, total * k // n
    for file in items:
        end, middle = begin + file.size, begin + file.size // 2
        if suffix_of(file.path) in (".jsonl", ".ndjson"):
            start, stop = max(low, begin), min(high, end)
            if start < stop:
                mine.append(file._replace(size=stop - start, start=start - begin, stop=stop - begin))
        elif low <= middle and (middle < high or k == n):        # the last one has empty files at the end too
            mine.append(file)
        begin = end
    return mine


def spool_stdin(path: str) -> str:
    """
    Standard input as a file, whose name is returned: `path` with .jsonl if its first line (that is not empty)
    is a JSON object, .json if it looks like the beginning of other JSON, .txt else; unpacked if it is packed.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("nothing is piped into this command: give the name of a file instead of -")
    file = io.BufferedReader(sys.stdin.buffer, BLOCK)
    packed = {b"\x1f\x8b": ".gz", b"\x28\xb5": ".zst"}.get(file.peek(2)[:2], "")
    file, first, head = unpacked(file, packed), b"", []
    while not first.strip() and (first := file.readline(LARGE)):
        head.append(first)
    if not head:
        raise UserError("standard input is empty: give the name of a file instead of -")
    suffix = ".json" if re.match(rb"\s*(\[\s*([{\"]|$)|\{\s*(\"|$))", first.removeprefix(MARK)) else ".txt"
    with contextlib.suppress(ValueError, RecursionError):
        suffix = ".jsonl" if isinstance(json.loads(first), dict) else suffix
    with open(path + suffix, "xb") as out:
        out.writelines(head)
        while block := file.read(BLOCK):
            out.write(block)
    if packed and file.raw.damage:
        os.remove(path + suffix)
        raise UserError(f"standard input is damaged ({file.raw.damage}): pack it again")
    return path + suffix


# ---- words ------------------------------------------------------------------------------------------------
def name_of(source: str) -> str:
    """"stories" of texts/stories.jsonl.gz, "src" of src/**/*.py."""
    while glob.has_magic(os.path.basename(source)) or glob.has_magic(os.path.dirname(source)):
        source = os.path.dirname(source)
    name = os.path.basename(os.path.abspath(source))
    suffix = suffix_of(name) or os.path.splitext(name)[1]
    return re.sub(r"[^\w.-]+", "-", name.removesuffix(name[len(name) - len(suffix):])) or "files"


def describe(item: File | Stream):
    if isinstance(item, File):
        return [os.path.abspath(item.path), item.size, item.modified]
    if item.identity:
        return item.identity
    sha = hashlib.sha256()
    for record in itertools.islice(item.open(), 1000 if item.remote else None):
        sha.update(json.dumps(record, sort_keys=True, default=str).encode() + b"\n")
    return sha.hexdigest()[:16]


def one_line(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 200 else words[:200] + " ..."
