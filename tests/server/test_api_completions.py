"""Completions and chat as the real `openai` client sees them: whole and streamed, sync and async."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from running import PATIENCE_S, SMALL, Running, running, until

from reference_server.api.answer import EventStream
from reference_server.model import tiny_tokenizer
from reference_server.model.tiny import EOS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID: list[Any] = [{"role": "user", "content": "Tell me about pages."}]
PROMPT = "The scheduler decides what runs, and on which pages."


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with server.client() as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_left(server: Running) -> Iterator[None]:
    yield
    server.settled()


def greedy(client: OpenAI, prompt: Any = PROMPT, tokens: int = 24, **options: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, **options)


def test_a_completion(client: OpenAI) -> None:
    answer = greedy(client)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert [choice.index for choice in answer.choices] == [0]
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 24)
    assert answer.usage.total_tokens == len(PROMPT) + 24


def test_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=SAID, max_completion_tokens=12, temperature=0)
    assert answer.object == "chat.completion"
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.role, choice.message.refusal) == ("length", "assistant", None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tiny_tokenizer().chat(SAID))
    again = client.chat.completions.create(model="tiny", messages=[*SAID, choice.message, *SAID], max_tokens=1)  # type: ignore[list-item]  # the client sends its own message back
    assert again.usage is not None
    assert again.usage.prompt_tokens > 2 * answer.usage.prompt_tokens


def test_a_chat_is_a_completion_of_the_template(client: OpenAI) -> None:
    chat = client.chat.completions.create(model="tiny", messages=SAID, max_tokens=12, temperature=0)
    plain = greedy(client, tiny_tokenizer().chat(SAID), 12)
    assert chat.choices[0].message.content == plain.choices[0].text


def test_the_second_time_the_prompt_comes_from_the_cache(client: OpenAI) -> None:
    prompt = "cached " * 20
    first, second = (greedy(client, prompt, 2) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // 16 * 16
    assert first.choices[0].text == second.choices[0].text


def test_a_stream_gives_the_same_text_in_pieces(client: OpenAI) -> None:
    whole = greedy(client)
    events = list(greedy(client, stream=True))
    assert {event.id for event in events} == {events[0].id}
    assert {event.object for event in events} == {"text_completion"}
    assert all(event.usage is None for event in events)
    assert len(events) > 3
    assert "".join(event.choices[0].text for event in events) == whole.choices[0].text
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]


def test_a_chat_stream_opens_with_the_role_and_ends_with_the_usage(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=SAID, max_tokens=9, temperature=0)
    events = list(client.chat.completions.create(
        model="tiny", messages=SAID, max_tokens=9, temperature=0, stream=True, stream_options={"include_usage": True},
    ))
    first, *middle, last = events
    assert (first.choices[0].delta.role, first.choices[0].delta.content, first.choices[0].finish_reason) == ("assistant", "", None)
    assert "".join(event.choices[0].delta.content or "" for event in middle) == whole.choices[0].message.content
    assert middle[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 9
    assert all(event.usage is None for event in [first, *middle])


def test_the_wire_of_a_stream(server: Running) -> None:
    reply = server.post(COMPLETIONS, prompt="wire", max_tokens=3, temperature=0, stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-store"
    *events, done, rest = reply.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") for event in events)
    payloads = [json.loads(event[6:]) for event in events]
    assert all("usage" in payload for payload in payloads)
    assert reply.headers["x-request-id"] == payloads[0]["id"]
    assert payloads[0]["id"].startswith("cmpl-")
    plain = server.post(COMPLETIONS, prompt="wire", max_tokens=3, stream=True)
    assert "usage" not in json.loads(plain.body.decode().split("\n\n", maxsplit=1)[0][6:])


def test_every_answer_has_an_id_of_its_own(server: Running) -> None:
    replies = [server.post(CHAT, messages=SAID, max_tokens=1) for _ in range(3)] + [server.ask("GET", "/health"), server.ask("GET", "/no")]
    assert len({reply.headers["x-request-id"] for reply in replies}) == 5
    assert replies[0].headers["x-request-id"] == replies[0].json["id"]


def test_several_prompts_and_samples_are_numbered_prompt_by_prompt(client: OpenAI) -> None:
    prompts = ["one and", "two and twenty", "three"]
    single = [greedy(client, prompt, 8).choices[0].text for prompt in prompts]
    whole = greedy(client, prompts, 8, n=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.text for choice in whole.choices] == [text for text in single for _ in range(2)]
    assert whole.usage.prompt_tokens == sum(map(len, prompts))
    assert whole.usage.completion_tokens == 6 * 8
    texts = dict.fromkeys(range(6), "")
    ends = {}
    for event in greedy(client, prompts, 8, n=2, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
        ends[event.choices[0].index] = event.choices[0].finish_reason
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert set(ends.values()) == {"length"}


def test_a_prompt_as_token_ids(client: OpenAI) -> None:
    ids = list(PROMPT.encode())
    assert greedy(client, ids).choices[0].text == greedy(client).choices[0].text == greedy(client, [ids, ids]).choices[1].text


def test_samples_differ_and_a_seed_repeats_them(client: OpenAI) -> None:
    def draw(seed: int | None) -> list[str]:
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16, n=3, temperature=1.5, top_p=0.95, seed=seed)
        return [choice.text for choice in answer.choices]

    once = draw(-7)
    assert len(set(once)) == 3
    assert draw(-7) == once
    assert draw(8) != once
    assert draw(None) != draw(None)


def test_a_stop_string_ends_the_text_before_it(server: Running, client: OpenAI) -> None:
    text = greedy(client, tokens=40).choices[0].text
    stop = next(text[at : at + 2] for at in range(6, len(text)) if text[at : at + 2].isascii() and text.index(text[at : at + 2]) == at)
    before = text[: text.index(stop)]
    for stops in (stop, [stop], ["never there", stop]):
        answer = greedy(client, tokens=40, stop=stops)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (before, "stop")
        assert answer.usage.completion_tokens < 40
        assert tiny_tokenizer().decode(list((before + stop).encode())) == before + stop
    streamed = list(greedy(client, tokens=40, stop=stop, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in streamed[:-1]) == before
    assert streamed[-2].choices[0].finish_reason == "stop"
    assert streamed[-1].usage.completion_tokens == answer.usage.completion_tokens
    server.settled()
    assert server.engine.vitals.ended["stop"] >= 4


def test_what_looked_like_the_beginning_of_a_stop_is_text_after_all(client: OpenAI) -> None:
    text = greedy(client).choices[0].text
    stop = text[-3:] + "and more"
    assert greedy(client, stop=stop).choices[0].text == text
    assert "".join(event.choices[0].text for event in greedy(client, stop=stop, stream=True)) == text


def test_one_sample_stops_and_the_others_go_on(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 32, "n": 4, "seed": 3, "extra_body": {"ignore_eos": True}}
    plain = client.completions.create(**options)
    stop = next(c for c in plain.choices[2].text if c.isascii() and sum(c in choice.text for choice in plain.choices) < 4)
    cut = client.completions.create(**options, stop=stop)
    for before, after in zip(plain.choices, cut.choices, strict=True):
        assert after.text == before.text.split(stop, maxsplit=1)[0]
        assert after.finish_reason == ("stop" if stop in before.text else "length")
    assert {choice.finish_reason for choice in cut.choices} == {"stop", "length"}


def test_the_end_token_ends_the_answer_and_is_no_text(client: OpenAI) -> None:
    ends = []
    for seed in range(40):
        answer = client.completions.create(model="tiny", prompt="z", max_tokens=80, temperature=2, seed=seed)
        if answer.choices[0].finish_reason == "stop":
            ends.append(answer)
            longer = client.completions.create(
                model="tiny", prompt="z", max_tokens=80, temperature=2, seed=seed, extra_body={"ignore_eos": True},
            )
            assert longer.choices[0].finish_reason == "length"
            assert longer.choices[0].text.startswith(answer.choices[0].text.rstrip("\ufffd"))
            break
    assert ends
    assert ends[0].usage is not None
    assert ends[0].usage.completion_tokens < 80
    assert "<|end|>" not in ends[0].choices[0].text


def test_half_a_character_is_never_sent(client: OpenAI) -> None:
    """Text of random bytes: what was sent in pieces is what the whole decodes to."""
    for seed in range(6):
        options: dict[str, Any] = {"model": "tiny", "prompt": "é", "max_tokens": 48, "temperature": 2, "seed": seed}
        whole = client.completions.create(**options).choices[0].text
        pieces = [event.choices[0].text for event in client.completions.create(**options, stream=True)]
        assert "".join(pieces) == whole


def test_no_new_token_computes_the_prompt_only(client: OpenAI) -> None:
    answer = greedy(client, tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("", "length", 0)


def test_without_a_limit_a_completion_has_sixteen_tokens_and_a_chat_what_there_is_room_for(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="a" * 100, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    room = 4096
    long: list[Any] = [{"role": "user", "content": "x" * 4000}]
    told = client.chat.completions.create(model="tiny", messages=long, temperature=0, extra_body={"ignore_eos": True})
    assert told.usage is not None
    assert told.usage.total_tokens in {room, room + 1}  # the last token is never written: the pool holds one more than it has slots
    assert told.choices[0].finish_reason == "length"


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "kvsched"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other/model")


def test_errors_reach_the_client_with_their_fields(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", logprobs=3)
    assert caught.value.param == "logprobs"
    assert caught.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_the_async_client_and_many_streams_at_once(server: Running) -> None:
    async def one(client: AsyncOpenAI, at: int) -> tuple[int, str]:
        text = ""
        stream = await client.completions.create(model="tiny", prompt=f"number {at % 4}", max_tokens=16, temperature=0, stream=True)
        async for event in stream:
            text += event.choices[0].text
        return at % 4, text

    async def all_of_them() -> list[tuple[int, str]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(one(client, at) for at in range(24)))

    texts = asyncio.run(all_of_them())
    assert len(texts) == 24
    assert len(set(texts)) == 4


def test_who_asks_is_shown_while_it_runs_and_what_was_asked_is_not(server: Running, client: OpenAI) -> None:
    stream = client.completions.create(
        model="tiny", prompt="a confidential prompt", max_tokens=3000, stream=True, user="ada", extra_body={"priority": -2, "ignore_eos": True},
    )
    next(iter(stream))
    reply = server.ask("GET", "/debug/scheduler")
    assert reply.status == 200
    found = reply.json
    ((key, live),) = found["requests"].items()
    assert key.startswith("cmpl-")
    assert (live["tenant"], live["kind"], live["stream"], live["prompt_tokens"], live["max_new_tokens"]) == ("ada", "completion", True, 21, 3000)
    assert key in found["scheduler"]["requests"]
    assert b"confidential" not in reply.body
    stream.close()
    until(lambda: server.engine.vitals.health.running == 0)


def test_a_connection_serves_many_requests(server: Running) -> None:
    import http.client

    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    for stream in (False, True, False):
        link.request("POST", COMPLETIONS, json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2, "stream": stream}),
                     {"content-type": "application/json"})
        before = link.sock
        answer = link.getresponse()
        assert answer.read()
        assert answer.status == 200
        assert link.sock is before
    link.close()


def test_the_end_token_of_the_tiny_model_is_known(server: Running) -> None:
    assert server.served.eos == {EOS}


def test_an_event_is_one_line_to_every_client() -> None:
    stream = object.__new__(EventStream)
    stream.head, stream.usage = {"id": "x"}, False
    said = "one\u2028two\u2029three\x85four"
    event = stream._event([{"text": said}])
    assert len(event.splitlines()) == 1
    assert json.loads(event)["choices"][0]["text"] == said


def test_what_a_retracted_request_finds_again_is_not_told_as_cached() -> None:
    """Every prompt is new and alone of its kind, and the pool so small that many are retracted."""
    with running(attrs.evolve(SMALL, page_size=4, pool_tokens=512, max_running=16)) as server:
        def ask(i: int) -> int:
            fields: dict[str, Any] = {"prompt": f"{i:02d} is how this prompt begins, and it goes on", "max_tokens": 300, "temperature": 0.9, "seed": i}
            cached: int = server.post(COMPLETIONS, **fields).json["usage"]["prompt_tokens_details"]["cached_tokens"]
            return cached
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(ask, range(16))) == [0] * 16
        assert server.engine.vitals.totals["retractions"] > 0
