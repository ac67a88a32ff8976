"""The front door: prompts, errors, a model's own generation_config, chats (behaviours 8 to 14, 35)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import tiny
from conftest import CONTEXT, byte_tokenizer, new_llama
from eaglekit.api import Chat, Model
from eaglekit.bench.lossless import tiny_head
from eaglekit.core.tree import TreeShape
from eaglekit.errors import HeadError, InputError, TreeError
from eaglekit.models.defaults import GenerationDefaults
from eaglekit.models.head import EagleHead
from eaglekit.models.hf import HFTarget
from eaglekit.testing import TableTarget

PROMPT = [5, 17, 3, 42, 8, 23]
BUSHY = TreeShape.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


def hf_ids(llama: Any, prompt: list[int], n: int, **options: Any) -> list[int]:
    """New ids of transformers' own greedy `generate`, with the model's own generation_config."""
    ids = torch.tensor([prompt])
    out = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, **options)
    return [int(i) for i in out[0, len(prompt) :]]


def with_config(llama: Any, **values: Any) -> Any:
    """The same model with another generation_config."""
    changed = copy.copy(llama)
    changed.generation_config = tf.GenerationConfig(bos_token_id=0, pad_token_id=0, **values)
    return changed


def wrapped(llama: Any, head: EagleHead | None, tokenizer: Any = None) -> Model:
    return Model.wrap(HFTarget(llama, "tiny"), tokenizer, head)


# --- prompts


def test_every_kind_of_prompt_gives_the_same_answer(talker: Model) -> None:
    text = "hi you"
    templated = "<|user|>hi you</s><|assistant|>"
    ids = list(talker.tokenizer(templated)["input_ids"])
    assert len(ids) == len(text) + 3
    prompts: list[Any] = [
        text,
        [{"role": "user", "content": text}],
        ({"role": "user", "content": text},),
        ids,
        tuple(ids),
        torch.tensor(ids),
        torch.tensor([ids]),
        torch.tensor(ids, dtype=torch.int32),
    ]
    answers = [talker.generate(p, max_new_tokens=12) for p in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert talker.encode(prompt) == ids
        assert answer.token_ids == answers[0].token_ids and answer.text == answers[0].text
        assert answer.prompt_tokens == len(ids)


def test_a_raw_string_is_not_templated(talker: Model, target: HFTarget) -> None:
    raw = list(talker.tokenizer("hi")["input_ids"])
    assert talker.encode("hi", chat_template=False) == raw
    assert Model.wrap(target, byte_tokenizer(template=None)).encode("hi") == raw
    assert talker.generate("hi", max_new_tokens=5, chat_template=False).prompt_tokens == 2


def test_messages_may_hold_a_system_message_and_earlier_turns(talker: Model) -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    wanted = "<|system|>be kind</s><|user|>a</s><|assistant|>b</s><|user|>c</s><|assistant|>"
    assert talker.encode(messages) == list(talker.tokenizer(wanted)["input_ids"])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        (None, "got NoneType; expected a string"),
        (7, "got int; expected a string"),
        (b"hi", "got bytes; expected a string"),
        ({"role": "user", "content": "hi"}, "got dict; expected a string"),
        ([1, 2.5], "message 0 is 1"),
        ([True, False], "message 0 is True"),
        (["hi"], "message 0 is 'hi'; expected a dict with strings 'role' and 'content'"),
        ([{"role": "user"}], "message 0"),
        ([{"role": "user", "content": None}], "message 0"),
        ([{"role": "user", "content": "a"}, {"role": 1, "content": "b"}], "message 1"),
        (torch.tensor([0.5, 1.0]), "float32 tensor of shape"),
        (torch.tensor([[1, 2], [3, 4]]), r"tensor of shape \(2, 2\)"),
        (torch.tensor(3), "tensor of shape"),
        (torch.tensor([], dtype=torch.int64), "no tokens"),
        ([1, 64], "token id 64 is not in the target's vocabulary"),
        ([1] * CONTEXT, "context holds"),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else x[:20],
)
def test_a_bad_prompt_is_an_input_error_that_says_why(talker: Model, prompt: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        talker.stream(prompt, max_new_tokens=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": 1, "top_p": 0, "top_k": -1}, "top_p=0.*top_k=-1"),
        ({"min_p": 2}, "min_p=2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": True}, "seed=True"),
        ({"seed": 2**63}, "seed="),
        ({"stop": [""]}, "stop="),
        ({"stop": ["a", 3]}, "stop="),
        ({"stop": 3}, "stop=3: expected a string or a list of strings"),
        ({"method": "medusa"}, "'medusa'.*auto, eagle, lookup, plain"),
        ({"tree": "papre"}, "'papre'.*expected 'paper'"),
        ({"tree": "chain:0"}, "chain of 0"),
        ({"tree": 5}, "tree=5: expected 'paper'"),
        ({"tree": [[0]]}, r"tree=\[\[0\]\]: expected"),
        ({"logits_processor": lambda ids, scores: scores}, "logits_processor=.*list of callables"),
        ({"logits_processor": [3]}, r"logits_processor=\[3\]"),
        ({"max_new_tokens": CONTEXT}, "context holds"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_bad_option_is_an_input_error_that_names_it(
    talker: Model, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was computed")

    monkeypatch.setattr(HFTarget, "forward", forbidden)
    with pytest.raises(InputError, match=words):
        talker.stream("hi", **{"max_new_tokens": 4, **options})


def test_an_unknown_option_is_an_error(talker: Model) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        talker.generate("hi", max_tokens=3)


def test_without_a_tokenizer_text_is_an_error(model: Model) -> None:
    for prompt in ("hi", [{"role": "user", "content": "hi"}]):
        with pytest.raises(InputError, match=r"no tokenizer|no chat template"):
            model.generate(prompt)
    with pytest.raises(InputError, match="tokenizer"):
        model.generate(PROMPT, stop="a")


def test_messages_without_a_chat_template_are_an_error(target: HFTarget, head: EagleHead) -> None:
    model = Model.wrap(target, byte_tokenizer(template=None), head)
    with pytest.raises(InputError, match="no chat template"):
        model.generate([{"role": "user", "content": "hi"}])


def test_a_template_that_refuses_messages_is_an_input_error(target: HFTarget, head: EagleHead) -> None:
    model = Model.wrap(target, byte_tokenizer("{{ raise_exception('roles must alternate') }}"), head)
    with pytest.raises(InputError, match="roles must alternate"):
        model.generate("hi")


def test_no_head_is_a_head_error_and_plain_still_works(target: HFTarget) -> None:
    model = Model.wrap(target)
    with pytest.raises(HeadError, match="needs a draft head"):
        model.stream(PROMPT, max_new_tokens=4, method="eagle")
    with pytest.raises(HeadError):
        model.stream(PROMPT, max_new_tokens=4, tree="chain:2")  # a tree is a wish for EAGLE
    with pytest.raises(HeadError):
        model.chat(method="eagle")
    plain = model.generate(PROMPT, max_new_tokens=12, method="plain").token_ids
    assert len(plain) == 12
    assert model.generate(PROMPT, max_new_tokens=12).token_ids == plain


# --- answers


@pytest.mark.parametrize("tree", ["paper", "chain:4", BUSHY, "file"], ids=["paper", "chain", "shape", "file"])
def test_eagle_plain_and_transformers_give_the_same_ids(llama: Any, model: Model, tree: Any, tmp_path: Path) -> None:
    if tree == "file":
        tree = str(tmp_path / "tree.json")
        Path(tree).write_text(json.dumps([[0], [1], [0, 0], [0, 1]]), encoding="utf-8")
    eagle = model.generate(PROMPT, max_new_tokens=40, tree=tree)
    plain = model.generate(PROMPT, max_new_tokens=40, tree=tree, method="plain")
    assert eagle.token_ids == plain.token_ids == hf_ids(llama, PROMPT, 40)
    assert eagle.finish_reason == "length" and plain.stats.drafted == 0 < eagle.stats.drafted
    assert len(set(eagle.token_ids)) > 10  # an answer worth comparing


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_same_for_other_models_and_up_to_the_context_limit(seed: int) -> None:  # behaviours 1 and 9
    llama = new_llama(seed, vocab=64, context=64)
    model = wrapped(llama, None)
    model.head = tiny_head(model.target, seed)
    n = 64 - len(PROMPT)
    assert model.generate(PROMPT, max_new_tokens=n).token_ids == hf_ids(llama, PROMPT, n)
    with pytest.raises(InputError, match=f"max_new_tokens to {n} or less"):
        model.generate(PROMPT, max_new_tokens=n + 1)


@pytest.mark.parametrize("method", ["eagle", "plain"])
def test_no_tokens_asked_for_gives_an_empty_answer(model: Model, method: Any) -> None:  # behaviour 9
    answer = model.generate(PROMPT, max_new_tokens=0, method=method)
    assert (answer.token_ids, answer.text, answer.finish_reason, answer.prompt_tokens) == ([], "", "length", 6)
    assert answer.stats.tau == 0.0


def test_text_is_what_the_tokenizer_makes_of_the_ids(talker: Model) -> None:
    for n in (1, 7, 30):
        answer = talker.generate("hello", max_new_tokens=n)
        whole = talker.tokenizer.decode(answer.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert answer.text == whole.rstrip("\ufffd")  # half a character at the end is not shown


def test_stream_gives_the_pieces_of_generate(talker: Model) -> None:
    stream = talker.stream("hello", max_new_tokens=20, tree=BUSHY, logprobs=True)
    pieces = list(stream)
    answer = talker.generate("hello", max_new_tokens=20, tree=BUSHY, logprobs=True)
    assert [t for p in pieces for t in p.token_ids] == answer.token_ids
    assert "".join(p.text for p in pieces) == answer.text
    assert answer.logprobs is not None and [x for p in pieces for x in p.logprobs or ()] == answer.logprobs
    again = stream.result()  # all of what was read
    assert (again.token_ids, again.text, again.logprobs) == (answer.token_ids, answer.text, answer.logprobs)
    assert "logprobs" not in talker.generate("hello", max_new_tokens=2).to_dict()


def test_an_answer_can_be_written_as_json(talker: Model) -> None:
    answer = talker.generate("hello", max_new_tokens=9, logprobs=True)
    data = json.loads(json.dumps(answer.to_dict()))
    assert data["token_ids"] == answer.token_ids and data["stats"]["new_tokens"] == 9
    assert data["finish_reason"] == "length" and len(data["logprobs"]) == 9


def test_a_stream_closed_early_computes_nothing_more(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = model.stream(PROMPT, max_new_tokens=30)
    first = [next(stream), next(stream)]
    stream.close()
    monkeypatch.setattr(HFTarget, "forward", lambda *_: pytest.fail("something was computed"))
    result = stream.result()
    assert result.token_ids == [t for p in first for t in p.token_ids]


@pytest.mark.parametrize("method", ["eagle", "plain"])
def test_a_seed_repeats_an_answer_whatever_the_global_generator_does(model: Model, method: Any) -> None:  # 14
    def run(seed: int | None) -> list[int]:
        return model.generate(PROMPT, max_new_tokens=12, temperature=1.0, seed=seed, method=method).token_ids

    first = [run(seed) for seed in range(4)]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert [run(seed) for seed in range(4)] == first
    assert len({tuple(run(None)) for _ in range(4)}) > 1
    assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(ids) for ids in first}) > 1


def test_one_request_leaves_no_trace_in_the_next(model: Model) -> None:  # behaviour 35
    before = model.generate(PROMPT, max_new_tokens=15)
    model.generate([9, 9], max_new_tokens=40, temperature=2.0, seed=1, repetition_penalty=2.0)
    with pytest.raises(ZeroDivisionError):
        model.generate(PROMPT, max_new_tokens=15, logits_processor=[lambda ids, scores: 1 / 0])
    abandoned = model.stream(PROMPT, max_new_tokens=30)
    next(abandoned)
    assert model.generate(PROMPT, max_new_tokens=15).token_ids == before.token_ids


def test_the_model_itself_is_not_changed(llama: Any, head: EagleHead) -> None:
    own = copy.deepcopy(llama)
    names = set(vars(own))
    weights = {k: v.clone() for k, v in own.state_dict().items()}
    model = wrapped(own, head)
    model.generate(PROMPT, max_new_tokens=20)
    model.generate(PROMPT, max_new_tokens=20, temperature=1.0, seed=1)
    assert set(vars(own)) == names and not own._forward_hooks and not own._forward_pre_hooks
    assert all(torch.equal(v, weights[k]) for k, v in own.state_dict().items())


# --- the model's own generation_config: the same ids as transformers

CONFIGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.05},
    "large repetition_penalty": {"repetition_penalty": 2.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 25, "eos_token_id": list(range(20, 45))},
    "min_length": {"min_length": 25, "eos_token_id": list(range(20, 45))},
    "suppress_tokens": {"suppress_tokens": list(range(0, 64, 3))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(32))},
    "bad_words_ids": {"bad_words_ids": [[i] for i in range(0, 64, 5)] + [[i, i] for i in range(64)]},
    "sequence_bias": {"sequence_bias": [[[7], 3.0], [[8, 9], 4.0], [[10], -9.0]]},
    "all at once": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 5,
        "suppress_tokens": [1, 2, 30],
        "eos_token_id": [11, 12],
    },
}


@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS.keys())
def test_generation_config_is_honoured_as_transformers_does(
    llama: Any, head: EagleHead, values: dict[str, Any]
) -> None:  # behaviours 12 and 13
    changed = with_config(llama, **values)
    model = wrapped(changed, head)
    assert model.defaults.notes == ()
    different = 0
    for prompt in (PROMPT, [33, 34, 33]):
        expected = hf_ids(changed, prompt, 30)
        assert model.generate(prompt, max_new_tokens=30, tree=BUSHY).token_ids == expected
        different += expected != hf_ids(llama, prompt, 30)
    assert model.generate([60], max_new_tokens=30, method="plain").token_ids == hf_ids(changed, [60], 30)
    assert different  # it does change answers


@pytest.mark.parametrize("kind", ["one", "list", "tokenizer's", "config's"])
def test_eos_ends_the_answer_where_transformers_ends_it(llama: Any, head: EagleHead, kind: str) -> None:  # behaviour 8
    whole = hf_ids(llama, PROMPT, 30)
    eos = next(t for i, t in enumerate(whole) if i >= 6 and t not in whole[:i])
    own = copy.deepcopy(llama)
    tokenizer = None
    if kind == "tokenizer's":
        tokenizer = byte_tokenizer()
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos)
    elif kind == "config's":
        own.config.eos_token_id = eos
        own.generation_config.eos_token_id = None
    else:
        own.generation_config.eos_token_id = eos if kind == "one" else [63, eos]
    answer = wrapped(own, head, tokenizer).generate(PROMPT, max_new_tokens=30, logprobs=True)
    assert answer.token_ids == whole[: whole.index(eos) + 1]
    assert answer.finish_reason == "stop" and len(answer.logprobs or ()) == len(answer.token_ids)
    assert answer.stats.new_tokens == len(answer.token_ids)


def test_without_any_eos_the_answer_runs_to_its_limit(model: Model) -> None:  # behaviour 8
    assert model.defaults.eos_ids == ()
    assert model.generate(PROMPT, max_new_tokens=60).finish_reason == "length"


@pytest.mark.parametrize("own", [True, False], ids=["generation_config", "request"])
def test_stop_strings_end_ids_where_transformers_ends_them(
    llama: Any, head: EagleHead, tokenizer: Any, own: bool
) -> None:  # behaviours 10 and 12
    text = wrapped(llama, head, tokenizer).generate([*PROMPT], max_new_tokens=40).text
    at = next(i for i in range(10, 30) if text[i : i + 3].isascii() and text.find(text[i : i + 3]) == i)
    stop = [text[at : at + 3], "qqq"]
    changed = with_config(llama, stop_strings=stop) if own else llama
    model = wrapped(changed, head, tokenizer)
    expected = hf_ids(llama, PROMPT, 40, stop_strings=stop, tokenizer=tokenizer)
    for method in ("eagle", "plain"):
        answer = model.generate(PROMPT, max_new_tokens=40, stop=() if own else stop, method=method)
        assert answer.token_ids == expected and len(expected) < 40
        assert answer.text == text[:at] and answer.finish_reason == "stop"


def test_a_stop_string_of_the_request_comes_on_top_of_the_model_s(llama: Any, head: EagleHead, tokenizer: Any) -> None:
    text = wrapped(llama, head, tokenizer).generate(PROMPT, max_new_tokens=40).text
    model = wrapped(with_config(llama, stop_strings="qqq"), head, tokenizer)
    assert model.defaults.stop == ("qqq",)
    answer = model.generate(PROMPT, max_new_tokens=40, stop=text[5])
    assert answer.text == text[: text.index(text[5])]


def test_sampling_values_of_the_model_are_defaults_that_a_request_overrides(llama: Any, head: EagleHead) -> None:  # 12
    model = wrapped(with_config(llama, do_sample=True, temperature=0.7, top_k=1, top_p=0.9, min_p=0.1), head)
    own = model.defaults.sampling
    assert (own.top_k, own.top_p, own.min_p, own.temperature) == (1, 0.9, 0.1, 0.0)
    greedy = model.generate(PROMPT, max_new_tokens=20).token_ids
    assert model.generate(PROMPT, max_new_tokens=20, temperature=2.0, seed=1).token_ids == greedy  # top_k=1
    free = model.generate(PROMPT, max_new_tokens=20, temperature=2.0, seed=1, top_k=0, top_p=1.0, min_p=0.0)
    assert free.token_ids != greedy
    penalised = wrapped(with_config(llama, repetition_penalty=1.5), head)
    assert penalised.generate(PROMPT, max_new_tokens=35, repetition_penalty=1.0).token_ids == hf_ids(llama, PROMPT, 35)


def test_a_model_that_asks_for_sampling_is_decoded_greedily_and_says_so(llama: Any, head: EagleHead) -> None:  # 12
    model = wrapped(with_config(llama, do_sample=True, temperature=0.7), head)
    assert len(model.defaults.notes) == 1
    assert "asks for sampling (temperature 0.7)" in model.defaults.notes[0]
    assert model.generate(PROMPT, max_new_tokens=20).token_ids == hf_ids(llama, PROMPT, 20)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("guidance_scale", 1.5),
        ("typical_p", 0.9),
        ("epsilon_cutoff", 0.001),
        ("eta_cutoff", 0.001),
        ("forced_bos_token_id", 3),
        ("forced_eos_token_id", 3),
        ("exponential_decay_length_penalty", (5, 1.1)),
        ("encoder_repetition_penalty", 1.2),
        ("encoder_no_repeat_ngram_size", 2),
        ("max_time", 5.0),
        ("token_healing", True),
        ("watermarking_config", {"bias": 2.0}),
    ],
)
def test_what_is_not_carried_out_is_reported(name: str, value: Any) -> None:  # behaviour 12
    notes = GenerationDefaults.of(tf.GenerationConfig(**{name: value})).notes
    assert len(notes) == 1 and name in notes[0] and "not carried out" in notes[0]


@pytest.mark.parametrize(
    "values", [{}, {"num_beams": 1}, {"typical_p": 1.0}, {"guidance_scale": 1.0}, {"epsilon_cutoff": 0.0}]
)
def test_what_is_off_is_not_reported(values: dict[str, Any]) -> None:
    assert GenerationDefaults.of(tf.GenerationConfig(**values)).notes == ()
    assert GenerationDefaults.of(None) == GenerationDefaults()


def ban_even(ids: Tensor, scores: Tensor) -> Tensor:
    """Even tokens are banned behind odd ones."""
    banned = (torch.arange(scores.shape[-1]) % 2 == 0) & (ids[:, -1:] % 2 == 1)
    return scores.masked_fill(banned, float("-inf"))


class CountDown(tf.LogitsProcessor):
    """Depends on the length of the text."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, input_ids.shape[1] % 64] += 4.0
        return scores


