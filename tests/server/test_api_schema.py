"""Bodies that cannot be served: each gets a 4xx in OpenAI's shape that names what is wrong, and nothing runs for it."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from running import PATIENCE_S, SMALL, Running, running, until

from reference_server.api.errors import ApiError
from reference_server.api.schema import MAX_PROMPTS, NEUTRAL, ChatBody, CompletionBody, parse

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(attrs.evolve(SMALL, max_body_bytes=10_000)) as found:
        yield found


def completion(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, json.dumps({"model": "tiny", "prompt": "a", **fields}).encode())


def chat(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"model": "tiny", "messages": SAID, **fields}).encode())


GOOD_PROMPTS = [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))]


@pytest.mark.parametrize(("prompt", "parsed"), GOOD_PROMPTS)
def test_the_four_forms_of_a_prompt(prompt: Any, parsed: Any) -> None:
    assert completion(prompt=prompt).prompt == parsed


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt"), ([], "prompt"), (None, "prompt"), (3, "prompt"), ({"a": 1}, "prompt"), ([""], "prompt[0]"), ([[]], "prompt[0]"),
    ([1, "a"], "prompt[1]"), ([1, -1], "prompt[1]"), ([1, True], "prompt[1]"), ([1, 2**31], "prompt[1]"), ([1, 1.5], "prompt[1]"),
    (["a", 1], "prompt[1]"), (["a", [1]], "prompt[1]"), ([[1], "a"], "prompt[1]"), ([[1], [2, "x"]], "prompt[1][1]"), ([None], "prompt[0]"),
    (["a"] * (MAX_PROMPTS + 1), "prompt"), ([True], "prompt[0]"),
]


@pytest.mark.parametrize(("prompt", "param"), BAD_PROMPTS)
def test_a_bad_prompt_is_named_to_the_place(prompt: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(prompt=prompt)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param)


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model": 3}, "model"), ({"model": ""}, "model"), ({"model": None}, "model"),
    ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": "7"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"), ({"max_tokens": 2**31}, "max_tokens"), ({"max_tokens": 10**400}, "max_tokens"),
    ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": "2"}, "n"),
    ({"temperature": -0.1}, "temperature"), ({"temperature": 2.1}, "temperature"), ({"temperature": "hot"}, "temperature"),
    ({"temperature": False}, "temperature"),
    ({"top_p": 0}, "top_p"), ({"top_p": 1.1}, "top_p"), ({"top_p": []}, "top_p"),
    ({"seed": 1.5}, "seed"), ({"seed": 2**63}, "seed"), ({"seed": -(2**63) - 1}, "seed"), ({"seed": "x"}, "seed"),
    ({"stop": 3}, "stop"), ({"stop": [""]}, "stop"), ({"stop": ""}, "stop"), ({"stop": ["a"] * 5}, "stop"), ({"stop": ["a", 1]}, "stop"),
    ({"stream": 1}, "stream"), ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"priority": 0.5}, "priority"), ({"priority": 2**40}, "priority"), ({"priority": "high"}, "priority"),
    ({"user": 3}, "user"), ({"user": "u" * 513}, "user"), ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"top_k": 5}, "top_k"), ({"Temperature": 1}, "Temperature"), ({"": 1}, ""),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    for build in (completion, chat):
        with pytest.raises(ApiError) as caught:
            build(**fields)
        assert (caught.value.status, caught.value.param) == (400, param)
        assert param in caught.value.message
        assert len(caught.value.message) < 250


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"), ("hello", "messages"), (None, "messages"), ([3], "messages[0]"), ([{"role": "user"}], "messages[0].content"),
    ([{"content": "x"}], "messages[0].role"), ([{"role": "tool", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": None}], "messages[0].content"), ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([*SAID, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[1].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": "x", "name": "ada"}], "messages[0].name"),
    ([{"role": "user", "content": "x", "tool_calls": [1]}], "messages[0].tool_calls"),
    ([{"role": "user", "content": "x", "weight": 1}], "messages[0].weight"),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES)
def test_a_bad_message_is_named(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=messages)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_conversation_is_read_as_the_template_wants_it() -> None:
    body = chat(messages=[
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
    ])
    assert body.conversation == [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"},
    ]


@pytest.mark.parametrize(("build", "kind"), [(completion, CompletionBody), (chat, ChatBody)])
def test_what_cannot_be_honoured_is_accepted_where_it_changes_nothing_and_refused_otherwise(build: Any, kind: Any) -> None:
    for name, values in NEUTRAL[kind].items():
        for value in (None, *values):
            build(**{name: value})
        with pytest.raises(ApiError, match=f"{name} is not supported by this server") as caught:
            build(**{name: "something else"})
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_false_is_not_taken_for_nothing() -> None:
    completion(frequency_penalty=0.0)
    for field in ({"frequency_penalty": False}, {"echo": 0}):
        with pytest.raises(ApiError, match="is not supported"):
            completion(**field)


def test_the_best_n_of_n_are_all_of_them() -> None:
    assert completion(best_of=3, n=3).n == 3
    with pytest.raises(ApiError, match="best_of"):
        completion(best_of=3, n=2)


def test_the_two_names_of_the_limit() -> None:
    assert chat(max_tokens=3).limit == chat(max_completion_tokens=3).limit == chat(max_tokens=3, max_completion_tokens=3).limit == 3
    assert chat().limit is None
    with pytest.raises(ApiError, match="two names of one limit"):
        chat(max_tokens=3, max_completion_tokens=4)
    with pytest.raises(ApiError, match="Unknown parameter: max_completion_tokens"):
        completion(max_completion_tokens=4)


def test_stops_and_priority() -> None:
    assert completion(stop="a").stop == ("a",)
    assert completion(stop=["a", "b"]).stop == ("a", "b")
    assert completion(stop=None).stop == completion(stop=[]).stop == ()
    assert completion(priority=-3).priority == -3


BAD_BODIES = [
    (b"", "invalid_json"), (b"{", "invalid_json"), (b"[]", "invalid_json"), (b'"x"', "invalid_json"), (b"null", "invalid_json"),
    (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "invalid_json"), (b"[" * 5000, "invalid_json"),
    (b'{"model": "tiny", "prompt": "\\ud800"}', "invalid_json"), (b'{"model": "tiny", "prompt": "\xff"}', "invalid_encoding"),
    (b"\xff\xfe{\x00}\x00", "invalid_encoding"), (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "invalid_value"),
    (b"{'model': 'tiny'}", "invalid_json"), (b"{}", "missing_required_parameter"),
]


@pytest.mark.parametrize(("raw", "code"), BAD_BODIES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_malformed_body_is_answered_in_the_shape_of_openai(server: Running, raw: bytes, code: str, path: str) -> None:
    reply = server.ask("POST", path, raw)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    if path == COMPLETIONS:
        assert reply.error["code"] == code
    assert reply.headers["content-type"] == "application/json"


KINDS = ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", "application/jsonp", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_another_content_type_is_415(server: Running, kind: str) -> None:
    reply = server.ask("POST", COMPLETIONS, b'{"model": "tiny", "prompt": "a"}', {"content-type": kind})
    assert reply.status == 415
    assert "application/json" in reply.error["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"'])
def test_json_may_say_that_it_is_utf_8(server: Running, kind: str) -> None:
    reply = server.ask("POST", COMPLETIONS, b'{"model": "tiny", "prompt": "a", "max_tokens": 1}', {"content-type": kind})
    assert reply.status == 200


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/nothing", 404), ("GET", "/v1", 404), ("POST", "/v1/completions/", 404), ("GET", "/v1/models/other", 404),
    ("GET", CHAT, 405), ("DELETE", COMPLETIONS, 405), ("POST", "/health", 405), ("POST", "/", 405), ("PUT", "/v1/models", 405),
])
def test_paths_and_methods_that_do_not_exist(server: Running, method: str, path: str, status: int) -> None:
    reply = server.ask(method, path)
    assert reply.status == status
    assert path in reply.error["message"] or "other" in reply.error["message"]
    if status == 405:
        assert reply.headers["allow"]


def test_an_unknown_model_is_404(server: Running) -> None:
    for path, fields in ((CHAT, {"messages": SAID}), (COMPLETIONS, {"prompt": "a"})):
        reply = server.ask("POST", path, {"model": "gpt-9", **fields})
        assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
        assert "'tiny'" in reply.error["message"]


def test_a_token_that_the_model_does_not_have_is_refused(server: Running) -> None:
    reply = server.post(COMPLETIONS, prompt=[1, 258])
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    assert "below 258, not 258" in reply.error["message"]


def test_a_body_that_is_announced_too_long_is_refused_unread_and_the_connection_lives(server: Running) -> None:
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    link.request("POST", COMPLETIONS, b"x" * 10_001, {"content-type": "application/json"})
    answer = link.getresponse()
    error = json.loads(answer.read())["error"]
    assert (answer.status, error["code"]) == (413, "body_too_large")
    assert "at most 10000 bytes, not 10001" in error["message"]
    link.request("GET", "/health")
    assert link.getresponse().status == 200
    link.close()


def test_a_body_is_refused_before_it_is_sent(server: Running) -> None:
    """Only the head arrives, and the answer comes all the same."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as link:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999999999999\r\n\r\n"
        link.sendall(head.encode())
        answer = link.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in answer


def test_a_body_of_unknown_length_is_cut_off_at_the_limit(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as link:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        link.sendall(head.encode())
        link.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n1\r\nx\r\n")
        assert link.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_long_body_is_let_run_into_the_void_so_that_its_sender_reads_the_answer(server: Running) -> None:
    reply = server.ask("POST", COMPLETIONS, b"x" * 5_000_000)
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")


def test_a_body_that_does_not_come_is_408(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reference_server.api.body.BODY_S", 0.05)
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as link:
        link.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{".encode())
        assert link.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_leaves_before_its_body_is_complete(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as link:
        link.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{".encode())
    until(lambda: not [task for task in server.server.server_state.tasks if not task.done()])
    assert server.ask("GET", "/health").status == 200


def test_what_is_refused_leaves_nothing_behind(server: Running) -> None:
    server.settled()
    assert server.engine.vitals.failures == 0
