"""Several language models served in one loop, with continuous batching: who waits, who is admitted, who is refused.

The server knows no memory: a model takes what a request may need when it is admitted, or raises
``torch.OutOfMemoryError``, and the request goes on waiting. So what differs between two arrangements of the same models
is their limits, and nothing else.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..measurement import percentile
from .trace import Arrival


@dataclass
class Request:
    """An arrival, and what became of it."""

    arrival: Arrival
    first_s: float | None = None
    """From its arrival to its first token."""
    is_refused: bool = False
    tokens: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """All its tokens are there."""
        return len(self.tokens) >= self.arrival.new


class Model(Protocol):
    """A model as the server sees it."""

    name: str

    def admit(self, request: Request) -> int:
        """Takes the memory that the request may need, and reads its prompt; its first token.

        Raises:
            torch.OutOfMemoryError: there is no such memory now. All is as it was.
        """

    def step(self) -> None:
        """Queues the next token of all requests that are admitted."""

    def said(self) -> list[int]:
        """These tokens, in the order in which the requests were admitted."""

    def leave(self, rows: list[int]) -> None:
        """Those requests are done: their memory goes back."""


class Residence(Protocol):
    """Where models are while nobody asks anything of them."""

    def is_there(self, model: Model) -> bool:
        """It can compute now."""

    def call(self, model: Model, idle: list[Model]) -> bool:
        """Has one come that is not there; any of ``idle`` (used last at the end) may go in its place.

        Returns:
            It is on its way; else there is no room now.
        """

    def make_room(self, idle: list[Model]) -> None:
        """A request found no memory: one of ``idle`` may go."""


class AllResident:
    """Every model is there all the time."""

    def is_there(self, model: Model) -> bool:
        return True

    def call(self, model: Model, idle: list[Model]) -> bool:
        return True

    def make_room(self, idle: list[Model]) -> None:
        pass


class Clock:
    """Seconds since :meth:`start`."""

    def start(self) -> None:
        self._began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._began

    def wait_until(self, at: float) -> None:
        time.sleep(max(0.0, at - self.now()))


@dataclass
class _Line:
    """Models that share memory, and whoever waits for it: first come, first served, so that nobody is overtaken for
    ever by requests that need less."""

    models: list[Model]
    waiting: deque[Request] = field(default_factory=deque)


class Server:
    """Serves traces.

    Args:
        groups: models that share memory, group by group.
        goal_s: a request whose first token has not begun to be computed so long after its arrival is refused.
        prefills: prompts that a model reads at most between two steps of the running requests.
        residence: who sleeps, and who wakes.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Model]],
        goal_s: float,
        clock: Clock | None = None,
        prefills: int = 4,
        residence: Residence | None = None,
    ) -> None:
        self._lines = [_Line(list(group)) for group in groups]
        self._line_of = {model.name: line for line in self._lines for model in line.models}
        self._models = {model.name: model for line in self._lines for model in line.models}
        self._running: dict[str, list[Request]] = {name: [] for name in self._models}
        self._used = dict.fromkeys(self._models, 0.0)
        self._goal_s, self._prefills = goal_s, prefills
        self._clock, self._residence = clock or Clock(), residence or AllResident()

    def serve(self, trace: Sequence[Arrival], to_the_end: bool = True) -> list[Request]:
        """All of a trace, as its requests arrive.

        Args:
            to_the_end: until every token is there; else until it is known of every request whether it was admitted,
                and what still runs is dropped.
        """
        requests = [Request(arrival) for arrival in trace]
        coming = deque(requests)
        self._used = dict.fromkeys(self._models, 0.0)
        self._clock.start()
        while coming or self._is_busy(to_the_end):
            if coming and not self._is_busy(to_the_end=True):
                self._clock.wait_until(coming[0].arrival.at)
            while coming and coming[0].arrival.at <= self._clock.now():
                request = coming.popleft()
                self._line_of[request.arrival.model].waiting.append(request)
            for line in self._lines:
                self._admit(line)
            if not self._step() and any(line.waiting for line in self._lines):
                # For a model to come, or to have gone: there is nothing else to do.
                self._clock.wait_until(self._clock.now() + 0.001)
        for name in self._models:
            self._leave(name, list(range(len(self._running[name]))))
        return requests

    def _is_busy(self, to_the_end: bool) -> bool:
        return any(line.waiting for line in self._lines) or (to_the_end and any(self._running.values()))

    def _admit(self, line: _Line) -> None:
        """Those who have waited longest, as far as there is memory."""
        passed: list[Request] = []
        admitted = Counter[str]()
        while line.waiting and admitted[line.waiting[0].arrival.model] < self._prefills:
            request = line.waiting[0]
            name = request.arrival.model
            if self._clock.now() - request.arrival.at > self._goal_s:
                request.is_refused = True
                line.waiting.popleft()
                continue
            if not self._residence.is_there(self._models[name]):
                if not self._residence.call(self._models[name], self._idle(line, name)):
                    break
                passed.append(line.waiting.popleft())  # nobody behind it has to wait while it comes
                continue
            try:
                token = self._models[name].admit(request)
            except torch.OutOfMemoryError:
                self._residence.make_room(self._unused(line, name))
                break
            line.waiting.popleft()
            request.tokens.append(token)
            request.first_s = self._clock.now() - request.arrival.at
            self._running[name].append(request)
            self._used[name] = self._clock.now()
            admitted[name] += 1
        line.waiting.extendleft(reversed(passed))

    def _idle(self, line: _Line, asking: str) -> list[Model]:
        """Models of a line that compute nothing: first those for which nobody waits, the one longest unused first.

        Those for which somebody waits behind whoever asks are among them, or the two would wait for each other.
        """
        wanted = self._wanted(line)
        idle = [each for each in line.models if not self._running[each.name] and each.name != asking]
        return sorted(idle, key=lambda each: (each.name in wanted, self._used[each.name]))

    def _unused(self, line: _Line, asking: str) -> list[Model]:
        """Those of them for which nobody waits and nobody has asked for as long as the goal is: one that is asked
        every now and then would come back at once, at the cost of both ways."""
        since, wanted = self._clock.now() - self._goal_s, self._wanted(line)
        idle = self._idle(line, asking)
        return [each for each in idle if each.name not in wanted and self._used[each.name] < since]

    def _wanted(self, line: _Line) -> set[str]:
        return {request.arrival.model for request in line.waiting}

    def _step(self) -> bool:
        """One more token for every request that runs; whether there was any.

        All models' work is queued before the first is waited for.
        """
        busy = [name for name, running in self._running.items() if running]
        is_any = bool(busy)
        self._leave_done(busy)  # whose only token was the first
        busy = [name for name in busy if self._running[name]]
        for name in busy:
            self._models[name].step()
        for name in busy:
            for request, token in zip(self._running[name], self._models[name].said(), strict=True):
                request.tokens.append(token)
            self._used[name] = self._clock.now()
        self._leave_done(busy)
        return is_any

    def _leave_done(self, names: list[str]) -> None:
        for name in names:
            self._leave(name, [row for row, request in enumerate(self._running[name]) if request.is_done])

    def _leave(self, name: str, rows: list[int]) -> None:
        if rows:
            self._models[name].leave(rows)
            staying = [request for row, request in enumerate(self._running[name]) if row not in rows]
            self._running[name] = staying


@dataclass(frozen=True)
class Told:
    """What a trace's requests were told, in numbers."""

    offered: int
    refused: int
    late: int
    """Served, but after the goal."""
    first_p50_s: float
    first_p99_s: float
    """Refused requests count as served never."""
    tokens: int

    @classmethod
    def of(cls, requests: Sequence[Request], goal_s: float) -> Told:
        """Of all requests of one trace."""
        times = sorted(float("inf") if each.first_s is None else each.first_s for each in requests)
        refused = sum(each.is_refused for each in requests)
        late = sum(goal_s < each < float("inf") for each in times)
        return cls(
            offered=len(requests),
            refused=refused,
            late=late,
            first_p50_s=percentile(times, 0.50),
            first_p99_s=percentile(times, 0.99),
            tokens=sum(len(each.tokens) for each in requests),
        )

    @property
    def admitted(self) -> int:
        """Requests whose first token came within the goal."""
        return self.offered - self.refused - self.late
