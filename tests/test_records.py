"""records.py: every format gives its records, and what cannot be read is counted by its reason."""
import gzip
import io
import itertools
import json
import os
import random
import sys
import types
from pathlib import Path

import pytest

import records as module
from config import UserError
from records import LargeText, read_records

WORDS = "the sea was calm and old stones lay under grey water while nobody spoke of home ä 海 🥊".split()
ROWS = [{"text": f"{i} " + " ".join(random.Random(i).choices(WORDS, k=i % 30)) + '"\n,', "n": i}
        for i in range(300)]


def zst(raw, **how):
    return pytest.importorskip("zstandard").ZstdCompressor(**how).compress(raw)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def lines_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def table_of(rows, delimiter=","):
    out = io.StringIO(newline="")
    writer = module.csv.writer(out, delimiter=delimiter)
    writer.writerows([rows[0], *(row.values() for row in rows)])
    return out.getvalue()


def read(path, **how):
    """(records, left_out, noted): the same each time."""
    records = read_records(path, **how)
    found = list(records), dict(records.left_out), dict(records.noted)
    assert found == (list(records), dict(records.left_out), dict(records.noted))
    assert records.records_read == len(found[0])
    assert records.total_bytes is None or records.bytes_read == records.total_bytes
    assert set(records.left_out) | set(records.noted) == set(records.example)
    return found


def texts(path, **how):
    return [record["text"] for record in read(path, **how)[0]]


def first_place(path, reason):
    records = read_records(str(path))
    list(records)
    return records.example[reason]


