"""Whatever happens at whatever point of a re-slotting, the message neither gets lost nor runs twice at once."""

from __future__ import annotations

import pytest

from tests.proof.reslot_walks import DIRECTIONS, STATES, walk


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_event_at_any_point_does_no_harm(direction: str, state: str) -> None:
    assert walk(direction, state, 1) > 200


@pytest.mark.proof
@pytest.mark.deep
@pytest.mark.parametrize("state", ["W", "F", "FW", "D"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_two_events_at_any_points_do_no_harm(direction: str, state: str) -> None:
    assert walk(direction, state, 2) > 20_000
