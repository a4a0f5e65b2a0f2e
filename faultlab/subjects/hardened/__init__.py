"""The subject ``hardened``: both back ends' memory set up by the lab itself, step by step.

FlashInfer's creation is one long collective sequence that no consumer can step
into. Here the same memory is set up in an *own sequence*, and FlashInfer's
kernels are handed the result, so every driver call can fail on any rank and
the group still goes on together. The protocol, in five rules:

1.  **A step touches one rank, a vote touches the group** (``steps``). A step makes
    calls of this rank alone; then all ranks vote on it. A rank that failed says
    so at that vote, nobody goes on, and every rank raises the same StepFailed.
2.  **Nothing is waited for that was not voted on.** Mapping or binding a multicast
    object blocks in the driver until every device was added: it comes after the
    vote on adding (``memory``). A descriptor is received after the vote on
    sending, from a socket that was voted to listen (``descriptors``).
3.  **What was made is written down at once, and undone last first**, by one list.
    A release that fails stops no other; all of them are logged in one message.
4.  **A broken group is left alone.** If a vote itself fails, nobody knows what its
    peers think: the rank gives its memory back without asking anybody, raises
    GroupFailed, and makes no collective on that group again. How long peers wait
    at the vote it missed is the group's own time-out: give it a short one.
5.  **A rung is kept by all ranks or by none**: the last vote comes after the kernels
    are loaded and every rank's buffers are filled and synchronised.

Destroying asks no peer: a rank waits for its own kernels, which end only when they
have all that their peers send them, and memory lives while any rank maps it.

Ladder, the user's choice, the memory of failures and the restored state are
those of ``reference``. To use it in your own code, copy this folder,
``reference.py`` and ``preflight.py``: they need torch, FlashInfer and
``cuda.bindings``, and of the lab ``subjects/base.py`` alone. One host only:
descriptors do not cross hosts, and ranks on several fail together and fall back.
"""

from faultlab.subjects.hardened.subject import Hardened

__all__ = ["Hardened"]
