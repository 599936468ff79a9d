"""FlashAttention 2's functions, with its signatures, on Flashpoint's kernels: on the CPU and through Triton.

    from flashpoint_kernels.flash_attn import flash_attn_func

`install` puts this package where `import flash_attn` finds it, so that code that was written for flash-attn runs where
flash-attn cannot be installed. The functions also accept float32. Arguments that choose a schedule are accepted and
change nothing: `deterministic` (gradients always are), `num_splits`, `max_seqlen_q` and `max_seqlen_k`: the largest
lengths follow from the tensors.
"""

from flashpoint_kernels.flash_attn.flash_attn_interface import flash_attn_func as flash_attn_func
from flashpoint_kernels.flash_attn.flash_attn_interface import flash_attn_kvpacked_func as flash_attn_kvpacked_func
from flashpoint_kernels.flash_attn.flash_attn_interface import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
from flashpoint_kernels.flash_attn.flash_attn_interface import flash_attn_varlen_func as flash_attn_varlen_func
from flashpoint_kernels.flash_attn.flash_attn_interface import (
    flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func,
)
from flashpoint_kernels.flash_attn.flash_attn_interface import (
    flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func,
)
from flashpoint_kernels.flash_attn.flash_attn_interface import flash_attn_with_kvcache as flash_attn_with_kvcache
from flashpoint_kernels.flash_attn.installation import install as install
from flashpoint_kernels.flash_attn.installation import uninstall as uninstall

__version__ = "2.8.3"  # the version of flash-attn whose signatures this package has
