"""Mixture of experts with a relaxed router: which tokens go to which experts, and the layer around it.

A router turns logits ``[..., tokens, experts]`` into a ``Routing``: for every expert a fixed number of
slots with the tokens that it takes and the weights of its outputs. ``lam = 0`` is the usual hard router;
with ``lam > 0`` tokens near the boundary are shared, and the selection itself has a gradient.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .._checks import check_choice
from .._maths.select import default_capacity
from ._functions.operators import topk_mask
from ._functions.selection import check_capacity, is_hard, select_slots, topk_select
from ._modules import HardenedModule, Lam, RunningLam, selects
from ._private import current_backward
from ._rows.arguments import Number, check_float_tensor, is_plain, show
from ._spread.groups import check_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SelectOn = Literal["logits", "gates"]


class Routing(NamedTuple):
    """The tokens that every expert takes: ``[..., experts, slots]`` unless said otherwise."""

    weights: Tensor  # of the expert's outputs: the selection times the gate, 0 in unused slots
    tokens: Tensor  # indices, distinct for each expert
    selected: Tensor  # the selection alone, in [0, 1]
    dropped: Tensor  # [..., experts]: the part of the selection that found no slot
    balance: Tensor  # a scalar: the load-balance loss of ``token_choice``, 1 if all is even

    @property
    def competing(self) -> Tensor:
        """Which slots are taken in part."""
        share = self.selected.detach()
        return (share > 0) & (share < 1)

    def statistics(self) -> dict[str, Tensor]:
        """For logging: ``load``, how many tokens every expert takes (a mean over all but experts);
        ``dropped``, the share of the selection that found no slot; ``fractional``, the share of the
        taken tokens that are taken in part."""
        taken = self.selected.detach() > 0
        groups = max(1, math.prod(taken.shape[:-2]))
        count, kept = taken.sum(), self.selected.detach().sum()
        lost = self.dropped.detach().sum()
        return {
            "load": taken.sum(dim=-1).to(kept.dtype).sum_to_size(taken.shape[-2]) / groups,
            "dropped": lost / (kept + lost).clamp_min(torch.finfo(kept.dtype).tiny),
            "fractional": self.competing.sum() / count.clamp_min(1),
        }


def _check(logits: object, select_on: SelectOn, mask: object) -> Tensor:
    logits = check_float_tensor("logits", logits)
    check_choice("select_on", select_on, ("logits", "gates"))
    if logits.ndim < 2:
        raise ValueError(
            f"logits must have shape [..., tokens, experts], got {tuple(logits.shape)}"
        )
    if mask is not None:
        check_mask(mask, tuple(logits.shape[:-1]))
    return logits


def check_mask(mask: object, shape: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be a tensor of booleans, True where there is a token, got {show(mask)}"
        )
    if tuple(mask.shape) != shape:
        raise ValueError(f"mask must have shape {shape}, got {tuple(mask.shape)}")


def _gates(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits without what padding may hold, and their softmax, in float32 or float64."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if mask is not None:
        logits = torch.where(mask.unsqueeze(-1), logits, 0.0)
    return logits, logits.softmax(dim=-1)


def _normalized(weights: Tensor, tokens: Tensor, n: int) -> Tensor:
    """Weights that sum to 1 over the experts of every token that has any."""
    flat, at = weights.flatten(-2), tokens.flatten(-2)
    total = flat.new_zeros((*flat.shape[:-1], n)).scatter_add(-1, at, flat)
    total = torch.where(total > 0, total, 1.0).gather(-1, at)
    return weights / total.reshape(weights.shape)


def expert_choice(
    logits: Tensor,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    select_on: SelectOn = "logits",
    mask: Tensor | None = None,
    capacity: int | None = None,
    normalize: bool = False,
    group: ProcessGroup | None = None,
) -> Routing:
    r"""Every expert takes k tokens (Zhou et al., 2022; the router of the paper's experiments).

    .. math:: w_{e} = y(s_e) \cdot g_e, \qquad
              y(s_e) = \mathrm{topk\_mask}(s_e, k, \lambda) \text{ over the tokens}, \qquad
              g = \mathrm{softmax}(\text{logits}) \text{ over the experts}

    The scores s are the logits or, with ``select_on="gates"``, the gates g, as V-MoE and the paper have
    it. Gates are of size 1/experts, and so must be lam then: at the same lam far more tokens are
    shared.

    ``mask`` is True where there is a token; the others are never taken. ``capacity`` is the number of
    slots of each expert, as in ``topk_select``; by default ceil(k) if lam is 0. ``normalize=True``
    divides by the sum over the experts of a token, which are 0 to all of them.

    With a ``group`` of processes, k tokens are taken out of those of all ranks, and the logits are of
    the tokens of this one. So are the slots, whose tokens are counted from 0 on every rank; by default
    they hold all of k, wherever they are. k and lam are the same on every rank.

    >>> routing = expert_choice(torch.eye(4, 2), k=1, lam=0.0)
    >>> routing.tokens
    tensor([[0],
            [1]])
    """
    logits = _check(logits, select_on, mask)
    logits, gates = _gates(logits, mask)
    scores = gates if select_on == "gates" else logits
    if mask is not None:
        scores = torch.where(mask.unsqueeze(-1), scores, -torch.inf)
    n = logits.shape[-2]
    scores, gates = scores.mT.contiguous(), gates.mT
    selected, tokens, dropped = topk_select(
        scores, k, lam, p=p, two_sided=two_sided, capacity=capacity, group=group
    )
    weights = selected * gates.gather(-1, tokens)
    if normalize:
        weights = _normalized(weights, tokens, n)
    return Routing(weights, tokens, selected, dropped, logits.new_zeros(()))


def token_choice(
    logits: Tensor,
    k: Number,
    lam: Number = 0.1,
    *,
    p: float = 2.0,
    two_sided: bool = False,
    select_on: SelectOn = "logits",
    mask: Tensor | None = None,
    capacity: int | None = None,
    normalize: bool = False,
) -> Routing:
    r"""Every token takes k experts, and every expert as many of these tokens as it has slots.

    .. math:: w_{t} = y(s_t) \cdot g_t, \qquad
              y(s_t) = \mathrm{topk\_mask}(s_t, k, \lambda) \text{ over the experts}

    An expert that more tokens take than it has slots (``capacity``) drops those with the smallest
    weights. By default nothing is dropped: there are as many slots as the fullest expert needs or, in a
    graph that is traced, as there are tokens. ``normalize=True`` makes the weights of a token sum to
    1 over the experts that did not drop it. The other arguments are those of ``expert_choice``.

    ``balance`` is the load-balance loss of Fedus et al. (2022), :math:`E \sum_e f_e P_e` with the share
    :math:`f_e` of the selection that an expert has and its mean gate :math:`P_e`: at least 1 where gates
    and selection agree, and 1 if all experts have the same.

    >>> routing = token_choice(torch.eye(4, 2), k=1, lam=0.0, capacity=3)
    >>> routing.tokens
    tensor([[0, 2, 3],
            [0, 1, 2]])
    """
    logits = _check(logits, select_on, mask)
    logits, gates = _gates(logits, mask)
    y = topk_mask(gates if select_on == "gates" else logits, k, lam, p=p, two_sided=two_sided)
    if mask is not None:
        y = torch.where(mask.unsqueeze(-1), y, 0.0)
    balance = _balance(y, gates, mask)
    y = y.mT.contiguous()
    dense = y * gates.mT
    n = logits.shape[-2]
    capacity = _needed(dense) if capacity is None else check_capacity(capacity, k, n)
    slots = select_slots(dense.detach().flatten(0, -2), capacity)
    tokens = slots.reshape((*y.shape[:-1], slots.shape[-1]))
    weights, selected = dense.gather(-1, tokens), y.gather(-1, tokens)
    dropped = y.detach().scatter(-1, tokens, 0.0).sum(dim=-1)
    if normalize:
        weights = _normalized(weights, tokens, n)
    return Routing(weights, tokens, selected, dropped, balance)


def _needed(weights: Tensor) -> int:
    """How many slots hold all weights ``[..., experts, tokens]``; all, if they are traced."""
    if not is_plain(weights) or not weights.numel():
        return weights.shape[-1]
    return max(1, int((weights.detach() != 0).sum(dim=-1).max()))


def _balance(y: Tensor, gates: Tensor, mask: Tensor | None) -> Tensor:
    """E sum_e f_e P_e over all tokens there are."""
    if mask is not None:
        gates = torch.where(mask.unsqueeze(-1), gates, 0.0)
    f, mean = y.flatten(0, -2).sum(dim=0), gates.flatten(0, -2).sum(dim=0)
    tiny = torch.finfo(f.dtype).tiny
    f, mean = f / f.sum().clamp_min(tiny), mean / mean.sum().clamp_min(tiny)
    return y.shape[-1] * (f * mean).sum()


class _Router(HardenedModule):
    """What the routers have in common: ``noise`` is the standard deviation of what is added to the
    logits while training."""

    def __init__(
        self, k: Number, lam: Lam, *, noise: float, hard_eval: bool, **options: Any
    ) -> None:
        super().__init__(k, lam, hard_eval=hard_eval, **options)
        self.noise = noise

    def _noisy(self, logits: Tensor) -> Tensor:
        if self.noise and self.training:
            return logits + self.noise * torch.randn_like(logits)
        return logits


def _over_ranks(count: int, group: ProcessGroup | None) -> int:
    shared = check_group(group)
    return count if shared is None else int(shared.sum(torch.tensor(count, device="cpu")))


class ExpertChoice(_Router):
    """``expert_choice`` as a module: give k, or ``capacity_factor`` c for k = c tokens/experts (rounded
    up; with a ``group``, the tokens of all ranks). ``capacity`` is cut to the number of tokens.

    Whether an expert takes a token depends on the tokens after it: not for decoders, and
    ``causal=True`` is an error that says so.

    >>> ExpertChoice(capacity_factor=1.0)(torch.randn(2, 16, 4)).tokens.shape
    torch.Size([2, 4, 12])
    """

    def __init__(
        self,
        k: Number | None = None,
        lam: Lam = 0.1,
        *,
        capacity_factor: float | None = None,
        p: float = 2.0,
        two_sided: bool = False,
        select_on: SelectOn = "logits",
        capacity: int | None = None,
        normalize: bool = False,
        noise: float = 0.0,
        hard_eval: bool = False,
        group: ProcessGroup | None = None,
        causal: bool = False,
    ) -> None:
        if causal:
            raise ValueError(
                "causal must be False, as an expert that chooses among all tokens sees those to come, "
                "got True; a decoder can have TokenChoice, where each token chooses for itself"
            )
        if (k is None) == (capacity_factor is None):
            raise ValueError(
                f"exactly one of k and capacity_factor must be given, got k={k} and "
                f"capacity_factor={capacity_factor}"
            )
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"capacity_factor must be positive, got {capacity_factor}")
        options = {"p": p, "two_sided": two_sided, "select_on": select_on, "normalize": normalize}
        super().__init__(0 if k is None else k, lam, noise=noise, hard_eval=hard_eval, **options)
        self.capacity_factor, self.capacity, self.group = capacity_factor, capacity, group

    def forward(self, logits: Tensor, mask: Tensor | None = None) -> Routing:
        tokens, experts = logits.shape[-2:]
        k = self.k
        if self.capacity_factor is not None:
            total = _over_ranks(tokens, self.group)
            k = min(total, math.ceil(self.capacity_factor * total / experts))
        capacity = self.capacity and min(self.capacity, tokens)
        if capacity is None and not isinstance(k, Tensor):  # the same in train() and eval()
            hard = not isinstance(self.lam, RunningLam) and is_hard(self.lam)
            capacity = default_capacity(float(k), tokens, hard)
        options = {"mask": mask, "group": self.group, **self.options}
        route = partial(expert_choice, self._noisy(logits), k, self.current_lam, **options)
        # A slot for every token: what is dropped competes too, or lam would grow for ever.
        rows = logits.numel() // max(tokens, 1)
        # Over a group only all ranks together know who competes.
        counts = self.group is None and selects(k, tokens)
        self.watch(lambda: route(capacity=tokens).competing, rows, tokens, counts)
        return route(capacity=capacity)

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        if self.capacity_factor is not None:
            shown = shown.replace("k=0", f"capacity_factor={self.capacity_factor:g}", 1)
        return shown


class TokenChoice(_Router):
    """``token_choice`` as a module. Every expert has ``capacity`` slots or, by default,
    ``capacity_factor`` times its even share, k tokens/experts (rounded up, and at most all tokens); with
    ``capacity_factor=None`` as many as it takes to drop nothing.

    >>> TokenChoice(2, capacity_factor=1.5)(torch.randn(2, 16, 4)).tokens.shape
    torch.Size([2, 4, 12])
    """

    def __init__(
        self,
        k: float = 1,
        lam: Lam = 0.1,
        *,
        capacity_factor: float | None = 1.25,
        p: float = 2.0,
        two_sided: bool = False,
        select_on: SelectOn = "logits",
        capacity: int | None = None,
        normalize: bool = False,
        noise: float = 0.0,
        hard_eval: bool = False,
    ) -> None:
        options = {"p": p, "two_sided": two_sided, "select_on": select_on, "normalize": normalize}
        super().__init__(k, lam, noise=noise, hard_eval=hard_eval, **options)
        self.capacity_factor, self.capacity = capacity_factor, capacity

    def forward(self, logits: Tensor, mask: Tensor | None = None) -> Routing:
        tokens, experts = logits.shape[-2:]
        capacity = self.capacity
        if capacity is None and self.capacity_factor is not None:
            capacity = max(1, math.ceil(self.capacity_factor * float(self.k) * tokens / experts))
        options = {"mask": mask, **self.options}
        route = partial(token_choice, self._noisy(logits), self.k, self.current_lam, **options)
        rows = logits.numel() // max(experts, 1)
        counts = selects(self.k, experts)
        self.watch(lambda: route(capacity=tokens).competing, rows, experts, counts)
        return route(capacity=None if capacity is None else min(capacity, tokens))


class ExpertMLP(nn.Module):
    """Experts that are MLPs with one hidden layer, all at once: ``[experts, slots, dim]`` to the same.

    The weights are stacked, so that a layer is one batched product. With ``gated=True`` the hidden layer
    is the activation times another linear layer (SwiGLU, for ``activation=torch.nn.functional.silu``).
    """

    def __init__(
        self,
        experts: int,
        dim: int,
        hidden: int,
        *,
        activation: Callable[[Tensor], Tensor] = nn.functional.gelu,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.activation, self.gated = dim, activation, gated
        self.weight1 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.bias1 = nn.Parameter(torch.empty(experts, 1, hidden))
        self.weight2 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.bias2 = nn.Parameter(torch.empty(experts, 1, dim))
        first = [self.weight1, self.bias1]
        if gated:
            self.weight3, self.bias3 = (nn.Parameter(torch.empty_like(each)) for each in first)
            first += [self.weight3, self.bias3]
        for bound, *parameters in (
            (dim**-0.5, *first),
            (hidden**-0.5, self.weight2, self.bias2),
        ):
            for parameter in parameters:  # as nn.Linear does
                nn.init.uniform_(parameter, -bound, bound)

    def __len__(self) -> int:
        return self.weight1.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(torch.baddbmm(self.bias1, x, self.weight1))
        if self.gated:
            hidden = hidden * torch.baddbmm(self.bias3, x, self.weight3)
        return torch.baddbmm(self.bias2, hidden, self.weight2)

    def extra_repr(self) -> str:
        experts, dim, hidden = self.weight1.shape
        shown = f"experts={experts}, dim={dim}, hidden={hidden}"
        return f"{shown}, gated=True" if self.gated else shown


class MixtureOfExperts(nn.Module):
    r"""Experts that compute only for the tokens that are routed to them.

    .. math:: y_t = \sum_e w_{et}\, f_e(x_t)

    over tokens x ``[..., tokens, dim]``, each leading index a group that is routed on its own. The
    logits are ``gate(x)``, a linear layer that autocast leaves in its own dtype. Every expert is called
    on the tokens of its slots and on nothing else: unused slots hold zeros. The cost is that of the
    slots, whatever the number of tokens; a token that no expert takes gets 0, for a residual connection
    to fill. ``mask`` is True where there is a token, and what padding holds has no effect.

    ``experts`` is an ``ExpertMLP`` or a sequence of modules, each from ``[tokens, dim]`` to the same;
    ``dim`` must be given for the latter. ``shared`` is a module that sees every token, ``[..., dim]``
    to the same, and is added: an expert that is always taken. The last routing is kept as ``routing``,
    with its graph: for ``routing.balance`` in the loss and ``routing.statistics()`` in the log.
    (Reentrant checkpointing leaves it without a graph, and so the loss without that part of its
    gradient, with a warning; ``use_reentrant=False`` does not.)

    >>> moe = MixtureOfExperts(ExpertChoice(capacity_factor=1.0), ExpertMLP(4, dim=8, hidden=16))
    >>> moe(torch.randn(2, 10, 8)).shape
    torch.Size([2, 10, 8])
    """

    routing: Routing | None = None

    def __init__(
        self,
        router: nn.Module,
        experts: ExpertMLP | Sequence[nn.Module],
        dim: int | None = None,
        *,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if isinstance(experts, ExpertMLP):
            dim = experts.dim
        elif dim is None:
            raise ValueError("dim must be given when experts is a sequence of modules, got None")
        self.router = router
        self.experts = experts if isinstance(experts, ExpertMLP) else nn.ModuleList(experts)
        self.gate = nn.Linear(dim, len(experts), bias=False)
        self.shared = shared

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            check_mask(mask, tuple(x.shape[:-1]))
            x = torch.where(mask.unsqueeze(-1), x, 0.0)  # whatever padding holds
        routing = self.router(self._logits(x), mask)
        self._warn_if_recomputed(routing)
        self.routing = routing
        y = self._combine(x, routing)
        if self.shared is None:
            return y
        common = self.shared(x)
        return y + (common if mask is None else torch.where(mask.unsqueeze(-1), common, 0.0))

    def _warn_if_recomputed(self, routing: Routing) -> None:
        """Reentrant checkpointing runs the forward without a graph, and again in the backward: too
        late for a loss that had ``routing.balance`` in it."""
        if self.routing is None or torch.compiler.is_compiling():
            return
        late = routing.balance.requires_grad and not self.routing.balance.requires_grad
        if late and current_backward() >= 0:  # within a backward
            warnings.warn(
                "routing.balance had no gradient in this step, as MixtureOfExperts is in a reentrant "
                "checkpoint; use torch.utils.checkpoint with use_reentrant=False",
                stacklevel=2,
            )

    def _logits(self, x: Tensor) -> Tensor:
        x = x.to(self.gate.weight.dtype)
        if x.is_meta:  # a device that autocast does not know
            return self.gate(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.gate(x)

    def _combine(self, x: Tensor, routing: Routing) -> Tensor:
        rows, n = x.flatten(0, -2), x.shape[-2]
        groups = math.prod(x.shape[:-2])
        first = n * torch.arange(groups, device=x.device).reshape(-1, 1, 1)
        shape = (groups, *routing.tokens.shape[-2:])
        tokens = (routing.tokens.reshape(shape) + first).transpose(0, 1).flatten(1)
        weights = routing.weights.reshape(shape).transpose(0, 1).flatten(1).unsqueeze(-1)
        inputs = rows.index_select(0, tokens.flatten()).reshape(*tokens.shape, x.shape[-1])
        inputs = torch.where(weights != 0, inputs, 0.0)
        outputs = self._outputs(inputs)
        outputs = (outputs * weights.to(outputs.dtype)).flatten(0, 1)
        y = outputs.new_zeros(rows.shape[0], outputs.shape[-1])
        y = y.index_add(0, tokens.flatten(), outputs)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _outputs(self, inputs: Tensor) -> Tensor:
        """[experts, slots, dim] to the same."""
        if isinstance(self.experts, ExpertMLP):
            return self.experts(inputs)
        each = zip(self.experts, inputs.unbind(), strict=True)
        return torch.stack([expert(x) for expert, x in each])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "routing"}


_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def is_mlp(name: str, module: nn.Module) -> bool:
    """Whether a module looks like the MLP of a transformer block, and has no other parameters:
    a linear layer from more to d, after one from d, or two if it is gated (as in Llama). The layers of
    ``nn.TransformerEncoder`` and its decoder have an MLP that is no module, and count too."""
    if isinstance(module, _LAYERS):
        return True
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if len(linear) not in (2, 3) or isinstance(module, nn.Linear):
        return False
    sizes = sorted((layer.in_features, layer.out_features) for layer in linear)
    ours = {id(parameter) for layer in linear for parameter in layer.parameters()}
    (d, hidden), last = sizes[0], sizes[-1]
    return (
        d < hidden
        and last == (hidden, d)
        and set(sizes[:-1]) == {(d, hidden)}
        and {id(parameter) for parameter in module.parameters()} == ours
    )


def upcycle(
    model: nn.Module,
    experts: int = 8,
    router: nn.Module | None = None,
    *,
    where: Callable[[str, nn.Module], bool] = is_mlp,
) -> nn.Module:
    """Turn the MLPs of a transformer into mixtures of experts, in place ('sparse upcycling').

    ``where(name, module)`` says which modules; by default all that look like an MLP (``is_mlp``: also
    gated ones, as in Llama, and the layers of ``nn.TransformerEncoder``). Each
    becomes ``experts`` copies of itself behind a copy of ``router``, by default ``TokenChoice(2,
    normalize=True, capacity_factor=2.0)``. As its weights sum to 1 for every token and the experts are
    still equal, what a mixture returns at first is what its MLP did, for every token that found a slot,
    whatever the gate. The gate starts with small normal numbers.

    >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> type(upcycle(nn.Sequential(nn.LayerNorm(8), mlp), experts=4)[1]).__name__
    'MixtureOfExperts'
    """
    if router is None:
        router = TokenChoice(2, normalize=True, capacity_factor=2.0)
    taken = [name for name, module in model.named_modules() if name and where(name, module)]
    taken = [name for name in taken if not any(name.startswith(f"{outer}.") for outer in taken)]
    if not taken:
        raise ValueError("where must take at least one module of model, got none")
    group = getattr(router, "group", None)
    for name in taken:
        parent, _, child = name.rpartition(".")
        mlp = model.get_submodule(name)
        own = copy.deepcopy(router, {id(group): group})  # processes are not copied
        if isinstance(mlp, _LAYERS):
            _upcycle_inside(mlp, experts, own)
        else:
            setattr(model.get_submodule(parent), child, _copies(mlp, experts, own))
    return model


def _upcycle_inside(layer: Any, experts: int, router: nn.Module) -> None:
    """A layer of torch's own, whose MLP is ``linear2(dropout(activation(linear1(x))))``: the mixture is
    in the place of ``linear1``, and the others do nothing. Its fast path, which reads the weights of
    both, is left out."""
    activation = layer.activation
    if not isinstance(activation, nn.Module):
        activation = _Function(activation)
    mlp = nn.Sequential(layer.linear1, activation, layer.dropout, layer.linear2)
    layer.linear1 = _copies(mlp.train(layer.training), experts, router)
    layer.linear2, layer.dropout, layer.activation = (nn.Identity() for _ in range(3))
    layer.activation_relu_or_gelu = 0


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _copies(mlp: nn.Module, experts: int, router: nn.Module) -> MixtureOfExperts:
    first = next(layer for layer in mlp.modules() if isinstance(layer, nn.Linear))
    moe = MixtureOfExperts(router, [copy.deepcopy(mlp) for _ in range(experts)], first.in_features)
    nn.init.normal_(moe.gate.weight, std=0.02)
    moe.gate.to(first.weight.device)
    return moe.train(mlp.training)
