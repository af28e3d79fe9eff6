"""How k and lam of pruned weights are chosen, and how they change while the model trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..._checks import check_choice, check_positive_int

_POWERS = {"linear": 1, "cubic": 3}


@dataclass(frozen=True)
class ChooseLam:
    """lam such that about so many entries are fractional, by ``choose_lam``.

    It is chosen when ``prune`` is called, and again whenever a schedule changes how many are kept. With
    ``every`` also every so many steps, as while a model trains its weights spread, and fewer compete.
    """

    fractional: int = 8
    every: int | None = None

    def __post_init__(self) -> None:
        check_positive_int("fractional", self.fractional)
        if self.every is not None:
            check_positive_int("every", self.every)


@dataclass(frozen=True)
class _Ramp:
    steps: int
    begin: int = 0
    shape: Literal["linear", "cubic"] = "cubic"

    def __post_init__(self) -> None:
        check_positive_int("steps", self.steps)
        check_choice("shape", self.shape, _POWERS)

    def rest(self, step: int) -> float:
        """From 1, until ``begin``, down to 0 after ``steps`` more."""
        progress = min(max((step - self.begin) / self.steps, 0.0), 1.0)
        return (1.0 - progress) ** _POWERS[self.shape]


@dataclass(frozen=True)
class KeepSchedule(_Ramp):
    """From the share ``start`` of the weights to what ``prune`` was told to keep, in so many steps."""

    start: float = 1.0


@dataclass(frozen=True)
class LamSchedule(_Ramp):
    """From the lam that ``prune`` was given to 0, the hard operator, in so many steps."""


Schedule = KeepSchedule | LamSchedule


def check_schedules(schedule: Schedule | Sequence[Schedule] | None) -> tuple[Schedule, ...]:
    if isinstance(schedule, (KeepSchedule, LamSchedule)):
        return (schedule,)
    for each in schedule or ():
        if not isinstance(each, (KeepSchedule, LamSchedule)):
            raise TypeError(f"schedule must be a KeepSchedule or a LamSchedule, got {each!r}")
    return tuple(schedule or ())
