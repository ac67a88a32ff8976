"""The target writes dialogues by itself: what they are made of, what is left out, going on after an interruption."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eaglekit.errors import DataError, InputError
from eaglekit.models.hf import HFTarget
from eaglekit.train.features.store import read_index
from eaglekit.train.options import SelfTalkOptions, SynthesisOptions, TrainOptions
from eaglekit.train.pipeline import train_head
from eaglekit.train.text.answers import Finished, Job, generate
from eaglekit.train.text.dataset import Dialogue, encode_dialogue, encode_prompt
from eaglekit.train.text.self_talk import _Stage, self_talk
from eaglekit.train.text.tries import Report, Seen, read_tries
from tiny import llama, tokenizer

SYNTHESIS = SynthesisOptions(max_prompt_tokens=24, max_new_tokens=16, batch_size=4, temperatures=(0.0, 1.0))
OPTIONS = SelfTalkOptions(max_tokens=120, max_user_tokens=60, shared=0.9)
EOS = 256
ENDS = [EOS, *range(24)]  # answers of a random model hardly ever end


class Killed(Exception):
    pass


def talk(path: Path, count: int = 7, fast: bool = True, kill: int = -1, **changes: Any) -> Report:
    """`kill`: stop once so many dialogues were kept."""

    def stop(report: Report) -> None:
        if 0 <= kill <= report.kept:
            raise Killed

    arguments: dict[str, Any] = {"synthesis": SYNTHESIS, "options": OPTIONS, "on_progress": stop, **changes}
    model = llama(head_dim=32 if fast else 8).eval()
    return self_talk(model, tokenizer(), path, count, eos_ids=ENDS, pad_id=0, max_length=256, **arguments)


# --- the generator


@pytest.mark.parametrize("fast", [True, False])
def test_jobs_may_be_added_while_others_are_answered(fast: bool) -> None:
    model = llama(head_dim=32 if fast else 8).eval()

    def job(key: int, prompt: list[int], temperature: float = 0.0, most: int = 5) -> Job:
        return Job(key, tuple(prompt), temperature, most, frozenset([EOS]), key)

    queue = deque([job(i, [i + 1, 2, 3], most=3 + i) for i in range(5)])
    done: dict[int, Finished] = {}
    for group in generate(model, queue, batch_size=2, max_length=24, pad_id=0, features=torch.float32, weights="fp32"):
        for finished in group:
            kept = None if finished.features is None else finished.features.clone()
            done[finished.job.key] = Finished(finished.job, finished.answer, kept)
            if finished.job.key < 20:  # also behind the last one
                queue.append(job(finished.job.key + 10, [*finished.job.prompt, *finished.answer][:12]))
    assert sorted(done) == [*range(5), *range(10, 15), *range(20, 25)]
    for finished in done.values():
        ids = [*finished.job.prompt, *finished.answer]
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_hidden_states=True)
        start = len(finished.job.prompt)
        assert len(finished.answer) == finished.job.max_new_tokens or finished.answer[-1] == EOS
        assert EOS not in finished.answer[:-1]
        assert finished.answer == out.logits[0, start - 1 : -1].argmax(-1).tolist()
        if fast:
            assert finished.features is not None
            torch.testing.assert_close(finished.features, out.hidden_states[-1][0, :-1], rtol=1e-3, atol=1e-3)
        else:
            assert finished.features is None


def test_an_answer_depends_on_its_job_alone() -> None:
    model = llama(head_dim=32).eval()
    jobs = [Job(i, (i + 1, *range(i)), 0.9, 8, frozenset([EOS]), 77 + i) for i in range(9)]

    def run(some: list[Job], batch_size: int) -> dict[int, list[int]]:
        groups = generate(model, deque(some), batch_size=batch_size, max_length=30, pad_id=0)
        return {f.job.key: f.answer for group in groups for f in group}

    assert run(jobs, 1) == run(jobs[::-1], 4)
    assert list(generate(model, deque(), batch_size=4, max_length=30, pad_id=0)) == []


# --- dialogues


@pytest.mark.parametrize("fast", [True, False])
def test_dialogues_are_the_templates_and_the_targets(tmp_path: Path, fast: bool) -> None:
    read: list[tuple[list[int], Tensor]] = []

    def sink(dialogue: Dialogue, features: Tensor) -> None:
        read.append((dialogue.ids, features.clone()))

    report = talk(tmp_path / "t.jsonl", 16, fast=fast, on_features=sink)
    tries = list(read_tries(tmp_path / "t.jsonl"))
    kept = [t for t in tries if t.dialogue is not None]
    assert (report.kept, report.tries, len(kept)) == (16, len(tries), 16)
    assert report.dropped.total() == len(tries) - 16 > 0
    tok, model = tokenizer(), llama(head_dim=32 if fast else 8).eval()
    deep = 0
    for t in kept:
        dialogue = t.dialogue
        assert dialogue is not None
        turns = [m["role"] for m in t.messages]
        assert turns == ["user", "assistant"] * len(dialogue.spans)
        deep += len(dialogue.spans) == 2
        assert all(m["content"].strip() for m in t.messages)
        start, end = dialogue.spans[-1]
        assert end == len(dialogue.ids) and dialogue.ids[:start] == encode_prompt(tok, t.messages[:-1])
        whole = encode_dialogue(tok, t.messages)
        assert whole is not None and [a for a, _ in whole.spans] == [a for a, _ in dialogue.spans]
        assert whole.spans[:-1] == dialogue.spans[:-1]
        assert dialogue.greedy == (t.number % 2 == 0)
        if dialogue.greedy and not fast:
            with torch.no_grad():
                best = model(torch.tensor([dialogue.ids])).logits[0, start - 1 : end - 1].argmax(-1)
            assert dialogue.ids[start:end] == best.tolist()
    assert deep or not fast
    if fast:
        assert [ids for ids, _ in read] == [t.dialogue.ids for t in kept if t.dialogue]
        with torch.no_grad():
            wanted = model.model(torch.tensor([read[0][0]])).last_hidden_state[0, :-1]
        torch.testing.assert_close(read[0][1].float(), wanted, rtol=0.2, atol=0.2)
    else:
        assert read == []


@pytest.mark.parametrize("fast", [True, False])
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(tmp_path: Path, fast: bool) -> None:
    whole = talk(tmp_path / "whole.jsonl", 9, fast=fast)
    file = tmp_path / "killed.jsonl"
    for kill in (1, 4):
        with pytest.raises(Killed):
            talk(file, 9, fast=fast, kill=kill)
        with file.open("a") as f:
            f.write('{"try": 99, "mess')
    again = talk(file, 9, fast=fast)
    assert file.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert again == whole
    talk(file, 5, fast=fast)  # fewer are there already
    assert file.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    talk(file, 11, fast=fast)
    assert file.read_bytes().startswith((tmp_path / "whole.jsonl").read_bytes())
    talk(tmp_path / "other.jsonl", 9, fast=fast, synthesis=SynthesisOptions(**{**vars(SYNTHESIS), "seed": 1}))
    assert (tmp_path / "other.jsonl").read_bytes() != (tmp_path / "whole.jsonl").read_bytes()


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    report = talk(tmp_path / "t.jsonl", 6, options=SelfTalkOptions(max_tokens=120, max_user_tokens=12, shared=0.9))
    assert report.dropped["unfinished"] > 0
    assert "\n" not in report.summary()
    assert (
        f"6 dialogues, {report.turns} answers of {report.tokens} tokens, from {report.tries} tries" in report.summary()
    )
    assert f"{report.dropped['unfinished']} unfinished" in report.summary()
    with pytest.raises(DataError, match=r"0 dialogues.*from \d+ tries.*hardly talks by itself.*--data FILE"):
        talk(tmp_path / "u.jsonl", 1, options=SelfTalkOptions(loop_tokens=1, loop_times=1))


def test_loops_and_near_duplicates() -> None:
    stage = _Stage(tokenizer(), frozenset([EOS]), SYNTHESIS, SelfTalkOptions(), 100)
    assert stage.loops([7] * 11) and not stage.loops([7] * 10)
    assert stage.loops(list(range(8)) * 4) and not stage.loops([*list(range(8)) * 3, *range(9, 16)])
    assert not stage.loops([])

    def messages(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]

    seen = Seen(SelfTalkOptions())
    words = [f"w{i}" for i in range(100)]
    assert seen.add(messages(" ".join(words)))
    assert not seen.add(messages(" ".join(words).upper() + "!"))
    assert not seen.add(messages(" ".join([*words[:70], "other", *words[80:]])))
    assert seen.add(messages(" ".join([*words[:20], *[f"v{i}" for i in range(80)]])))
    assert seen.add(messages("short"))
    assert not seen.add(messages("Short."))


def test_a_users_text_ends_where_the_template_goes_on() -> None:
    tok = tokenizer()
    tok.chat_template = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
    stage = _Stage(tok, frozenset([EOS]), SYNTHESIS, SelfTalkOptions(), 100)
    header, closing = stage.header([])
    assert (tok.decode(header), closing) == ("[INST]", "[/INST]")
    assert stage.user_ends == {256, 257, 258, 259}
    tok.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(InputError, match="puts nothing before"):
        _Stage(tok, frozenset(), SYNTHESIS, SelfTalkOptions(), 100)
    tok.chat_template = "<user>"
    with pytest.raises(DataError, match="does not show"):
        _Stage(tok, frozenset(), SYNTHESIS, SelfTalkOptions(), 100)
    tok.chat_template = None
    with pytest.raises(InputError, match=r"no chat template.*--data FILE"):
        _Stage(tok, frozenset(), SYNTHESIS, SelfTalkOptions(), 100)
    with pytest.raises(InputError, match="1 tokens are too few"):
        _Stage(tokenizer(), frozenset(), SYNTHESIS, SelfTalkOptions(), 1)
    with pytest.raises(InputError, match="turns is 0; expected at least 1"):
        SelfTalkOptions(turns=0)


def test_a_file_that_is_no_record_of_tries_is_named(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    for row in ({"try": 1, "dropped": "loops"}, {"try": 0}, {"try": 0, "spans": [1], "messages": [], "ids": []}):
        file.write_text(json.dumps(row) + "\n")
        with pytest.raises(DataError, match=r"t\.jsonl:1: not a try"):
            talk(file)


# --- from a model's name to a head


def test_a_head_from_no_data_at_all(tmp_path: Path) -> None:
    options = TrainOptions(
        epochs=1.0, batch_tokens=200, warmup_steps=2, vocabulary=24, heldout=2, linear_start=False, bfloat16=False
    )
    target = HFTarget(llama(head_dim=32).eval(), "tiny")
    said: list[str] = []

    def run(count: int | None, **changes: Any) -> Any:
        arguments: dict[str, Any] = {"synthesis": SYNTHESIS, "talk": OPTIONS, "progress": said.append, **changes}
        return train_head(
            target, tokenizer(), target_name="tiny", files=[], output=tmp_path, options=options, answers=count,
            **arguments,
        )  # fmt: skip

    result = run(12)
    assert any(line.startswith("self-talk: 12 dialogues") for line in said)
    assert len(read_index(tmp_path / "data" / "features")) == 12
    again = run(12, resume=True)
    assert (again.best, again.steps) == (result.best, result.steps)
    with pytest.raises(InputError, match="there is a training already"):
        run(14)
    (tmp_path / "checkpoint.pt").unlink()
    run(14)
    assert len(read_index(tmp_path / "data" / "features")) == 14
    (tmp_path / "checkpoint.pt").unlink()
    with pytest.raises(DataError, match="max_user_tokens 60 there, 50 now"):
        run(12, talk=SelfTalkOptions(max_tokens=120, max_user_tokens=50, shared=0.9))
    with pytest.raises(InputError, match=r"--data FILE.*--synthesize N"):
        run(None)


def test_given_dialogues_and_texts_alone_are_enough(tmp_path: Path) -> None:
    options = TrainOptions(
        epochs=1.0, batch_tokens=200, warmup_steps=2, vocabulary=24, heldout=2, linear_start=False, bfloat16=False
    )
    for template in (True, False):
        folder = tmp_path / str(template)
        folder.mkdir()
        file = folder / "a.jsonl"
        file.write_text("".join(json.dumps({"text": f"once upon a time there were {i}"}) + "\n" for i in range(20)))
        tok, said = tokenizer(), []
        if not template:
            tok.chat_template = None
        train_head(
            HFTarget(llama(head_dim=32).eval(), "tiny"), tok, target_name="tiny", files=[file], output=folder,
            options=options, synthesis=SYNTHESIS, progress=said.append,
        )  # fmt: skip
        assert said[0] == "data: 20 rows: 0 prompts, 20 dialogues or texts"
        assert len(read_index(folder / "data" / "features")) == 22  # two openings were answered