# ---- formats ----------------------------------------------------------------------------------------------
FORMATS = {
    ".jsonl": lines_of(ROWS), ".ndjson": lines_of(ROWS), ".json": json.dumps(ROWS, indent=1),
    "-lines.json": "\n\n" + lines_of(ROWS), "-flat.json": json.dumps(ROWS, ensure_ascii=False),
    "-wrapped.json": json.dumps({"rows": ROWS}),
    "-objects.json": "\n".join(json.dumps(row, indent=2) for row in ROWS),
    ".csv": table_of(ROWS), ".tsv": table_of(ROWS, "\t")}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("packed", ["", ".gz", ".zst", ".GZ"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_every_format_gives_the_same_records_packed_or_not(tmp_path, suffix, packed, mark):
    raw = mark + FORMATS[suffix].encode()
    half = len(raw) // 2                                       # packed files have several members
    raw = (raw if not packed else zst(raw[:half]) + zst(raw[half:]) if packed == ".zst" else
           gzip.compress(raw[:1]) + gzip.compress(raw[1:half]) + gzip.compress(raw[half:]))
    found, left_out, noted = read(write(tmp_path / f"x{suffix}{packed}", raw))
    assert [{**row, "n": int(row["n"])} for row in found] == ROWS and not left_out
    assert noted == ({"byte order mark (removed)": 1} if mark else {})
    records = read_records(str(tmp_path))
    done = [records.bytes_read for _ in records]
    assert done == sorted(done) and 0 < done[0] and done[-1] <= records.total_bytes


def test_parquet_gives_its_rows_and_reads_only_the_columns_that_are_needed(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "x.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS * 5), path, row_group_size=700)
    assert read(path) == (ROWS * 5, {}, {})
    assert read(path, columns=["text"])[0] == [{"text": row["text"]} for row in ROWS * 5]
    assert list(read(path, columns=["body"])[0][0]) == ["text", "n"]         # what to name in the report
    records = read_records(path)
    done = [records.bytes_read for _ in records]
    assert done == sorted(done) and done[700] > 0.4 * records.total_bytes


@pytest.mark.parametrize("suffix", [".txt", ".md", ".txt.gz", ".md.zst"])
def test_a_text_file_is_a_record_or_one_between_each_two_separators(tmp_path, suffix):
    raw = "\ufeffone\r\n##two##\n".encode()
    path = write(tmp_path / f"x{suffix}", gzip.compress(raw) if "gz" in suffix else
                 zst(raw) if "zst" in suffix else raw)
    assert texts(path) == ["one\r\n##two##\n"] and texts(path, document_separator="##") == ["one\r\n", "two"]
    assert read(path)[2] == {"byte order mark (removed)": 1}


@pytest.mark.parametrize("text, parts", [
    ("a<sep>b<sep>c", ["a", "b", "c"]), ("a<sep>b<sep>\n", ["a", "b"]), ("a", ["a"]), ("", [""]),
    ("<sep>a<sep><sep>b", ["", "a", "", "b"]), ("a<se<sep>p>b", ["a<se", "p>b"])])
def test_a_separator_divides_a_text_file_wherever_blocks_end(text, parts):
    class Dripping(io.BytesIO):
        def read(self, size=-1):
            return super().read(2)
    assert [part.decode() for part in module.split_file(Dripping(text.encode()), b"<sep>")] == parts
    assert [part.decode() for part in module.split_file(io.BytesIO(text.encode()), b"<sep>")] == parts


def test_named_files_and_patterns_of_unknown_suffix_are_text(tmp_path):
    write(tmp_path / "src" / "a.py", "import a")
    write(tmp_path / "src" / "deep" / "b.py", "import b")
    write(tmp_path / "src" / "c.jsonl", '{"text": "c"}')
    write(tmp_path / "src" / "dump.gz", gzip.compress(b"packed"))
    assert texts(str(tmp_path / "src" / "a.py")) == ["import a"]
    assert texts(str(tmp_path / "src" / "dump.gz")) == ["packed"]
    assert texts(str(tmp_path / "src" / "**" / "*.py")) == ["import a", "import b"]
    found, left_out, _ = read(str(tmp_path / "src" / "*"))
    assert [row["text"] for row in found] == ["import a", "c", "packed"]
    assert left_out == {"folder that the pattern matches (its files are not read)": 1}
    assert len(read(str(tmp_path / "src" / "**"))[0]) == 4 and not read(str(tmp_path / "src" / "**"))[1]


def test_the_standard_library_is_text_without_its_tests():
    records = read_records("stdlib")
    assert len(records.files) > 300 and not any("/test/" in path for path in records.files)
    assert "import" in next(iter(records))["text"] and not records.left_out
    assert (records.name, records.identity()) == ("stdlib", [sys.version])


# ---- JSON, streamed ---------------------------------------------------------------------------------------
TRICKY = [{"text": "a\\\"]},{[\u2028 \U0001f600 \\ud800 é海🥊"}, {"n": -1.5e+300, "m": [[], {}, [1, 2.5]]},
          "a string", "\ud800", {"text": None, "f": [True, False]}, {}, {"text": "x" * 300},
          {"n": float("inf")}]


@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("indent", [None, 1])
def test_json_is_the_same_wherever_its_blocks_end(tmp_path, monkeypatch, ascii, indent):
    """Numbers, escapes, characters and space that a block cuts."""
    class Dripping(io.BytesIO):
        def read(self, size=-1):
            return super().read(min(size, drop) if size >= 0 else drop)
    raw = json.dumps(TRICKY, ensure_ascii=ascii, indent=indent).replace("\ud800", r"\ud800") + "  \n"
    raw = raw.encode()
    outer = {"v": 12.5e1, "a": {"data": [1]}, "rows": TRICKY, "data": [7], "z": -12e-1}
    outer = json.dumps(outer, indent=indent).encode()
    decoder = json.JSONDecoder(object_pairs_hook=dict)
    for drop in (1, 2, 3, 5, 7, 64):
        assert list(module.JsonText(Dripping(raw), b"", decoder).values()) == TRICKY
        text = module.JsonText(Dripping(outer), b"", decoder)
        assert list(text.values()) == [*TRICKY, 7] and text.beside
        assert list(module.JsonText(Dripping(b"12e1 -3"), b"", decoder).values()) == [120.0, -3]


def test_a_long_element_is_not_decoded_again_for_each_block(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 100)
    seen = []
    decoder = json.JSONDecoder(object_pairs_hook=dict)
    decode = decoder.raw_decode
    decoder.raw_decode = lambda text, at: (seen.append(len(text) - at), decode(text, at))[1]
    rows = [{"text": "x" * 100_000}, {"text": "y"}]
    file = io.BytesIO(json.dumps(rows).encode())
    assert list(module.JsonText(file, b"", decoder).values()) == rows
    assert len(seen) < 16 and sum(seen) < 500_000


def test_of_a_list_that_is_broken_what_came_before_stays_and_the_rest_is_not_held(tmp_path):
    class Counting(io.BytesIO):
        taken = 0
        def read(self, size=-1):
            self.taken += size
            return super().read(size)
    raw = b'[{"text": "a"}, {"text": oops}, ' + b'{"text": "b"},' * 1_000_000
    found, left_out, _ = read(write(tmp_path / "x.json", raw[:1000]))
    assert found == [{"text": "a"}] and left_out == {"broken JSON (the rest of the file is not read)": 1}
    file = Counting(raw)
    with pytest.raises(ValueError, match="Expecting value, character 25"):
        list(module.JsonText(file, b"", json.JSONDecoder()).values())
    assert file.taken <= module.BLOCK


BROKEN = "broken JSON (the rest of the file is not read)"


@pytest.mark.parametrize("content, found, left_out", [
    ("", [], {"empty file": 1}), (" \n\t", [], {}), ("[]", [], {}), ("{}", [{}], {}),
    ('{"text": "a"}', [{"text": "a"}], {}),
    ('{"a": 1}\n\n', [{"a": 1}], {}), ('{"a": 1}\n{"a": 2}', [{"a": 1}, {"a": 2}], {}),
    ('{"a": 1}\n{"a"\n\n{"a": 3}', [{"a": 1}, {"a": 3}], {"broken JSON line": 1, "empty line": 1}),
    ('["a", "b"]', [{"text": "a"}, {"text": "b"}], {}),
    ("[1, null, [2]]", [], {"JSON value that is no object": 3}),
    ('[{"a": 1}]]', [{"a": 1}], {BROKEN: 1}), ('[{"a": 1},]', [{"a": 1}], {BROKEN: 1}),
    ('[{"a": 1}', [{"a": 1}], {BROKEN: 1}), ('[{"a": 1} {"a": 2}]', [{"a": 1}], {BROKEN: 1}),
    ('[{"a": 1}] trailing', [{"a": 1}], {BROKEN: 1}), ('[{"a": 1}]\n[{"a": 2}]', [{"a": 1}, {"a": 2}], {}),
    ('{"data": [{"a": 1}]}', [{"a": 1}], {}), ('{"data": []}', [], {}),
    ('{"data": {"a": 1}}', [{"data": {"a": 1}}], {}),
    ('{"data": [{"a": 1}', [{"a": 1}], {BROKEN: 1}), ('{1: 2}', [], {BROKEN: 1}),
    ('{"a" 1}', [], {BROKEN: 1}),
    ('{"a": 1,}', [], {BROKEN: 1}), ("[" * 100_000, [], {BROKEN: 1}), ('{"a": "\0"}', [], {BROKEN: 1}),
    ('{"a"\0}\n{"a": 2}', [{"a": 2}], {"broken JSON line": 1}),
    ('{"a": {}\n, "b": 1}', [{"a": {}, "b": 1}], {}),
    ('{"items": [1]}\n{"items": [2]}', [{"items": [1]}, {"items": [2]}], {}),
    ('[{"a": "\\ud800"}]', [{"a": "\ud800"}], {})])
def test_json_of_every_shape(tmp_path, content, found, left_out):
    assert read(write(tmp_path / "x.json", content))[:2] == (found, left_out)


def test_keys_beside_a_list_of_records_and_keys_that_come_twice_are_noted(tmp_path):
    rows = '[{"a": 1, "a": 2}, {"b": {"c": 1, "c": 2}}, {"a": 1}]'
    path = write(tmp_path / "x.json", '{"version": 1, "data": ' + rows + "}")
    assert read(path) == ([{"a": 2}, {"b": {"c": 2}}, {"a": 1}], {},
                          {module.TWICE: 2, "keys beside the list of records (not read)": 1})
    path = write(tmp_path / "x.jsonl", '{"a": 1}\n{"a": 1, "a": 2}\n{"a": 1, "a": 1, "b"\n{"a": 3}\n')
    assert read(path) == ([{"a": 1}, {"a": 2}, {"a": 3}], {"broken JSON line": 1}, {module.TWICE: 1})
    assert read(write(tmp_path / "y.json", '{"a": 1, "a": 2}'))[2] == {module.TWICE: 1}


def test_bytes_that_are_no_utf8_cost_their_record_only(tmp_path):
    rows = (b'{"text": "\xc3\xa4"}', b'{"text": "\xff"}', b'{"\xe6\xb5": 1}', b'{"text": "\xed\xa0\x80"}',
            b'{"text": "b"}')
    table = b'text\n\xc3\xa4\n\xff\n\xe6\xb5\n"\xed\xa0\x80\n"\nb\n'
    good = [{"text": "ä"}, {"text": "b"}]
    for name, content in {"x.jsonl": b"\n".join(rows), "y.json": b"[" + b",".join(rows) + b"]",
                          "z.json": b"\n".join(rows), "a.csv": table}.items():
        assert read(write(tmp_path / name, content))[:2] == (good, {"not UTF-8": 3}), name
    assert read(write(tmp_path / "b.csv", b"t\xff\na\n"))[:2] == ([], {"not UTF-8": 1})
    assert read(write(tmp_path / "c.txt", b"ab\xff"))[:2] == ([], {"not UTF-8": 1})
    assert first_place(tmp_path / "c.txt", "not UTF-8").endswith("c.txt, byte 2")


# ---- lines ------------------------------------------------------------------------------------------------
def test_what_cannot_be_read_is_counted_with_its_first_place(tmp_path):
    file = tmp_path / "x.jsonl"
    lines = [b'\xef\xbb\xbf{"text": "one"}', b"", b"{broken", b"[1]", b'{"text": "\xff"}', b"{more broken",
             b"[" * 100_000, '{"text": "zwö"}\r'.encode(), b'"text"', b'{"text": "nul\0"}',
             b'{"n": ' + b"9" * 5000 + b"}", b'{"text": NaN}']
    file.write_bytes(b"\n".join(lines))
    found, left_out, noted = read(str(file))
    assert [record["text"] for record in found[:2]] == ["one", "zwö"] and len(found) == 3
    assert left_out == {"empty line": 1, "broken JSON line": 5, "not UTF-8": 1,
                        "JSON line that is no object": 2}
    assert noted == {"byte order mark (removed)": 1}
    assert first_place(file, "broken JSON line") == f"{file} line 3"


def test_many_empty_lines_and_one_of_3_mb(tmp_path):
    long = {"text": "x" * 3_000_000}
    path = write(tmp_path / "x.jsonl", "\n" * 100_000 + json.dumps(long) + "\n")
    assert read(path)[:2] == ([long], {"empty line": 100_000})
    assert read(write(tmp_path / "x.json", "[" + "\n" * 100_000 + json.dumps(long) + "]"))[0] == [long]
    assert read(write(tmp_path / "x.csv", f'text\n{"x" * 3_000_000}\n'))[0] == [long]


# ---- csv --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("content, found, left_out", [
    ('a,b\n"1\r\n""x""",2\r\n\n3,4', [{"a": '1\r\n"x"', "b": "2"}, {"a": "3", "b": "4"}], {"empty line": 1}),
    ("a,b\n1\n1,2,3\n4,5\n", [{"a": "4", "b": "5"}], {"row with fewer fields than the header": 1,
                                                      "row with more fields than the header": 1}),
    ('a\n1\n"2\n3\n', [{"a": "1"}], {"row with a quote that is not closed": 1}),
    ("a,b,a\n1,2,3\n", [], {"file that has a column twice": 1}),
    ("", [], {"file without a header": 1}), ("\n\n", [], {"empty line": 2, "file without a header": 1}),
    ("a\n", [], {}), ("a\nx\0y\n", [{"a": "x\0y"}], {}), ("a\r1\r2", [{"a": "1"}, {"a": "2"}], {}),
    ('a\n"1"x\nit"s\n', [{"a": "1x"}, {"a": 'it"s'}], {})])
def test_csv_of_every_shape(tmp_path, content, found, left_out):
    assert read(write(tmp_path / "x.csv", content))[:2] == (found, left_out)
    assert read(write(tmp_path / "x.tsv", content.replace(",", "\t")))[:2] == (found, left_out)


def test_a_quote_that_is_never_closed_costs_a_bounded_part_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FIELD", 50)
    path = write(tmp_path / "x.csv", 'text\na\n"b\n' + "c\n" * 100)
    found, left_out, _ = read(path)
    assert 60 < len(found) < 100 and left_out == {"broken row": 1}
    assert first_place(path, "broken row") == f"{path} line 3 (field larger than field limit (50))"


# ---- damage -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_of_a_damaged_file_what_came_before_stays(tmp_path, packed):
    rows = [{"text": random.Random(i).randbytes(3000).hex()} for i in range(200)]
    whole = lines_of(rows).encode()
    good = gzip.compress(whole) if packed == ".gz" else zst(whole, write_checksum=True)
    middle = len(good) // 2
    scratched = good[:middle] + b"\xff" * 3000 + good[middle + 3000:]
    more = (b"garbage", good[:middle], good[:5])
    for bad in (good[:middle], scratched, good[:-2], *(good + rest for rest in more)):
        found, left_out, _ = read(write(tmp_path / f"x.jsonl{packed}", bad))
        assert found[:50] == rows[:50] and left_out[module.DAMAGED] == 1
        if bad is not scratched:                               # which only the checksum at the end can tell
            assert found == (rows * 2)[:len(found)] and sum(left_out.values()) <= 2
    assert read(write(tmp_path / f"y.jsonl{packed}", good + b"\0" * 1000 + good))[:2] == (rows * 2, {})
    assert read(write(tmp_path / f"y.jsonl{packed}", b"")) == ([], {}, {})
    assert read(write(tmp_path / f"y.jsonl{packed}", b"no such thing"))[1] == {module.DAMAGED: 1}
    assert module.DAMAGED in read(write(tmp_path / f"x.json{packed}", good[:middle]))[1]
    assert module.DAMAGED in read(write(tmp_path / f"x.csv{packed}", good[:middle]))[1]
    found, left_out, _ = read(write(tmp_path / f"x.txt{packed}", good[:middle]))
    assert left_out == {module.DAMAGED: 1} and whole.startswith(found[0]["text"].encode())


def test_zstandard_frames_that_are_to_be_skipped_are(tmp_path):
    skipped = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"            # pzstd writes such
    raw = skipped + zst(b'{"a": 1}\n') + skipped + zst(b'{"a": 2}\n') + skipped
    assert read(write(tmp_path / "x.jsonl.zst", raw)) == ([{"a": 1}, {"a": 2}], {}, {})


def test_damaged_parquet_is_counted_and_its_good_rows_stay(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"text": random.Random(i).randbytes(2000).hex()} for i in range(1000)]
    path = str(tmp_path / "x.parquet")
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, path, row_group_size=250, compression="zstd", use_dictionary=False)
    good = (tmp_path / "x.parquet").read_bytes()
    for bad in (good[:-10], good[:1000], b"PAR1", b"", b"text"):
        assert read(write(tmp_path / "x.parquet", bad))[:2] == ([], {module.DAMAGED: 1})
    middle = len(good) * 5 // 8
    scratched = good[:middle] + b"\xff" * 5000 + good[middle + 5000:]
    found, left_out, _ = read(write(tmp_path / "x.parquet", scratched))
    assert left_out == {module.DAMAGED: 1} and found == rows[:len(found)] and len(found) >= 500
    odd = pa.array([b"good", b"\xff", b"fine"] * 200).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": odd}), path)
    assert read(path)[:2] == ([{"text": "good"}, {"text": "fine"}] * 200, {"not UTF-8": 200})
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    assert read(path)[:2] == ([], {"file that has a column twice": 1})


