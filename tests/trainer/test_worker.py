"""A rank of the Trainer: a version that was published does not change afterwards."""

from __future__ import annotations

import pytest

from verl_digen.engine.transaction import TransactionError
from verl_digen.trainer.worker import DiffusionActorWorker


@pytest.mark.parametrize("averaged", [False, True])
def test_a_published_version_is_not_given_other_weights(averaged):
    worker = object.__new__(DiffusionActorWorker)  # its constructor joins a process group
    worker.transaction, worker._published, worker._commits = None, (3, False, 5), 6
    with pytest.raises(TransactionError, match="version 3 cannot be published again: 1 commit"):
        worker.publish_weights(3, averaged)
