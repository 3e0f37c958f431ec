"""timm's MetaFormer with attention: CAFormer, whose third stage is compressed (paper, appendix on other architectures).

Its first two stages are convolutions and its last costs little. Between them is a sequence of blocks like that of a
ViT, without prefix tokens; at the end of the stage the grid is restored, so that what follows sees a whole image.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from timm.models.metaformer import Attention as MetaFormerAttention
from timm.models.metaformer import MetaFormer, MetaFormerBlock
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from diffrate.backbones.base import Attention, Backbone, BlockMacs, BlockProducts, Layout, linear_macs
from diffrate.backbones.products import refuse
from diffrate.backbones.refusals import NO_ATTENTION, refusal
from diffrate.modes import evaluating
from diffrate.reduction import restore
from diffrate.tokens import Positions, Tokens

PARTS = {
    *("norm1", "token_mixer", "drop_path1", "layer_scale1", "res_scale1"),
    *("norm2", "mlp", "drop_path2", "layer_scale2", "res_scale2"),
}


class TimmMetaFormer(Backbone):
    describes: ClassVar[str] = "timm's CAFormer models"
    families: ClassVar[dict[str, str]] = {"CAFormer": "caformer_s36"}
    compresses: ClassVar[str] = "stage 3, restored at its end"
    model: Any  # a MetaFormer

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        return isinstance(model, MetaFormer)

    def __init__(self, model: nn.Module) -> None:
        self.model = cast(Any, model)
        self.index = self._first_attention_stage()  # of the stage that is compressed
        self.stage = self.model.stages[self.index]
        for i, block in enumerate(self.stage.blocks):
            unknown = set(dict(block.named_children())) - PARTS
            if type(block) is not MetaFormerBlock or unknown:
                raise refusal(
                    model, f"block {i} of its stage {self.index + 1} has parts that are not known here"
                )
        size: Any = getattr(model, "pretrained_cfg", None) or {}
        _, height, width = size.get("input_size", (3, 224, 224))
        rows, columns = self._grid(height, width)
        self.layout = Layout(
            depth=len(self.stage.blocks),
            dim=self.stage.blocks[0].token_mixer.qkv.in_features,
            tokens=rows * columns,
            prefix=0,
            class_token=False,
            mean_pooled=False,
            plain_mean=False,
            img_size=(height, width),
            in_chans=self.model.stem.conv.in_channels,
            dynamic=True,
            restores=True,
        )

    def _first_attention_stage(self) -> int:
        stages = self.model.stages
        if type(self.model) is not MetaFormer:
            raise refusal(self.model, f"{type(self.model).__name__} changes MetaFormer in its own way")
        for index, stage in enumerate(stages):
            if all(type(block.token_mixer) is MetaFormerAttention for block in stage.blocks):
                return index
        raise refusal(self.model, NO_ATTENTION)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        convolutions = [self.model.stem.conv]
        for stage in self.model.stages[: self.index + 1]:
            convolutions += [stage.downsample.conv] if hasattr(stage.downsample, "conv") else []
        for conv in convolutions:
            height, width = (
                (n + 2 * pad - kernel) // stride + 1
                for n, pad, kernel, stride in zip(
                    (height, width), conv.padding, conv.kernel_size, conv.stride, strict=True
                )
            )
        return height, width

    def grid(self, images: Tensor) -> tuple[int, int]:
        return self._grid(images.shape[-2], images.shape[-1])

    def early(self, images: Tensor) -> list[Tensor]:
        """The feature maps (B, C, H, W) of the stages before the compressed one."""
        x, maps = self.model.stem(images), []
        for stage in self.model.stages[: self.index]:
            x = stage(x)
            maps.append(x)
        return maps or [x]

    def late(self, x: Tensor) -> list[Tensor]:
        """The feature maps of the stages after it, from its own."""
        maps = []
        for stage in self.model.stages[self.index + 1 :]:
            x = stage(x)
            maps.append(x)
        return maps

    def embed(self, images: Tensor) -> Tensor:
        return self.embed_map(self.early(images)[-1])

    def embed_map(self, x: Tensor) -> Tensor:
        return self.stage.downsample(x).flatten(2).transpose(1, 2)

    def restored(self, tokens: Tokens) -> Tensor:
        """(B, C, H, W): each patch with the features of the token that stands for it."""
        assert tokens.grid is not None
        x = tokens.x if tokens.patches is None else restore(tokens.x, tokens.patches)
        return x.transpose(1, 2).reshape(x.shape[0], -1, *tokens.grid)

    def features(self, tokens: Tokens) -> Tensor:
        x = self.restored(tokens)
        return [x, *self.late(x)][-1]

    def block(self, i: int, x: Tensor, positions: Positions | None = None) -> Tensor:
        return self.stage.blocks[i](x)

    def open_attention(self, i: int, x: Tensor, positions: Positions | None = None) -> Attention:
        block = self.stage.blocks[i]
        attn = block.token_mixer
        qkv = attn.qkv(block.norm1(x)).unflatten(2, (3, attn.num_heads, attn.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, N, d)
        return Attention(q, k, v, attn.scale, attn.attn_drop.p if attn.training else 0.0)

    def close_attention(self, i: int, x: Tensor, mixed: Tensor) -> Tensor:
        block = self.stage.blocks[i]
        attn = block.token_mixer
        y = attn.proj_drop(attn.proj(mixed.transpose(1, 2).flatten(2)))
        return block.res_scale1(x) + block.layer_scale1(block.drop_path1(y))

    def mlp(self, i: int, x: Tensor) -> Tensor:
        block = self.stage.blocks[i]
        return block.res_scale2(x) + block.layer_scale2(block.drop_path2(block.mlp(block.norm2(x))))

    def norm(self, x: Tensor) -> Tensor:
        return x

    def head(self, tokens: Tokens, pre_logits: bool = False) -> Tensor:
        return self.classify(self.features(tokens), pre_logits)

    def classify(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        return self.model.forward_head(features, pre_logits=pre_logits)

    def block_macs(self, i: int) -> BlockMacs:
        block = self.stage.blocks[i]
        return BlockMacs(
            linear_macs(block.token_mixer), 2 * block.token_mixer.attention_dim, linear_macs(block.mlp)
        )

    def head_macs(self) -> tuple[float, float]:
        """The last stage and the classifier, on the whole grid whatever was removed before."""
        parameter = next(self.model.parameters())
        rows, columns = self._grid(*self.layout.img_size)
        x = torch.zeros(1, self.layout.dim, rows, columns, dtype=parameter.dtype, device=parameter.device)
        counter = FlopCounterMode(display=False)
        with evaluating(self.model), torch.no_grad(), counter:
            self.classify([x, *self.late(x)][-1])
        return counter.get_total_flops() / 2, 0.0

    def block_products(self, i: int) -> BlockProducts:
        refuse(
            self.model, "most of its other stages are convolutions channel by channel, not matrix products"
        )

    def edge_products(self) -> list[tuple[int, int, int]]:
        refuse(
            self.model, "most of its other stages are convolutions channel by channel, not matrix products"
        )
