"""Token compression spelled out image by image on the library's own blocks: what every adapter is held against.

A library's block is run as it is, with torch's fused attention replaced by the formula, so that the reference sees
the queries and keys of the library itself, whatever norms, rotations and projections lie before them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import diffrate
from diffrate.backbones import backbone_of
from diffrate.masking import masked_logits
from diffrate.proxy import Kept
from diffrate.searching.many import logits_of_many


@dataclass
class Slow:
    """How a library runs its own model, in parts. Tokens are (1, N, C); `places` says where each one sits.

    attend  block i up to its MLP; run under `spelled_out`, which adds log(size).
    mlp     the rest of block i.
    head    logits from the normed tokens of the last block, their sizes and the map from patch to token.
    """

    embed: Callable[[Tensor], Tensor]
    attend: Callable[[int, Tensor, list[int]], Tensor]
    mlp: Callable[[int, Tensor], Tensor]
    head: Callable[[Tensor, Tensor, list[int]], Tensor]
    prefix: int
    class_token: bool
    merge_only: bool = False


@contextlib.contextmanager
def spelled_out(size: Tensor) -> Iterator[list[Tensor]]:
    """Replace fused attention by softmax(q k / sqrt(d) + log(size)) v; yields the attention matrices it used.

    A mask is what the library itself adds to its logits.
    """
    used: list[Tensor] = []

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
        assert dropout_p == 0.0
        assert not is_causal
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        logits = q @ k.transpose(-2, -1) * scale + size.log()
        weights = (logits if attn_mask is None else logits + attn_mask).softmax(dim=-1)
        used.append(weights)
        return weights @ v

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attention)
        yield used


def slow_logits(slow: Slow, images: Tensor, schedule: diffrate.Schedule) -> Tensor:
    with torch.no_grad():
        return torch.cat([_slow_image(slow, image[None], schedule) for image in images])


def _slow_image(slow: Slow, image: Tensor, schedule: diffrate.Schedule) -> Tensor:
    x = slow.embed(image)
    size = torch.ones(x.shape[1])
    stands_for = [[j] for j in range(x.shape[1])]  # input tokens; the first is where the token sits
    dropped: list[int] = []
    for i, (prune, merge) in enumerate(zip(schedule.prune, schedule.merge, strict=True)):
        with spelled_out(size) as used:
            attended = slow.attend(i, x, [members[0] for members in stands_for])[0]
        (weights,) = used
        attention = weights[0].mean(dim=0)  # (N, N)
        scores = attention[0] if slow.class_token else attention.mean(dim=0)
        n = len(attended)
        if slow.merge_only:
            prune = n
        merge = min(merge, n)
        order = list(range(slow.prefix)) + sorted(range(slow.prefix, n), key=lambda j: -scores[j].item())
        kept = order[:merge]
        joined = {j: [j] for j in kept}
        grown = {j: size[j].clone() for j in kept}
        for j in order[merge:prune]:
            similar = torch.cosine_similarity(attended[j][None], attended[kept[slow.prefix :]])
            target = kept[slow.prefix + int(similar.argmax())]
            joined[target].append(j)
            grown[target] += size[j] * similar.max()
        dropped += [p for j in order[prune:] for p in stands_for[j]]
        x = torch.stack([attended[joined[j]].mean(dim=0) for j in kept])[None]
        size = torch.stack([grown[j].clamp_min(1) for j in kept])
        stands_for = [[p for j in joined[target] for p in stands_for[j]] for target in kept]
        x = slow.mlp(i, x)
    where = {p: t for t, members in enumerate(stands_for) for p in members}
    inputs = len(where) + len(dropped)
    return slow.head(x, size, [where.get(p, -1) for p in range(slow.prefix, inputs)])


def noisy(model: nn.Module, std: float = 0.2) -> nn.Module:
    """Weights under which no part of a model can hide: zero-initialised heads and scales would."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std)
    return model.eval()


def falling(model: nn.Module) -> diffrate.Schedule:
    """A schedule that prunes and merges from the third block on and halves the image tokens."""
    layout = backbone_of(model).layout
    n, p = layout.tokens, layout.prefix
    middle, late = p + (n - p) * 3 // 4, p + (n - p) // 2
    rest = layout.depth - 4
    prune = (n, n, middle, late, *[late] * rest)
    return diffrate.Schedule(prune, (n, n, middle - 2, late, *[late] * rest), prefix=p)


def tensor_of(output: Any) -> Tensor:
    """Logits of whatever a library returns."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "image_embeds", "pooler_output"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return output[0]


def check(model: nn.Module, slow: Slow, **compress: Any) -> diffrate.CompressedModel:
    """Bit for bit the original where nothing is removed, and the slow forward where tokens are."""
    whole = diffrate.compress(model, **compress)
    layout = whole.backbone.layout
    torch.manual_seed(1)
    images = torch.randn(2, layout.in_chans, *layout.img_size)
    schedule = falling(model)
    fast = diffrate.compress(model, schedule, **compress)
    with torch.no_grad():
        assert torch.equal(tensor_of(whole(images)), tensor_of(model(images)))
        logits = tensor_of(fast(images))
    torch.testing.assert_close(logits, slow_logits(slow, images, schedule), rtol=1e-3, atol=1e-4)
    return fast


def check_search(model: nn.Module) -> None:
    """Many schedules in one walk have the compressed model's logits; the paper's masks too, with a gradient each."""
    backbone = backbone_of(model)
    layout = backbone.layout
    torch.manual_seed(2)
    images = torch.randn(2, layout.in_chans, *layout.img_size)
    n, p, last = layout.tokens, layout.prefix, layout.depth - 1
    kept = [n] + [max(p + 3, n - 5 * i) for i in range(1, last)]
    changed = [n] + [count - 2 for count in kept[1:]]
    operator = diffrate.compress(model, operation="merge", mean="attention").operator

    variants = [kept, *([*kept[:i], changed[i], *kept[i + 1 :]] for i in range(1, last))]
    schedules = [diffrate.Schedule((*each, each[-1]), (*each, each[-1]), p, operator) for each in variants]
    with torch.no_grad():
        logits = logits_of_many(backbone, images, schedules)
        wanted = [tensor_of(diffrate.compress(model, schedule)(images)) for schedule in schedules]
    for each, alone in zip(logits, wanted, strict=True):
        torch.testing.assert_close(each, alone, rtol=1e-3, atol=1e-4)

    if layout.mean_pooled and not layout.plain_mean:
        return  # the paper's recipe refuses pooling heads that cannot be masked
    counts = torch.tensor(kept[1:]) - p
    keep = (torch.arange(n - p)[None] < counts[:, None]).float().requires_grad_(True)
    both = Kept(counts.float(), keep)
    masked = masked_logits(backbone, images, both, both, list(range(1, last)), operator)
    torch.testing.assert_close(masked.detach(), wanted[0], rtol=1e-3, atol=1e-4)
    masked.logsumexp(dim=-1).sum().backward()
    assert keep.grad is not None
    assert keep.grad.isfinite().all()
    assert (keep.grad.abs().sum(dim=1) > 0).all()


# Per library, what became of each name: "" where it wraps and is right, else the reason why it is refused.
outcomes: dict[str, dict[str, str]] = {}


def remember(library: str, name: str, reason: str = "") -> None:
    outcomes.setdefault(library, {})[name] = reason
