"""Sparse autoencoders whose latents are selected by a relaxed top-k."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from .._checks import check_choice, check_positive_int
from ._functions.operators import topk, topk_mag
from ._modules import Lam, Operator
from ._rows.arguments import check_float_tensor

Kind: TypeAlias = Literal["topk", "abstopk", "batchtopk"]
# What each is called in SAELens; there a batch top-k is a threshold, once it is trained.
_SAE_LENS: dict[Kind, str] = {"topk": "topk", "abstopk": "abstopk", "batchtopk": "jumprelu"}


class TopKSAE(Operator):
    r"""A sparse autoencoder: each input as a sum of k of many latents.

    .. math:: z = \mathrm{select}\bigl((x - b_{dec}) W_{enc} + b_{enc}\bigr), \qquad
              \hat x = z W_{dec} + b_{dec}

    The selection is relaxed in ``train()`` and hard in ``eval()``:

    - ``kind="topk"`` selects the k largest of each input, and what is negative is 0;
    - ``"abstopk"`` the k largest in magnitude, with their signs;
    - ``"batchtopk"`` k times as many as there are inputs, over all of them: k on average. In ``eval()``
      what is above ``threshold`` is selected, a running mean of the boundary of batches in training.

    ``k`` is an integer, ``lam`` in the units of the latents. Latents that compete have a gradient too,
    so that fewer die; ``dead(n)`` says which have not been used by the last n inputs of training,
    competing counted as used. Call ``normalize_decoder()`` after each step of the optimizer.
    ``save_sae_lens`` writes what ``sae_lens.SAE.load_from_disk`` reads.

    >>> sae = TopKSAE(dim=16, latents=64, k=4)
    >>> int((sae.eval().encode(torch.randn(3, 16)) != 0).sum(dim=-1).max()) <= 4
    True
    """

    idle: Tensor
    threshold: Tensor
    k: int

    def __init__(
        self,
        dim: int,
        latents: int,
        k: int,
        lam: Lam = 0.1,
        *,
        kind: Kind = "topk",
        p: float = 2.0,
        straight_through: bool = False,
        threshold_rate: float = 0.01,
    ) -> None:
        check_positive_int("k", k, check_positive_int("latents", latents))
        options = {"p": p, "dim": -1, "straight_through": straight_through}
        super().__init__(k, lam, hard_eval=True, **options)
        self.kind: Kind = check_choice("kind", kind, tuple(_SAE_LENS))
        if not 0 < threshold_rate <= 1:
            raise ValueError(f"threshold_rate must be in (0, 1], got {threshold_rate}")
        self.threshold_rate = threshold_rate
        decoder = nn.functional.normalize(
            torch.randn(latents, check_positive_int("dim", dim)), dim=-1
        )
        self.W_dec, self.b_dec = nn.Parameter(decoder), nn.Parameter(torch.zeros(dim))
        self.W_enc, self.b_enc = (
            nn.Parameter(decoder.mT.clone()),
            nn.Parameter(torch.zeros(latents)),
        )
        self.register_buffer("idle", torch.zeros(latents, dtype=torch.int64))
        self.register_buffer("threshold", torch.tensor(torch.nan))  # no batch was seen yet

    def encode(self, x: Tensor) -> Tensor:
        """The latents, ``[..., latents]``."""
        check_float_tensor("x", x)
        z = self._select((x - self.b_dec) @ self.W_enc + self.b_enc)
        if self.training:
            self._count(z.detach())
        return z

    def decode(self, z: Tensor) -> Tensor:
        return z @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def _select(self, before: Tensor) -> Tensor:
        if self.kind == "abstopk":
            return self.evaluate(topk_mag, before)
        if self.kind == "topk":
            return self.evaluate(topk, before).relu()
        if not self.training:
            return torch.where(before > self.threshold.nan_to_num(0.0), before, 0.0).relu()
        number = self.k * (before.numel() // before.shape[-1])
        if number:
            self._move_threshold(before.detach(), number)
        return self.evaluate(topk, before.flatten(), number).reshape(before.shape).relu()

    def _move_threshold(self, before: Tensor, number: int) -> None:
        """Towards the least of what a hard selection of the batch takes."""
        least = before.flatten().topk(number, sorted=False).values.min().clamp_min(0.0)
        least = least.to(self.threshold)
        moved = self.threshold + self.threshold_rate * (least - self.threshold)
        self.threshold.copy_(torch.where(self.threshold.isnan(), least, moved))

    def _count(self, z: Tensor) -> None:
        rows = z.reshape(-1, z.shape[-1])
        used = (rows != 0).any(dim=0)
        self.idle.copy_(torch.where(used, 0, self.idle + rows.shape[0]))

    def dead(self, inputs: int) -> Tensor:
        """Which latents the last so many inputs, or more, have not used in training."""
        return self.idle >= check_positive_int("inputs", inputs)

    @torch.no_grad()
    def normalize_decoder(self) -> None:
        """Rows of the decoder to length 1."""
        self.W_dec.copy_(nn.functional.normalize(self.W_dec, dim=-1))

    def save_sae_lens(self, directory: str | Path, **metadata: Any) -> None:
        """Write ``cfg.json`` and ``sae_weights.safetensors`` for SAELens 6: the model of ``eval()``."""
        from safetensors.torch import save_file

        latents, dim = self.W_dec.shape
        weights = {
            name: getattr(self, name).detach() for name in ("W_enc", "b_enc", "W_dec", "b_dec")
        }
        settings: dict[str, Any] = {
            "sae_lens_version": "6.0.0",  # of the format
            "architecture": _SAE_LENS[self.kind],
            "d_in": dim,
            "d_sae": latents,
            "dtype": str(self.W_dec.dtype).removeprefix("torch."),
            "device": "cpu",
            "apply_b_dec_to_input": True,
            "normalize_activations": "none",
            "reshape_activations": "none",
            "metadata": metadata,
        }
        if self.kind == "batchtopk":
            weights["threshold"] = self.threshold.nan_to_num(0.0).to(self.b_enc).expand(latents)
        else:
            settings |= {"k": self.k, "rescale_acts_by_decoder_norm": False}
        to = Path(directory)
        to.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: v.cpu().contiguous() for name, v in weights.items()},
            to / "sae_weights.safetensors",
        )
        (to / "cfg.json").write_text(json.dumps(settings, indent=1) + "\n")

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, " + super().extra_repr()
