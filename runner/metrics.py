"""What a process counts of itself for ``GET /metrics``; names and labels are a contract (docs/metrics.md).

Counting is a few dictionary operations: it is done per turn, call or batch, never per update. What a live object knows
anyway is not counted but read, when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]
MOST_SERIES: Final = 500
OTHER: Final = "other"
QUICK: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LONG: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
PROJECT: Final = "project"
"""A label that is shown only to tokens of that project."""


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One metric. A label has few values, bounded by the configuration or by the code; never an id.

    ``buckets``: upper bounds of a histogram's, rising.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


@dataclass(slots=True)
class Observed:
    """What a histogram saw: how many values fell into each bucket and above the last, and their sum."""

    counts: list[int]
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What a source reads now."""

    family: Family
    value: float
    labels: Labels = ()


Source = Callable[[], Iterable[Sample]]

INFO: Final = Family("acp_runner_build_info", "gauge", "Always 1; says which version runs.", ("version",))
DRAINING: Final = Family("acp_runner_draining", "gauge", "1 while the replica admits nothing because it shuts down.")

TURNS: Final = Family("acp_runner_turns_total", "counter", "Turns that this replica ended.", ("outcome", "harness"))
TURN_ERRORS: Final = Family("acp_runner_turn_errors_total", "counter", "Turns that ended with an error.", ("code",))
TURNS_RUNNING: Final = Family("acp_runner_turns_running", "gauge", "Turns that run, or are being admitted, now.")
TURNS_MAX: Final = Family("acp_runner_turns_max", "gauge", "[server] max_turns.")
STARTS: Final = Family("acp_runner_starts_total", "counter", "How turns got their agent, and why.", ("start", "reason"))
ADMISSION: Final = Family(
    "acp_runner_admission_seconds", "histogram", "From a turn's dispatch to its durable admission.", (), QUICK
)
READY: Final = Family(
    "acp_runner_ready_seconds", "histogram", "From a turn's dispatch to an agent that can take it.", ("start",), QUICK
)
FIRST_UPDATE: Final = Family(
    "acp_runner_first_update_seconds",
    "histogram",
    "From a turn's dispatch to its first update.",
    ("start",),
    LONG,
)
TURN_SECONDS: Final = Family(
    "acp_runner_turn_seconds", "histogram", "From a turn's dispatch to its ending.", ("outcome",), LONG
)
REFUSALS: Final = Family("acp_runner_dispatch_refusals_total", "counter", "Dispatches that became no turn.", ("code",))
PROBLEMS: Final = Family(
    "acp_runner_http_problems_total", "counter", "Requests of any route that were answered with a problem.", ("code",)
)
PROMPTS_QUEUED: Final = Family("acp_runner_prompts_queued", "gauge", "Prompts that wait at this replica.")
SESSIONS: Final = Family("acp_runner_sessions_loaded", "gauge", "Sessions in memory, at work or not.")

SEATS: Final = Family("acp_runner_seats", "gauge", "Sandboxes by the state of their seat.", ("state",))
SEATS_MAX: Final = Family("acp_runner_seats_max", "gauge", "[pool] max_seats; those being torn down count against it.")
TEARDOWNS_UNPROVEN: Final = Family(
    "acp_runner_teardowns_unproven_total", "counter", "Tries to tear a sandbox down that could not be proven."
)
SPARES: Final = Family("acp_runner_spares_total", "counter", "What became of spares.", ("event",))

DAYTONA_SANDBOXES: Final = Family("acp_runner_daytona_sandboxes", "gauge", "Sandboxes at Daytona.", ("state",))
DAYTONA_MAX: Final = Family("acp_runner_daytona_sandboxes_max", "gauge", "[daytona] max_running; 0: no bound here.")
DAYTONA_AVAILABLE: Final = Family(
    "acp_runner_daytona_available", "gauge", "0 while the key, the account or the connection is refused."
)
DAYTONA_CHANGES: Final = Family(
    "acp_runner_daytona_changes_total", "counter", "What became of sandboxes at Daytona.", ("change",)
)
DAYTONA_FAILURES: Final = Family(
    "acp_runner_daytona_failures_total",
    "counter",
    "Calls to Daytona that failed.",
    ("call", "action"),
)

STREAMS_OPEN: Final = Family("acp_runner_streams_open", "gauge", "Event streams to clients that are open.")
STREAMS_CUT: Final = Family("acp_runner_streams_cut_total", "counter", "Event streams cut by the server.", ("reason",))

RECORDS_WRITTEN: Final = Family(
    "acp_runner_records_written_total", "counter", "Records that were committed to the store; given twice counts twice."
)
RECORDS_QUARANTINED: Final = Family(
    "acp_runner_records_quarantined_total", "counter", "Records that were set aside, by reason.", ("reason",)
)
RECORDS_DROPPED: Final = Family(
    "acp_runner_records_dropped_total", "counter", "Records that were dropped on purpose.", ("reason",)
)
STORE_ERRORS: Final = Family(
    "acp_runner_store_errors_total", "counter", "Calls of the store itself that failed, retries included.", ("code",)
)
RETENTION_DELETED: Final = Family(
    "acp_runner_retention_deleted_rows_total", "counter", "Rows that retention deleted.", ("kind",)
)

