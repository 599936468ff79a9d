"""Build hook: compile the CPU kernels into the wheel, and beside the sources of an editable installation.

Without a C compiler, or where it reports an error, the wheel has no compiled kernels, and the output of the build says
so. There is then no backend `cpu`.
"""

from __future__ import annotations

import runpy
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "kernels/flashpoint_kernels/native"


class NativeKernels(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root, NATIVE)
        reason = folder / "not-compiled.txt"  # flashpoint_kernels.native.missing reads it
        reason.unlink(missing_ok=True)
        build = runpy.run_path(str(folder / "build.py"))
        try:
            library = build["compile_library"](folder)
        except (OSError, subprocess.CalledProcessError) as error:
            said = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
            last = (str(said).strip() or f"it ended with {error}").splitlines()[-1]
            reason.write_text(f"the compiler failed: {last}", encoding="utf-8")
            self.app.display_warning(f"The CPU kernels could not be compiled:\n{said}")
            library = None
        if library is None:
            self.app.display_warning("The wheel has no compiled CPU kernels: there will be no backend cpu.")
            return
        build_data["artifacts"].append(f"{NATIVE}/{library.name}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
