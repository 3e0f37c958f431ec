"""One block of the walk, in two halves: attention and ranking, then fewer tokens and the MLP.

Here is where a block takes the kernels or the plain path, and where it runs as the model itself would.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from diffrate import kernels, ranking
from diffrate.backbones import Backbone
from diffrate.backbones.base import Attention
from diffrate.mixing import mix
from diffrate.operator import Operator
from diffrate.reduction import reduce_tokens
from diffrate.steps import step
from diffrate.tokens import Tokens


def run_block(
    backbone: Backbone,
    i: int,
    tokens: Tokens,
    prune: int,
    merge: int,
    operator: Operator,
    exactly: bool = False,
) -> Tokens:
    """One block. Where it removes nothing and no token has a size yet, it is the model's own, untouched.

    Except where kernels run: there sums and norms are one, unless it has to be `exactly` the model's own.
    """
    if merge < tokens.count:
        attended, ranked = attend_and_rank(backbone, i, tokens, operator)
        return reduce_and_finish(backbone, i, attended, ranked, prune, merge, operator)
    weighed = operator.proportional and tokens.size is not None
    fast = kernels.fast(tokens, operator)
    own = not weighed and backbone.runs_whole(tokens.positions)
    if own and (exactly or not (fast and kernels.lean(tokens, backbone.norms(i)))):
        with step("attention and MLP"):
            return tokens.with_features(backbone.block(i, tokens.x, tokens.positions))
    size, bias = (tokens.size, tokens.key_bias()) if weighed else (None, None)
    with step("attention"):
        attention = open_attention(backbone, i, tokens)
        if fast:
            mixed = kernels.attend(attention, size, bias)
            norms = backbone.norms(i)
            if norms is not None:
                tokens = kernels.add(tokens, backbone.attention_update(i, tokens.x, mixed), norms[1])
                return finish_block(backbone, i, tokens, tokens.normed)
        else:
            mixed = mix(attention, attention.logit_bias(bias))
        attended = tokens.with_features(backbone.close_attention(i, tokens.x, mixed))
    return finish_block(backbone, i, attended)


def run_block_for_prefix(backbone: Backbone, i: int, tokens: Tokens, operator: Operator) -> Tokens:
    """The last block where the head looks at prefix tokens alone: they attend to all others, which go no further."""
    prefix, bias = tokens.prefix, tokens.key_bias() if operator.proportional else None
    with step("attention"):
        attention = open_attention(backbone, i, tokens)
        bias = attention.logit_bias(bias)
        if bias is not None and bias.dim() == 4:
            bias = bias[:, :, :prefix]
        mixed = mix(attention._replace(q=attention.q[:, :, :prefix]), bias)
        x = backbone.close_attention(i, tokens.x[:, :prefix], mixed)
    return finish_block(backbone, i, Tokens(x, prefix, grid=tokens.grid))


def open_attention(backbone: Backbone, i: int, tokens: Tokens) -> Attention:
    """Norm, unless the block before has seen to that, and projections of block i."""
    if tokens.normed is not None:
        return backbone.open_attention_of(i, tokens.normed)
    return backbone.open_attention(i, tokens.x, tokens.positions)


def attend_and_rank(
    backbone: Backbone, i: int, tokens: Tokens, operator: Operator
) -> tuple[Tokens, kernels.Ranked | Tensor]:
    """The first half of a block that removes tokens: x + attention, and what ranks them for reduce_and_finish.

    That is (B, N - prefix) importances, or what the kernels make of them.
    """
    size, bias = (tokens.size, tokens.key_bias()) if operator.proportional else (None, None)
    ranked: kernels.Ranked | Tensor
    with step("attention"):
        attention = open_attention(backbone, i, tokens)
        if kernels.fast(tokens, operator):
            mixed, logits = kernels.attend_and_score(attention, size, bias, tokens.prefix, operator)
            ranked = kernels.rank(logits, tokens.prefix, operator, tokens.importance)
            if backbone.norms(i) is None:
                return tokens.with_features(backbone.close_attention(i, tokens.x, mixed)), ranked
            return kernels.add_measured(tokens, backbone.attention_update(i, tokens.x, mixed)), ranked
        bias = attention.logit_bias(bias)
        if operator.importance == "image-attention":  # needs every row of the matrix: mix by it as well
            weights = ranking.attention_weights(attention.q, attention.k, attention.scale, bias)
            if attention.by is None:
                mixed = F.dropout(weights, attention.dropout).to(attention.v.dtype) @ attention.v
            else:
                mixed = mix(attention, bias)
        else:
            mixed = mix(attention, bias)
        attended = tokens.with_features(backbone.close_attention(i, tokens.x, mixed))
    with step("ranking"), torch.no_grad():  # a choice of tokens has no gradient
        if operator.importance == "image-attention":
            importance = ranking.image_attention(weights, tokens.prefix)
        else:
            importance = importance_of(attention, bias, tokens, i, operator)
        return attended, ranking.remembered(importance, tokens, operator.memory)


def reduce_and_finish(
    backbone: Backbone,
    i: int,
    tokens: Tokens,
    ranked: kernels.Ranked | Tensor,
    prune: int,
    merge: int,
    operator: Operator,
) -> Tokens:
    """The second half of such a block: fewer tokens, if there are too many, and the MLP on those that are left."""
    if merge >= tokens.count:
        return finish_block(backbone, i, tokens)
    if isinstance(ranked, Tensor):
        return finish_block(backbone, i, reduce_tokens(tokens, ranked, prune, merge, operator))
    norms = backbone.norms(i)
    norm = None if norms is None else norms[1]
    left, normed = kernels.reduce_tokens(tokens, ranked, prune, merge, operator, norm)
    return finish_block(backbone, i, left, normed)


def finish_block(backbone: Backbone, i: int, tokens: Tokens, normed: Tensor | None = None) -> Tokens:
    """The second half of a block: the MLP on the tokens that are left, of which `normed` may be known already."""
    with step("MLP"):
        if normed is None:
            return tokens.with_features(backbone.mlp(i, tokens.x))
        following = backbone.norms(i + 1) if i + 1 < backbone.layout.depth else None
        norm = None if following is None else following[0]
        return kernels.add(tokens, backbone.mlp_update(i, normed), norm)


def importance_of(
    attention: Attention, bias: Tensor | None, tokens: Tokens, block: int, operator: Operator
) -> Tensor:
    """(B, N - prefix) scores by the metrics that need one row of the attention matrix, or none."""
    q, k, v, scale = attention[:4]
    match operator.importance:
        case "class-attention":
            return ranking.class_attention(q, k, scale, bias, tokens.prefix, operator.image_share)
        case "class-attention-value":
            return ranking.class_attention_value(q, k, v, scale, bias, tokens.prefix)
        case _:
            return ranking.random_importance(tokens.x, tokens.prefix, block, operator.seed)
