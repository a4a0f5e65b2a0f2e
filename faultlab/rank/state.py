"""The caller's state that a step must leave alone, as short digests for an event."""

from __future__ import annotations

import hashlib
import os
import random

import numpy
import torch


def take() -> dict[str, str]:
    """One snapshot: the name of each kind of state, and a digest or the value itself."""
    # As bytes: every entry of os.environ itself is decoded and encoded again.
    environment = b"\0".join(b"%b=%b" % each for each in sorted(os.environb.items()))
    return {
        # A hash is the same within one process, which is all that is compared.
        "the random state of Python": _number(hash(random.getstate())),
        "the random state of torch": _digest(torch.get_rng_state().numpy().tobytes()),
        "the random state of numpy": _digest(_numpy_state()),
        "the current device": str(torch.cuda.current_device()),
        "the inference mode": str(torch.is_inference_mode_enabled()),
        "the default dtype": str(torch.get_default_dtype()),
        "the environment": _digest(environment),
        "the working directory": str(os.getcwd()),  # noqa: PTH109
    }


def _numpy_state() -> bytes:
    told = numpy.random.get_state(legacy=False)
    assert isinstance(told, dict)
    return bytes(told["state"]["key"].tobytes()) + str(told["state"]["pos"]).encode()


def _number(value: int) -> str:
    return f"{value & (1 << 64) - 1:016x}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