# ---- directories ------------------------------------------------------------------------------------------
def test_a_directory_is_read_in_the_order_of_its_names_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.md", "a/b/c.txt", ".git/x.txt", ".hidden.txt", "image.png", "a.txt", "LICENSE",
                 "__pycache__/x.txt", "a-b/c.TXT"):
        write(tmp_path / name, name)
    found, left_out, _ = read(str(tmp_path))
    assert [row["text"] for row in found] == ["a/b/c.txt", "a/z.md", "a-b/c.TXT", "a.txt", "b.txt"]
    assert left_out == {"file of another format (.png)": 1, "file of another format (no suffix)": 1}
    assert first_place(tmp_path, "file of another format (.png)") == str(tmp_path / "image.png")


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_links_are_followed_and_nothing_is_read_twice(tmp_path):
    write(tmp_path / "elsewhere" / "a.txt", "linked")
    here = tmp_path / "here"
    write(here / "b.txt", "b")
    (here / "part").symlink_to(tmp_path / "elsewhere")
    (here / "again").symlink_to(tmp_path / "elsewhere")
    (here / "back").symlink_to(here)
    (here / "c.txt").symlink_to(here / "b.txt")
    (here / "gone.txt").symlink_to(here / "nothing")
    os.link(here / "b.txt", here / "hard.txt")
    found, left_out, _ = read(str(here))
    assert [row["text"] for row in found] == ["linked", "b"]
    twice = "file that was read already (a link, or named twice)"
    assert left_out == {"folder that was read already (a link)": 2, twice: 2, "unreadable file": 1}
    assert read(f"{here}/b.txt,{here}")[1][twice] == 3


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes with names")
def test_pipes_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.txt")
    assert read(str(tmp_path))[:2] == ([], {"no file with content (a pipe or a device)": 1})
    with pytest.raises(UserError, match="is a pipe or a device"):
        read_records(str(tmp_path / "x.txt"))


