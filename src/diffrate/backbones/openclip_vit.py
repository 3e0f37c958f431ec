"""The vision towers of OpenCLIP: the plain ones of CLIP, and CoCa's with an attentional pooler.

Recognised by their class names, so that open_clip is imported only where a user already has. Towers that OpenCLIP
takes from timm (SigLIP, EVA) are timm models at visual.trunk.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor, nn

from diffrate.backbones import multihead
from diffrate.backbones.base import Attention, Backbone, BlockMacs, BlockProducts, Layout, linear_macs
from diffrate.backbones.products import edge_products
from diffrate.backbones.refusals import refusal
from diffrate.tokens import Positions, Tokens

PARTS = {"ln_1", "attn", "ls_1", "ln_2", "mlp", "ls_2"}


class OpenClipViT(Backbone):
    describes: ClassVar[str] = "OpenCLIP's vision towers"
    library: ClassVar[str] = "open_clip"
    families: ClassVar[dict[str, str]] = {
        "CLIP vision": "openclip:ViT-B-32",
        "CoCa vision": "openclip:coca_ViT-B-32",
    }
    model: Any  # an open_clip.transformer.VisionTransformer

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        return (
            type(model).__module__ == "open_clip.transformer" and type(model).__name__ == "VisionTransformer"
        )

    def __init__(self, model: nn.Module) -> None:
        self.model = tower = cast(Any, model)
        self.blocks: Any = tower.transformer.resblocks
        self._refuse_what_does_not_fit()
        rows, columns = tower.grid_size
        pooled = tower.attn_pool is not None or tower.pool_type != "tok" or tower.output_tokens
        self.layout = Layout(
            depth=len(self.blocks),
            dim=tower.conv1.out_channels,
            tokens=rows * columns + 1,
            prefix=1,
            class_token=True,
            mean_pooled=pooled,
            plain_mean=tower.attn_pool is None,
            img_size=tuple(tower.image_size),
            in_chans=tower.conv1.in_channels,
            dynamic=False,
        )

    def _refuse_what_does_not_fit(self) -> None:
        tower = self.model
        if getattr(tower.patch_dropout, "prob", 0) > 0:
            raise refusal(tower, "patch dropout changes the number of tokens; build it with patch_dropout=0")
        if tower.attn_pool is not None and tower.attn_pool_contrastive is not None:
            raise refusal(tower, "it has two attentional poolers, which sizes do not enter here")
        for i, block in enumerate(self.blocks):
            if type(block).__name__ != "ResidualAttentionBlock" or not multihead.is_plain(block.attn):
                raise refusal(tower, f"block {i} is a {type(block).__name__}, whose attention is not plain")
            unknown = set(dict(block.named_children())) - PARTS
            if unknown:
                raise refusal(tower, f"block {i} has parts that are not known: {', '.join(sorted(unknown))}")

    def grid(self, images: Tensor) -> tuple[int, int]:
        rows, columns = self.model.grid_size
        return rows, columns

    def embed(self, images: Tensor) -> Tensor:
        return self.model._embeds(images)

    def block(self, i: int, x: Tensor, positions: Positions | None = None) -> Tensor:
        return self.blocks[i](x)

    def open_attention(self, i: int, x: Tensor, positions: Positions | None = None) -> Attention:
        block = self.blocks[i]
        return multihead.opened(block.attn, block.ln_1(x))

    def close_attention(self, i: int, x: Tensor, mixed: Tensor) -> Tensor:
        block = self.blocks[i]
        return x + block.ls_1(multihead.closed(block.attn, mixed))

    def mlp(self, i: int, x: Tensor) -> Tensor:
        block = self.blocks[i]
        return x + block.ls_2(block.mlp(block.ln_2(x)))

    def norm(self, x: Tensor) -> Tensor:
        return x  # where the last norm goes depends on the pooling

    def head(self, tokens: Tokens, pre_logits: bool = False) -> Any:
        """The image embedding; a pair with the remaining patch tokens where the tower was built to return them."""
        tower = self.model
        pooled, rest = tower._pool(tokens.x) if tokens.size is None else self._pool(tokens.x, tokens.size)
        if tower.proj is not None:
            pooled = pooled @ tower.proj
        return (pooled, rest) if tower.output_tokens else pooled

    def _pool(self, x: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """OpenCLIP's pooling with each patch token counted as often as the patches it stands for."""
        tower = self.model
        if tower.attn_pool is not None:
            pooler = tower.attn_pool
            keys, queries = pooler.ln_k(x), pooler.ln_q(pooler.query)
            bias = multihead.by_size(pooler.attn, size, len(queries)).to(x.dtype)
            queries = queries.unsqueeze(0).expand(x.shape[0], -1, -1)
            x = tower.ln_post(pooler.attn(queries, keys, keys, attn_mask=bias, need_weights=False)[0])
            pooled, rest = tower._global_pool(x)
            return pooled, rest
        if not tower.final_ln_after_pool:
            x = tower.ln_post(x)
        if tower.pool_type == "avg":
            share = (size[:, 1:] / size[:, 1:].sum(dim=1, keepdim=True)).unsqueeze(-1).to(x.dtype)
            pooled, rest = (x[:, 1:] * share).sum(dim=1), x[:, 1:]
        else:
            pooled, rest = tower._global_pool(x)
        return (tower.ln_post(pooled) if tower.final_ln_after_pool else pooled), rest

    def block_macs(self, i: int) -> BlockMacs:
        block = self.blocks[i]
        return BlockMacs(multihead.macs(block.attn), 2 * block.attn.embed_dim, linear_macs(block.mlp))

    def head_macs(self) -> tuple[float, float]:
        tower = self.model
        fixed = 0.0 if tower.proj is None else float(tower.proj.numel())
        if tower.attn_pool is None:
            return fixed, 0.0
        attention, queries = tower.attn_pool.attn, len(tower.attn_pool.query)
        width, context = attention.embed_dim, self.layout.dim
        return fixed + queries * 2.0 * width * width, 2.0 * width * context + 2.0 * queries * width

    def block_products(self, i: int) -> BlockProducts:
        return multihead.products(self.blocks[i].attn, self.blocks[i].mlp)

    def edge_products(self) -> list[tuple[int, int, int]]:
        tower = self.model
        head = () if tower.proj is None else (tuple(tower.proj.shape),)
        return edge_products(self, tower.conv1, head)
