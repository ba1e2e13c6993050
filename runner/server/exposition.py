"""``GET /metrics``: what a process counts, in the forms that Prometheus reads (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from aiohttp import web

from runner.errors import RunnerError
from runner.metrics import FAMILIES, PROJECT, Family, Labels, Metrics, Observed
from runner.server.auth import AccessToken, Gate
from runner.server.context import CALLER, CONTEXT, SAFE_HEADERS, problem_answer, query

if TYPE_CHECKING:
    from prometheus_client.core import Metric

TEXT_FORMS: Final = ("text/plain", "application/openmetrics-text")


async def get_metrics(request: web.Request) -> web.Response:
    """The numbers of this process; those by project only of the caller's."""
    query(request)
    return _answer(request, request.app[CONTEXT].metrics, request[CALLER].project)


def build_exposition(
    metrics: Metrics, tokens: Iterable[AccessToken], *, bind_host: str, hosts: Iterable[str]
) -> web.Application:
    """An application with ``GET /metrics`` alone, of a process that has no sessions; ``hosts``: see ``Gate``."""
    gate = Gate(tokens, bind_host=bind_host, allowed_hosts=hosts)

    async def answer(request: web.Request) -> web.Response:
        try:
            caller = gate.admit(request.headers, "read")
            query(request)
        except RunnerError as error:
            return problem_answer(error)
        return _answer(request, metrics, caller.project)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    return app


def _answer(request: web.Request, metrics: Metrics, project: str) -> web.Response:
    body, form = exposed(metrics, request.headers.get("Accept", ""), project)
    return web.Response(body=body, headers={**SAFE_HEADERS, "Content-Type": form})


def exposed(metrics: Metrics, accept: str, project: str | None = None) -> tuple[bytes, str]:
    """The numbers as a body and its type, with those of the process itself.

    Args:
        metrics: what was counted.
        accept: the header; the text format where it does not ask for OpenMetrics.
        project: whose series to show of what is counted by project; None: every one's.
    """
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_View(metrics, project))
    encode, form = choose_encoder(accept)
    return encode(registry), form


class _View:
    """The collector of one request."""

    def __init__(self, metrics: Metrics, project: str | None) -> None:
        self._metrics = metrics
        self._project = project

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        numbers, seen = self._metrics.numbers(), self._metrics.histograms()
        for family in FAMILIES:
            if family.kind == "histogram":
                made = HistogramMetricFamily(family.name, family.text, labels=family.labels)
                for labels, one in seen.get(family, {}).items():
                    made.add_metric(labels, buckets=_buckets(family, one), sum_value=one.total)
                yield made
                continue
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            plain = kind(family.name, family.text, labels=family.labels)
            series = numbers.get(family, {})
            if not family.labels and family.kind == "counter":
                series = {(): 0.0} | series
            for labels, value in series.items():
                if self._shown(family, labels):
                    plain.add_metric(labels, value)
            yield plain

    def _shown(self, family: Family, labels: Labels) -> bool:
        return self._project is None or PROJECT not in family.labels or self._project in labels[:1]


def _buckets(family: Family, seen: Observed) -> list[tuple[str, float]]:
    bounds = [*(str(bound) for bound in family.buckets), "+Inf"]
    return list(zip(bounds, accumulate(seen.counts), strict=True))
