"""Canaries of ``capture_safe``: none yet, the oracle is not built."""

from __future__ import annotations

from faultlab.subjects.canaries.base import Canary

CANARIES: dict[str, type[Canary]] = {}
