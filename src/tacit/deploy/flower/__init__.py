"""How messages travel: through a Flower SuperLink. All that this package knows of Flower is in this folder.

The SuperLink is a post office. It knows clients by their keys and keeps messages until they are fetched, in
memory alone. It runs no app, and neither do clients: Flower's own SuperNode would run whatever code the
SuperLink sends, so a client here is a program of its own that speaks the Fleet API, and the only code it runs
is what its owner installed. The app bundle that Flower wants for a run is an empty one.

Two doors
---------
A SuperLink serves three interfaces on one port, and its Control interface lets anybody start runs. Here the
public door (TLS) has eight paths of the Fleet interface and answers 404 to everything else (`gate`); whoever
is not on the roster is answered before anything but the head of its request is read, and cannot keep others
out by connections that it leaves open (`door`). All of it is served only on a Unix socket in the federation's
folder, which the operating system opens to its owner alone (`office`).

An object at the SuperLink is known by the hash of its content, and every member may ask for any: what is
there must be nothing that another member can guess. So bodies of answers are encrypted with a key that their
head has (`tacit.deploy.messages`), and heads have a nonce and a signature.
"""

from tacit.deploy.flower.attendance import attend
from tacit.deploy.flower.library import HOME, SOCKET
from tacit.deploy.flower.office import online, serve
from tacit.deploy.flower.transport import SuperLinkTransport

__all__ = ["HOME", "SOCKET", "SuperLinkTransport", "attend", "online", "serve"]
