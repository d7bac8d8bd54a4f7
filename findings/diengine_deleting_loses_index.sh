#!/usr/bin/env bash
# After DI-engine's DequeBuffer.delete of k rows, its index contains k rows and not the others. Those are no longer deleted or
# updated, and rows that are pushed later take the places of others in it: deleting or updating them changes those. Nothing is
# said, but that update returns False. use_time_check, the middleware of `max_use`, deletes the rows that were drawn often enough:
# most stay and are drawn again, and others are deleted unseen. Only a limit of 1 with batches of all rows is kept.
#
# Needs Python 3.11.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==1.26.4 DI-toolkit==0.3.0 DI-treetensor==0.5.0 easydict==1.14 \
    hickle==5.0.3 gym==0.25.1 gymnasium==1.4.0 pyyaml==6.0.4 mpire==2.10.2 pynng==0.9.0 redis==8.1.0 trueskill==0.4.5 \
    tensorboardX==2.6.5 enum-tools==0.13.0 cloudpickle==3.1.3 tabulate==0.10.0 click==8.5.1 requests==2.34.2 flask==3.1.3 \
    einops==0.8.2 responses==0.26.3 URLObject==3.0.0 wandb==0.19.0
"$work/venv/bin/pip" install --quiet --no-deps DI-engine==0.5.3
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import random
import sys
from collections import Counter

from ding.data.buffer import DequeBuffer
from ding.data.buffer.middleware import use_time_check

ROUNDS, PUSHED, DRAWN = 200, 50, 45
random.seed(0)
print(f"DI-engine {importlib.metadata.version('DI-engine')}, {PUSHED} rows pushed, then {DRAWN} drawn, {ROUNDS} times")

buffer = DequeBuffer(ROUNDS * PUSHED)
buffer.use(use_time_check(buffer, max_use=1))
uses = Counter()
for start in range(0, ROUNDS * PUSHED, PUSHED):
    for row in range(start, start + PUSHED):
        buffer.push({"row": row})
    uses.update(item.data["row"] for item in buffer.sample(DRAWN))
kept = {item.data["row"] for item in buffer.storage}
again = sum(number > 1 for number in uses.values())
unseen = sum(uses[row] == 0 for row in range(ROUNDS * PUSHED) if row not in kept)
print(f"max_use=1; expected: {ROUNDS * (PUSHED - DRAWN):,} rows are left, 0 were drawn twice, 0 deleted before they were drawn")
print(f"happened: {len(kept):,}, {again:,} and {unseen:,}; one row was drawn {max(uses.values())} times")

plain = DequeBuffer(100)
index = [plain.push(row, meta={"priority": 1}).index for row in range(10)]
plain.delete(index[2:4])
done = sum(plain.update(i, meta={"priority": 2}) for i in index)
new = plain.push(10, meta={"priority": 1})
plain.update(new.index, meta={"priority": 3})
changed = [item.data for item in plain.storage if item.meta["priority"] == 3]
print("10 rows, two of them deleted; expected: 8 updates, and then one of the row [10]")
print(f"happened: {done} updates, and then one of the row {changed}")
as_found = again > 1_000 and unseen > 10 and len(kept) > 5_000 and done == 2 and changed == [4]
sys.exit(0 if as_found else "This is no longer so.")
EOF
