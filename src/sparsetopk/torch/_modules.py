"""What the modules of this package have in common."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._checks import check_positive_int
from ._functions.operators import topk_mask, topk_sign
from ._rows.arguments import Number, entries, is_ordinary, is_plain
from ._spread.groups import check_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Exact(torch.nn.Module):
    """A module with buffers that are never narrowed: a count of 257 would be 256 in bfloat16."""

    exact: tuple[str, ...] = ()  # their names

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = {name: self._buffers.get(name) for name in self.exact}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in before.items():
            now = self._buffers.get(name)
            if value is not None and now is not None and now.itemsize < value.itemsize:
                self._buffers[name] = value.to(now.device)
        return self


_AT_MOST = 0.75  # of the entries of a row


class RunningLam(_Exact):
    r"""A lam that keeps about ``target`` entries of a row competing while a model trains.

    .. math:: \lambda \leftarrow \lambda\, (\text{target} / \text{count})^{\text{rate}}

    after every forward in ``train()``, with the number of entries that were fractional, on average over
    the rows. As scores spread in training, a lam that stays the same lets fewer and fewer compete.
    Give it as ``lam`` to a module, or ``lam="auto"`` for one with these defaults; modules that share it
    must be called equally often. At most 3/4 of the entries are asked for.

    The target goes to ``final`` in so many ``steps``, in equal ratios. lam and the step are buffers, so
    that training goes on as it was from a state dict. With a ``group``, counts are those of all ranks.

    >>> lam = RunningLam(target=8, start=0.1)
    >>> lam.observe(torch.rand(100, 30) < 0.1, rows=100)  # 3 compete on average: lam grows
    >>> bool(lam.value > 0.1)
    True
    """

    exact = ("log_lam",)
    log_lam: Tensor
    step: Tensor

    def __init__(
        self,
        target: float = 8.0,
        start: float = 1.0,
        *,
        rate: float = 0.3,
        final: float | None = None,
        steps: int | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("target", target), ("start", start), ("rate", rate), ("final", final)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be finite and greater than 0, got {value}")
        if (final is None) != (steps is None):
            raise ValueError(f"final and steps go together, got final={final} and steps={steps}")
        self.target, self.rate, self.final, self.group = target, rate, final, group
        self.steps = 1 if steps is None else check_positive_int("steps", steps)
        # Of length 1: torch.compile loses changes of a float64 buffer without dimensions (torch 2.13).
        self.register_buffer("log_lam", torch.tensor([math.log(start)], dtype=torch.float64))
        self.register_buffer("step", torch.tensor(0))

    @property
    def value(self) -> Tensor:
        """lam as it is now; a copy, as it moves before the backward."""
        return self.log_lam.exp().squeeze(0)

    @property
    def current_target(self) -> Tensor:
        ratio = 1.0 if self.final is None else self.final / self.target
        return self.target * ratio ** (self.step / self.steps).clamp(max=1.0)

    @torch.no_grad()
    def observe(self, competing: Tensor, rows: float) -> None:
        """Move lam, after so many rows of which entries competed as the flags say."""
        count, seen = competing.sum().to(self.log_lam), float(competing.numel())
        if (shared := check_group(self.group)) is not None:
            own = torch.stack([count, torch.full_like(count, rows), torch.full_like(count, seen)])
            count, rows, seen = shared.sum(own).tolist()
        if rows:
            # Where none competes, lam grows by a factor that does not depend on how many rows there are.
            mean = (torch.zeros_like(self.log_lam) + count / rows).clamp(min=0.1)
            # A target that rows are too short for would let lam grow for ever.
            target = self.current_target.clamp(max=_AT_MOST * seen / rows)
            move = self.rate * (target / mean).log()
            self.log_lam.copy_(self.log_lam + move)
        self.step.add_(1)

    def extra_repr(self) -> str:
        return f"target={self.target:g}"


Lam: TypeAlias = Number | RunningLam | Literal["auto"]
"""What a module takes for lam; "auto" is a ``RunningLam`` with its defaults."""


class Module(_Exact):
    """k, lam and the keyword arguments of a function."""

    exact = ("k", "lam")
    k: Number
    lam: Number | RunningLam

    def __init__(self, k: Number, lam: Lam, **options: Any) -> None:
        super().__init__()
        self._keep("k", k)
        if isinstance(lam, str) and lam != "auto":
            raise ValueError(f"lam must be a number, a tensor, a RunningLam or 'auto', got {lam!r}")
        self._keep("lam", RunningLam() if isinstance(lam, str) else lam)
        self.options = options

    def within(self, n: int) -> Number:
        """k for rows of n entries: a parameter that has learned to leave [0, n] is taken at the nearest
        end, with the derivative there."""
        return _within(self.k, 0.0, n)

    def _keep(self, name: str, value: Number | RunningLam) -> None:
        if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
            self.register_buffer(name, value)
        else:
            setattr(self, name, value)

    def extra_repr(self) -> str:
        shown = {"k": _short(self.k), "lam": _short(self.lam), **self.options}
        return ", ".join(f"{key}={value}" for key, value in shown.items())


def _within(value: Number, low: float, high: float | None) -> Number:
    # The type first: to ask what is no tensor whether it is a parameter takes longer.
    if type(value) is int or type(value) is float or not isinstance(value, torch.nn.Parameter):
        return value
    return value + (value.clamp(low, high) - value).detach()


def _short(value: Number | RunningLam) -> str:
    if isinstance(value, RunningLam):
        return f"RunningLam({value.extra_repr()})"
    if not isinstance(value, Tensor):
        return f"{value:g}"
    return f"{type(value).__name__}{tuple(value.shape)}"


_FEW_ROWS = 8  # of which it may be chance that none competes
_TOO_FEW = (
    0.1  # that compete in a row: as they do so in twos, less than one row in 20 has a gradient
)
_COUNTED_EVERY = 100  # forwards in training: to count takes passes over the mask


class _Counted(NamedTuple):
    competing: Tensor  # in all rows
    rows: int
    entries: int  # of a row
    lam: Number


class HardenedModule(Module):
    """A module that may be hard in evaluation mode."""

    def __init__(self, k: Number, lam: Lam, *, hard_eval: bool, **options: Any) -> None:
        super().__init__(k, lam, **options)
        self.hard_eval = hard_eval
        self._forwards = 0  # in training
        self._judged = False
        self._counted: _Counted | None = None

    @property
    def current_lam(self) -> Number:
        """lam, or 0 where the module is hard."""
        if self.hard_eval and not self.training:
            return 0.0
        return self.lam.value if isinstance(self.lam, RunningLam) else _within(self.lam, 0.0, None)

    def statistics(self) -> dict[str, Tensor]:
        """For logging: ``competing``, how many entries of a row compete on average, and ``share``, what
        part of its entries. Too few, and nothing learns what to select; all, and nothing is selected.

        They are counted in the first forward in ``train()`` and in every hundredth after it, outside of
        compiled graphs; there are none before.
        """
        if self._counted is None:
            return {}
        self._judge(self._counted)
        mean = self._counted.competing / self._counted.rows
        return {"competing": mean, "share": mean / self._counted.entries}

    def watch(
        self,
        competing: Callable[[], Tensor],
        rows: int,
        entries: int,
        counts: bool = True,
        *,
        among_all: Callable[[], Tensor] | None = None,
    ) -> None:
        """Tell a running lam which entries compete in rows of so many, and count them now and then if
        that ``counts``: ``among_all`` entries of as many rows, if ``competing`` knows of some alone."""
        moves, counts = (
            isinstance(self.lam, RunningLam),
            counts and not torch.compiler.is_compiling(),
        )
        # Else a graph would have a region without a gradient and with nothing in it, which torch.export
        # cannot save.
        if not self.training or not (moves or counts):
            return
        with torch.no_grad():
            if isinstance(self.lam, RunningLam):
                self.lam.observe(competing(), rows)
            if counts:
                self._tally(among_all or competing, rows, entries)

    def _tally(self, competing: Callable[[], Tensor], rows: int, entries: int) -> None:
        """No device is waited for; but on the CPU it is said at once if lam teaches nothing."""
        if not rows:
            return
        self._forwards += 1
        to_judge = not self._judged and rows >= _FEW_ROWS
        if not to_judge and self._forwards % _COUNTED_EVERY != 1:
            return
        flags, lam = competing(), self.current_lam
        count, rows = flags.sum(), min(rows, flags.numel() // entries)
        if is_plain() and all(is_ordinary(v) for v in (count, lam) if isinstance(v, Tensor)):
            self._counted = _Counted(count, rows, entries, lam)
            if count.is_cpu:
                self._judge(self._counted)

    def _judge(self, counted: _Counted) -> None:
        """Warn once if lam is so small that hardly any entry competes, or so large that all do."""
        if self._judged or counted.rows < _FEW_ROWS:
            return
        self._judged = True
        if isinstance(self.lam, RunningLam):  # it finds its way
            return
        lam, mean = counted.lam, counted.competing.item() / counted.rows
        is_hard = bool((lam == 0).any()) if isinstance(lam, Tensor) else lam == 0  # by intention
        if is_hard or _TOO_FEW <= mean < counted.entries:
            return
        advice = "it is hard in effect, take a larger" if mean < _TOO_FEW else "take a smaller"
        warnings.warn(
            f"{type(self).__name__}: {mean:.2g} of {counted.entries} entries compete on average of "
            f"{counted.rows} rows with lam={_short(lam)}; {advice} lam, choose_lam, or a RunningLam",
            stacklevel=6,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + (", hard_eval=True" if self.hard_eval else "")


def selects(k: Number, n: int) -> bool:
    """Whether there is anything to choose: all of n entries, or none, do not compete with any lam."""
    return isinstance(k, Tensor) or 0 < k < n


class Operator(HardenedModule):
    """A top-k operator as a module."""

    def evaluate(
        self, operator: Callable[..., Tensor], x: Tensor, k: Number | None = None
    ) -> Tensor:
        n = entries(x, self.options["dim"])
        lam, k = self.current_lam, self.within(n) if k is None else k
        y = operator(x, k, lam, **self.options)

        def competing() -> Tensor:
            """Neither 0 nor whole, as the relaxed operator has it."""
            seen, whole = (
                y.detach(),
                1.0 if operator in (topk_mask, topk_sign) else x.detach().abs(),
            )
            if self.options["straight_through"]:
                seen = operator(x.detach(), k, lam, **{**self.options, "straight_through": False})
            return (seen != 0) & (seen.abs() != whole)

        self.watch(competing, x.numel() // max(n, 1), n, selects(k, n))
        return y
