"""How often to save: the interval at which saving and redoing cost least together.

J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974;
J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS
22(3), 2006.
"""

import math

SECONDS_OF_DAY = 86_400.0
TOO_OFTEN = 500.0  # times what lies between failures: nothing lasts, and exp() has an end


def young_seconds(save_seconds: float, seconds_between_failures: float) -> float:
    """Young's interval between the ends of two saves, which stop training for so long each."""
    return math.sqrt(2 * save_seconds * seconds_between_failures)


def daly_seconds(save_seconds: float, seconds_between_failures: float) -> float:
    """Daly's interval: Young's with the terms that count where saves are not cheap."""
    if save_seconds >= 2 * seconds_between_failures:
        return seconds_between_failures
    part = save_seconds / (2 * seconds_between_failures)
    young = young_seconds(save_seconds, seconds_between_failures)
    return young * (1 + math.sqrt(part) / 3 + part / 9) - save_seconds


def seconds_between_failures(nodes: int, failures_per_node_day: float) -> float:
    """Of a job: any of its nodes ends it."""
    return SECONDS_OF_DAY / (nodes * failures_per_node_day)


def useful_share(
    interval_seconds: float, save_seconds: float, between_failures: float, restart_seconds: float
) -> float:
    """Of all time, that in which steps are taken that last; saves stop training (Daly 2006)."""
    redone = (interval_seconds + save_seconds) / between_failures
    starts = restart_seconds / between_failures
    if redone + starts > TOO_OFTEN:
        return 0.0
    return interval_seconds / (between_failures * math.exp(starts) * math.expm1(redone))


def interval_steps(
    blocked_seconds: float, save_seconds: float, step_seconds: float, between_failures: float
) -> int:
    """Steps between two checkpoints, at least one; a save is whole before the next begins.

    blocked_seconds: for which training stands still; save_seconds: until a checkpoint is whole.
    """
    seconds = max(daly_seconds(blocked_seconds, between_failures), save_seconds)
    return max(1, round(seconds / step_seconds))