class Nostalgia(tf.LogitsProcessor):
    """Favours what the text holds: before a penalty it would do something else than behind it."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.zeros_like(scores).scatter(-1, input_ids, 3.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.LogitsProcessorList([CountDown()]),
        lambda: tf.LogitsProcessorList([Nostalgia()]),
        lambda: tf.LogitsProcessorList([ban_even]),
        lambda: tf.LogitsProcessorList([CountDown(), ban_even, tf.NoRepeatNGramLogitsProcessor(2)]),
    ],
    ids=["by length", "order matters", "by last token", "three"],
)
def test_custom_processors_give_the_ids_of_transformers(
    llama: Any, head: EagleHead, make: Callable[[], Any]
) -> None:  # behaviour 13
    penalised = with_config(llama, repetition_penalty=2.5)
    expected = hf_ids(penalised, PROMPT, 35, logits_processor=make())
    assert expected != hf_ids(penalised, PROMPT, 35)
    model = wrapped(penalised, head)
    for method in ("eagle", "plain"):
        got = model.generate(PROMPT, max_new_tokens=35, logits_processor=make(), method=method)
        assert got.token_ids == expected


# --- chat


def say(chat: Chat, text: str, **options: Any) -> tuple[str, list[int]]:
    pieces = list(chat.send(text, **{"max_new_tokens": 6, **options}))
    return "".join(p.text for p in pieces), [t for p in pieces for t in p.token_ids]


def test_a_chat_answers_as_generate_does_with_the_whole_conversation(talker: Model) -> None:
    chat = talker.chat(system="be", tree=BUSHY)
    for number, text in enumerate(("hi", "and", "so")):
        messages = [*chat.messages, {"role": "user", "content": text}]
        options = {"temperature": 0.9 if number == 2 else 0.0, "seed": number}
        said, ids = say(chat, text, **options)
        alone = talker.generate(messages, max_new_tokens=6, tree=BUSHY, **options)
        assert (said, ids) == (alone.text, alone.token_ids)
        assert chat.messages == [*messages, {"role": "assistant", "content": said}]
        if number:
            assert chat.last_stats.cached_prompt_tokens > 0
            assert chat.last_stats.prompt_tokens == len(talker.encode(messages))


def test_what_both_caches_hold_of_earlier_turns_is_not_read_again(talker: Model) -> None:
    chat = talker.chat()
    prompt = talker.encode([{"role": "user", "content": "hello there"}])
    say(chat, "hello there")
    say(chat, "good")
    assert chat.last_stats.cached_prompt_tokens >= len(prompt) - 1


def test_reset_begins_anew(talker: Model) -> None:
    chat = talker.chat(system="be")
    first = say(chat, "hi")
    say(chat, "more")
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "be"}]
    assert say(chat, "hi") == first


def test_an_abandoned_answer_counts_with_what_was_read(talker: Model) -> None:
    chat = talker.chat()
    pieces = chat.send("hello", max_new_tokens=20)
    text = next(pieces).text + next(pieces).text
    pieces.close()
    assert chat.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}]
    messages = [*chat.messages, {"role": "user", "content": "on"}]
    assert say(chat, "on")[1] == talker.generate(messages, max_new_tokens=6).token_ids


def test_the_next_message_ends_an_answer_that_was_left_open(talker: Model) -> None:
    chat = talker.chat()
    left = chat.send("hello", max_new_tokens=20)
    text = next(left).text
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "on"},
    ]
    said, ids = say(chat, "on")
    assert ids == talker.generate(messages, max_new_tokens=6).token_ids
    assert list(left) == []
    assert chat.messages == [*messages, {"role": "assistant", "content": said}]


def test_reset_ends_an_answer_that_was_left_open(talker: Model) -> None:
    chat = talker.chat()
    left = chat.send("hello", max_new_tokens=20)
    next(left)
    chat.reset()
    assert list(left) == [] and chat.messages == []


def test_an_answer_that_failed_leaves_a_chat_that_goes_on(talker: Model) -> None:
    chat = talker.chat()
    calls: list[int] = []

    def fragile(ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 9:
            raise ZeroDivisionError
        return scores

    with pytest.raises(ZeroDivisionError):
        say(chat, "hello", logits_processor=[fragile], max_new_tokens=20)
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    messages = [*chat.messages, {"role": "user", "content": "on"}]
    assert say(chat, "on")[1] == talker.generate(messages, max_new_tokens=6).token_ids


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (3, {}, "message 0"),
        ("hi", {"temperature": -1}, "temperature=-1"),
        ("hi", {"tree": "paper"}, r"unknown options \['tree'\]"),
    ],
)
def test_a_message_that_cannot_be_answered_leaves_the_chat_as_it_was(
    talker: Model, text: Any, options: dict[str, Any], words: str
) -> None:
    chat = talker.chat()
    with pytest.raises(InputError, match=words):
        chat.send(text, **options)
    assert chat.messages == []


def test_a_bad_tree_is_an_error_before_a_chat_begins(talker: Model) -> None:
    with pytest.raises(TreeError):
        talker.chat(tree="chain:x")


def test_ids_may_come_in_a_numpy_array_and_a_model_may_be_wrapped_as_it_is() -> None:
    numpy = pytest.importorskip("numpy")
    module = tiny.llama()
    model = Model.wrap(module)
    assert model.target.model is module  # type: ignore[attr-defined]
    one = model.generate(numpy.array([1, 2, 3]), max_new_tokens=4, method="plain")
    assert one.token_ids == model.generate([1, 2, 3], max_new_tokens=4, method="plain").token_ids


def test_a_stream_closed_early_says_so() -> None:
    stream = tiny.model().stream([1, 2, 3], max_new_tokens=20)
    first = next(stream)
    stream.close()
    result = stream.result()
    assert result.finish_reason == "closed" and result.token_ids == list(first.token_ids)


def test_a_head_that_does_not_fit_is_refused_wherever_it_is_given() -> None:
    model = tiny.model()
    model.head = tiny_head(TableTarget(vocab_size=7, hidden_size=16), 0)
    with pytest.raises(HeadError, match="16 against 32"):
        model.generate([1, 2], max_new_tokens=2)


def test_an_answer_that_fails_half_way_leaves_the_chat_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model()
    chat = model.chat()
    ban = lambda ids, scores: torch.full_like(scores, -torch.inf)  # noqa: E731
    with pytest.raises(InputError, match="no token may come next"):
        list(chat.send("hello", temperature=1.0, max_new_tokens=4, logits_processor=[ban]))
    chat.reset()
    text = "".join(p.text for p in chat.send("hello", max_new_tokens=8))
    assert text == model.generate("hello", max_new_tokens=8).text


@pytest.mark.parametrize("wrong", [None, torch.zeros(1, 10), torch.zeros(260), torch.zeros(2, 260)], ids=str)
def test_a_processor_that_returns_something_else_is_named(wrong: object) -> None:
    with pytest.raises(InputError, match=r"logits processor 0 .* expected a tensor of scores of shape \(1, 260\)"):
        tiny.model().generate([1, 2], max_new_tokens=3, logits_processor=[lambda ids, scores: wrong])


def test_near_the_end_of_the_context_a_chat_answers_more_briefly() -> None:
    chat = tiny.model().chat()
    for _ in chat.send("a" * 200, max_new_tokens=1000):
        pass
    assert 0 < chat.last_stats.new_tokens <= 256 - chat.last_stats.prompt_tokens < 60
    with pytest.raises(InputError, match=r"shorten the prompt$"):
        chat.send("b" * 300, max_new_tokens=1000)


@pytest.mark.parametrize("values", [{"no_repeat_ngram_size": "3"}, {"bad_words_ids": "x"}, {"min_length": -1}], ids=str)
def test_a_generation_config_that_cannot_be_carried_out_is_an_error(values: dict[str, Any]) -> None:
    model = tiny.model()
    for name, value in values.items():
        setattr(model.defaults.config, name, value)
    with pytest.raises(InputError, match="generation_config cannot be carried out"):
        model.generate([1, 2], max_new_tokens=3)


def test_eos_ids_that_end_nothing_are_reported() -> None:
    defaults = GenerationDefaults.of(tf.GenerationConfig(eos_token_id=[3, -1]))
    assert defaults.eos_ids == (3,) and "-1" in defaults.notes[0]
