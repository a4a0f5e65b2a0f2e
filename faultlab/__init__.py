"""faultlab: injects faults into multi-GPU workspace set-up and judges how it falls back.

The outside faces are ``faultlab.cli`` and ``faultlab.pytest_plugin``;
``docs/whats-here.md`` says what is where.
"""
