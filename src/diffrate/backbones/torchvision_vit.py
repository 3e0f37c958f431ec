"""torchvision's VisionTransformer."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

from diffrate.backbones import multihead
from diffrate.backbones.base import Attention, Backbone, BlockMacs, BlockProducts, Layout, linear_macs
from diffrate.backbones.products import edge_products, linear_shapes
from diffrate.backbones.refusals import refusal
from diffrate.tokens import Positions, Tokens


class TorchvisionViT(Backbone):
    describes: ClassVar[str] = "torchvision's VisionTransformer"
    library: ClassVar[str] = "torchvision"
    families: ClassVar[dict[str, str]] = {"ViT": "torchvision:vit_b_16"}
    model: Any  # a VisionTransformer

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        return isinstance(model, VisionTransformer)

    def __init__(self, model: nn.Module) -> None:
        self.model = vit = cast(Any, model)
        if type(model) is not VisionTransformer:
            raise refusal(model, f"{type(model).__name__} changes VisionTransformer in its own way")
        for i, block in enumerate(vit.encoder.layers):
            if type(block) is not EncoderBlock or not multihead.is_plain(block.self_attention):
                raise refusal(model, f"block {i} is not torchvision's own")
        first: Any = next(m for m in vit.conv_proj.modules() if isinstance(m, nn.Conv2d))
        self.layout = Layout(
            depth=len(vit.encoder.layers),
            dim=vit.hidden_dim,
            tokens=vit.seq_length,
            prefix=1,
            class_token=True,
            mean_pooled=False,
            plain_mean=False,
            img_size=(vit.image_size, vit.image_size),
            in_chans=first.in_channels,
            dynamic=False,
        )

    def grid(self, images: Tensor) -> tuple[int, int]:
        side = self.model.image_size // self.model.patch_size
        return side, side

    def embed(self, images: Tensor) -> Tensor:
        model = self.model
        x = model._process_input(images)
        x = torch.cat([model.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        return model.encoder.dropout(x + model.encoder.pos_embedding)

    def block(self, i: int, x: Tensor, positions: Positions | None = None) -> Tensor:
        return self.model.encoder.layers[i](x)

    def open_attention(self, i: int, x: Tensor, positions: Positions | None = None) -> Attention:
        block = self.model.encoder.layers[i]
        return multihead.opened(block.self_attention, block.ln_1(x))

    def close_attention(self, i: int, x: Tensor, mixed: Tensor) -> Tensor:
        block = self.model.encoder.layers[i]
        return x + block.dropout(multihead.closed(block.self_attention, mixed))

    def mlp(self, i: int, x: Tensor) -> Tensor:
        block = self.model.encoder.layers[i]
        return x + block.mlp(block.ln_2(x))

    def norm(self, x: Tensor) -> Tensor:
        return self.model.encoder.ln(x)

    def head(self, tokens: Tokens, pre_logits: bool = False) -> Tensor:
        heads = self.model.heads
        return (heads[:-1] if pre_logits else heads)(tokens.x[:, 0])

    def block_macs(self, i: int) -> BlockMacs:
        block = self.model.encoder.layers[i]
        attention = block.self_attention
        return BlockMacs(multihead.macs(attention), 2 * attention.embed_dim, linear_macs(block.mlp))

    def head_macs(self) -> tuple[float, float]:
        return linear_macs(self.model.heads), 0.0

    def block_products(self, i: int) -> BlockProducts:
        block = self.model.encoder.layers[i]
        return multihead.products(block.self_attention, block.mlp)

    def edge_products(self) -> list[tuple[int, int, int]]:
        return edge_products(self, self.model.conv_proj, linear_shapes(self.model.heads))
