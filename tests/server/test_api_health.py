"""Health, readiness, metrics and the scheduler's state tell the truth: while loading, idle, busy, stuck, stalled and dead."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running import PATIENCE_S, SMALL, Running, running, tiny_served, until

from reference_server.api.state import Served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def figures(server: Running) -> dict[str, float]:
    """What /metrics says: name, with labels in braces, to value."""
    reply = server.ask("GET", "/metrics")
    assert reply.status == 200
    found = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


@contextmanager
def streaming(server: Running, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    """A stream under way, whose client leaves at the end."""
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    body = {"model": "tiny", "prompt": "go on", "max_tokens": 2000, "ignore_eos": True, "stream": True, **fields}
    link.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
    try:
        yield link.getresponse()
    finally:
        link.close()


def test_while_the_model_is_loaded() -> None:
    gate = threading.Event()

    def load() -> Served:
        gate.wait(PATIENCE_S)
        return tiny_served(SMALL)

    with running(load=load, wait=False) as server:
        health = server.ask("GET", "/health")
        assert (health.status, health.json["status"], health.json["live"]) == (200, "loading", True)
        ready = server.ask("GET", "/ready")
        assert (ready.status, ready.json["status"]) == (503, "loading")
        assert ready.headers["retry-after"]
        reply = server.post(COMPLETIONS, prompt="a")
        assert (reply.status, reply.error["code"]) == (503, "loading")
        assert int(reply.headers["retry-after"]) >= 1
        assert server.ask("GET", "/v1/models").json == {"object": "list", "data": []}
        assert server.ask("GET", "/").status == 200
        assert "kvsched_steps_total" not in figures(server)
        debug = server.ask("GET", "/debug/scheduler")
        assert (debug.status, debug.json["error"]) == (503, "the model is being loaded")
        assert debug.json["vitals"] is debug.json["scheduler"] is None
        gate.set()
        until(lambda: server.ask("GET", "/ready").status == 200)
        assert server.ask("GET", "/ready").json["status"] == "idle"
        assert server.post(COMPLETIONS, prompt="a", max_tokens=1).status == 200


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load() -> Served:
        raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"), running(load=load):
        pass


def test_a_server_that_ends_while_it_loads() -> None:
    gate = threading.Event()

    def load() -> Served:
        gate.wait(PATIENCE_S)
        raise OSError("too late to matter")

    with running(load=load, wait=False) as server:
        server.stop()
    gate.set()
    assert server.problems == []


def test_live_while_tokens_flow_and_when_there_is_no_work() -> None:
    with running() as server:
        assert server.ask("GET", "/health").json["status"] == "idle"
        with streaming(server) as answer:
            answer.read(1)
            found = server.ask("GET", "/health")
            assert (found.status, found.json["status"], found.json["running"]) == (200, "live", 1)
            assert server.ask("GET", "/ready").status == 200
            assert server.ask("HEAD", "/health").body == b""
        until(lambda: server.ask("GET", "/health").json["status"] == "idle")


def test_a_step_that_does_not_end_is_seen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reference_server.engine.ANSWER_S", 0.05)
    gate, entered = threading.Event(), threading.Event()

    def stand(*_: Any) -> None:
        entered.set()
        gate.wait(PATIENCE_S)

    with running(attrs.evolve(SMALL, step_deadline_s=0.05)) as server:
        handle = server.engine.executor.model.register_forward_pre_hook(stand)  # type: ignore[attr-defined]  # it is a torch module
        with streaming(server, max_tokens=3) as answer:
            entered.wait(PATIENCE_S)
            until(lambda: server.ask("GET", "/health").status == 503)
            assert server.ask("GET", "/health").json["status"] == "stuck"
            assert server.ask("GET", "/ready").status == 503
            reply = server.post(COMPLETIONS, prompt="a")
            assert (reply.status, reply.error["code"]) == (503, "stuck")
            debug = server.ask("GET", "/debug/scheduler")
            assert debug.status == 503
            assert "did not answer" in debug.json["error"]
            assert debug.json["vitals"]["occupancy"]["usable"] == 256
            assert len(debug.json["requests"]) == 1
            assert figures(server)["kvsched_live"] == 0
            handle.remove()
            gate.set()
            assert answer.read().endswith(b"data: [DONE]\n\n")
        until(lambda: server.ask("GET", "/health").status == 200)


def test_work_that_does_not_move_is_named_with_its_reason() -> None:
    def hold() -> None:
        server.engine.scheduler.hold_pages("away", 8)

    def let_go() -> None:
        server.engine.scheduler.release_pages("away")

    with running(attrs.evolve(SMALL, pool_tokens=160, stall_steps=3)) as server:
        server.engine._tell(hold)
        with streaming(server, prompt="x" * 40, max_tokens=20) as answer:
            until(lambda: server.ask("GET", "/health").status == 503)
            assert server.ask("GET", "/health").json["status"] == "stalled"
            ready = server.ask("GET", "/ready")
            assert (ready.status, ready.json["status"]) == (503, "stalled")
            found = server.ask("GET", "/debug/scheduler").json
            ((key, why),) = found["scheduler"]["why"].items()
            assert key in found["requests"]
            assert (why["reason"], why["short_by"]) == ("pinned_pages", 2)
            assert why["waited_steps"] >= 3
            assert server.post(COMPLETIONS, prompt="a").error["code"] == "stalled"
            server.engine._tell(let_go)
            assert answer.read().endswith(b"data: [DONE]\n\n")
        until(lambda: server.ask("GET", "/ready").status == 200)


def test_an_engine_that_died_is_dead_and_its_clients_are_told() -> None:
    def die(*_: Any) -> None:
        raise SystemExit

    with running() as server:
        with streaming(server) as answer:
            head = answer.read(1)
            server.engine.executor.model.register_forward_pre_hook(die)  # type: ignore[attr-defined]  # it is a torch module
            sent = head + answer.read()
        assert b"[DONE]" not in sent
        assert b'"type": "server_error"' in sent
        until(lambda: server.ask("GET", "/health").status == 503)
        assert server.ask("GET", "/health").json["status"] == "dead"
        assert server.ask("GET", "/ready").status == 503
        assert server.post(COMPLETIONS, prompt="a").error["code"] == "dead"
        debug = server.ask("GET", "/debug/scheduler")
        assert debug.status == 503
        assert "ended" in debug.json["error"]


def test_metrics_count_what_happened() -> None:
    with running(attrs.evolve(SMALL, max_queued_requests=4)) as server:
        before = figures(server)
        assert before["kvsched_pages{state=free}"] == 256
        assert before["kvsched_ready"] == 1
        prompt = "metrics " * 6
        for _ in range(2):
            assert server.post(COMPLETIONS, prompt=prompt, max_tokens=5, ignore_eos=True).status == 200
        assert server.post(COMPLETIONS, prompt="a", max_tokens=9999).status == 400
        assert server.post(COMPLETIONS, prompt="a", n=5).status == 400
        assert server.ask("GET", "/nothing").status == 404
        with streaming(server) as answer:
            answer.read(1)
            assert figures(server)["kvsched_requests_running"] == 1
            assert figures(server)["kvsched_pages{state=private}"] >= 1
        server.settled()
        after = figures(server)
        assert after["kvsched_prompt_tokens_total"] == 2 * len(prompt) + len("go on")
        assert after["kvsched_cached_prompt_tokens_total"] == (len(prompt) - 1) // 16 * 16
        assert after["kvsched_generation_tokens_total"] >= 11
        assert after["kvsched_requests_total{finish=length}"] == 2
        assert after["kvsched_requests_total{finish=abort}"] == 1
        assert after["kvsched_refusals_total{reason=context_limit}"] == 1
        assert after["kvsched_refusals_total{reason=queue_requests}"] == 1
        assert after["kvsched_http_responses_total{code=404}"] == 1
        assert after["kvsched_http_responses_total{code=400}"] == 2
        assert after["kvsched_time_to_first_token_seconds_count"] == 3
        assert after["kvsched_inter_token_latency_seconds_count"] >= 8
        assert after["kvsched_request_duration_seconds_count"] == 3
        assert after["kvsched_steps_total"] > after["kvsched_decode_steps_total"] > 0
        assert after["kvsched_step_seconds_total"] > after["kvsched_scheduler_seconds_total"] > 0
        buckets = [value for name, value in after.items() if name.startswith("kvsched_pages{")]
        assert sum(buckets) == 256
        assert {"kvsched_retractions_total", "kvsched_evicted_pages_total", "kvsched_step_failures_total"} <= set(after)
        assert "process_resident_memory_bytes" in after


def test_metrics_in_both_formats() -> None:
    with running() as server:
        plain = server.ask("GET", "/metrics")
        assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
        opened = server.ask("GET", "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert opened.headers["content-type"].startswith("application/openmetrics-text")
        assert opened.body.endswith(b"# EOF\n")


def test_a_stream_that_waits_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reference_server.api.answer.PULSE_S", 0.02)
    with running() as server:
        handle = server.engine.executor.model.register_forward_pre_hook(lambda *_: time.sleep(0.1))  # type: ignore[attr-defined]  # it is a torch module
        with streaming(server, max_tokens=3) as answer:
            sent = answer.read()
        handle.remove()
        assert b"\n\n: still here\n\n" in sent
        assert sent.endswith(b"data: [DONE]\n\n")
        with server.client() as client:
            events = list(client.completions.create(model="tiny", prompt="a", max_tokens=2, stream=True))
        assert events[-1].choices[0].finish_reason


def test_debug_shows_who_waits_for_what() -> None:
    with running(attrs.evolve(SMALL, max_running=1)) as server, streaming(server) as first:
        first.read(1)
        with streaming(server, prompt="second", user="bob", priority=3):
            until(lambda: server.engine.vitals.health.waiting == 1)
            found = server.ask("GET", "/debug/scheduler").json
            ((key, why),) = found["scheduler"]["why"].items()
            assert (why["reason"], found["requests"][key]["tenant"]) == ("running_limit", "bob")
            assert found["server"]["settings"]["max_running"] == 1
            running_now = found["scheduler"]["requests"][found["scheduler"]["running"][0]]
            assert running_now["prompt"] == len("go on")
            assert running_now["max_new_tokens"] == 2000