def test_files_and_folders_that_cannot_be_read_are_counted(tmp_path, monkeypatch):
    write(tmp_path / "a" / "x.txt", "a")
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "c.txt", "c")
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: deny(path) if path.endswith("a") else listdir(path))
    records = read_records(str(tmp_path))
    os.remove(tmp_path / "b.txt")
    assert [row["text"] for row in records] == ["c"]
    assert records.left_out == {"folder that cannot be read": 1, "unreadable file": 1}
    assert records.example["unreadable file"] == f"{tmp_path / 'b.txt'} (No such file or directory)"
    assert records.bytes_read == records.total_bytes


def deny(path):
    raise PermissionError(13, "Permission denied")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are text")
def test_names_that_are_no_text_can_be_reported(tmp_path):
    for name in (b"bad\xff.txt", b"x.\xff", b"log.2"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(b"\xff")
    os.symlink("itself.txt", tmp_path / "itself.txt")
    _, left_out, _ = read(str(tmp_path))
    assert left_out == {"not UTF-8": 1, "file of another format (no suffix)": 2, "unreadable file": 1}
    assert first_place(tmp_path, "not UTF-8") == f"{tmp_path}/bad\\udcff.txt, byte 0"


def test_unknown_sources_say_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "story.txt", "x")
    with pytest.raises(UserError, match=r"stories.txt does not exist \(near it: .*story.txt\)"):
        read_records(str(tmp_path / "stories.txt"))
    with pytest.raises(UserError, match=r"no file matches .*\*.parquet"):
        read_records(str(tmp_path / "*.parquet"))
    for bad in ("", "story.txt,"):
        with pytest.raises(UserError, match="give a path"):
            read_records(bad)
    with pytest.raises(UserError, match="generator cannot be read more than once"):
        read_records({"text": text} for text in "ab")


