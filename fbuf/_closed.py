"""What ends the loops of threads that share a `Replay`."""


class ReplayClosed(RuntimeError):
    """The `Replay` was closed: nothing is added or drawn any more. What is held can still be read and saved.

    Example:
      >>> import fbuf
      >>> with fbuf.Replay(fbuf.Buffer(100), {"t": 0}) as replay:
      ...     replay.add({"t": 1})
      >>> try:
      ...     replay.add({"t": 2})
      ... except fbuf.ReplayClosed:
      ...     print(len(replay))
      1
    """
