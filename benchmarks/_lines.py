"""The lines of the tables of figures: words, and where in a report each figure is read."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the table.

    Templates may name groups of `question` and `case`, and `{ratio}`; `{spread}`: its quartiles, or, where `among` is given,
    the least and the largest ratio of the rows of the same question whose case matches it.
    """

    benchmark: str
    question: str  # patterns, matched from the start
    case: str
    what: str
    against: str
    shows: str
    among: str | None = None
    headline: bool = False  # also in the README


SB3, ATARI = "Stable-Baselines3", ("Breakout", "MsPacman")
MEAN, EACH = r"geometric mean$", r"(?!geometric)[^,]+$"
LINES = (
    Line(
        "compression",
        r"Bytes of raw .* on the host, (?P<frames>[\d,]+) frames",
        MEAN,
        "bytes of {frames} Atari rows on the host, geometric mean of {games} games",
        "raw obs + next_obs stacks",
        "{ratio}x fewer ({spread})",
        EACH,
        headline=True,
    ),
    *(
        Line(
            "compression",
            question,
            rf"geometric mean, {codec}",
            what,
            f"torchrl `CompressedListStorage`, {label}",
            shows,
            rf"(?!geometric).*, {codec}",
            headline=codec == "zlib" and "stacks of frames" not in what,
        )
        for question, what, shows in (
            (r"Bytes of torchrl's", "bytes of such rows on the host", "{ratio}x fewer ({spread})"),
            (r"Write of 1,024: ", "writing 1,024 frames under jit", "{ratio}x as fast ({spread})"),
            (r"Write of 1,024 that", "writing 1,024 stacks of frames under jit", "{ratio}x as fast ({spread})"),
            (r"Read of 256 pairs of stacks: ", "reading 256 pairs of stacks under jit", "{ratio}x as fast ({spread})"),
        )
        for codec, label in (("zlib", "zlib (its default)"), ("zstandard", "zstandard"))
    ),
    *(
        Line(
            "host_store",
            rf"Bytes of raw .* grew by, (?P<frames>[\d,]+) frames, {label}",
            MEAN,
            f"process memory of {{frames}} Atari frames on the host, {label}, geometric mean of {{games}} games",
            "raw obs + next_obs stacks",
            "{ratio}x fewer ({spread})",
            EACH,
        )
        for label in ("as written", "compressed again")
    ),
    Line(
        "host_store",
        r"Bytes of torchrl's payload .* (?P<frames>[\d,]+) frames",
        MEAN,
        "process memory of {frames} Atari frames on the host, compressed again",
        "torchrl's payload, zlib",
        "{ratio}x fewer ({spread})",
        EACH,
    ),
    *(
        Line(
            "host_store",
            r"Time with (?P<many>[\d,]+) frames over that with (?P<few>[\d,]+)",
            case,
            f"{verb} among {{many}} frames",
            "among {few}",
            "{ratio}x the time",
        )
        for case, verb in (("write", "writing"), ("read", "reading"))
    ),
    *(
        Line(
            "sample",
            r"Sample inside a scan",
            case,
            what,
            "a bare gather of the same frames",
            "{ratio}x the time ({spread})",
        )
        for case, what in (
            (r"256 rows, (?P<size>.*)", "256 frames from a cold buffer of {size}, in a scan"),
            (
                r"256 stacks of 4.*, (?P<size>.*)",
                "256 transitions of 4-stacks and 3 steps from a buffer of {size}, in a scan",
            ),
        )
    ),
    Line(
        "sample",
        r"Bytes of 84x84",
        "",
        "bytes of such transitions in a buffer, all of its state",
        "the same stacks with next stacks",
        "{ratio} of the bytes",
    ),
    Line(
        "slices",
        r"256 slices of 16 rows of (?P<rows>[\d,]+) held, ours in a scan",
        r"flashbax.* in a scan",
        "256 windows of 16 rows of {rows}, in a scan",
        "flashbax's trajectory buffer (which knows no episodes), in a scan",
        "{ratio}x as fast ({spread})",
    ),
    *(
        Line(
            "slices",
            r"256 slices of 16 rows of (?P<rows>[\d,]+) held, one call",
            case,
            "256 windows of 16 rows of {rows}, one call",
            f"torchrl's `SliceSampler`, {label}",
            "{ratio}x as fast ({spread})",
            headline=label == "cached",
        )
        for case, label in (
            (r"torchrl's SliceSampler, cached", "cached"),
            (r"torchrl's SliceSampler(?!, cached)", "not cached"),
        )
    ),
    Line(
        "epoch",
        r"A batch without replacement: ",
        r"(?P<rows>[\d,]+) rows, B=(?P<batch>\d+), in a scan",
        "{batch} of {rows} without replacement, in a scan",
        "`jax.random.permutation`",
        "{ratio}x as fast ({spread})",
    ),
    Line(
        "deduplicated",
        r"Bytes of raw .* on the device, (?P<frames>[\d,]+) frames",
        r"geometric mean of (?P<number>\d+)$",
        "bytes of {frames} Atari rows on the device in `Deduplicated`, geometric mean of {number} games",
        "raw obs + next_obs stacks",
        "{ratio}x fewer ({spread})",
        EACH,
    ),
    Line(
        "deduplicated",
        r"256 transitions of 4-frame stacks inside a scan",
        r"geometric mean of (?P<number>\d+)",
        "reading 256 transitions of stacks from `Deduplicated`, in a scan, geometric mean of {number}",
        "a bare gather of the same frames",
        "{ratio}x the time ({spread})",
        EACH,
    ),
    Line(
        "deduplicated",
        r"Write of 256 frames, ring full: time",
        r"geometric mean of (?P<number>\d+)",
        "writing 256 frames to `Deduplicated`, geometric mean of {number} games",
        "the same to `Compressed`",
        "{ratio}x as fast ({spread})",
        EACH,
    ),
    *(
        Line(
            "dqn_step",
            r"DQN step",
            rf"{name} / device, (?P<where>.*)",
            f"the DQN step of the demo ({{where}}) with {label}",
            "the same with `Device`",
            "{ratio}x the time ({spread})",
            headline=name == "compressed",
        )
        for name, label in (
            ("compressed", "`Compressed`"),
            ("memmap", "`Memmap`"),
            ("deduplicated", "`Deduplicated`"),
            ("compressed, prefetch=1", "`Compressed` and `prefetch=1`"),
        )
    ),
    *(
        Line(
            "priorities",
            r"Prioritized step in a scan: time of flashbax",
            rf"N=(?P<rows>[\d,]+) B={batch}$",
            f"sample, weights and update of {batch} priorities of {{rows}} in a scan",
            "flashbax's tree",
            "{ratio}x as fast ({spread} by rows held)",
            rf"N=[\d,]+ B={batch}$",
            headline=batch == 256,
        )
        for batch in (32, 256, 4096)
    ),
    Line(
        "datasets",
        r"Bytes of stacks with next stacks .* (?P<rows>[\d,]+) rows",
        MEAN,
        "bytes on the disk of a data set of {rows} Atari rows, geometric mean of {games} games",
        "raw obs + next_obs stacks",
        "{ratio}x fewer ({spread})",
        EACH,
    ),
    Line(
        "datasets",
        r"Seconds to make a data set of (?P<rows>[\d,]+) rows",
        MEAN,
        "making such a data set from the files of the DQN replay data set, one process",
        "torchrl's `AtariDQNExperienceReplay`",
        "{ratio}x as fast ({spread})",
        EACH,
    ),
    *(
        Line(
            "datasets",
            r"Seconds to read 256 stacks with next stacks of (?P<rows>[\d,]+) rows: ",
            f"geometric mean, {case}$",
            "reading 256 stacks with next stacks from such a data set, under jit",
            f"torchrl's memory maps, {case}",
            "{ratio}x as fast ({spread})",
            rf"(?!geometric).*, {case}$",
        )
        for case in ("its slice sampler", "its storage alone")
    ),
    *(
        Line(
            "datasets",
            "Seconds to open",
            rf"(?P<rows>[\d,]+) rows in .*, {case}$",
            f"opening a data set of {{rows}} rows again, for {case}",
            "a second",
            "{ratio} s",
        )
        for case in ("rows", "transitions of stacks")
    ),
    *(
        Line("checkpoint", question, case, what, against, shows)
        for question, case, what, against, shows in (
            (
                r"Seconds to save (?P<rows>[\d,]+) frames with",
                "Compressed$",
                "`fbuf.save` of {rows} compressed frames with priorities",
                "writing the same bytes with fsync",
                "{ratio}x the time ({spread})",
            ),
            (
                r"Second save after 1% new rows",
                "seconds$",
                "saving again after 1 % new rows",
                "the first save",
                "{ratio} of the time",
            ),
            (
                r"Second save after 1% new rows",
                "bytes written$",
                "bytes written by saving again after 1 % new rows",
                "the first save",
                "{ratio} of the bytes",
            ),
            (
                r"Seconds to load (?P<rows>[\d,]+) frames, every",
                "from the disk$",
                "`fbuf.load` of {rows} frames, every byte checked",
                "reading the files from the disk",
                "{ratio}x the time ({spread})",
            ),
            (
                r"Seconds to load (?P<rows>[\d,]+) frames, every",
                "from the page cache$",
                "`fbuf.load` of {rows} frames, every byte checked",
                "reading the files from the page cache",
                "{ratio}x the time ({spread})",
            ),
        )
    ),
    *(
        Line(
            "checkpoint",
            rf"{question}, (?P<rows>[\d,]+) frames: the peer",
            f"{peer}$",
            what,
            against,
            shows,
            headline=question == "Seconds to save" and peer == "torchrl memmap",
        )
        for peer, against in (
            ("torchrl memmap", "torchrl's `rb.dumps` of `LazyMemmapStorage`"),
            ("flashbax Vault", "flashbax's Vault"),
        )
        for question, what, shows in (
            ("Seconds to save", "saving {rows} frames (theirs does not wait for the disk)", "{ratio}x as fast"),
            ("Seconds to load", "loading {rows} frames (theirs checks nothing)", "{ratio}x as fast"),
            ("Bytes", "bytes of {rows} saved frames", "{ratio}x fewer"),
        )
    ),
    *(
        Line(
            "topk",
            r"The highest of all rows, (?P<rows>[\d,]+) rows a call",
            rf"{held} held, {case}$",
            f"`TopK`: adding {{rows}} rows to {held} held, {case}",
            "torchrl's `TensorDictMaxValueWriter`",
            "{ratio}x as fast ({spread})",
        )
        for held in ("1,000", "100,000")
        for case in ("as high as those held", "all are higher")
    ),
    *(
        Line(
            "mixture",
            r"A batch of (?P<batch>\d+) of two buffers, half of each: ",
            rf"{case}, exact$",
            f"a batch of {{batch}} from a `Mixture` of two buffers, {case}",
            "half a batch from each",
            "{ratio}x the time ({spread})",
        )
        for case in ("76 bytes a row, prioritized", "stacks of frames, prioritized", "stacks of frames, compressed")
    ),
    *(
        Line(
            "loop",
            "`Replay` of the view that is recommended",
            rf"{kind}, {view}: add \+ sample$",
            f'`Replay.add` of a row and `sample(256, to="torch")`, {kind}, {what}',
            f"{SB3}'s `ReplayBuffer`, uniform",
            "{ratio}x the time ({spread})",
            headline=view == "Transition, n = 1",
        )
        for kind in ("uniform", "prioritized")
        for view, what in (
            ("Transition, n = 1", "transitions"),
            ("Transition, n = 3", "transitions of 3 steps"),
            ("Transition, n = 1, 8 lanes", "transitions of 8 environments"),
            (r"Sequence\(16\)", "windows of 16 rows"),
        )
    ),
    *(
        Line(
            "loop",
            f"A {script} script",
            rf"(?P<steps>[\d,]+) steps{of_each}, Transition$",
            f"a {script} script (torch, {what}, {{steps}} steps) with `Transition`",
            f"the same with the buffer of {SB3}",
            "{ratio}x the time ({spread})",
            headline=True,
        )
        for script, of_each, what in (("DQN", "", "CartPole"), ("SAC", " of each", "8 environments"))
    ),
    *(
        Line("loop", question, case, what, against, shows)
        for question, case, what, against, shows in (
            (r"`Replay.add` of one row", "SB3$", "`Replay.add` of one NumPy row", SB3, "{ratio}x the time ({spread})"),
            (r"`Replay.sample\(256", "SB3$", '`Replay.sample(256, to="torch")`', SB3, "{ratio}x the time ({spread})"),
            (
                "A DQN script",
                r"(?P<steps>[\d,]+) steps$",
                "a DQN script (torch, CartPole, {steps} steps)",
                f"the same with the buffer of {SB3}",
                "{ratio}x the time ({spread})",
            ),
            *(
                (
                    "Prioritized step in a Python loop",
                    f"{peer}$",
                    "prioritized `Replay`: add 1 row, draw 256 of 100,000, set priorities",
                    peer,
                    "{ratio}x as fast ({spread})",
                )
                for peer in ("cpprb", "torchrl", "flashbax")
            ),
            *(
                (
                    "A jitted method",
                    f"{case}$",
                    f"jitted {what}, the state donated",
                    "flashbax",
                    "{ratio}x as fast ({spread})",
                )
                for case, what in (
                    ("flat, add", "`add` of one row"),
                    ("flat, extend", "`extend` with 256 rows"),
                    ("flat, sample", "`sample` of 256 rows"),
                    ("prioritized, step", "prioritized step of 256 rows"),
                )
            ),
        )
    ),
    *(
        Line(
            "start",
            "First call of a step",
            f"{case} / (?P<peer>.*)",
            f"tracing and compiling a step (add, sample{more}), {case}",
            "{peer}",
            "{ratio}x the time ({spread})",
        )
        for case, more in (("uniform", ""), ("Transition", ""), ("prioritized", ", update"))
    ),
    *(
        Line(
            "sb3",
            question,
            rf"(?P<where>{game}.*)",
            f"{what}, {{where}}",
            against,
            shows,
        )
        for question, what, against, shows, games in (
            (
                "Bytes a row",
                "bytes a row in Stable-Baselines3, written twice",
                "growth of the process",
                "{ratio}",
                ATARI,
            ),
            ("SB3's add", "`add` in Stable-Baselines3", "its own buffer", "{ratio}x the time", ATARI),
            (r"SB3's sample\(32\)", "`sample(32)` in Stable-Baselines3", "its own buffer", "{ratio}x the time", ATARI),
            ("Pickle", "bytes of a pickle in Stable-Baselines3", "its own buffer", "{ratio}x fewer", ATARI),
            ("A whole run", "a run of DQN in Stable-Baselines3", "its own buffer", "{ratio}x the time", ("Breakout",)),
        )
        for game in games
    ),
    *(
        Line("torchrl", rf"{question}.*{peer}", "(?P<where>.*)", f"{what}, {{where}}", f"`{peer}`", shows)
        for question, peer, what, shows in (
            ("Bytes a row", "CompressedListStorage", "bytes a row in torchrl", "{ratio}x fewer"),
            (r"torchrl's extend", "CompressedListStorage", "`extend` in torchrl", "{ratio}x as fast ({spread})"),
            (r"torchrl's sample", "CompressedListStorage", "`sample` in torchrl", "{ratio}x as fast ({spread})"),
            (r"torchrl's SliceSampler", "LazyMemmapStorage", "slices in torchrl", "{ratio}x as fast ({spread})"),
        )
    ),
    *(
        Line(
            "sharded",
            question,
            f"B={batch}$",
            f"a step of a sharded buffer on {devices}, B = {batch}",
            against,
            "{ratio}x the time ({spread})",
        )
        for question, devices, against in (
            ("A step of a sharded buffer on one device", "one device", "the unsharded step"),
            (
                r"A step on 8 fake devices: its time over the unsharded step and \d+ equal",
                "eight fake devices of two cores",
                "the unsharded step and equal empty collectives",
            ),
        )
        for batch in ("256", "4,096")
    ),
    *(
        Line("ray", question, "256 rows", what, against, "{ratio}x as fast ({spread})")
        for question, what, against in (
            ("Rows a second written", "writing to a buffer in an actor of Ray", "torchrl's `RayReplayBuffer`"),
            ("Uniform batches a second", "uniform batches from an actor of Ray", "torchrl's `RayReplayBuffer`"),
            ("Prioritized draw and update", "prioritized step in an actor of Ray", "the same in this process"),
        )
    ),
    Line(
        "import",
        r"`import fbuf` in a fresh process",
        "warm page cache",
        "`import fbuf` in a fresh process, files in the page cache",
        "`import jax`",
        "{ratio}x the time ({spread})",
    ),
)
