"""Training text: the forms of rows, what is cut and dropped and counted, and which tokens are answers."""

from __future__ import annotations

import gzip
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from eaglekit.errors import DataError
from eaglekit.train.text.dataset import TrainingText, cut_dialogue, encode_dialogue, encode_prompt, read_training_text
from eaglekit.train.text.forms import is_dataset, read_rows
from tiny import tokenizer

ASK, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TALK = [ASK, ANSWER]
GPT = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


# --- forms


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"turns": ["x\u2028y", "z"], "id": 3}, [{"role": "user", "content": "x\u2028y"}]),
        ({"messages": [{**ASK, "x": 1}, ANSWER], "text": "left aside"}, TALK),
        ({"conversations": TALK}, TALK),
        ({"conversations": GPT}, [{"role": "system", "content": "s"}, *TALK]),
        ({"turns": None, "messages": None, "text": "plain"}, "plain"),
        ({"messages": [{"role": "user", "content": "q", "from": None, "value": None}]}, [ASK]),
    ],
)
def test_a_rows_form_is_seen_by_its_keys(tmp_path: Path, row: dict[str, Any], wanted: Any) -> None:
    assert list(read_rows(lines(tmp_path / "a.jsonl", row))) == [wanted]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(row, ensure_ascii=False).encode() + b"\n\n"))
    assert list(read_rows(tmp_path / "b.jsonl.gz")) == [wanted]


BAD: list[tuple[Any, str]] = [
    ('{"turns": ["a"', "not JSON"),
    ([], "a list"),
    ({"turns": []}, "expected 'turns'"),
    ({"turns": [3]}, "expected 'turns'"),
    ({"prompt": "a"}, r"expected one of .*; got keys \['prompt'\]"),
    ({"text": " "}, "expected 'text'"),
    ({"messages": "a"}, "expected 'messages' to be a list"),
    ({"messages": [{"role": "system", "content": "s"}]}, "got system messages alone"),
    ({"conversations": [ASK, {"role": "bot", "content": "a"}]}, "message 1 of 'conversations' is .*'bot'"),
    ({"conversations": [{"from": "human", "value": None}]}, "message 0"),
]


@pytest.mark.parametrize(("row", "said"), BAD, ids=[said[:20] for _, said in BAD])
def test_a_bad_row_is_named_or_counted(tmp_path: Path, row: Any, said: str) -> None:
    file = lines(tmp_path / "a.jsonl", {"turns": ["a"]}, row, {"messages": TALK})
    rows = read_rows(file)
    next(rows)
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{said}"):
        next(rows)
    bad: list[DataError] = []
    assert len(list(read_rows(file, bad.append))) == 2
    assert [str(e).startswith(f"{file}:2: ") for e in bad] == [True]


def test_a_file_that_cannot_be_read_on_is_an_error_also_where_bad_rows_are_skipped(tmp_path: Path) -> None:
    data = gzip.compress(b"".join(json.dumps({"turns": [f"{i}" * 30]}).encode() + b"\n" for i in range(500)))
    (tmp_path / "b.jsonl.gz").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"b\.jsonl\.gz:\d+: cannot be read on"):
        list(read_rows(tmp_path / "b.jsonl.gz", print))
    with pytest.raises(DataError, match="no such file"):
        list(read_rows(tmp_path / "x.jsonl", print))


