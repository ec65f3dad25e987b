"""What a rank that stops half-way through a tile still owes the others, with modules that only note what is asked."""

from __future__ import annotations

import pytest

from verl_digen.engine.gathers import GatherLog


class Module:
    """An FSDP2 module: gathers through the communication that it was given, unless it is whole already."""

    def __init__(self, name: str, asked: list[str]):
        self.name, self._asked, self._whole = name, asked, False

    def set_custom_all_gather(self, comm) -> None:
        self._note = comm._note

    def unshard(self) -> None:
        if not self._whole:
            self._asked.append(self.name)
            self._note(self)
        self._whole = True

    def reshard(self) -> None:
        self._whole = False


def tile(log: GatherLog, modules, fail_after: int | None = None) -> None:
    """Forward and backward: each module is gathered twice, the last one stays whole in between."""
    with log.tile():
        for number, module in enumerate([*modules, *reversed(modules)]):
            if number == fail_after:
                raise MemoryError
            module.unshard()
            if module is not modules[-1] or number >= len(modules):
                module.reshard()


@pytest.fixture
def asked():
    return []


@pytest.fixture
def modules(asked):
    return [Module(name, asked) for name in "abc"]


@pytest.mark.parametrize("fail_after", range(6))
def test_the_rest_of_the_tile_is_made_up_in_order(modules, asked, fail_after):
    log = GatherLog(modules)
    assert not log.known
    tile(log, modules)
    whole = list(asked)
    assert whole == list("abcba") and log.known and log.constant and log.count == 5
    asked.clear()
    with pytest.raises(MemoryError):
        tile(log, modules, fail_after)
    for module in modules:  # what recovering from the error does
        module.reshard()
    log.make_up()
    assert asked == whole and log.constant
    asked.clear()
    tile(log, modules)  # the next one begins like any other
    assert asked == whole and log.constant


def test_modules_that_stay_whole_are_freed_after_the_tile(modules, asked):
    log = GatherLog(modules)
    for _ in range(2):
        asked.clear()
        with log.tile():
            modules[0].unshard()  # as a root without a backward
        assert asked == ["a"]
    assert log.constant


def test_gathers_between_tiles_are_counted_and_not_made_up(modules, asked):
    log = GatherLog(modules)
    tile(log, modules)
    modules[0].unshard()
    modules[0].reshard()
    assert log.count == 6 and len(log._issued) == 5  # nothing grows where no tile is recorded
    tile(log, modules)
    assert log.constant


def test_tiles_with_other_gathers_are_noticed(modules):
    log = GatherLog(modules)
    tile(log, modules)
    tile(log, modules[:2])
    assert not log.constant