STREAM_UNCONFIRMED: Final = Family(
    "acp_runner_record_stream_unconfirmed_records", "gauge", "Records that the store may not have yet."
)
STREAM_UNCONFIRMED_BYTES: Final = Family(
    "acp_runner_record_stream_unconfirmed_bytes", "gauge", "What those take in memory."
)
STREAM_PUBLISHED: Final = Family(
    "acp_runner_record_stream_published_records_total", "counter", "Records that the stream took for the first time."
)
STREAM_REPUBLISHED: Final = Family(
    "acp_runner_record_stream_republished_records_total", "counter", "Records that were given to the stream again."
)
STREAM_BYPASSED: Final = Family(
    "acp_runner_record_stream_bypassed_records_total", "counter", "Records that went to the store past the stream."
)
STREAM_CIRCUIT_OPEN: Final = Family(
    "acp_runner_record_stream_circuit_open", "gauge", "1 while the stream gives no answer and is left alone."
)
STREAM_FULL: Final = Family("acp_runner_record_stream_full", "gauge", "1 while the stream takes no more.")

SPOOL_WRITES: Final = Family("acp_runner_spool_writes", "gauge", "Writes that wait in the local spool for the store.")
SPOOL_BYTES: Final = Family("acp_runner_spool_bytes", "gauge", "What they take on disk.")
LIVE_FILE_BYTES: Final = Family("acp_runner_live_file_bytes", "gauge", "Size of the live file.")
LIVE_FILE_UNWRITTEN: Final = Family(
    "acp_runner_live_file_unwritten_total", "counter", "Entries of the live file that could not be written."
)
LIVE_FILE_FAILING: Final = Family(
    "acp_runner_live_file_failing", "gauge", "1 while the live file cannot be written: a kill would lose what is shown."
)

TOKENS: Final = Family("acp_runner_tokens_total", "counter", "Tokens as agents report them.", (PROJECT, "kind"))
COST: Final = Family("acp_runner_cost_total", "counter", "Cost as agents report it.", (PROJECT, "currency"))
MODEL_REQUESTS: Final = Family(
    "acp_runner_model_requests_total",
    "counter",
    "Model requests that came by the credential proxy.",
    ("harness", "result"),
)
MODEL_TOKENS: Final = Family(
    "acp_runner_model_tokens_total",
    "counter",
    "Tokens as models count them in answers that went through the credential proxy.",
    (PROJECT, "harness", "kind"),
)
SANDBOX_SECONDS: Final = Family(
    "acp_runner_sandbox_seconds_total", "counter", "Life of sandboxes, in turns and kept warm.", (PROJECT, "use")
)

LEASES_LOST: Final = Family("acp_runner_leases_lost_total", "counter", "Sessions whose lease was lost.", ("reason",))
PLANE_ERRORS: Final = Family(
    "acp_runner_plane_errors_total", "counter", "Questions to the lease plane without an answer in time."
)

WORKER_ENTRIES: Final = Family(
    "acp_runner_worker_entries_total", "counter", "What a worker did with entries of the record stream.", ("result",)
)
WORKER_OUTAGES: Final = Family(
    "acp_runner_worker_outages_total", "counter", "How often a worker found its stream or store away."
)
WORKER_GROUPS: Final = Family(
    "acp_runner_worker_groups_made_total", "counter", "How often a worker made the stream's group anew."
)

FAMILIES: Final[tuple[Family, ...]] = tuple(known for known in list(globals().values()) if isinstance(known, Family))


@dataclass(slots=True)
class Metrics:
    """The numbers of one process; used on its event loop only. Of each metric it keeps a bounded number of series."""

    _counts: dict[Family, dict[Labels, float]] = field(default_factory=dict)
    _seen: dict[Family, dict[Labels, Observed]] = field(default_factory=dict)
    _sources: list[Source] = field(default_factory=list)

    def add(self, family: Family, *labels: str, amount: float = 1) -> None:
        """Count; what comes beyond 500 sets of labels is counted as ``other``."""
        series = self._counts.setdefault(family, {})
        key = labels if labels in series or len(series) < MOST_SERIES else (OTHER,) * len(labels)
        series[key] = series.get(key, 0) + amount

    def observe(self, family: Family, value: float, *labels: str) -> None:
        """Note a value of a histogram."""
        series = self._seen.setdefault(family, {})
        seen = series.get(labels)
        if seen is None:
            seen = series[labels] = Observed([0] * (len(family.buckets) + 1))
        seen.counts[bisect_left(family.buckets, value)] += 1
        seen.total += value

    def read_by(self, source: Source) -> None:
        """Ask ``source`` whenever the numbers are read; it must not wait for anything."""
        self._sources.append(source)

    def numbers(self) -> dict[Family, dict[Labels, float]]:
        """Counters and gauges now; of a metric that several sources know, the sum."""
        found = {family: dict(series) for family, series in self._counts.items()}
        for source in self._sources:
            for sample in source():
                series = found.setdefault(sample.family, {})
                series[sample.labels] = series.get(sample.labels, 0) + sample.value
        return found

    def histograms(self) -> dict[Family, dict[Labels, Observed]]:
        """What was observed."""
        return self._seen


def samples(family: Family, values: Iterable[tuple[str, float]]) -> Sequence[Sample]:
    """Samples of a metric with one label."""
    return [Sample(family, value, (label,)) for label, value in values]
