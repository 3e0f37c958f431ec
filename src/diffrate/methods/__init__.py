"""Known methods on this package's engine, each from its paper, each at a budget of MACs and with weights untouched.

`METHODS` is the list; `build` makes a model. Methods that train a selector of their own (DynamicViT, Evo-ViT, SPViT)
are not among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from diffrate.compressed import CompressedModel, compress
from diffrate.costs.macs import gmacs
from diffrate.errors import DiffRateError, shown
from diffrate.methods.ats import AdaptiveSampling
from diffrate.methods.evit import EViT
from diffrate.methods.policy import Policy, PolicyModel
from diffrate.methods.resolution import LowerResolution
from diffrate.methods.schedules import constant_rate, published_schedule, random_schedule
from diffrate.methods.tome import NormPreserving, SizeAware, ToMe
from diffrate.searching import fast, search


@dataclass(frozen=True)
class Request:
    """What a method is asked for: a model at a budget of GMACs, and what it may look at."""

    model: nn.Module
    budget: float
    images: Tensor | None = None
    search_data: Any = None
    seed: int = 0


@dataclass(frozen=True)
class Method:
    """name, a line for `diffrate methods`, the paper, and how it is built."""

    name: str
    line: str
    paper: str
    build: Callable[[Request], nn.Module]


def build(
    name: str,
    model: nn.Module,
    budget: float,
    images: Tensor | None = None,
    search_data: Any = None,
    seed: int = 0,
) -> nn.Module:
    """The model under a method that costs `budget` GMACs or just less.

    images       a batch without labels, on which methods that decide image by image measure what they cost.
    search_data  the data of `diffrate.search`, for the method of that name.
    """
    if name not in METHODS:
        raise DiffRateError(
            f"there is no method {shown(name)}: `diffrate methods` lists {', '.join(METHODS)}"
        )
    if isinstance(model, CompressedModel):
        model = model.original
    return METHODS[name].build(Request(model, budget, images, search_data, seed))


def cost_of(model: nn.Module) -> float:
    """GMACs of a model that `build` made; where it decides image by image, the most that an image can cost."""
    return model.gmacs if isinstance(model, LowerResolution) else gmacs(model)


def settings_of(model: nn.Module) -> dict[str, Any]:
    """What a model that `build` made does: a schedule, or a method's own parameters."""
    if isinstance(model, PolicyModel):
        return {"method": model.policy.name, **model.policy.settings(), "kept": list(model.kept)}
    if isinstance(model, LowerResolution):
        return {"method": "resolution", **model.settings()}
    if isinstance(model, CompressedModel):
        return {"schedule": model.schedule.to_dict(), "operator": dict(vars(model.operator))}
    return {}


def _searched(request: Request) -> nn.Module:
    if request.search_data is None:
        raise DiffRateError("the method search needs images to search on, apart from those it is judged by")
    device = next(request.model.parameters()).device
    found = search(request.model, request.search_data, request.budget, seed=request.seed)
    request.model.to(device)
    return compress(request.model, found.schedule)


def _sampled(request: Request) -> nn.Module:
    if request.images is None:
        raise DiffRateError("ATS decides image by image: it needs images to find out what it costs")
    return PolicyModel(request.model, AdaptiveSampling.at(request.model, request.budget, request.images))


def _under(policy: Callable[[nn.Module, float], Policy]) -> Callable[[Request], nn.Module]:
    return lambda r: PolicyModel(r.model, policy(r.model, r.budget))


_LISTED = (
    Method(
        "search",
        "DiffRate, searched here on images of your own, by the fast recipe",
        "Chen et al. 2023, DiffRate",
        _searched,
    ),
    Method(
        "published",
        "DiffRate's published schedule for a model of this shape, moved onto the budget; pruning, then merging",
        "Chen et al. 2023, DiffRate",
        lambda r: compress(r.model, published_schedule(r.model, r.budget)),
    ),
    Method(
        "evit",
        "keeps the tokens with most class attention at a quarter, half and three quarters of the depth; fuses the rest",
        "Liang et al. 2022, Not All Patches Are What You Need",
        _under(EViT.at),
    ),
    Method(
        "tome",
        "merges r tokens in every block: bipartite matching on keys, size-weighted means, proportional attention",
        "Bolya et al. 2023, Token Merging",
        _under(ToMe.at),
    ),
    Method(
        "tome-decreasing",
        "ToMe with 2r tokens in the first block, falling to none in the last",
        "Bolya et al. 2023, Token Merging",
        _under(lambda model, budget: ToMe.at(model, budget, decreasing=True)),
    ),
    Method(
        "atm",
        "ToMe with ATM's size-aware matching: the smaller half of the tokens joins the larger; without its thresholds",
        "Lee and Choi 2025, Lossless Token Merging",
        _under(SizeAware.at),
    ),
    Method(
        "tofu",
        "ToMe with ToFu's norm-preserving merging: a merged token has its longest member's norm; without its pruning",
        "Kim et al. 2024, Token Fusion",
        _under(NormPreserving.at),
    ),
    Method(
        "ats",
        "samples tokens image by image from a quarter of the depth on; batches are padded to their longest image",
        "Fayyaz et al. 2022, Adaptive Token Sampling",
        _sampled,
    ),
    Method(
        "constant-rate",
        "the same share of tokens in every block, under the fast search's operator: a schedule without a search",
        "",
        lambda r: compress(r.model, constant_rate(r.model, r.budget, fast.OPERATOR)),
    ),
    Method(
        "random",
        "a random falling schedule (--seed), pruning, then merging",
        "",
        lambda r: compress(r.model, random_schedule(r.model, r.budget, r.seed)),
    ),
    Method(
        "resolution",
        "the whole model on smaller images, position embedding resampled: what token compression must beat",
        "",
        lambda r: LowerResolution.at(r.model, r.budget),
    ),
)
METHODS = {method.name: method for method in _LISTED}
