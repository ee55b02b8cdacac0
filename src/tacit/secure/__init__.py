"""Secure aggregation: the server learns the sum of the clients' uploads, and nothing else about any of them.

This package is the pure protocol: messages are bytes, and the caller transports them. A round is

>>> import numpy as np
>>> keys = {n: ec.generate_private_key(ec.SECP256R1()) for n in range(4)}
>>> roster = Roster({n: key.public_key() for n, key in keys.items()})
>>> terms = Terms.fresh(run=bytes(16), round=0, attempt=0, config=bytes(32), members=keys, length=3, bits=16,
...                     threshold=3)
>>> server, clients = Server(terms, roster), {n: Client(n, keys[n], roster, terms) for n in keys}
>>> for client in clients.values(): _ = server.receive(client.advertise())
>>> told = server.keys()
>>> for client in clients.values(): _ = server.receive(client.share_keys(told))
>>> for n, delivery in server.deliveries().items():
...     if n != 2:                                          # whose upload never arrives
...         _ = server.receive(clients[n].masked_input(delivery, np.array([n, -n, 1000 * n])))
>>> survivors = server.survivors()
>>> for n in survivors.numbers: _ = server.receive(clients[n].consistency(survivors))
>>> agreement = server.agreement()
>>> for n in survivors.numbers: _ = server.receive(clients[n].unmask(agreement))
>>> server.result().tolist()
[4, -4, 4000]

`tacit.secure.client` explains why this holds against a server that lies; `tacit.secure.graph` explains what
changes in large cohorts; `tacit.privacy.mechanisms.secure` explains how the noise is made in shares.
"""

from cryptography.hazmat.primitives.asymmetric import ec

from tacit.secure.client import Client
from tacit.secure.identity import Roster
from tacit.secure.messages import Agreement, Delivery, Keys, Survivors
from tacit.secure.server import Server, Stage
from tacit.secure.terms import Terms, bits_needed, least_threshold
from tacit.secure.wire import Refused, decode, encode

__all__ = [
    "Agreement",
    "Client",
    "Delivery",
    "Keys",
    "Refused",
    "Roster",
    "Server",
    "Stage",
    "Survivors",
    "Terms",
    "bits_needed",
    "decode",
    "ec",
    "encode",
    "least_threshold",
]
