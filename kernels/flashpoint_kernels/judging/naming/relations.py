"""The causes that a call shows in which one thing differs from a plain call: (code, text, advice) by its relation."""

from __future__ import annotations

OF_RELATION = {
    "new inputs at the same address": ("replay", "an earlier answer is returned for new inputs at the same address", "do not cache by address or shape; capture graphs with static inputs that are copied into"),
    "new inputs of the same shape": ("replay", "an earlier answer is returned for new inputs of the same shape", "do not cache answers by shape"),
    "another shape after this one": ("state", "a call depends on the shape of an earlier one", "do not keep sizes, masks or buffers between calls, or key them by all that they depend on"),
    "a shape again after another": ("state", "a call depends on an earlier one", "do not keep results or buffers between calls"),
    "no mask after a causal call": ("state", "a call depends on the options of an earlier one", "key what is kept by all options"),
    "transposed inputs": ("strides", "strides of the inputs are ignored", "read with the tensors' strides, or call contiguous()"),
    "inputs that are rows of a wider tensor": ("strides", "strides of the inputs are ignored", "read with the tensors' strides, or call contiguous()"),
    "inputs in column order": ("strides", "strides of the inputs are ignored", "read with the tensors' strides, or call contiguous()"),
    "inputs with a strided last dimension": ("strides", "the stride of the last dimension is ignored", "call contiguous() if stride(-1) is not 1, or raise an error"),
    "inputs at an offset of their storage": ("offsets", "the offset of the inputs in their storage is ignored", "use data_ptr() of the tensor, not of its storage"),
    "inputs at an address that is not aligned": ("alignment", "inputs at an address that is not aligned are read wrongly", "use vector loads only for aligned addresses"),
    "a gradient of o in another memory form": ("gradient-strides", "strides of the gradient of o are ignored", "call do.contiguous(), or read with its strides"),
    "the gradient of a sum, one number in memory": ("gradient-strides", "a gradient of o with strides of 0, as of o.sum(), is read wrongly", "call do.contiguous(), or read with its strides"),
    "a second backward": ("second-backward", "a second backward gives other gradients", "do not change what is saved for the backward, nor add into buffers that are kept"),
    "memory that is not initialised": ("uninitialised", "memory from torch.empty is read before it is written", "zero the buffer, or write all of it"),
    "another stream": ("stream", "the kernel does not run on the current stream", "launch on torch.cuda.current_stream()"),
    "gradients of q and k alone": ("needs-input-grad", "gradients depend on which inputs want one", "return each gradient in its own place, whatever ctx.needs_input_grad says"),
    "the gradient of lse": ("lse-gradient", "the gradient of lse is wrong", "dS = P · (dP - delta + dlse)"),
}  # fmt: skip
# Named if no relation above fails; if several of these do, the first one is the cause of the others.
OF_CONTEXT = {
    "inputs with a stride of 0": ("strides", "strides of 0, as of expanded inputs, are ignored", "read with the tensors' strides, or call contiguous()"),
    "a mask in another memory form": ("strides", "strides of attn_mask are ignored", "read with the mask's strides, or call contiguous()"),
    "inputs in one storage": ("storage", "inputs that lie in one storage are read wrongly", "use data_ptr() of each tensor, not of its storage"),
    "inputs that are rows of one tensor": ("storage", "inputs that are rows of one tensor are read wrongly", "use data_ptr() of each tensor, not of its storage"),
    "v that is k": ("storage", "a tensor that is both k and v is read wrongly", "do not tell inputs apart by their addresses"),
    "two forwards before their backwards": ("state", "a backward reads what a later forward has left", "save what a backward needs for each call; share no workspace"),
    "inputs that change before the backward": ("saved-inputs", "the backward does not notice that inputs have changed", "keep inputs with ctx.save_for_backward, not on ctx"),
    "inference mode": ("inference-mode", "answers are wrong in inference mode", "compute the same in each mode of torch"),
    "another thread": ("thread", "answers are wrong in another thread", "keep no state of a thread"),
    "two threads at once": ("threads", "calls in two threads at once disturb each other", "share no buffer between calls"),
    "autocast": ("autocast", "answers are wrong under autocast", "compute in the inputs' type, or use torch.amp.custom_fwd"),
    "torch.compile": ("compile", "answers are wrong under torch.compile", "register the function as a custom operator"),
    "a second derivative": ("second-derivative", "a second derivative is 0", "use once_differentiable, or differentiate the backward"),
}  # fmt: skip
# Relations in which a kernel may read memory beyond the end of its inputs.
BEYOND = (
    "inputs at an offset of their storage", "inputs at an address that is not aligned",
    "inputs that are rows of a wider tensor", "inputs with a strided last dimension",
)  # fmt: skip
