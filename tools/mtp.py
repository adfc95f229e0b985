"""A transformers model with one multi-token-prediction (MTP, "nextn") layer on top, in torch.

The layer follows DeepSeek-V3 (section 2.2): it is fed the trunk's hidden row i and the embedding of token i + 1, runs one
decoder layer of the trunk's kind and predicts token i + 2 through the trunk's head. Its own output row can be fed back in
the hidden row's place, which drafts further tokens.
"""

import copy

import torch
from torch import nn


class MtpLayer(nn.Module):
    """`eh_proj` of [norm(embedding), norm(hidden)], a decoder layer with full attention, a norm before the head."""

    def __init__(self, config, decoder_layer, norm):
        super().__init__()
        config = copy.deepcopy(config)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"]
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0
        width, eps = config.hidden_size, config.rms_norm_eps
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.enorm, self.hnorm, self.shared_head_norm = (norm(width, eps=eps) for _ in range(3))
        self.block = decoder_layer(config, 0)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def forward(self, embedded, hidden, rotary, mask):
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        x = self.block(x, position_embeddings=rotary, attention_mask=mask)
        return self.shared_head_norm(x)


class ModelWithMtp(nn.Module):
    """A causal language model of transformers (`trunk`) and its MTP layer. All rows are `[batch, n, d]`."""

    def __init__(self, trunk, decoder_layer, norm):
        super().__init__()
        self.trunk = trunk
        self.mtp = MtpLayer(trunk.config, decoder_layer, norm)

    def hidden(self, ids):
        """Hidden rows after the output norm: what the head and the MTP layer read."""
        return self.trunk.model(ids, use_cache=False).last_hidden_state

    def head(self, hidden):
        return self.trunk.lm_head(hidden)

    def draft_hidden(self, next_ids, hidden):
        """The MTP layer's rows for (hidden row i, token i + 1), at positions 0, 1, …; `head` turns them into logits."""
        embedded = self.trunk.model.embed_tokens(next_ids)
        n = embedded.shape[1]
        positions = torch.arange(n)[None]
        if self.trunk.config.model_type.startswith("qwen3_5"):  # multi-axis RoPE: text has three equal axes
            positions = positions.expand(3, 1, -1)
        rotary = self.trunk.model.rotary_emb(embedded, positions)
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        return self.mtp(embedded, hidden, rotary, mask)
