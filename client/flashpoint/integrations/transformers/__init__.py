"""A Hugging Face model with its attention, and its KV cache, served by Flashpoint.

    flashpoint.integrations.transformers.register(client)
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="remote_attention")
    with RemoteCache(client, model.config) as cache:
        model.generate(**inputs, past_key_values=cache)

`register` alone sends keys and values with each call, and is differentiable where the model's tensors need gradients.
With a `RemoteCache` the server holds them, and a call sends those of new tokens. Needs transformers 5 and torch.
"""

from flashpoint.integrations.transformers.attention import NAME, register
from flashpoint.integrations.transformers.cache import RemoteCache

__all__ = ["NAME", "RemoteCache", "register"]
