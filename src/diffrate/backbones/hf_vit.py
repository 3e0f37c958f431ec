"""Hugging Face transformers' vision models: ViT, DeiT, DINOv2, DINOv3, and the vision towers of CLIP and SigLIP.

Recognised by their class names, so that transformers is imported only where a user already has. What differs between
the families is where their parts are; their heads are in hf_heads.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffrate.backbones.base import Attention, Backbone, BlockMacs, BlockProducts, Layout, linear_macs
from diffrate.backbones.hf_heads import HEADS, Head
from diffrate.backbones.products import edge_products, linear_shapes
from diffrate.backbones.refusals import refusal
from diffrate.tokens import Positions, Tokens


@dataclass(frozen=True)
class Tower:
    """Where a family keeps its parts; "" for one that it does not have.

    layers, norm_pre, norm   in the tower: the blocks, and the norms before and after them.
    norm1 … scale2           in a block; dropout is what follows attention and MLP.
    resizes                  whether the embedding takes images of another size without being asked to interpolate.
    """

    layers: str
    norm: str
    norm1: str
    attention: str
    norm2: str
    scale1: str = ""
    scale2: str = ""
    dropout: str = ""
    norm_pre: str = ""
    resizes: bool = False


_VIT = Tower("layers", "layernorm", "layernorm_before", "attention", "layernorm_after", dropout="dropout")
_DINO = Tower(
    *("encoder.layer", "layernorm", "norm1", "attention", "norm2"),
    *("layer_scale1", "layer_scale2", "drop_path"),
    resizes=True,
)
_CLIP = Tower("encoder.layers", "", "layer_norm1", "self_attn", "layer_norm2", norm_pre="pre_layrnorm")
TOWERS = {
    "ViTModel": _VIT,
    "DeiTModel": _VIT,
    "Dinov2Model": _DINO,
    "Dinov2WithRegistersModel": _DINO,
    "DINOv3ViTModel": Tower(
        *("model.layer", "norm", "norm1", "attention", "norm2", "layer_scale1", "layer_scale2", "drop_path"),
        resizes=True,
    ),
    "CLIPVisionModel": _CLIP,
    "SiglipVisionModel": Tower("encoder.layers", "post_layernorm", "layer_norm1", "self_attn", "layer_norm2"),
}
LAYERS = {
    *("ViTLayer", "DeiTLayer", "Dinov2Layer", "Dinov2WithRegistersLayer", "DINOv3ViTLayer"),
    *("CLIPEncoderLayer", "SiglipEncoderLayer"),
}


class HfViT(Backbone):
    describes: ClassVar[str] = "transformers' ViT, DeiT, DINOv2, DINOv3, CLIP and SigLIP vision models"
    library: ClassVar[str] = "transformers"
    families: ClassVar[dict[str, str]] = {
        "ViT": "transformers:ViTForImageClassification",
        "DeiT": "transformers:DeiTForImageClassification",
        "DINOv2": "transformers:Dinov2ForImageClassification",
        "DINOv2 with registers": "transformers:Dinov2WithRegistersForImageClassification",
        "DINOv3": "transformers:DINOv3ViTModel",
        "CLIP vision": "transformers:CLIPVisionModel",
        "SigLIP vision, SigLIP 2 of fixed size": "transformers:SiglipVisionModel",
    }
    model: Any  # a PreTrainedModel

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        return type(model).__module__.startswith("transformers.models.") and type(model).__name__ in HEADS

    def __init__(self, model: nn.Module) -> None:
        self.model = cast(Any, model)
        self.head_parts: Head = HEADS[type(model).__name__]
        self.tower: Any = _part(self.model, self.head_parts.tower)
        self.parts = TOWERS[type(self.tower).__name__]
        self._refuse_what_does_not_fit()
        self.layers: Any = _part(self.tower, self.parts.layers)
        config = self.tower.config
        self.patch_size, img_size = _pair(config.patch_size), _pair(config.image_size)
        self.prefix_tokens = _prefix(self.tower)
        rows, columns = (size // patch for size, patch in zip(img_size, self.patch_size, strict=True))
        self.layout = Layout(
            depth=len(self.layers),
            dim=config.hidden_size,
            tokens=rows * columns + self.prefix_tokens,
            prefix=self.prefix_tokens,
            class_token=self.prefix_tokens > 0,
            mean_pooled=self.head_parts.sees_patches(self.model),
            plain_mean=self.head_parts.plain_mean(self.model),
            img_size=img_size,
            in_chans=config.num_channels,
            dynamic=True,
        )

    def _refuse_what_does_not_fit(self) -> None:
        layers = _part(self.tower, self.parts.layers)
        if layers is None:
            raise refusal(self.model, "its blocks are not where transformers 5.22 and later keep them")
        for i, layer in enumerate(layers):
            if type(layer).__name__ not in LAYERS:
                raise refusal(
                    self.model, f"block {i} is a {type(layer).__name__}, not one of the library's own"
                )
            attention = getattr(layer, self.parts.attention, None)
            if not all(hasattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "head_dim")):
                raise refusal(
                    self.model, f"the attention of block {i} is not built as in transformers 5.22 and later"
                )

    def grid(self, images: Tensor) -> tuple[int, int]:
        return images.shape[-2] // self.patch_size[0], images.shape[-1] // self.patch_size[1]

    def embed(self, images: Tensor) -> Tensor:
        embeddings = self.tower.embeddings
        images = images.to(next(embeddings.parameters()).dtype)
        if self.parts.resizes or tuple(images.shape[-2:]) == self.layout.img_size:
            x = embeddings(images)
        else:
            x = embeddings(images, interpolate_pos_encoding=True)
        return _part(self.tower, self.parts.norm_pre)(x) if self.parts.norm_pre else x

    def positions(self, images: Tensor) -> Positions | None:
        """(2, P, D) cosines and sines of DINOv3."""
        if not hasattr(self.tower, "rope_embeddings"):
            return None
        images = images.to(next(self.tower.embeddings.parameters()).dtype)
        return Positions(torch.stack(self.tower.rope_embeddings(images)))

    def _rope(self, positions: Positions | None) -> dict[str, tuple[Tensor, Tensor]]:
        """What a block with rotary positions is called with: cosines and sines where its tokens sit."""
        if not hasattr(self.tower, "rope_embeddings"):
            return {}
        assert positions is not None, "the positions of these tokens were lost on the way"
        cos, sin = positions.table
        if positions.index is not None:
            places = positions.index[:, self.layout.prefix :] - self.layout.prefix
            cos, sin = cos[places].unsqueeze(1), sin[places].unsqueeze(1)  # (B, 1, N', D)
        return {"position_embeddings": (cos, sin)}

    def block(self, i: int, x: Tensor, positions: Positions | None = None) -> Tensor:
        return self.layers[i](x, attention_mask=None, **self._rope(positions))

    def open_attention(self, i: int, x: Tensor, positions: Positions | None = None) -> Attention:
        layer = self.layers[i]
        attn: Any = getattr(layer, self.parts.attention)
        normed = getattr(layer, self.parts.norm1)(x)
        projections = (attn.q_proj, attn.k_proj, attn.v_proj)
        q, k, v = (proj(normed).unflatten(2, (-1, attn.head_dim)).transpose(1, 2) for proj in projections)
        for cos, sin in self._rope(positions).values():
            q, k = sys.modules[type(layer).__module__].apply_rotary_pos_emb(q, k, cos, sin)
        scale = _first_of(attn, "scaling", "scale")
        dropout = _first_of(attn, "attention_dropout", "dropout") if attn.training else 0.0
        return Attention(q, k, v, scale, dropout, by=_chosen_attention(attn))

    def close_attention(self, i: int, x: Tensor, mixed: Tensor) -> Tensor:
        layer = self.layers[i]
        attn = getattr(layer, self.parts.attention)
        y = _first_of(attn, "o_proj", "out_proj")(mixed.transpose(1, 2).flatten(2))
        return self._residual(layer, x, y, self.parts.scale1)

    def mlp(self, i: int, x: Tensor) -> Tensor:
        layer = self.layers[i]
        y = layer.mlp(getattr(layer, self.parts.norm2)(x))
        return self._residual(layer, x, y, self.parts.scale2)

    def _residual(self, layer: nn.Module, x: Tensor, y: Tensor, scale: str) -> Tensor:
        for name in (scale, self.parts.dropout):
            if name:
                y = getattr(layer, name)(y)
        return x + y

    def norm(self, x: Tensor) -> Tensor:
        return _part(self.tower, self.parts.norm)(x) if self.parts.norm else x

    def head(self, tokens: Tokens, pre_logits: bool = False) -> Tensor:
        return self.head_parts.main(self.model, tokens)

    def block_macs(self, i: int) -> BlockMacs:
        layer = self.layers[i]
        attn: Any = getattr(layer, self.parts.attention)
        width = attn.q_proj.out_features
        return BlockMacs(linear_macs(attn), 2 * width, linear_macs(layer.mlp))

    def head_macs(self) -> tuple[float, float]:
        return self.head_parts.macs(self.model)

    def block_products(self, i: int) -> BlockProducts:
        layer = self.layers[i]
        attn: Any = getattr(layer, self.parts.attention)
        heads = attn.q_proj.out_features // attn.head_dim
        return BlockProducts(linear_shapes(attn), heads, attn.head_dim, linear_shapes(layer.mlp))

    def edge_products(self) -> list[tuple[int, int, int]]:
        return edge_products(self, self.tower.embeddings, linear_shapes(*self.head_parts.layers(self.model)))


def _chosen_attention(attn: Any) -> Callable[[Attention, Tensor | None], Tensor] | None:
    """The attention function that the model is set to, through the library's interface; None for torch's own.

    Flash attention takes no bias of keys: once tokens were merged, torch's runs in its place.
    """
    name = attn.config._attn_implementation
    if name == "sdpa":
        return None
    family = sys.modules[type(attn).__module__]
    function = family.ALL_ATTENTION_FUNCTIONS.get_interface(name, family.eager_attention_forward)

    def by(attention: Attention, mask: Tensor | None) -> Tensor:
        q, k, v, scale, dropout = attention[:5]
        if mask is not None and "flash" in (name or ""):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
        if mask is not None:  # as the library makes its masks: a row for every query
            mask = mask.expand(q.shape[0], -1, q.shape[2], -1)
        mixed: Tensor = function(attn, q, k, v, mask, dropout=dropout, scaling=scale, is_causal=False)[0]
        return mixed.transpose(1, 2)  # (B, N, heads, d) before

    return by


def _part(module: Any, path: str) -> Any:
    """The module at a dotted path, itself for "", None where there is no such part."""
    for name in filter(None, path.split(".")):
        module = getattr(module, name, None)
    return module


def _first_of(module: Any, *names: str) -> Any:
    return next(getattr(module, name) for name in names if hasattr(module, name))


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, Iterable) else (size, size)
    return int(height), int(width)


def _prefix(tower: Any) -> int:
    """Class, distillation and register tokens."""
    embeddings, config = tower.embeddings, tower.config
    single = ("cls_token", "class_embedding", "distillation_token")
    registers = config.num_register_tokens if hasattr(embeddings, "register_tokens") else 0
    return sum(hasattr(embeddings, name) for name in single) + int(registers)
