"""dp_accounting with substitutes for scipy's slow parts: the same bits, and no effect on other code."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from tacit.privacy.library import _Frozen, _Norm

CODE = """
import json, sys
if sys.argv[1] == "whole":
    import dp_accounting, scipy.signal, scipy.stats
from tacit.privacy.accountants import epsilon
from tacit.privacy.events import FixedSizeGaussian, PoissonGaussian
from tacit.privacy.groups import group_epsilon
one, other = PoissonGaussian(0.1, 1.3), PoissonGaussian(0.3, 2.0)
found = epsilon({one: 50}, 1e-5)
told = [found.pld, found.rdp, found.order]
told += [epsilon({FixedSizeGaussian(size=50, population=1000, noise=2.0): 20}, 1e-5).rdp]
loaded = [name for name in ("scipy.optimize", "scipy.signal", "scipy.stats") if name in sys.modules]
told += [epsilon({one: 50, other: 5}, 1e-5).pld, group_epsilon({one: 5}, 1e-5, 2)]
from scipy import signal, stats
from dp_accounting import get_epsilon_gaussian
assert type(stats).__name__ == type(signal).__name__ == "module" and hasattr(stats.norm, "rvs")
told += [get_epsilon_gaussian(2.0, 1e-5), float(stats.norm(scale=3.0).ppf(0.2))]
print(json.dumps({"told": told, "loaded": loaded}))
"""


def told(how: str) -> dict[str, list[float]]:
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_epsilon_has_the_same_bits_and_scipy_stays_itself() -> None:
    light, whole = told("light"), told("whole")
    assert light["told"] == whole["told"]
    assert light["loaded"] == []
    assert set(whole["loaded"]) == {"scipy.optimize", "scipy.signal", "scipy.stats"}


@pytest.mark.parametrize("scale", [0.3, 1.0, 1.536, 40.0])
def test_the_normal_distribution_is_scipys(scale: float) -> None:
    ours, theirs = _Norm()(scale=scale), stats.norm(scale=scale)
    assert isinstance(ours, _Frozen)
    x = np.array([-np.inf, -1e300, *np.linspace(-40, 40, 2001), 1e-300, 1e300, np.inf, np.nan])
    q = np.array([0.0, 1e-300, *np.linspace(0, 1, 2001), 1.0, -0.1, 1.1, np.nan])
    np.testing.assert_array_equal(ours.cdf(x), theirs.cdf(x))
    np.testing.assert_array_equal(ours.logcdf(x), theirs.logcdf(x))
    np.testing.assert_array_equal(ours.ppf(q), theirs.ppf(q))
    assert ours.cdf(0.5) == theirs.cdf(0.5) and ours.cdf([0.5])[0] == theirs.cdf([0.5])[0]
    assert ours.sf(1.0) == theirs.sf(1.0)  # what it does not have itself
    assert _Norm().isf(0.3) == stats.norm.isf(0.3)
