"""Sessions that start and end at the same time leave one another alone."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faultlab.runner import cleanup


def test_sessions_that_start_together_do_not_take_each_other_for_abandoned(tmp_path: Path) -> None:
    def live_and_go(number: int) -> bool:
        folder, lock = cleanup.new_session(tmp_path, f"session{number}")
        lived = (folder / cleanup.LOCK_NAME).exists()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        return lived

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(live_and_go, range(200)))
    cleanup.remove_abandoned(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_held_lock_protects_and_a_free_one_does_not(tmp_path: Path) -> None:
    folder, lock = cleanup.new_session(tmp_path, "mine")
    assert cleanup.remove_abandoned(tmp_path) == []
    assert folder.exists()
    os.close(lock)
    assert cleanup.remove_abandoned(tmp_path) == ["mine"]
    assert not folder.exists()
