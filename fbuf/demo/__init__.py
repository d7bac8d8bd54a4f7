"""The main job: Double DQN on real Atari frames, its whole training step one donated `jit`."""
