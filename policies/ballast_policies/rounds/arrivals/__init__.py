"""New jobs between two decisions."""

from ballast_policies.rounds.arrivals.idle import Idle, left_by, place_arrival

__all__ = ["Idle", "left_by", "place_arrival"]