@pytest.mark.parametrize("suffix, package", [(".zst", "zstandard"), (".parquet", "pyarrow")])
def test_a_missing_package_is_named_before_anything_is_read(tmp_path, monkeypatch, suffix, package):
    monkeypatch.setitem(sys.modules, package, None)
    write(tmp_path / "a.txt", "a")
    write(tmp_path / f"b.jsonl{suffix}".replace(".jsonl.p", ".p"), "b")
    with pytest.raises(UserError, match=f"needs the package {package}: pip install {package}"):
        read_records(str(tmp_path))


# ---- several inputs, names, identities --------------------------------------------------------------------
def test_inputs_come_one_after_the_other_from_a_list_or_between_commas(tmp_path):
    a, b = write(tmp_path / "a.txt", "a"), write(tmp_path / "b" / "b.jsonl", '{"text": "b"}')
    assert texts(f"{b}, {a}") == texts([b, a]) == ["b", "a"]
    assert texts([tmp_path / "a.txt"]) == texts(tmp_path / "a.txt") == ["a"]
    odd = write(tmp_path / "a,b.txt", "a path with a comma")
    assert texts(odd) == ["a path with a comma"]
    records = read_records([a, str(tmp_path / "b")])
    assert (records.name, records.files, records.streamed) == ("a-and-1-more", [a, b], False)


