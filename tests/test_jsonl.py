"""The reader of JSON lines: what a line is, and errors that name file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from eaglekit.errors import DataError
from eaglekit.jsonl import read_lines


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path, name: str) -> None:
    rows = [{"text": "one\u2028two\u2029three\x85four"}, {"text": "é"}]
    first, second = (json.dumps(row, ensure_ascii=False).encode() for row in rows)
    content = first + b"\r\n\n" + second.replace(b": ", b":\r") + b"\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert list(read_lines(tmp_path / name)) == [(1, rows[0]), (3, rows[1])]


def test_a_mark_in_front_of_a_file_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\n', encoding="utf-8-sig")
    assert list(read_lines(tmp_path / "a.jsonl")) == [(1, {"n": 1}), (2, {"n": 2})]


@pytest.mark.parametrize(
    ("line", "said"),
    [(b"\xff", "not UTF-8"), (b"{", "not JSON"), (b"9" * 5000, "not JSON"), (b"[]", "a list, expected a JSON object")],
)
def test_a_bad_line_is_named_and_those_before_it_are_read(tmp_path: Path, line: bytes, said: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"{}\n{}\n" + line + b"\n{}\n")
    lines = read_lines(file)
    assert [next(lines), next(lines)] == [(1, {}), (2, {})]
    with pytest.raises(DataError, match=rf"a\.jsonl:3: {said}"):
        next(lines)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.jsonl: no such file"):
        list(read_lines(tmp_path / "x.jsonl"))
    with pytest.raises(DataError, match=r":1: cannot be read on from here \(Is a directory\)"):
        list(read_lines(tmp_path))
    whole = gzip.compress(b'{"n": 1}\n' * 500)
    for number, bad in enumerate((whole[: len(whole) // 2], b"{}\n", whole[:10] + b"\xff" * 99)):
        file = tmp_path / f"{number}.jsonl.gz"
        file.write_bytes(bad)
        with pytest.raises(DataError, match=rf"{number}\.jsonl\.gz:\d+: cannot be read on"):
            list(read_lines(file))
