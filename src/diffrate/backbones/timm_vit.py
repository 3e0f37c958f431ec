"""timm's VisionTransformer with standard blocks: ViT, DeiT, DeiT-III, DINOv2, CLIP and SigLIP towers, MAE."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, cast

from timm.layers import Attention as TimmAttention
from timm.layers import AttentionPoolLatent
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from torch import Tensor, nn

from diffrate.backbones.base import Attention, Backbone, BlockMacs, BlockProducts, Layout, linear_macs
from diffrate.backbones.products import edge_products, linear_shapes
from diffrate.backbones.refusals import refusal
from diffrate.lvvit import LvViT
from diffrate.tokens import Positions, Tokens

BLOCK_PARTS = {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"}
ATTENTION_PARTS = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop"}
POOLS = ("", "token", "avg", "avgmax", "max", "map")


class TimmViT(Backbone):
    describes: ClassVar[str] = "timm's VisionTransformer models with standard blocks"
    families: ClassVar[dict[str, str]] = {
        "ViT, DeiT, DeiT-III, MAE": "deit_small_patch16_224",
        "LV-ViT": "lvvit_s",
        "DINOv2, registers": "vit_small_patch14_reg4_dinov2",
        "CLIP, SigLIP, SigLIP 2": "vit_base_patch16_siglip_224",
    }
    model: Any  # a VisionTransformer: timm's modules carry no types of their own
    block_parts: ClassVar[set[str]] = BLOCK_PARTS
    attention_parts: ClassVar[set[str]] = ATTENTION_PARTS

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        return isinstance(model, VisionTransformer)

    def __init__(self, model: nn.Module) -> None:
        self.model = vit = cast(Any, model)
        self._refuse_what_does_not_fit()
        prefix = vit.num_prefix_tokens
        height, width = vit.patch_embed.img_size
        self.layout = Layout(
            depth=len(vit.blocks),
            dim=vit.embed_dim,
            tokens=vit.patch_embed.num_patches + prefix,
            prefix=prefix,
            class_token=vit.cls_token is not None,
            mean_pooled=vit.global_pool != "token",
            plain_mean=vit.global_pool == "avg",
            img_size=(height, width),
            in_chans=_input_channels(vit.patch_embed),
            dynamic=vit.dynamic_img_size,
        )

    def _refuse_what_does_not_fit(self) -> None:
        model = self.model
        self._refuse_unknown_classes()
        if getattr(model.patch_drop, "prob", 0) > 0:
            self._refuse("patch dropout changes the number of tokens; build it with patch_drop_rate=0")
        if model.patch_embed.img_size is None:
            self._refuse("it has no input size of its own; build it with img_size")
        if model.global_pool not in POOLS:
            self._refuse(
                f"its {model.global_pool!r} pooling mixes all tokens in a way that sizes cannot enter"
            )
        if model.attn_pool is not None:
            accepts_mask = "attn_mask" in inspect.signature(model.attn_pool.forward).parameters
            if type(model.attn_pool) is not AttentionPoolLatent or not accepts_mask:
                self._refuse(f"its pooling head {type(model.attn_pool).__name__} cannot weigh tokens by size")
            if model.attn_pool.pos_embed is not None:
                self._refuse("its pooling head adds positions to tokens, which merged tokens do not have")
        for i, block in enumerate(model.blocks):
            unknown = (set(dict(block.named_children())) - self.block_parts) | (
                set(dict(block.attn.named_children())) - self.attention_parts
            )
            if unknown:
                self._refuse(f"block {i} has parts that are not known here: {', '.join(sorted(unknown))}")

    def _refuse_unknown_classes(self) -> None:
        model = self.model
        if type(model) not in (VisionTransformer, VisionTransformerDistilled, LvViT):
            self._refuse(
                f"{type(model).__name__} changes the forward pass of VisionTransformer in its own way"
            )
        for i, block in enumerate(model.blocks):
            if type(block) not in (Block, ResPostBlock):
                self._refuse(
                    f"block {i} is a {type(block).__name__}; tokens are removed between attention and MLP, "
                    "which needs blocks that run one after the other"
                )
            if type(block.attn) is not TimmAttention:
                self._refuse(
                    f"the attention of block {i} is a {type(block.attn).__name__}, not timm's Attention"
                )

    def _refuse(self, reason: str) -> None:
        raise refusal(self.model, reason)

    def grid(self, images: Tensor) -> tuple[int, int]:
        embed = self.model.patch_embed
        if self.layout.dynamic:
            rows, columns = embed.dynamic_feat_size((images.shape[-2], images.shape[-1]))
        else:
            rows, columns = embed.grid_size
        return rows, columns

    def embed(self, images: Tensor) -> Tensor:
        model = self.model
        return model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))

    def block(self, i: int, x: Tensor, positions: Positions | None = None) -> Tensor:
        return self.model.blocks[i](x)

    def norms(self, i: int) -> tuple[nn.LayerNorm, nn.LayerNorm] | None:
        block = self.model.blocks[i]
        first, second = block.norm1, block.norm2
        if type(block) is Block and isinstance(first, nn.LayerNorm) and isinstance(second, nn.LayerNorm):
            return first, second
        return None

    def open_attention(self, i: int, x: Tensor, positions: Positions | None = None) -> Attention:
        block = self.model.blocks[i]
        return self.open_attention_of(i, block.norm1(x) if type(block) is Block else x)

    def open_attention_of(self, i: int, normed: Tensor) -> Attention:
        attn = self.model.blocks[i].attn
        b, n, _ = normed.shape
        qkv = attn.qkv(normed).reshape(b, n, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # each (B, heads, N, d)
        q, k = attn.q_norm(q), attn.k_norm(k)
        dropout = attn.attn_drop.p if attn.training else 0.0
        return Attention(q.to(v.dtype), k.to(v.dtype), v, attn.scale, dropout)

    def close_attention(self, i: int, x: Tensor, mixed: Tensor) -> Tensor:
        return x + self.attention_update(i, x, mixed)

    def attention_update(self, i: int, x: Tensor, mixed: Tensor) -> Tensor:
        block = self.model.blocks[i]
        attn = block.attn
        y = mixed.transpose(1, 2).flatten(2)  # (B, N, heads * d)
        if hasattr(attn, "norm"):
            y = attn.norm(y)
        if getattr(attn, "gate", None) is not None:
            y = y * attn.gate(block.norm1(x) if type(block) is Block else x).sigmoid()
        y = attn.proj_drop(attn.proj(y))
        update: Tensor = block.drop_path1(block.ls1(y) if type(block) is Block else block.norm1(y))
        return update

    def mlp_update(self, i: int, normed: Tensor) -> Tensor:
        block = self.model.blocks[i]
        update: Tensor = block.drop_path2(block.ls2(block.mlp(normed)))
        return update

    def mlp(self, i: int, x: Tensor) -> Tensor:
        block = self.model.blocks[i]
        if type(block) is Block:
            return x + self.mlp_update(i, block.norm2(x))
        return x + block.drop_path2(block.norm2(block.mlp(x)))

    def norm(self, x: Tensor) -> Tensor:
        return self.model.norm(x)

    def head(self, tokens: Tokens, pre_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        model = self.model
        if tokens.size is None or not self.layout.mean_pooled or model.global_pool == "":
            return model.forward_head(tokens.x, pre_logits=pre_logits)
        pooled = model.head_drop(model.fc_norm(self._pool(tokens.x, tokens.size)))
        return pooled if pre_logits else model.head(pooled)

    def _first_pooled(self) -> int:
        """Where the tokens begin that a pooling head looks at."""
        return 0 if self.model.pool_include_prefix else self.layout.prefix

    def _pool(self, x: Tensor, size: Tensor) -> Tensor:
        """timm's pooling with each image token counted as often as the patches it stands for."""
        model = self.model
        first = self._first_pooled()
        x, size = x[:, first:], size[:, first:]
        if model.attn_pool is not None:
            return model.attn_pool(x, attn_mask=size.log()[:, None, None].to(x.dtype))
        share = (size / size.sum(dim=1, keepdim=True)).unsqueeze(-1).to(x.dtype)
        if model.global_pool == "avg":
            return (x * share).sum(dim=1)
        if model.global_pool == "max":
            return x.amax(dim=1)
        return 0.5 * ((x * share).sum(dim=1) + x.amax(dim=1))  # avgmax

    def block_macs(self, i: int) -> BlockMacs:
        block = self.model.blocks[i]
        attn = block.attn
        return BlockMacs(linear_macs(attn), 2 * attn.proj.in_features, linear_macs(block.mlp))

    def head_macs(self) -> tuple[float, float]:
        model = self.model
        fixed = sum(map(linear_macs, self._classifiers()))
        if model.attn_pool is None:
            return fixed, 0.0
        pool = model.attn_pool
        per_token = linear_macs(pool.kv) + 2 * pool.latent_len * pool.num_heads * pool.head_dim
        per_latent = sum(linear_macs(part) for part in (pool.q, pool.proj, pool.mlp) if part is not None)
        fixed += pool.latent_len * per_latent
        return fixed, per_token

    def block_products(self, i: int) -> BlockProducts:
        block = self.model.blocks[i]
        attn = block.attn
        head_dim = attn.proj.in_features // attn.num_heads
        return BlockProducts(linear_shapes(attn), attn.num_heads, head_dim, linear_shapes(block.mlp))

    def edge_products(self) -> list[tuple[int, int, int]]:
        return edge_products(self, self.model.patch_embed, linear_shapes(*self._classifiers()))

    def _classifiers(self) -> list[nn.Module]:
        return [getattr(self.model, name) for name in ("head", "head_dist") if hasattr(self.model, name)]


def _input_channels(patch_embed: nn.Module) -> int:
    first: Any = next(m for m in patch_embed.modules() if isinstance(m, nn.Conv2d | nn.Linear))
    return int(first.in_channels) if isinstance(first, nn.Conv2d) else 3
