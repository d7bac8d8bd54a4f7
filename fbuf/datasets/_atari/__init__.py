"""The Atari DQN replay data set: plan, download, conversion."""