@pytest.mark.parametrize("path, name", [
    ("x/stories.jsonl.gz", "stories"), ("x/my book.txt", "my-book"), ("x/", "x"), ("x/v1.5", "v1"),
    ("src/**/*.py", "src"), ("x/a*/b.txt", "x"), ("x/main.py", "main"), ("/", "files")])
def test_an_input_has_a_short_name(path, name):
    assert module.name_of(path) == name


def test_the_identity_changes_with_the_files_and_not_with_the_part(tmp_path):
    a, b = write(tmp_path / "a.txt", "a"), write(tmp_path / "b.jsonl", lines_of(ROWS))
    first = read_records([a, b]).identity()
    assert json.loads(json.dumps(first)) == first == read_records([a, b], part=(2, 3)).identity()
    assert first == [[[a, 1, os.stat(a).st_mtime_ns]], [[b, os.path.getsize(b), os.stat(b).st_mtime_ns]]]
    os.utime(a, (1, 1))
    assert read_records([a, b]).identity() != first
    rows = [{"text": "a"}, {"text": "b"}]
    assert read_records(rows).identity() == read_records(list(rows)).identity()
    assert read_records(rows).identity() != read_records(rows[:1]).identity()


# ---- parts ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(40))
def test_the_parts_are_the_whole_in_order(tmp_path, seed):
    pick = random.Random(seed)
    for number in range(pick.randrange(1, 7)):
        suffix = pick.choice([".jsonl", ".jsonl", ".ndjson", ".jsonl.gz", ".txt", ".csv", ".json"])
        count = pick.choice([0, 1, 2, 50])
        rows = [{"text": f"{number} {i} " + "é" * pick.choice([0, 1, 10, 1000])} for i in range(count)]
        content = (json.dumps(rows) if suffix == ".json" else lines_of(rows) if "json" in suffix else
                   "text\n" + "\n".join(row["text"] for row in rows))
        content = content.replace("\n", pick.choice(["\n", "\r\n", "\n\n"]))
        content = content.rstrip("\n") if pick.random() < 0.3 else content
        raw = pick.choice([b"", b"\xef\xbb\xbf"]) + content.encode()
        write(tmp_path / f"{number}{suffix}", gzip.compress(raw) if "gz" in suffix else raw)
    whole = read_records(str(tmp_path))
    wanted = list(whole)
    for n in (1, 2, 3, 7, 50, 1000 if seed < 2 else 5):
        parts = [read_records(str(tmp_path), part=(k, n)) for k in range(1, n + 1)]
        assert list(itertools.chain.from_iterable(parts)) == wanted
        assert sum((part.left_out for part in parts), module.Counter()) == whole.left_out
        assert sum((part.noted for part in parts), module.Counter()) == whole.noted
        assert sum(part.total_bytes for part in parts) == whole.total_bytes
        assert all(part.bytes_read == part.total_bytes for part in parts)


