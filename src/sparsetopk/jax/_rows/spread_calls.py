"""Functions of a row that is spread over many arrays as primitives: how these are sharded decides.

Where arrays are sharded automatically that is known when the program is compiled, and not when it is
traced. Then each device puts together what it has of all arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import NamedSharding, PartitionSpec

from .calls import derivative_of, is_zero
from .many import ManyRows
from .pieces import Axes, Pieces, Spread
from .promotion import promoting

Function = Callable[..., tuple[Pieces, list[Array]]]
_LAM, _PIVOT = 2, 3  # their places among the numbers, those that are found after those given
Sets = Sequence[Sequence[Array]]
"""The arrays of a row, and others along it."""


class SpreadCall:
    """``function(row, along, numbers, **params)``, which gives arrays along the row and so many numbers
    of it; ``here`` is the same where all of the row is on every device.

    Operands are the arrays of all sets, and then numbers (1,). Derivatives are those of ``function`` on
    arrays as they are, unless there is a rule for these.
    """

    def __init__(self, name: str, function: Function, here: Function, results: int):
        self.name, self.results = name, results
        self.function, self.here = promoting(function), promoting(here)
        self.primitive = Primitive(f"sparsetopk_{name}")
        self.primitive.multiple_results = True
        self.primitive.def_impl(
            lambda *at, **params: xla.apply_primitive(self.primitive, *at, **params)
        )
        self.primitive.def_abstract_eval(lambda *_, call, **__: call.out_avals)
        run = lambda *at, call, **_: jaxpr_as_fun(call)(*at)  # noqa: E731
        mlir.register_lowering(self.primitive, mlir.lower_fun(run, multiple_results=True))
        batching.primitive_batchers[self.primitive] = self._batched
        ad.primitive_jvps[self.primitive] = derivative_of(self._as_they_are)

    def __call__(
        self, sets: Sets, numbers: Sequence[Array], **params: Any
    ) -> tuple[list[Array], list[Array]]:
        count = len(sets[0])
        flat = [*(v for arrays in sets for v in arrays), *numbers]
        layout = (count, len(sets))
        call = jax.make_jaxpr(self._partitioned(layout, params))(*flat)
        found = self.primitive.bind(*flat, layout=layout, call=call, params=tuple(params.items()))
        return found[:count], found[count:]

    def _split(self, layout: tuple[int, int], flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        count, sets = layout
        arrays = [list(flat[i * count : (i + 1) * count]) for i in range(sets)]
        return arrays, list(flat[count * sets :])

    def _as_they_are(self, *flat: Array, layout: Any, params: Any, call: Any = None) -> list[Array]:
        """In operations on every array; XLA sees how they are sharded."""
        (parts, *along), numbers = self._split(layout, flat)
        found, others = self.function(
            Spread.of(parts), list(map(Pieces, along)), numbers, **dict(params)
        )
        return [*found.parts, *others]

    def _on_a_device(
        self, layout: Any, params: dict[str, Any], own: Sequence[Axes], flat: Sequence[Array]
    ) -> list[Array]:
        """Of a row that is sharded so."""
        (parts, *along), numbers = self._split(layout, flat)
        if not any(own):
            found, others = self.here(Spread.of(parts), list(map(Pieces, along)), numbers, **params)
            return [*found.parts, *others]
        row = Spread.of(parts, own).packed(lambda _: None, numbers[_LAM].dtype)
        found, others = self.function(row, list(map(row.pack, along)), numbers, **params)
        return [*row.unpack(found, [*numbers, *others][_PIVOT]), *others]

    def _partitioned(self, layout: tuple[int, int], params: dict[str, Any]) -> Callable[..., Any]:
        count, sets = layout
        everywhere: list[Axes] = [() for _ in range(count)]

        @custom_partitioning
        def call(*flat: Array) -> list[Array]:
            return self._on_a_device(layout, params, everywhere, flat)

        def partition(mesh: Any, given: Sequence[Any], _: Any) -> Any:
            places = [v.sharding for v in given[:count]]
            own = [_axes(place) for place in places]
            one = NamedSharding(mesh, PartitionSpec())
            arguments = [*places * sets, *[one] * (len(given) - count * sets)]

            def local(*flat: Array) -> list[Array]:
                return self._on_a_device(layout, params, own, flat)

            return mesh, local, [*places, *[one] * self.results], tuple(arguments)

        def rule(_: Any, given: Sequence[Any], found: Sequence[Any]) -> str:
            """That all sets are sharded as the first is."""
            each = [" ".join(f"d{i}_{j}" for j in range(len(given[i].shape))) for i in range(count)]
            numbers = [f"n{i}" for i in range(len(given) - count * sets)]
            others = [f"m{i}" for i in range(self.results)]
            return f"{', '.join([*each * sets, *numbers])} -> {', '.join([*each, *others])}"

        call.def_partition(partition, sharding_rule=rule)
        return call

    def _batched(self, flat: Sequence[Array], axes: Sequence[Any], **params: Any) -> Any:
        found = jax.vmap(lambda *at: self._as_they_are(*at, **params), axes)(*flat)
        return found, [0] * len(found)

    def def_jvp(self, rule: Callable[..., Any]) -> None:
        """``rule(parts, numbers, dparts, dnumbers, **params)``; None is a tangent that is zero."""

        def jvp(
            primals: Sequence[Array], tangents: Sequence[Any], layout: Any, params: Any, call: Any
        ) -> Any:
            moved = [None if is_zero(d) else d for d in tangents]
            (parts,), numbers = self._split(layout, primals)
            (dparts,), dnumbers = self._split(layout, moved)
            found, moved = rule(parts, numbers, dparts, dnumbers, **dict(params))
            found, moved = [[*arrays, *others] for arrays, others in (found, moved)]
            zeros = (ad.Zero(jax.typeof(v).to_tangent_aval()) for v in found)
            return found, [z if d is None else d for z, d in zip(zeros, moved, strict=True)]

        ad.primitive_jvps[self.primitive] = jvp

    def def_transpose(self, rule: Callable[..., Any]) -> None:
        """``rule(parts, constants, cotangents, of_numbers, **params)`` gives the cotangents of arrays
        and of numbers that the call is linear in, which come after the constants of each."""

        def transpose(
            cotangents: Sequence[Any], *flat: Any, layout: Any, params: Any, call: Any
        ) -> Any:
            (parts, *_), numbers = self._split(layout, flat)
            constants = [v for v in numbers if not ad.is_undefined_primal(v)]
            given = [None if is_zero(g) else g for g in cotangents]
            count = layout[0]
            arrays, others = rule(parts, constants, given[:count], given[count:], **dict(params))
            still = [None for _ in parts]
            return [*still, *arrays, *(None for _ in constants), *others]

        ad.primitive_transposes[self.primitive] = transpose


def _axes(place: Any) -> Axes:
    """Over which an array is sharded, in the order of its own axes."""
    if place.is_fully_replicated:
        return ()
    names = (n for n in place.spec if n is not None)
    return tuple(a for n in names for a in ((n,) if isinstance(n, str) else n))


def zeros_for(tangents: Sequence[Array | None], like: Sequence[Array]) -> list[Array]:
    return [jnp.zeros_like(v) if d is None else d for d, v in zip(tangents, like, strict=True)]


class EachCall(SpreadCall):
    """The same for rows of an array each: numbers are (L,), one of every array."""

    def _as_they_are(self, *flat: Array, layout: Any, params: Any, call: Any = None) -> list[Array]:
        sets, numbers = self._split(layout, flat)
        each = one_by_one(self.function, sets, numbers, **dict(params))
        return [*each[0], *each[1]]

    def _on_a_device(
        self, layout: Any, params: dict[str, Any], own: Sequence[Axes], flat: Sequence[Array]
    ) -> list[Array]:
        sets, numbers = self._split(layout, flat)
        if not any(own):
            each, others = one_by_one(self.here, sets, numbers, **params)
            return [*each, *others]
        row = ManyRows.packed_of(sets[0], own, numbers[_LAM].dtype)
        of_blocks = [row.of_blocks(v) for v in numbers]
        found, others = self.function(row, list(map(row.pack, sets[1:])), of_blocks, **params)
        arrays = row.unpack(found, [*of_blocks, *others][_PIVOT])
        return [*arrays, *map(row.of_rows, others)]


def one_by_one(
    function: Function, sets: Sets, numbers: Sequence[Array], **params: Any
) -> tuple[list[Array], list[Array]]:
    """``function`` of rows of an array each, one after the other."""
    each = [
        function(
            Spread.of([part]),
            [Pieces([v]) for v in along],
            [v[i : i + 1] for v in numbers],
            **params,
        )
        for i, (part, *along) in enumerate(zip(*sets, strict=True))
    ]
    numbers_of = zip(*(others for _, others in each), strict=True)
    return [found.parts[0] for found, _ in each], [jnp.concatenate(v) for v in numbers_of]
