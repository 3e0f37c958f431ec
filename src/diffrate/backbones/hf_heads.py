"""The heads of transformers' vision models: what they make of the last tokens, and the library's own output for it.

Functions of the user's model and of tokens after the tower's last norm. Heads that average patches weigh them by
size; SigLIP's attention pool gets log(size) as a bias.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffrate.backbones.base import linear_macs
from diffrate.tokens import Tokens


@dataclass(frozen=True)
class Head:
    """One model class.

    tower   where the tower is in the model; "" for the model itself.
    fields  (model, tokens) to the fields of the output that the class returns, the main one first.
    output  the name of that class of outputs.
    pools   which tokens the main field is made of: "class", "patches" by their mean (or both), "attention".
    """

    tower: str
    fields: Callable[[Any, Tokens], dict[str, Tensor | None]]
    output: str
    pools: str

    def main(self, model: Any, tokens: Tokens) -> Tensor:
        """The tensor that a search compares: logits, an embedding, or the first token of a bare tower."""
        fields = self.fields(model, tokens)
        for name in ("logits", "image_embeds", "pooler_output"):
            value = fields.get(name)
            if value is not None:
                return value
        return tokens.x[:, 0] if tokens.prefix else _mean(tokens)

    def made(self, model: Any, tokens: Tokens, labels: Tensor | None = None, **more: Any) -> Any:
        """The library's own output, with its loss where labels are given."""
        output: Any = getattr(sys.modules[type(model).__module__], self.output)
        fields: dict[str, Any] = self.fields(model, tokens)
        if labels is not None:
            fields["loss"] = model.loss_function(labels, fields["logits"], model.config)
        return output(**fields, **more)

    def sees_patches(self, model: Any) -> bool:
        """Whether patches leave the model, alone or in a mean, so that the last block must not drop them all."""
        return self.pools != "class" or self.output == "BaseModelOutputWithPooling"

    def plain_mean(self, model: Any) -> bool:
        return self.pools != "attention" or not getattr(model, "use_head", True)

    def layers(self, model: Any) -> list[nn.Module]:
        """What runs once an image."""
        names = ("classifier", "cls_classifier", "distillation_classifier", "visual_projection", "pooler")
        return [part for name in names if (part := getattr(model, name, None)) is not None]

    def macs(self, model: Any) -> tuple[float, float]:
        """Fixed MACs, and MACs per token that reaches the head."""
        fixed = sum(map(linear_macs, self.layers(model)))
        if self.pools != "attention" or not model.use_head:
            return fixed, 0.0
        width = model.head.attention.embed_dim
        # One query: its projection, the output's and the MLP; keys, values and two products for every token.
        fixed += width * width + linear_macs(model.head.attention.out_proj) + linear_macs(model.head.mlp)
        return fixed, 2.0 * width * width + 2.0 * width


def _mean(tokens: Tokens) -> Tensor:
    """(B, C) the mean of image tokens, each counted as often as the patches it stands for."""
    patches = tokens.x[:, tokens.prefix :]
    if tokens.size is None:
        return patches.mean(dim=1)
    size = tokens.size[:, tokens.prefix :]
    share = (size / size.sum(dim=1, keepdim=True)).unsqueeze(-1).to(patches.dtype)
    return (patches * share).sum(dim=1)


def _pooler(model: Any, tokens: Tokens) -> dict[str, Tensor | None]:
    pooled = None if model.pooler is None else model.pooler(tokens.x)
    return {"last_hidden_state": tokens.x, "pooler_output": pooled}


def _class_pooled(model: Any, tokens: Tokens) -> dict[str, Tensor | None]:
    return {"last_hidden_state": tokens.x, "pooler_output": tokens.x[:, 0, :]}


def _clip(model: Any, tokens: Tokens) -> dict[str, Tensor | None]:
    return {"last_hidden_state": tokens.x, "pooler_output": model.post_layernorm(tokens.x[:, 0, :])}


def _clip_projected(model: Any, tokens: Tokens) -> dict[str, Tensor | None]:
    fields = _clip(model.vision_model, tokens)
    return {
        "image_embeds": model.visual_projection(fields["pooler_output"]),
        "last_hidden_state": fields["last_hidden_state"],
    }


def _siglip(model: Any, tokens: Tokens) -> dict[str, Tensor | None]:
    return {
        "last_hidden_state": tokens.x,
        "pooler_output": _attention_pool(model.head, tokens) if model.use_head else None,
    }


def _attention_pool(head: Any, tokens: Tokens) -> Tensor:
    """SigLIP's head; a token that stands for several patches is as loud as they would have been."""
    if tokens.size is None:
        pooled: Tensor = head(tokens.x)
        return pooled
    x, attention = tokens.x, head.attention
    bias = tokens.size.log().to(x.dtype).repeat_interleave(attention.num_heads, dim=0).unsqueeze(1)
    y = attention(head.probe.repeat(x.shape[0], 1, 1), x, x, attn_mask=bias)[0]
    y = y + head.mlp(head.layernorm(y))
    return y[:, 0]


def _class_logits(model: Any, tokens: Tokens) -> dict[str, Tensor | None]:
    return {"logits": model.classifier(tokens.x[:, 0, :])}


def _teacher_logits(model: Any, tokens: Tokens) -> dict[str, Tensor | None]:
    own, taught = (
        model.cls_classifier(tokens.x[:, 0, :]),
        model.distillation_classifier(tokens.x[:, 1, :]),
    )
    return {"logits": (own + taught) / 2, "cls_logits": own, "distillation_logits": taught}


def _class_and_mean_logits(model: Any, tokens: Tokens) -> dict[str, Tensor | None]:
    return {"logits": model.classifier(torch.cat([tokens.x[:, 0], _mean(tokens)], dim=1))}


def _mean_logits(model: Any, tokens: Tokens) -> dict[str, Tensor | None]:
    return {"logits": model.classifier(_mean(tokens))}


_TOWER, _CLASSIFIER = "BaseModelOutputWithPooling", "ImageClassifierOutput"
HEADS = {
    "ViTModel": Head("", _pooler, _TOWER, "class"),
    "ViTForImageClassification": Head("vit", _class_logits, _CLASSIFIER, "class"),
    "DeiTModel": Head("", _pooler, _TOWER, "class"),
    "DeiTForImageClassification": Head("deit", _class_logits, _CLASSIFIER, "class"),
    "DeiTForImageClassificationWithTeacher": Head(
        "deit", _teacher_logits, "DeiTForImageClassificationWithTeacherOutput", "class"
    ),
    "Dinov2Model": Head("", _class_pooled, _TOWER, "class"),
    "Dinov2ForImageClassification": Head("dinov2", _class_and_mean_logits, _CLASSIFIER, "patches"),
    "Dinov2WithRegistersModel": Head("", _class_pooled, _TOWER, "class"),
    "Dinov2WithRegistersForImageClassification": Head(
        "dinov2_with_registers", _class_and_mean_logits, _CLASSIFIER, "patches"
    ),
    "DINOv3ViTModel": Head("", _class_pooled, _TOWER, "class"),
    "CLIPVisionModel": Head("", _clip, _TOWER, "class"),
    "CLIPVisionModelWithProjection": Head("vision_model", _clip_projected, "CLIPVisionModelOutput", "class"),
    "CLIPForImageClassification": Head("vision_model", _mean_logits, _CLASSIFIER, "patches"),
    "SiglipVisionModel": Head("", _siglip, _TOWER, "attention"),
    "SiglipForImageClassification": Head("vision_model", _mean_logits, _CLASSIFIER, "patches"),
}
