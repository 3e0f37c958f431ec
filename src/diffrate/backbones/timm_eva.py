"""timm's Eva models: EVA, EVA-02, DINOv3, Perception Encoder, RoPE ViTs. Rotary positions travel with the tokens."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import AttentionRope, apply_rot_embed_cat
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from torch import Tensor, nn

from diffrate.backbones.base import Attention
from diffrate.backbones.timm_vit import TimmViT
from diffrate.tokens import Positions

BLOCK_PARTS = {"norm1", "attn", "drop_path1", "norm2", "mlp", "drop_path2"}
ATTENTION_PARTS = {
    *("qkv", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm"),
    *("attn_drop", "norm", "gate", "proj", "proj_drop"),
}


class TimmEva(TimmViT):
    describes: ClassVar[str] = "timm's Eva models (EVA-02, DINOv3, PE, RoPE ViTs)"
    families: ClassVar[dict[str, str]] = {
        "EVA, EVA-02": "eva02_small_patch14_336",
        "DINOv3": "vit_small_patch16_dinov3",
        "Perception Encoder": "vit_pe_core_small_patch16_384",
        "RoPE ViT": "vit_small_patch16_rope_224",
    }
    block_parts, attention_parts = BLOCK_PARTS, ATTENTION_PARTS

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        return isinstance(model, Eva)

    @property
    def mixed(self) -> bool:
        """Whether each block has a rotary table of its own."""
        return bool(getattr(self.model, "rope_mixed", False))

    def _refuse_unknown_classes(self) -> None:
        if type(self.model) is not Eva:
            self._refuse(f"{type(self.model).__name__} changes the forward pass of Eva in its own way")
        for i, block in enumerate(self.model.blocks):
            if type(block) not in (EvaBlock, EvaBlockPostNorm):
                self._refuse(f"block {i} is a {type(block).__name__}, not one of Eva's own")
            if type(block.attn) not in (EvaAttention, AttentionRope):
                self._refuse(
                    f"the attention of block {i} is a {type(block.attn).__name__}, not one of Eva's own"
                )

    def _first_pooled(self) -> int:
        return self.layout.prefix if self.model.attn_pool is None else 0

    def embed(self, images: Tensor) -> Tensor:
        model = self.model
        x, _ = model._pos_embed(model.patch_embed(images))
        return model.norm_pre(x)

    def positions(self, images: Tensor) -> Positions | None:
        """The rotary table: (P, D) for all blocks, or (depth, heads, P, D) where each block has its own."""
        rope = self.model.rope
        if rope is None:
            return None
        return Positions(rope.get_embed(shape=self.grid(images)) if self.layout.dynamic else rope.get_embed())

    def _rope(self, i: int, positions: Positions | None) -> Tensor | None:
        """Sine and cosine of each image token in block i; once tokens moved, with the batch in front."""
        if self.model.rope is None:
            return None
        assert positions is not None, "the positions of these tokens were lost on the way"
        table = positions.table[i] if self.mixed else positions.table
        if positions.index is None:
            return table
        places = positions.index[:, self.layout.prefix :] - self.layout.prefix
        if self.mixed:
            return table[:, places].transpose(0, 1)  # (B, heads, N', D)
        return table[places].unsqueeze(1)  # (B, 1, N', D)

    def block(self, i: int, x: Tensor, positions: Positions | None = None) -> Tensor:
        return self.model.blocks[i](x, rope=self._rope(i, positions))

    def open_attention(self, i: int, x: Tensor, positions: Positions | None = None) -> Attention:
        block = self.model.blocks[i]
        attn = block.attn
        q, k, v = _project(attn, block.norm1(x) if type(block) is EvaBlock else x)
        q, k = attn.q_norm(q), attn.k_norm(k)
        rope = self._rope(i, positions)
        if rope is not None:
            q, k = (_turned(attn, heads, rope) for heads in (q, k))
        if k.shape[1] < q.shape[1]:  # grouped queries: each key and value head serves several
            k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
        dropout = attn.attn_drop.p if attn.training else 0.0
        return Attention(q.to(v.dtype), k.to(v.dtype), v, attn.scale, dropout)

    def close_attention(self, i: int, x: Tensor, mixed: Tensor) -> Tensor:
        block = self.model.blocks[i]
        attn, pre_norm = block.attn, type(block) is EvaBlock
        y = attn.norm(mixed.transpose(1, 2).flatten(2))
        gate = getattr(attn, "gate", None)
        if gate is not None:
            y = y * gate(block.norm1(x) if pre_norm else x).sigmoid()
        y = attn.proj_drop(attn.proj(y))
        if not pre_norm:
            return x + block.drop_path1(block.norm1(y))
        return x + block.drop_path1(y if block.gamma_1 is None else block.gamma_1 * y)

    def norms(self, i: int) -> tuple[nn.LayerNorm, nn.LayerNorm] | None:
        return None  # attention looks at positions as well

    def mlp(self, i: int, x: Tensor) -> Tensor:
        block = self.model.blocks[i]
        if type(block) is EvaBlockPostNorm:
            return x + block.drop_path2(block.norm2(block.mlp(x)))
        y = block.mlp(block.norm2(x))
        return x + block.drop_path2(y if block.gamma_2 is None else block.gamma_2 * y)


def _project(attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (B, heads, N, d) of timm's EvaAttention or AttentionRope, fused or apart."""
    head_dim = attn.proj.in_features // attn.num_heads
    if attn.qkv is None:
        q, k, v = (proj(x).unflatten(2, (-1, head_dim)).transpose(1, 2) for proj in _projections(attn))
        return q, k, v
    bias = attn.qkv.bias
    if getattr(attn, "q_bias", None) is not None:  # EvaAttention keeps them apart, with none for keys
        bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
    if getattr(attn, "qkv_bias_separate", False) and bias is not None:
        qkv = attn.qkv(x) + bias
    else:
        qkv = F.linear(x, attn.qkv.weight, bias)
    q, k, v = qkv.unflatten(2, (3, attn.num_heads, head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _projections(attn: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
    return attn.q_proj, attn.k_proj, attn.v_proj


def _turned(attn: Any, heads: Tensor, rope: Tensor) -> Tensor:
    """Rotary positions on every token but the prefix."""
    prefix = attn.num_prefix_tokens
    turned = apply_rot_embed_cat(heads[:, :, prefix:], rope, half=getattr(attn, "rotate_half", False))
    return torch.cat([heads[:, :, :prefix], turned], dim=2)
