"""More than the server can take, clients that leave, a model that fails, and the end: each has its answer, and nothing leaks."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import openai
import pytest
from running import PATIENCE_S, SMALL, Running, running, until

from kvsched import Refused
from kvsched.verdict import RefusalReason
from reference_server.api import errors
from reference_server.api.state import MAX_RETRY_S, State
from reference_server.model import tiny_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NARROW = attrs.evolve(SMALL, pool_tokens=1024, context_limit=2000, max_running=2, max_queued_requests=3, max_queued_tokens=600)


@pytest.fixture(scope="module")
def narrow() -> Iterator[Running]:
    """Two run, three wait, and more are refused."""
    with running(NARROW) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "narrow" in request.fixturenames:
        request.getfixturevalue("narrow").settled()


@contextmanager
def under_way(server: Running, *, stream: bool = True, prompt: str = "go on", **fields: Any) -> Iterator[http.client.HTTPConnection]:
    """A request that would go on for long, sent by a client that leaves at the end."""
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": stream, **fields}
    link.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
    try:
        yield link
    finally:
        link.close()


@contextmanager
def slow(server: Running) -> Iterator[None]:
    """The model takes its time in every step, so that what runs still runs when a test looks at what waits."""
    handle = server.engine.executor.model.register_forward_pre_hook(lambda *_: time.sleep(0.02))  # type: ignore[attr-defined]  # it is a torch module
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def full(server: Running) -> Iterator[None]:
    """Two requests run and three wait."""
    with slow(server), ExitStack() as stack:
        for count in (1, 2):
            stack.enter_context(under_way(server))
            until(lambda: server.engine.vitals.health.running == count)  # noqa: B023  # it is called at once
        for count in (1, 2, 3):
            stack.enter_context(under_way(server, stream=False))
            until(lambda: server.engine.vitals.health.waiting == count)  # noqa: B023  # it is called at once
        yield


def test_a_full_queue_is_429_with_a_time_to_come_back(narrow: Running) -> None:
    with full(narrow):
        for stream in (False, True):
            reply = narrow.post(COMPLETIONS, prompt="one more", stream=stream)
            assert reply.status == 429
            assert 1 <= int(reply.headers["retry-after"]) <= MAX_RETRY_S
            assert reply.headers["content-type"] == "application/json"
            error = reply.error
            assert (error["type"], error["code"], error["reason"]) == ("rate_limit_error", "queue_requests", "queue_requests")
            assert (error["needed"], error["available"], error["unit"]) == (1, 0, "requests")
        with narrow.client() as client, pytest.raises(openai.RateLimitError, match="queue is full"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=1)
        assert narrow.ask("GET", "/health").status == 200
        ready = narrow.ask("GET", "/ready")
        assert (ready.status, ready.json["status"]) == (503, "queue_full")
        assert int(ready.headers["retry-after"]) >= 1
    until(lambda: narrow.ask("GET", "/ready").status == 200)


def test_the_real_client_comes_back_by_itself(narrow: Running) -> None:
    with narrow.client(max_retries=8) as client, ExitStack() as stack:
        stack.enter_context(full(narrow))
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(client.completions.create(model="tiny", prompt="patient", max_tokens=2)))
        asking.start()
        until(lambda: narrow.engine.vitals.refused.get("queue_requests", 0) > 0 and narrow.state.metrics.responses.labels("429")._value.get() > 0)
        stack.close()
        asking.join(PATIENCE_S)
        assert answers[0].usage.completion_tokens == 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_can_never_fit_says_what_is_needed_and_what_there_is(narrow: Running, path: str) -> None:
    said: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    reply = narrow.post(path, max_tokens=1500, **said)
    error = reply.error
    assert (reply.status, error["code"], error["reason"], error["unit"]) == (400, "never_fits", "never_fits", "pages")
    assert error["needed"] > error["available"] == 1024 // 16
    assert f"needed {error['needed']} pages, available 64" in error["message"]
    assert "retry-after" not in reply.headers


def test_more_than_the_context_says_so_in_the_words_of_openai(narrow: Running) -> None:
    with narrow.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 10, max_tokens=2000, stream=True)
    assert caught.value.code == "context_length_exceeded"
    body: Any = caught.value.body
    assert (body["needed"], body["available"], body["unit"], body["reason"]) == (2010, 2000, "tokens", "context_limit")


def test_what_exceeds_the_queue_by_itself_is_400_since_waiting_is_no_use(narrow: Running) -> None:
    reply = narrow.post(COMPLETIONS, prompt="x" * 601, max_tokens=1)
    assert (reply.status, reply.error["code"]) == (400, "queue_tokens")
    assert reply.error["needed"] == 601
    assert "retry-after" not in reply.headers


def test_of_several_prompts_all_run_or_none(narrow: Running) -> None:
    before = narrow.engine.vitals.totals["aborted"]
    reply = narrow.post(COMPLETIONS, prompt=["a", "b", "x" * 900, "c"], max_tokens=200, ignore_eos=True)
    assert (reply.status, reply.error["code"]) == (400, "never_fits")
    narrow.settled()
    assert narrow.engine.vitals.totals["aborted"] == before + 3


def test_samples_that_do_not_fit_the_queue_are_refused_together(narrow: Running) -> None:
    reply = narrow.post(COMPLETIONS, prompt="a", n=4)
    assert (reply.status, reply.error["needed"], reply.error["available"]) == (400, 4, 3)


def test_prompts_that_can_never_wait_together_are_400(narrow: Running) -> None:
    reply = narrow.post(COMPLETIONS, prompt=["a"] * 4, max_tokens=1)
    assert (reply.status, reply.error["code"], reply.error["needed"], reply.error["available"]) == (400, "queue_requests", 4, 3)
    assert "retry-after" not in reply.headers
    reply = narrow.post(COMPLETIONS, prompt=["x" * 301, "y" * 300], max_tokens=1)
    assert (reply.status, reply.error["code"], reply.error["needed"], reply.error["available"]) == (400, "queue_tokens", 601, 600)


def test_what_waiting_cannot_cure_is_told_first(narrow: Running) -> None:
    reply = narrow.post(COMPLETIONS, prompt=["a", "b", "c", "d", "x" * 900], max_tokens=200)
    assert (reply.status, reply.error["code"]) == (400, "never_fits")


def leaves_streaming(server: Running) -> Any:
    with under_way(server) as link:
        assert link.getresponse().read(10)


def leaves_waiting_for_the_whole(server: Running) -> Any:
    with under_way(server, stream=False, n=2):
        until(lambda: server.engine.vitals.health.running == 2)


def leaves_the_queue(server: Running) -> Any:
    with full(server):
        pass


@pytest.mark.parametrize("leave", [leaves_streaming, leaves_waiting_for_the_whole, leaves_the_queue])
def test_a_client_that_leaves_gives_its_pages_back(narrow: Running, leave: Callable[[Running], None]) -> None:
    before = narrow.engine.vitals.totals
    leave(narrow)
    narrow.settled()
    after = narrow.engine.vitals.totals
    assert after["aborted"] > before["aborted"]
    assert after["finished"] == before["finished"]
    until(lambda: not [task for task in narrow.server.server_state.tasks if not task.done()])


def test_the_openai_client_leaves_a_stream(narrow: Running) -> None:
    before = narrow.engine.vitals.totals["aborted"]
    with narrow.client() as client:
        with client.completions.create(model="tiny", prompt="go on", max_tokens=500, stream=True, extra_body={"ignore_eos": True}) as stream:
            next(iter(stream))
        until(lambda: narrow.engine.vitals.totals["aborted"] == before + 1)


@contextmanager
def failing(server: Running, error: BaseException) -> Iterator[None]:
    """The model raises in every step until this ends."""

    def fail(*_: Any) -> None:
        raise error

    handle = server.engine.executor.model.register_forward_pre_hook(fail)  # type: ignore[attr-defined]  # it is a torch module
    try:
        yield
    finally:
        handle.remove()


def test_a_model_that_fails_is_500_and_the_server_lives(narrow: Running) -> None:
    with failing(narrow, RuntimeError("no more memory")), narrow.client() as client:
        reply = narrow.post(COMPLETIONS, prompt=["a", "b"])
        assert (reply.status, reply.error["type"], reply.error["code"]) == (500, "server_error", "model_error")
        assert "no more memory" not in reply.error["message"]
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="tiny", prompt="a")
    assert narrow.engine.vitals.failures > 0
    assert narrow.ask("GET", "/health").json["status"] == "idle"
    assert narrow.post(COMPLETIONS, prompt="a", max_tokens=1).status == 200


def test_a_model_that_fails_in_the_middle_of_a_stream_ends_it_with_the_error(narrow: Running) -> None:
    with narrow.client() as client:
        stream = client.completions.create(model="tiny", prompt="go on", max_tokens=500, stream=True, extra_body={"ignore_eos": True})
        events = iter(stream)
        next(events)
        with failing(narrow, RuntimeError("broken")), pytest.raises(openai.APIError, match="The model failed") as caught:
            list(events)
        assert caught.value.code == "model_error"
    with under_way(narrow) as link:
        answer = link.getresponse()
        assert answer.status == 200
        with failing(narrow, RuntimeError("broken")):
            sent = answer.read()
    assert sent.endswith(b"\n\n")
    assert b'data: {"error": {' in sent
    assert b"[DONE]" not in sent


def test_a_fault_of_ours_is_500_with_the_id_to_look_for(narrow: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def planted(_: str) -> list[int]:
        raise LookupError("secret words")

    with monkeypatch.context() as patch:
        patch.setattr(narrow.served.tokenizer, "encode", planted)
        reply = narrow.post(COMPLETIONS, prompt="a")
    assert (reply.status, reply.error["code"], reply.error["type"]) == (500, "internal_error", "server_error")
    assert reply.headers["x-request-id"] in reply.error["message"]
    assert b"secret" not in reply.body
    assert reply.headers["x-request-id"] in caplog.text
    assert "secret words" in caplog.text
    assert narrow.post(COMPLETIONS, prompt="a", max_tokens=1).status == 200


def test_a_fault_of_ours_in_a_stream_ends_it_with_an_error(narrow: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(_: Any, __: Any) -> str:
        raise LookupError("secret words")

    with monkeypatch.context() as patch:
        patch.setattr("reference_server.text.TextStream.push", planted)
        reply = narrow.post(COMPLETIONS, prompt="a", stream=True)
    assert reply.status == 200
    assert json.loads(reply.body.decode().split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert b"[DONE]" not in reply.body
    assert b"secret" not in reply.body


def test_what_runs_may_end_while_new_requests_are_told_to_go() -> None:
    with running() as server:
        with under_way(server, max_tokens=600) as link:
            answer = link.getresponse()
            head = answer.read(1)
            server.server.drain()
            reply = server.post(COMPLETIONS, prompt="late")
            assert (reply.status, reply.error["code"], reply.error["type"]) == (503, "draining", "service_unavailable")
            assert 1 <= int(reply.headers["retry-after"]) <= 30
            assert server.ask("GET", "/health").json["status"] == "draining"
            assert server.ask("GET", "/ready").status == 503
            assert (head + answer.read()).endswith(b"data: [DONE]\n\n")
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()
    assert server.problems == []


def test_a_body_that_is_half_sent_does_not_hold_up_the_end() -> None:
    with running() as server, socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as link:
        link.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{".encode())
        until(lambda: server.server.server_state.tasks)
        server.stop()
        answer = link.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"before the body was complete" in answer
    assert server.problems == []


def test_a_body_that_is_complete_too_late_is_told_to_go() -> None:
    with running() as server, under_way(server, max_tokens=600) as busy:
        busy.getresponse()
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as link:
            body = b'{"model": "tiny", "prompt": "a"}'
            link.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            until(lambda: len(server.server.server_state.tasks) == 2)
            server.server.drain()
            link.sendall(body)
            assert link.recv(65536).startswith(b"HTTP/1.1 503 ")


def test_what_is_not_done_when_the_time_is_up_is_told_so() -> None:
    answers: list[Any] = []
    with running(attrs.evolve(SMALL, drain_s=0)) as server:
        whole = threading.Thread(target=lambda: answers.append(server.post(COMPLETIONS, prompt="a", max_tokens=1500, ignore_eos=True)))
        whole.start()
        until(lambda: server.engine.vitals.health.running == 1)
        with under_way(server, max_tokens=1500) as link:
            answer = link.getresponse()
            head = answer.read(1)
            server.server.drain()
            sent = head + answer.read()
        assert b"[DONE]" not in sent
        error = json.loads(sent.decode().split("\n\n")[-2].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("service_unavailable", "aborted")
        whole.join(PATIENCE_S)
        assert (answers[0].status, answers[0].error["code"]) == (503, "aborted")
    assert server.problems == []


def test_the_time_to_come_back_is_told_from_the_pace_of_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("reference_server.api.state.time.monotonic", lambda: clock[0])
    state = State(SMALL)
    full_queue = Refused("r", RefusalReason.QUEUE_REQUESTS, needed=5, available=1, retryable=True)
    assert state.refused(full_queue).retry_after == 1  # nothing is known yet
    for second in (100, 102, 104, 106):
        clock[0] = second
        state._ends.append(second)
    clock[0] = 106.0
    assert state.refused(full_queue).retry_after == 8  # four places at 2 s each
    clock[0] = 1e6
    assert state.refused(full_queue).retry_after == MAX_RETRY_S


@pytest.mark.parametrize("reason", RefusalReason)
def test_every_reason_to_refuse_has_its_answer(reason: RefusalReason) -> None:
    for retryable in (True, False):
        error = errors.refused(Refused("r", reason, needed=7, available=3, retryable=retryable), 9)
        patient = retryable and reason not in (RefusalReason.NEVER_FITS, RefusalReason.CONTEXT_LIMIT)
        assert error.status == (429 if patient else 400)
        assert error.retry_after == (9 if patient else None)
        assert "needed 7" in error.message
        assert "available 3" in error.message
        assert error.body()["error"]["unit"] == errors.UNITS[reason]


def unread(server: Running, header: str = "", **fields: Any) -> socket.socket:
    """A client that asks for a long stream and never reads it. The server's end holds little, so that this shows at once."""
    for listener in server.server.servers[0].sockets:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.connect(("127.0.0.1", server.port))
    body = json.dumps({"model": "tiny", "prompt": "go on", "max_tokens": 3000, "ignore_eos": True, "stream": True, "n": 8, **fields}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{header}\r\n"
    link.sendall(head.encode() + body)
    return link


@pytest.mark.parametrize("header", ["", "x-forwarded-for: 10.1.2.3\r\n"])
def test_a_client_that_does_not_read_is_hung_up_on(caplog: pytest.LogCaptureFixture, header: str) -> None:
    with running(attrs.evolve(SMALL, pool_tokens=32_768, write_deadline_s=0.5)) as server, unread(server, header):
        until(lambda: bool(server.state.live))
        until(lambda: not server.state.live)
        server.settled()
        until(lambda: not server.server.server_state.connections)
    assert "has read nothing for 0.5 s" in caplog.text


def test_a_client_that_does_not_read_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its stream stands still for want of a reader; at the end of the drain it is cut, and no task has to be cancelled."""
    monkeypatch.setattr("reference_server.api.server.CUT_S", 0.2)
    with ExitStack() as later, running(attrs.evolve(SMALL, pool_tokens=32_768, drain_s=0.1)) as server:
        later.enter_context(unread(server))  # it is still there when the server has ended
        until(lambda: any(link.transport.get_write_buffer_size() > 2**16 for link in server.server.server_state.connections))
    assert not [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


@pytest.mark.parametrize("close", [True, False])
def test_a_body_that_is_too_large_is_answered_to_those_who_send_it_all(close: bool) -> None:
    with running(attrs.evolve(SMALL, max_body_bytes=1000)) as server, socket.create_connection(("127.0.0.1", server.port)) as link:
        body, last = b"x" * 3_000_000, "connection: close\r\n" if close else ""
        link.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{last}content-length: {len(body)}\r\n\r\n".encode())
        link.sendall(body)
        assert link.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_a_long_text_does_not_stop_the_other_threads() -> None:
    """While a text of 2 MB is tokenized another thread goes on: it gets the interpreter again and again, and not once at the end."""
    tokenizer, turns, going = tiny_tokenizer(), [0], True
    def spin() -> None:
        while going:
            turns[0] += 1
            time.sleep(0)
    thread = threading.Thread(target=spin)
    thread.start()
    try:
        until(lambda: turns[0] > 0)
        before = turns[0]
        assert len(tokenizer.encode("a" * 2_000_000)) == 2_000_000
        assert turns[0] - before > 20
    finally:
        going = False
        thread.join()
