"""How messages travel: through a Flower SuperLink. Only this folder of the package knows about Flower.

The SuperLink is a post office. It knows clients by their keys and keeps messages, in memory only, until they
are fetched. It runs no app, and neither do clients. Flower's own SuperNode would run any code that the
SuperLink sends. A client here is instead a separate program that speaks the Fleet API, and it runs only the
code that its owner installed. The app bundle that Flower requires for a run is empty.

Two doors
---------
A SuperLink serves three interfaces on one port, and its Control interface lets anybody start runs. Here the
public door (TLS) has eight paths of the Fleet interface and answers 404 to everything else (`gate`). A caller
who is not on the roster is answered before more than the head of its request is read, and cannot keep others
out by leaving connections open (`door`). The SuperLink itself is served only on a Unix socket in the
federation's folder, which the operating system opens only to the folder's owner (`office`).

The SuperLink identifies an object by the hash of its content, and every member may ask for any object. So no
object may be one that another member can guess: bodies of answers are encrypted with a key in their head
(`tacit.deploy.messages`), and heads have a nonce and a signature.
"""

from tacit.deploy.flower.attendance import attend
from tacit.deploy.flower.library import HOME, SOCKET
from tacit.deploy.flower.office import online, serve
from tacit.deploy.flower.transport import SuperLinkTransport

__all__ = ["HOME", "SOCKET", "SuperLinkTransport", "attend", "online", "serve"]
