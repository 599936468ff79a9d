"""Make `import flash_attn` import this package, and tell transformers that FlashAttention 2 is available."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from flashpoint_contract.options import ProblemError

_HERE = "flashpoint_kernels.flash_attn"
_MODULES = ("", ".flash_attn_interface", ".bert_padding", ".layers", ".layers.rotary")
TRANSFORMERS = ("5.23",)  # the versions of transformers whose checks this module can replace
_undo: list[Callable[[], None]] = []  # functions that undo `install`, in the order of its changes


def install(*, transformers: bool = False) -> None:
    """Make `import flash_attn` import `flashpoint_kernels.flash_attn`, in this process.

    It never fakes the metadata of a package: `importlib.metadata` does not know flash-attn afterwards.

    Args:
        transformers: Also replace the checks by which transformers refuses FlashAttention 2 on this device, so that
            `attn_implementation="flash_attention_2"` runs on these kernels. Works with the tested versions of
            transformers: `TRANSFORMERS`.

    Raises:
        RuntimeError: flash_attn is installed or imported already, or this version of transformers was not tested.
    """
    if sys.modules.get("flash_attn") is not sys.modules[_HERE]:
        if "flash_attn" in sys.modules:
            raise RuntimeError("flash_attn is imported already: call install() before, in a process of its own")
        if importlib.util.find_spec("flash_attn") is not None:
            raise RuntimeError("flash_attn is installed: import it, or uninstall the package flash-attn")
    replaced = _checks() if transformers else []
    if "flash_attn" not in sys.modules:
        for name in _MODULES:
            sys.modules[f"flash_attn{name}"] = import_module(_HERE + name)
        _undo.append(_forget)
    for owner, name, value in replaced:
        _replace(owner, name, value)


def uninstall() -> None:
    """Undo `install`. Modules that have already imported flash_attn keep the imported functions."""
    while _undo:
        _undo.pop()()


def _forget() -> None:
    for name in _MODULES:
        sys.modules.pop(f"flash_attn{name}", None)


def _replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of an object, or an item of a dict, and store its old value in `_undo`."""
    if isinstance(owner, dict):
        before = owner[name]
        owner[name] = value
        _undo.append(lambda: owner.__setitem__(name, before))
    else:
        before = getattr(owner, name)
        setattr(owner, name, value)
        _undo.append(lambda: setattr(owner, name, before))


def _checks() -> list[tuple[Any, str, Any]]:
    """Return transformers' checks to replace: (owner, name, new value). Raises RuntimeError for other versions."""
    import transformers
    from transformers import modeling_flash_attention_utils as utils
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel

    from flashpoint_contract.transformers.checks import no_weights

    version = transformers.__version__
    if not version.startswith(tuple(f"{known}." for known in TRANSFORMERS)):
        known = " or ".join(TRANSFORMERS)
        raise RuntimeError(f"install(transformers=True) knows transformers {known}, not {version}: use install() alone")
    refuse = PreTrainedModel._flash_attn_can_dispatch

    def available(*_: object, **__: object) -> bool:
        return True

    def can_dispatch(self: Any, flash_attn_version: int, is_init_check: bool = False) -> bool:
        if flash_attn_version == 2 and self._supports_flash_attn:
            return True
        return bool(refuse(self, flash_attn_version, is_init_check))

    computing = AttentionInterface._global_mapping["flash_attention_2"]

    def without_weights(module: Any, *args: Any, **keywords: Any) -> Any:
        """Refuse `output_attentions`, for which transformers returns an empty tuple and logs a warning."""
        if keywords.get("output_attentions"):
            raise no_weights(lambda name, text: ProblemError([(name, text)]))
        return computing(module, *args, **keywords)

    replacements: list[tuple[Any, str, Any]] = [
        (AttentionInterface._global_mapping, "flash_attention_2", without_weights),
        (PreTrainedModel, "_flash_attn_can_dispatch", can_dispatch),
        (utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "general_availability_check", available),
        (utils, "_loaded_implementation", None),  # makes transformers look up flash-attn's functions again
    ]
    import_utils = import_module("transformers.utils.import_utils")
    for check in ("is_flash_attn_2_available", "is_flash_attn_greater_or_equal"):
        original = getattr(import_utils, check)
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "transformers" and vars(module).get(check) is original:
                replacements.append((module, check, available))
    return replacements
