"""Every limit of the lab in one place: files, loops, queues and waits.

A limit that is met is an error with a clear text, never a slow death.
"""

from __future__ import annotations

import os
from typing import Final

# Files that people write.
FILE_SIZE_BYTES: Final = 1 << 20
YAML_DEPTH: Final = 32
YAML_NODES: Final = 20_000
MATRIX_SCENARIOS: Final = 2_000
SCENARIOS_PER_RUN: Final = 20_000
FAULTS_PER_SCENARIO: Final = 64
STEPS_PER_WORKLOAD: Final = 64
REPEATS_PER_STEP: Final = 1_000
#: How many run at a time, unless told: ranks wait for one another much of the time.
JOBS: Final = min(16, 2 * (os.cpu_count() or 1))
RANKS: Final = 128
GPUS: Final = 1_024

#: Answers kept by a session about rungs tried alone; the one unused longest goes first.
COUNTERFACTUALS_KEPT: Final = 1_000

# Events and messages.
MESSAGE_BYTES: Final = 160_000
EVENTS_PER_RANK: Final = 200_000
LOG_MESSAGE_CHARS: Final = 4_000
LEDGER_OBJECTS: Final = 2_000
#: Shared memory of this size at least holds the sessions' folders; containers often have 64 MiB.
SHARED_MEMORY_MIN_BYTES: Final = 1 << 30
#: How much of a rank's events its supervisor reads at once; a line must fit.
FOLLOWED_BYTES: Final = 1 << 20
assert FOLLOWED_BYTES > MESSAGE_BYTES

# Waits, wall clock.
RANK_START_S: Final = 60.0
FORKSERVER_START_S: Final = 180.0
#: Both samples must show every thread asleep before a standstill is believed.
STANDSTILL_SAMPLE_S: Final = 0.015
#: All ranks wait, by what they reported somebody could move, yet nobody does.
STANDSTILL_UNCERTAIN_S: Final = 1.0
#: How long a supervisor may answer messages without a look at deadlines and budgets.
SUPERVISOR_LOOK_S: Final = 0.005
