"""The demo: Double DQN on Atari frames, with the whole training step in one donated `jit`."""
