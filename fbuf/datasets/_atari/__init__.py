"""The Atari DQN replay data set: download, conversion, plan."""
