"""Where an answer ends and what of it is shown, whatever the rounds were (behaviours 8 to 11)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from conftest import byte_tokenizer
from eaglekit.engine.stopping import Detokenizer, Piece, Stopper
from eaglekit.errors import InputError

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id


def decode(ids: list[int]) -> str:
    text: str = TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def run(stopper: Stopper, rounds: Sequence[Sequence[int]]) -> list[Piece]:
    """Push rounds until the answer has ended, as the engine does."""
    pieces = []
    for tokens in rounds:
        if stopper.finished:
            break
        pieces.append(stopper.push(tokens))
    return pieces


def ids_of(pieces: Sequence[Piece]) -> list[int]:
    return [t for p in pieces for t in p.token_ids]


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(p.text for p in pieces)


def splits(tokens: Sequence[int], seed: int) -> list[list[int]]:
    """`tokens` in rounds of random length."""
    rng, rounds, at = random.Random(seed), [], 0
    while at < len(tokens):
        n = rng.choice((1, 1, 2, 3, 6))
        rounds.append(list(tokens[at : at + n]))
        at += n
    return rounds


# --- end of text


def test_eos_in_the_middle_of_a_round_ends_the_answer_there() -> None:  # behaviour 8
    stopper = Stopper(max_new_tokens=50, eos_ids=[EOS], decode=decode)
    piece = stopper.push([*encode("ab"), EOS, *encode("cd")], [-1.0, -2.0, -3.0, -4.0, -5.0])
    assert piece == Piece((*encode("ab"), EOS), "ab", (-1.0, -2.0, -3.0))
    assert stopper.finish_reason == "stop" and stopper.finished


@pytest.mark.parametrize(("eos", "kept"), [((7, 9), 3), ((9,), 5), ((), 6), ((1, 2), 6)])
def test_a_list_of_eos_ids_works_and_so_does_none(eos: tuple[int, ...], kept: int) -> None:  # behaviour 8
    stopper = Stopper(max_new_tokens=50, eos_ids=eos)
    pieces = run(stopper, [[5, 6], [7, 8, 9], [4]])
    assert ids_of(pieces) == [5, 6, 7, 8, 9, 4][:kept]
    assert stopper.finish_reason == ("stop" if kept < 6 else None)


def test_eos_at_the_limit_is_a_stop() -> None:
    stopper = Stopper(max_new_tokens=2, eos_ids=[9])
    stopper.push([5, 9])
    assert stopper.finish_reason == "stop"


def test_nothing_is_taken_after_the_end() -> None:
    stopper = Stopper(max_new_tokens=9, eos_ids=[9], decode=decode)
    stopper.push([9])
    assert stopper.push(encode("ab"), [0.0, 0.0]) == Piece((), "", ())


# --- length


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_limit_is_exact(limit: int, size: int) -> None:  # behaviour 9
    stopper = Stopper(max_new_tokens=limit)
    pieces = run(stopper, [[5] * size] * 20)
    assert ids_of(pieces) == [5] * limit
    assert stopper.remaining == 0 and stopper.finish_reason == "length"


def test_a_limit_of_zero_ends_the_answer_before_it_begins() -> None:  # behaviour 9
    stopper = Stopper(max_new_tokens=0)
    assert stopper.finished and stopper.finish_reason == "length"
    assert stopper.push([5]) == Piece((), "")


@pytest.mark.parametrize("limit", [-1, 1.0, "3", None, True])
def test_a_bad_limit_is_an_error(limit: Any) -> None:
    with pytest.raises(InputError, match=r"max_new_tokens=.*expected a whole number from 0"):
        Stopper(max_new_tokens=limit)


# --- stop strings


def test_a_stop_string_that_spans_rounds_cuts_the_text_before_it() -> None:  # behaviour 10
    stopper = Stopper(max_new_tokens=99, stop=["lmn"], decode=decode)
    pieces = run(stopper, [encode("hil"), encode("m"), encode("nop")])
    assert [p.text for p in pieces] == ["hi", "", ""]
    assert ids_of(pieces) == encode("hilmn")  # the tokens that completed it stay; those behind it do not
    assert stopper.finish_reason == "stop"


def test_a_stop_string_in_the_middle_of_a_round_cuts_ids_where_stepwise_decoding_would() -> None:  # behaviour 10
    stopper = Stopper(max_new_tokens=99, stop=["lm"], decode=decode)
    assert stopper.push(encode("hilmnop"), [0.5] * 7) == Piece(tuple(encode("hilm")), "hi", (0.5,) * 4)


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        (["cde", "cd"], "abcdef", "ab"),  # the shorter one is complete first
        (["bcdx", "cd"], "abcdef", "ab"),
        (["ef", "ab"], "xxefab", "xx"),
        (["aab"], "aaab", "a"),  # a beginning that fails and begins again
        (["abab"], "ababab", ""),
        (["xyz"], "abxy", "abxy"),  # never completed: shown at the end
        (["é"], "abéc", "ab"),
        (["b😀"], "ab😀c", "a"),
        ([" "], "ab cd", "ab"),
    ],
)
def test_the_first_stop_string_to_be_complete_wins(stop: list[str], text: str, shown: str) -> None:  # behaviour 10
    for size in (1, 2, 99):
        stopper = Stopper(max_new_tokens=99, eos_ids=[EOS], stop=stop, decode=decode)
        tokens = [*encode(text), EOS]
        pieces = run(stopper, [tokens[i : i + size] for i in range(0, len(tokens), size)])
        assert text_of(pieces) == shown
        assert stopper.finish_reason == "stop"


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none() -> None:  # behaviour 11
    stopper = Stopper(max_new_tokens=99, stop=["cdx"], decode=decode)
    assert [stopper.push([t]).text for t in encode("abcdeccd")] == ["a", "b", "", "", "cde", "", "c", ""]


def test_what_was_held_back_is_shown_when_the_limit_ends_the_answer() -> None:  # behaviour 11
    stopper = Stopper(max_new_tokens=4, stop=["cdx"], decode=decode)
    assert [stopper.push([t]).text for t in encode("abcd")] == ["a", "b", "", "cd"]


def test_what_was_held_back_is_shown_when_eos_ends_the_answer() -> None:  # behaviour 11
    stopper = Stopper(max_new_tokens=9, eos_ids=[EOS], stop=["cdx"], decode=decode)
    assert [p.text for p in run(stopper, [encode("abc"), [*encode("d"), EOS]])] == ["ab", "cd"]


@pytest.mark.parametrize("stop", [[""], ["a", ""], [3], [None]])
def test_a_bad_stop_string_is_an_error(stop: Any) -> None:
    with pytest.raises(InputError, match="stop="):
        Stopper(max_new_tokens=3, stop=stop, decode=decode)


def test_stop_strings_without_a_tokenizer_are_an_error() -> None:
    with pytest.raises(InputError, match="tokenizer"):
        Stopper(max_new_tokens=3, stop=["a"])


def first_cut(text: str, stop: Sequence[str]) -> str:
    """What step-wise decoding shows of `text`: cut at the stop string whose last character comes first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