class FakeParquet:
    """Stands in for pyarrow's reader, of two batches."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(path)

    def __enter__(self) -> FakeParquet:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def iter_batches(self) -> Any:
        def batch(*rows: Any) -> Any:
            return types.SimpleNamespace(to_pylist=lambda: list(rows))

        yield batch({"text": "one", "turns": None}, {"text": None, "turns": ["two"]})
        yield batch({"text": None, "turns": None})
        raise ValueError("corrupt\npage")


def test_parquet_rows_are_numbered_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", types.SimpleNamespace(ParquetFile=FakeParquet))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pyarrow", types.SimpleNamespace())  # type: ignore[arg-type]
    file = tmp_path / "a.parquet"
    with pytest.raises(DataError, match="no such file"):
        list(read_rows(file))
    file.touch()
    rows = read_rows(file)
    assert [next(rows), next(rows)] == ["one", [{"role": "user", "content": "two"}]]
    with pytest.raises(DataError, match=r"a\.parquet:3: expected one of"):
        next(rows)
    bad: list[DataError] = []
    with pytest.raises(DataError, match=r"a\.parquet:4: cannot be read on from here \(corrupt page\)"):
        list(read_rows(file, bad.append))
    assert len(bad) == 1


def test_parquet_without_its_library_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(DataError, match="pip install pyarrow"):
        list(read_rows(tmp_path / "a.parquet"))


def test_real_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"conversations": GPT, "text": None}, {"conversations": None, "text": "plain"}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert list(read_rows(tmp_path / "a.parquet")) == [[{"role": "system", "content": "s"}, *TALK], "plain"]
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"a\.parquet:1: cannot be read on"):
        list(read_rows(tmp_path / "a.parquet"))


# --- datasets


class FakeLibrary:
    """Stands in for the datasets library: a dataset of two columns, or an error."""

    def __init__(self, rows: list[dict[str, Any]] | Exception) -> None:
        self.rows, self.asked = rows, list[Any]()

    def load_dataset(self, name: str, config: str | None, *, split: str) -> FakeLibrary:
        self.asked.append((name, config, split))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self

    @property
    def column_names(self) -> list[str]:
        assert isinstance(self.rows, list)
        return list(self.rows[0])

    def select_columns(self, names: list[str]) -> list[dict[str, Any]]:
        assert isinstance(self.rows, list)
        return [{name: row[name] for name in names} for row in self.rows]


def fake(monkeypatch: pytest.MonkeyPatch, rows: Any) -> FakeLibrary:
    library = FakeLibrary(rows)
    monkeypatch.setitem(sys.modules, "datasets", library)  # type: ignore[arg-type]
    return library


def test_a_name_of_the_hub_is_told_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "file").touch()
    names = ["org/file", "org/data.jsonl", "org/d.parquet", "data", "a/b/c", "/a/b", "org/a b", "", "../x", "org:test"]
    assert [n for n in names if is_dataset(Path(n))] == ["", "org:test"]  # folders
    names = ["org/name", "o-r.g/name-v1.5_x", "org/name:test", "org/name:all:test", "org"]
    assert [n for n in names if not is_dataset(Path(n))] == []


@pytest.mark.parametrize(
    ("name", "asked", "shown"),
    [
        ("org/name", ("org/name", None, "train"), "org/name:train"),
        ("org/name:test[:5%]", ("org/name", None, "test[:5%]"), "org/name:test[:5%]"),
        ("org/name:test", ("org/name", None, "test"), "org/name:test"),
        ("org/name:all:test", ("org/name", "all", "test"), "org/name:all:test"),
    ],
)
def test_a_datasets_rows_have_the_same_forms(
    name: str, asked: Any, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = fake(monkeypatch, [{"id": 3, "messages": TALK}, {"id": 4, "messages": []}, {"id": 5, "messages": [ASK]}])
    rows = read_rows(Path(name))
    assert next(rows) == TALK
    with pytest.raises(DataError, match=rf"^{re.escape(shown)}:2: expected 'messages' to be a list"):
        next(rows)
    bad: list[DataError] = []
    assert list(read_rows(Path(name), bad.append)) == [TALK, [ASK]]
    assert len(bad) == 1 and library.asked == [asked] * 2


def test_a_dataset_that_cannot_be_read_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = type("DatasetGenerationError", (Exception,), {})("see above")
    broken.__cause__ = ValueError("row 7\nis torn")
    cases: list[tuple[Any, str]] = [
        (ConnectionError("no route"), r"\(ConnectionError: no route\); .*the hub cannot be reached"),
        (FileNotFoundError("no such dataset"), "no such dataset.*expected a file, a folder of"),
        (ValueError("Unknown split 'train'."), "Unknown split.*expected org/name, org/name:split"),
        (broken, r"\(ValueError: row 7 is torn\)"),
        ([{"foo": 1}], "expected a column of turns, messages, conversations, text; got foo"),
        (None, "no such file, and a dataset cannot be read without.*pip install datasets"),
    ]
    for rows, said in cases:
        if rows is None:
            monkeypatch.setitem(sys.modules, "datasets", None)
        else:
            fake(monkeypatch, rows)
        with pytest.raises(DataError, match=rf"^org/name.*{said}"):
            list(read_rows(Path("org/name"), print))


def test_a_real_folder_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    library.disable_progress_bars()
    folder = tmp_path / "data"
    folder.mkdir()
    lines(folder / "train.jsonl", {"conversations": GPT, "text": None, "x": 1}, {"text": "plain", "x": 2}, {"x": 3})
    lines(folder / "test.jsonl", {"conversations": GPT, "text": None, "x": 1})
    rows = read_rows(folder)
    assert [next(rows), next(rows)] == [[{"role": "system", "content": "s"}, *TALK], "plain"]
    with pytest.raises(DataError, match=rf"^{folder}:train:3: expected one of"):
        next(rows)
    assert len(list(read_rows(Path(f"{folder}:test")))) == 1
    with pytest.raises(DataError, match=r"data:nothing: cannot be loaded \(ValueError: Unknown split"):
        list(read_rows(Path(f"{folder}:nothing")))
    found = read_training_text(tokenizer(), [folder], max_prompt_tokens=20, max_tokens=30, skip_bad=True)
    assert (len(found.given), len(found.bad)) == (2, 1)


# --- what becomes of rows


def read(path: Path, *rows: Any, template: bool = True, skip_bad: bool = False) -> TrainingText:
    tok = tokenizer()
    if not template:
        tok.chat_template = None
    file = lines(path / "a.jsonl", *rows)
    return read_training_text(tok, [file], max_prompt_tokens=20, max_tokens=30, skip_bad=skip_bad)


def test_everything_that_is_cut_dropped_or_skipped_is_counted(tmp_path: Path) -> None:
    long = {"role": "user", "content": "q" * 40}
    rows = (
        {"turns": ["short"]},
        {"turns": ["q" * 40]},
        {"messages": TALK},
        {"messages": [ASK, {"role": "assistant", "content": "a" * 40}]},
        {"messages": [long, ANSWER]},
        {"text": "t" * 70},
        {"text": "t"},
        "nonsense",
    )
    found = read(tmp_path, *rows, skip_bad=True)
    assert [len(p) for p in found.prompts] == [8, 43]
    assert [len(d.ids) for d in found.given] == [6, 30, 30, 30, 10]
    assert [len(o) for o in found.openings] == [4, 4, 7, 7, 2]
    summary = found.summary(30)
    assert "\n" not in summary
    assert summary == (
        "data: 7 rows: 2 prompts, 5 dialogues or texts; 1 dialogues cut to 30 tokens; 1 texts cut into 3 pieces of at "
        "most 30 tokens; 3 dropped (1 answered too late, 1 prompts that are too long, 1 texts that are too short); "
        f"1 bad rows skipped, the first: {found.bad[0]}"
    )
    with pytest.raises(DataError, match=r"a\.jsonl:8: not JSON"):
        read(tmp_path, *rows)


def test_nothing_to_train_on_is_an_error_that_says_what_was_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing to train on; data: 0 rows.*1 bad rows skipped.*expected prompts"):
        read(tmp_path, "nonsense", skip_bad=True)
    tok = tokenizer()
    tok.chat_template = "{{ raise_exception('roles\nmust alternate') }}"
    with pytest.raises(DataError, match=r"1 refused by the chat template.*roles must alternate"):
        read_training_text(tok, [lines(tmp_path / "a.jsonl", {"messages": TALK})], max_prompt_tokens=9, max_tokens=9)


@pytest.mark.parametrize("template", [True, False])
def test_all_of_a_plain_text_is_trained(tmp_path: Path, template: bool) -> None:
    found = read(tmp_path, {"text": "plain text"}, template=template)
    dialogue = found.given[0]
    assert tokenizer().decode(dialogue.ids) == "plain text"
    assert dialogue.spans == [(1, 10)] and not dialogue.greedy


# --- which tokens are answers

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<system>be nice<end>\n{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
# No header before an answer, roles must alternate, the system message is part of the first turn.
INST = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set start = messages[0]['content'] + ' ' %}{% set rest = messages[1:] %}"
    "{% else %}{% set start = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% elif m['role'] == 'user' %}[INST] {% if loop.first %}{{ start }}{% endif %}{{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] | trim }} <end>{% endif %}{% endfor %}"
)
# Thoughts are shown in the last answer alone.
THINKS = (
    "{% for m in messages %}<{{ m['role'] }}>{% if loop.last and m['role'] == 'assistant' %}[think]{% endif %}"
    "{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# It says itself which tokens are answers, for those who ask; the text is the same.
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<end>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (CHATML, ["hello<end>\n", "ok\nso<end>\n"]),
        (INST, [" hello <end>", " ok\nso <end>"]),
        (THINKS, ["hello<end>", "[think]ok\nso<end>"]),
        (MARKED, ["hello<end>", "ok\nso<end>"]),
    ],
    ids=["chatml", "inst", "thinks", "marked"],
)
@pytest.mark.parametrize("system", [True, False])
def test_answers_are_found_whatever_the_template(template: str, wanted: list[str], system: bool) -> None:
    tok = tokenizer()
    tok.chat_template = template
    talk = [
        *([{"role": "system", "content": "be brief"}] if system else []),
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "and ok?"},
        {"role": "assistant", "content": "ok\nso"},
    ]
    dialogue = encode_dialogue(tok, talk)
    assert [tok.decode(dialogue.ids[a:b]) for a, b in dialogue.spans] == wanted
    assert dialogue.ids[: dialogue.spans[0][0]] == encode_prompt(tok, talk[:-2])
    assert dialogue.ids[: dialogue.spans[1][0]] == encode_prompt(tok, talk)


def test_answers_are_found_and_cut_by_the_chat_template() -> None:
    tok = tokenizer()
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "ok"},
    ]
    dialogue = encode_dialogue(tok, talk)
    assert cut_dialogue(dialogue, 100) == dialogue
    assert [tok.decode(dialogue.ids[a:b]) for a, b in dialogue.spans] == ["hello<end>", "ok<end>"]
    assert tok.decode(dialogue.ids[: dialogue.spans[0][0]]) == tok.decode(encode_prompt(tok, talk[:1]))
    short = cut_dialogue(dialogue, dialogue.spans[0][0] + 2)
    assert short is not None
    assert [b - a for a, b in short.spans] == [2]
    assert cut_dialogue(encode_dialogue(tok, talk[:1]), 100) is None
    tok.chat_template = None
    plain = encode_dialogue(tok, talk)
    assert tok.decode(plain.ids).startswith("hi\n\nhello\n\nmore")
