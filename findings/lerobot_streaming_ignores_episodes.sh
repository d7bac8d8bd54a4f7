#!/usr/bin/env bash
# lerobot's StreamingLeRobotDataset stores `episodes` and never reads it: all episodes are streamed, also those that were held
# out. Rows more than 100 steps before or after the current one are returned as padding, with a flag that says so and another
# row's values, though the episode has them. LeRobotDataset selects the episodes and returns the rows. Filter by
# row["episode_index"], and keep delta_timestamps within 100 steps.
#
# Needs Python 3.12 or newer, and 6 GB of disk, most of them for torch's CUDA.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet lerobot[dataset]==0.6.1 torch==2.11.0 torchvision==0.26.0 numpy==2.2.6
cd "$work"
HF_HUB_OFFLINE=1 HF_HOME="$work/home" HF_DATASETS_DISABLE_PROGRESS_BARS=1 "$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import logging
import sys

logging.disable(logging.WARNING)
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.datasets.streaming_dataset import StreamingLeRobotDataset

EPISODES, STEPS, FPS, HELD_OUT = 5, 200, 10, 4

vector = {"dtype": "float32", "shape": (2,), "names": None}
data = LeRobotDataset.create("me/count", FPS, {"observation.state": vector, "action": vector}, root="count", use_videos=False)
for episode in range(EPISODES):
    for step in range(STEPS):
        value = np.float32([step, episode])
        data.add_frame({"observation.state": value, "action": value, "task": "count"})
    data.save_episode()
data.finalize()

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("lerobot", "datasets", "torch")), sep=", ")
chosen = [episode for episode in range(EPISODES) if episode != HELD_OUT]
plain = LeRobotDataset("me/count", root="count", episodes=chosen)
stream = StreamingLeRobotDataset("me/count", root="count", episodes=chosen)
expected, happened = ({int(row["episode_index"]) for row in rows} for rows in (plain, stream))
print(f"episodes={chosen}; expected: rows of {sorted(expected)}")
print(f"happened: rows of {sorted(happened)}")

back = {"observation.state": [-120 / FPS, -50 / FPS, 0.0]}
plain = LeRobotDataset("me/count", root="count", delta_timestamps=back)
stream = StreamingLeRobotDataset("me/count", root="count", delta_timestamps=back)
row = plain[STEPS - 1]
print("steps 120 and 50 before step 199, and itself; expected:", end=" ")
print(row["observation.state"][:, 0].tolist(), "padded:", row["observation.state_is_pad"].tolist())
row = next(row for row in stream if row["frame_index"] == STEPS - 1)
values, padded = row["observation.state"][:, 0].tolist(), row["observation.state_is_pad"].tolist()
print("happened:", values, "padded:", padded)
as_found = happened == expected | {HELD_OUT} and values == [149, 149, 199] and padded == [True, False, False]
sys.exit(0 if as_found else "This is no longer so.")
EOF
