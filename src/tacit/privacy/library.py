"""dp_accounting, imported without the parts of scipy that it does not use here.

It imports scipy's optimize, signal and stats: a second, which `tacit plan` should not wait for. All that
Gaussians need of them is the normal distribution, whose functions are scipy.special's own. So empty modules
stand in for them while it is imported; when something else of one is asked for, scipy's is imported and
asked. Nobody else sees the stand-ins: modules of scipy that are there already, or come later, are its own.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np
from scipy import special

from tacit.lazy import Late

__all__ = ["dp_accounting"]

_PARTS = ("scipy.optimize", "scipy.signal", "scipy.stats")


class _Norm:
    """`scipy.stats.norm`: a frozen one by scipy.special, all else by itself."""

    def __call__(self, loc: float = 0.0, scale: float = 1.0) -> _Frozen:
        return _Frozen(loc, scale)

    def __getattr__(self, name: str) -> Any:
        from scipy.stats import norm

        return getattr(norm, name)


class _Frozen:
    """A normal distribution: the same bits as scipy.stats's, for a positive finite scale."""

    def __init__(self, loc: float, scale: float) -> None:
        self._loc, self._scale = loc, scale

    def cdf(self, x: Any) -> Any:
        return special.ndtr((np.asarray(x) - self._loc) / self._scale)

    def logcdf(self, x: Any) -> Any:
        return special.log_ndtr((np.asarray(x) - self._loc) / self._scale)

    def ppf(self, q: Any) -> Any:
        return special.ndtri(q) * self._scale + self._loc

    def __getattr__(self, name: str) -> Any:
        from scipy.stats import norm

        return getattr(norm(self._loc, self._scale), name)


def _imported() -> Any:
    late = {name: Late(name) for name in _PARTS if name not in sys.modules}
    if "scipy.stats" in late:
        late["scipy.stats"].norm = _Norm()  # type: ignore[attr-defined]
    sys.modules.update(late)
    try:
        return import_module("dp_accounting")
    finally:
        for name, module in late.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


dp_accounting = _imported()
