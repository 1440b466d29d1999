"""Counters and histograms in Prometheus' text format."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping

from longspan.serve.engine import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
_TIMES = {
    "time_to_first_token_seconds": "From the arrival of a request to its first token.",
    "inter_token_latency_seconds": "Mean time between the tokens of a request.",
    "e2e_request_latency_seconds": "From the arrival of a request to its end.",
}


class Histogram:
    """Numbers of seconds up to each bound."""

    def __init__(self) -> None:
        self.counts, self.total = [0] * (len(_BOUNDS) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(_BOUNDS, value)] += 1
        self.total += value


class Metrics:
    """What the HTTP server counts, beside the engine's counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._responses: dict[tuple[str, int], int] = {}
        self._times = {name: Histogram() for name in _TIMES}

    def count_response(self, endpoint: str, status: int) -> None:
        """Count a response, by the route and the status."""
        with self._lock:
            self._responses[endpoint, status] = self._responses.get((endpoint, status), 0) + 1

    def observe(self, first: float | None, last: float, tokens: int) -> None:
        """Count a finished request.

        Args:
            first: Seconds until its first token; None if there was none.
            last: Seconds until its end.
            tokens: Tokens generated.
        """
        with self._lock:
            self._times["e2e_request_latency_seconds"].observe(last)
            if first is not None:
                self._times["time_to_first_token_seconds"].observe(first)
                if tokens > 1:
                    self._times["inter_token_latency_seconds"].observe((last - first) / (tokens - 1))

    def render(self, stats: EngineStats, active: int, states: tuple[int, int]) -> str:
        """Return all metrics.

        Args:
            stats: The engine's counters.
            active: Number of completions and uploads of states that are being answered.
            states: Number and bytes of saved states.
        """
        lines: list[str] = []
        for name, kind, value, text in _engine_metrics(stats):
            lines += _series(name, kind, text, {"": value})
        gauges = (
            ("num_requests_active", active, "Completions and uploads of states that are being answered."),
            ("saved_states", states[0], "Saved states."),
            ("saved_state_bytes", states[1], "Bytes of saved states."),
        )
        for name, number, text in gauges:
            lines += _series(name, "gauge", text, {"": number})
        finished = {f'{{finished_reason="{reason}"}}': number for reason, number in sorted(stats.finished.items())}
        lines += _series("request_success_total", "counter", "Choices that ended, by reason.", finished)
        with self._lock:
            found = sorted(self._responses.items())
            responses = {f'{{endpoint="{route}",code="{status}"}}': number for (route, status), number in found}
            lines += _series("http_responses_total", "counter", "Responses by route and status.", responses)
            for name, histogram in self._times.items():
                lines += _histogram(name, _TIMES[name], histogram)
        return "\n".join(lines) + "\n"


def _engine_metrics(stats: EngineStats) -> list[tuple[str, str, float, str]]:
    cache = stats.cache
    rate = cache.hit_tokens / cache.query_tokens if cache.query_tokens else 0.0
    return [
        ("requests_total", "counter", stats.requests, "Requests accepted."),
        ("num_requests_waiting", "gauge", stats.waiting, "Choices that wait for a slot."),
        ("num_requests_reading", "gauge", stats.reading, "Prompts that are being read."),
        ("num_requests_running", "gauge", stats.running, "Choices that are being decoded."),
        ("slots", "gauge", stats.slots, "Slots."),
        ("prompt_tokens_total", "counter", stats.prompt_tokens, "Tokens of prompts that were read."),
        ("generation_tokens_total", "counter", stats.completion_tokens, "Tokens generated."),
        ("decode_steps_total", "counter", stats.steps, "Decode steps."),
        ("prefill_chunks_total", "counter", stats.chunks, "Chunks of prompts that were read."),
        ("decode_seconds_total", "counter", stats.decode_seconds, "Time of the device in decode steps."),
        ("prefill_seconds_total", "counter", stats.prefill_seconds, "Time of the device in chunks of prompts."),
        ("spec_decode_draft_tokens_total", "counter", stats.guessed_tokens, "Draft tokens of speculation."),
        ("spec_decode_accepted_tokens_total", "counter", stats.accepted_tokens, "Draft tokens that were accepted."),
        ("state_bytes", "gauge", stats.state_bytes, "Bytes of one slot's state."),
        ("prefix_cache_prompts_total", "counter", cache.queries, "Prompts looked up in the prefix cache."),
        ("prefix_cache_prompt_hits_total", "counter", cache.hits, "Prompts of which a prefix was found."),
        ("prefix_cache_queries_total", "counter", cache.query_tokens, "Tokens looked up in the prefix cache."),
        ("prefix_cache_hits_total", "counter", cache.hit_tokens, "Tokens found in the prefix cache."),
        ("prefix_cache_hit_rate", "gauge", rate, "Fraction of tokens found in the prefix cache."),
        ("prefix_cache_bytes", "gauge", cache.bytes, "Bytes of the prefix cache in memory."),
        ("prefix_cache_states", "gauge", cache.states, "States of the prefix cache in memory."),
        ("prefix_cache_evictions_total", "counter", cache.evictions, "States dropped to stay within the budget."),
        ("prefix_cache_disk_hits_total", "counter", cache.disk_hits, "States loaded from disk."),
        ("prefix_cache_disk_bytes", "gauge", cache.disk_bytes, "Bytes of the prefix cache on disk."),
    ]


def _series(name: str, kind: str, text: str, values: Mapping[str, float]) -> list[str]:
    head = [f"# HELP longspan_{name} {text}", f"# TYPE longspan_{name} {kind}"]
    return head + [f"longspan_{name}{labels} {value}" for labels, value in values.items()]


def _histogram(name: str, text: str, histogram: Histogram) -> list[str]:
    lines, count = _series(name, "histogram", text, {}), 0
    for bound, number in zip((*map(str, _BOUNDS), "+Inf"), histogram.counts, strict=True):
        count += number
        lines.append(f'longspan_{name}_bucket{{le="{bound}"}} {count}')
    return [*lines, f"longspan_{name}_sum {histogram.total}", f"longspan_{name}_count {count}"]
