"""Draws who waits for whom: three workers, of which one is slow, in each consistency mode.

    python docs/timelines.py [--out FOLDER]

What is drawn is computed by the rule of each mode from how long each step takes; messages take no time here.
"""

from __future__ import annotations

from pictures import WIDTH, Scheme, box, folder_asked_for, line, picture, words, write

DURATIONS = ((2, 2, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2), (2, 2, 2, 2, 3, 2, 2, 2, 2, 2, 2, 2), (4, 4, 5, 4, 4, 4, 4, 4, 4, 4, 4, 4))
"""Length of each step of each worker, in units of time."""

UNTIL = 24
AHEAD = {"sync": 0, "ssp:2": 2, "async": None}
"""Steps that a worker may be ahead of the slowest one when it begins another."""

SAYS = {
    "sync": "an update is made of one gradient of each worker; all wait for the slowest",
    "ssp:2": "each gradient is an update; who is more than 2 steps ahead of the slowest waits",
    "async": "each gradient is an update; nobody waits",
}
LEFT, TOP, ROW = 110, 58, 26


def schedule(ahead: int | None) -> list[list[tuple[int, int]]]:
    """Begin and end of each worker's steps, until the time is over."""
    steps: list[list[tuple[int, int]]] = [[] for _ in DURATIONS]
    for now in range(UNTIL):
        slowest = min(sum(end <= now for _, end in done) for done in steps)
        for done, durations in zip(steps, DURATIONS, strict=True):
            free = not done or done[-1][1] <= now
            if free and (ahead is None or len(done) - slowest <= ahead):
                done.append((now, now + durations[len(done)]))
    return steps


def updates(mode: str, steps: list[list[tuple[int, int]]]) -> list[int]:
    """Moments at which the parameters change."""
    if mode == "sync":
        return [max(end for _, end in round_) for round_ in zip(*steps, strict=False)]
    return [end for done in steps for _, end in done]


def drawn(scheme: Scheme) -> str:
    """The picture: a panel for each mode."""
    unit = (WIDTH - LEFT - 24) / UNTIL
    parts = [
        words(24, 27, "Three workers, of which number 2 is slow", "title"),
        box(392, 16, 22, 12, scheme.ours[0]),
        words(420, 26, "computes a gradient", "faint"),
        box(556, 16, 22, 12, scheme.grid),
        words(584, 26, "waits", "faint"),
        line(641, 14, 641, 30, scheme.bad, 2),
        words(650, 26, "an update", "faint"),
    ]
    y = float(TOP)
    for mode, ahead in AHEAD.items():
        steps = schedule(ahead)
        when = sorted({time for time in updates(mode, steps) if time <= UNTIL})
        count = sum(time <= UNTIL for time in updates(mode, steps))
        parts += [words(24, y + 4, mode, "title"), words(LEFT, y + 4, f"{SAYS[mode]}: {count} updates", "faint")]
        y += 16
        for worker, done in enumerate(steps):
            parts.append(words(LEFT - 12, y + 14, f"worker {worker}", "faint", "end"))
            parts.append(box(LEFT, y + 2, unit * UNTIL, ROW - 8, scheme.grid))
            for begin, end in done:
                width = unit * (min(end, UNTIL) - begin) - 2
                parts.append(box(LEFT + unit * begin + 1, y + 2, width, ROW - 8, scheme.ours[worker == 2]))
            y += ROW
        parts += [line(LEFT + unit * time, y, LEFT + unit * time, y + 10, scheme.bad, 2) for time in when]
        y += 38
    label = "Timelines of three workers in sync, ssp:2 and async: " + "; ".join(
        f"{mode}: {text}" for mode, text in SAYS.items()
    )
    return picture(scheme, y - 10, label, parts)


def main() -> None:
    """Draw the timelines."""
    write(folder_asked_for(__doc__), "timelines", drawn)


if __name__ == "__main__":
    main()
