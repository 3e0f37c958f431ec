"""Learning a Gemmini design for given compression rates: Gumbel-softmax over its eight parameters (paper, appendix B).

Every design that is drawn or returned can be built. Two estimators of what a design costs are differentiable in the
parameters' probabilities; a greedy sweep around the best design seen ends the search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diffrate.costs.base import METRICS
from diffrate.costs.gemmini.cost import Workload
from diffrate.costs.gemmini.design import PARAMETERS, Design, designs_within
from diffrate.errors import DiffRateError
from diffrate.searching.budget import LAMBDAS, Budget

ESTIMATORS = ("priced", "paper")
LEARNING_RATE = 0.1
TEMPERATURE = (2.0, 0.3)  # of the softmax, at the first and at the last step
OVER = 10.0  # weight of exceeding a target, when single designs are compared
NEAR = 2  # parameters in which a neighbour may differ: fewer cannot change the side of a square array


@dataclass
class HardwareSearch:
    """The design of one network for targets of latency, power or energy.

    estimator  "priced": price every option of each parameter with the others fixed, 35 designs in one call, and take
               their expectation; "paper": (b + SG(1 - b)) F' of the drawn design, mean over the parameters (the
               paper's sum would make it eight times the metric).
    largest_array  the largest side of the array: area has no price, and a larger array meets most targets alone.
    """

    workload: Workload
    budget: Budget
    estimator: str = "priced"
    lambdas: Mapping[str, float] = field(default_factory=lambda: LAMBDAS)
    seed: int = 0
    largest_array: int | None = None

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise DiffRateError(f"estimator must be one of {', '.join(ESTIMATORS)}, not {self.estimator!r}")
        targets = {metric: t for metric, t in self.budget.targets.items() if metric != "gmacs"}
        if not targets:
            raise DiffRateError(
                "a search for hardware needs a target for latency, power or energy, such as 37ms,90mW"
            )
        self.targets = Budget(targets)
        self.values = [torch.tensor(v, dtype=torch.float64) for v in PARAMETERS.values()]
        self.logits = [torch.zeros(len(v), dtype=torch.float64, requires_grad=True) for v in self.values]
        self.optimizer = torch.optim.Adam(self.logits, lr=LEARNING_RATE)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.designs = designs_within(self.largest_array)  # (D, 8): 17,016 without a largest array
        places = [(self.designs[:, h, None] == v).double().argmax(dim=1) for h, v in enumerate(self.values)]
        self.places = torch.stack(places, dim=1)  # (D, 8): which option of each parameter
        self.best: Tensor | None = None
        self.best_score = float("inf")

    def check(self, least: list[float]) -> None:
        """Refuse targets that no design meets, even with the fewest tokens."""
        prices = self.workload.price(self.designs, least)
        side = self.largest_array
        kind = "design" if side is None else f"design with an array of at most {side}x{side}"
        for metric, target in self.targets.targets.items():
            lowest, words = float(prices[metric].min()), METRICS[metric].words
            if target < lowest:
                raise DiffRateError(
                    f"{target:.4g} {words} cannot be met on any {kind}: the least possible is {lowest:.4g} {words}"
                )
        shares = self.targets.used(prices)
        nearest = int(shares.argmin())
        if float(shares[nearest]) > 1:
            reached = Budget({metric: float(prices[metric][nearest]) for metric in self.targets.targets})
            raise DiffRateError(f"no {kind} meets {self.targets} together: the nearest possible is {reached}")

    def run(self, kept: list[float], steps: int) -> list[dict[str, Any]]:
        """Learn the design for fixed counts; returns the course."""
        self.best, self.best_score = None, float("inf")  # what was best for other counts need not be now
        history = []
        for step in range(steps):
            share = step / max(steps - 1, 1)
            design, loss = self.step(kept, TEMPERATURE[0] * (TEMPERATURE[1] / TEMPERATURE[0]) ** share)
            history.append({"step": step, "loss": loss, "design": [int(v) for v in design.tolist()]})
        self.sweep(kept)
        return history

    def step(self, kept: list[float], temperature: float) -> tuple[Tensor, float]:
        """One draw and one step of the logits; the design drawn and the loss."""
        noisy = [logits + self._gumbel(len(logits)) for logits in self.logits]
        soft = [(n / temperature).softmax(dim=0) for n in noisy]
        chosen = int(self._joint([n.detach() for n in noisy]).argmax())
        design, place = self.designs[chosen], self.places[chosen]
        if self.estimator == "priced":
            options = torch.cat([self._options(design, h) for h in range(len(self.values))])
            prices = self.workload.price(options, kept)
            sizes = [len(v) for v in self.values]
            expected = {}
            for metric in self.targets.targets:
                parts = prices[metric].split(sizes)
                expected[metric] = torch.stack(
                    [(b * p).sum() for b, p in zip(soft, parts, strict=True)]
                ).mean()
            exact = {metric: prices[metric][int(place[0])] for metric in self.targets.targets}
        else:
            prices = self.workload.price(design[None], kept)
            taken = torch.stack([b[i] for b, i in zip(soft, place.tolist(), strict=True)])
            weight = (taken + (1 - taken).detach()).mean()
            expected = {metric: weight * prices[metric][0] for metric in self.targets.targets}
            exact = {metric: prices[metric][0] for metric in self.targets.targets}
        loss = self.targets.loss(expected, self.lambdas)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self._remember(design, float(self.score(exact)))
        return design, float(loss.detach())

    def score(self, prices: Mapping[str, Tensor]) -> Tensor:
        """What a design is worth: the loss, and more for exceeding a target than for staying below it."""
        over = (self.targets.used(prices) - 1).clamp_min(0)
        return self.targets.loss(prices, self.lambdas) + OVER * over

    def sweep(self, kept: list[float]) -> Design:
        """Greedy: move to the best neighbour that can be built until there is none better."""
        designs = self.designs
        if self.best is None:
            self.best = designs[int((designs != Design().row()).sum(dim=1).argmin())]
            self.best_score = float(self.score(self.workload.price(self.best[None], kept))[0])
        while True:
            near = designs[(designs != self.best).sum(dim=1) <= NEAR]
            scores = self.score(self.workload.price(near, kept))
            if float(scores.min()) >= self.best_score:
                return self.design
            self._remember(near[int(scores.argmin())], float(scores.min()))

    @property
    def design(self) -> Design:
        assert self.best is not None
        return Design.from_row(self.best)

    def _remember(self, design: Tensor, score: float) -> None:
        if score < self.best_score:
            self.best, self.best_score = design.clone(), score

    def _joint(self, noisy: list[Tensor]) -> Tensor:
        """(D,) the noisy logits of each design that can be built: their maximum is a draw from these alone."""
        return torch.stack([n[self.places[:, h]] for h, n in enumerate(noisy)]).sum(dim=0)

    def _options(self, design: Tensor, parameter: int) -> Tensor:
        options = design.repeat(len(self.values[parameter]), 1)
        options[:, parameter] = self.values[parameter]
        return options

    def _gumbel(self, count: int) -> Tensor:
        uniform = torch.rand(count, dtype=torch.float64, generator=self.generator).clamp_min(1e-12)
        return -(-uniform.log()).log()
