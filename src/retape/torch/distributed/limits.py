"""Limits of unequal ranks: each has its own budget and its own fixed bytes, and one plan must hold for every one of them.

A plan adds the same activations on every rank (the profile is the largest of all), so the rank with the least room above its fixed bytes
decides: its limit is the limit of the problem. A peak of another rank counts less its `margin`, the bytes by which its limit is higher;
then it is inside the limit of the problem exactly if it is inside its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from retape.core.problem import Budget
from retape.torch.distributed.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimit:
    """Budget of one rank for one device, as it was given and in bytes, and what is there before a step."""

    budget: Budget
    limit_bytes: int
    start_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimits:
    """Limits of all ranks for one device; `place` is that of this rank."""

    ranks: tuple[RankLimit, ...]
    place: int = 0
    members: tuple[int, ...] = field(default=(0,))

    @classmethod
    def of(cls, ranks: Ranks, own: RankLimit) -> RankLimits:
        return cls(ranks=tuple(ranks.of_all(own)), place=ranks.number, members=ranks.members)

    @property
    def _tightest(self) -> int:
        return min(
            range(len(self.ranks)), key=lambda place: self.ranks[place].limit_bytes - self.ranks[place].start_bytes
        )

    @property
    def tightest_rank(self) -> int | None:
        """The rank that decides; None if all have the same limit."""
        same = len({each.limit_bytes for each in self.ranks}) == 1
        return None if same else self.members[self._tightest]

    @property
    def limit_bytes(self) -> int:
        return self.ranks[self._tightest].limit_bytes

    @property
    def margin_bytes(self) -> int:
        """Bytes by which the limit of this rank is above that of the problem; negative if it is below."""
        return self.ranks[self.place].limit_bytes - self.limit_bytes

    @property
    def budget(self) -> Budget:
        """The budget that decides. All activations are asked for only if every rank asks for them."""
        budget = self.ranks[self._tightest].budget
        everything = all(each.budget.share == 1.0 for each in self.ranks)
        return (
            budget
            if everything or budget.share != 1.0
            else replace(Budget.of(self.limit_bytes), in_flight=budget.in_flight)
        )
