"""One run of the benchmark: peers, then retape at their peaks, then interleaved timing; and the resulting rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from benchmarks.frontier.measuring import Laboratory, Measured, Step, in_turns, summary
from benchmarks.frontier.models import Case
from benchmarks.frontier.own import BelowFloor, Wish, fitted
from benchmarks.frontier.peers import peers
from benchmarks.frontier.picture import Family
from benchmarks.frontier.ways import Skipped, Way

import retape
from retape.core.units import format_bytes, format_seconds
from retape.integrations.huggingface.fused_loss import can_fuse_loss

ALIKE = 0.03  # fraction of a peak: peers this close share the fit inside the smaller peak
CLOSE = 0.04  # fraction of a budget: a share this close to a peer's peak is not fitted separately
LEAST_TURNS = 7  # steps: one to warm up, and three that count with one before each

# Whose peaks each of retape's families is held against: those with the same kernels.
RIVALS = {
    Family.RETAPE_EXACT: (Family.EAGER,),
    Family.RETAPE_ALL: (Family.FUSED,),
    Family.RETAPE_COMPILED: (Family.COMPILED,),
}


class Run:
    """Collects the rows of one case, in the order in which they were measured."""

    def __init__(
        self,
        case: Case,
        *,
        started: float,
        limit_seconds: float,
        tell: Callable[[str], None] = lambda line: None,
        fit: Callable[..., retape.Fit] = retape.fit,
    ) -> None:
        self.case, self._tell, self._fit_model = case, tell, fit
        self._until = started + limit_seconds
        self.laboratory = Laboratory(case)
        self._ways: list[Way] = []
        self._measured: dict[str, Measured] = {}
        self._skipped: dict[str, str] = {}
        self._rows_at: dict[str, str] = {}  # of a peer: the row that was fitted to its peak
        self._floors: dict[Family, int] = {}
        self._taken: dict[str, list[Step]] = {}
        self._longest_fit_seconds = 0.0  # with its measuring

    # --- measuring -----------------------------------------------------------------------------------------------

    def measure_peers(self, *, compiled: bool, only: Sequence[str] = ()) -> None:
        """Gradients and peak of every peer."""
        for peer in peers(self.case, compiled=compiled):
            if peer.name == "plain" or not only or peer.name.startswith(tuple(only)):
                self.add(peer)

    def add(self, found: Way | Skipped) -> bool:
        """Measure a way, unless it is not there; one that fails says why."""
        if isinstance(found, Way):
            try:
                measured = self.laboratory.measure(found)
            except Exception as error:  # other libraries: the row contains the error, the remaining peers run
                self._forget()
                found = failed(found.name, error)
        if isinstance(found, Skipped):
            self._skipped[found.name] = found.why
            self._tell(f"{found.name}: {found.why}")
            return False
        self._skipped.pop(found.name, None)
        self._ways.append(found)
        self._measured[found.name] = measured
        self._tell(
            f"{found.name}: {format_bytes(measured.step.peak_bytes)} above {format_bytes(self.laboratory.fixed_bytes)}, "
            f"about {format_seconds(measured.step.seconds)}, gradients {measured.check.verdict.value}"
        )
        return True

    def _forget(self) -> None:
        if self.case.device.type == "cuda":
            torch.cuda.empty_cache()

    def measure_own(self, shares: Sequence[float], *, compiled: bool) -> None:
        """retape at the peaks of its rivals, then at shares of plain's activations; where one is below it, at its floor."""
        families = [Family.RETAPE_EXACT]
        if can_fuse_loss(self.case.model):
            families.append(Family.RETAPE_ALL)
        else:
            self._skipped[Family.RETAPE_ALL.value] = (
                "nothing but EXACT for this model: there is no head and loss to fuse"
            )
        if compiled:
            families.append(Family.RETAPE_COMPILED)
        # In turns, so that where time runs out every family has some of its rows.
        queues = [self._wishes(family, sorted(shares, reverse=True)) for family in families]
        for wishes in zip_longest(*queues):
            for wish in wishes:
                if wish is not None:
                    self._fit(wish)

    def _wishes(self, family: Family, shares: Sequence[float]) -> Iterator[Wish]:
        yield from self._at_peaks(family)
        yield from self._at_shares(family, shares)

    def _fit(self, wish: Wish) -> None:
        """One row of retape's, where there is time for it."""
        start = time.perf_counter()
        if start + self._longest_fit_seconds + self._turns_seconds() > self._until:
            self.add(Skipped(name=wish.name, why="no time left"))
            return
        found = self._fitted(wish)
        if isinstance(found, BelowFloor):
            self._floors[wish.family] = found.floor_bytes
        if self.add(found) and wish.peer:
            self._rows_at[wish.peer] = wish.name
        self._longest_fit_seconds = max(self._longest_fit_seconds, time.perf_counter() - start)

    def _fitted(self, wish: Wish) -> Way | Skipped:
        try:
            return fitted(self.case, wish, self.laboratory.fixed_bytes, self._fit_model)
        except Exception as error:  # a defect, which the row shows; the others go on
            self._forget()
            return failed(wish.name, error)

    def _turns_seconds(self) -> float:
        return LEAST_TURNS * sum(measured.step.seconds for measured in self._measured.values())

    def _at_peaks(self, family: Family) -> Iterator[Wish]:
        done: dict[int, str] = {}
        rivals = [way.name for way in self._ways if way.family in RIVALS[family]]
        for peer in sorted(rivals, key=lambda name: self._measured[name].step.peak_bytes):
            size = self._measured[peer].step.peak_bytes
            alike = next((name for other, name in done.items() if size * (1 - ALIKE) <= other <= size), None)
            if alike is not None:
                self._rows_at[peer] = alike
                continue
            done[size] = f"{family.value} at the peak of {peer}"
            yield Wish(name=done[size], family=family, activation_bytes=size, peer=peer)

    def _at_shares(self, family: Family, shares: Sequence[float]) -> Iterator[Wish]:
        """Shares of plain's activations, down to the floor: the first that is too small says where that is."""
        whole = self._measured["plain"].step.peak_bytes
        there = [way.about["budget_activation_bytes"] for way in self._ways if way.family is family]
        for share in shares:
            size = max(1, int(share * whole))
            if any(abs(size - other) <= CLOSE * size for other in there):
                continue
            yield Wish(name=f"{family.value} at {share:g} of plain", family=family, activation_bytes=size)
            if family in self._floors:
                yield from self._at_floor(family)
                return

    def _at_floor(self, family: Family) -> Iterator[Wish]:
        """Inside the floor that was named; a fit that misses it by what it measured names another."""
        for _ in range(2):
            floor = self._floors[family]
            yield Wish(name=f"{family.value} at its floor", family=family, activation_bytes=floor)
            if self._floors[family] <= floor:
                return

    def take_turns(self, rounds: int) -> None:
        """Time everything that was measured, in turns."""
        self._taken = in_turns(self.laboratory, self._ways, rounds, self._until)

    # --- rows ----------------------------------------------------------------------------------------------------

    def results(self) -> dict[str, dict[str, Any]]:
        """Name -> row; what was not run has its reason."""
        rows = {way.name: self._row(way) for way in self._ways}
        plain = rows["plain"]["seconds"]
        for row in rows.values():
            row["slowdown"] = row["seconds"] / plain
        for peer, own in self._rows_at.items():
            if own in rows:
                rows[peer] |= {"beside": own, "beside_over_this": rows[own]["seconds"] / rows[peer]["seconds"]}
        return {**rows, **{name: {"skipped": why} for name, why in self._skipped.items()}}

    def _row(self, way: Way) -> dict[str, Any]:
        measured = self._measured[way.name]
        peak = max(step.peak_bytes for step in (measured.step, *self._taken[way.name]))
        return {
            "family": way.family.value,
            "peak_bytes": self.laboratory.fixed_bytes + peak,
            "activation_bytes": peak,
            **summary(self._taken[way.name]),
            "gradients": measured.check.as_dict(),
            **way.about,
        }


def failed(name: str, error: Exception) -> Skipped:
    lines = str(error).strip().splitlines() or [""]
    return Skipped(name=name, why=f"failed: {type(error).__name__}: {lines[0]}")