def test_the_parts_of_one_large_file_have_about_the_same_size(tmp_path):
    path = write(tmp_path / "x.jsonl", lines_of(ROWS))
    sizes = [sum(len(json.dumps(row)) + 1 for row in read_records(path, part=(k, 4))) for k in (1, 2, 3, 4)]
    assert sum(sizes) == os.path.getsize(path) and max(sizes) - min(sizes) < 500
    later = read_records(write(tmp_path / "y.jsonl", "{}\n" * 100 + "{broken\n"), part=(2, 2))
    assert len(list(later)) == 48
    assert later.example["broken JSON line"].endswith("y.jsonl line (counted from byte 154) 49")


def test_each_of_the_parts_counts_what_is_left_out_once(tmp_path):
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "b.png", "b")
    counts = [read_records(str(tmp_path), part=(k, 3)).left_out for k in (1, 2, 3)]
    assert counts == [{"file of another format (.png)": 1}, {}, {}]
    for k, n in ((0, 2), (3, 2), (1, 0), (-1, 1)):
        with pytest.raises(UserError, match=f"part {k} of {n} does not exist"):
            read_records(str(tmp_path), part=(k, n))
    with pytest.raises(UserError, match="cannot be divided into parts"):
        read_records(ROWS, part=(1, 2))


