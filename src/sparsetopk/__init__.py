"""Fast, differentiable and sparse top-k operators: the NumPy front-end. Never imports a framework."""

from importlib.metadata import version as _version

from ._maths.dykstra import ConvergenceError
from ._numpy.hard import argsort, rank, sort
from ._numpy.losses import topk_loss, topk_loss_vjp, topk_value
from ._numpy.norms import conjugate, half_sq_support_norm, owl_norm, support_negentropy
from ._numpy.operators import (
    topk,
    topk_jacobian,
    topk_jvp,
    topk_mag,
    topk_mag_jacobian,
    topk_mag_jvp,
    topk_mag_vjp,
    topk_mask,
    topk_mask_jacobian,
    topk_mask_jvp,
    topk_mask_vjp,
    topk_sign,
    topk_sign_jacobian,
    topk_sign_jvp,
    topk_sign_vjp,
    topk_vjp,
)
from ._numpy.polytope import (
    PermutahedronCotangents,
    lmo,
    permutahedron,
    permutahedron_jacobian,
    permutahedron_jvp,
    permutahedron_value,
    permutahedron_vjp,
)
from ._numpy.relaxed import TopKCotangents
from ._numpy.selection import Selection, StraightThroughSelection, choose_lam, topk_select
from ._numpy.sorting import (
    SortCotangents,
    choose_rank_lam,
    soft_rank,
    soft_rank_jacobian,
    soft_rank_jvp,
    soft_rank_vjp,
    soft_sort,
    soft_sort_jacobian,
    soft_sort_jvp,
    soft_sort_vjp,
)

__version__ = _version("sparsetopk")

__all__ = [
    # relaxed top-k
    "topk_mask",
    "topk",
    "topk_mag",
    "topk_sign",
    "topk_select",
    "choose_lam",
    "choose_rank_lam",
    # values and losses
    "topk_value",
    "topk_loss",
    "permutahedron_value",
    # relaxed linear programs over the permutahedron
    "soft_sort",
    "soft_rank",
    "permutahedron",
    # hard operators (the top-k ones are those above with lam=0)
    "argsort",
    "sort",
    "rank",
    "lmo",
    # norms and conjugates
    "half_sq_support_norm",
    "owl_norm",
    "support_negentropy",
    "conjugate",
    # derivatives
    "topk_mask_jvp",
    "topk_mask_vjp",
    "topk_mask_jacobian",
    "topk_jvp",
    "topk_vjp",
    "topk_jacobian",
    "topk_mag_jvp",
    "topk_mag_vjp",
    "topk_mag_jacobian",
    "topk_sign_jvp",
    "topk_sign_vjp",
    "topk_sign_jacobian",
    "topk_loss_vjp",
    "soft_sort_jvp",
    "soft_sort_vjp",
    "soft_sort_jacobian",
    "soft_rank_jvp",
    "soft_rank_vjp",
    "soft_rank_jacobian",
    "permutahedron_jvp",
    "permutahedron_vjp",
    "permutahedron_jacobian",
    # results and errors
    "Selection",
    "StraightThroughSelection",
    "TopKCotangents",
    "PermutahedronCotangents",
    "SortCotangents",
    "ConvergenceError",
]
