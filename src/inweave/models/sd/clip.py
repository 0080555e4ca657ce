"""CLIP's text encoder: states of tokens, each of which reads itself and those before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from inweave.models.sd.network import PlainNetwork, Recomputing, Settings


class _Embeddings(nn.Module):
    def __init__(self, tokens: int, positions: int, width: int) -> None:
        super().__init__()
        # not `nn.Embedding(tokens, width)`: normal numbers on the meta device import torch's compiler, for a second
        self.token_embedding = nn.Embedding(tokens, width, _weight=torch.empty(tokens, width))
        self.position_embedding = nn.Embedding(positions, width, _weight=torch.empty(positions, width))

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[-1], device=ids.device)[None]
        embedded: Tensor = self.token_embedding(ids) + self.position_embedding(positions)
        return embedded


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        joined = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out_proj(joined.transpose(1, 2).contiguous().reshape(x.shape))
        return out


class _Perceptron(nn.Module):
    """Two linear layers with x sigmoid(1.702 x) between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        out: Tensor = self.fc2(x * torch.sigmoid(1.702 * x))
        return out


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.self_attn = _Attention(width, heads)
        self.layer_norm1 = nn.LayerNorm(width, eps)
        self.mlp = _Perceptron(width, inner)
        self.layer_norm2 = nn.LayerNorm(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        out: Tensor = x + self.mlp(self.layer_norm2(x))
        return out


class _Encoder(Recomputing):
    def __init__(self, layers: list[_Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class CLIPTextModel(PlainNetwork):
    """transformers' class of this name, for the settings that are not `fixed`."""

    fixed: ClassVar[Mapping[str, Any]] = {"hidden_act": "quick_gelu", "model_type": "clip_text_model"}
    unused: ClassVar[frozenset[str]] = frozenset(
        {"attention_dropout", "bos_token_id", "initializer_factor", "initializer_range", "pad_token_id",
         "projection_dim", "transformers_version"}
    )  # fmt: skip

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        max_position_embeddings: int,
        layer_norm_eps: float,
        eos_token_id: int,
    ) -> None:
        super().__init__()
        self.eos_token_id = eos_token_id
        self.embeddings = _Embeddings(vocab_size, max_position_embeddings, hidden_size)
        shared = hidden_size, num_attention_heads, intermediate_size, layer_norm_eps
        self.encoder = _Encoder([_Layer(*shared) for _ in range(num_hidden_layers)])
        self.final_layer_norm = nn.LayerNorm(hidden_size, layer_norm_eps)

    @classmethod
    def fits(cls, config: Mapping[str, Any]) -> bool:
        return bool(config["eos_token_id"] != 2)  # of old files, whose end is the largest id

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of tokens."""
        embedding: nn.Module = self.embeddings.token_embedding
        return embedding

    def forward(self, ids: Tensor, output_hidden_states: bool = False) -> Settings:
        """Return the states of ids (batch, length), the state of each text's end, and on request those of all layers.

        The states between the layers begin with the embeddings, and none of them went through the final norm.
        """
        states = [self.embeddings(ids)]
        for layer in self.encoder.layers:
            states.append(self.encoder.run(layer, states[-1]))
        last = self.final_layer_norm(states[-1])
        ends = (ids == self.eos_token_id).int().argmax(dim=-1)
        pooled = last[torch.arange(len(ids), device=ids.device), ends]
        inner = {"hidden_states": tuple(states)} if output_hidden_states else {}
        return Settings(last_hidden_state=last, pooler_output=pooled, **inner)