# ---- large texts ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", [".txt", ".md.gz", ".txt.zst"])
def test_a_large_text_comes_in_pieces_as_often_as_they_are_wanted(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(module, "LARGE", 1000)
    monkeypatch.setattr(module, "BLOCK", 64)
    text = "é海🥊x\r\n" * 500
    raw = ("\ufeff" + text).encode()
    path = write(tmp_path / f"x{suffix}", gzip.compress(raw) if "gz" in suffix else
                 zst(raw) if "zst" in suffix else raw)
    records = read_records(path, lazy=True)
    (record,) = records
    assert isinstance(record["text"], LargeText) and records.noted == {"byte order mark (removed)": 1}
    for _ in range(2):
        pieces = list(record["text"].pieces())
        assert "".join(pieces) == text and len(pieces) > 50
    assert texts(path) == [text]
    assert texts(write(tmp_path / "short.txt", "short"), lazy=True) == ["short"]
    assert len(texts(path, lazy=True, document_separator="\n")) == 500


def test_a_large_text_that_is_none_says_where(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGE", 1000)
    monkeypatch.setattr(module, "BLOCK", 64)
    cut, marked = ("é" * 900).encode() + b"\xc3", b"\xef\xbb\xbf" + b"a" * 2000 + b"\xff"
    for bad, at in ((b"x" * 4999 + b"\xff", 4999), (cut, 1800), (marked, 2003)):
        records = read_records(write(tmp_path / "x.txt", bad), lazy=True)
        for record in records:
            try:
                list(record["text"].pieces())
            except UnicodeDecodeError as error:
                records.give_up(error)
        assert records.example["not UTF-8"] == f"{tmp_path / 'x.txt'}, byte {at:,}"
    records = read_records(write(tmp_path / "x.txt.gz", gzip.compress(b"a" * 5000)[:-4]), lazy=True)
    (text,) = ["".join(record["text"].pieces()) for record in records]
    assert set(text) == {"a"} and len(text) > 1000 and records.left_out == {module.DAMAGED: 1}


# ---- data sets --------------------------------------------------------------------------------------------
@pytest.fixture
def hub(tmp_path, monkeypatch):
    """org/one has a config, org/two has two; from files, by the package's own builders."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "hub" / "one" / "a.jsonl", lines_of(ROWS))
    write(tmp_path / "hub" / "two" / "a.jsonl", lines_of(ROWS[:1]))
    write(tmp_path / "hub" / "two" / "b.jsonl", lines_of(ROWS[1:2]))
    configs = "- config_name: first\n  data_files: a.jsonl\n- config_name: second\n  data_files: b.jsonl\n"
    write(tmp_path / "hub" / "two" / "README.md", f"---\nconfigs:\n{configs}---\n")
    load, calls = datasets.load_dataset, []
    def load_dataset(path, *args, **kwargs):
        calls.append(path)
        if not path.startswith("org/") or not os.path.isdir("hub/" + path[4:]):
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub")
        return load("hub/" + path[4:], *args, cache_dir=str(tmp_path / "cache"), **kwargs)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_a_data_set_is_streamed_by_its_id(hub):
    assert read("org/one")[0] == ROWS
    assert read("org/one", columns=["text"])[0][0] == {"text": ROWS[0]["text"]}
    assert list(read("org/one", columns=["body"])[0][0]) == ["text", "n"]
    assert read("org/two:second")[0] == ROWS[1:2]
    records = read_records("org/two:first")
    assert (records.streamed, records.total_bytes, records.name) == (True, None, "two-first")
    assert records.identity() == [{"data set": "org/two", "config": "first", "split": "train"}]
    assert list(records) and records.bytes_read == len(ROWS[0]["text"])
    write(Path("a.txt"), "a")
    mixed = read_records("a.txt,org/one")
    assert len(list(mixed)) == 301 and mixed.streamed and mixed.total_bytes is None
    with pytest.raises(UserError, match="org/one is a stream, which cannot be divided"):
        read_records("org/one", part=(1, 2))


@pytest.mark.parametrize("source, split, message", [
    ("org/two", "train", "org/two has several configs, first, second: choose one, like org/two:first"),
    ("org/two:third", "train", "org/two has no config 'third': choose one of first, second"),
    ("org/one", "test", "org/one has no split 'test': choose one of train"),
    ("org/none", "train", "org/none does not exist, and no .* data set .*'org/none' doesn't exist")])
def test_what_is_wrong_with_a_data_set_is_said(hub, source, split, message):
    records = read_records(source, split=split)
    assert not hub                                             # nothing is fetched before it is read
    with pytest.raises(UserError, match=message):
        next(iter(records))


def test_a_path_is_not_looked_for_on_the_hub(hub, tmp_path):
    write(tmp_path / "org" / "one" / "a.txt", "a file of mine")
    assert texts("org/one") == ["a file of mine"]
    for slip in ("org/onee", "org/x.jsonl", "./org/x", "/org/x", "x", "data/x", "out/x"):
        with pytest.raises(UserError, match="does not exist"):
            read_records(slip)
    assert not hub


def test_without_the_package_a_missing_path_says_both(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="org/one does not exist; if it is a Hugging Face data set: pip"):
        read_records("org/one")


def test_a_stream_that_breaks_off_is_an_error_and_not_an_end(hub, monkeypatch):
    class Torn:
        column_names = None
        def __iter__(self):
            yield {"text": "a"}
            raise ConnectionError("the line is\ndead")
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", lambda *_, **__: Torn())
    with pytest.raises(UserError, match=r"org/one broke off after 1 records \(the line is dead\)"):
        list(read_records("org/one"))


def test_objects_of_datasets_and_lists_are_read_as_they_are():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    records = read_records(table, columns=["text"])
    assert list(records) == [{"text": row["text"]} for row in ROWS]
    assert records.identity() == [[table._fingerprint]]
    assert records.total_bytes is None and not records.streamed
    stream = table.to_iterable_dataset()
    assert read(stream)[0] == ROWS and read_records(stream).streamed
    assert read_records(stream).identity() == read_records(table.to_iterable_dataset()).identity()
    splits = datasets.DatasetDict({"train": table, "test": table.select([3])})
    assert read(splits, split="test")[0] == ROWS[3:4]
    with pytest.raises(UserError, match="no split 'val': it has train, test"):
        read_records(splits, split="val")
    assert read([{"text": "a"}, 5, "x"])[:2] == ([{"text": "a"}], {"record that is no object": 2})


# ---- standard input ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("content, suffix", [
    (b'\n \n{"text": "a"}\n{"text"', ".jsonl"), (b"\xef\xbb\xbf" + b'{"a": 1}', ".jsonl"),
    (b"Once.\n{}\n", ".txt"),
    (b'[\n {"text": "a"}]', ".json"), (b'{\n "data"', ".json"), (b"[Enter a ghost]", ".txt"),
    (b"1984\n", ".txt"),
    (b"{{ template", ".txt"), (b"\n\n  ", ".txt"), (b"\xff\n", ".txt"), (b'"Yes."\n', ".txt")])
def test_standard_input_becomes_a_file_of_the_right_kind(tmp_path, monkeypatch, content, suffix):
    for packed in (content, gzip.compress(content), zst(content)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(packed)))
        Path(tmp_path / f"spooled{suffix}").unlink(missing_ok=True)
        path = module.spool_stdin(str(tmp_path / "spooled"))
        assert path == str(tmp_path / "spooled") + suffix
        with open(path, "rb") as file:
            assert file.read() == content


def test_standard_input_without_content_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(UserError, match="standard input is empty"):
        module.spool_stdin(str(tmp_path / "x"))
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    with pytest.raises(UserError, match="nothing is piped"):
        module.spool_stdin(str(tmp_path / "x"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(b"text")[:-3])))
    with pytest.raises(UserError, match="standard input is damaged"):
        module.spool_stdin(str(tmp_path / "x"))
    assert not list(tmp_path.iterdir())
