"""Compute the attention of a Hugging Face model on a Flashpoint server, which can also hold its KV cache.

    flashpoint.integrations.transformers.register(client)
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="remote_attention")
    with RemoteCache(client, model.config) as cache:
        model.generate(**inputs, past_key_values=cache)

With `register` alone, each call sends all keys and values; the attention is differentiable. With a `RemoteCache` the
server holds keys and values, and each call sends only those of new tokens. Needs transformers 5 and torch.
"""

from flashpoint.integrations.transformers.attention import NAME, register
from flashpoint.integrations.transformers.cache import RemoteCache

__all__ = ["NAME", "RemoteCache", "register"]
