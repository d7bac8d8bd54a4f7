"""The law of rows drawn from several members, by definition: in plain Python, one row after another."""

from collections.abc import Sequence


def probabilities(masses: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return q of each row of each member: its mass over that of all rows, equal if no row has mass."""
    total, number = sum(sum(own) for own in masses), sum(len(own) for own in masses)
    return [[mass / total if total else 1 / number for mass in own] for own in masses]


def weights(q: Sequence[Sequence[float]], rows: Sequence[float], beta: float) -> list[list[float]]:
    """Return the weight of each row of each member, times whatever all rows have in common.

    In a batch of which member s provides the part `rows[s]`, row i is expected B rows[s] P_s(i) times. The weight corrects that
    to B q(i), then multiplies by (N q(i))^-beta. N counts the rows with q > 0.
    """
    number, out = sum(1 for own in q for each in own if each), []
    for own, part in zip(q, rows, strict=True):
        share = sum(own)
        out.append([share / part * (number * each) ** -beta if each and part else 0.0 for each in own])
    return out
