"""Text token by token against the whole text at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_server.model import tiny_tokenizer
from reference_server.text import TextStream, Tokenizer, TokenizerError

BYTES = tiny_tokenizer()


def plain(text: str, stop: list[str]) -> tuple[str, bool]:
    """The definition, character by character over the whole text: the first moment at which a stop string is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(one) for one in stop if text[:end].endswith(one)]
        if starts:
            return text[: min(starts)], True
    return text, False


def pieces(tokenizer: Tokenizer, ids: list[int], stop: list[str], cuts: list[int]) -> tuple[list[str], bool]:
    stream = TextStream(tokenizer, stop)
    found, start = [], 0
    for end in [*sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]:
        found.append(stream.push(ids[start:end]))
        start = end
    found.append(stream.finish())
    return found, stream.stopped


LETTERS = st.sampled_from("ab€😀\ufffd ")
TEXTS = st.text(LETTERS, max_size=24)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4)
CUTS = st.lists(st.integers(0, 200), max_size=30)
TOKENS = st.lists(st.one_of(st.integers(0, 257), st.sampled_from([0x61, 0x62, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80])), max_size=40)


@settings(max_examples=300, deadline=None)
@given(TEXTS, STOPS, CUTS)
def test_pieces_make_the_text_up_to_the_stop(text: str, stop: list[str], cuts: list[int]) -> None:
    ids = BYTES.encode(text)
    found, stopped = pieces(BYTES, ids, stop, cuts)
    assert ("".join(found), stopped) == plain(BYTES.decode(ids), stop)


@settings(max_examples=300, deadline=None)
@given(TOKENS, STOPS, CUTS)
def test_pieces_make_the_text_of_any_bytes(ids: list[int], stop: list[str], cuts: list[int]) -> None:
    """Bytes that are no UTF-8, and special tokens, which have no text, among them."""
    found, stopped = pieces(BYTES, ids, stop, cuts)
    assert ("".join(found), stopped) == plain(BYTES.decode(ids), stop)
    assert BYTES.decode(ids) == BYTES._backend.decode(ids)


@settings(max_examples=200, deadline=None)
@given(TEXTS, STOPS)
def test_what_was_sent_can_never_be_the_beginning_of_a_stop(text: str, stop: list[str]) -> None:
    """After each token: what was sent is the longest part of the text that no continuation can cut into."""
    stream, sent = TextStream(BYTES, stop), ""
    ids = BYTES.encode(text)
    for n, token in enumerate(ids, 1):
        sent += stream.push([token])
        whole = bytes(ids[:n]).decode(errors="ignore")  # without the half character at its end
        cut, stopped = plain(whole, stop)
        assert stopped == stream.stopped
        if stopped:
            assert sent == cut
            break
        held = whole[len(sent) :]
        assert whole == sent + held
        assert held == "" or any(one.startswith(held) for one in stop)
        longer = [whole[at:] for at in range(len(sent)) if any(one.startswith(whole[at:]) for one in stop)]
        assert longer == []


def test_half_a_character_waits_for_the_other_half() -> None:
    stream = TextStream(BYTES)
    assert [stream.push([byte]) for byte in "a€😀".encode()] == ["a", "", "", "€", "", "", "", "😀"]
    assert stream.push([0xF0, 0x9F]) == ""
    assert stream.finish() == "\ufffd"


def test_bytes_that_can_become_nothing_are_sent_at_once() -> None:
    """A run of them is not held back: what waits is three bytes at most."""
    stream = TextStream(BYTES)
    assert [stream.push([0x80]) for _ in range(5)] == ["\ufffd"] * 5
    assert stream.push([0xE2]) == ""
    assert stream.push([0x61]) == "\ufffda"


def test_a_stop_string_over_several_tokens() -> None:
    stream = TextStream(BYTES, ["\n\nUser:", "END"])
    assert [stream.push([byte]) for byte in b"ok\n\nUs"] == ["o", "k", "", "", "", ""]
    assert stream.push(b"a") == "\n\nUsa"
    assert (stream.push(b"EN"), stream.stopped) == ("", False)
    assert (stream.push(b"D and more"), stream.stopped) == ("", True)
    assert (stream.push(b"x"), stream.finish()) == ("", "")


def test_the_stop_that_is_complete_first_counts() -> None:
    """Wherever tokens begin: "bc" is complete before "abcd" is, and of two that end together the longer one counts."""
    for ids in ([b"abcd"], [b"ab", b"cd"], [b"a", b"b", b"c", b"d"]):
        stream = TextStream(BYTES, ["abcd", "bc"])
        assert "".join(stream.push(one) for one in ids) == "a"
        assert stream.stopped
    stream = TextStream(BYTES, ["bc", "abc"])
    assert stream.push(b"xabc") == "x"


def test_what_is_held_is_sent_at_the_end() -> None:
    stream = TextStream(BYTES, ["stop"])
    assert stream.push(b"a sto") == "a "
    assert stream.finish() == "sto"
    assert stream.finish() == ""
    assert not stream.stopped
    with pytest.raises(ValueError, match=r"push\(\) after finish\(\)"):
        stream.push(b"p")


def test_a_stop_may_be_the_replacement_of_half_a_character() -> None:
    stream = TextStream(BYTES, ["\ufffd"])
    assert stream.push([0x61, 0xE2]) == "a"
    assert stream.finish() == ""
    assert stream.stopped


def test_special_tokens_have_no_text_and_bytes_join_over_them() -> None:
    stream = TextStream(BYTES)
    assert stream.push([257, 0xE2, 256, 0x82]) == ""
    assert stream.push([0xAC, 256, 1000]) == "€"


@pytest.mark.parametrize("stop", ["ab", [""], ["a", ""]])
def test_stops_that_cannot_be(stop: list[str]) -> None:
    with pytest.raises(ValueError, match="stop must be a sequence of strings that are not empty"):
        TextStream(BYTES, stop)


def test_negative_ids_are_refused() -> None:
    with pytest.raises(TokenizerError, match="at least 0, not -1"):
        TextStream(BYTES).push([-1])


def test_the_work_for_a_token_does_not_grow_with_the_text() -> None:
    """Counted, not timed: what a stream keeps is never longer than a stop string and half a character."""
    stream, chance = TextStream(BYTES, ["abab", "bbbb"]), random.Random(0)
    for _ in range(5000):
        stream.push([chance.choice(b"ab\xe2\x82")])
        assert len(stream._held) < 4
        assert len(stream._decoder.getstate()[0]) < 4
        if stream.stopped:
            stream = TextStream(BYTES, ["abab", "bbbb"])
