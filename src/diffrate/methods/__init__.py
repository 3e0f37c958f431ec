"""Known methods on this package's engine, each from its paper, each at a budget of MACs.

`METHODS` is the list; `build` makes a model, with weights untouched. `diffrate.finetune` tunes what it made, and
trained.py reads that back: DynamicViT and SPViT have selectors that say nothing before they are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from diffrate.backbones import Layout, backbone_of
from diffrate.compressed import CompressedModel, compress
from diffrate.costs.macs import gmacs
from diffrate.errors import DiffRateError, shown
from diffrate.methods.ats import AdaptiveSampling
from diffrate.methods.dynamicvit import DynamicViT
from diffrate.methods.evit import EViT
from diffrate.methods.evovit import EvoViT
from diffrate.methods.fit import ROUNDING, asks_for_nothing
from diffrate.methods.policy import MethodModel, Policy, PolicyModel
from diffrate.methods.resolution import LowerResolution
from diffrate.methods.schedules import constant_rate, published_schedule, random_schedule
from diffrate.methods.spvit import SPViT
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
    """name, a line for `diffrate methods`, the paper, and how it is built; without `rebuild`, it is a schedule.

    departs  what is not as in the paper, in words; every method is held to a budget of MACs, whatever its paper tunes.
    """

    name: str
    line: str
    paper: str
    build: Callable[[Request], nn.Module]
    rebuild: Callable[[nn.Module, Mapping[str, Any]], MethodModel] | None = None  # from its settings
    trained: bool = False  # whether it has parts that are no good before they are trained
    departs: str = ""


def named(name: str) -> Method:
    """The method of that name."""
    if name not in METHODS:
        raise DiffRateError(
            f"there is no method {shown(name)}: `diffrate methods` lists {', '.join(METHODS)}"
        )
    return METHODS[name]


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
    method = named(name)
    if isinstance(model, CompressedModel):
        model = model.original
    if method.trained:
        raise DiffRateError(
            f"{name} must be trained: `diffrate finetune --method {name}`, and then give its folder as --trained"
        )
    _check_not_above(budget, model)
    return method.build(Request(model, budget, images, search_data, seed))


def cost_of(model: nn.Module) -> float:
    """GMACs of a model that `build` made; where it decides image by image, the most that an image can cost."""
    return model.gmacs if isinstance(model, LowerResolution) else gmacs(model)


def settings_of(model: nn.Module) -> dict[str, Any]:
    """What a model that `build` made does: a schedule, or a method's own parameters."""
    return model.settings() if isinstance(model, CompressedModel | LowerResolution) else {}


def to_train(name: str, model: nn.Module, budget: float, images: Tensor | None = None) -> MethodModel:
    """The model under a method, to be tuned by `diffrate.finetune`."""
    method = named(name)
    if method.rebuild is None:
        raise DiffRateError(f"{name} has nothing of its own to train: tune the model under a --schedule")
    _check_not_above(budget, model)
    made = method.build(Request(model, budget, images))
    assert isinstance(made, MethodModel)
    return made


def _check_not_above(budget: float, model: nn.Module) -> None:
    """A method's own reach is no help where the whole model costs less than the budget."""
    if budget > (1 + ROUNDING) * (whole := gmacs(model)):
        raise asks_for_nothing(budget, whole)


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


def _again(policy: Callable[[Layout, Mapping[str, Any]], Policy]) -> Callable[..., MethodModel]:
    return lambda model, settings: PolicyModel(model, policy(backbone_of(model).layout, settings))


_AS_TOME = (
    "r may lie between whole numbers: its running sum is rounded; attention is proportional in every model, the paper "
    "leaves that out for MAE models off the shelf"
)
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
        _again(lambda layout, s: EViT(layout, s["keep_rate"], s["fuse"])),
        departs="finetune trains at the final keep rate from the start; the paper lowers it over the first epochs",
    ),
    Method(
        "tome",
        "merges r tokens in every block: bipartite matching on keys, size-weighted means, proportional attention",
        "Bolya et al. 2023, Token Merging",
        _under(ToMe.at),
        _again(lambda layout, s: ToMe(layout, tuple(s["r"]))),
        departs=_AS_TOME,
    ),
    Method(
        "tome-decreasing",
        "ToMe with 2r tokens in the first block, falling to none in the last",
        "Bolya et al. 2023, Token Merging",
        _under(lambda model, budget: ToMe.at(model, budget, decreasing=True)),
        _again(lambda layout, s: ToMe(layout, tuple(s["r"]))),
        departs=_AS_TOME,
    ),
    Method(
        "atm",
        "ToMe with ATM's size-aware matching: the smaller half of the tokens joins the larger",
        "Lee and Choi 2025, Lossless Token Merging",
        _under(SizeAware.at),
        _again(lambda layout, s: SizeAware(layout, tuple(s["r"]))),
        departs="size-aware in every block, the paper in the last ones only; r tokens a block in place of thresholds; "
        + _AS_TOME,
    ),
    Method(
        "tofu",
        "ToMe with ToFu's norm-preserving merging: a merged token has its longest member's norm",
        "Kim et al. 2024, Token Fusion",
        _under(NormPreserving.at),
        _again(lambda layout, s: NormPreserving(layout, tuple(s["r"]))),
        departs=f"merges in every block, the paper prunes in the first ones; {_AS_TOME}",
    ),
    Method(
        "ats",
        "samples tokens image by image from a quarter of the depth on; batches are padded to their longest image",
        "Fayyaz et al. 2022, Adaptive Token Sampling",
        _sampled,
        _again(lambda layout, s: AdaptiveSampling(layout, s["samples"], s["first_block"])),
        departs="computes and charges attention for all tokens of a block, the paper for the sampled rows only; "
        "samples more often than there are tokens, or from a later block on, where that cannot use up a budget",
    ),
    Method(
        "evo-vit",
        "every block from a third of the depth on runs the most attended tokens; the others move with their mean",
        "Xu et al. 2022, Evo-ViT",
        lambda r: EvoViT.at(r.model, r.budget),
        lambda model, s: EvoViT(model, s["slow"]),
        departs="the paper always trains with it, which compare does not; no layer-to-stage training in finetune: all "
        "blocks select anew, where the paper ends with one selection a stage",
    ),
    Method(
        "dynamicvit",
        "trained predictors drop tokens before a quarter, half and three quarters of the depth; needs training",
        "Rao et al. 2021, DynamicViT",
        lambda r: DynamicViT.at(r.model, r.budget),
        lambda model, s: DynamicViT(model, s["keep_rate"]),
        trained=True,
        departs="the model learns from the first epoch on; the paper freezes it for five",
    ),
    Method(
        "spvit",
        "trained selectors that score head by head; what they drop goes on as one package token; needs training",
        "Kong et al. 2022, SPViT",
        lambda r: SPViT.at(r.model, r.budget),
        lambda model, s: SPViT(model, s["keep_rate"]),
        trained=True,
        departs="all stages keep one share, the paper's come from a table of latencies; selectors are trained at once; "
        "at inference all images keep equally many tokens, in the paper those that its selectors want",
    ),
    Method(
        "constant-rate",
        "the same share of tokens in every block, under the fast recipe's default operator, without a search",
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
