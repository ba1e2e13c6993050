"""What a scrape of ``GET /metrics`` says."""

from __future__ import annotations

from typing import Any

from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families


async def scrape(http: ClientSession, **headers: str) -> Scraped:
    async with http.get("/metrics", headers=headers) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/plain"
        return Scraped(await answer.text())


class Scraped:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples = [sample for family in self.families.values() for sample in family.samples]

    def of(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels; 0 without one."""
        found = [one for one in self._samples if one.name == f"acp_runner_{name}"]
        return float(sum(one.value for one in found if labels.items() <= one.labels.items()))

    def all(self, name: str) -> list[dict[str, Any]]:
        """The labels of a metric's samples."""
        return [one.labels for one in self._samples if one.name == f"acp_runner_{name}"]
