"""Name stages for a profiler.

Knows nothing of what a stage does; without a profiler nothing is called.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

__all__ = ["ranges"]


def ranges(*, wanted: bool) -> Callable[[str], AbstractContextManager[object]]:
    """Contexts that show as NVTX ranges, where wanted and the package nvtx is there."""
    if not wanted or find_spec("nvtx") is None:
        return lambda name: nullcontext()
    import nvtx  # a profiler's package: only when one looks

    def annotate(name: str) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = nvtx.annotate(name, domain="tilepipe")
        return context

    return annotate
