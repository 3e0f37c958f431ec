"""timm's BEiT and ViT-RelPos: attention with a bias for every pair of positions, gathered along with the tokens."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit
from timm.models.beit import Block as BeitBlock
from timm.models.vision_transformer_relpos import (
    RelPosAttention,
    RelPosBlock,
    ResPostRelPosBlock,
    VisionTransformerRelPos,
)
from torch import Tensor, nn

from diffrate.backbones.base import Attention, Backbone, BlockMacs, BlockProducts, Layout, linear_macs
from diffrate.backbones.products import edge_products, linear_shapes
from diffrate.backbones.refusals import refusal
from diffrate.tokens import Positions, Tokens

PARTS = {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"}


class TimmRelPos(Backbone):
    describes: ClassVar[str] = "timm's BEiT and ViT-RelPos models"
    families: ClassVar[dict[str, str]] = {
        "BEiT, BEiT v2": "beit_base_patch16_224",
        "ViT with relative positions": "vit_relpos_small_patch16_224",
    }
    model: Any  # a Beit or a VisionTransformerRelPos

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        return isinstance(model, Beit | VisionTransformerRelPos)

    def __init__(self, model: nn.Module) -> None:
        self.model = vit = cast(Any, model)
        if type(model) not in (Beit, VisionTransformerRelPos):
            raise refusal(model, f"{type(model).__name__} changes the forward pass in its own way")
        for i, block in enumerate(vit.blocks):
            if type(block) not in (BeitBlock, RelPosBlock, ResPostRelPosBlock):
                raise refusal(model, f"block {i} is a {type(block).__name__}, not one of the model's own")
            unknown = set(dict(block.named_children())) - PARTS
            if type(block.attn) not in (BeitAttention, RelPosAttention) or unknown:
                raise refusal(model, f"block {i} has parts that are not known here")
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
            in_chans=vit.patch_embed.proj.in_channels,
            dynamic=False,
        )

    def grid(self, images: Tensor) -> tuple[int, int]:
        rows, columns = self.model.patch_embed.grid_size
        return rows, columns

    def embed(self, images: Tensor) -> Tensor:
        model = self.model
        x = model.patch_embed(images)
        if model.cls_token is not None:
            x = torch.cat([model.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        if isinstance(model, VisionTransformerRelPos):
            return x
        return model.pos_drop(x if model.pos_embed is None else x + model.pos_embed)

    def positions(self, images: Tensor) -> Positions | None:
        return Positions(images.new_empty(0))  # the table of each block is made of its weights

    def runs_whole(self, positions: Positions | None) -> bool:
        """A block's own forward adds its bias to the whole grid: it will not do for tokens that moved."""
        assert positions is not None, "the positions of these tokens were lost on the way"
        return positions.index is None

    def block(self, i: int, x: Tensor, positions: Positions | None = None) -> Tensor:
        assert self.runs_whole(positions)
        if isinstance(self.model, Beit):
            return self.model.blocks[i](x, shared_rel_pos_bias=self._shared())
        return self.model.blocks[i](x, shared_rel_pos=self._shared())

    def _shared(self) -> Tensor | None:
        """The bias that all blocks have in common, where they have one."""
        if isinstance(self.model, VisionTransformerRelPos):
            shared: Any = self.model.shared_rel_pos
            return None if shared is None else shared.get_bias()
        model: Any = self.model
        return None if model.rel_pos_bias is None else model.rel_pos_bias()

    def _bias(self, i: int, positions: Positions | None) -> Tensor | None:
        """(B or 1, heads, N, N) of block i, for tokens where they sit."""
        assert positions is not None, "the positions of these tokens were lost on the way"
        attn, shared = self.model.blocks[i].attn, self._shared()
        own = None
        if isinstance(attn, RelPosAttention):
            relative: Any = attn.rel_pos
            own = None if relative is None else relative.get_bias()
            bias = shared if own is None else own  # timm's block adds one of the two
        else:
            if attn.relative_position_bias_table is not None:
                own = attn._get_rel_pos_bias()
            bias = (
                own + shared if own is not None and shared is not None else own if shared is None else shared
            )
        if bias is None or positions.index is None:
            return bias
        places = positions.index
        return bias[0][:, places[:, :, None], places[:, None, :]].transpose(0, 1)

    def open_attention(self, i: int, x: Tensor, positions: Positions | None = None) -> Attention:
        block = self.model.blocks[i]
        attn: Any = block.attn
        x = x if type(block) is ResPostRelPosBlock else block.norm1(x)
        weight, bias = attn.qkv.weight, attn.qkv.bias
        if getattr(attn, "q_bias", None) is not None:  # BEiT keeps them apart, with none for keys
            bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
        qkv = F.linear(x, weight, bias).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # each (B, heads, N, d)
        if isinstance(attn, RelPosAttention):
            q, k = attn.q_norm(q), attn.k_norm(k)
        dropout = attn.attn_drop.p if attn.training else 0.0
        return Attention(q.to(v.dtype), k.to(v.dtype), v, attn.scale, dropout, self._bias(i, positions))

    def close_attention(self, i: int, x: Tensor, mixed: Tensor) -> Tensor:
        block = self.model.blocks[i]
        y = block.attn.proj_drop(block.attn.proj(mixed.transpose(1, 2).flatten(2)))
        return x + block.drop_path1(self._scaled(block, y, 1))

    def mlp(self, i: int, x: Tensor) -> Tensor:
        block = self.model.blocks[i]
        y = block.mlp(x if type(block) is ResPostRelPosBlock else block.norm2(x))
        return x + block.drop_path2(self._scaled(block, y, 2))

    def _scaled(self, block: Any, y: Tensor, half: int) -> Tensor:
        """What a branch goes through before it joins the residual: a norm, a LayerScale, or BEiT's gamma."""
        if type(block) is ResPostRelPosBlock:
            return getattr(block, f"norm{half}")(y)
        if type(block) is RelPosBlock:
            return getattr(block, f"ls{half}")(y)
        gamma = getattr(block, f"gamma_{half}")
        return y if gamma is None else gamma * y

    def norm(self, x: Tensor) -> Tensor:
        return self.model.norm(x)

    def head(self, tokens: Tokens, pre_logits: bool = False) -> Tensor:
        model = self.model
        if tokens.size is None or model.global_pool != "avg":
            return model.forward_head(tokens.x, pre_logits=pre_logits)
        x, size = tokens.x[:, tokens.prefix :], tokens.size[:, tokens.prefix :]
        share = (size / size.sum(dim=1, keepdim=True)).unsqueeze(-1).to(x.dtype)
        pooled = model.head_drop(model.fc_norm((x * share).sum(dim=1)))
        return pooled if pre_logits else model.head(pooled)

    def block_macs(self, i: int) -> BlockMacs:
        """Without the MLP that makes the bias in some models: it runs once a batch, whatever is in it."""
        block = self.model.blocks[i]
        attn = block.attn
        token = linear_macs(attn.qkv) + linear_macs(attn.proj)
        return BlockMacs(token, 2 * attn.proj.in_features, linear_macs(block.mlp))

    def head_macs(self) -> tuple[float, float]:
        return linear_macs(self.model.head), 0.0

    def block_products(self, i: int) -> BlockProducts:
        block = self.model.blocks[i]
        attn = block.attn
        head_dim = attn.proj.in_features // attn.num_heads
        return BlockProducts(
            linear_shapes(attn.qkv, attn.proj), attn.num_heads, head_dim, linear_shapes(block.mlp)
        )

    def edge_products(self) -> list[tuple[int, int, int]]:
        return edge_products(self, self.model.patch_embed, linear_shapes(self.model.head))