@pytest.mark.parametrize("seed", range(60))
def test_pieces_add_up_to_the_same_answer_however_tokens_fall_into_rounds(seed: int) -> None:  # behaviours 8, 10, 11
    rng = random.Random(seed)
    text = "".join(rng.choice(("a", "b", "ab", "é", "😀", "€")) for _ in range(25))
    stop = [s for s in ("bab", "aéb", "😀a", "€€", "ba😀b") if rng.random() < 0.4]
    tokens = encode(text)
    if rng.random() < 0.3:
        tokens.insert(rng.randrange(len(tokens)), EOS)
    limit = rng.choice((len(tokens), len(tokens) // 2, 99))

    def answer(rounds: Sequence[Sequence[int]]) -> tuple[list[int], str, str | None]:
        stopper = Stopper(max_new_tokens=limit, eos_ids=[EOS], stop=stop, decode=decode)
        pieces = run(stopper, rounds)
        return ids_of(pieces), text_of(pieces), stopper.finish_reason

    stepwise = answer([[t] for t in tokens])
    for split in range(8):
        assert answer(splits(tokens, split)) == stepwise
    assert answer([tokens]) == stepwise
    # and it is the right answer: whole text of the ids, without half characters, cut before the stop string
    ids, shown, reason = stepwise
    whole = decode([t for t in ids if t != EOS]).rstrip("\ufffd")
    if reason == "stop" or len(ids) == limit:
        assert shown == first_cut(whole, stop)
    else:
        assert reason is None and first_cut(whole, stop).startswith(shown)


# --- half characters


def test_a_character_in_several_tokens_is_shown_when_it_is_whole() -> None:  # behaviour 11
    stopper = Stopper(max_new_tokens=99, decode=decode)
    tokens = encode("a😀é!")
    assert len(tokens) == 8
    assert [stopper.push([t]).text for t in tokens] == ["a", "", "", "", "😀", "", "é", "!"]


@pytest.mark.parametrize("seed", range(20))
def test_no_half_character_is_ever_streamed(seed: int) -> None:  # behaviour 11
    text = "".join(random.Random(seed).choice("aé€😀") for _ in range(30))
    stopper = Stopper(max_new_tokens=999, decode=decode)
    seen = ""
    for tokens in splits(encode(text), seed):
        seen += stopper.push(tokens).text
        assert "\ufffd" not in seen and text.startswith(seen)
    assert seen == text


def test_half_a_character_at_the_limit_is_not_shown() -> None:  # behaviour 11
    stopper = Stopper(max_new_tokens=3, decode=decode)
    assert stopper.push(encode("a😀")).text == "a"


def test_bytes_that_are_no_text_are_shown_as_the_tokenizer_shows_them_once_text_goes_on() -> None:
    stopper = Stopper(max_new_tokens=99, decode=decode)
    tokens = [encode("😀")[0], *encode("a"), encode("é")[1], *encode("b")]
    assert "".join(stopper.push([t]).text for t in tokens) == decode(tokens) == "\ufffda\ufffdb"


def word_decode(ids: list[int]) -> str:
    """As sentencepiece does: spaces before words, but none at the beginning."""
    return "".join(("", " one", " two", "s", " three")[i] for i in ids).removeprefix(" ")


def test_spaces_between_words_come_out_as_in_the_whole_text() -> None:
    detokenizer = Detokenizer(word_decode)
    ids = [1, 3, 2, 0, 4, 1, 2, 3]
    assert "".join(map(detokenizer.push, ids)) == word_decode(ids) == "ones two three one twos"


def test_detokenizing_costs_the_same_per_token_however_long_the_text() -> None:
    longest = 0

    def counting(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    detokenizer = Detokenizer(counting)
    for token in encode("ab" * 200):
        detokenizer.push(token)
    assert longest <= 3


@pytest.mark.parametrize(("stop", "shown"), [(["wo"], "one t"), (["e t", "tw"], "on"), (["e t", " tw", "two"], "on")])
def test_a_stop_string_inside_a_longer_token_cuts_its_text_there(stop: list[str], shown: str) -> None:  # behaviour 10
    """Where one token completes several, the text ends before the first of them."""
    stopper = Stopper(max_new_tokens=9, stop=stop, decode=word_decode)
    pieces = run(stopper, [[1, 2, 3]])
    assert text_of(pieces) == shown and ids_of(pieces) == [1, 2]


@pytest.mark.parametrize("make", [lambda: Stopper(max_new_tokens=9), lambda: Stopper(max_new_tokens=9, eos_ids=[1])])
def test_without_a_tokenizer_there_are_ids_and_no_text(make: Callable[[], Stopper]) -> None:
    assert make().push([3, 4, 5]) == Piece((3, 4, 5), "")
