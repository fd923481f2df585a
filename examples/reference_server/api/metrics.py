"""Figures for Prometheus, under names that start with kvsched_.

What lives here: what is measured at the door (latencies, responses), and a collector that reads the engine's vitals when
somebody scrapes. What does not: any question to the engine's thread, so a scrape answers while the engine is stuck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from reference_server.stats import Vitals

FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
NEXT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
WHOLE_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
"""Upper ends of the histograms' buckets, in seconds: from what a GPU needs to what a CPU does."""
COUNTERS = {
    "generation_tokens": ("emitted", "Tokens generated and delivered."),
    "prefill_tokens": ("prefill_tokens", "Prompt tokens computed, those computed again included."),
    "recomputed_tokens": ("recomputed_tokens", "Tokens computed again after a retraction."),
    "cached_prompt_tokens": ("cached_tokens", "Prompt tokens that came from the prefix cache, resumes included."),
    "retractions": ("retractions", "Times that a running request lost its pages and went back to the queue."),
    "evicted_pages": ("evicted_pages", "Cached pages that were forgotten to make room."),
}
"""Counters that are the scheduler's own counts: name, key of `Vitals.totals`, and what it is."""


class Metrics:
    """The registry of one app, and what handlers measure."""

    def __init__(self, look: Callable[[], tuple[Vitals, bool, bool] | None]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_FromVitals(look))
        ProcessCollector(registry=self.registry)
        self.responses = Counter("kvsched_http_responses", "HTTP responses by status code; 499: the client went away.", ["code"],
                                 registry=self.registry)
        self.first = Histogram("kvsched_time_to_first_token_seconds", "From the arrival of a request to its first token.",
                               buckets=FIRST_S, registry=self.registry)
        self.following = Histogram("kvsched_inter_token_latency_seconds", "From one token of a sample to its next.",
                                   buckets=NEXT_S, registry=self.registry)
        self.whole = Histogram("kvsched_request_duration_seconds", "From the arrival of a request to its end, however it ended.",
                               buckets=WHOLE_S, registry=self.registry)

    async def scrape(self, request: Request) -> Response:
        """GET /metrics, in the format that the scraper asks for."""
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.registry), media_type=None, headers={"content-type": kind})


class _FromVitals(Collector):
    """Reads the vitals at scrape time. Before the model is loaded there are none, and nothing is reported."""

    def __init__(self, look: Callable[[], tuple[Vitals, bool, bool] | None]) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        found = self._look()
        if found is None:
            return
        vitals, live, ready = found
        health = vitals.health
        gauge = GaugeMetricFamily
        yield gauge("kvsched_live", "Whether work moves, or there is none.", value=live)
        yield gauge("kvsched_ready", "Whether another request should be sent here.", value=ready)
        yield gauge("kvsched_requests_running", "Requests that hold pages.", value=health.running)
        yield gauge("kvsched_requests_waiting", "Requests that hold none and wait.", value=health.waiting)
        yield gauge("kvsched_still_steps", "Steps since the last progress; 0 when idle.", value=health.still_steps)
        pages = gauge("kvsched_pages", "Pages of the KV pool by state.", labels=["state"])
        for state, count in vitals.occupancy.items():
            if state != "usable":  # the sum of the others
                pages.add_metric([state], count)
        yield pages
        for name, (key, text) in COUNTERS.items():
            yield CounterMetricFamily(f"kvsched_{name}", text, value=vitals.totals[key])
        yield CounterMetricFamily("kvsched_prompt_tokens", "Prompt tokens of accepted requests.", value=vitals.prompt_tokens)
        yield CounterMetricFamily("kvsched_steps", "Steps computed and committed.", value=vitals.steps)
        yield CounterMetricFamily("kvsched_decode_steps", "Those of them without prefill.", value=vitals.decode_steps)
        yield CounterMetricFamily("kvsched_step_failures", "Steps in which the model failed for some request.", value=vitals.failures)
        yield CounterMetricFamily("kvsched_step_seconds", "Time in the forward pass.", value=vitals.model_s)
        yield CounterMetricFamily("kvsched_scheduler_seconds", "Time inside kvsched.", value=vitals.scheduler_s)
        yield CounterMetricFamily("kvsched_decode_step_seconds", "Time in the forward pass of steps without prefill.", value=vitals.decode_model_s)
        yield CounterMetricFamily("kvsched_decode_scheduler_seconds", "Time inside kvsched in those steps.", value=vitals.decode_scheduler_s)
        yield CounterMetricFamily("kvsched_decode_wall_seconds", "Time from commit to commit of those steps.", value=vitals.decode_wall_s)
        yield _by("requests", "finish", "Requests that ended, each sample counted, by how.", vitals.ended)
        yield _by("refusals", "reason", "Requests that the scheduler refused, by why.", vitals.refused)


def _by(name: str, label: str, text: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"kvsched_{name}", text, labels=[label])
    for key, count in counts.items():
        family.add_metric([key], count)
    return family
